"""NF12 through the compiled library: arguments checked by the caller, threads as torch has them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native

Planes = tuple[int, int, int, int, int, int, int]
"""Addresses of sm, ex and esc, rows, padded columns, exceptions, base: as the ABI takes them."""


def planes(sm: Tensor, ex: Tensor, esc: Tensor, base: int) -> Planes:
    """The planes as arguments; they have to outlive the calls."""
    return sm.data_ptr(), ex.data_ptr(), esc.data_ptr(), sm.shape[0], sm.shape[1], esc.shape[0], base


def linear(x: Tensor, columns: int, matrix: Planes, isa: str) -> Tensor:
    """x (..., K) W^T -> (..., N) in the dtype of x, by one instruction set of `native.ISAS`."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], matrix[3])
    failed = native.library().gnomon_nf12_linear(
        native.ISAS.index(isa), torch.get_num_threads(),
        x.data_ptr(), x.shape[:-1].numel(), columns, native.DTYPES[x.dtype], *matrix, out.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {x.dtype}"
    return out


def decode(matrix: Planes, rows: Tensor | None, out: Tensor, isa: str) -> Tensor:
    """All rows, or those whose numbers are given (int64, each below N), into out (rows, K)."""
    failed = native.library().gnomon_nf12_decode(
        native.ISAS.index(isa), torch.get_num_threads(), *matrix,
        None if rows is None else rows.data_ptr(), *out.shape, out.data_ptr(), native.DTYPES[out.dtype],
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {out.dtype}"
    return out
