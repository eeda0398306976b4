"""One pool of keys and values for all rows of all requests: every slot is tagged, and nothing moves when a row waits.

A slot holds one token's keys and values in every layer, and the tags (branch, position). A row sees the slots of the
branches on its own path, up to its own position. A fork so needs no copy, a join rewrites tags, and the end of a
request takes its slots out by index-select.

Shapes: S slots in use, n new tokens, H key heads, d their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["KVPool", "PoolLayer"]

FIRST_ROOM = 256


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (1, H, room, d); the room doubles when it is full."""

    is_sliding = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__()
        self.pool = pool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take room in the dtype and on the device of the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], self.pool.room, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.pool.room, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write behind the slots in use; everything up to there, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys.shape[2] < self.pool.room:
            self.keys, self.values = (self._grown(kept) for kept in (self.keys, self.values))
        start = self.pool.used
        end = start + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, kept: Tensor) -> Tensor:
        wider = kept.new_empty(*kept.shape[:2], self.pool.room, kept.shape[-1])
        wider[:, :, : self.pool.used] = kept[:, :, : self.pool.used]
        return wider

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.pool.used

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the queries are compared with, and where they begin."""
        return self.pool.used + query_length, 0

    def get_max_length(self) -> int:
        """-1: the pool grows."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same under its older name."""
        return -1


class KVPool(Cache):  # type: ignore[misc]
    """All layers' slots with their tags, and a count of blocks.

    Blocks are what paged engines hand out: `block_size` slots. The pool counts those that its slots fill, so that
    taking and giving back memory shows in `allocated` and `freed`.

    Attributes:
        used: slots in use.
        allocated, freed: blocks taken and given back so far.
        branch, position: (S,) tags.
    """

    def __init__(self, device: torch.device, *, block_size: int = 16) -> None:
        super().__init__(layer_class_to_replicate=partial(PoolLayer, self))
        self.block_size = block_size
        self.used, self.room = 0, FIRST_ROOM
        self.allocated = self.freed = 0
        self._branch = np.zeros(FIRST_ROOM, dtype=np.int64)
        self._position = np.zeros(FIRST_ROOM, dtype=np.int64)
        self._device = device

    @property
    def branch(self) -> Int[np.ndarray, " S"]:
        """Branch of each slot."""
        return self._branch[: self.used]

    @property
    def position(self) -> Int[np.ndarray, " S"]:
        """Position of each slot's token."""
        return self._position[: self.used]

    @property
    def blocks(self) -> int:
        """Blocks that the slots in use fill."""
        return -(-self.used // self.block_size)

    def reserve(self, branch: Int[np.ndarray, " n"], position: Int[np.ndarray, " n"]) -> None:
        """Tag the next n slots; they count as used only after `commit`."""
        end = self.used + len(branch)
        while self.room < end:
            self.room *= 2
        if len(self._branch) < self.room:
            more = np.zeros(self.room - len(self._branch), dtype=np.int64)
            self._branch = np.concatenate((self._branch, more))
            self._position = np.concatenate((self._position, more))
        self._branch[self.used : end], self._position[self.used : end] = branch, position

    def seen(
        self,
        path: Bool[np.ndarray, "n B"],
        position: Int[np.ndarray, " n"],
        *,
        window: int | None = None,
    ) -> Bool[np.ndarray, "n S1"]:
        """Which slots (those reserved among them) each new token may look at.

        Args:
            path: branches on the way to each token, its own among them.
            window: positions that a layer with a sliding window looks back at.
        """
        end = self.used + len(position)
        at = self._position[:end]
        found: Bool[np.ndarray, "n S1"] = path[:, self._branch[:end]] & (at[None] <= position[:, None])
        if window is not None:
            found &= position[:, None] - at[None] < window
        return found

    def commit(self, tokens: int) -> None:
        """Keep the tokens that were written last."""
        before = self.blocks
        self.used += tokens
        self.allocated += self.blocks - before

    def relabel(self, joined: Sequence[int], into: int) -> None:
        """Join: slots of these branches belong to another one from now on. Nothing is copied."""
        self.branch[np.isin(self.branch, list(joined))] = into

    def drop(self, branches: Sequence[int]) -> None:
        """End of a request: take the slots of its branches out and close the gaps."""
        kept = np.flatnonzero(~np.isin(self.branch, list(branches)))
        index = torch.from_numpy(kept).to(self._device)
        for layer in self.layers:
            if layer.is_initialized:
                for store in (layer.keys, layer.values):
                    store[:, :, : len(kept)] = store.index_select(2, index)
        self._branch[: len(kept)], self._position[: len(kept)] = self.branch[kept], self.position[kept]
        before = self.blocks
        self.used = len(kept)
        self.freed += before - self.blocks

    def slots_of(self, branches: Sequence[int]) -> Int[np.ndarray, " K"]:
        """Numbers of the slots that carry these branches' tags."""
        found: Int[np.ndarray, " K"] = np.flatnonzero(np.isin(self.branch, list(branches)))
        return found

    def contents(self, slots: Int[np.ndarray, " K"]) -> list[Float[Tensor, "H K d"]]:
        """Copies of keys and values in some slots, layer by layer."""
        index = torch.from_numpy(slots).to(self._device)
        return [
            store[0].index_select(1, index)
            for layer in self.layers
            if layer.is_initialized
            for store in (layer.keys, layer.values)
        ]

    @property
    def bytes(self) -> int:
        """What the slots in use take."""
        return sum(
            store[:, :, : self.used].numel() * store.element_size()
            for layer in self.layers
            if layer.is_initialized
            for store in (layer.keys, layer.values)
        )
