"""A stand-in for a language model: a rule that answers, deterministic and free, for tests and for mechanisms.

What it draws follows from the request alone (messages, settings, seed), in any process and any batch. Its name begins
with "simulated", and what is measured with it says something about a mechanism, never about language models.

>>> from gnomon.core.chat import ask
>>> def sums(request):
...     a, b = map(int, request.messages[-1].content.split("+"))
...     return str(a + b), [str(a + b + 1), str(a + b - 1)]
>>> pupil = SimulatedChat.of_competence(sums, 0.75)
>>> pupil.name
'simulated, competence 0.75'
>>> replies = pupil.generate([ask("20+22", seed=seed) for seed in range(400)])
>>> 280 < sum(reply.text == "42" for reply in replies) < 320
True
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .chat import ChatReply, ChatRequest, Message, Usage
from .errors import GnomonError, UsageError, number

SIMULATED = "simulated"

Rule = Callable[[ChatRequest, random.Random], "str | Message"]
"""(request, source of draws) -> the reply's text, or its message where it calls tools."""
Solution = Callable[[ChatRequest], "tuple[str, Sequence[str]]"]
"""request -> the right reply, and the wrong ones."""


class SimulatedChat:
    """A :class:`gnomon.core.chat.ChatModel` that is a rule. Words, cut at spaces, count as its tokens."""

    simulated = True

    def __init__(self, rule: Rule, *, name: str = "") -> None:
        """
        Args:
            rule: has to answer with the request and its draws alone, or replies depend on what was asked before.
            name: what it simulates; "simulated" comes before it.
        """
        self._rule = rule
        self.name = f"{SIMULATED}, {name}" if name else SIMULATED

    @classmethod
    def of_competence(cls, solution: Solution, competence: float, *, name: str = "") -> SimulatedChat:
        """One that gives the right reply with probability `competence`, else a wrong one, each equally likely.

        Raises:
            UsageError: no probability; a question without wrong replies, unless competence is 1.
        """
        if not 0 <= number(competence) <= 1:
            raise UsageError(f"competence={competence!r} must lie between 0 and 1.")

        def rule(request: ChatRequest, draw: random.Random) -> str:
            right, wrong = solution(request)
            if draw.random() < competence:
                return right
            if not wrong:
                raise UsageError(
                    f"There is no wrong reply to give with competence {competence}. Name one, or use competence 1."
                )
            return draw.choice(list(wrong))

        return cls(rule, name=", ".join(filter(None, (name, f"competence {competence:g}"))))

    def generate(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """One reply a request.

        Raises:
            UsageError: log-probabilities are asked for, which a rule doesn't have.
            GnomonError: the rule answers with none of the choices, or calls a tool that there isn't.
        """
        if any(request.logprobs for request in requests):
            raise UsageError(
                f"{self.name} has no log-probabilities. Ask a local model, or leave logprobs out."
            )
        return [self._reply(request) for request in requests]

    def _reply(self, request: ChatRequest) -> ChatReply:
        found = self._rule(request, random.Random(request.digest(self.name)))
        message = found if isinstance(found, Message) else Message(role="assistant", content=found)
        known = {tool.name for tool in request.tools}
        if odd := [call.name for call in message.tool_calls if call.name not in known]:
            raise GnomonError(f"{self.name} calls {odd[0]!r}, which is none of the request's tools.")
        if request.choices and message.content not in request.choices:
            raise GnomonError(f"{self.name} answers {message.content!r}, which is none of the choices.")
        ended = "choice" if request.choices else "tool_calls" if message.tool_calls else "stop"
        if ended == "stop":
            message, ended = _cut(message, request)
        return ChatReply(
            message=message,
            model=self.name,
            stop=ended,  # type: ignore[arg-type]
            usage=Usage(
                input_tokens=sum(len(one.content.split()) for one in request.messages),
                output_tokens=len(message.content.split()),
            ),
        )


def _cut(message: Message, request: ChatRequest) -> tuple[Message, str]:
    """The message up to its first stop text and at most `max_tokens` words."""
    text = message.content
    if places := [at for stop in request.stop if (at := text.find(stop)) >= 0]:
        text = text[: min(places)]
    words = text.split()
    if len(words) > request.max_tokens:
        return Message(role="assistant", content=" ".join(words[: request.max_tokens])), "length"
    return (message if text == message.content else Message(role="assistant", content=text)), "stop"
