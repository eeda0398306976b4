"""The exact budget: one offset δ of all thresholds, so that exactly round(pN) weights end up as zero.

Every weight has a distance d = s − t to its threshold; the K largest distances stay, K = N − round(pN), and δ is where
they end. Weights of equal distance at that border are told apart by their importance S, the larger one stays; where
that is equal too, the first in the model's order. Zeros that are there already count as removed.

Two passes over the matrices, with one of them in memory at a time: a histogram of d, then the entries of the one bin
in which the border lies, sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gnomon.core.errors import UsageError

BINS = 1 << 20
LOW, HIGH = -1.5, 1.5
"""Distances beyond these share the outermost bins: scores lie in (0, 1], thresholds near it."""

Distances = Callable[[str], Float[Tensor, "m n"]]
"""Name of a matrix -> d, −∞ at weights that are zero already and +∞ at those that must stay."""
Scores = Callable[[str], Float[Tensor, "m n"]]


@dataclass(frozen=True)
class ExactMasks:
    """Masks that meet a budget."""

    masks: Mapping[str, Bool[Tensor, "m n"]]
    """True where a weight stays."""
    offset: float
    """δ: what was added to every threshold (0 where the raw masks met the budget already)."""


def exact_masks(names: Sequence[str], distances: Distances, scores: Scores, keep: int) -> ExactMasks:
    """Masks that keep exactly `keep` weights.

    Args:
        names: of the matrices, in the model's order.
        distances, scores: give one matrix each; called twice a matrix.
        keep: K.

    Raises:
        UsageError: fewer than K weights are left to keep, or more than K must stay.
    """
    histogram = torch.zeros(BINS, dtype=torch.int64)
    forced = raw = 0
    for name in names:
        d = distances(name)
        forced += int((d == math.inf).sum())
        raw += int((d > 0).sum())
        histogram += torch.bincount(_bins(d[d > -math.inf]), minlength=BINS).cpu()
    there = int(histogram.sum())
    if keep > there:
        raise UsageError(
            f"{keep:,} weights should stay, but only {there:,} are not zero: the model is sparser than that already. "
            "Ask for a higher sparsity."
        )
    if keep < forced:
        raise UsageError(
            f"{keep:,} weights should stay, but min_kept keeps {forced:,}. Ask for a lower sparsity, or min_kept=0."
        )
    if keep == raw:
        return ExactMasks({name: distances(name) > 0 for name in names}, 0.0)
    above = histogram.flip(0).cumsum(0).flip(0)  # how many lie in this bin or a higher one
    border = int((above >= keep).nonzero().max()) if keep else BINS
    missing = keep - (int(above[border + 1]) if border + 1 < BINS else 0)
    masks: dict[str, Tensor] = {}
    found: list[tuple[int, Tensor, Tensor, Tensor]] = []  # of the border's bin: matrix, place, d, S
    for number, name in enumerate(names):
        d = distances(name)
        bins = _bins(d).masked_fill_(d == -math.inf, -1)
        masks[name] = bins > border
        place = (bins == border).flatten().nonzero().flatten()
        if len(place):
            values = (d.flatten()[place].cpu(), scores(name).to(d.device).flatten()[place].double().cpu())
            found.append((number, place.cpu(), *values))
    if not found:  # nothing stays
        return ExactMasks(masks, HIGH)
    matrix = torch.cat([torch.full_like(place, number) for number, place, _, _ in found])
    place = torch.cat([at for _, at, _, _ in found])
    d = torch.cat([values for _, _, values, _ in found])
    s = torch.cat([values for _, _, _, values in found])
    order = _stable_descending(d, s)
    for number, name in enumerate(names):
        chosen = place[order[:missing]][matrix[order[:missing]] == number]
        masks[name].view(-1)[chosen.to(masks[name].device)] = True
    last = float(d[order[missing - 1]])
    return ExactMasks(masks, last if math.isfinite(last) else math.copysign(HIGH, last))


def _bins(d: Tensor) -> Tensor:
    """Number of the bin of each distance: never smaller for a larger one, whatever the rounding."""
    share = (d.clamp(LOW, HIGH) - LOW) / (HIGH - LOW)
    return (share * BINS).long().clamp_(0, BINS - 1)


def _stable_descending(d: Tensor, s: Tensor) -> Tensor:
    """Order by d, then by S, then as they came; largest first."""
    by_score = s.argsort(descending=True, stable=True)
    return by_score[d[by_score].argsort(descending=True, stable=True)]
