"""Further references that engines ship and the paper doesn't compare with: FIFO, LFU, SLRU, ARC.

Cache libraries hold whole items by key; here an item is a prefix that can be cut, so these are short ones of our own,
at the granularity of conversations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from gnomon.core.errors import UsageError, number

from .policies import Compiled, Plan, Policy, Trims, whole

__all__ = ["ARC", "FIFO", "LFU", "SLRU"]


@dataclass(eq=False)
class _Ordered(Policy):
    """Cuts in the order that `_order` gives."""

    @abstractmethod
    def _order(self) -> list[Hashable]:
        """Whoever goes first, first."""

    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """See :class:`EvictionPolicy`."""
        plan = Plan(self.cached, need_blocks, protected)
        for conv in plan.among(self._order()):
            plan.cut(conv, down_to=0)
        return plan.cuts()


@dataclass(eq=False)
class FIFO(_Ordered):
    """The conversation that has been in the cache for longest goes first, however recently it was served."""

    since: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)
    clock: int = field(default=0, init=False, repr=False)
    name: ClassVar[str] = "fifo"

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.since.clear()
        self.clock = 0

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """See :class:`EvictionPolicy`."""
        self.clock += 1
        if conv_id not in self.cached:
            self.since[conv_id] = self.clock
        return super().on_turn(conv_id, now, history_len, cacheable, forced)

    def _order(self) -> list[Hashable]:
        return sorted(self.cached, key=lambda conv: self.since[conv])

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(order="arrival")


@dataclass(eq=False)
class LFU(_Ordered):
    """The conversation with the fewest turns so far goes first, least recently served among equals."""

    turns: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)
    name: ClassVar[str] = "lfu"

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.turns.clear()

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """See :class:`EvictionPolicy`."""
        self.turns[conv_id] = self.turns.get(conv_id, 0) + 1
        return super().on_turn(conv_id, now, history_len, cacheable, forced)

    def _order(self) -> list[Hashable]:
        return sorted(
            self.cached, key=lambda conv: self.turns[conv]
        )  # stable: the book is ordered by last turn

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(order="frequency")


@dataclass(eq=False)
class SLRU(_Ordered):
    """Segmented LRU: a conversation that returns while cached is protected; the others go first.

    Args:
        capacity: blocks of the cache.
        share: of it that protected conversations may hold; beyond it the oldest of them lose protection.
    """

    capacity: int
    share: float = 0.8
    protected: dict[Hashable, None] = field(default_factory=dict, init=False, repr=False)
    name: ClassVar[str] = "slru"

    def __post_init__(self) -> None:
        whole("SLRU: capacity", self.capacity)
        if not 0 <= number(self.share) <= 1:
            raise UsageError(f"SLRU: share={self.share!r} must lie in [0, 1].")

    def reset(self) -> None:
        """Forget everything but the settings."""
        super().reset()
        self.protected.clear()

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """See :class:`EvictionPolicy`."""
        returned = conv_id in self.cached
        keep = super().on_turn(conv_id, now, history_len, cacheable, forced)
        self.protected.pop(conv_id, None)
        if returned:
            self.protected[conv_id] = None
        held = sum(self.cached.get(conv, 0) for conv in self.protected)
        for conv in list(self.protected):
            if held <= self.share * self.capacity:
                break
            held -= self.cached.get(conv, 0)
            del self.protected[conv]
        return keep

    def _order(self) -> list[Hashable]:
        return sorted(self.cached, key=lambda conv: conv in self.protected)


@dataclass(eq=False)
class ARC(_Ordered):
    """Adaptive replacement: a seen-once and a seen-again list, their shares learnt from hits on evicted ones.

    Args:
        capacity: blocks of the cache.
    """

    capacity: int
    again: dict[Hashable, None] = field(default_factory=dict, init=False, repr=False)
    """Conversations of the seen-again list; all others that are cached are seen once."""
    ghosts: tuple[dict[Hashable, int], dict[Hashable, int]] = field(
        default_factory=lambda: ({}, {}), init=False, repr=False
    )
    """Blocks of evicted ones: seen once, seen again."""
    target: float = field(default=0.0, init=False)
    """Blocks that the seen-once list may hold."""
    name: ClassVar[str] = "arc"

    def __post_init__(self) -> None:
        whole("ARC: capacity", self.capacity)

    def reset(self) -> None:
        """Forget everything but the settings."""
        super().reset()
        self.again.clear()
        for ghosts in self.ghosts:
            ghosts.clear()
        self.target = 0.0

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """See :class:`EvictionPolicy`."""
        once, again = (sum(ghosts.values()) for ghosts in self.ghosts)
        if conv_id in self.ghosts[0]:
            size = self.ghosts[0].pop(conv_id)
            self.target = min(self.capacity, self.target + size * max(1.0, again / max(1, once)))
            self.again[conv_id] = None
        elif conv_id in self.ghosts[1]:
            size = self.ghosts[1].pop(conv_id)
            self.target = max(0.0, self.target - size * max(1.0, once / max(1, again)))
            self.again[conv_id] = None
        elif conv_id in self.cached:
            self.again[conv_id] = None
        return super().on_turn(conv_id, now, history_len, cacheable, forced)

    def on_trim(self, conv_id: Hashable, cached_len: int) -> None:
        """See :class:`EvictionPolicy`."""
        if cached_len == 0 and conv_id in self.cached:
            ghosts = self.ghosts[conv_id in self.again]
            ghosts[conv_id] = self.history[conv_id]
            self.again.pop(conv_id, None)
            while sum(ghosts.values()) > self.capacity:
                del ghosts[next(iter(ghosts))]
        super().on_trim(conv_id, cached_len)

    def _order(self) -> list[Hashable]:
        once = [conv for conv in self.cached if conv not in self.again]
        again = [conv for conv in self.cached if conv in self.again]
        held = sum(self.cached[conv] for conv in once)
        return once + again if held > self.target else again + once
