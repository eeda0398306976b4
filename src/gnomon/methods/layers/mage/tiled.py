"""Quest and SparseD, adapted to blocks of queries.

Quest was made for one query at a time, SparseD for bidirectional models without a cache; both get one set for a block
and key head here, as every policy does.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.core.errors import UsageError
from gnomon.kernels.sparse_decode.block_reference import mean_over_queries

from ..block_diffusion.sparse import BlockState
from .selectors import Selector, mass, require
from .tiles import bounds, kept_bounds, page_bounds, part_sets, tile_sets


@dataclass(frozen=True)
class Quest(Selector):
    """Pages by an upper bound of their scores, from the least and largest key entries; anew in each pass.

    The bound of a block is the mean over its queries and the group's heads.
    """

    k: int = 512
    _: KW_ONLY
    page: int = 16
    """Tokens of a page; k // page pages are read."""
    least: int = 3
    """Pages that are read at least, even where k is smaller."""
    dense_layers: int = 2
    commit: str = "sparse"

    def __post_init__(self) -> None:
        self._check()
        if self.page < 1 or self.least < 1:
            raise UsageError(f"Quest: page={self.page} and least={self.least} must be at least 1.")

    @property
    def pages(self) -> int:
        """Pages of a set."""
        return max(self.least, self.k // self.page)

    def covers(self, n: int) -> bool:
        return n <= max(self.k, self.pages * self.page)

    def per_query(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H B n"]:
        return self._bounds(q, page_bounds(k_prefix, self.page), k_prefix.shape[1])

    def sets(self, scores: Float[Tensor, "*rest n"], n: int) -> Int[Tensor, "*rest k"]:
        return tile_sets(scores, n, self.page, self.pages)

    def reads(self, n: int) -> float:
        return n / self.page  # two vectors a page, as much as a key and its value

    def _made(self, layer: int, q: Tensor, k_prefix: Tensor, state: BlockState) -> Tensor:
        held = kept_bounds(k_prefix, self.page, layer, state)
        each = self._bounds(q, held, k_prefix.shape[1])
        return self.sets(mean_over_queries(each, self.queries(state)), k_prefix.shape[2])

    def _bounds(self, q: Tensor, held: tuple[Tensor, Tensor], heads: int) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).reshape(len(q), heads, -1, *q.shape[2:])
        low, high = (x.to(wide)[:, :, None] for x in held)
        return bounds(grouped, low, high).mean(2)


@dataclass(frozen=True, init=False)
class SparseD:
    """Exact for the first ⌊S · skip⌋ + 1 passes; the last of these names the tiles that all later ones read.

    Tiles of the prompt and of the generated part are ranked apart, each by the mean softmax weight over the block's
    queries, and a share `select` of either is kept.
    """

    skip: float = 0.2
    """Share of the passes that stay exact."""
    select_ratio: float = 0.3
    """Share of tiles that is kept; 0.3 for long contexts, 0.5 for short ones."""
    block: int = 128
    """Tokens of a tile; 32 for short contexts."""
    dense_layers: int = 0
    commit: str = "sparse"
    keep_block: ClassVar[bool] = True

    def __init__(
        self,
        skip: float = 0.2,
        select: float = 0.3,  # a field of this name would hide the method
        block: int = 128,
        *,
        dense_layers: int = 0,
        commit: str = "sparse",
    ) -> None:
        """
        Args:
            select: becomes `select_ratio`.
        """
        settings = {"skip": skip, "select_ratio": select, "block": block}
        for name, value in {**settings, "dense_layers": dense_layers, "commit": commit}.items():
            object.__setattr__(self, name, value)
        require(self, dense_layers=self.dense_layers, commit=self.commit)
        if not 0 <= self.skip < 1 or not 0 < self.select_ratio <= 1 or self.block < 1:
            raise UsageError(
                f"SparseD: skip={self.skip} must lie in [0, 1), select={self.select_ratio} in (0, 1], and "
                f"block={self.block} be at least 1."
            )

    def select(
        self,
        layer: int,
        q: Float[Tensor, "R Hq B d"],
        k_prefix: Float[Tensor, "R H N d"],
        step: int,
        state: BlockState,
    ) -> Int[Tensor, "R H k"] | None:
        """The tokens that this pass reads in this layer; None for all. See :class:`SparsePolicy`."""
        n = k_prefix.shape[2]
        if layer < self.dense_layers or (state.commit and self.commit == "exact"):
            return None
        exact = math.floor(state.steps * self.skip) + 1
        if step == exact and not state.commit:
            weights = mean_over_queries(mass(q, k_prefix, state), state.queries)
            border = min(state.prompt, n)
            parts = [
                part_sets(weights, first, end, self.block, self.select_ratio)
                for first, end in ((0, border), (border, n))
            ]
            state.kept[layer] = torch.cat(parts, -1)
        if step <= exact or layer not in state.kept:
            return None
        kept: Tensor = state.kept[layer]
        return None if kept.shape[-1] >= n else kept

    def reads(self, n: int) -> float:
        """Nothing: exact passes show the weights."""
        return 0.0
