"""What thresholds mean in zeros: per row, matrix, decoder layer and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SparsityReport:
    """Shares of zeros, those that were there before included."""

    target: float
    """p, what was asked for."""
    sparsity: float
    """Zeros among the weights of all targeted matrices together."""
    tolerance: float
    per_matrix: Mapping[str, float]
    per_layer: Mapping[int, float]
    """By the decoder layer's number."""
    rows: Mapping[str, Float[Tensor, " m"]]
    """Of each output, float64."""
    removed: int
    """Zeros, as a number."""
    total: int
    """Weights of the targeted matrices: every one counts once, whatever heads share it."""
    trained: int
    """Thresholds."""

    @property
    def converged(self) -> bool:
        """Whether the budget is met within the tolerance; a model for which it isn't has no sparsity p."""
        return abs(self.sparsity - self.target) <= self.tolerance

    def __str__(self) -> str:
        met = "" if self.converged else f", not the {self.target:.4f} that was asked for"
        return f"{self.removed:,} of {self.total:,} weights are zero: {self.sparsity:.4f}{met}"
