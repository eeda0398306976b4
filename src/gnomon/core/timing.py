"""Timing that refuses to flatter: contenders take turns, and what they read doesn't lie in a cache.

    copies = copies_for(bytes_of_one)            # as many as make four times the last-level cache
    times = interleaved([Contender("ours", [partial(f, w) for w in weights]), …], repeats=15)

Not here: intervals of ratios (`core.stats.median_ratio`) and verdicts (`lab.claims.Ratio`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

__all__ = ["Contender", "Spread", "copies_for", "interleaved", "last_level_cache", "spread", "threads_set"]

ASSUMED_CACHE = 32 << 20
"""Bytes, where the system doesn't say."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do a piece of work."""

    name: str
    calls: Sequence[Callable[[], object]]
    """The work on each copy of its operands."""


@dataclass(frozen=True)
class Spread:
    """Seconds of one call: median, and the 20 % and 80 % quantiles."""

    median: float
    low: float
    high: float


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that the first core sees."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=ASSUMED_CACHE)


def copies_for(smallest: int, *, cache: int | None = None) -> int:
    """How many copies of the operands make four times the last-level cache.

    Args:
        smallest: bytes of one copy in the smallest format under test, which so decides for all.

    Raises:
        UsageError: nothing to copy.
    """
    if smallest < 1:
        raise UsageError(f"A copy of {smallest} bytes can't fill a cache.")
    return math.ceil(4 * (last_level_cache() if cache is None else cache) / smallest)


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """torch's number of threads for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(contenders: Sequence[Contender], *, repeats: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds per call, one figure a repeat: the mean over a pass through all copies.

    The contenders take turns, and who begins moves on with each repeat, so that a machine that slows down for
    a while slows all of them.

    Raises:
        UsageError: no contender, no repeat, or two of one name.
    """
    names = [c.name for c in contenders]
    if not names or repeats < 1 or len(set(names)) < len(names):
        raise UsageError(f"Contenders {names} and {repeats} repeats can't be timed; names must be distinct.")
    for contender in contenders:
        for _ in range(warm_up):
            for call in contender.calls:
                call()
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            start = time.perf_counter()
            for call in contender.calls:
                call()
            times[contender.name].append((time.perf_counter() - start) / len(contender.calls))
    return times


def spread(seconds: Sequence[float]) -> Spread:
    """Median and outer fifths of a few timings."""
    if len(seconds) < 2:
        return Spread(*[float(seconds[0])] * 3)
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return Spread(statistics.median(seconds), fifths[0], fifths[-1])
