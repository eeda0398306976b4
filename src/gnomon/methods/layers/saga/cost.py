"""What a decoding step reads, and how much of the true top-N an approximate choice finds: formulas of the card."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.core.errors import UsageError


def expected_recall(n: int, c: int = 1) -> float:
    r"""Share of the true top-N among the winners of B = cN buckets, where positions are random.

    :math:`B (1 - (1 - 1/B)^N) / N`: 1 - 1/e for c = 1 and large N.

    Raises:
        UsageError: a count below 1.
    """
    if n < 1 or c < 1:
        raise UsageError(f"n={n} and c={c} must both be at least 1.")
    buckets = c * n
    return float(buckets * (1 - (1 - 1 / buckets) ** n) / n)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Elements per token and layer; times the bytes of an element for traffic."""

    keys: int
    """Of K that are read: H_k L d."""
    values: int
    """Of V that are gathered: H_q N d, whatever H_v is."""
    dense: int
    """Of K and V that dense GQA reads: 2 H L d."""
    cache: int
    """Of K and V that are held: (H_k + H_v) L d."""
    dense_cache: int
    """Of those that dense GQA holds: 2 H L d."""
    products: int
    """Multiplications of q·k, which no choice of heads saves: H_q L d."""

    @property
    def reads(self) -> int:
        """Elements that are read."""
        return self.keys + self.values

    @property
    def speedup(self) -> float:
        """Elements that dense attention reads per element read: 2HL / (H_k L + H_q N)."""
        return self.dense / self.reads


def cost_model(
    H_q: int,
    H_k: int,
    H_v: int,
    L: int,
    N: int,
    d: int,
    *,
    dense_heads: int | None = None,
    shared: bool = False,
) -> Cost:
    """Memory traffic and cache of one decoding step.

    Args:
        dense_heads: H of the dense GQA that it is compared with; H_v by default.
        shared: one set of positions per key head: H_v N d values are gathered.

    Raises:
        UsageError: a count below 1.
    """
    dense = H_v if dense_heads is None else dense_heads
    for name, value in (("H_q", H_q), ("H_k", H_k), ("H_v", H_v), ("L", L), ("N", N), ("d", d), ("H", dense)):
        if value < 1:
            raise UsageError(f"{name}={value} must be at least 1.")
    kept = min(N, L)
    return Cost(
        keys=H_k * L * d,
        values=(H_v if shared else H_q) * kept * d,
        dense=2 * dense * L * d,
        cache=(H_k + H_v) * L * d,
        dense_cache=2 * dense * L * d,
        products=H_q * L * d,
    )
