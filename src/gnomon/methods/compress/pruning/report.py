"""What pruning did: masks, real sparsities, and the small print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from gnomon.core.errors import GnomonError

from .allocation import Allocation
from .quota import Pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class PruneReport:
    """Result of :func:`~.prune.prune`, counted on the stored weights."""

    masks: Mapping[str, Bool[Tensor, "_ _"]]
    """True where a weight is kept, on the CPU, [outputs, inputs] whatever the layer stores."""
    sparsity: float
    """Share of zeros in all pruned matrices together."""
    per_layer: Mapping[str, float]
    """Share of zeros by matrix."""
    requested: float
    method: str
    allocation: Allocation
    pattern: Pattern | None
    removed: int
    """Zeros in the pruned matrices now."""
    zeros_before: int
    """Those that were there before; part of `removed`."""
    weights: int
    """Weights of the pruned matrices."""
    losses: Mapping[str, float]
    """SparseGPT: the error ‖(W − Ŵ)X‖² that the sweep accounts for, per token; empty for other methods."""
    notes: tuple[str, ...]
    """What happened on the way: damping that had to be raised, dead inputs, unequal N."""

    def __post_init__(self) -> None:
        if not self.masks:
            raise GnomonError("Nothing was pruned.")

    @property
    def off(self) -> int:
        """Weights removed beyond the request, negative below it; 0 with exact=True and no pattern."""
        return self.removed - round(self.requested * self.weights)
