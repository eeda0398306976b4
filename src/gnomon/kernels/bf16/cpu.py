"""The bfloat16 linear layer through the compiled library: arguments checked by the caller."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native


def linear(x: Tensor, weight: Tensor, isa: str) -> Tensor:
    """x (..., K) W^T -> (..., N) in the dtype of x, by one instruction set of `native.ISAS`."""
    x = x.contiguous()
    rows, columns = weight.shape
    out = x.new_empty(*x.shape[:-1], rows)
    failed = native.library().gnomon_bf16_linear(
        native.ISAS.index(isa), torch.get_num_threads(),
        x.data_ptr(), x.shape[:-1].numel(), columns, native.DTYPES[x.dtype],
        weight.data_ptr(), rows, weight.stride(0), out.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {x.dtype}"
    return out
