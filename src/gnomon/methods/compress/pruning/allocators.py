r"""Shares of blocks from statistics: OWL, AlphaPruning, ATP. Pure functions of numbers; no model.

Papers: "Outlier Weighed Layerwise Sparsity (OWL)"; "AlphaPruning"; "Determining Layer-wise Sparsity for Large Language
       Models Through a Theoretical Perspective" (ATP). OWL and AlphaPruning read from their repositories, ATP recalled.
Here:  one share of removed weights per decoder layer ("block"), whose mean weighted by weights is exactly p.
Not here: collecting the statistics (`allocate`).
Inferred: where a share leaves [0, 1], or blocks differ in size, all shares move by one offset until the mean is p.
       Blocks without any difference between them all get p.

Shapes: L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError, unknown

from .quota import require_share

LEAST = 0.01
"""Share of a block that OWL would not prune at all."""


def exact_mean(
    shares: Float[Tensor, " L"], sizes: Sequence[int], p: float, *, least: float = 0.0
) -> Float[Tensor, " L"]:
    """The shares within [least, 1], moved by one offset so that their mean weighted by `sizes` is p.

    Raises:
        UsageError: p below `least`.
    """
    if not least <= p <= 1:
        raise UsageError(f"sparsity={p} is below the {least} that every block is pruned by, or above 1.")
    weight = torch.tensor(list(sizes), dtype=torch.float64)
    weight = weight / weight.sum()
    inside = shares.double().clamp(least, 1)
    if abs(float((inside * weight).sum()) - p) < 1e-12:
        return inside
    low, high = -1.0 - float(shares.max()), 2.0 - float(shares.min())
    for _ in range(200):
        middle = (low + high) / 2
        moved = (shares.double() + middle).clamp(least, 1)
        low, high = (middle, high) if float((moved * weight).sum()) < p else (low, middle)
    return (shares.double() + high).clamp(least, 1)


def outlier_percentage(scores: Sequence[Float[Tensor, "_ _"]], *, outlier: float = 5.0) -> float:
    """OWL's D: 100 times the share of a block's scores above `outlier` times their mean, its matrices pooled."""
    if not scores or not outlier > 0:
        raise UsageError(f"A block of {len(scores)} matrices and outlier={outlier} have no outliers.")
    count = sum(one.numel() for one in scores)
    mean = math.fsum(float(one.double().sum()) for one in scores) / count
    return 100 * sum(int((one > outlier * mean).sum()) for one in scores) / count


def owl_shares(
    outliers: Sequence[float], sizes: Sequence[int], p: float, *, spread: float = 0.08
) -> Float[Tensor, " L"]:
    r"""OWL: blocks with more outliers keep more.

    .. math:: d = \frac{D - \min D}{\max D - \min D} \, 2\lambda, \qquad keep_\ell = d_\ell - \bar d + 1 - p

    Args:
        outliers: D of each block.
        sizes: weights of each block.
        spread: λ; shares differ by 2 λ at most.
    """
    require_share(p)
    _same_length(outliers, sizes)
    if not 0 <= spread < 0.5:
        raise UsageError(f"spread={spread} must be at least 0 and below .5.")
    d = torch.tensor(list(outliers), dtype=torch.float64)
    width = d.max() - d.min()
    d = (d - d.min()) / width * 2 * spread if float(width) > 0 else torch.zeros_like(d)
    return exact_mean(1 - (d - d.mean() + 1 - p), sizes, p, least=min(LEAST, p))


def hill_alpha(eigenvalues: Float[Tensor, " k"], *, tail: str = "middle") -> float:
    r"""Exponent of the tail of a spectrum; lower is heavier-tailed, better trained.

    .. math:: \alpha = 1 + \frac{n}{\sum_{i \ge i_0} \ln \lambda_i - n \ln \lambda_{i_0}}

    Args:
        eigenvalues: λ = σ², in any order; those that are zero have no part.
        tail: where it begins. "middle": ⌊k/2⌋ from 0; "xmin_peak": of the eigenvalues near the peak of the histogram
            of log λ, the one with the smallest Kolmogorov-Smirnov distance to its power law.

    Raises:
        UsageError: an unknown tail.
        NumericalFailure: fewer than two distinct eigenvalues in the tail.
    """
    if tail not in ("middle", "xmin_peak"):
        raise unknown("tail", tail, ("middle", "xmin_peak"))
    values = eigenvalues.double().sort().values
    values = values[values > 0]
    if len(values) < 2:
        raise NumericalFailure(f"A spectrum with {len(values)} eigenvalues above zero has no tail.")
    logs = values.log()
    if tail == "middle":
        return _hill(logs, len(logs) // 2)
    best = min(_near_peak(logs), key=lambda start: _distance(logs, start))
    return _hill(logs, best)


def alpha_shares(
    alphas: Sequence[float], sizes: Sequence[int], p: float, *, spread: float = 0.3
) -> Float[Tensor, " L"]:
    r"""AlphaPruning: blocks with a lighter tail (higher α) lose more.

    .. math:: r = \frac{\alpha - \min \alpha}{\max \alpha - \min \alpha} (s_2 - s_1) + s_1, \quad s = 1 \mp \epsilon,
              \qquad p_\ell = r_\ell \, \frac{p \sum N}{\sum N_\ell r_\ell}

    Args:
        alphas: of each block.
        sizes: weights of each block.
        spread: ε in [0, 1).
    """
    require_share(p)
    _same_length(alphas, sizes)
    if not 0 <= spread < 1:
        raise UsageError(f"spread={spread} must be at least 0 and below 1.")
    a = torch.tensor(list(alphas), dtype=torch.float64)
    width = a.max() - a.min()
    r = (a - a.min()) / width * 2 * spread + 1 - spread if float(width) > 0 else torch.ones_like(a)
    n = torch.tensor(list(sizes), dtype=torch.float64)
    return exact_mean(r * p * n.sum() / (n * r).sum(), sizes, p)


def atp_shares(count: int, sizes: Sequence[int], p: float, beta: float) -> Float[Tensor, " L"]:
    r"""ATP (recalled): shares rise with depth in an arithmetic progression, :math:`p_\ell = p + \beta(\ell - (L+1)/2)`.

    Args:
        count: L.
        beta: the common difference; 0 is uniform.
    """
    require_share(p)
    if len(sizes) != count or not math.isfinite(beta):
        raise UsageError(f"{count} blocks with {len(sizes)} sizes and beta={beta} make no progression.")
    depth = torch.arange(1, count + 1, dtype=torch.float64)
    return exact_mean(p + beta * (depth - (count + 1) / 2), sizes, p)


def atp_grid(count: int, p: float, points: int = 9) -> list[float]:
    """Common differences from 0 to the largest that keeps every share within [0, 1] (inferred: evenly spaced)."""
    require_share(p)
    if count < 1 or points < 1:
        raise UsageError(f"{count} blocks and {points} points make no grid.")
    largest = 2 * min(p, 1 - p) / (count - 1) if count > 1 else 0.0
    return [largest * i / (points - 1) for i in range(points)] if largest and points > 1 else [0.0]


def _hill(logs: Tensor, start: int) -> float:
    tail = logs[start:]
    excess = float((tail - logs[start]).sum())
    if not excess > 0:
        raise NumericalFailure("All eigenvalues of the tail are equal, so it has no exponent.")
    return 1 + len(tail) / excess


def _near_peak(logs: Tensor) -> list[int]:
    """Starts whose eigenvalue lies near the peak of the histogram of log10 λ of 100 bins (how near is inferred)."""
    ten = logs / math.log(10)
    low, high = float(ten[0]), float(ten[-1])
    if not high > low:
        raise NumericalFailure("All eigenvalues are equal, so the spectrum has no tail.")
    counts = torch.histc(ten, bins=100, min=low, max=high)
    peak = low + int(counts.argmax()) * (high - low) / 100  # its lower edge
    near = (ten >= peak + math.log10(0.95)) & (ten <= peak + math.log10(1.5))
    starts = [int(i) for i in near.nonzero()[:, 0] if i < len(ten) - 1]
    return starts or [min(int(torch.searchsorted(ten, peak)), len(ten) - 2)]


def _distance(logs: Tensor, start: int) -> float:
    """Kolmogorov-Smirnov distance between the tail and its power law."""
    tail = logs[start:]
    if not float(tail[-1]) > float(tail[0]):
        return math.inf
    alpha = _hill(logs, start)
    law = 1 - torch.exp((1 - alpha) * (tail - tail[0]))
    seen = torch.arange(len(tail), dtype=torch.float64) / len(tail)
    return float((law - seen).abs().max())


def _same_length(values: Sequence[float], sizes: Sequence[int]) -> None:
    if not values or len(values) != len(sizes) or not all(math.isfinite(v) for v in values):
        raise UsageError(
            f"{len(values)} statistics and {len(sizes)} sizes of blocks, or one that isn't finite, give no shares."
        )
