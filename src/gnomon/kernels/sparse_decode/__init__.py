"""Sparse decoding: one query row per head against a long cache, of which only some values are read.

`sparse_decode` takes the fastest implementation that runs where the tensors are. So far that is plain torch
everywhere; `reference` says what a faster one has to equal, and how it may be cut into chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.errors import UsageError, unknown
from . import reference

__all__ = ["BACKENDS", "sparse_decode"]

BACKENDS = ("auto", "torch")
"""`torch` is the reference."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    n: int,
    oversample: int = 1,
    scale: float | None = None,
    visible: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One step of Atop-N attention: (output (B, Hq, d) in the dtype of q, kept positions (B, Hq, n), -1 for none).

    Args:
        q: (B, Hq, d), after rotary positions.
        k: (B, Hk, L, d), strided as a cache holds them.
        v: (B, Hv, L, d). Hk and Hv divide Hq; neither needs to divide the other.
        n: positions that each query head keeps; buckets are j mod (oversample * n).
        oversample: c.
        scale: of the scores; 1 / sqrt(d) by default.
        visible: boolean (B, L), False at padding and at slots that hold nothing yet; None: all are.
        backend: one of `BACKENDS` to insist on.

    Raises:
        UsageError: tensors that don't belong together; n or oversample < 1; an unknown backend.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    _check(q, k, v, n, oversample, visible)
    return reference.decode(
        q, k, v, n, oversample, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, visible
    )


def _check(q: Tensor, k: Tensor, v: Tensor, n: int, oversample: int, visible: Tensor | None) -> None:
    """What would make a kernel read outside its operands."""

    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"

    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4:
        raise UsageError(f"{shapes()} must be (B, Hq, d), (B, Hk, L, d) and (B, Hv, L, d).")
    (batch, heads, width), length = q.shape, k.shape[2]
    if (k.shape[0], k.shape[3]) != (batch, width) or (v.shape[0], v.shape[2], v.shape[3]) != (
        batch,
        length,
        width,
    ):
        raise UsageError(f"{shapes()} don't belong together: batch, length or head dimension differ.")
    if not length or not k.shape[1] or not v.shape[1] or heads % k.shape[1] or heads % v.shape[1]:
        raise UsageError(
            f"{shapes()}: key heads and value heads must divide the query heads, and the cache be filled."
        )
    if n < 1 or oversample < 1:
        raise UsageError(f"n={n} and oversample={oversample} must both be at least 1.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise UsageError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; all must be of one floating dtype."
        )
    if visible is not None and (visible.dtype != torch.bool or tuple(visible.shape) != (batch, length)):
        raise UsageError(
            f"visible is {visible.dtype} {tuple(visible.shape)}, but must be bool {(batch, length)}."
        )
    if not all(t.device == q.device for t in (k, v, visible) if t is not None):
        raise UsageError(f"q is on {q.device}; k, v and visible must be there, too.")
