"""The bfloat16 linear layer through the compiled library: arguments checked by the caller."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from .. import native
from ..native import pointer


def linear(x: Tensor, weight: Tensor, isa: str) -> Tensor:
    """x (B, K) W^T -> (B, N) in the dtype of x, by one instruction set of `native.ISAS`."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    failed = native.library().gnomon_bf16_linear(
        native.ISAS.index(isa), torch.get_num_threads(),
        pointer(x), c_int64(x.shape[0]), c_int64(x.shape[1]), native.DTYPES[x.dtype],
        pointer(weight), c_int64(weight.shape[0]), c_int64(weight.stride(0)), pointer(out),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {x.dtype}"
    return out
