"""Reading and copying memory as fast as this machine can: the limits that other kernels are measured against.

Not methods and not chosen between: with the compiled library they use it, without it torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import UsageError
from .. import native

__all__ = ["copy", "read"]


def read(source: Tensor) -> None:
    """Read every byte of a contiguous CPU tensor once, with torch's number of threads.

    Raises:
        UsageError: another tensor.
    """
    _check("source", source)
    if native.problem():
        _bytes(source).sum(dtype=torch.uint8)  # the nearest torch has; it stays below the compiled loop
    else:
        native.library().gnomon_read(torch.get_num_threads(), source.data_ptr(), source.nbytes)


def copy(source: Tensor, out: Tensor) -> None:
    """Copy a contiguous CPU tensor into another of as many bytes, past the caches.

    Raises:
        UsageError: other tensors.
    """
    _check("source", source)
    _check("out", out)
    if source.nbytes != out.nbytes:
        raise UsageError(
            f"out holds {out.nbytes} bytes, source {source.nbytes}; they have to be equally large."
        )
    if native.problem():
        _bytes(out).copy_(_bytes(source))
    else:
        native.library().gnomon_copy(
            torch.get_num_threads(), out.data_ptr(), source.data_ptr(), source.nbytes
        )


def _check(name: str, tensor: Tensor) -> None:
    """Refuse what an address and a size don't describe."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(
            f"{name} is on {tensor.device} with strides {tensor.stride()}; it has to be contiguous and on the CPU."
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
