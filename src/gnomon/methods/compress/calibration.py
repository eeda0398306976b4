"""Calibration: checked batches, and what the inputs of linear layers look like on them, gathered in one pass.

Shapes: B sequences, T tokens, n inputs of a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import decoder_stack, is_conv1d, unwrap
from gnomon.core.scoring import position_ids, token_nll

Calib = Sequence[Tensor | Mapping[str, Tensor]]
"""Batches: token ids (B, T), or dictionaries with `input_ids` and perhaps `attention_mask`, both (B, T)."""


@dataclass
class Batch:
    """One checked batch."""

    input_ids: Tensor
    """(B, T)"""
    mask: Tensor | None
    """(B, T), 1 at real tokens; None: all are."""

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(self.input_ids.to(device), None if self.mask is None else self.mask.to(device))

    @property
    def real(self) -> Bool[Tensor, "B T"]:
        """Which tokens aren't padding."""
        return torch.ones_like(self.input_ids, dtype=torch.bool) if self.mask is None else self.mask != 0

    @property
    def targets(self) -> int:
        """Tokens that have a loss: those that follow a real token in their row."""
        return int((self.real[:, 1:] & self.real[:, :-1]).sum())


@dataclass
class LayerStats:
    """Sums over the calibration tokens that reached one layer."""

    tokens: int
    abs_sum: Float[Tensor, " n"]
    abs_max: Float[Tensor, " n"]
    gram: Float[Tensor, "n n"] | None
    """H = Σ_t x_t x_tᵀ, float64; None if it wasn't asked for."""

    @property
    def mean_abs(self) -> Float[Tensor, " n"]:
        """Mean |x_j|; zero where no token came."""
        return self.abs_sum / max(self.tokens, 1)


def require_calib(calib: Calib | None, model: nn.Module, purpose: str) -> list[Batch]:
    """Check calibration batches before any work.

    Raises:
        UsageError: none, empty, of a wrong shape or dtype, ids beyond the vocabulary, or no token with a loss.
    """
    if calib is None or (isinstance(calib, Sequence) and not len(calib)):
        raise UsageError(
            f"{purpose} needs calibration text. Pass calib=[ids, ...], token ids of shape (B, T) or dictionaries with "
            "input_ids and attention_mask; about 256 sequences of the text that the model is for."
        )
    if isinstance(calib, str | Mapping | Tensor) or not isinstance(calib, Sequence):
        raise UsageError(
            f"calib is a {type(calib).__name__}, but must be a list of batches. Pass calib=[it]."
        )
    embedding = getattr(unwrap(model), "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    batches = [_batch(one, i, vocabulary) for i, one in enumerate(calib)]
    if not sum(batch.targets for batch in batches):
        raise UsageError(
            "The calibration text holds no two real tokens in a row. Pass longer sequences, and an attention mask "
            "that is 1 at real tokens."
        )
    return batches


def _batch(one: Any, i: int, vocabulary: int | None) -> Batch:
    ids = one.get("input_ids") if isinstance(one, Mapping) else one
    mask = one.get("attention_mask") if isinstance(one, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UsageError(
            f"Batch {i} of calib is {what}, but token ids are integers of shape (B, T). For a single sequence pass "
            "ids[None]."
        )
    if mask is not None and mask.shape != ids.shape:
        raise UsageError(
            f"Batch {i} of calib has input_ids of {list(ids.shape)} and a mask of {list(mask.shape)}."
        )
    if ids.numel() and vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise UsageError(
            f"Batch {i} of calib holds ids from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to "
            f"{vocabulary - 1}. Was it made with another tokenizer?"
        )
    return Batch(ids, mask)


def mean_nll(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Mean negative log-likelihood over all real targets of the batches, nats; the log of the perplexity."""
    device = next(model.parameters()).device
    losses = []
    for batch in batches:
        at = batch.to(device)
        losses.append(token_nll(model, at.input_ids, at.mask).sum())
    return torch.stack(losses).sum() / max(sum(batch.targets for batch in batches), 1)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside the block; each gets its own mode and requires_grad back."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for parameter, _ in grads:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, needed in grads:
            parameter.requires_grad_(needed)


def gather(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    *,
    gram: bool = True,
    device: torch.device | str | None = None,
) -> dict[str, LayerStats]:
    """Run checked batches through the dense model and sum over the inputs of every one of `layers`.

    Args:
        layers: by dotted name inside the unwrapped model.
        gram: also Σ x xᵀ in float64, n² numbers a layer.
        device: where the sums lie between batches, such as "cpu" when they don't fit beside the model; by default
            beside the layer.

    Raises:
        NumericalFailure: an activation that isn't finite; names the layer.
    """
    collector = _Collector(gram, device)
    hooks = [
        layer.register_forward_pre_hook(collector.hook(name, *_inputs(layer)))
        for name, layer in layers.items()
    ]
    root = unwrap(model)
    runner = decoder_stack(root).runner  # without the head, whose logits nobody needs here
    at = next(root.parameters()).device
    try:
        with state_kept(root), torch.no_grad():
            for batch in batches:
                moved = batch.to(at)
                collector.start(moved)
                runner(**arguments(runner, moved))
    finally:
        for hook in hooks:
            hook.remove()
    return collector.stats


def _inputs(layer: nn.Module) -> tuple[int, torch.device]:
    """Width of a linear map's inputs, and where its weight lies; `Conv1D` stores the transpose."""
    weight = cast(Tensor, layer.weight)
    return weight.shape[0 if is_conv1d(layer) else 1], weight.device


def arguments(runner: nn.Module, batch: Batch) -> dict[str, Any]:
    """Keyword arguments for a batch; positions count real tokens only, so that padding on either side shifts none."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.mask is not None:
        inputs["attention_mask"] = batch.mask
        if "position_ids" in inspect.signature(runner.forward).parameters:
            inputs["position_ids"] = position_ids(batch.mask)
    return inputs


class _Collector:
    """Owner of the sums; knows which tokens of the running batch are real."""

    def __init__(self, gram: bool, device: torch.device | str | None) -> None:
        self.gram, self.device = gram, device
        self.stats: dict[str, LayerStats] = {}
        self.batch: Batch | None = None
        self.last: tuple[Tensor, tuple[int, Tensor, Tensor, Tensor | None]] | None = None

    def start(self, batch: Batch) -> None:
        self.batch, self.last = batch, None

    def hook(self, name: str, n: int, home: torch.device) -> Any:
        where = torch.device(self.device) if self.device is not None else home
        zero = torch.zeros(n, dtype=torch.float64, device=where)
        square = torch.zeros(n, n, dtype=torch.float64, device=where) if self.gram else None
        self.stats[name] = LayerStats(0, zero, zero.clone(), square)

        def add(
            module: nn.Module, args: tuple[Any, ...]
        ) -> None:  # a hook that returns a value replaces the input
            tokens, abs_sum, abs_max, gram = self._sums(name, args[0])
            stats = self.stats[name]
            stats.tokens += tokens
            stats.abs_sum += abs_sum.to(where)
            stats.abs_max = torch.maximum(stats.abs_max, abs_max.to(where))
            if stats.gram is not None and gram is not None:
                stats.gram += gram.to(where)

        return add

    def _sums(self, name: str, x: Tensor) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """(tokens, Σ |x|, max |x|, Σ x xᵀ); once for layers that read the same tensor, as query, key and value do."""
        if self.last is not None and self.last[0] is x:
            return self.last[1]
        rows = real_rows(x.detach(), cast(Batch, self.batch), name).double()
        if not bool(torch.isfinite(rows).all()):
            raise NumericalFailure(
                f"The input of {name} holds NaN or infinity on the calibration text. Run the model in bfloat16 or "
                "float32, or look for the batch."
            )
        size = rows.abs()
        peak = size.amax(0) if len(rows) else rows.new_zeros(rows.shape[1])
        sums = (len(rows), size.sum(0), peak, rows.T @ rows if self.gram else None)
        self.last = (x, sums)
        return sums


def real_rows(x: Tensor, batch: Batch, name: str) -> Tensor:
    """The real tokens' vectors of a layer's input or output, (N, n); only they, where the batch is padded."""
    rows = x.reshape(-1, x.shape[-1])
    if batch.mask is None or bool(batch.real.all()):
        return rows
    return rows[real_positions(x, batch, name)]


def real_positions(x: Tensor, batch: Batch, name: str) -> Tensor:
    """Which rows of the flattened `x` are real tokens.

    Raises:
        UsageError: the layer doesn't see (B, T) tokens, as an expert of a mixture, and the batch has padding.
    """
    real = batch.real.flatten().to(x.device)
    if len(real) != x.numel() // max(x.shape[-1], 1):
        raise UsageError(
            f"{name} sees {x.numel() // max(x.shape[-1], 1)} tokens of a batch of {len(real)}, so its padding can't "
            "be told. Pass calibration sequences of equal length without padding."
        )
    return real
