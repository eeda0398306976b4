"""Attention of one block of queries over a long prefix, by the fastest implementation that runs where the tensors are.

Here:  `block_decode` (a set for each key head, or all keys) and `exact_with_importance` (all keys, and the weights that
       sets are chosen by); `block_reference` says what they have to equal.
Not here: gradients and soft caps of scores, which the reference serves; Triton.
Shapes: R rows, H key heads in groups of G = Hq / H query heads, B queries, N prefix keys, k chosen ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import UsageError
from ..tracing import is_plain, is_traced, is_transformed
from . import block_reference, cpu
from .backends import DTYPES, chosen_for_blocks

__all__ = ["block_decode", "exact_with_importance"]


def block_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    idx: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(scaling q [K[S]; K']^T) [V[S]; V']: (R, Hq, B, d) in the dtype of q.

    Args:
        q: (R, Hq, B, d), after rotary positions.
        keys, values: (R, H, N, d), strided as a cache holds them, and not copied: a set is gathered by tiles.
        block_keys, block_values: (R, H, B, d), always read in full.
        idx: int64 (R, H, k) below N, in any order; None reads the whole prefix.
        softcap: c, where scores are c tanh(score / c); takes the reference.
        backend: "auto", "torch" or one of `native.ISAS`.

    Raises:
        UsageError: tensors that don't belong together, indices out of range, an unknown backend, one that can't run.
    """
    _check(q, keys, values, block_keys, block_values, idx)
    if _by_reference(q, (keys, values, block_keys, block_values), values.shape[-1], softcap, backend):
        if q.device.type != "meta" and not is_traced():
            _require_inside(idx, keys.shape[2])
        return block_reference.block_decode(
            q, keys, values, block_keys, block_values, idx, scaling=scaling, softcap=softcap
        )
    given = (q, keys, values, block_keys, block_values, idx, scaling, backend)
    if all(map(is_plain, given[:5])) and not is_traced():
        return _block(*given)[0]
    out: Tensor = _block_op(*given)[0]
    return out


def exact_with_importance(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    *,
    scaling: float,
    queries: Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """What a block's first pass computes: exact attention, and the mean weight of every prefix key, (R, H, N).

    The kernel reads keys a second time for the weights, since they need the sums of all.

    Args:
        queries: boolean (R, B), the queries that count; all by default and in rows where none does.

    Raises:
        UsageError: as :func:`block_decode`.
    """
    _check(q, keys, values, block_keys, block_values, None)
    if _by_reference(q, (keys, values, block_keys, block_values), values.shape[-1], softcap, backend):
        return block_reference.exact_with_importance(
            q, keys, values, block_keys, block_values, scaling=scaling, queries=queries, softcap=softcap
        )
    rows, heads, block, _ = q.shape
    if queries is None:
        queries = torch.ones(rows, block, dtype=torch.bool)
    counted = torch.where(queries.any(-1, keepdim=True), queries, torch.ones_like(queries)).float()
    weights = counted / counted.sum(-1, keepdim=True) / (heads // keys.shape[1])
    out, lse = _block(q, keys, values, block_keys, block_values, None, scaling, backend)
    isa = chosen_for_blocks(q.device.type, q.dtype, backend).name
    return out, cpu.block_importance(q.detach(), keys.detach(), lse, weights, scaling, isa)


def _by_reference(
    q: Tensor, others: tuple[Tensor, ...], value_width: int, softcap: float | None, backend: str
) -> bool:
    if backend == "torch":
        return True
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, *others))
    unable = softcap is not None or value_width != q.shape[-1] or learns or is_transformed()
    if unable and backend != "auto":
        raise UsageError(
            f"block_decode: backend={backend!r} was asked for, but a soft cap, a gradient, a transform or values of "
            "another width than keys take the reference. backend='auto' runs here."
        )
    return unable or chosen_for_blocks(q.device.type, q.dtype, backend).name == "reference"


def _block(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    idx: Tensor | None,
    scaling: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _require_inside(idx, keys.shape[2])
    isa = chosen_for_blocks(q.device.type, q.dtype, backend).name
    return cpu.block_decode(q, keys, values, block_keys, block_values, idx, scaling, isa)


_block_op = torch.library.custom_op(
    "gnomon::block_decode",
    _block,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor keys, Tensor values, Tensor block_keys, Tensor block_values, Tensor? idx, float scaling, "
        "str backend) -> (Tensor, Tensor)"
    ),
)


@_block_op.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    idx: Tensor | None,
    scaling: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _check(
    q: Tensor, keys: Tensor, values: Tensor, block_keys: Tensor, block_values: Tensor, idx: Tensor | None
) -> None:
    """What would make a kernel read outside its operands."""
    given = (q, keys, values, block_keys, block_values)
    shapes = ", ".join(str(tuple(t.shape)) for t in given)
    if any(t.dim() != 4 for t in given):
        raise UsageError(
            f"{shapes} must be q (R, Hq, B, d), keys and values (R, H, N, d), the block's own (R, H, B, d)."
        )
    rows, heads, block, width = q.shape
    head = keys.shape[1]
    if not head or heads % head or not block:
        raise UsageError(
            f"{shapes}: {head} key heads must divide {heads} query heads, and a block be filled."
        )
    expected = (
        (rows, head, keys.shape[2], width),
        (rows, head, keys.shape[2], values.shape[3]),
        (rows, head, block, width),
        (rows, head, block, values.shape[3]),
    )
    if tuple(tuple(t.shape) for t in given[1:]) != expected:
        raise UsageError(f"{shapes} don't belong together: rows, heads, lengths or head dimension differ.")
    if any(t.dtype != q.dtype for t in given) or q.dtype not in DTYPES:
        raise UsageError(
            f"All tensors must be of one floating dtype, got {', '.join(str(t.dtype) for t in given)}."
        )
    if not all(t.device == q.device for t in (*given[1:], *([] if idx is None else [idx]))):
        raise UsageError(f"q is on {q.device}; all other tensors must be there, too.")
    if idx is not None and (idx.dtype != torch.long or idx.dim() != 3 or idx.shape[:2] != (rows, head)):
        raise UsageError(f"idx is {idx.dtype} {tuple(idx.shape)}, but must be int64 {(rows, head)} by k.")


def _require_inside(idx: Tensor | None, n: int) -> None:
    if idx is not None and idx.numel() and not 0 <= int(idx.min()) <= int(idx.max()) < n:
        raise UsageError(f"idx names keys from {int(idx.min())} to {int(idx.max())}, but the prefix has {n}.")
