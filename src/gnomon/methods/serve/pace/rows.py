"""Rows that are ready to decode, by request and by urgency.

A *row* is one unfinished branch; a *group* is what a request has ready now: one row in a serial stage, its branches in
a parallel one. Groups are kept as arrays, so that a step of thousands of rows is planned in less than a millisecond.

Shapes: R rows, G groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from jaxtyping import Float, Int

from gnomon.core.errors import UsageError, number

PACKED_BITS = 62
__all__ = ["BranchRow", "Group", "Groups", "build_groups", "packed_order"]


@dataclass(frozen=True, slots=True)
class BranchRow:
    """One unfinished branch of a request.

    Attributes:
        index: the caller's number of the row, unique in a step.
        group: the request it belongs to.
        context_len: tokens it attends to (prefix and its own), >= 0.
        deadline: time by which its request, or the row itself, has to advance; on the clock of `now`; may be inf.
        progress: tokens that the row has produced so far.
        prefix_len: tokens of the context that its siblings share, at most `context_len`.
    """

    index: int
    group: Hashable
    context_len: int
    deadline: float
    progress: int
    prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one request, the most urgent first."""

    name: Hashable
    rows: tuple[BranchRow, ...]
    weight: float = 1.0


class Groups(Sequence[Group]):
    """All ready rows of a step, by group and within it by urgency: deadline, then progress, then index.

    A sequence of :class:`Group` to read, and arrays to compute with. Groups lie in the order in which they first
    appeared, which breaks ties between them.

    Attributes:
        names: of the groups.
        weights: (G,) of the groups, for the utility `priority`.
        start: (G + 1,) places of the groups' first rows.
        row_index, context, prefix, deadline, progress: (R,) of the rows.
    """

    def __init__(
        self,
        names: tuple[Hashable, ...],
        weights: Float[np.ndarray, " G"],
        start: Int[np.ndarray, " G1"],
        index: Int[np.ndarray, " R"],
        context: Int[np.ndarray, " R"],
        prefix: Int[np.ndarray, " R"],
        deadline: Float[np.ndarray, " R"],
        progress: Int[np.ndarray, " R"],
    ) -> None:
        self.names, self.weights, self.start = names, weights, start
        self.row_index, self.context, self.prefix = index, context, prefix
        self.deadline, self.progress = deadline, progress

    @classmethod
    def from_arrays(
        cls,
        group: Int[np.ndarray, " R"],
        context: Int[np.ndarray, " R"],
        deadline: Float[np.ndarray, " R"],
        progress: Int[np.ndarray, " R"],
        *,
        prefix: Int[np.ndarray, " R"] | None = None,
        index: Int[np.ndarray, " R"] | None = None,
        names: Sequence[Hashable] | None = None,
        weights: Float[np.ndarray, " G"] | None = None,
        checked: bool = True,
    ) -> Groups:
        """Sort rows given as columns; the fast way in, without an object for each row.

        Args:
            group: number of each row's group; every number from 0 to the largest must occur.
            prefix: 0 without it.
            index: 0, 1, … without it.
            names: of the groups; their numbers without it.
            weights: 1 without it.
            checked: False leaves the checks out, for callers that keep the rules themselves.

        Raises:
            UsageError: a group without rows, or values outside their ranges.
        """
        rows = len(group)
        index = np.arange(rows) if index is None else index
        prefix = np.zeros(rows, dtype=np.int64) if prefix is None else prefix
        counts = np.bincount(group) if rows else np.zeros(0, dtype=np.int64)
        weights = np.ones(len(counts)) if weights is None else np.asarray(weights, dtype=float)
        if checked:
            _check(counts, weights, index, context, prefix, deadline, progress)
        order = _by_urgency(group, deadline, progress, index)
        start = np.concatenate(([0], np.cumsum(counts)))
        return cls(
            tuple(range(len(counts))) if names is None else tuple(names),
            weights,
            start,
            index[order],
            context[order],
            prefix[order],
            deadline[order],
            progress[order],
        )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_index)

    @property
    def widths(self) -> Int[np.ndarray, " G"]:
        """Rows of each group."""
        return np.diff(self.start)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Group: ...
    @overload
    def __getitem__(self, at: slice) -> list[Group]: ...
    def __getitem__(self, at: int | slice) -> Group | list[Group]:
        if isinstance(at, slice):
            return [self[k] for k in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        name = self.names[at]
        rows = tuple(
            BranchRow(
                int(self.row_index[j]),
                name,
                int(self.context[j]),
                float(self.deadline[j]),
                int(self.progress[j]),
                int(self.prefix[j]),
            )
            for j in range(int(self.start[at]), int(self.start[at + 1]))
        )
        return Group(name, rows, float(self.weights[at]))


def build_groups(rows: Iterable[BranchRow], priorities: Mapping[Hashable, float] | None = None) -> Groups:
    """Group ready rows by request, the most urgent first.

    Args:
        priorities: weight w_r of requests (utility `priority`); 1 where none is given.

    Raises:
        UsageError: an index twice, a negative length, a prefix longer than its context, a NaN deadline.
    """
    rows = list(rows)
    numbers: dict[Hashable, int] = {}
    group = [numbers.setdefault(row.group, len(numbers)) for row in rows]
    given = dict(priorities or {})
    return Groups.from_arrays(
        np.array(group, dtype=np.int64),
        np.array([row.context_len for row in rows], dtype=np.int64),
        np.array([row.deadline for row in rows], dtype=float),
        np.array([row.progress for row in rows], dtype=np.int64),
        prefix=np.array([row.prefix_len for row in rows], dtype=np.int64),
        index=np.array([row.index for row in rows], dtype=np.int64),
        names=tuple(numbers),
        weights=np.array([number(given.get(name, 1.0)) for name in numbers]),
    )


def packed_order(*keys: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
    """Order of rows by several non-negative integer keys, the first one weighing most; stable.

    All keys and the place are packed into one integer where 62 bits hold them, since sorting plain integers is
    several times faster than `np.lexsort`.
    """
    rows = len(keys[0])
    if rows == 0:
        return np.zeros(0, dtype=np.int64)
    bits = [int(key.max()).bit_length() for key in keys] + [(rows - 1).bit_length()]
    if sum(bits) > PACKED_BITS:
        slow: Int[np.ndarray, " R"] = np.lexsort(keys[::-1])
        return slow
    packed = keys[0].astype(np.int64)
    for key, width in zip((*keys[1:], np.arange(rows)), bits[1:], strict=True):
        packed = (packed << width) | key
    packed.sort()
    order: Int[np.ndarray, " R"] = packed & ((1 << bits[-1]) - 1)
    return order


def _by_urgency(
    group: Int[np.ndarray, " R"],
    deadline: Float[np.ndarray, " R"],
    progress: Int[np.ndarray, " R"],
    index: Int[np.ndarray, " R"],
) -> Int[np.ndarray, " R"]:
    """Order by group, deadline, progress and index; deadlines enter by their rank, which is an integer."""
    same = group[1:] == group[:-1]
    if (same | (group[1:] > group[:-1])).all() and (deadline[1:] == deadline[:-1])[same].all():
        return packed_order(group, progress, index)  # one deadline a request, and groups in order already
    order = np.argsort(deadline)
    steps = np.zeros(len(order), dtype=np.int64)
    if len(order):
        inorder = deadline[order]
        steps[1:] = np.cumsum(inorder[1:] != inorder[:-1])
    rank = np.empty_like(steps)
    rank[order] = steps
    return packed_order(group, rank, progress, index)


def _check(
    counts: Int[np.ndarray, " G"],
    weights: Float[np.ndarray, " W"],
    index: Int[np.ndarray, " R"],
    context: Int[np.ndarray, " R"],
    prefix: Int[np.ndarray, " R"],
    deadline: Float[np.ndarray, " R"],
    progress: Int[np.ndarray, " R"],
) -> None:
    if not (np.isfinite(weights).all() and (weights >= 0).all()) or len(weights) != len(counts):
        raise UsageError(
            f"Priorities must be {len(counts)} finite numbers >= 0, one a request; got {weights.tolist()[:8]}."
        )
    if len(index) == 0:
        return
    if counts.min() < 1:
        raise UsageError(
            f"Group {int(counts.argmin())} has no ready row. Leave such requests out of the step."
        )
    if int(index.min()) < 0:
        raise UsageError(f"A row's index must be >= 0, got {int(index.min())}.")
    ordered = np.sort(index)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise UsageError(f"Row {int(twice[0])} is there twice. Indices name rows, so each needs its own.")
    for what, values in (("context_len", context), ("prefix_len", prefix), ("progress", progress)):
        if int(values.min()) < 0:
            raise UsageError(
                f"{what} must be >= 0, got {int(values.min())} (row {int(index[values.argmin()])})."
            )
    if (longer := prefix > context).any():
        at = int(longer.argmax())
        raise UsageError(
            f"Row {int(index[at])} shares a prefix of {int(prefix[at])} tokens, more than its context of "
            f"{int(context[at])}. prefix_len is a part of context_len."
        )
    if np.isnan(deadline).any():
        raise UsageError(f"Row {int(index[np.isnan(deadline).argmax()])} has a NaN deadline; inf means none.")
