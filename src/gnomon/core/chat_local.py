"""A Transformers model on this machine as a :class:`gnomon.core.chat.ChatModel`: batched, seeded, with log-likelihoods.

Requests of one call that have the same settings share batches, sorted by length; a reply depends on its own request
alone, up to rounding (batches pad, and sums come in another order). The draws of a reply are seeded by the request as a
whole, so that equal requests get equal replies, and neither order nor company matters.

A conversation is written down by the tokenizer's chat template. Without one, as "role: content" lines, which is what a
base model, or a tiny one, is asked with. Tools need a template that knows them; calls are read from
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes, Qwen and SmolLM write them.

>>> from gnomon.core.chat import ask
>>> model = LocalChat.load("tiny:llama-10k")                       # knows nothing
>>> one, two = model.generate([ask("Hello", max_tokens=3), ask("Yes or no?", choices=(" yes", " no"))])
>>> one.usage.output_tokens, two.text in (" yes", " no"), model.name
(3, True, 'tiny:llama-10k')
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import nn

from .chat import ChatReply, ChatRequest, Message, StopReason, TokenLogprob, Tool, ToolCall, Usage
from .errors import NumericalFailure, UsageError
from .generation import generate, inverse_cdf
from .layers import unwrap
from .scoring import evaluating, token_nll

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class LocalChat:
    """A causal language model of Transformers and its tokenizer."""

    simulated = False

    def __init__(self, model: nn.Module, tokenizer: Any, *, name: str, batch_size: int = 8) -> None:
        """
        Args:
            name: what records call it.
            batch_size: rows a pass; changes no reply beyond rounding.

        Raises:
            UsageError: a batch size below 1.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} would answer nothing. Use 1 or more.")
        self.model, self.tokenizer, self.name, self.batch_size = model, tokenizer, name, batch_size

    @classmethod
    def load(cls, name: str, *, batch_size: int = 8, **options: Any) -> LocalChat:
        """The model of this name (:func:`gnomon.core.models.load`, which takes the options)."""
        from .models import load

        loaded = load(name, **options)
        return cls(loaded.model, loaded.tokenizer, name=loaded.name, batch_size=batch_size)

    # ------------------------------------------------------------------------------------------ prompts

    def prompt(self, request: ChatRequest) -> list[int]:
        """Token ids of a request's conversation, up to where the reply begins.

        Raises:
            UsageError: tools without a template that writes them down; a conversation that the template refuses.
        """
        template = getattr(self.tokenizer, "chat_template", None)
        if request.tools and "tools" not in str(template or ""):
            raise UsageError(
                f"{self.name} has no chat template that knows tools, so it would never hear of "
                f"{request.tools[0].name!r}. Describe them in a message, or use a model that was trained with tools."
            )
        if not template:
            lines = [f"{message.role}: {message.content}\n" for message in request.messages]
            return list(self.tokenizer("".join(lines) + "assistant:", verbose=False)["input_ids"])
        try:
            text = self.tokenizer.apply_chat_template(
                [_plain(message) for message in request.messages],
                tools=[_schema(tool) for tool in request.tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:  # no system message, roles that must alternate, …
            raise UsageError(
                f"The chat template of {self.name} refuses the conversation: {error}. Write it in another way."
            ) from None
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _choices(self, request: ChatRequest) -> list[list[int]]:
        rows = [
            list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            for text in request.choices
        ]
        for text, row in zip(request.choices, rows, strict=True):
            if not row:
                raise UsageError(f"The choice {text!r} has no tokens in this tokenizer.")
        return rows

    def _require_room(self, length: int, more: int, what: str) -> None:
        limit = getattr(
            getattr(unwrap(self.model), "config", None), "max_position_embeddings", None
        )  # None: rotary without end
        if limit is not None and length + more > limit:
            raise UsageError(
                f"{self.name} has {limit} positions, but a conversation takes {length} tokens and {what} {more}. "
                "Shorten the conversation, or lower max_tokens."
            )

    # ------------------------------------------------------------------------------------------ replies

    def generate(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """One reply a request, in the requests' order.

        Raises:
            UsageError: tools that the model can't be told of, choices without tokens, a conversation and reply that
                exceed its positions: before any request is answered.
            NumericalFailure: likelihoods that aren't numbers.
        """
        prompts = [self.prompt(request) for request in requests]
        choices = [self._choices(request) for request in requests]
        for request, prompt, given in zip(requests, prompts, choices, strict=True):
            longest = max(map(len, given)) if given else request.max_tokens
            self._require_room(len(prompt), longest, "a choice" if given else "max_tokens")
        rows = self._continued(requests, prompts, [i for i, given in enumerate(choices) if not given])
        wanted = [i for i in rows if requests[i].logprobs]
        known = dict(zip(wanted, self._logprobs([(prompts[i], rows[i]) for i in wanted]), strict=True))
        asked = [(prompts[i], row) for i in range(len(requests)) for row in choices[i]]
        found = iter(self._logprobs(asked))
        return [
            self._reply(request, prompts[i], rows[i], known.get(i))
            if i in rows
            else self._chosen(request, prompts[i], choices[i], [next(found) for _ in choices[i]])
            for i, request in enumerate(requests)
        ]

    def _continued(
        self, requests: Sequence[ChatRequest], prompts: Sequence[list[int]], which: Sequence[int]
    ) -> dict[int, list[int]]:
        """New tokens of each of these requests, up to the end of a stop text."""
        from transformers import StoppingCriteriaList, StopStringCriteria

        groups: dict[Any, list[int]] = {}
        for i in which:
            r = requests[i]
            groups.setdefault((r.temperature, r.top_p, r.top_k, r.max_tokens, r.stop), []).append(i)
        found: dict[int, list[int]] = {}
        for (temperature, top_p, top_k, max_tokens, stop), group in groups.items():
            group.sort(key=lambda i: len(prompts[i]))  # alike lengths share a batch
            rows = generate(
                self.model,
                [prompts[i] for i in group],
                max_new_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                generator=[requests[i].digest() for i in group],
                stopping=StoppingCriteriaList([StopStringCriteria(self.tokenizer, list(stop))])
                if stop
                else None,
                batch_size=self.batch_size,
            )
            for i, row in zip(group, rows, strict=True):
                found[i] = row[: self._first_with(row, stop)]
        return found

    def _first_with(self, row: Sequence[int], stops: Sequence[str]) -> int:
        """How many tokens it takes until a stop text has come; all without one. Behind it, a batch's padding stands."""

        def has_come(count: int) -> bool:
            text = self.tokenizer.decode(row[:count], skip_special_tokens=False)
            return any(stop in text for stop in stops)

        if not has_come(len(row)):
            return len(row)
        low, high = 1, len(row)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has_come(middle) else (middle + 1, high)
        return low

    def _logprobs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """log p of each token of the second given the first and those before it, in nats, for each pair."""
        found: dict[int, list[float]] = {}
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        device = next(self.model.parameters()).device
        for begin in range(0, len(order), self.batch_size):
            group = order[begin : begin + self.batch_size]
            width = sum(map(len, pairs[group[0]]))
            ids, real = (torch.zeros(len(group), width, dtype=torch.long) for _ in range(2))
            for r, i in enumerate(group):
                whole = [*pairs[i][0], *pairs[i][1]]
                ids[r, : len(whole)], real[r, : len(whole)] = torch.tensor(whole), 1
            with evaluating(self.model):
                nll = token_nll(self.model, ids.to(device), real.to(device)).double().cpu()  # (B, T-1)
            for r, i in enumerate(group):
                first, last = len(pairs[i][0]) - 1, sum(map(len, pairs[i])) - 1
                found[i] = (-nll[r, first:last]).tolist()
                if not all(math.isfinite(value) for value in found[i]):
                    raise NumericalFailure(
                        f"A log-probability of {self.name} is not finite: its logits hold NaN or infinity."
                    )
        return [found[i] for i in range(len(pairs))]

    def _reply(
        self, request: ChatRequest, prompt: list[int], row: list[int], logprobs: list[float] | None
    ) -> ChatReply:
        ends = self.model.generation_config.eos_token_id  # type: ignore[union-attr]
        raw = self.tokenizer.decode(row, skip_special_tokens=False)
        by_itself = row[-1] in (ends if isinstance(ends, list | tuple) else (ends,))
        ended: StopReason = "stop" if by_itself or any(stop in raw for stop in request.stop) else "length"
        text = str(self.tokenizer.decode(row, skip_special_tokens=True))
        if places := [at for stop in request.stop if (at := text.find(stop)) >= 0]:
            text = text[: min(places)]
        calls, said = _calls(text) if request.tools else ((), text)
        return ChatReply(
            message=Message(role="assistant", content=said, tool_calls=calls),
            model=self.name,
            stop="tool_calls" if calls else ended,
            usage=Usage(input_tokens=len(prompt), output_tokens=len(row)),
            logprobs=None if logprobs is None else self._named(row, logprobs),
        )

    def _chosen(
        self, request: ChatRequest, prompt: list[int], rows: list[list[int]], logprobs: list[list[float]]
    ) -> ChatReply:
        sums = [sum(values) for values in logprobs]
        best = choose(sums, request)
        return ChatReply(
            message=Message(role="assistant", content=request.choices[best]),
            model=self.name,
            stop="choice",
            usage=Usage(input_tokens=len(prompt), output_tokens=len(rows[best])),
            logprobs=self._named(rows[best], logprobs[best]) if request.logprobs else None,
            choice_logprobs=tuple(sums),
        )

    def _named(self, row: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...]:
        tokens = [self.tokenizer.decode([token], skip_special_tokens=False) for token in row]
        return tuple(
            TokenLogprob(token=token, logprob=value) for token, value in zip(tokens, logprobs, strict=True)
        )


def choose(logprobs: Sequence[float], request: ChatRequest) -> int:
    """Index of the request's choice, given the choices' log-probabilities: see :attr:`ChatRequest.choices`."""
    if request.temperature == 0:
        return max(range(len(logprobs)), key=logprobs.__getitem__)
    scores = torch.tensor([logprobs], dtype=torch.float64) / request.temperature
    uniform = torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(request.digest()))
    return int(inverse_cdf(scores, uniform))


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates read it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _schema(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _calls(text: str) -> tuple[tuple[ToolCall, ...], str]:
    """Calls of tools in a reply, and the text beside them. What is no JSON object with a name stays text."""
    found: list[ToolCall] = []
    for block in _CALL.finditer(text):
        try:
            stated = json.loads(block.group(1))
        except ValueError:
            continue
        name, arguments = (stated.get(key) for key in ("name", "arguments"))
        if isinstance(name, str) and isinstance(arguments, dict | None):
            found.append(ToolCall(id=f"call_{len(found)}", name=name, arguments=arguments or {}))
            text = text.replace(block.group(), "", 1)
    return tuple(found), text.strip() if found else text
