"""A layer's mask as a parametrization of its weight, with the threshold that is trained.

Thresholds stay in float32 whatever happens to the model: in [0.5, 1) neighbouring bfloat16 numbers lie 0.0039 apart, so
that a threshold of that type would not move at the learning rates it is trained with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gnomon.core.errors import unknown

from .masks import hard_mask, masked, protected
from .scores import as_scores

GRANULARITIES = ("row", "column", "layer")


class MaskedWeight(nn.Module):
    """W ↦ W ⊙ M̃ for one matrix, m × n.

    Attributes:
        threshold: t, float32: m × 1, 1 × n or 1 × 1.
        rank: int16 or int32, m × n; a buffer that no state_dict holds.
        hard: use the mask s > t instead of the soft one; nothing is learnt then.
    """

    rank: Tensor

    def __init__(
        self,
        rank: Int[Tensor, "m n"],
        start: float,
        *,
        granularity: str,
        slope: float,
        min_kept: int,
        transposed: bool = False,
    ) -> None:
        """
        Args:
            start: what t is everywhere at first.
            slope: λ.
            min_kept: weights of each row that always stay.
            transposed: the module stores its weight as n × m (Conv1D).
        """
        super().__init__()
        m, n = rank.shape
        self.threshold = nn.Parameter(torch.full(shape_of(granularity, m, n), start, device=rank.device))
        self.register_buffer("rank", rank, persistent=False)
        self.slope, self.min_kept, self.transposed = slope, min_kept, transposed
        self.hard = False
        self._counted: tuple[int, Tensor] | None = None

    def forward(self, weight: Tensor) -> Tensor:
        """The masked weight, in the dtype and layout of the weight."""
        w = weight.T if self.transposed else weight
        if self.hard:
            out = w * self.raw_mask().to(w.dtype)
        else:
            out, kept = masked(w, self.rank, self.threshold, slope=self.slope, min_kept=self.min_kept)
            if torch.is_grad_enabled():
                self._counted = (self.threshold._version, kept)
        return out.T if self.transposed else out

    def kept(self, weight: Tensor) -> Float[Tensor, ""]:
        """Kept weights by the hard mask, with the soft mask's gradient (straight-through).

        Takes what the last forward pass counted, unless thresholds have moved since.
        """
        found, self._counted = self._counted, None
        if found is not None and found[0] == self.threshold._version and torch.is_grad_enabled():
            return found[1]
        w = weight.T if self.transposed else weight
        return masked(w, self.rank, self.threshold, slope=self.slope, min_kept=self.min_kept)[1]

    @torch.no_grad()
    def raw_mask(self) -> Bool[Tensor, "m n"]:
        """s > t, and whatever always stays."""
        mask = hard_mask(as_scores(self.rank), self.threshold)
        return mask | protected(self.rank, self.min_kept) if self.min_kept else mask

    @torch.no_grad()
    def distance(self, weight: Tensor) -> Float[Tensor, "m n"]:
        """s − t; −∞ at weights that are zero, else +∞ at those that always stay."""
        found = as_scores(self.rank) - self.threshold
        if self.min_kept:
            found.masked_fill_(protected(self.rank, self.min_kept), float("inf"))
        return found.masked_fill_((weight.T if self.transposed else weight) == 0, -float("inf"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MaskedWeight:
        """Move, but never convert: see the module's docstring."""
        return cast(MaskedWeight, super()._apply(keeping_dtype(fn), recurse))  # type: ignore[no-untyped-call]


def keeping_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `Module.to` does to a tensor, without its change of dtype."""

    def moved(tensor: Tensor) -> Tensor:
        out = fn(tensor)
        return out if out.dtype == tensor.dtype else tensor.to(out.device)

    return moved


def shape_of(granularity: str, m: int, n: int) -> tuple[int, int]:
    """Shape of the thresholds of an m × n matrix."""
    if granularity not in GRANULARITIES:
        raise unknown("granularity", granularity, GRANULARITIES)
    return {"row": (m, 1), "column": (1, n), "layer": (1, 1)}[granularity]
