"""Policies that choose single tokens: MAGE, the block-average query, an oracle, a window, and chance.

Each says how important prefix tokens are to every query of the block (`per_query`), and when that is estimated: at the
block's first pass (`when = "first"`) or at each. The set is shared by all queries of the block and all heads of a
group; it is the top k of the mean over these. With N ≤ k everything is read: the method is dense there.

Shapes: R rows, Hq query and H key heads in groups of G, B queries, N prefix tokens.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gnomon.core.errors import UsageError, unknown
from gnomon.kernels.sparse_decode.block_reference import (
    NORMALISE,
    mean_over_queries,
    query_importance,
    top_sets,
)

from ..block_diffusion.sparse import BlockState
from .tiles import tile_sets, tile_sums

COMMITS = ("sparse", "exact")
"""What the pass that stores a finished block reads."""


class Selector:
    """What the policies share: which layers and passes are dense, when sets are made, and how."""

    keep_block: ClassVar[bool] = True
    when: ClassVar[str] = "each"
    estimates: ClassVar[bool] = True
    """Sets follow from `per_query`; False where they don't depend on queries."""
    k: int
    dense_layers: int
    commit: str

    def per_query(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H B n"]:
        """Importance of each token (or tile of tokens) to each query of the block, mean over a group's heads.

        Raises:
            UsageError: the policy doesn't look at queries (`estimates` is False), so it has none.
        """
        raise UsageError(
            f"{type(self).__name__} doesn't look at queries: its sets are the same for all of them."
        )

    def shared(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H n"]:
        """The same for the block: the mean over its queries that count."""
        return mean_over_queries(self.per_query(q, k_prefix, state), self.queries(state))

    def sets(self, scores: Float[Tensor, "*rest n"], n: int) -> Int[Tensor, "*rest k"]:
        """Tokens that importances name, out of N = n; ascending."""
        return top_sets(scores, self.k)

    def queries(self, state: BlockState) -> Bool[Tensor, "R B"]:
        """Positions whose queries count: those that were masked when the block began."""
        return state.queries

    def covers(self, n: int) -> bool:
        """Whether a set of n prefix tokens would be all of them."""
        return n <= self.k

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
        if layer < self.dense_layers or self.covers(n) or (state.commit and self.commit == "exact"):
            return None
        if self.when == "each":
            return self._made(layer, q, k_prefix, state)
        if step == 1:  # exact itself: it shows the set to the passes after it
            state.kept[layer] = self._made(layer, q, k_prefix, state)
            return None
        kept: Tensor | None = state.kept.get(layer)
        return kept

    def _made(self, layer: int, q: Tensor, k_prefix: Tensor, state: BlockState) -> Tensor:
        return self.sets(self.shared(q, k_prefix, state), k_prefix.shape[2])

    def reads(self, n: int) -> float:
        """KV tokens that one choice out of n reads besides attention; a key alone is half a token."""
        return 0.0

    def _check(self) -> None:
        require(self, k=self.k, dense_layers=self.dense_layers, commit=self.commit)


def require(of: object, *, k: int = 1, dense_layers: int = 0, commit: str = "sparse") -> None:
    """Refuse settings that no policy takes.

    Raises:
        UsageError: with the policy's name.
    """
    name = type(of).__name__
    if k < 1:
        raise UsageError(
            f"{name}: k={k} would read no token of the prefix. Use 1 or more; a k of N or more is dense."
        )
    if dense_layers < 0:
        raise UsageError(f"{name}: dense_layers={dense_layers} must be at least 0.")
    if commit not in COMMITS:
        raise unknown(f"commit of {name}", commit, COMMITS)


@dataclass(frozen=True)
class Mage(Selector):
    """Softmax mass in the exact first pass, whose block is all masks, names the set of all later passes."""

    k: int = 512
    """Tokens of a set, fixed."""
    dense_layers: int = 2
    """First layers that read everything."""
    _: KW_ONLY
    commit: str = "sparse"
    """One of `COMMITS`."""
    normalise: str = "row"
    """A query's mass adds up to 1 over prefix and block ("row"), or over the "prefix"."""
    tile: int = 1
    """Neighbouring tokens that are chosen together, k // tile tiles of them."""
    positions: tuple[int, ...] | None = None
    """Positions of the block whose queries count; None is all that were masked."""
    when: ClassVar[str] = "first"

    def __post_init__(self) -> None:
        self._check()
        if self.normalise not in NORMALISE:
            raise unknown("normalise", self.normalise, NORMALISE)
        if not 1 <= self.tile <= self.k:
            raise UsageError(f"Mage: tile={self.tile} must lie in [1, k={self.k}].")
        if self.positions is not None and (not self.positions or min(self.positions) < 0):
            raise UsageError(f"Mage: positions={self.positions} must be places in the block, from 0.")

    def per_query(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H B n"]:
        each = mass(q, k_prefix, state, self.normalise)
        return each if self.tile == 1 else tile_sums(each, self.tile)

    def sets(self, scores: Float[Tensor, "*rest n"], n: int) -> Int[Tensor, "*rest k"]:
        if self.tile == 1:
            return top_sets(scores, self.k)
        return tile_sets(scores, n, self.tile, self.k // self.tile)

    def covers(self, n: int) -> bool:
        return n <= max(self.k, self.tile)

    def queries(self, state: BlockState) -> Bool[Tensor, "R B"]:
        if self.positions is None:
            return state.queries
        block = state.queries.shape[1]
        if max(self.positions) >= block:
            raise UsageError(f"Mage: positions={self.positions}, but a block has {block} tokens.")
        named = torch.zeros_like(state.queries)
        named[:, list(self.positions)] = True
        both = named & state.queries
        return torch.where(both.any(-1, keepdim=True), both, state.queries)


@dataclass(frozen=True)
class Oracle(Selector):
    """The exact softmax mass of each pass: what a set of k tokens can reach. Reads all keys, so it isn't faster."""

    k: int = 512
    _: KW_ONLY
    dense_layers: int = 2
    commit: str = "sparse"

    def __post_init__(self) -> None:
        self._check()

    def per_query(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H B n"]:
        return mass(q, k_prefix, state)

    def reads(self, n: int) -> float:
        return n / 2


@dataclass(frozen=True)
class AvgQuery(Selector):
    """Scores of the block's average query, anew in each pass. Reads all keys, too."""

    k: int = 512
    _: KW_ONLY
    dense_layers: int = 2
    commit: str = "sparse"

    def __post_init__(self) -> None:
        self._check()

    def per_query(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H B n"]:
        return dots(group_mean(q, k_prefix.shape[1]), k_prefix) * state.scaling

    def shared(self, q: Tensor, k_prefix: Tensor, state: BlockState) -> Float[Tensor, "R H n"]:
        """q̄ · k: the mean of scores is the score of the mean, with B times less work."""
        mean = mean_over_queries(group_mean(q, k_prefix.shape[1]), self.queries(state))
        return dots(mean[:, :, None], k_prefix)[:, :, 0] * state.scaling

    def reads(self, n: int) -> float:
        return n / 2


@dataclass(frozen=True)
class Window(Selector):
    """The last k tokens, of which the first `sinks` are taken from the sequence's start."""

    k: int = 512
    _: KW_ONLY
    sinks: int = 0
    dense_layers: int = 2
    commit: str = "sparse"
    estimates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check()
        if not 0 <= self.sinks <= self.k:
            raise UsageError(f"Window: sinks={self.sinks} must lie in [0, k={self.k}].")

    def _made(self, layer: int, q: Tensor, k_prefix: Tensor, state: BlockState) -> Tensor:
        rows, heads, n, _ = k_prefix.shape
        if layer not in state.kept:
            at = torch.arange(n, device=k_prefix.device)
            chosen = at[(at < self.sinks) | (at >= n - (self.k - self.sinks))]
            state.kept[layer] = chosen.expand(rows, heads, -1)
        kept: Tensor = state.kept[layer]
        return kept


@dataclass(frozen=True)
class Random(Selector):
    """k tokens drawn anew for each block, row, layer and key head, and kept for its passes."""

    k: int = 512
    _: KW_ONLY
    seed: int = 0
    dense_layers: int = 2
    commit: str = "sparse"
    estimates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check()

    def _made(self, layer: int, q: Tensor, k_prefix: Tensor, state: BlockState) -> Tensor:
        if layer not in state.kept:
            # A stream of its own for each set, so that no other draw shifts it.
            own = (self.seed * 1_000_003 + state.block) * 4_099 + layer
            generator = torch.Generator().manual_seed(own % 2**63)
            draws = torch.rand(*k_prefix.shape[:3], generator=generator)
            state.kept[layer] = top_sets(draws, self.k).to(k_prefix.device)
        kept: Tensor = state.kept[layer]
        return kept


# ------------------------------------------------------------------------------------------ what they estimate with


def mass(
    q: Float[Tensor, "R Hq B d"],
    k_prefix: Float[Tensor, "R H N d"],
    state: BlockState,
    normalise: str = "row",
) -> Float[Tensor, "R H B N"]:
    """Exact softmax weights of this pass, by query."""
    assert state.block_keys is not None
    return query_importance(
        q,
        k_prefix,
        state.block_keys,
        scaling=state.scaling,
        normalise=normalise,
        softcap=state.softcap,
    )


def group_mean(q: Float[Tensor, "R Hq B d"], heads: int) -> Float[Tensor, "R H B d"]:
    """Queries averaged over the heads of a group, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, _, block, width = q.shape
    mean: Tensor = q.to(wide).reshape(rows, heads, -1, block, width).mean(2)
    return mean


def dots(q: Float[Tensor, "R H B d"], keys: Float[Tensor, "R H N d"]) -> Float[Tensor, "R H B N"]:
    """q · k, in the dtype of q."""
    return q @ keys.to(q.dtype).transpose(-1, -2)
