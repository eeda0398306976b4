"""Set-LLM in conversations: questions put to any chat model in several orders, and a chat model that reads sets.

:class:`Asking` makes requests of a question and reads choices off the replies, so that the sensitivity of a model
behind an API can be measured: `order_sensitivity(Asking().scorer(model), questions)`. :class:`SetChat` answers
conversations whose messages hold `<set><el>…</el></set>`.

Inferred: wording of the question and of the instruction; how an answer in words is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gnomon.core.chat import ChatModel, ChatReply, ChatRequest, Message, Usage, ask
from gnomon.core.chat_local import choose
from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded

from .masks import SET_LLM
from .model import SetLLM
from .order import OrderQuestion, Scorer
from .prompt import SET_TAG, SetPrompt, apply_chat_template, joined, parse_set_markup

__all__ = ["Asking", "SetChat", "read_choice"]

_MARK = re.compile(r"[\s\"'`*_.,:;!?()\[\]-]+")


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a question is put to a chat model."""

    answer: Literal["text", "likelihood"] = "text"
    """"text": the model answers in words, and its choice is read off them (any model). "likelihood": the likeliest
    option (models that take :attr:`ChatRequest.choices`)."""
    markup: bool = False
    """Whether options stand in `<set>` markup, for :class:`SetChat`; else as a list with bullets."""
    instruction: str = "Answer with one of the choices, word for word, and nothing else."
    max_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.answer not in ("text", "likelihood"):
            raise UsageError(f"answer={self.answer!r} must be 'text' or 'likelihood'.")

    def request(self, question: OrderQuestion, order: Sequence[int]) -> ChatRequest:
        """The question with its options written down in this order.

        Raises:
            UsageError: options that differ in spaces only.
        """
        options = _plain(question)
        listed = [f"\n- {options[i]}" for i in order]
        if self.markup:
            listed = ["<set>", *(f"<el>{one}</el>" for one in listed), "</set>"]
        return ask(
            f"{question.before}{''.join(listed)}\n\n{self.instruction}",
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            choices=options if self.answer == "likelihood" else (),
        )

    def requests(self, question: OrderQuestion, orders: Sequence[Sequence[int]]) -> list[ChatRequest]:
        """One for each order."""
        return [self.request(question, order) for order in orders]

    def scores(self, question: OrderQuestion, replies: Sequence[ChatReply]) -> list[list[float]]:
        """Replies as a :data:`Scorer` gives them: log-likelihoods, or 0 for what was chosen and -inf for the rest."""
        if self.answer == "likelihood":
            return [list(reply.choice_logprobs or ()) for reply in replies]
        read = [read_choice(reply.text, _plain(question)) for reply in replies]
        return [
            [0.0 if i == choice else float("-inf") for i in range(len(question.options))] for choice in read
        ]

    def scorer(self, model: ChatModel) -> Scorer:
        """For :func:`order_sensitivity`: all orders of a question in one call."""
        return lambda question, orders: self.scores(question, model.generate(self.requests(question, orders)))


def _plain(question: OrderQuestion) -> tuple[str, ...]:
    options = tuple(option.strip() for option in question.options)
    if len(set(options)) < len(options):
        raise UsageError(f"Two options of {question.before[:40]!r} differ in spaces only.")
    return options


def read_choice(text: str, options: Sequence[str]) -> int | None:
    """Index of the option that a reply names; None where it names none or several.

    Case, spaces and punctuation don't count. A reply that is an option names it; else one that holds it as whole words.
    An option inside a longer one that is named ("red" in "dark red") isn't named by that.

    >>> read_choice("It's the dark red.", ["red", "dark red", "blue"]), read_choice("red or blue", ["red", "blue"])
    (1, None)
    """
    said, names = _words(text), [_words(option) for option in options]
    if said in names:
        return names.index(said) if names.count(said) == 1 else None
    found = []
    for i in sorted(range(len(names)), key=lambda i: -len(names[i])):
        pattern = rf"(?<!\w){re.escape(names[i])}(?!\w)"
        if names[i] and re.search(pattern, said):
            found.append(i)
            said = re.sub(pattern, "\0", said)
    return found[0] if len(found) == 1 else None


def _words(text: str) -> str:
    return _MARK.sub(" ", text.casefold()).strip()


class SetChat:
    """A :class:`gnomon.core.chat.ChatModel` that reads the sets in its messages without an order.

    Replies in words are generated one by one; likelihoods of choices (:attr:`ChatRequest.choices`) in batches. Without
    a chat template, messages are "role: content" lines, as `LocalChat` writes them.
    """

    simulated = False

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str,
        mode: str = SET_LLM,
        canonical: bool = False,
        batch_size: int = 24,
    ) -> None:
        """
        Args:
            mode, canonical: as :class:`SetLLM`'s; the other rungs read the same prompts with order.

        Raises:
            UsageError: as :class:`SetLLM`; a batch size below 1.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} would answer nothing. Use 1 or more.")
        self._template = bool(getattr(tokenizer, "chat_template", None))
        self.reader = SetLLM(model, tokenizer, mode=mode, canonical=canonical, bos=not self._template)
        self.name, self.batch_size = f"{name}, {mode}{', sorted' if canonical else ''}", batch_size

    def prompt(self, request: ChatRequest) -> SetPrompt:
        """The conversation up to where the reply begins.

        Raises:
            UsageError: markup that doesn't parse.
        """
        contents: list[Any] = [
            parse_set_markup(message.content) if f"<{SET_TAG}>" in message.content else message.content
            for message in request.messages
        ]
        if self._template:
            messages = [
                {"role": message.role, "content": content}
                for message, content in zip(request.messages, contents, strict=True)
            ]
            return apply_chat_template(messages, self.reader.tokenizer)
        parts: list[Any] = []
        for message, content in zip(request.messages, contents, strict=True):
            parts += [
                f"{message.role}: ",
                *(content.parts if isinstance(content, SetPrompt) else [content]),
                "\n",
            ]
        return SetPrompt(joined([*parts, "assistant:"]))

    def generate(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """One reply a request, in the requests' order.

        Raises:
            UsageError: tools, log-probabilities of tokens, or prompts that don't parse or fit.
        """
        for request in requests:
            if request.tools or request.logprobs or any(m.tool_calls for m in request.messages):
                raise UsageError(
                    f"{self.name} knows neither tools nor log-probabilities of tokens. Use LocalChat for them."
                )
        prompts = [self.prompt(request) for request in requests]
        lengths = [len(self.reader.encode(prompt)) for prompt in prompts]  # refuses what can't be read
        scores: dict[int, list[float]] = {}
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, request in enumerate(requests):
            if request.choices:
                groups.setdefault(request.choices, []).append(i)
        for choices, group in groups.items():
            for first in range(0, len(group), self.batch_size):
                part = group[first : first + self.batch_size]
                rows = self.reader.score_many([prompts[i] for i in part], choices).tolist()
                scores |= dict(zip(part, rows, strict=True))
        found = []
        for i, request in enumerate(requests):
            text = (
                request.choices[choose(scores[i], request)]
                if i in scores
                else self._said(prompts[i], request)
            )
            count = len(self.reader.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            found.append(
                ChatReply(
                    message=Message(role="assistant", content=text),
                    model=self.name,
                    stop="choice" if i in scores else "length" if count >= request.max_tokens else "stop",
                    usage=Usage(input_tokens=lengths[i], output_tokens=count),
                    choice_logprobs=tuple(scores[i]) if i in scores else None,
                )
            )
        return found

    def _said(self, prompt: SetPrompt, request: ChatRequest) -> str:
        options: dict[str, Any] = {"max_new_tokens": request.max_tokens, "do_sample": request.temperature > 0}
        if request.temperature > 0:
            options |= {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or 0,
            }
        if request.stop:
            options |= {"stop_strings": list(request.stop), "tokenizer": self.reader.tokenizer}
        with seeded(request.digest() % 2**32):
            text = self.reader.generate(prompt, **options)
        places = [at for stop in request.stop if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else text
