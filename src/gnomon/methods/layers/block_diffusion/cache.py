"""A cache whose committed part never changes: the block being denoised stands behind it and is written over.

Room for the whole sequence is taken once, so that a step copies B keys and values, not N. Shapes: R rows, H key heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from gnomon.core.errors import UsageError


class BlockLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.committed = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the room, in the dtype and on the device of the first keys."""
        rows, heads, _, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(rows, heads, self.capacity, width)
        self.values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write behind the committed part; the keys and values up to there, as views.

        Raises:
            UsageError: more tokens than there is room for.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.committed + key_states.shape[2]
        if end > self.capacity:
            raise UsageError(f"The cache has room for {self.capacity} tokens and would hold {end}.")
        self.keys[:, :, self.committed : end] = key_states
        self.values[:, :, self.committed : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Committed tokens."""
        return self.committed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the queries are compared with, and where they begin."""
        return self.committed + query_length, 0

    def get_max_length(self) -> int:
        """Room for the whole sequence."""
        return self.capacity

    def get_max_cache_shape(self) -> int:
        """The same under its older name."""
        return self.capacity


class BlockCache(Cache):  # type: ignore[misc]
    """A :class:`BlockLayer` for every layer."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=partial(BlockLayer, capacity))

    def commit(self, tokens: int) -> None:
        """Keep what was written last: `tokens` tokens behind the committed part."""
        for layer in self.layers:
            layer.committed += tokens

    @property
    def bytes(self) -> int:
        """What the committed part takes."""
        total = 0
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                total += kept[:, :, : layer.committed].numel() * torch.finfo(kept.dtype).bits // 8
        return total
