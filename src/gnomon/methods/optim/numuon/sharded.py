"""Sharded tensors (DTensor, as fully_shard makes them): gathered to be factored, cut again to be added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _sharded(x: Tensor) -> DTensor | None:
    """`x` if it is sharded; asked this way so that torch.distributed is loaded only where it is used."""
    return x if hasattr(x, "full_tensor") else None  # type: ignore[return-value]


def whole(x: Tensor) -> Tensor:
    """The whole tensor, on every rank of its mesh."""
    sharded = _sharded(x)
    return x if sharded is None else sharded.full_tensor()


def as_sharded(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that is whole and equal on all ranks, cut as `like` is; nothing is sent."""
    sharded = _sharded(like)
    if sharded is None:
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = sharded.device_mesh
    everywhere = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, sharded.placements)
