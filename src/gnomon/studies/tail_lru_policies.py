"""Policies of the Tail-LRU study by name, each made for one trace, capacity and threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnomon.methods.serve.tail_lru import EvictionPolicy, Trace

METHOD, LRU = "t-lru", "lru"
SAMPLES = 200
"""Prompts of a trace of its own from which Expected-T-LRU knows their lengths."""
THRESHOLDED = ("t-lru", "et-lru", "end-aware", "length-aware", "tail-belady", "adaptive")
"""Policies that take a threshold."""


def make(name: str, trace: Trace, capacity: int, xi: int, qhat: int, seed: int) -> EvictionPolicy:
    """A policy for a trace; `xi` and `qhat` in tokens.

    Expected-T-LRU draws its lengths from a trace of another seed, and takes the generator's death rate: with 3.5 turns
    at 3 a second, a conversation dies after 3.5 / 3 s in the mean.
    """
    import numpy as np

    from gnomon.methods.serve import tail_lru as t

    def lengths() -> list[int]:
        other = t.synthetic(SAMPLES, generator=np.random.default_rng(seed + 10_000))
        return [int(q) for q in other.prompt]

    makers: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": t.LRU,
        "threshold-lru": t.ThresholdLRU,
        "t-lru": lambda: t.TailOptimizedLRU(xi, qhat),
        "adaptive": lambda: t.AdaptiveTailOptimizedLRU(xi, qhat),
        "et-lru": lambda: t.ExpectedTailOptimizedLRU(xi, lengths(), death_rate=3 / 3.5, turn_rate=3.0),
        "end-aware": lambda: t.EndAware(trace, threshold=xi, next_prompt_estimate=qhat),
        "length-aware": lambda: t.LengthAware(trace, threshold=xi),
        "belady": lambda: t.Belady(trace),
        "tail-belady": lambda: t.TailOptimizedBelady(trace, threshold=xi),
        "fifo": t.FIFO,
        "lfu": t.LFU,
        "slru": lambda: t.SLRU(capacity),
        "arc": lambda: t.ARC(capacity),
    }
    return makers[name]()


POLICIES = (
    "lru", "threshold-lru", "t-lru", "adaptive", "et-lru", "end-aware", "length-aware", "belady", "tail-belady", "fifo",
    "lfu", "slru", "arc",
)  # fmt: skip
