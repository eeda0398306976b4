"""NF12 through the compiled library: arguments checked by the caller, threads as torch has them."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from .. import native
from ..native import pointer


def linear(x: Tensor, sm: Tensor, ex: Tensor, esc: Tensor, base: int, isa: str) -> Tensor:
    """x (B, K) W^T -> (B, N) in the dtype of x, by one instruction set of `native.ISAS`."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], sm.shape[0])
    failed = native.library().gnomon_nf12_linear(
        native.ISAS.index(isa), torch.get_num_threads(),
        pointer(x), c_int64(x.shape[0]), c_int64(x.shape[1]), native.DTYPES[x.dtype],
        *_planes(sm, ex, esc, base), pointer(out),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {x.dtype}"
    return out


def decode(
    sm: Tensor, ex: Tensor, esc: Tensor, base: int, rows: Tensor | None, out: Tensor, isa: str
) -> Tensor:
    """All rows, or those whose numbers are given (int64, each below N), into out (rows, K)."""
    failed = native.library().gnomon_nf12_decode(
        native.ISAS.index(isa), torch.get_num_threads(), *_planes(sm, ex, esc, base),
        None if rows is None else pointer(rows), c_int64(out.shape[0]), c_int64(out.shape[1]),
        pointer(out), native.DTYPES[out.dtype],
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {out.dtype}"
    return out


def _planes(sm: Tensor, ex: Tensor, esc: Tensor, base: int) -> tuple[object, ...]:
    return (
        pointer(sm), pointer(ex), pointer(esc),
        c_int64(sm.shape[0]), c_int64(sm.shape[1]), c_int64(esc.shape[0]), base,
    )  # fmt: skip
