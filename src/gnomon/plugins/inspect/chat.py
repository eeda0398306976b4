"""Any Inspect AI model as a :class:`gnomon.core.chat.ChatModel`.

Engines are synchronous and know nothing of Inspect, which is asynchronous. In a solver an engine runs in a thread, and
its model calls back:

    found = await anyio.to_thread.run_sync(engine, InspectChat(get_model()))

The requests of one call go out side by side; Inspect's limits on connections, tokens and cost hold as ever, and every
call is in the transcript. In a plain script, without an event loop, it works as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gnomon.core.chat import (
    ChatReply,
    ChatRequest,
    Message,
    StopReason,
    TokenLogprob,
    ToolCall,
    Usage,
)
from gnomon.core.errors import GnomonError, UsageError

if TYPE_CHECKING:
    from inspect_ai.model import Model, ModelOutput

CHOICES = "choices"
"""Key of `GenerateConfig.extra_body` by which Gnomon's own provider hears of a request's choices, and of the metadata
in which it returns their log-probabilities."""

_STOPS: dict[str, StopReason] = {
    "stop": "stop",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "refused",
}


class InspectChat:
    """An Inspect AI model, whoever provides it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name = str(model)

    @property
    def simulated(self) -> bool:
        """Whether it is Inspect's mock, or Gnomon's provider with a simulation behind it."""
        own = getattr(self._model.api, "chat", None)
        return self.name.startswith("mockllm/") or bool(getattr(own, "simulated", False))

    def generate(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """One reply a request, in the requests' order.

        Raises:
            UsageError: `choices` with another provider than Gnomon's own; a call in the event loop's own thread, which
                would wait for itself.
            GnomonError: a reply without content, with the provider's error.
        """
        import anyio

        if any(request.choices for request in requests) and not hasattr(self._model.api, "chat"):
            raise UsageError(
                f"{self.name} can't be asked how likely given texts are. Use a model of Gnomon's provider (gnomon/…), "
                "or let it answer in words."
            )
        if _has_loop():
            raise UsageError(
                "A chat model waits for its replies, so in a coroutine it needs a thread of its own: await "
                "anyio.to_thread.run_sync(engine, model)."
            )
        try:
            anyio.from_thread.check_cancelled()
        except RuntimeError:  # no event loop has started this thread
            return anyio.run(self._all, list(requests))
        return anyio.from_thread.run(self._all, list(requests))

    async def _all(self, requests: list[ChatRequest]) -> list[ChatReply]:
        from inspect_ai.util import collect

        try:
            found: list[ChatReply] = await collect(*(self._one(request) for request in requests))
        except ExceptionGroup as several:  # engines expect what a single call raises
            raise several.exceptions[0] from None
        return found

    async def _one(self, request: ChatRequest) -> ChatReply:
        from inspect_ai.model import GenerateConfig
        from inspect_ai.tool import ToolInfo, ToolParams

        config = GenerateConfig(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_tokens=request.max_tokens,
            stop_seqs=list(request.stop) or None,
            seed=request.seed,
            logprobs=request.logprobs or None,
            extra_body={CHOICES: list(request.choices)} if request.choices else None,
        )
        tools = [
            ToolInfo(
                name=tool.name,
                description=tool.description,
                parameters=ToolParams.model_validate(dict(tool.parameters)),
            )
            for tool in request.tools
        ]
        output = await self._model.generate(
            list(map(inspect_message, request.messages)), tools, config=config
        )
        return self._reply(output, request)

    def _reply(self, output: ModelOutput, request: ChatRequest) -> ChatReply:
        if output.error or not output.choices:
            raise GnomonError(f"{self.name} gave no reply: {output.error or 'it came back empty'}.")
        choice, usage = output.choices[0], output.usage
        return ChatReply(
            message=own_message(choice.message),
            model=output.model or self.name,
            stop="choice" if request.choices else _STOPS.get(choice.stop_reason, "unknown"),
            usage=Usage()
            if usage is None
            else Usage(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens),
            logprobs=None
            if choice.logprobs is None
            else tuple(TokenLogprob(token=one.token, logprob=one.logprob) for one in choice.logprobs.content),
            choice_logprobs=tuple((output.metadata or {})[CHOICES]) if request.choices else None,
        )


def _has_loop() -> bool:
    """Whether an event loop runs in this thread."""
    import anyio

    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return False
    return True


def inspect_message(message: Message) -> Any:
    """As Inspect's."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser
    from inspect_ai.tool import ToolCall as InspectToolCall

    if message.role == "system":
        return ChatMessageSystem(content=message.content)
    if message.role == "user":
        return ChatMessageUser(content=message.content)
    if message.role == "tool":
        return ChatMessageTool(content=message.content, tool_call_id=message.tool_call_id)
    calls = [
        InspectToolCall(id=call.id, function=call.name, arguments=dict(call.arguments))
        for call in message.tool_calls
    ]
    return ChatMessageAssistant(content=message.content, tool_calls=calls or None)


def own_message(message: Any) -> Message:
    """From Inspect's: its text, and its calls of tools."""
    calls = tuple(
        ToolCall(id=call.id, name=call.function, arguments=call.arguments)
        for call in (getattr(message, "tool_calls", None) or ())
    )
    of = (message.tool_call_id or "unknown") if message.role == "tool" else None
    return Message(role=message.role, content=message.text, tool_calls=calls, tool_call_id=of)
