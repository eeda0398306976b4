r"""Expected-T-LRU, Algorithm 2: evict block by block where the expected excess of the next turn rises least.

The next block of conversation i costs :math:`v_i = \lambda_i P(L_i + Q_i - \xi \ge X_i)` with the belief
:math:`\lambda_i = \bar\lambda_i e^{-\mu(now-\tau_i)}` that a silent conversation is still alive. As all beliefs fade by
the same factor, the order of the v doesn't depend on now; keys are compared as
:math:`\log(\bar\lambda_i P) + \mu\tau_i`, which doesn't underflow. Ties go to the least recently served.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gnomon.core.errors import UsageError, number

from .policies import Compiled, Policy, Trims, whole

__all__ = ["ExpectedTailOptimizedLRU"]


@dataclass(eq=False)
class ExpectedTailOptimizedLRU(Policy):
    """ET-LRU: optimal online for the tail excess under the paper's stochastic model (Theorem 2).

    Args:
        threshold: ξ in blocks.
        prompt_lengths: equally likely lengths of the next prompt, in blocks; a sample of observed ones.
        death_rate: μ, deaths per second of a conversation, ≥ 0.
        turn_rate: λ̄, turns per second while alive, > 0; one for all, or by conversation.
    """

    threshold: int
    prompt_lengths: Sequence[int]
    death_rate: float = 0.0
    turn_rate: float | Mapping[Hashable, float] = 1.0
    last: dict[Hashable, float] = field(default_factory=dict, init=False, repr=False)
    """τ by conversation."""
    name: ClassVar[str] = "et-lru"

    def __post_init__(self) -> None:
        whole("ExpectedTailOptimizedLRU: threshold", self.threshold)
        if not len(self.prompt_lengths):
            raise UsageError(
                "ExpectedTailOptimizedLRU: prompt_lengths is empty; give observed lengths, in blocks."
            )
        self._lengths = sorted(
            whole("prompt_lengths", int(q) if q == int(q) else q) for q in self.prompt_lengths
        )
        if not 0 <= number(self.death_rate) < math.inf:
            raise UsageError(f"death_rate={self.death_rate!r} must be a finite number ≥ 0 per second.")
        rates = self.turn_rate.values() if isinstance(self.turn_rate, Mapping) else [self.turn_rate]
        for rate in rates:
            if not 0 < number(rate) < math.inf:
                raise UsageError(f"turn_rate={rate!r} must be a positive number of turns per second.")

    def reset(self) -> None:
        """Forget everything but the settings."""
        super().reset()
        self.last.clear()

    def on_turn(
        self,
        conv_id: Hashable,
        now: float,
        history_len: int,
        cacheable: int | None = None,
        forced: bool = False,
    ) -> int:
        """See :class:`EvictionPolicy`."""
        self.last[conv_id] = now
        return super().on_turn(conv_id, now, history_len, cacheable, forced)

    def on_end(self, conv_id: Hashable) -> None:
        """See :class:`EvictionPolicy`."""
        super().on_end(conv_id)
        self.last.pop(conv_id, None)

    def alive_rate(self, conv_id: Hashable) -> float:
        """λ̄ of a conversation."""
        if isinstance(self.turn_rate, Mapping):
            if conv_id not in self.turn_rate:
                raise UsageError(f"turn_rate has no rate for conversation {conv_id!r}.")
            return float(self.turn_rate[conv_id])
        return float(self.turn_rate)

    def reach(self, conv_id: Hashable, cached_len: int) -> float:
        """P(L + Q − ξ ≥ X): that the next turn needs the last of X cached blocks."""
        shortest = cached_len - self.history[conv_id] + self.threshold
        return (len(self._lengths) - bisect_left(self._lengths, shortest)) / len(self._lengths)

    def belief(self, conv_id: Hashable, now: float) -> float:
        """λ at a time, in turns per second."""
        return self.alive_rate(conv_id) * math.exp(-self.death_rate * (now - self.last[conv_id]))

    def value(self, conv_id: Hashable, now: float, cached_len: int | None = None) -> float:
        """v of a conversation's last cached block."""
        has = self.cached.get(conv_id, 0) if cached_len is None else cached_len
        return self.belief(conv_id, now) * self.reach(conv_id, has)

    def _key(self, conv_id: Hashable, cached_len: int) -> float:
        """log v, less what is common to all."""
        weight = self.alive_rate(conv_id) * self.reach(conv_id, cached_len)
        return math.log(weight) + self.death_rate * self.last[conv_id] if weight > 0 else -math.inf

    def victims(self, need_blocks: int, protected: Collection[Hashable] = ()) -> Trims:
        """See :class:`EvictionPolicy`. O(E + n log E) for n blocks of E conversations."""
        heap = [
            (self._key(conv, has), turn, conv, has)
            for turn, (conv, has) in enumerate(self.cached.items())  # the book's order breaks ties
            if conv not in protected
        ]
        heapq.heapify(heap)
        left: dict[Hashable, int] = {}
        for _ in range(max(0, need_blocks)):
            if not heap:
                break
            _, turn, conv, has = heap[0]
            left[conv] = has - 1
            if has > 1:
                heapq.heapreplace(heap, (self._key(conv, has - 1), turn, conv, has - 1))
            else:
                heapq.heappop(heap)
        return list(left.items())

    def compiled(self) -> Compiled | None:
        """See :class:`Policy`. Rates by conversation run in Python only."""
        if isinstance(self.turn_rate, Mapping):
            return None
        return Compiled(
            order="expected", xi=self.threshold, samples=tuple(self._lengths),
            death_rate=float(self.death_rate), turn_rate=float(self.turn_rate),
        )  # fmt: skip
