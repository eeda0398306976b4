"""Masks as bits: one plane a mask (exactly n_m bits a weight), or one byte a weight.

    planes  uint8 (n_m, d, ceil(h / 8))  bit k % 8 (lowest first) of byte k // 8 is M_i[row, k]; pads are 0
    code    uint8 (d, h)                 bit i is M_i[row, k]; for n_m <= 8

Planes of large matrices lie a power of two apart, so that a row's masks fight for the same lines of the caches, and
each is a stream of its own. `by_rows` keeps the shape and puts the masks of a row beside each other in memory: one
stream, which CPU kernels read faster. Every function here and every kernel takes both.

Source: the MGLU card, "Kernel plan" (inferred; the paper's own kernel reads the code).
Shapes: n_m masks, d rows (outputs) and h columns (inputs) of the weight.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from ...core.errors import UsageError

__all__ = ["MOST_MASKS", "by_rows", "code_of", "pack", "planes_of", "unpack", "width"]

MOST_MASKS = 16
"""With 16 masks a 16-bit matrix and its masks are as many bits as the two matrices of a GLU."""


def width(columns: int) -> int:
    """Bytes of a row of one plane."""
    return -(-columns // 8)


def pack(masks: Bool[Tensor, "n d h"]) -> UInt8[Tensor, "n d w"]:
    """Masks to planes."""
    n, d, h = masks.shape
    bits = torch.nn.functional.pad(masks.to(torch.uint8), (0, 8 * width(h) - h)).view(n, d, width(h), 8)
    planes = torch.zeros(n, d, width(h), dtype=torch.uint8, device=masks.device)
    for i in range(8):
        planes |= bits[..., i] << i
    return planes


def by_rows(planes: UInt8[Tensor, "n d w"]) -> UInt8[Tensor, "n d w"]:
    """The same planes in the memory order (d, n, w); itself where it is in that order already."""
    return planes.transpose(0, 1).contiguous().transpose(0, 1)


def unpack(planes: UInt8[Tensor, "n d w"], columns: int) -> Bool[Tensor, "n d h"]:
    """Planes to masks; the pads are left out."""
    shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)
    return (planes[..., None] >> shifts & 1).flatten(-2)[..., :columns].bool()


def code_of(planes: UInt8[Tensor, "n d w"], columns: int) -> UInt8[Tensor, "d h"]:
    """Planes to the code.

    Raises:
        UsageError: more than eight masks.
    """
    if len(planes) > 8:
        raise UsageError(f"{len(planes)} masks don't fit into a byte a weight; use planes.")
    code = torch.zeros(planes.shape[1], columns, dtype=torch.uint8, device=planes.device)
    for i, mask in enumerate(unpack(planes, columns)):
        code |= mask.to(torch.uint8) << i
    return code


def planes_of(code: UInt8[Tensor, "d h"], n_masks: int) -> UInt8[Tensor, "n d w"]:
    """The code to planes.

    Raises:
        UsageError: bits of masks beyond n_masks are set, or n_masks isn't 1 … 8.
    """
    if not 1 <= n_masks <= 8:
        raise UsageError(f"n_masks={n_masks} is outside 1 … 8: the code has a byte a weight.")
    if n_masks < 8 and bool((code >> n_masks).any()):
        raise UsageError(f"The code has bits of more than {n_masks} masks. It belongs to another layer.")
    return pack(torch.stack([(code >> i & 1).bool() for i in range(n_masks)]))
