"""Policies that choose tiles of neighbouring tokens: Quest's pages and SparseD's blocks.

Sets of different heads must be equally long, so a last tile that isn't full is always read, and counts as one.

Shapes: R rows, Hq query and H key heads, B queries, N prefix tokens in T full tiles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.kernels.sparse_decode.block_reference import top_sets

if TYPE_CHECKING:
    from ..block_diffusion.sparse import BlockState


def tile_sums(x: Float[Tensor, "*rest N"], tile: int) -> Float[Tensor, "*rest T"]:
    """Sums over the full tiles."""
    full = x.shape[-1] // tile
    sums: Tensor = x[..., : full * tile].reshape(*x.shape[:-1], full, tile).sum(-1)
    return sums


def tile_sets(
    scores: Float[Tensor, "*rest T"], n: int, tile: int, count: int, *, first: int = 0
) -> Int[Tensor, "*rest k"]:
    """Tokens of the `count` best tiles out of n tokens; the incomplete last one is among them.

    One full tile at least is read. `first` is the number of the first token.
    """
    full = n // tile
    tail = torch.arange(full * tile, n, device=scores.device)
    take = min(max(1, count - (len(tail) > 0)), full)
    chosen = tail[:0].expand(*scores.shape[:-1], 0)
    if take:
        tiles = top_sets(scores, take)
        chosen = (tiles[..., None] * tile + torch.arange(tile, device=scores.device)).flatten(-2)
    return torch.cat([chosen, tail.expand(*scores.shape[:-1], -1)], -1) + first


def page_bounds(
    keys: Float[Tensor, "R H N d"], page: int
) -> tuple[Float[Tensor, "R H T d"], Float[Tensor, "R H T d"]]:
    """Least and largest entry of each channel over every full page."""
    rows, heads, n, width = keys.shape
    pages = keys[:, :, : n // page * page].reshape(rows, heads, n // page, page, width)
    return pages.amin(3), pages.amax(3)


def bounds(
    q: Float[Tensor, "*rest d"], low: Float[Tensor, "*rest2 d"], high: Float[Tensor, "*rest2 d"]
) -> Float[Tensor, "*rest3"]:
    """Σ_c max(q_c low_c, q_c high_c), at least the largest q · k of a page; two products, since low ≤ high."""
    return q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)


def kept_bounds(
    keys: Float[Tensor, "R H N d"], page: int, layer: int, state: BlockState
) -> tuple[Tensor, Tensor]:
    """:func:`page_bounds`, of which those of earlier blocks are kept: committed keys don't change."""
    name = ("pages", layer, page)
    full = keys.shape[2] // page
    held = state.memory.get(name)
    if held is None:
        held = page_bounds(keys, page)
    elif held[0].shape[2] < full:
        new = page_bounds(keys[:, :, held[0].shape[2] * page :], page)
        held = (torch.cat([held[0], new[0]], 2), torch.cat([held[1], new[1]], 2))
    state.memory[name] = held
    return held


def part_sets(
    importance: Float[Tensor, "R H N"], first: int, end: int, tile: int, share: float
) -> Int[Tensor, "R H k"]:
    """Tokens of the heaviest ⌈share · tiles⌉ tiles of the part [first, end) of the prefix."""
    n = end - first
    if n == 0:
        return torch.empty(*importance.shape[:2], 0, dtype=torch.long, device=importance.device)
    count = math.ceil(share * math.ceil(n / tile))
    return tile_sets(tile_sums(importance[..., first:end], tile), n, tile, count, first=first)
