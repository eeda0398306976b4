"""Shared prefixes: a tree of blocks, as engines keep them, for traces that name the blocks of each prompt.

A block belongs to all histories that pass through it. Its budget is that of the deepest of them, a high-water mark that
is raised on insertion and not lowered by trimming: measured from what is cached, a shared system prompt would look safe
as soon as the branches above it are gone. Only leaves are victims, so a prefix stays a prefix.

An answer enters the tree as part of a later prompt only, as in the traces; Q̂ here is the next turn's growth, the answer
included.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import UsageError, unknown

from .latency import LatencyModel, tel_safe_budget
from .policies import whole
from .simulate import Measured
from .trace import Floats, Ints

__all__ = ["PREFIX_POLICIES", "PrefixResult", "PrefixTrace", "simulate_prefixes"]

PREFIX_POLICIES = ("lru", "threshold-lru", "t-lru", "belady")


@dataclass(frozen=True, eq=False)
class PrefixTrace:
    """Requests by arrival, each with the ids of its prompt's blocks from the front.

    Attributes:
        time: seconds (n,), never falling; equal times keep their order.
        blocks: ids ≥ 0 of each prompt's blocks; an id stands for a block *and* all before it.
        tokens: length of each prompt (n,).
        block_size: tokens of a block.
    """

    time: Floats
    blocks: tuple[tuple[int, ...], ...]
    tokens: Ints
    block_size: int = 512

    def __post_init__(self) -> None:
        whole("block_size", self.block_size, 1)
        if not len(self.time) == len(self.blocks) == len(self.tokens):
            raise UsageError(
                f"{len(self.time)} times, {len(self.blocks)} lists of blocks, {len(self.tokens)} lengths."
            )
        if len(self.time) and (not np.isfinite(self.time).all() or (np.diff(self.time) < 0).any()):
            at = int(np.argmax(np.diff(self.time, prepend=self.time[0]) < 0))
            raise UsageError(
                f"Request {at} arrives at {self.time[at]:g} s, before the one above it, or never."
            )
        self._parents()

    def _parents(self) -> None:
        """Every id has one block before it, or they would not name prefixes."""
        parent: dict[int, int] = {}
        for at, ids in enumerate(self.blocks):
            before = -1
            for block in ids:
                if block < 0 or parent.setdefault(block, before) != before:
                    raise UsageError(
                        f"Request {at}: block {block} follows block {before}, elsewhere {parent.get(block)}. An id "
                        "must stand for a block and all before it (chained hashes), and be ≥ 0."
                    )
                before = block

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def nodes(self) -> int:
        """Largest id + 1."""
        return 1 + max((max(ids) for ids in self.blocks if ids), default=-1)

    @cached_property
    def first_turn(self) -> NDArray[np.bool_]:
        """Requests of which no block was ever seen before (n,)."""
        seen: set[int] = set()
        first = []
        for ids in self.blocks:
            first.append(not ids or ids[0] not in seen)
            seen.update(ids)
        return np.array(first, dtype=bool)

    def head(self, requests: int) -> PrefixTrace:
        """The first so many requests."""
        return PrefixTrace(
            self.time[:requests], self.blocks[:requests], self.tokens[:requests], self.block_size
        )

    def half(self, second: bool) -> PrefixTrace:
        """The earlier or the later half of the requests."""
        cut = len(self) // 2
        part = slice(cut, None) if second else slice(0, cut)
        return PrefixTrace(self.time[part], self.blocks[part], self.tokens[part], self.block_size)

    def families(self, depth: int = 2) -> list[int]:
        """The request's block at `depth` (its last one if it is shorter): what a conversation's turns share."""
        return [ids[min(depth, len(ids)) - 1] if ids else -1 for ids in self.blocks]


@dataclass(frozen=True, eq=False)
class PrefixResult(Measured):
    """What each request cost.

    Attributes:
        hits: blocks that were cached on arrival (n,).
    """

    trace: PrefixTrace
    hits: Ints
    latency: LatencyModel

    @property
    def uncached(self) -> Ints:
        """Tokens to compute (n,); the last one of a prompt always is."""
        uncached: Ints = np.maximum(self.trace.tokens - self.hits * self.trace.block_size, 1)
        return uncached

    @property
    def first_turn(self) -> NDArray[np.bool_]:
        """See :class:`Measured`."""
        return self.trace.first_turn


def simulate_prefixes(
    trace: PrefixTrace,
    policy: str,
    capacity: int,
    *,
    xi: int = 0,
    qhat: int = 0,
    min_blocks: int = 2,
    latency: LatencyModel | None = None,
) -> PrefixResult:
    """Run requests through a tree of at most `capacity` blocks.

    Args:
        policy: `lru`; `threshold-lru` (prompts of fewer than `min_blocks` blocks don't enter); `t-lru` (leaves beyond
            their budget first, then as LRU); `belady` (the leaf whose next use is furthest).
        xi, qhat: ξ and Q̂ of `t-lru`, in blocks.
        latency: per token; by default 1 s each.
    """
    if policy not in PREFIX_POLICIES:
        raise unknown("policy", policy, PREFIX_POLICIES)
    for name, value in (("capacity", capacity), ("xi", xi), ("qhat", qhat), ("min_blocks", min_blocks)):
        whole(f"simulate_prefixes: {name}", value)
    tree = _Tree(trace, policy, capacity, xi, qhat)
    hits = [
        tree.serve(at, ids, keep=policy != "threshold-lru" or len(ids) >= min_blocks)
        for at, ids in enumerate(trace.blocks)
    ]
    return PrefixResult(trace, np.array(hits, dtype=np.int64), latency or LatencyModel(1.0))


class _Tree:
    """Blocks by id. The heap holds leaves, stale entries among them: an entry counts while its stamp is the block's."""

    def __init__(self, trace: PrefixTrace, policy: str, capacity: int, xi: int, qhat: int) -> None:
        size = trace.nodes
        self.policy, self.capacity, self.xi, self.qhat = policy, capacity, xi, qhat
        self.parent, self.depth = [-1] * size, [0] * size
        self.children, self.stamp = [0] * size, [-1] * size
        self.deepest = [0] * size
        self.here = [False] * size
        self.heap: list[tuple[float, int, int, int]] = []
        self.used = 0
        self.uses = _uses(trace) if policy == "belady" else []

    def serve(self, at: int, ids: Sequence[int], keep: bool) -> int:
        """Blocks of a prompt that are cached; then it enters whole, and victims go."""
        hits = 0
        while hits < len(ids) and self.here[ids[hits]]:
            hits += 1
        if not keep:
            ids = ids[:hits]  # what is there counts as used
        before = -1
        for depth, block in enumerate(ids):
            if not self.here[block]:
                self.here[block], self.parent[block], self.depth[block] = True, before, depth
                self.deepest[block], self.used = 0, self.used + 1
                if before >= 0:
                    self.children[before] += 1
            self.deepest[block] = max(self.deepest[block], len(ids))
            self.stamp[block] = at
            before = block
        if ids and not self.children[ids[-1]]:
            self._offer(ids[-1])
        while self.used > self.capacity:
            self._evict()
        return hits

    def safe(self, block: int) -> bool:
        """Whether every branch through it can do without it."""
        return self.depth[block] >= tel_safe_budget(self.deepest[block], self.qhat, self.xi)

    def _offer(self, block: int) -> None:
        """A leaf that may be evicted: smallest key first, then the least recently used, then the deepest."""
        at = self.stamp[block]
        key = 0.0
        if self.policy == "t-lru":
            key = -1.0 if self.safe(block) else 0.0
        elif self.policy == "belady":
            later = self.uses[block]
            while later and later[-1] <= at:
                later.pop()
            key = -float(later[-1]) if later else -math.inf
        heapq.heappush(self.heap, (key, at, -self.depth[block], block))

    def _evict(self) -> None:
        _, at, _, block = heapq.heappop(self.heap)
        if not self.here[block] or self.children[block] or self.stamp[block] != at:
            return
        self.here[block] = False
        self.used -= 1
        if (above := self.parent[block]) >= 0:
            self.children[above] -= 1
            if not self.children[above]:
                self._offer(above)


def _uses(trace: PrefixTrace) -> list[list[int]]:
    """When each block is asked for, last first."""
    uses: list[list[int]] = [[] for _ in range(trace.nodes)]
    for at in range(len(trace) - 1, -1, -1):
        for block in trace.blocks[at]:
            uses[block].append(at)
    return uses
