"""What adjacent cosines would be without a correction: two null distributions (step 4 of the method).

Shapes: L layers, N counted tokens, d hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.core.errors import UsageError

from .cosines import BLOCK, THRESHOLD, checked_threshold, nonzero, stream_of, unit
from .trace import Trace


@dataclass(frozen=True, kw_only=True)
class GaussianNull:
    """Cosine of two independent Gaussian vectors in d dimensions (null 1)."""

    mean: float
    std: float
    sigmas: float
    """How many standard deviations the threshold lies below 0."""
    tail: float
    """P(cosine < threshold), exactly: (1 + cosine)/2 is Beta((d-1)/2, (d-1)/2)."""
    normal_tail: float
    """The same in the normal approximation, Phi(threshold * sqrt(d))."""


def null_gaussian(d: int, threshold: float = THRESHOLD) -> GaussianNull:
    """What independent directions would give: mean 0, variance 1/d (step 4)."""
    from scipy.special import betainc

    if d < 2:
        raise UsageError(f"d={d}: directions need at least 2 dimensions.")
    sigmas = -checked_threshold(threshold) * math.sqrt(d)
    return GaussianNull(
        mean=0.0,
        std=1 / math.sqrt(d),
        sigmas=sigmas,
        tail=float(betainc((d - 1) / 2, (d - 1) / 2, (1 + threshold) / 2)),
        normal_tail=0.5 * math.erfc(sigmas / math.sqrt(2)),
    )


@dataclass(frozen=True, kw_only=True)
class CrossTokenNull:
    """cos(c_{i,t1}, c_{i+1,t2}) for different tokens t1, t2, for each layer i (null 2)."""

    layers: Int[Tensor, " L"]
    mean: Float[Tensor, " L"]
    std: Float[Tensor, " L"]
    below: Float[Tensor, " L"]
    """Share of token pairs below the threshold: the rate of "activations" that mean nothing."""
    count: Int[Tensor, " L"]
    """Token pairs."""


def null_cross_token(
    traces: Trace | Iterable[Trace],
    layers: Sequence[int] | None = None,
    *,
    pairs: int | None = None,
    generator: torch.Generator | None = None,
    threshold: float = THRESHOLD,
) -> CrossTokenNull:
    """The anisotropy null: neighbours' contributions at different tokens (step 4).

    A negative mean cosine is no correction if this null is as negative. Pairs are formed within a trace.

    Args:
        traces: one trace or a stream.
        layers: the corrected layers i (default: all that have a next one).
        pairs: draw that many ordered pairs t1 != t2 per trace and layer; None takes all N (N - 1), in blocks.
        generator: source of the draw, on the CPU; required with `pairs`.
        threshold: see :func:`counts`.
    """
    checked_threshold(threshold)
    if pairs is not None and generator is None:
        raise UsageError(
            f"pairs={pairs} draws at random. Pass a torch.Generator, or pairs=None for all pairs."
        )
    sums: Tensor | None = None  # (4, L): count, sum, sum of squares, below
    chosen: list[int] = []
    for trace in stream_of(traces):
        n = len(trace.attn)
        chosen = list(range(n - 1)) if layers is None else list(layers)
        if not chosen or not all(0 <= i < n - 1 for i in chosen):
            raise UsageError(
                f"layers={chosen} must name layers between 0 and {n - 2}, which have a next layer."
            )
        c = trace.vectors(trace.contribution)
        if c.shape[1] < 2:
            raise UsageError(f"The trace counts {c.shape[1]} token; a pair of different tokens needs 2.")
        draws = None if pairs is None else _different(c.shape[1], pairs, generator).to(c.device)
        new = torch.stack([_moments(c[i], c[i + 1], draws, threshold) for i in chosen], dim=1)
        sums = new if sums is None else sums + new
    if sums is None:
        raise UsageError("No trace was given, so there is no null distribution.")
    count, total, squares, below = sums
    mean = total / count
    return CrossTokenNull(
        layers=torch.tensor(chosen, device=mean.device),
        mean=mean,
        std=(squares / count - mean.square()).clamp_min(0).sqrt(),
        below=below / count,
        count=count.long(),
    )


def _moments(a: Tensor, b: Tensor, draws: Tensor | None, threshold: float) -> Tensor:
    """Count, sum, sum of squares and number below the threshold of cos(a[t1], b[t2]), t1 != t2."""
    u, v = unit(a), unit(b)
    total = torch.zeros(4, dtype=torch.float64, device=a.device)
    usable = nonzero(u), nonzero(v)
    if draws is not None:
        first, second = draws
        cosines, valid = (u[first] * v[second]).sum(-1), usable[0][first] & usable[1][second]
        return total + _summed(cosines[valid], threshold)
    for start in range(0, len(u), BLOCK):
        block = slice(start, start + BLOCK)
        valid = usable[0][block, None] & usable[1]
        rows = torch.arange(len(valid), device=a.device)
        valid[rows, rows + start] = False  # the same token
        total += _summed((u[block] @ v.T)[valid], threshold)
    return total


def _summed(cosines: Tensor, threshold: float) -> Tensor:
    count = torch.tensor(cosines.numel(), device=cosines.device, dtype=torch.float64)
    below = (cosines < threshold).sum().double()
    exact = cosines.double()
    return torch.stack([count, exact.sum(), exact.square().sum(), below])


def _different(tokens: int, pairs: int, generator: torch.Generator | None) -> Tensor:
    """[2, pairs] uniform ordered pairs of different tokens: the second is a non-zero step from the first."""
    first = torch.randint(tokens, (pairs,), generator=generator)
    step = torch.randint(1, tokens, (pairs,), generator=generator)
    return torch.stack([first, (first + step) % tokens])
