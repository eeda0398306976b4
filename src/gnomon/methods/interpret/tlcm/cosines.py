"""How the contributions of two layers point: similarity matrices and activations.

Averages are of cosines, never cosines of averages. A cosine with a zero vector is undefined and left out.
Shapes: n layers, N counted tokens, d hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.errors import NumericalFailure, UsageError, unknown

from .trace import Trace

KINDS = {
    "layer": ("contribution",) * 2,
    "attn": ("attn",) * 2,
    "mlp": ("mlp",) * 2,
    "attn-mlp": ("attn", "mlp"),
}
"""Kind of matrix -> what stands on rows and columns."""
THRESHOLD = -0.1
"""The paper's: below it, layer i+1 counts as correcting layer i at this token ("activation")."""
BLOCK = 512  # tokens handled at once; bounds memory at BLOCK * n^2 numbers


@dataclass(frozen=True, kw_only=True)
class SimMatrix:
    """Mean cosine of every pair of layers over tokens: `mean[i, j]`, its standard deviation and count."""

    kind: str
    mean: Float[Tensor, "n n"]
    std: Float[Tensor, "n n"]
    """Population standard deviation over tokens."""
    count: Int[Tensor, "n n"]
    """Tokens at which the cosine is defined."""

    @property
    def adjacent(self) -> Float[Tensor, " n_minus_1"]:
        """M[i, i+1], the entries in which TLCM shows."""
        return self.mean.diagonal(1)


class RunningSimilarity:
    """Streaming form of :func:`similarity`: `update` with any number of traces, then read `result`."""

    def __init__(self, kind: str = "layer") -> None:
        if kind not in KINDS:
            raise unknown("kind of similarity", kind, KINDS)
        self.kind = kind
        self._sums: Tensor | None = None  # (3, n, n): count, sum, sum of squares, in float64

    def update(self, trace: Trace) -> None:
        """Add all counted tokens of a trace."""
        row_part, column_part = KINDS[self.kind]
        rows = trace.vectors(getattr(trace, row_part))
        columns = rows if column_part == row_part else trace.vectors(getattr(trace, column_part))
        n = len(rows)
        if self._sums is None:
            self._sums = torch.zeros(3, n, n, dtype=torch.float64, device=rows.device)
        if self._sums.shape[-1] != n:
            raise UsageError(f"A trace of {n} layers can't be added to one of {self._sums.shape[-1]}.")
        for start in range(0, rows.shape[1], BLOCK):
            u = unit(rows[:, start : start + BLOCK]).transpose(0, 1)  # (N, n, d)
            v = unit(columns[:, start : start + BLOCK]).transpose(0, 1)
            cosines = (u @ v.mT).clamp(-1, 1).double()  # (N, n, n)
            defined = (nonzero(u)[..., None] & nonzero(v)[:, None]).double()
            self._sums += torch.stack([defined.sum(0), cosines.sum(0), cosines.square().sum(0)])

    @property
    def result(self) -> SimMatrix:
        """The matrix over everything seen so far; NaN where no cosine was defined."""
        if self._sums is None:
            raise UsageError("No trace has been added, so there is no similarity to report.")
        count, total, squares = self._sums
        mean = total / count
        std = (squares / count - mean.square()).clamp_min(0).sqrt()
        return SimMatrix(kind=self.kind, mean=mean, std=std, count=count.long())


def similarity(traces: Trace | Iterable[Trace], kind: str = "layer") -> SimMatrix:
    """Mean over tokens of M_t[i, j] = cos(c_{i,t}, c_{j,t}) (steps 1 and 5 of the method).

    Args:
        traces: one trace, or a stream of them (a generator keeps only one in memory).
        kind: "layer" compares whole contributions, "attn" and "mlp" one sublayer across layers,
            "attn-mlp" the attention of layer i (rows) with the MLP of layer j (columns; not symmetric).
    """
    running = RunningSimilarity(kind)
    for trace in stream_of(traces):
        running.update(trace)
    return running.result


def adjacent(trace: Trace) -> Float[Tensor, "n_minus_1 tokens"]:
    """cos(c_{i,t}, c_{i+1,t}) for all neighbours and counted tokens; NaN where a contribution is 0."""
    u = unit(trace.vectors(trace.contribution))
    cosines = (u[:-1] * u[1:]).sum(-1).clamp(-1, 1)
    return torch.where(nonzero(u[:-1]) & nonzero(u[1:]), cosines, torch.nan)


def counts(trace: Trace, threshold: float = THRESHOLD) -> Int[Tensor, " tokens"]:
    """Activations N_t = number of pairs (i, i+1) whose cosine lies below `threshold` (step 2)."""
    return (adjacent(trace) < checked_threshold(threshold)).sum(0)


def sigma_threshold(d: int) -> float:
    """min(-0.1, -4/sqrt(d)): a threshold at least four standard deviations of the Gaussian null below 0."""
    return min(THRESHOLD, -4 / math.sqrt(d))


def checked_threshold(threshold: float) -> float:
    """Refuse a threshold that would call indifference or agreement a correction."""
    if not -1 <= threshold < 0:
        raise UsageError(
            f"threshold={threshold} must lie in [-1, 0): a correction is a negative cosine. "
            "The paper uses -0.1."
        )
    return threshold


@dataclass(frozen=True, kw_only=True)
class PositionCurve:
    """Mean number of activations against the position in the sequence (step 3)."""

    start: Int[Tensor, " bins"]
    """First position of each bin that holds a token."""
    mean: Float[Tensor, " bins"]
    count: Int[Tensor, " bins"]
    per_thousand: float
    """Least-squares slope over tokens: activations gained per 1000 positions (NaN for a single position)."""


def position_curve(
    traces: Trace | Iterable[Trace], *, width: int = 64, threshold: float = THRESHOLD
) -> PositionCurve:
    """N_t against t. The paper sees about one more activation per 1000 tokens.

    Args:
        traces: one trace or a stream; positions are counted within each sequence, without its padding.
        width: positions a bin.
        threshold: see :func:`counts`.
    """
    if width < 1:
        raise UsageError(f"width={width} must be at least 1 position.")
    pairs = [
        (trace.select(trace.position).cpu(), counts(trace, threshold).cpu()) for trace in stream_of(traces)
    ]
    position, number = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    number = number.double()
    bins, which, size = torch.unique(position // width, return_inverse=True, return_counts=True)
    total = torch.zeros(len(bins), dtype=torch.float64).index_add_(0, which, number)
    centred = position.double() - position.double().mean()
    slope = (centred @ number) / (centred @ centred)
    return PositionCurve(start=bins * width, mean=total / size, count=size, per_thousand=1000 * float(slope))


def stream_of(traces: Trace | Iterable[Trace]) -> Iterable[Trace]:
    """One trace as a stream of one."""
    return [traces] if isinstance(traces, Trace) else traces


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1; zero vectors stay zero."""
    if not bool(vectors.isfinite().all()):
        raise NumericalFailure(
            "A contribution is not finite. Run the model in float32 or bfloat16, not float16."
        )
    return F.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)


def nonzero(vectors: Tensor) -> Tensor:
    """Which vectors have a direction."""
    return vectors.any(-1)
