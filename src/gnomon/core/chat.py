"""How methods and worlds talk to a model: requests in, replies out, many at a time, in order.

Here:  the protocol :class:`ChatModel` and what it exchanges; :class:`Metered`, which counts calls and tokens and
       refuses a call that a budget doesn't allow before it is made.
Not here: a local Transformers model (`chat_local`), a simulation (`chat_simulated`), Inspect AI's providers
       (`gnomon.plugins.inspect`). Nothing here imports any of them.

Methods are plain synchronous code. Requests that don't depend on each other go into one call, so that an adapter can
batch them (a local model) or send them side by side (a provider). Equal requests to a local or simulated model get
equal replies, whatever else is in the call: the seed is part of the request.

>>> from gnomon.core.chat_simulated import SimulatedChat
>>> model = Metered(SimulatedChat(lambda request, draw: request.messages[-1].content.upper()), calls=2)
>>> [reply.text for reply in model.generate([ask("one"), ask("two")])]
['ONE', 'TWO']
>>> model.generate([ask("three")])
Traceback (most recent call last):
gnomon.core.chat.BudgetExceeded: 2 of 2 calls to simulated are used, and 1 more is asked for. ...
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from .errors import GnomonError, UsageError, number, unknown

__all__ = [
    "BudgetExceeded",
    "ChatModel",
    "ChatReply",
    "ChatRequest",
    "Message",
    "Metered",
    "StopReason",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Usage",
    "ask",
    "require_replies",
]

Role = Literal["system", "user", "assistant", "tool"]
StopReason = Literal["stop", "length", "tool_calls", "choice", "refused", "unknown"]
"""Why a reply ended: by itself or at a stop text, at `max_tokens`, with calls of tools, as one of `choices`, …"""


class BudgetExceeded(GnomonError):
    """A call was not made because the budget doesn't allow it."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool that the model wants to be called."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    """JSON values by name."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON Schema of an object."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise unknown("role", self.role, get_args(Role))
        if self.tool_calls and self.role != "assistant":
            raise UsageError(f"A message of the {self.role} calls tools; only the assistant can.")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise UsageError(
                "A tool's result names the call that it answers (tool_call_id), and no other message does."
            )


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What a model is asked, with all that its reply depends on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 256
    """Of the reply."""
    stop: tuple[str, ...] = ()
    """Texts at which the reply ends; they are not part of it."""
    seed: int = 0
    """Ask again with another one for another sample."""
    logprobs: bool = False
    """Whether the reply says how likely its tokens were, at temperature 1."""
    choices: tuple[str, ...] = ()
    """If given, the reply is one of these texts: the likeliest one, or drawn by likelihood ** (1 / temperature)."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise UsageError("A request without messages asks nothing.")
        for name, low in (("max_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UsageError(f"{name}={value!r} must be a whole number from {low} on.")
        if not 0 <= number(self.temperature) < float("inf"):
            raise UsageError(f"temperature={self.temperature!r} must be finite and at least 0 (0 is greedy).")
        if self.top_p is not None and not 0 < number(self.top_p) <= 1:
            raise UsageError(f"top_p={self.top_p!r} must lie in (0, 1]. Use None to keep all tokens.")
        if self.top_k is not None and not number(self.top_k) >= 1:
            raise UsageError(f"top_k={self.top_k!r} would keep no token. Use 1 or more, or None for all.")
        if not all(self.stop):
            raise UsageError("An empty stop text would end every reply before it begins. Leave it out.")
        if len({tool.name for tool in self.tools}) < len(self.tools):
            raise UsageError("Two tools have one name, so a call of it could mean either.")
        if self.choices and (len(set(self.choices)) < len(self.choices) or not all(self.choices)):
            raise UsageError(f"choices={self.choices!r} must be different texts that aren't empty.")
        if self.choices and self.tools:
            raise UsageError("A reply can't both be one of `choices` and call tools. Leave one of them out.")

    def digest(self, *more: Any) -> int:
        """62 bits that are equal for equal requests, in any process: a seed for everything the reply draws."""
        text = json.dumps([asdict(self), *more], sort_keys=True, ensure_ascii=True, default=dict)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What replies cost. None: the model didn't say how many tokens; a sum with it doesn't, either."""

    calls: int = 1
    input_tokens: int | None = None
    output_tokens: int | None = None

    def __add__(self, other: Usage) -> Usage:
        def both(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a + b

        return Usage(
            calls=self.calls + other.calls,
            input_tokens=both(self.input_tokens, other.input_tokens),
            output_tokens=both(self.output_tokens, other.output_tokens),
        )


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token of a reply and its log-probability in nats."""

    token: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """What a model answered."""

    message: Message
    model: str
    """Who answered, for records and reports."""
    usage: Usage
    stop: StopReason = "stop"
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the reply's tokens, if asked for and known; with `choices`, those of the chosen text."""
    choice_logprobs: tuple[float, ...] | None = None
    """log p of each of the request's `choices`, in nats, summed over its tokens."""

    @property
    def text(self) -> str:
        """The message's content."""
        return self.message.content


@runtime_checkable
class ChatModel(Protocol):
    """Whatever answers requests."""

    @property
    def name(self) -> str:
        """Who answers, for records and reports."""

    @property
    def simulated(self) -> bool:
        """Whether this is no language model. Reports say so; it is never passed off as one."""

    def generate(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """One reply a request, in the requests' order.

        Raises:
            UsageError: a request that this model can't fulfil, before any is answered. Nothing is ignored silently.
        """


def ask(content: str, *, system: str | None = None, **settings: Any) -> ChatRequest:
    """The request with one message of the user, perhaps after one of the system."""
    first = [] if system is None else [Message(role="system", content=system)]
    return ChatRequest(messages=(*first, Message(role="user", content=content)), **settings)


def require_replies(model: ChatModel, replies: Sequence[ChatReply], requests: Sequence[ChatRequest]) -> None:
    """Refuse an answer that pairs replies with the wrong requests.

    Raises:
        GnomonError: another number of replies than of requests.
    """
    if len(replies) != len(requests):
        raise GnomonError(f"{model.name} gave {len(replies)} replies to {len(requests)} requests.")


class Metered:
    """A model with a meter and a budget: counts what is asked, refuses before a call what would go beyond.

    A call whose model fails counts, because it may have been answered and paid for. Usable from several threads.
    Budgets nest: an episode's inside an experiment's.
    """

    def __init__(
        self, model: ChatModel, *, calls: int | None = None, output_tokens: int | None = None
    ) -> None:
        """
        Args:
            calls: how many requests may be made; None is without end.
            output_tokens: how many tokens replies may have together. A request is allowed if its `max_tokens` still
                fit, so that the budget holds whatever is answered.

        Raises:
            UsageError: a negative budget.
        """
        for name, value in (("calls", calls), ("output_tokens", output_tokens)):
            if value is not None and not number(value) >= 0:
                raise UsageError(f"{name}={value!r} must be at least 0, or None for no limit.")
        self._model, self._lock = model, threading.Lock()
        self._limits = {"calls": calls, "output tokens": output_tokens}
        self._used = {"calls": 0, "output tokens": 0}
        self._usage = Usage(calls=0, input_tokens=0, output_tokens=0)

    @property
    def name(self) -> str:
        """The inner model's name."""
        return self._model.name

    @property
    def simulated(self) -> bool:
        """Whether the inner model is a simulation."""
        return self._model.simulated

    @property
    def usage(self) -> Usage:
        """Calls made, and tokens of the replies that came."""
        with self._lock:
            return Usage(
                calls=self._used["calls"],
                input_tokens=self._usage.input_tokens,
                output_tokens=self._usage.output_tokens,
            )

    @property
    def calls_left(self) -> int | None:
        """Calls that the budget still allows; None without one."""
        limit = self._limits["calls"]
        with self._lock:
            return None if limit is None else limit - self._used["calls"]

    def generate(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """As the inner model's.

        Raises:
            BudgetExceeded: the requests together don't fit; none of them is made.
        """
        asked = {"calls": len(requests), "output tokens": sum(request.max_tokens for request in requests)}
        with self._lock:
            for what, limit in self._limits.items():
                if limit is not None and self._used[what] + asked[what] > limit:
                    raise BudgetExceeded(
                        f"{self._used[what]} of {limit} {what} to {self.name} are used, and {asked[what]} more "
                        f"{'is' if asked[what] == 1 else 'are'} asked for. Nothing was asked. Raise the budget, or ask "
                        "for less."
                    )
            for what, count in asked.items():
                self._used[what] += count
        replies = self._model.generate(requests)
        require_replies(self._model, replies, requests)
        with self._lock:
            for request, reply in zip(requests, replies, strict=True):
                self._usage += reply.usage
                if reply.usage.output_tokens is not None:  # what was set aside and not needed comes back
                    self._used["output tokens"] += (
                        min(reply.usage.output_tokens, request.max_tokens) - request.max_tokens
                    )
        return replies


def total(usages: Iterable[Usage]) -> Usage:
    """The sum, nothing for nothing."""
    return sum(usages, Usage(calls=0, input_tokens=0, output_tokens=0))
