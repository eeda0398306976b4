"""Shares become whole numbers of weights that add up to the budget exactly.

Here:  one function for every level: matrices of a model, rows or column groups of a matrix.
Inferred: the card asks for an exact budget and leaves open how. Remainders of floors go to units in an order that the
       caller gives; where a unit holds more zeros than its share, the others give way by one common offset of shares.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.core.errors import UsageError

ROUNDING = 1e-6
"""A wanted number this close below a whole one is that: .6 · 5 = 3.0000000000000004 and .7 · 10 = 7 − 1e-15."""


def budget(sparsity: float, total: int) -> int:
    """round(p · N), half up."""
    return math.floor(sparsity * total + 0.5)


def floors(wanted: Float[Tensor, " units"]) -> Int[Tensor, " units"]:
    """⌊wanted⌋, rounding errors apart: what the published code removes."""
    return torch.floor(wanted + ROUNDING).long()


def fit_counts(
    wanted: Float[Tensor, " units"],
    capacity: Int[Tensor, " units"],
    total: int,
    *,
    least: Int[Tensor, " units"] | None = None,
    priority: Tensor | None = None,
) -> Int[Tensor, " units"]:
    """Whole numbers near `wanted` that add up to `total`, between `least` and `capacity`.

    Without limits in the way each is ⌊wanted⌋ or one more, which the units with the lowest `priority` get.

    Args:
        wanted: share times size of each unit; their sum should be near `total`, else all shares move by one offset.
        capacity: weights of each unit.
        least: weights that are zero already; 0 if None.
        priority: lower gets a remainder first, such as the score of the weight that it would cost; by default the
            largest remainder comes first. Ties: the first unit.

    Raises:
        UsageError: `total` lies below the zeros that are there, or above all weights.
    """
    wanted, upper = wanted.double().cpu(), capacity.double().cpu()
    lower = torch.zeros_like(upper) if least is None else least.double().cpu()
    if not int(lower.sum()) <= total <= int(upper.sum()):
        raise UsageError(
            f"{total} weights are to be removed of {int(upper.sum())}, of which {int(lower.sum())} are zero already. "
            "Ask for a sparsity between the two."
        )
    real = _shifted(wanted, upper, lower, total)
    counts = torch.maximum(torch.floor(real + ROUNDING), lower)
    rest = total - int(counts.sum())
    rank = counts - real if priority is None else priority.double().cpu()
    while rest:  # one pass, unless offsets left more than one weight a unit to give or take
        step = 1 if rest > 0 else -1
        free = torch.minimum(counts + 1, upper) > counts if rest > 0 else counts > lower
        fair = free & ((real - counts) * step > ROUNDING)
        free = fair if bool(fair.any()) else free
        order = torch.argsort(torch.where(free, step * rank, math.inf), stable=True)
        moved = order[: min(abs(rest), int(free.sum()))]
        counts[moved] += step
        rest -= step * len(moved)
    return counts.long()


def _shifted(wanted: Tensor, upper: Tensor, lower: Tensor, total: int) -> Tensor:
    """Wanted numbers within their limits, moved by one offset of shares where they miss the total by a weight."""
    inside = wanted.clamp(lower, upper)
    if abs(float(inside.sum()) - total) < 1:
        return inside
    low, high = -1.0, 1.0  # offsets of shares; at these ends all units stand at a limit
    for _ in range(100):
        middle = (low + high) / 2
        if float((wanted + middle * upper).clamp(lower, upper).sum()) < total:
            low = middle
        else:
            high = middle
    return (wanted + high * upper).clamp(lower, upper)
