"""How many directions each layer keeps, for a share of the numbers that all of them may keep together.

A matrix of m × n at rank k stores k (m + n) numbers instead of m n. Ranks are dictionaries by layer name; a layer
that isn't in one stays dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from torch import nn

from gnomon.core.errors import UsageError

from .factors import rank_for, require_keep
from .layers import ranks_of
from .layers import shapes as shapes_of

Shapes = Mapping[str, tuple[int, int]]


def kept_share(model_or_ranks: nn.Module | Mapping[str, int], shapes: Shapes | None = None) -> float:
    """Numbers stored for the matrices of the decoder layers, as a share of what they are when dense; biases aside.

    Args:
        model_or_ranks: a model, compressed or not; or ranks, along with
        shapes: (m, n) of every layer.
    """
    if isinstance(model_or_ranks, nn.Module):
        model = model_or_ranks
        model_or_ranks, shapes = ranks_of(model), shapes_of(model)
    if shapes is None:
        raise UsageError("kept_share of ranks needs the shapes of all layers: kept_share(ranks, shapes).")
    return stored(model_or_ranks, shapes) / _dense(shapes)


def stored(ranks: Mapping[str, int], shapes: Shapes) -> int:
    """Numbers that these ranks store; layers without a rank count as dense."""
    if missing := [name for name in ranks if name not in shapes]:
        raise UsageError(f"There is a rank for {missing[0]!r}, but no shape.")
    return sum(ranks[name] * (m + n) if name in ranks else m * n for name, (m, n) in shapes.items())


def uniform_ranks(keep: float, shapes: Shapes) -> dict[str, int]:
    """⌊κ m n / (m + n)⌋ for each, at least 1; the floor keeps less than asked, on small matrices by several percent."""
    return {name: rank_for(keep, m, n) for name, (m, n) in shapes.items()}


def fit_ranks(keep: float, shapes: Shapes) -> dict[str, int]:
    """Uniform ranks with the floor's loss given back: the kept share comes as near to `keep` as it can from below.

    Each rank is ⌊κ m n / (m + n)⌋ or one more, chosen so that as many numbers as possible are used; where several
    choices tie, the layers that lost most by the floor come first. For comparisons at equal size.

    Raises:
        UsageError: rank 1 everywhere already stores more.
    """
    require_keep(keep)
    wanted = {name: Fraction(m * n, m + n) * Fraction(keep) for name, (m, n) in shapes.items()}
    return budget_ranks({name: float(k) for name, k in wanted.items()}, keep, shapes, most=1.0)


def budget_ranks(
    wanted: Mapping[str, float], keep: float, shapes: Shapes, *, most: float = math.inf
) -> dict[str, int]:
    """Integer ranks in the proportions of `wanted`, which together store at most the share `keep`, and nearly that.

    The real ranks are multiplied by the largest factor up to `most` whose floors (at least 1, at most min(m, n)) fit;
    then the subset of layers that fills the rest best gets one more each.

    Raises:
        UsageError: rank 1 everywhere already stores more.
    """
    require_keep(keep)
    if any(not math.isfinite(k) or k < 0 for k in wanted.values()) or set(wanted) != set(shapes):
        raise UsageError("budget_ranks needs a finite rank of at least 0 for every shape.")
    budget = math.floor(Fraction(keep) * _dense(shapes) + Fraction(1, 10**6))
    cost = {name: m + n for name, (m, n) in shapes.items()}
    if sum(cost.values()) > budget:
        raise UsageError(
            f"keep={keep} can't be met: rank 1 in each of the {len(shapes)} layers stores "
            f"{sum(cost.values()) / _dense(shapes):.4f} of their numbers. Use a larger keep."
        )

    def floors(factor: float) -> dict[str, int]:
        return {name: min(max(1, math.floor(factor * k + 1e-9)), *shapes[name]) for name, k in wanted.items()}

    def spent(ranks: Mapping[str, int]) -> int:
        return sum(cost[name] * k for name, k in ranks.items())

    low, high = 0.0, min(1.0, most)
    while spent(floors(high)) <= budget and low < high < 1e9:
        low, high = high, min(2 * high, most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(floors(middle)) <= budget else (low, middle)
    ranks = floors(low)
    open_ = sorted(
        (name for name in ranks if ranks[name] < min(shapes[name])), key=lambda name: low * wanted[name] % 1
    )
    for name in _fill(budget - spent(ranks), [(name, cost[name]) for name in open_]):
        ranks[name] += 1
    return ranks


def _fill(room: int, items: list[tuple[str, int]]) -> list[str]:
    """The subset whose costs come nearest to `room` from below (subset sum); later items are taken by preference."""
    unit = math.gcd(*(cost for _, cost in items)) if items else 1
    room //= unit
    whole = (1 << (room + 1)) - 1
    reach = [1]  # bit s of reach[i]: the first i items can spend s
    for _, cost in items:
        reach.append((reach[-1] | reach[-1] << (cost // unit)) & whole)
    left = reach[-1].bit_length() - 1
    chosen = []
    for (name, cost), before in zip(reversed(items), reversed(reach[:-1]), strict=True):
        after = left - cost // unit
        if after >= 0 and before >> after & 1:
            chosen.append(name)
            left = after
    return chosen


def sensitivity_ranks(
    keep: float, shapes: Shapes, losses: Mapping[tuple[str, float], float], candidates: Iterable[float]
) -> dict[str, int]:
    """ASVD's search: admit the (layer, κ) that hurt least until the target is met; each layer takes its smallest κ.

    Args:
        losses: (layer, κ) -> calibration loss (or perplexity) with that layer alone compressed to κ. Infinity and NaN
            are admitted last.
        candidates: the κ that were tried.

    Returns:
        Ranks with a kept share of at most `keep`; layers of which nothing was admitted stay dense, and aren't in it.

    Raises:
        UsageError: even the smallest candidate everywhere keeps more; see :func:`require_reachable`.
    """
    candidates = sorted(set(candidates))
    require_reachable(keep, shapes, candidates)
    order = sorted(
        ((name, share) for name in shapes for share in candidates),
        key=lambda one: losses[one] if math.isfinite(losses[one]) else math.inf,
    )

    def admitted(count: int) -> dict[str, int]:
        smallest: dict[str, float] = {}
        for name, share in order[:count]:
            smallest[name] = min(share, smallest.get(name, math.inf))
        return {name: rank_for(share, *shapes[name]) for name, share in smallest.items()}

    low, high = (
        0,
        len(order),
    )  # the share falls as more is admitted: binary search for the first cut that fits
    while low < high:
        middle = (low + high) // 2
        if stored(admitted(middle), shapes) <= keep * _dense(shapes) + 1e-6:
            high = middle
        else:
            low = middle + 1
    return admitted(low)


def require_reachable(keep: float, shapes: Shapes, candidates: Iterable[float]) -> None:
    """Refuse a target below what the smallest candidate gives everywhere."""
    require_keep(keep)
    lowest = min(candidates)
    if (least := kept_share(uniform_ranks(lowest, shapes), shapes)) > keep + 1e-9:
        raise UsageError(
            f"keep={keep} is out of reach: the smallest of ASVD's candidates, {lowest}, keeps {least:.3f} when every "
            f"layer takes it. Pass candidates= that go lower, such as ({keep / 2:.2g}, {keep:.2g}, ...)."
        )


def _dense(shapes: Shapes) -> int:
    if not shapes:
        raise UsageError("There is no layer to share numbers among.")
    return sum(m * n for m, n in shapes.values())
