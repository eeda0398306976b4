"""How good a model is, and how far from another: perplexity, agreement, divergence, size, speed.

Behind `gnomon eval M --against N`. Both models read the same tokens in the same windows, so every number of the
pair is matched position by position.
Shapes: n scored positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .data import Corpus, corpus
from .errors import NumericalFailure, UsageError
from .files import dump_json
from .models import Loaded, load
from .scoring import evaluating, generate, summarise, text_stream, windows

DECODE_TOKENS, DECODE_REPEATS = 32, 3
_SLICE = 64  # positions compared at a time: bounds the float32 copies of the logits


@dataclass(frozen=True, kw_only=True)
class ModelEval:
    """One model's own numbers."""

    name: str
    dtype: str
    device: str
    parameters: int
    """Distinct ones; tied weights count once."""
    weight_bytes: int
    """Parameters and persistent buffers in memory, as loaded."""
    nll_per_token: float
    """Nats."""
    perplexity: float
    bits_per_byte: float
    tokens_per_second: float
    """Greedy decoding, one sequence, after a warm-up; median."""


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """A model (M), perhaps beside another (N)."""

    model: ModelEval
    against: ModelEval | None
    agreement: float | None
    """Share of positions where M's likeliest token is N's."""
    kl: float | None
    """Mean KL(N || M) over positions, nats: what coding N's predictions with M costs."""
    tokens: int
    """Scored tokens."""
    window: int
    stride: int
    text: str
    text_sha256: str
    """Of the UTF-8 text that was scored."""

    def to_json(self) -> str:
        """The report as a JSON text."""
        return dump_json(asdict(self))

    def rows(self) -> list[tuple[str, ...]]:
        """A table, header first: a label, then a column per model."""
        both = [self.model] if self.against is None else [self.model, self.against]
        table = [
            ("", *(one.name for one in both)),
            ("perplexity", *(f"{one.perplexity:.4g}" for one in both)),
            ("bits per byte", *(f"{one.bits_per_byte:.4f}" for one in both)),
            ("parameters", *(f"{one.parameters:,}" for one in both)),
            ("weights (MB)", *(f"{one.weight_bytes / 1e6:,.2f}" for one in both)),
            ("decoding (tokens/s)", *(f"{one.tokens_per_second:,.1f}" for one in both)),
        ]
        if self.agreement is not None and self.kl is not None:
            table.append(("top-1 agreement", f"{self.agreement:.2%}", ""))
            table.append((f"KL({both[1].name} || {both[0].name}) (nats/token)", f"{self.kl:.4g}", ""))
        return table


def eval(
    model: str | Loaded,
    *,
    against: str | Loaded | None = None,
    text: str | Corpus | None = None,
    window: int = 512,
    max_tokens: int = 8192,
    dtype: str | None = None,
    device: str | None = None,
) -> EvalReport:
    """Measure a model, and compare it with another that has the same tokenizer.

    Args:
        model: a name for `core.models.load`, or what that returned.
        text: a recipe, file or folder for `core.data.corpus`, or a corpus. By default `mixed`.
        window: tokens read at a time; each scored token sees `window // 2` or more after the first window.
        max_tokens: how much of the text is scored, from its beginning.
        dtype, device: for models given by name.

    Raises:
        UsageError: different tokenizers or vocabularies, a window beyond what a model can read.
        NumericalFailure: a loss or divergence that isn't finite.
    """
    if window < 2 or max_tokens < 1:
        raise UsageError(f"window={window} must be at least 2 and max_tokens={max_tokens} at least 1.")
    source = corpus(text or "mixed") if isinstance(text, str | None) else text
    pair = [_loaded(one, dtype, device) for one in (model, against) if one is not None]
    for one in pair:
        _require_window(one, window)
    scored = _beginning(source, pair[0], max_tokens)
    stream = text_stream(scored, pair[0].tokenizer)
    if len(pair) == 2:
        _require_same_tokens(pair[0], pair[1], scored)
    stride = window // 2
    nll, agreement, kl = _measure([one.model for one in pair], stream, window, stride)
    speeds = _decode_speeds([one.model for one in pair], stream[: min(32, window)].tolist())
    tokens, size = len(stream) - 1, len(scored.encode())
    return EvalReport(
        model=_model_eval(pair[0], nll[0], tokens, size, speeds[0]),
        against=_model_eval(pair[1], nll[1], tokens, size, speeds[1]) if len(pair) == 2 else None,
        agreement=agreement if len(pair) == 2 else None,
        kl=kl if len(pair) == 2 else None,
        tokens=tokens,
        window=window,
        stride=stride,
        text=source.name,
        text_sha256=hashlib.sha256(scored.encode()).hexdigest(),
    )


def kl_and_agreement(
    ours: Float[Tensor, "n V"], theirs: Float[Tensor, "n V"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """KL(theirs || ours) in nats, and 1 where both have the same likeliest token, from logits."""
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))  # 0 log 0 = 0
    return terms.sum(-1), (ours.argmax(-1) == theirs.argmax(-1)).to(p.dtype)


def count_weights(model: nn.Module) -> int:
    """Distinct parameters; a module that stands for an encoded one counts by the `shape` of that."""
    shapes = (getattr(module, "shape", None) for module in model.modules())
    encoded = sum(shape.numel() for shape in shapes if isinstance(shape, torch.Size))
    return encoded + sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and persistent buffers; shared storage counts once."""
    storages = {}
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _measure(
    models: Sequence[nn.Module], stream: Int[Tensor, " N"], window: int, stride: int
) -> tuple[list[float], float, float]:
    """Summed loss per model, then mean agreement and mean KL (0 without a second model)."""
    nll, kl, agreed = [0.0] * len(models), 0.0, 0.0
    for start, first, stop in windows(len(stream), window=window, stride=stride):
        targets = stream[first:stop]
        logits = [_logits(model, stream[start:stop])[first - start - 1 : -1] for model in models]
        for i in range(0, len(targets), _SLICE):
            parts = [one[i : i + _SLICE].float() for one in logits]  # (n, V)
            goal = targets[i : i + _SLICE, None].to(parts[0].device)
            for m, part in enumerate(parts):
                losses = part.logsumexp(-1) - part.gather(-1, goal).squeeze(-1)
                nll[m] += losses.double().sum().item()
            if len(parts) == 2:
                divergence, same = kl_and_agreement(parts[0], parts[1].to(parts[0].device))
                kl += divergence.double().sum().item()
                agreed += same.sum().item()
    n = len(stream) - 1
    if not math.isfinite(kl):
        raise NumericalFailure(
            f"The mean KL over {n} tokens is {kl / n}: a model gives logits of NaN, or rules out a token that the "
            "other allows. Check its weights, or load it in float32 (dtype='float32')."
        )
    return nll, agreed / n, kl / n


def _logits(model: nn.Module, ids: Int[Tensor, " T"]) -> Float[Tensor, "T V"]:
    with evaluating(model):
        device = next(model.parameters()).device
        logits: Tensor = model(input_ids=ids[None].to(device), use_cache=False).logits
    return logits[0]


def _decode_speeds(models: Sequence[nn.Module], prompt: list[int]) -> list[float]:
    """Tokens per second, prompt of some tokens included; the models take turns so that a busy machine hits both."""
    seconds: list[list[float]] = [[] for _ in models]
    for repeat in range(1 + DECODE_REPEATS):
        for model, taken in zip(models, seconds, strict=True):
            began = time.perf_counter()
            generate(model, [prompt], max_new_tokens=DECODE_TOKENS, eos=())  # a list: waits for the device
            if repeat > 0:  # the first warms up
                taken.append(time.perf_counter() - began)
    return [DECODE_TOKENS / statistics.median(taken) for taken in seconds]


def _model_eval(one: Loaded, nll: float, tokens: int, size: int, speed: float) -> ModelEval:
    summary = summarise(nll, tokens, size)
    return ModelEval(
        name=one.name,
        dtype=str(one.dtype).removeprefix("torch."),
        device=str(one.device),
        parameters=count_weights(one.model),
        weight_bytes=weight_bytes(one.model),
        nll_per_token=summary.nll_per_token,
        perplexity=summary.perplexity,
        bits_per_byte=nll / math.log(2) / size,
        tokens_per_second=speed,
    )


def _loaded(model: str | Loaded, dtype: str | None, device: str | None) -> Loaded:
    return load(model, dtype=dtype, device=device) if isinstance(model, str) else model


def _beginning(source: Corpus, one: Loaded, max_tokens: int) -> str:
    """The corpus as one text, cut after about `max_tokens` tokens, between characters."""
    whole = "\n\n".join(document.text for document in source.documents)[: 32 * max_tokens]
    ids = one.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) <= max_tokens:
        return whole
    cut: str = one.tokenizer.decode(ids[:max_tokens], clean_up_tokenization_spaces=False)
    return cut.rstrip("�")  # half a character at the end


def _require_window(one: Loaded, window: int) -> None:
    limit = getattr(one.model.config, "max_position_embeddings", None)
    if limit is not None and window > limit:
        raise UsageError(
            f"window={window} exceeds the {limit} positions of {one.name}. Use window={limit} or less."
        )


def _require_same_tokens(ours: Loaded, theirs: Loaded, text: str) -> None:
    way_out = "Agreement and KL need the same tokens; compare bits per byte of two separate reports instead."
    sizes = [one.model.get_output_embeddings().weight.shape[0] for one in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{ours.name} predicts {sizes[0]} tokens and {theirs.name} {sizes[1]}: different vocabularies. {way_out}"
        )
    vocabularies = [one.tokenizer.get_vocab() for one in (ours, theirs)]
    streams = [text_stream(text, one.tokenizer) for one in (ours, theirs)]
    if vocabularies[0] != vocabularies[1] or not torch.equal(streams[0], streams[1]):
        raise UsageError(
            f"{ours.name} and {theirs.name} have different tokenizers: equal ids stand for different text. {way_out}"
        )
