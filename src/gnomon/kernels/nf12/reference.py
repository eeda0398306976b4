"""NF12 in plain torch: what every faster path has to equal, bit for bit.

Layout planes-v1 of a BF16 matrix W (N, K), K padded to a multiple of 8:

    sm    uint8    (N, K_pad)     sign << 7 | mantissa of each weight
    ex    int32    (N, K_pad/8)   eight exponent nibbles, e - base, of eight consecutive columns;
                                  column 2j at bits 4j, column 2j + 1 at bits 16 + 4j
    esc   bfloat16 (E, 8)         groups that no code can hold, verbatim

A group with ex == 0 is an exception: its first four sm bytes are the little-endian index of its esc row.

Here:  decoding to bits, and a linear layer that decodes and multiplies.
Not here: encoding and the container (`methods/compress/nf12`).
Source: the NF12 card, "Layout planes-v1" (inferred from the abstract).      Shapes: B rows of x.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float, Int32, UInt8
from torch import Tensor

GROUP = 8
"""Columns that share one exponent word."""

SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the nibble of column i of a group lies in its exponent word (split-16 order)."""


def decode(
    sm: UInt8[Tensor, "N K_pad"],
    ex: Int32[Tensor, "N groups"],
    esc: BFloat16[Tensor, "E 8"],
    base: int,
    columns: int,
) -> BFloat16[Tensor, "N K"]:
    """The matrix, bit for bit: bits = (sm & 0x80) << 8 | sm & 0x7F, plus (nibble + base) << 7."""
    rows, padded = sm.shape
    shifts = torch.tensor(SHIFTS, dtype=torch.int32, device=ex.device)
    nibbles = (ex[:, :, None] >> shifts) & 15  # arithmetic shift, so mask after it
    byte = sm.view(rows, padded // GROUP, GROUP).to(torch.int32)
    bits = ((byte & 0x80) << 8) | (byte & 0x7F) | ((nibbles + base) << 7)
    group, column = (ex == 0).nonzero(as_tuple=True)
    slots = byte[group, column]
    index = slots[:, 0] | slots[:, 1] << 8 | slots[:, 2] << 16 | slots[:, 3] << 24
    bits = bits.to(torch.int16)  # wraps: int16 holds the 16 bits as they are
    bits[group, column] = esc.view(torch.int16)[index.long()]
    return bits.view(rows, padded)[:, :columns].contiguous().view(torch.bfloat16)


def linear(
    x: Float[Tensor, "B K"],
    sm: UInt8[Tensor, "N K_pad"],
    ex: Int32[Tensor, "N groups"],
    esc: BFloat16[Tensor, "E 8"],
    base: int,
) -> Float[Tensor, "B N"]:
    """x W^T with sums in float32 (float64 for such x), rounded once to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = decode(sm, ex, esc, base, x.shape[-1]).to(wide)
    return (x.to(wide) @ weight.T).to(x.dtype)
