"""What to evict: LRU, Threshold-LRU, T-LRU, and what every policy has in common.

A policy keeps a book of cached blocks per conversation; whoever serves (the simulator, the KV store, an engine) tells
it of turns and asks for victims. Victims are always tails: the front of a history is what the next turn needs first.

Cached blocks of conversation i are X_i, its history length L_i, the time of its last turn τ_i; a conversation with
X_i = 0 holds nothing and is no victim. Books are ordered by τ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from gnomon.core.errors import UsageError

from .latency import tel_safe_budget

__all__ = ["LRU", "Compiled", "EvictionPolicy", "Plan", "Policy", "TailOptimizedLRU", "ThresholdLRU", "whole"]

Trims = list[tuple[Hashable, int]]


@runtime_checkable
class EvictionPolicy(Protocol):
    """What whoever serves needs of a policy."""

    def reset(self) -> None:
        """Forget everything but the settings."""
        ...

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """A turn was served; returns how many blocks are kept of it (before anything is evicted).

        Args:
            history_len: L, blocks of the whole history with this turn's prompt and response.
            cacheable: blocks of it that can be kept at all, by default all.
            forced: keep all of them, whatever the policy prefers.
        """
        ...

    def on_end(self, conv_id: Hashable) -> None:
        """The conversation is over: forget it, its blocks are free."""
        ...

    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """Which conversations are cut down to how many blocks, so that `need_blocks` come free.

        Pure and deterministic; report each cut that is made by :meth:`on_trim`. Frees less only where there is no
        more to free.
        """
        ...

    def on_trim(self, conv_id: Hashable, cached_len: int) -> None:
        """The conversation was cut down to so many blocks."""
        ...


def whole(name: str, value: object, low: int = 0) -> int:
    """A whole number of blocks.

    Raises:
        UsageError: something else, or one below `low`; seconds and tokens mustn't be mixed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(
            f"{name}={value!r} must be a whole number of blocks ≥ {low}. "
            "LatencyModel.threshold_blocks turns seconds into blocks."
        )
    return value


class Plan:
    """Cuts on paper: what is left of each conversation, and how much has to come free still."""

    def __init__(self, cached: dict[Hashable, int], need: int, protected: Collection[Hashable] = ()) -> None:
        self.cached, self.need, self.protected = cached, need, protected
        self.left: dict[Hashable, int] = {}

    def among(self, order: Iterable[Hashable]) -> Iterator[Hashable]:
        """Those that may be cut, in this order, for as long as something has to come free."""
        for conv in order:
            if self.need <= 0:
                return
            if conv not in self.protected:
                yield conv

    def cut(self, conv: Hashable, down_to: int) -> None:
        """Free the tail beyond `down_to`, or less of it if less is needed."""
        has = self.left.get(conv, self.cached[conv])
        if (freed := min(has - down_to, self.need)) > 0:
            self.left[conv] = has - freed
            self.need -= freed

    def cuts(self) -> Trims:
        """(conversation, blocks left) in the order of their first cut."""
        return list(self.left.items())


@dataclass(frozen=True)
class Compiled:
    """A policy as numbers, for the compiled simulator. Orders and modes: `kernels.cache_sim`."""

    order: Literal["recency", "furthest", "arrival", "frequency", "expected"] = "recency"
    budget: Literal["none", "fixed", "exact"] = "none"
    admit: Literal["all", "long", "returning", "budget"] = "all"
    min_len: int = 0
    xi: int = 0
    qhat: int = 0
    samples: tuple[int, ...] = ()
    death_rate: float = 0.0
    turn_rate: float = 1.0


@dataclass(eq=False)
class Policy(ABC):
    """The book that all policies keep. Subclasses say what is kept (`admit`), in which order, and who goes."""

    cached: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)
    """X by conversation, those with X ≥ 1, least recently served first."""
    history: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)
    """L by conversation, of all that were seen: the length, not what is left of it."""
    name: ClassVar[str] = ""

    def reset(self) -> None:
        """Forget everything but the settings."""
        self.cached.clear()
        self.history.clear()

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """See :class:`EvictionPolicy`."""
        self.history[conv_id] = history_len
        most = history_len if cacheable is None else min(cacheable, history_len)
        keep = most if forced else min(most, self.admit(conv_id))
        self.cached.pop(conv_id, None)  # back in at the end: the most recent
        if keep > 0:
            self.cached[conv_id] = keep
        return keep

    def on_end(self, conv_id: Hashable) -> None:
        """See :class:`EvictionPolicy`."""
        self.cached.pop(conv_id, None)
        self.history.pop(conv_id, None)

    def on_trim(self, conv_id: Hashable, cached_len: int) -> None:
        """See :class:`EvictionPolicy`."""
        if cached_len > 0:
            self.cached[conv_id] = cached_len
        else:
            self.cached.pop(conv_id, None)

    def admit(self, conv_id: Hashable) -> int:
        """Blocks worth keeping right after a turn: all."""
        return self.history[conv_id]

    @abstractmethod
    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """See :class:`EvictionPolicy`."""

    def compiled(self) -> Compiled | None:
        """This policy as numbers, or None: the compiled simulator doesn't have it."""
        return None


@dataclass(eq=False)
class LRU(Policy):
    """Evict the tails of the least recently served conversation."""

    name: ClassVar[str] = "lru"

    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """See :class:`EvictionPolicy`."""
        plan = Plan(self.cached, need_blocks, protected)
        for conv in plan.among(self.cached):
            plan.cut(conv, down_to=0)
        return plan.cuts()

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled()


@dataclass(eq=False)
class ThresholdLRU(LRU):
    """LRU that keeps a conversation whole once its history is `min_len` long, and nothing of it before."""

    min_len: int = 1024
    name: ClassVar[str] = "threshold-lru"

    def __post_init__(self) -> None:
        whole("ThresholdLRU: min_len", self.min_len)

    def admit(self, conv_id: Hashable) -> int:
        """All of a long history, nothing of a short one."""
        return self.history[conv_id] if self.history[conv_id] >= self.min_len else 0

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(admit="long", min_len=self.min_len)


@dataclass(eq=False)
class TailOptimizedLRU(Policy):
    """T-LRU, Algorithm 1: first the blocks that the next turn doesn't need to stay within ξ, then plain LRU.

    Args:
        threshold: ξ in blocks, ≥ 0.
        next_prompt_estimate: Q̂ in blocks, ≥ 0. Only Q̂ − ξ matters: ξ ≤ Q̂ is LRU.
    """

    threshold: int
    next_prompt_estimate: int = 200
    name: ClassVar[str] = "t-lru"

    def __post_init__(self) -> None:
        whole(f"{type(self).__name__}: threshold", self.threshold)
        whole(f"{type(self).__name__}: next_prompt_estimate", self.next_prompt_estimate)

    def budget(self, conv_id: Hashable) -> int:
        """B, see :func:`tel_safe_budget`."""
        return tel_safe_budget(self.history[conv_id], self.next_prompt_estimate, self.threshold)

    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """See :class:`EvictionPolicy`. Two lines more than :meth:`LRU.victims`."""
        plan = Plan(self.cached, need_blocks, protected)
        for conv in plan.among(self.cached):
            plan.cut(conv, down_to=self.budget(conv))
        for conv in plan.among(self.cached):
            plan.cut(conv, down_to=0)
        return plan.cuts()

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(budget="fixed", xi=self.threshold, qhat=self.next_prompt_estimate)
