"""T-LRU whose threshold follows what is served.

ξ is best at or a little below the percentile that is to improve. Where the cache is large for the load, LRU already
serves that percentile below a fixed ξ, and trimming to ξ makes it worse. So ξ is set every so many turns to a share of
the percentile of the last ones. The rule is inferred: the paper sweeps fixed thresholds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from gnomon.core.errors import UsageError, number

from .policies import Compiled, TailOptimizedLRU, whole

__all__ = ["AdaptiveTailOptimizedLRU"]


@dataclass(eq=False)
class AdaptiveTailOptimizedLRU(TailOptimizedLRU):
    """T-LRU with ξ = `share` × the `percentile` of uncached blocks over the last `window` turns.

    Args:
        threshold: ξ until `window` turns were served, and the largest it may become (the SLO, say).
        percentile: of uncached blocks, in (0, 100); the smallest value that so many turns don't exceed.
        share: in (0, 1].
        window: turns that are looked at.
        every: turns between two settings of ξ.
    """

    percentile: float = 95.0
    share: float = 0.9
    window: int = 500
    every: int = 50
    name: ClassVar[str] = "adaptive t-lru"
    served: deque[int] = field(default_factory=deque, init=False, repr=False)
    current: int = field(default=0, init=False)
    """ξ at the moment."""
    clock: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < number(self.percentile) < 100 or not 0 < number(self.share) <= 1:
            raise UsageError(
                f"AdaptiveTailOptimizedLRU: percentile={self.percentile!r} must lie in (0, 100) and "
                f"share={self.share!r} in (0, 1]."
            )
        whole("window", self.window, 1)
        whole("every", self.every, 1)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the settings."""
        super().reset()
        self.served = deque(maxlen=self.window)
        self.current, self.clock = self.threshold, 0

    def on_served(self, uncached_blocks: int) -> None:
        """A turn had to compute so many blocks; whoever serves reports it before :meth:`on_turn`."""
        self.served.append(uncached_blocks)
        self.clock += 1
        if len(self.served) == self.window and self.clock % self.every == 0:
            rank = math.ceil(self.percentile / 100 * self.window)
            self.current = min(self.threshold, math.floor(self.share * sorted(self.served)[rank - 1]))

    def budget(self, conv_id: Hashable) -> int:
        """B with the ξ of the moment."""
        return max(0, self.history[conv_id] + self.next_prompt_estimate - self.current)

    def compiled(self) -> Compiled | None:
        """None: it runs in Python only."""
        return None
