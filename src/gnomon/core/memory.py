"""Bytes that training holds, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Of distinct storages, each counted once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, each storage counted once; masters count, weights and gradients don't."""
    return tensor_bytes(
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
    )
