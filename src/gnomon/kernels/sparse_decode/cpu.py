"""Sparse and dense decoding by the compiled library: arguments checked by the caller, threads as torch has them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import native
from .reference import bucket_count

__all__ = ["block_decode", "block_importance", "dense_decode", "sparse_decode"]


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


def block_decode(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, idx: Tensor | None, scale: float, isa: str
) -> tuple[Tensor, Tensor]:
    """q (R, Hq, B, d), k and v (R, H, N, d), own ones (R, H, B, d), idx (R, H, k) or None for all -> (out, lse).

    lse (R, Hq, B) is the logarithm of the sum of exponentials of each query's scores, in float32.
    """
    q = q.contiguous()
    k, v, own_k, own_v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v, own_k, own_v))
    rows, heads, block, width = q.shape
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32)
    named = None if idx is None else idx.contiguous()
    strides = [s for t in (k, v, own_k, own_v) for s in t.stride()[:3]]
    failed = native.library().gnomon_block_decode(
        native.ISAS.index(isa), torch.get_num_threads(),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), own_k.data_ptr(), own_v.data_ptr(), native.DTYPES[q.dtype],
        rows, heads, k.shape[1], block, k.shape[2], width, (ctypes.c_int64 * 12)(*strides),
        None if named is None else named.data_ptr(), 0 if named is None else named.shape[2],
        scale, out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through"
    return out, lse


def block_importance(q: Tensor, k: Tensor, lse: Tensor, weights: Tensor, scale: float, isa: str) -> Tensor:
    """(R, H, N): over a group's heads and the block's queries the sum of weights (R, B) times exp(score - lse)."""
    q, lse, weights = q.contiguous(), lse.contiguous(), weights.float().contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    rows, heads, block, width = q.shape
    out = torch.empty(rows, k.shape[1], k.shape[2], dtype=torch.float32)
    failed = native.library().gnomon_block_importance(
        native.ISAS.index(isa), torch.get_num_threads(), q.data_ptr(), k.data_ptr(), native.DTYPES[q.dtype],
        rows, heads, k.shape[1], block, k.shape[2], width, (ctypes.c_int64 * 3)(*k.stride()[:3]),
        lse.data_ptr(), weights.data_ptr(), scale, out.data_ptr(),
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
