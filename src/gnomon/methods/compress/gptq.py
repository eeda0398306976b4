r"""GPTQ: round a weight's columns one after the other, and let the columns that are left make up for the error.

Paper: "GPTQ", arXiv:2210.17323, by the description in the methods that are compared with it.
Here:  grids (symmetric or not, a scale for each row or group of inputs), round-to-nearest, GPTQ of one matrix from its
       input Hessian :math:`H = \sum_t x_t x_t^T`, and of a model, layer by layer: each decoder layer sees the inputs
       that the quantised layers before it give.
Not here: packed formats and kernels; the weights hold dequantised values. Ordering of columns by activation size.
Inferred: with a diagonal Hessian there is nothing to make up with, so "OBD" (`hessian="diagonal"`) is round-to-nearest.
Limits: one pass over the calibration text for each decoder layer; H takes n² float64 numbers for each map of the layer.

Shapes: W is m × n (outputs × inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, unknown
from gnomon.core.layers import decoder_stack, is_conv1d, linears, unwrap

from .calibration import Calib, gather, require_calib
from .obs import DAMPING, inverse_factor

BLOCK = 128
"""Columns whose errors are applied to the rest of the matrix together; a matter of speed only."""
HESSIANS = ("full", "diagonal", "none")
Reweigh = Callable[[Tensor, Tensor], Tensor]
"""(W, H) -> the H that GPTQ uses, such as `shapley_gptq_hessian` with a beta."""


@dataclass(frozen=True, kw_only=True)
class GPTQConfig:
    """How weights are quantised."""

    bits: int = 4
    """2 to 8."""
    group: int | None = None
    """Inputs that share a scale; None: a whole row. The last group may be shorter."""
    symmetric: bool = True
    """Zero is code 0 and the range is ±max |w|; False: from the smallest to the largest weight, zero included."""
    damping: float = DAMPING
    """Share of H's mean diagonal that is added to it."""
    hessian: Literal["full", "diagonal", "none"] = "full"
    """"full" is GPTQ; "diagonal" what some call OBD; "none" round-to-nearest. The last two are equal."""

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UsageError(f"bits={self.bits} must be 2 to 8.")
        if self.group is not None and self.group < 1:
            raise UsageError(f"group={self.group} must be at least 1 input, or None for whole rows.")
        if not self.damping >= 0:
            raise UsageError(f"damping={self.damping} must be a share of the mean diagonal, 0 or more.")
        if self.hessian not in HESSIANS:
            raise unknown("hessian:", self.hessian, HESSIANS)

    @property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest code."""
        if self.symmetric:
            most = (1 << (self.bits - 1)) - 1
            return -most, most
        return 0, (1 << self.bits) - 1


class Quantised(NamedTuple):
    """A matrix in codes: w ≈ scale · (code − zero) of its row and group."""

    codes: Int[Tensor, "m n"]
    """int16."""
    scale: Float[Tensor, "m groups"]
    zero: Float[Tensor, "m groups"]
    group: int
    """Inputs of a group."""
    damping: float
    """What the Hessian took; 0 without one."""

    def weight(self) -> Float[Tensor, "m n"]:
        """The dequantised matrix, in the scale's dtype."""
        at = torch.arange(self.codes.shape[1], device=self.codes.device) // self.group
        return self.scale[:, at] * (self.codes.to(self.scale) - self.zero[:, at])


def grid(W: Float[Tensor, "m k"], config: GPTQConfig) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Scale and zero point of each row's range; a row of zeros gets scale 1."""
    low, high = config.codes
    if config.symmetric:
        scale, zero = W.abs().amax(1) / high, W.new_zeros(len(W))
    else:
        least, most = W.amin(1).clamp(max=0), W.amax(1).clamp(min=0)
        scale = (most - least) / (high - low)
        zero = torch.round(-least / torch.where(scale > 0, scale, 1.0))
    return torch.where(scale > 0, scale, 1.0), zero


def rounded(w: Float[Tensor, "..."], scale: Tensor, zero: Tensor, config: GPTQConfig) -> Tensor:
    """Nearest codes, as floating-point numbers."""
    return (torch.round(w / scale) + zero).clamp(*config.codes)


def round_to_nearest(W: Float[Tensor, "m n"], config: GPTQConfig) -> Quantised:
    """Each weight to its nearest code: GPTQ's limit for inputs that don't correlate."""
    return _sweep(W, None, config)


def quantise_matrix(
    W: Float[Tensor, "m n"], H: Float[Tensor, "rows columns"] | None, config: GPTQConfig
) -> Quantised:
    """Quantise one matrix.

    Args:
        W: float32 or float64 (others are raised to float32).
        H: :math:`\\sum_t x_t x_t^T` or a multiple of it; None only with `hessian="none"`.

    Raises:
        UsageError: no Hessian, or one of another size.
        NumericalFailure: weights or H that aren't finite; H indefinite at any damping.
    """
    if not bool(torch.isfinite(W).all()):
        raise NumericalFailure("A weight is NaN or infinite, so it has no grid.")
    if config.hessian == "none":
        return _sweep(W, None, config)
    if H is None or H.shape != (W.shape[1], W.shape[1]):
        found = None if H is None else list(H.shape)
        raise UsageError(f"W has {W.shape[1]} inputs, so H must be {[W.shape[1]] * 2}, got {found}.")
    given = torch.diag(H.diagonal()) if config.hessian == "diagonal" else H
    factor = inverse_factor(given.to(W.device), damping=config.damping)
    return _sweep(W, factor.upper, config, factor.damping)


@torch.no_grad()
def _sweep(W: Tensor, upper: Tensor | None, config: GPTQConfig, damping: float = 0.0) -> Quantised:
    w = W.detach().to(torch.float64 if W.dtype == torch.float64 else torch.float32, copy=True)
    m, n = w.shape
    size = config.group or max(n, 1)
    groups = -(-n // size)
    codes = torch.zeros_like(w)
    scale, zero = w.new_ones(m, groups), w.new_zeros(m, groups)
    u = None if upper is None else upper.to(w)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        errors = torch.zeros_like(w[:, start:stop])
        for j in range(start, stop):
            g = j // size
            if j % size == 0:  # the group's range is that of its weights now
                ahead = w[:, j : j + size].clone()
                if u is not None and j + size > stop:  # errors of this block that haven't reached them yet
                    ahead[:, stop - j :] -= errors @ u[start:stop, stop : j + size]
                scale[:, g], zero[:, g] = grid(ahead, config)
            codes[:, j] = rounded(w[:, j], scale[:, g], zero[:, g], config)
            if u is not None:
                error = (w[:, j] - scale[:, g] * (codes[:, j] - zero[:, g])) / u[j, j]
                w[:, j:stop] -= error[:, None] * u[j, j:stop]
                errors[:, j - start] = error
        if u is not None:
            w[:, stop:] -= errors @ u[start:stop, stop:]
    return Quantised(codes.to(torch.int16), scale, zero, size, damping)


class MapReport(NamedTuple):
    """What quantising did to one map."""

    error: float
    """‖(W − Ŵ) X‖² / ‖W X‖² on the inputs it was quantised for."""
    damping: float


def quantise_model(
    model: nn.Module, calib: Calib, config: GPTQConfig, *, reweigh: Reweigh | None = None
) -> dict[str, MapReport]:
    """Quantise the linear maps of all decoder layers in place; embeddings and head stay as they are.

    On any error all weights are put back.

    Args:
        calib: token ids (B, T), or mappings with an attention mask; padding isn't counted.
        reweigh: changes each map's H before GPTQ, once it is complete; errors are reported with the true one.

    Raises:
        UsageError: no calibration text, no or quantised maps.
        NumericalFailure: as :func:`quantise_matrix`.
    """
    batches = require_calib(calib, model, "GPTQ")
    maps = linears(model)
    for name, module in maps.items():
        weight = module.weight
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2:
            raise UsageError(
                f"{name} is a {type(module).__name__} that is quantised already. Load the model in bfloat16 or float32."
            )
    if not maps:
        raise UsageError(f"{type(unwrap(model)).__name__} has no linear map in its decoder layers.")
    before = {name: cast(nn.Parameter, module.weight).detach().cpu().clone() for name, module in maps.items()}
    found: dict[str, MapReport] = {}
    try:
        for layer in by_layer(model, maps):
            stats = gather(model, layer, batches)
            for name, module in layer.items():
                gram = cast(Tensor, stats[name].gram)
                found[name] = _quantise(module, gram, config, reweigh)
    except BaseException:
        for name, module in maps.items():
            cast(nn.Parameter, module.weight).data.copy_(before[name])
        raise
    return found


def _quantise(module: nn.Module, gram: Tensor, config: GPTQConfig, reweigh: Reweigh | None) -> MapReport:
    parameter = cast(nn.Parameter, module.weight)
    turned = is_conv1d(module)
    w = parameter.detach().T if turned else parameter.detach()
    h = gram.to(w.device)
    made = quantise_matrix(w, h if reweigh is None else reweigh(w, h), config)
    new = made.weight()
    difference = (new - w.to(new)).double()
    lost, whole = (float(((m @ h) * m).sum()) for m in (difference, w.double()))
    parameter.data.copy_(new.T if turned else new)
    return MapReport(lost / whole if whole else 0.0, made.damping)


def by_layer(model: nn.Module, maps: Mapping[str, nn.Module]) -> list[dict[str, nn.Module]]:
    """Maps grouped by decoder layer, in order."""
    stack = decoder_stack(model)
    names = [f"{stack.name}.{name}." for name, _ in unwrap(model).get_submodule(stack.name).named_children()]
    return [{n: m for n, m in maps.items() if n.startswith(prefix)} for prefix in names]
