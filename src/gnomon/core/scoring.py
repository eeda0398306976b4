"""What a causal language model thinks of given text: token losses, perplexity, multiple choice.

Works on any Transformers causal LM. Generation lives in `generation.py` and is importable from here.
Reference: the conventions of EleutherAI's lm-evaluation-harness (`acc`, `acc_norm`, `acc_bytes`); where
tokens merge across the border of context and choice we differ, see :func:`score_choices`.
Shapes: B sequences, T tokens, V vocabulary, N length of a token stream, C choices.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .errors import NumericalFailure, UsageError
from .generation import generate
from .modes import evaluation_mode

__all__ = [
    "ChoiceScores",
    "Perplexity",
    "Question",
    "evaluating",
    "generate",
    "perplexity",
    "position_ids",
    "score_choices",
    "stream_nll",
    "token_nll",
    "windows",
]

LOGIT_BYTES = 256 << 20
"""Logits held at a time, in bytes of float32; above it they are made slice by slice along time."""


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the model's training mode is put back afterwards."""
    with evaluation_mode(model), torch.no_grad():
        yield


def position_ids(attention_mask: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Positions that count real tokens only, so that padding on either side shifts nothing."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def token_nll(
    model: nn.Module, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T-1"]:
    """Negative log-likelihood of each token given those before it, in nats.

    Entry [b, t] is -log p(x[b, t+1] | x[b, :t+1]); it is 0 where either token is padding. The log-softmax
    runs in float32 at least. Gradients flow where grad mode is on; the mode (train, eval) is the caller's,
    see :func:`evaluating`.

    Logits above `LOGIT_BYTES` are made from the last hidden states slice by slice. A model that changes its
    logits after the output embedding (a soft cap, a scale) can't be sliced from outside: it is run a second
    time and its logits are held whole.
    """
    (batch, length), targets = input_ids.shape, input_ids[:, 1:]
    logits, vocabulary = _logits(model, input_ids, attention_mask)
    step = max(1, LOGIT_BYTES // (4 * batch * vocabulary))
    parts = []
    for start in range(0, length - 1, step):
        stop = min(start + step, length - 1)
        part = logits(start, stop)  # (B, stop - start, V)
        part = part if part.dtype == torch.float64 else part.float()
        picked = part.gather(-1, targets[:, start:stop, None]).squeeze(-1)
        parts.append(part.logsumexp(-1) - picked)
    nll = torch.cat(parts, 1) if parts else torch.zeros(batch, 0, device=input_ids.device)
    if attention_mask is None:
        return nll
    real = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    return torch.where(real, nll, torch.zeros_like(nll))


def _logits(
    model: nn.Module, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"] | None
) -> tuple[Callable[[int, int], Tensor], int]:
    """A function that gives the logits (B, stop - start, V) of positions [start, stop), and V."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
        if "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = position_ids(attention_mask)
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head else None
    vocabulary = getattr(head, "out_features", None)
    if head is not None and vocabulary is not None and 4 * input_ids.numel() * vocabulary > LOGIT_BYTES:
        hidden = _sliceable_hidden(model, head, inputs)
        if hidden is not None:
            return lambda start, stop: head(hidden[:, start:stop]), vocabulary
    logits: Tensor = model(**inputs).logits
    return lambda start, stop: logits[:, start:stop], logits.shape[-1]


def _sliceable_hidden(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> Tensor | None:
    """Input (B, T, H) of the output embedding, or None if the model's logits aren't simply its output.

    One pass: a hook keeps the whole input and lets the model itself finish the last position only, against
    which the bare output embedding is compared.
    """
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(keep)
    try:
        own = model(**inputs).logits
    finally:
        handle.remove()
    if len(kept) != 1 or kept[0].shape[:2] != inputs["input_ids"].shape or own.shape[1] != 1:
        return None
    with torch.no_grad():
        # Not bit equality: the order of a sum may change with memory layout, and a soft cap moves far more.
        simple = torch.allclose(head(kept[0][:, -1:]), own, rtol=1e-5, atol=1e-6)
    return kept[0] if simple else None


# ---------------------------------------------------------------------------------------- perplexity


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Loss of a model on a stream of tokens."""

    nll_per_token: float
    """Mean over the scored tokens, nats."""
    tokens: int
    """How many tokens were scored."""
    perplexity: float
    """exp(nll_per_token)."""
    bits_per_byte: float | None
    """Loss in bits over UTF-8 bytes of the text: comparable between tokenizers. None for a bare stream."""


def windows(length: int, *, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, first, stop) per window: tokens [start, stop) are read, targets [first, stop) are scored.

    Each target 1..length-1 lies in exactly one [first, stop). The first window scores all it can; every later
    target sees at least `window - stride` tokens before it.

    Raises:
        UsageError: unless 1 <= stride < window.
    """
    if not 1 <= stride < window:
        raise UsageError(
            f"stride={stride} with window={window}: a window must overlap the one before by a token or more, "
            f"or its first token has no context. Use 1 <= stride <= {max(window - 1, 1)} and window >= 2."
        )
    spans = []
    first = 1
    for start in range(0, max(length - 1, 0), stride):
        stop = min(start + window, length)
        spans.append((start, first, stop))
        first = stop
        if stop == length:
            break
    return spans


def stream_nll(
    model: nn.Module, tokens: Int[Tensor, " N"], *, window: int, stride: int, batch_size: int = 4
) -> Float[Tensor, " N-1"]:
    """Loss of tokens 1..N-1 of a stream in nats, each scored once with the context of :func:`windows`."""
    _require_batch(batch_size)
    _require_positions(model, min(window, len(tokens)), "window")
    device = next(model.parameters()).device
    losses = []
    spans = windows(len(tokens), window=window, stride=stride)
    with evaluating(model):
        for _, same in groupby(
            spans, key=lambda s: (s[2] - s[0], s[1] - s[0])
        ):  # equal shapes need no padding
            equal = list(same)
            for i in range(0, len(equal), batch_size):
                chunk = equal[i : i + batch_size]
                rows = torch.stack([tokens[start:stop] for start, _, stop in chunk]).to(device)
                start, first, _ = chunk[0]
                losses.append(token_nll(model, rows)[:, first - start - 1 :].flatten().cpu())
    return torch.cat(losses) if losses else torch.zeros(0)


def perplexity(
    model: nn.Module,
    data: Int[Tensor, " N"] | str,
    *,
    tokenizer: Any = None,
    window: int = 512,
    stride: int = 256,
    prefix: int | None = None,
    batch_size: int = 4,
) -> Perplexity:
    """Strided perplexity of a token stream, or of a text with its tokenizer.

    Every token is scored exactly once, after the first window with at least `window - stride` tokens of
    context. The first token of a bare stream has no context and is not scored, unless `prefix` gives a token
    id to stand before it. A text always gets one (`prefix`, or the tokenizer's bos, or its eos), so that all
    its bytes count.

    Raises:
        UsageError: on a text without tokenizer or prefix, fewer than two tokens, a bad stride or batch size,
            or a window beyond the model's positions.
        NumericalFailure: if a loss isn't finite.
    """
    size = None
    if isinstance(data, str):
        stream = text_stream(data, tokenizer, prefix)
        size = len(data.encode())
    else:
        stream = data if prefix is None else torch.cat([data.new_tensor([prefix]), data])
    if len(stream) < 2:
        raise UsageError(
            f"Perplexity needs two tokens or more (one to see, one to score), got {len(stream)}."
        )
    total = (
        stream_nll(model, stream, window=window, stride=stride, batch_size=batch_size).double().sum().item()
    )
    return summarise(total, len(stream) - 1, size)


def text_stream(text: str, tokenizer: Any, prefix: int | None = None) -> Int[Tensor, " N"]:
    """Token ids of a text behind a prefix token (given, or bos, or eos)."""
    if tokenizer is None:
        raise UsageError(
            "A text was given without a tokenizer. Pass tokenizer=, or a LongTensor of token ids."
        )
    first = prefix if prefix is not None else _prefix_token(tokenizer)
    return torch.tensor([first, *_encode(tokenizer, text)], dtype=torch.long)


def summarise(total_nll: float, tokens: int, size: int | None) -> Perplexity:
    """Perplexity from a summed loss in nats over `tokens` tokens that make up `size` bytes."""
    if not math.isfinite(total_nll):
        raise NumericalFailure(
            f"The loss over {tokens} tokens is {total_nll}: the model's logits hold NaN or infinity. "
            "Check its weights, or load it in float32 (dtype='float32')."
        )
    mean = total_nll / tokens
    return Perplexity(
        nll_per_token=mean,
        tokens=tokens,
        perplexity=math.exp(mean) if mean < 700 else math.inf,  # exp(710) overflows a double
        bits_per_byte=total_nll / math.log(2) / size if size else None,
    )


def _require_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size} would score nothing. Use 1 or more.")


def _require_positions(model: nn.Module, length: int, what: str) -> None:
    """Refuse more tokens than the model has positions: what it says beyond them is no measurement of it."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UsageError(
            f"{what}={length} exceeds the {limit} positions of this model. Use {what}={limit} or less."
        )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _prefix_token(tokenizer: Any) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UsageError(
        "The first token has no context: the tokenizer names neither a bos nor an eos token to stand before "
        "it. Pass prefix= with a token id, or set tokenizer.bos_token."
    )


# ----------------------------------------------------------------------------------- multiple choice


@dataclass(frozen=True, kw_only=True)
class Question:
    """One multiple-choice item; the model reads `context + delimiter + choice`."""

    context: str
    choices: tuple[str, ...]
    delimiter: str = " "


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """Log-likelihoods of the choices of one question, and their lengths without the delimiter."""

    loglikelihood: tuple[float, ...]
    """log p(choice | context), nats, summed over tokens."""
    tokens: tuple[int, ...]
    """Scored tokens per choice."""
    bytes: tuple[int, ...]
    """UTF-8 bytes per choice."""
    characters: tuple[int, ...]
    """Characters per choice: what the harness's acc_norm divides by (equal to bytes on ASCII)."""

    def best(self, per: Literal["sum", "token", "byte", "character"] = "sum") -> int:
        """Index of the likeliest choice, the first one on a tie.

        'sum' is the harness's `acc`, 'character' its `acc_norm`, 'byte' its `acc_bytes`.
        """
        lengths = {
            "sum": (1,) * len(self.tokens),
            "token": self.tokens,
            "byte": self.bytes,
            "character": self.characters,
        }[per]
        scores = [value / n for value, n in zip(self.loglikelihood, lengths, strict=True)]
        return max(range(len(scores)), key=scores.__getitem__)


def score_choices(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
) -> list[ChoiceScores]:
    """Log-likelihood of every choice of every question.

    Context and choice are encoded as one string. The scored part begins where that encoding first leaves the
    encoding of the context alone, at the earliest such place among the question's choices: where a token
    merges characters of both sides, all choices are charged for the same characters of the context. Without
    merging this is the harness's number. An empty shared part gets the tokenizer's bos (or eos) as context;
    a bos that the tokenizer adds by itself is kept.

    Args:
        max_length: longest sequence the model may read (default: its `max_position_embeddings`); longer
            contexts lose their beginning.

    Raises:
        UsageError: on an empty choice, one that alone exceeds `max_length`, a `max_length` beyond the model's
            positions, or a bad batch size.
    """
    _require_batch(batch_size)
    if max_length is not None:
        _require_positions(model, max_length, "max_length")
    limit = max_length or getattr(model.config, "max_position_embeddings", None) or 1 << 30
    rows: list[tuple[list[int], int]] = []  # token ids, how many at the end are scored
    for question in questions:
        rows += _choice_rows(tokenizer, question, int(limit))
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))  # alike lengths share a batch
    sums = [0.0] * len(rows)
    device = next(model.parameters()).device
    with evaluating(model):
        for begin in range(0, len(order), batch_size):
            group = order[begin : begin + batch_size]
            width = len(rows[group[0]][0])
            ids = torch.zeros(len(group), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for r, i in enumerate(group):
                ids[r, : len(rows[i][0])] = torch.tensor(rows[i][0])
                mask[r, : len(rows[i][0])] = 1
            nll = token_nll(model, ids.to(device), mask.to(device)).double().cpu()
            for r, i in enumerate(group):
                length, scored = len(rows[i][0]), rows[i][1]
                sums[i] = -nll[r, length - 1 - scored : length - 1].sum().item()
    scores, at = [], 0
    for question in questions:
        span = slice(at, at + len(question.choices))
        at = span.stop
        scores.append(
            ChoiceScores(
                loglikelihood=tuple(sums[span]),
                tokens=tuple(scored for _, scored in rows[span]),
                bytes=tuple(len(choice.encode()) for choice in question.choices),
                characters=tuple(len(choice) for choice in question.choices),
            )
        )
    return scores


def _choice_rows(tokenizer: Any, question: Question, limit: int) -> list[tuple[list[int], int]]:
    if not question.choices or "" in question.choices:
        raise UsageError(
            f"Question {question.context[:60]!r} has choices {question.choices!r}: at least one is needed, "
            "and an empty one has no likelihood. Give each choice a character or more."
        )
    alone = _encode(tokenizer, question.context)
    wholes = [
        _encode(tokenizer, question.context + question.delimiter + choice) for choice in question.choices
    ]
    shared = min(_common_prefix(alone, whole) for whole in wholes)
    special = tokenizer("a")["input_ids"]
    adds_bos = (
        tokenizer.bos_token_id is not None and len(special) > 0 and special[0] == tokenizer.bos_token_id
    )
    before = [_prefix_token(tokenizer)] if adds_bos or shared == 0 else []
    rows = []
    for choice, whole in zip(question.choices, wholes, strict=True):
        scored = len(whole) - shared
        if not 0 < scored < limit:
            raise UsageError(
                f"Choice {choice[:60]!r} takes {scored} tokens; it must take at least 1 and leave one of the "
                f"model's {limit} for context. Shorten it, or raise max_length if the model allows."
            )
        rows.append(((before + whole)[-limit:], scored))
    return rows


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
