"""Sparse and dense decoding by the compiled library: arguments checked by the caller, threads as torch has them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import native
from .reference import bucket_count

__all__ = ["dense_decode", "sparse_decode"]


def sparse_decode(
    q: Tensor, k: Tensor, v: Tensor, n: int, oversample: int, scale: float, visible: Tensor | None, isa: str
) -> tuple[Tensor, Tensor]:
    """q (B, Hq, d), k (B, Hk, L, d), v (B, Hv, L, d) -> (output (B, Hq, d), kept positions (B, Hq, n)).

    By one instruction set of `native.ISAS`; bfloat16 or float32, sums in float32.
    """
    q, k, v, seen, strides = _ready(q, k, v, visible)
    batch, heads, width = q.shape
    out = torch.empty_like(q)
    kept = torch.empty(batch, heads, n, dtype=torch.int32)
    failed = native.library().gnomon_sparse_decode(
        native.ISAS.index(isa), torch.get_num_threads(),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), native.DTYPES[q.dtype],
        batch, heads, k.shape[1], v.shape[1], k.shape[2], width, strides,
        None if seen is None else seen.data_ptr(),
        n, bucket_count(n, oversample, k.shape[2]), scale, out.data_ptr(), kept.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through"
    return out, kept.long()


def dense_decode(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, isa: str) -> Tensor:
    """As :func:`sparse_decode` with all positions and as many key heads as value heads: what it is compared with."""
    q, k, v, seen, strides = _ready(q, k, v, visible)
    batch, heads, width = q.shape
    out = torch.empty_like(q)
    failed = native.library().gnomon_dense_decode(
        native.ISAS.index(isa), torch.get_num_threads(),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), native.DTYPES[q.dtype],
        batch, heads, k.shape[1], k.shape[2], width, strides,
        None if seen is None else seen.data_ptr(), scale, out.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through"
    return out


def _ready(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, ctypes.Array[ctypes.c_int64]]:
    """Operands with dense rows; a cache stays where it is, whatever its strides."""
    q = q.contiguous()
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    seen = None if visible is None else visible.contiguous()
    return q, k, v, seen, (ctypes.c_int64 * 6)(*k.stride()[:3], *v.stride()[:3])
