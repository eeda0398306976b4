"""Several processes with a whole copy of the model each: this package averages gradients itself.

DistributedDataParallel fixes at construction which parameters it will ever reduce, and BREAD changes them with every
block; besides, updates during the backward pass would come before its reduction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def launched() -> bool:
    """Whether a launcher started several processes; they may meet only later, when a trainer begins."""
    return max(world_size(), int(os.environ.get("WORLD_SIZE", "1"))) > 1


@torch.no_grad()
def average_(grad: Tensor) -> None:
    """The mean over ranks, in place. Linear, so that averaging what is accumulated so far again changes nothing."""
    if (world := world_size()) > 1:
        dist.all_reduce(grad)
        grad.div_(world)


@torch.no_grad()
def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """All ranks begin with the first one's values."""
    for tensor in tensors if world_size() > 1 else ():
        dist.broadcast(tensor.detach(), 0)


def from_first(value: Any) -> Any:
    """A plain value of the first rank, on all of them."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]
