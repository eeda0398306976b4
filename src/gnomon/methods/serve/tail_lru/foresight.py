"""Policies that know the future, as bounds: End-Aware, Length-Aware, Belady, Tail-Optimized Belady.

Each takes a :class:`~.trace.TraceOracle` (or the trace) that it is run on, and counts turns to know where it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .latency import tel_safe_budget
from .policies import Compiled, Plan, Policy, TailOptimizedLRU, Trims, whole
from .trace import Trace, TraceOracle

__all__ = ["Belady", "EndAware", "LengthAware", "TailOptimizedBelady"]

Future = Trace | TraceOracle | Iterable[Any]


@dataclass(eq=False)
class _Seeing(Policy):
    """A book that also knows each conversation's next turn."""

    oracle: Future = ()
    next: dict[Hashable, tuple[int, int] | None] = field(default_factory=dict, init=False, repr=False)
    """(position, prompt length) of the next turn by conversation; None: it never returns."""
    turns: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = TraceOracle.of(self.oracle)

    def reset(self) -> None:
        """Forget everything but the settings."""
        super().reset()
        self.next.clear()
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
        self.next[conv_id] = self._known.following(conv_id, self.turns[conv_id])
        return super().on_turn(conv_id, now, history_len, cacheable, forced)


@dataclass(eq=False)
class EndAware(_Seeing, TailOptimizedLRU):
    """T-LRU with one bit of foresight: a conversation that won't return is dropped right after its turn."""

    threshold: int = field(kw_only=True)
    next_prompt_estimate: int = field(default=200, kw_only=True)
    name: ClassVar[str] = "end-aware"

    def __post_init__(self) -> None:
        TailOptimizedLRU.__post_init__(self)
        _Seeing.__post_init__(self)

    def admit(self, conv_id: Hashable) -> int:
        """All, or nothing after the last turn."""
        return 0 if self.next[conv_id] is None else self.history[conv_id]

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(budget="fixed", admit="returning", xi=self.threshold, qhat=self.next_prompt_estimate)


@dataclass(eq=False)
class LengthAware(EndAware):
    """End-Aware that also knows the exact length of the next prompt."""

    name: ClassVar[str] = "length-aware"

    def budget(self, conv_id: Hashable) -> int:
        """B with Q itself; 0 where there is no next turn."""
        return _exact_budget(self.history[conv_id], self.next[conv_id], self.threshold)

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(budget="exact", admit="returning", xi=self.threshold)


@dataclass(eq=False)
class TailOptimizedBelady(_Seeing):
    """The hindsight optimum of the tail excess (Theorem 1).

    After a turn keep what the next one needs to stay within ξ, nothing if there is none; on overflow cut the
    conversation whose next turn is furthest away. Under forced caching the first cut comes with the next overflow.
    """

    threshold: int = field(kw_only=True)
    name: ClassVar[str] = "tail-belady"

    def __post_init__(self) -> None:
        whole(f"{type(self).__name__}: threshold", self.threshold)
        super().__post_init__()

    def budget(self, conv_id: Hashable) -> int:
        """B with Q itself; 0 where there is no next turn."""
        return _exact_budget(self.history[conv_id], self.next[conv_id], self.threshold)

    def admit(self, conv_id: Hashable) -> int:
        """What the next turn needs."""
        return min(self.history[conv_id], self.budget(conv_id))

    def _furthest(self) -> list[Hashable]:
        """Never first, then furthest, least recently served first among equals."""
        never = [conv for conv in self.cached if self.next[conv] is None]
        coming = [(after[0], conv) for conv in self.cached if (after := self.next[conv]) is not None]
        return never + [conv for _, conv in sorted(coming, key=lambda pair: -pair[0])]

    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """See :class:`EvictionPolicy`."""
        order, plan = self._furthest(), Plan(self.cached, need_blocks, protected)
        for conv in plan.among(order):
            plan.cut(conv, down_to=self.budget(conv))
        for conv in plan.among(order):
            plan.cut(conv, down_to=0)
        return plan.cuts()

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`."""
        return Compiled(order="furthest", budget="exact", admit="budget", xi=self.threshold)


@dataclass(eq=False)
class Belady(TailOptimizedBelady):
    """The hindsight optimum of the total uncached length: ξ = 0."""

    threshold: int = field(default=0, init=False)
    name: ClassVar[str] = "belady"


def _exact_budget(history: int, after: tuple[int, int] | None, xi: int) -> int:
    return 0 if after is None else tel_safe_budget(history, after[1], xi)
