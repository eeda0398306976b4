"""NF12 on a GPU, the faces: check and shape the tensors, then launch.

Triton itself is loaded at the first call, so this module imports anywhere; `why_not` says whether a call can
work. A new base or a new matrix never recompiles: the base is an ordinary argument.
Layout of the planes: `reference.py`.      Shapes: B rows of x, E exceptions.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import BFloat16, Float, Int32, UInt8
from torch import Tensor

from gnomon.core.errors import UsageError
from gnomon.kernels.launch import interpreted, require, why_not

__all__ = ["decode", "linear", "why_not"]

BOTH_EXPONENTS = 0x00800080  # 1 in the exponent fields of two packed BF16
UNROLL = 4  # groups per thread in the bulk decode, loads of all under way together


def decode(
    sm: UInt8[Tensor, "N K_pad"],
    ex: Int32[Tensor, "N groups"],
    esc: BFloat16[Tensor, "E 8"],
    base: int,
    columns: int,
    out: BFloat16[Tensor, "N K"] | None = None,
) -> BFloat16[Tensor, "N K"]:
    """The matrix, bit for bit, into `out` if given (contiguous).

    Raises:
        MissingExtra, GnomonError: Triton can't run on the planes' device.
        UsageError: `out` has another shape, type or device, or is not contiguous.
    """
    require(sm.device, "NF12's Triton decode")
    from gnomon.kernels.nf12 import triton_kernels as kernels

    shape = (len(sm), columns)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=sm.device)
    elif (
        out.shape != shape
        or out.dtype != torch.bfloat16
        or out.device != sm.device
        or not out.is_contiguous()
    ):
        raise UsageError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device} (contiguous: {out.is_contiguous()}), but the "
            f"decoded matrix is bfloat16 {shape} on {sm.device}. Pass torch.empty({shape}, dtype=torch.bfloat16)."
        )
    if out.numel() == 0:
        return out
    aligned = columns == sm.shape[1]
    kernels.decode[(math.ceil(ex.numel() / (128 * UNROLL)),)](
        _words(sm, torch.int64),
        _words(ex, torch.int32),
        _words(esc, torch.int32),
        base * BOTH_EXPONENTS,
        out.view(torch.int32 if aligned else torch.int16),
        ex.numel(),
        ex.shape[1],
        columns,
        ALIGNED=aligned,
        PTX=_has_ptx(),
        UNROLL=UNROLL,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def linear(
    x: Float[Tensor, "B K"],
    sm: UInt8[Tensor, "N K_pad"],
    ex: Int32[Tensor, "N groups"],
    esc: BFloat16[Tensor, "E 8"],
    base: int,
) -> Float[Tensor, "B N"]:
    """x W^T with the decode inside, float32 sums, rounded once to the dtype of x.

    Equal, bit for bit, to `gnomon.kernels.bf16.triton.linear` of the decoded matrix. For few rows: every eight
    rows of x read the planes once more.

    Raises:
        MissingExtra, GnomonError: Triton can't run on the device of x.
    """
    require(x.device, "NF12's Triton GEMV")
    from gnomon.kernels.gemv import triton as gemv
    from gnomon.kernels.nf12 import triton_kernels as kernels

    if missing := sm.shape[1] - x.shape[1]:
        x = torch.nn.functional.pad(x, (0, missing))
    read = kernels.read_ptx if _has_ptx() else kernels.read_portable
    weight = (
        _words(sm, torch.int64),
        _words(ex, torch.int32),
        _words(esc, torch.int32),
        base * BOTH_EXPONENTS,
    )
    return gemv.gemv(x.contiguous(), weight, len(sm), read)


def _has_ptx() -> bool:
    return not interpreted() and torch.version.hip is None


def _words(plane: Tensor, dtype: torch.dtype) -> Tensor:
    """A plane's memory as words; it is copied only if it has gaps or starts off a word's border."""
    if plane.numel() == 0:  # has no strides to rely on
        return torch.empty(0, dtype=dtype, device=plane.device)
    plane = plane.contiguous()
    if plane.data_ptr() % 8 or plane.storage_offset() * plane.element_size() % 8:
        plane = plane.clone()
    return plane.view(dtype)
