"""Reading and copying memory as fast as this machine can: the limits that other kernels are measured against.

Not methods and not chosen between: with the compiled library they use it, without it torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native

__all__ = ["copy", "read"]


def read(source: Tensor) -> None:
    """Read every byte of a contiguous CPU tensor once, with torch's number of threads."""
    if native.problem():
        source.view(torch.int64).sum()  # the nearest torch has; it stays below the compiled loop
    else:
        native.library().gnomon_read(torch.get_num_threads(), source.data_ptr(), source.nbytes)


def copy(source: Tensor, out: Tensor) -> None:
    """Copy a contiguous CPU tensor: memcpy per thread, which writes large results past the caches."""
    if native.problem():
        out.copy_(source)
    else:
        native.library().gnomon_copy(
            torch.get_num_threads(), out.data_ptr(), source.data_ptr(), source.nbytes
        )
