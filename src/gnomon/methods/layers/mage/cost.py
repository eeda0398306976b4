"""KV tokens that a block reads for each key head and layer, and the speed-up that reading them would give.

The commit pass is left out on both sides, and so is choosing: the bound is attention's alone, and its limit for long
prefixes is S.

Letters: N prefix tokens, B of the block, S passes, k of a set.
"""

from __future__ import annotations

from gnomon.core.errors import UsageError


def exact_reads(n: int, block: int, steps: int) -> int:
    """S (N + B)."""
    _check(n, block, steps)
    return steps * (n + block)


def mage_reads(n: int, block: int, steps: int, k: int) -> int:
    """(N + B) + (S − 1)(min(k, N) + B): one exact pass, then the set's.

    >>> mage_reads(8192, 32, 32, 512)
    25088
    """
    _check(n, block, steps)
    if k < 1:
        raise UsageError(f"k={k} must be at least 1.")
    return (n + block) + (steps - 1) * (min(k, n) + block)


def attention_speedup(n: int, block: int, steps: int, k: int) -> float:
    """Exact reads over MAGE's: the most that attention can gain where memory traffic is all that counts.

    >>> round(attention_speedup(131072, 32, 32, 512), 2)
    28.35
    """
    return exact_reads(n, block, steps) / mage_reads(n, block, steps, k)


def _check(n: int, block: int, steps: int) -> None:
    if n < 0 or block < 1 or steps < 1:
        raise UsageError(f"n={n} must be at least 0, block={block} and steps={steps} at least 1.")
