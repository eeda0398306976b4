"""Inspect's provider `gnomon/…`: models of this machine that Gnomon knows, in batches.

    get_model("gnomon/smollm2-135m")                              # any name that gnomon.core.models.load takes
    get_model("gnomon/./my-model", mode="setmask+setpe")          # reads <set> markup without an order
    get_model("gnomon/pupil", chat=SimulatedChat(…))              # any ChatModel

Requests that wait while the model is at work form the next batch. (Inspect's own `hf/…` draws from global seeds and
without a seed for each request; here equal requests get equal replies.)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from gnomon.core.chat import ChatModel, ChatReply, ChatRequest, Tool
from gnomon.core.errors import UsageError

from .chat import CHOICES, own_message

if TYPE_CHECKING:
    from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput
    from inspect_ai.tool import ToolChoice, ToolInfo

MOST_AT_ONCE = 64
"""Requests that Inspect has on their way at a time, and so of a batch's requests at most."""

_STOPS = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "refused": "content_filter",
    "unknown": "unknown",
}


def chat_model(name: str, **options: Any) -> ChatModel:
    """The model behind a name: with `mode` (and `canonical`) one that reads sets, else an ordinary one.

    Raises:
        UsageError, GnomonError: as `gnomon.core.models.load`; `mode` as `SetLLM`.
    """
    from gnomon.core.chat_local import LocalChat
    from gnomon.core.models import load
    from gnomon.methods.layers.set_llm import SetChat

    size: dict[str, Any] = {"batch_size": int(options.pop("batch_size"))} if "batch_size" in options else {}
    sets = {key: options.pop(key) for key in ("mode", "canonical") if key in options}
    known = {"dtype", "device", "attn"}
    if odd := options.keys() - known:
        raise UsageError(
            f"The provider gnomon/… doesn't know {min(odd)!r}. It takes chat, mode, canonical, batch_size, dtype, "
            "device and attn."
        )
    loaded = load(name, **options)
    if sets:
        return SetChat(loaded.model, loaded.tokenizer, name=loaded.name, **sets, **size)
    return LocalChat(loaded.model, loaded.tokenizer, name=loaded.name, **size)


@functools.cache
def provider() -> Any:
    """The class, made when Inspect asks for it."""
    import anyio
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelOutput,
        ModelUsage,
    )
    from inspect_ai.tool import ToolCall as InspectToolCall

    class GnomonAPI(ModelAPI):  # type: ignore[misc]
        """A :class:`ChatModel` as an Inspect model."""

        def __init__(
            self,
            model_name: str,
            base_url: str | None = None,
            api_key: str | None = None,
            config: GenerateConfig = GenerateConfig(),  # noqa: B008  as Inspect's own
            *,
            chat: ChatModel | None = None,
            **options: Any,
        ) -> None:
            super().__init__(model_name, base_url, api_key, [], config)
            self.chat = chat or chat_model(model_name, **options)
            self._waiting: list[_Waiting] = []
            self._working = anyio.Lock()

        async def generate(
            self,
            input: list[ChatMessage],
            tools: list[ToolInfo],
            tool_choice: ToolChoice,
            config: GenerateConfig,
        ) -> ModelOutput:
            """The reply to one conversation; it may share a batch with others that wait."""
            if tool_choice not in ("auto", "none"):
                raise UsageError(f"tool_choice={tool_choice!r}: {self.chat.name} chooses by itself.")
            request = _request(input, tools if tool_choice == "auto" else [], config)
            return output(self.chat.name, await self._answered(request))

        async def _answered(self, request: ChatRequest) -> ChatReply:
            own = _Waiting(request)
            self._waiting.append(own)
            async with self._working:  # who comes first answers for all who wait by then
                if own.reply is None and own.error is None:
                    batch, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
                    try:
                        replies = await anyio.to_thread.run_sync(
                            self.chat.generate, [one.request for one in batch]
                        )
                    except Exception as error:
                        for one in batch:
                            one.error = error
                    else:
                        for one, reply in zip(batch, replies, strict=True):
                            one.reply = reply
            if own.reply is None:
                assert own.error is not None
                raise own.error
            return own.reply

        def max_connections(self) -> int:
            """How many requests may wait for the next batch."""
            return MOST_AT_ONCE

        def connection_key(self) -> str:
            return f"gnomon/{self.model_name}"

        def collapse_user_messages(self) -> bool:
            return True

    def output(name: str, reply: ChatReply) -> ModelOutput:
        calls = [
            InspectToolCall(id=call.id, function=call.name, arguments=dict(call.arguments))
            for call in reply.message.tool_calls
        ]
        logprobs = None
        if reply.logprobs is not None:
            logprobs = Logprobs(
                content=[Logprob(token=one.token, logprob=one.logprob) for one in reply.logprobs]
            )
        used = (reply.usage.input_tokens or 0, reply.usage.output_tokens or 0)
        return ModelOutput(
            model=name,
            choices=[
                ChatCompletionChoice(
                    message=ChatMessageAssistant(
                        content=reply.text, tool_calls=calls or None, model=name, source="generate"
                    ),
                    stop_reason=_STOPS.get(reply.stop, "stop"),
                    logprobs=logprobs,
                )
            ],
            usage=ModelUsage(input_tokens=used[0], output_tokens=used[1], total_tokens=sum(used)),
            metadata=None if reply.choice_logprobs is None else {CHOICES: list(reply.choice_logprobs)},
        )

    return GnomonAPI


class _Waiting:
    """A request, and later its reply or what went wrong."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.reply: ChatReply | None = None
        self.error: Exception | None = None


def _request(input: list[ChatMessage], tools: list[ToolInfo], config: GenerateConfig) -> ChatRequest:
    """Inspect's defaults become ours where it names none: greedy, seed 0, at most 256 tokens."""
    for name in ("num_choices", "best_of"):
        if (getattr(config, name) or 1) > 1:
            raise UsageError(f"{name}={getattr(config, name)}: ask again with another seed instead.")
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "response_schema"):
        if getattr(config, name):
            raise UsageError(f"The provider gnomon/… doesn't know {name}. Leave it out.")
    settings = {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": config.seed}
    return ChatRequest(
        messages=tuple(map(own_message, input)),
        tools=tuple(
            Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters.model_dump(exclude_none=True),
            )
            for tool in tools
        ),
        top_p=config.top_p,
        top_k=config.top_k,
        stop=tuple(config.stop_seqs or ()),
        logprobs=bool(config.logprobs),
        choices=tuple((config.extra_body or {}).get(CHOICES, ())),
        **{key: value for key, value in settings.items() if value is not None},
    )
