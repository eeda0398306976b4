"""Sparse decoding: query rows against a long cache, of which only a part is read.

`sparse_decode` takes the fastest implementation that runs where the tensors are; `choice` says which and why.
`reference` says what a faster one has to equal, and how it may be cut into chunks. `dense_decode` reads everything by
the same loop over keys: what this one is compared with. `block_decode` is for the queries of a whole block, which share
one set of cached keys for each key head, and `exact_with_importance` the pass that such sets are chosen by; their
reference is `block_reference`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.errors import UsageError
from ..tracing import is_plain, is_traced, is_transformed
from . import cpu, reference, triton
from .backends import BACKENDS, DTYPES, choice, chosen
from .block import block_decode, exact_with_importance

__all__ = ["BACKENDS", "block_decode", "choice", "dense_decode", "exact_with_importance", "sparse_decode"]


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
        UsageError: tensors that don't belong together; n or oversample < 1; an unknown backend, or one that can't run.

    Differentiable is only "torch", which "auto" takes where a gradient is asked for; positions never are. A compiled
    kernel sums in another order, so scores that agree but for their last bits may be ranked otherwise.
    """
    _check(q, k, v, n, oversample, visible)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if backend == "torch" or (backend == "auto" and (learns or is_transformed())):
        return reference.decode(q, k, v, n, oversample, scale, visible)
    if not learns and all(map(is_plain, (q, k, v))) and not is_traced():
        return _sparse(q, k, v, n, oversample, scale, visible, backend)
    out, kept = _sparse_op(q, k, v, n, oversample, scale, visible, backend)
    return out, kept


def _sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    oversample: int,
    scale: float,
    visible: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    name = chosen(q.device.type, q.dtype, backend).name
    if name == "reference":
        return reference.decode(q, k, v, n, oversample, scale, visible)
    if name == "triton":
        return triton.sparse_decode(q, k, v, n, oversample, scale, visible)
    return cpu.sparse_decode(q, k, v, n, oversample, scale, visible, name)


_sparse_op = torch.library.custom_op(
    "gnomon::sparse_decode",
    _sparse,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, int n, int oversample, float scale, Tensor? visible, str backend)"
        " -> (Tensor, Tensor)"
    ),
)


@_sparse_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    oversample: int,
    scale: float,
    visible: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((*q.shape[:2], n), dtype=torch.long)


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    visible: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One step of ordinary attention by :func:`sparse_decode`'s loop over keys: (B, Hq, d). To compare with.

    No gradient reaches anything.

    Raises:
        UsageError: as there; key heads and value heads that differ in number.
    """
    _check(q, k, v, 1, 1, visible)
    if k.shape[1] != v.shape[1]:
        raise UsageError(
            f"Dense decoding takes as many key heads as value heads, got {k.shape[1]} and {v.shape[1]}."
        )
    q, k, v = q.detach(), k.detach(), v.detach()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    name = chosen(q.device.type, q.dtype, backend).name
    if name == "triton":
        return triton.dense_decode(q, k, v, scale, visible)
    if name != "reference":
        return cpu.dense_decode(q, k, v, scale, visible, name)
    found = reference.scores(q, k, scale, visible)
    p = torch.softmax(found, -1).nan_to_num(0)  # rows without a visible key
    rows = v.to(p.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (p[:, :, None] @ rows)[:, :, 0].to(q.dtype)


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
