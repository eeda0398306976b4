"""The settings of SAGA attention and Atop-N; numbers by default are inferred, as the paper wasn't available."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.core.errors import UsageError, unknown

SELECTORS = (
    "strided",
    "exact",
    "threshold",
    "quest",
    "shared_max",
    "shared_mean",
    "contiguous",
    "window",
    "dense",
)
"""How the kept positions are chosen, see `select`; `dense` keeps all of them."""


@dataclass(frozen=True, kw_only=True)
class SagaConfig:
    """Head counts and the choice of positions."""

    num_key_heads: int
    """H_k. A quarter of the value heads is the default of the card."""
    num_value_heads: int
    """H_v; H_k divides it, and it divides the query heads."""
    top_n: int = 256
    """N, the positions that a query head keeps: 256 to 1024, or L/32 and at least 64. A multiple of a period of the
    text puts its peaks into one bucket; take another N or a larger `oversample` there."""
    oversample: int = 1
    """c: buckets per kept position."""
    selector: str = "strided"
    """One of `SELECTORS`."""
    always_keep: tuple[int, int] = (0, 0)
    """(a, w): the first a and the last w visible positions are among the N, whatever their scores."""
    dense_layers: int = 0
    """The first layers, which keep all positions."""
    sparse_prefill: bool = False
    """Also choose where several query rows come at once (prompts, training). False: only in single steps."""
    allow_fewer_values: bool = False
    """Accept H_v < H_k, the ablation that cuts the wrong heads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "always_keep", tuple(self.always_keep))  # JSON has lists
        h_k, h_v = self.num_key_heads, self.num_value_heads
        for name in ("num_key_heads", "num_value_heads", "top_n", "oversample"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UsageError(f"{name}={value!r} must be a whole number of at least 1.")
        if h_v % h_k:
            if not self.allow_fewer_values:
                raise UsageError(
                    f"{h_k} key heads don't divide {h_v} value heads. SAGA has fewer key heads than value heads; "
                    "allow_fewer_values=True makes the ablation that has more."
                )
            if h_k % h_v:
                raise UsageError(f"Neither of {h_k} key heads and {h_v} value heads divides the other.")
        if self.selector not in SELECTORS:
            raise unknown("selector", self.selector, SELECTORS)
        if len(self.always_keep) != 2 or any(type(one) is not int or one < 0 for one in self.always_keep):
            raise UsageError(f"always_keep={self.always_keep} must be two counts: first and last positions.")
        if self.selector == "window":
            if self.always_keep[0] >= self.top_n:
                raise UsageError(
                    f"A window of {self.always_keep[0]} first positions leaves none of top_n={self.top_n} for the "
                    "last ones. Raise top_n."
                )
        elif sum(self.always_keep) >= self.top_n:
            raise UsageError(
                f"always_keep={self.always_keep} leaves nothing of top_n={self.top_n} to choose. Raise top_n."
            )
        if type(self.dense_layers) is not int or self.dense_layers < 0:
            raise UsageError(f"dense_layers={self.dense_layers!r} must be a whole number of at least 0.")

    def require_queries(self, heads: int) -> None:
        """Refuse a number of query heads that key or value heads don't divide.

        Raises:
            UsageError: with the counts.
        """
        for name, count in (("key", self.num_key_heads), ("value", self.num_value_heads)):
            if heads % count:
                raise UsageError(
                    f"{count} {name} heads don't divide {heads} query heads. Take a divisor of {heads}."
                )
