"""Algorithm 1: which rows beyond the baseline fit into a latency budget, the most useful for their time first.

A queue for each request holds its further rows by urgency. The head with the best ratio of gained utility to added time
is admitted as long as the step stays within the budget; a queue whose head doesn't fit is dropped, since a step only
gets longer.

Here:  `admit_heap`, the algorithm as written with a heap of heads, O(X log G); `admit_sorted`, the same decisions by
       sorting, which plans thousands of rows in less than a millisecond; `admit`, which takes the faster one.
Why sorting works: a head waits until all heads of other queues are worse, so rows leave the queues in the order of the
       worst ratio up to them in their own queue, the earlier queue first among equals. And once no row of a queue fits,
       none behind it does.

Shapes: G groups, X further rows, lying group by group and within a group by urgency.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from .config import ContextMode, Utility
from .predictor import LatencyPredictor
from .rows import Groups, packed_order

__all__ = ["EPS", "Extras", "admit", "admit_heap", "admit_sorted", "extras"]

EPS = 1e-9
"""Seconds added to a row's time, so that a free row doesn't divide by zero."""
SMALL = 32
"""Up to so many further rows the heap is faster than a dozen calls of NumPy."""


@dataclass(frozen=True, slots=True)
class Extras:
    """A step's baseline in numbers, and the rows beyond it.

    Attributes:
        n, tokens: rows and context tokens of the baseline.
        place: (X,) where the row stands in the arrays of its :class:`Groups`.
        group: (X,) number of its group, ascending.
        added: (X,) context tokens that it adds to the step.
        gain: (X,) U(k + 1) - U(k) if its k predecessors in the queue were admitted; >= 0.
    """

    n: int
    tokens: int
    place: Int[np.ndarray, " X"]
    group: Int[np.ndarray, " X"]
    added: Int[np.ndarray, " X"]
    gain: Float[np.ndarray, " X"]


def extras(
    groups: Groups,
    *,
    utility: Utility = "linear",
    context_mode: ContextMode = "raw",
    width: int | None = None,
) -> Extras:
    """Baseline (each group's most urgent row) and further rows, at most `width` - 1 of each group."""
    first, widths = groups.start[:-1], groups.widths
    tokens = int(groups.context[first].sum()) if len(first) else 0
    group = np.repeat(np.arange(len(groups)), widths)
    depth = np.arange(groups.rows) - np.repeat(first, widths)
    further = depth > 0
    if width is not None:
        further &= depth < width
    place = np.flatnonzero(further)
    group, k = group[place], depth[place] - 1  # k further rows go before it
    added = groups.context[place]
    if context_mode == "dedup":
        added = added - groups.prefix[place]
    if utility == "linear":
        gain = np.ones(len(place))
    elif utility == "concave":
        gain = np.log1p(k + 1) - np.log1p(k)
    else:
        gain = groups.weights[group]
    return Extras(len(groups), tokens, place, group, added, gain)


def admit(x: Extras, predictor: LatencyPredictor, budget: float) -> Int[np.ndarray, " A"]:
    """Numbers of the admitted among the further rows, in the order of admission."""
    return admit_heap(x, predictor, budget) if len(x.place) <= SMALL else admit_sorted(x, predictor, budget)


def admit_heap(x: Extras, predictor: LatencyPredictor, budget: float) -> Int[np.ndarray, " A"]:
    """Algorithm 1 with a heap of the queues' heads."""
    group, added, gain = x.group.tolist(), x.added.tolist(), x.gain.tolist()
    total = len(group)
    b, c = predictor.b, predictor.c
    n, tokens = x.n, x.tokens
    # Python's heap puts the least first: minus the ratio, then the group's number, then the row itself.
    heads = [
        (-gain[j] / (EPS + b + c * added[j]), group[j], j)
        for j in range(total)
        if j == 0 or group[j] != group[j - 1]
    ]
    heapq.heapify(heads)
    chosen: list[int] = []
    while heads:
        worst, _, j = heads[0]
        if worst >= 0:  # no head gains anything
            break
        if predictor.predict(n + 1, tokens + added[j]) > budget:
            heapq.heappop(heads)  # T is monotone: neither it nor a row behind it will fit later
            continue
        chosen.append(j)
        n, tokens = n + 1, tokens + added[j]
        j += 1
        if j < total and group[j] == group[j - 1]:
            heapq.heapreplace(heads, (-gain[j] / (EPS + b + c * added[j]), group[j], j))
        else:
            heapq.heappop(heads)
    return np.array(chosen, dtype=np.int64)


def admit_sorted(x: Extras, predictor: LatencyPredictor, budget: float) -> Int[np.ndarray, " A"]:
    """The same decisions without a loop over rows."""
    if not len(x.place):
        return np.zeros(0, dtype=np.int64)
    order = _leaving_order(x, predictor)
    n, tokens = x.n, x.tokens
    alike = bool((x.gain == x.gain[0]).all())
    chosen: list[Int[np.ndarray, " A"]] = []
    while len(order):
        added = x.added[order]
        after = predictor.predict(n + np.arange(1, len(order) + 1), tokens + np.cumsum(added))
        fits = int(np.searchsorted(after > budget, True))  # after never falls
        chosen.append(order[:fits])
        if fits == len(order) or alike:  # where all gain the same, whatever comes later is no shorter
            break
        n, tokens = n + fits, tokens + int(added[:fits].sum())
        order = _that_fit(order[fits:], x, predictor, n, tokens, budget)
    return np.concatenate(chosen)


def _leaving_order(x: Extras, predictor: LatencyPredictor) -> Int[np.ndarray, " X"]:
    """Rows in the order in which an unlimited budget admits them, without those that gain nothing."""
    if predictor.c > 0 and (x.gain == x.gain[0]).all():
        worse = x.added  # equal gains: the longest context is the worst ratio, and integers need no ranking
    else:
        ratio = x.gain / (EPS + predictor.b + predictor.c * x.added)
        worse = np.unique(-ratio, return_inverse=True)[1]
    # Largest so far within each group: groups are lifted above one another, so that one running maximum does.
    lift = x.group * (int(worse.max()) + 1)
    so_far = np.maximum.accumulate(worse + lift) - lift
    order = packed_order(so_far)
    if x.gain.min() <= 0:
        order = order[~_blocked(x.gain[order] <= 0, x.group[order])]
    return order


def _that_fit(
    order: Int[np.ndarray, " Y"], x: Extras, predictor: LatencyPredictor, n: int, tokens: int, budget: float
) -> Int[np.ndarray, " Z"]:
    """Rows that still fit by themselves and stand behind none that doesn't."""
    alone = predictor.predict(np.full(len(order), n + 1), tokens + x.added[order])
    left: Int[np.ndarray, " Z"] = order[~_blocked(alone > budget, x.group[order])]
    return left


def _blocked(wrong: np.ndarray, group: Int[np.ndarray, " Y"]) -> np.ndarray:
    """Rows that are wrong or come after a wrong one of their group."""
    at = np.flatnonzero(wrong)
    first = np.full(int(group.max()) + 1, math.inf) if len(group) else np.zeros(0)
    np.minimum.at(first, group[at], at)
    blocked: np.ndarray = np.arange(len(group)) >= first[group]
    return blocked
