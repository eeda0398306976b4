"""NF12 kernels: a few rows of x times a matrix that stays encoded, and bulk decoding.

`linear` and `decode` take the planes of reference.py and choose the fastest implementation that runs where
the tensors are; `choice` says which and why. All decode bit for bit alike; sums are in float32 and, for one
implementation, made of the same operations in the same order as those of `kernels.bf16`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.errors import UsageError
from .. import native
from ..choosing import Choice, matrix_vector
from ..tracing import is_plain
from . import cpu, reference

__all__ = ["Prepared", "choice", "decode", "decode_rows", "linear"]


def choice(device: str = "cpu", *, dtype: torch.dtype = torch.bfloat16, impl: str = "auto") -> Choice:
    """What `linear` runs for such an x, and why; `decode` takes the same with `dtype` that of its result."""
    return matrix_vector("nf12", device, dtype, impl)


def linear(x: Tensor, sm: Tensor, ex: Tensor, esc: Tensor, base: int, *, impl: str = "auto") -> Tensor:
    """y = x W^T with W decoded in registers: (..., K) -> (..., N), in the dtype of x.

    One pass over W serves four rows of x on a CPU, eight on a GPU; with many more, decode W and multiply.

    Args:
        x: bfloat16 or float32; other dtypes only with the reference.
        sm, ex, esc, base: the planes, see reference.py. Indices in `sm` have to be below E.
        impl: an implementation to insist on, see `choosing`.

    Raises:
        UsageError: planes that don't belong together, an x of another width or device.
    """
    _check(sm, ex, esc, base)
    if not sm.shape[1] - 8 < x.shape[-1] <= sm.shape[1]:
        raise UsageError(f"x has {x.shape[-1]} columns, but the planes hold {sm.shape[1]}, padded to 8.")
    if x.device != sm.device:
        raise UsageError(f"x is on {x.device}, the planes are on {sm.device}. Move one of them.")
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    run = _linear if is_plain(x) else _linear_op
    return run(flat, sm, ex, esc, base, impl).view(*x.shape[:-1], sm.shape[0])


def _linear(x: Tensor, sm: Tensor, ex: Tensor, esc: Tensor, base: int, impl: str) -> Tensor:
    name = choice(x.device.type, dtype=x.dtype, impl=impl).name
    if name == "reference":
        return reference.linear(x, sm, ex, esc, base)
    if name == "triton":
        from . import triton

        return triton.linear(x, sm, ex, esc, base)
    return cpu.linear(x, x.shape[1], cpu.planes(sm, ex, esc, base), name)


_linear_op = torch.library.custom_op(
    "gnomon::nf12_linear",
    _linear,
    mutates_args=(),
    schema="(Tensor x, Tensor sm, Tensor ex, Tensor esc, int base, str impl) -> Tensor",
)


@_linear_op.register_fake
def _(x: Tensor, sm: Tensor, ex: Tensor, esc: Tensor, base: int, impl: str) -> Tensor:
    return x.new_empty(x.shape[0], sm.shape[0])


class Prepared:
    """A matrix whose planes were checked once, for a layer that multiplies by it at every token.

    Holds the planes, and on a CPU their addresses: they must not be resized. A copy or an unpickled one looks
    the addresses up anew.
    """

    __slots__ = ("arguments", "columns", "isa", "planes")

    def __init__(self, sm: Tensor, ex: Tensor, esc: Tensor, base: int, columns: int) -> None:
        """Args as for :func:`decode`.

        Raises:
            UsageError: planes that don't belong together.
        """
        _check(sm, ex, esc, base)
        self.planes, self.columns = (sm, ex, esc, base), columns
        self.arguments = cpu.planes(*self.planes) if sm.device.type == "cpu" and is_plain(sm) else None
        choices = {dtype: choice("cpu", dtype=dtype).name for dtype in native.DTYPES}
        self.isa = {dtype: name for dtype, name in choices.items() if name in native.ISAS}

    def __reduce__(self) -> tuple[type[Prepared], tuple[Tensor, Tensor, Tensor, int, int]]:
        return Prepared, (*self.planes, self.columns)

    def linear(self, x: Tensor) -> Tensor:
        """:func:`linear` of this matrix."""
        matrix, isa = self.arguments, self.isa.get(x.dtype)
        if matrix and isa and x.shape[-1] == self.columns and x.device.type == "cpu" and is_plain(x):
            return cpu.linear(x, self.columns, matrix, isa)
        return linear(x, *self.planes)


def decode(
    sm: Tensor,
    ex: Tensor,
    esc: Tensor,
    base: int,
    columns: int,
    *,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """The matrix (N, columns), bit for bit.

    Args:
        columns: K, at most the padded count.
        out: contiguous (N, columns) to write into, bfloat16 or (widened, exactly) float32.

    Raises:
        UsageError: planes that don't belong together, an `out` that doesn't fit.
    """
    return _decoded(sm, ex, esc, base, columns, None, out, impl)


def decode_rows(
    rows: Tensor, sm: Tensor, ex: Tensor, esc: Tensor, base: int, columns: int, *, out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Some rows of the matrix: numbers (R,) -> (R, columns); the others are not decoded.

    Raises:
        UsageError: as `decode`; numbers that are no integers, or one outside 0 … N - 1.
    """
    if rows.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"Row numbers have to be int64 or int32, not {rows.dtype}.")
    return _decoded(sm, ex, esc, base, columns, rows.to(torch.int64), out, impl)


def _decoded(
    sm: Tensor, ex: Tensor, esc: Tensor, base: int, columns: int, rows: Tensor | None, out: Tensor | None, impl: str
) -> Tensor:  # fmt: skip
    _check(sm, ex, esc, base)
    shape = (sm.shape[0] if rows is None else rows.shape[0], columns)
    if not sm.shape[1] - 8 < columns <= sm.shape[1]:
        raise UsageError(f"columns={columns} can't be {sm.shape[1]} when padded to a multiple of 8.")
    if out is not None and (tuple(out.shape) != shape or not out.is_contiguous() or out.device != sm.device):
        raise UsageError(
            f"out has to be a contiguous {shape} on {sm.device}, not {tuple(out.shape)} on {out.device}."
        )
    if is_plain(sm) and (rows is None or is_plain(rows)) and (out is None or not out.is_neg()):
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=sm.device)
        return _decode_into(out, sm, ex, esc, base, rows, impl)
    result: Tensor = _decode_op(sm, ex, esc, base, columns, rows, impl)
    return result if out is None else out.copy_(result)


def _decode_into(
    out: Tensor, sm: Tensor, ex: Tensor, esc: Tensor, base: int, rows: Tensor | None, impl: str
) -> Tensor:
    if rows is not None and rows.numel() and not bool(((rows >= 0) & (rows < sm.shape[0])).all()):
        raise UsageError(f"A row number is outside 0 … {sm.shape[0] - 1}: {rows.min()} … {rows.max()}.")
    if out.numel() == 0:
        return out
    name = choice(sm.device.type, dtype=torch.bfloat16, impl=impl).name
    if name in native.ISAS and out.dtype in native.DTYPES:
        rows = None if rows is None else rows.contiguous()
        return cpu.decode(cpu.planes(sm, ex, esc, base), rows, out, name)
    if rows is not None:
        sm, ex = sm[rows], ex[rows]
    if name == "triton" and out.dtype == torch.bfloat16:
        from . import triton

        return triton.decode(sm, ex, esc, base, out.shape[1], out)
    return out.copy_(reference.decode(sm, ex, esc, base, out.shape[1]))


def _decode(
    sm: Tensor, ex: Tensor, esc: Tensor, base: int, columns: int, rows: Tensor | None, impl: str
) -> Tensor:
    out = torch.empty(
        sm.shape[0] if rows is None else rows.shape[0], columns, dtype=torch.bfloat16, device=sm.device
    )
    return _decode_into(out, sm, ex, esc, base, rows, impl)


_decode_op = torch.library.custom_op(
    "gnomon::nf12_decode",
    _decode,
    mutates_args=(),
    schema="(Tensor sm, Tensor ex, Tensor esc, int base, int columns, Tensor? rows, str impl) -> Tensor",
)


@_decode_op.register_fake
def _(sm: Tensor, ex: Tensor, esc: Tensor, base: int, columns: int, rows: Tensor | None, impl: str) -> Tensor:
    count = sm.shape[0] if rows is None else rows.shape[0]
    return torch.empty(count, columns, dtype=torch.bfloat16, device=sm.device)


@_decode_op.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...],
    sm: Tensor, ex: Tensor, esc: Tensor, base: int, columns: int, rows: Tensor, impl: str,
) -> tuple[Tensor, int]:  # fmt: skip
    """A batch of lists of rows is one longer list. (Planes are never batched: vmap sees them as constants.)"""
    batched = rows.movedim(in_dims[5] or 0, 0)
    flat = _decode_op(sm, ex, esc, base, columns, batched.flatten(), impl)
    return flat.view(*batched.shape, columns), 0


def _check(sm: Tensor, ex: Tensor, esc: Tensor, base: int) -> None:
    """What would make a kernel read outside the planes; contents are the validator's business."""
    if (sm.dtype, ex.dtype, esc.dtype) != (torch.uint8, torch.int32, torch.bfloat16):
        raise UsageError(
            f"Planes have to be uint8, int32 and bfloat16, not {sm.dtype}, {ex.dtype}, {esc.dtype}."
        )
    rows, padded = sm.shape
    if padded % 8 or ex.shape != (rows, padded // 8) or esc.shape[1:] != (8,):
        raise UsageError(
            f"Planes of {tuple(sm.shape)}, {tuple(ex.shape)} and {tuple(esc.shape)} don't fit together."
        )
    if not (sm.is_contiguous() and ex.is_contiguous() and esc.is_contiguous()):
        raise UsageError("Planes have to be contiguous.")
    if not 1 <= base <= 239:
        raise UsageError(f"base={base} is outside 1 … 239.")
