"""The thresholds of NF12: what is encoded, and how its layers run."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class NF12Config:
    """Settings with the card's defaults."""

    min_elements: int = 1 << 16
    """Matrices with fewer elements stay as they are: nothing is gained, and small ones are often special."""
    raw_share: float = 0.95
    """A matrix stays as it is when its planes would take this share of its BF16 bytes or more."""
    fused_rows_cpu: int | None = None
    """Up to this many rows of x (batch x tokens) a layer multiplies straight from the planes on a CPU. By
    default the card's 4, and 16 on processors without bfloat16 products (`kernels.blocked.fused_rows`)."""
    fused_rows_cuda: int = 8
    """The same on a CUDA device. With more rows the matrix is decoded once and a BF16 product does the rest."""

    def __post_init__(self) -> None:
        for name in ("min_elements", "fused_rows_cpu", "fused_rows_cuda"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} is a number of things; use 0 or more.")
        if not 0 < self.raw_share <= 1:
            raise UsageError(
                f"raw_share={self.raw_share} must lie in (0, 1]: above 1 a matrix could grow by being encoded."
            )
