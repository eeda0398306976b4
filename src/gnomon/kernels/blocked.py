"""A product of more rows than a matrix-vector kernel serves, with a weight that is widened block by block.

A block of rows of W is widened (or decoded) into a buffer that stays in the cache and goes to the vendor's
matrix product from there, so W is read from memory once and in its small form. On processors without
bfloat16 arithmetic the blocks are float32: torch's bfloat16 product is several times slower there than its
float32 one, and this product's sums are float32 as well.

Source: the NF12 card, "CPU kernel" (batches above four).      Shapes: B rows of x, N x K the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "blocked_linear", "fused_rows", "has_bfloat16_products", "rows_per_block"]

BLOCK_BYTES = 1 << 22
"""Of a widened block: small beside a last-level cache, large enough that the vendor's product gets going."""


_BFLOAT16_PRODUCTS = bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)  # now: tracing can't record the question


def has_bfloat16_products() -> bool:
    """Whether torch multiplies bfloat16 matrices on this CPU with instructions made for it."""
    return _BFLOAT16_PRODUCTS


def fused_rows() -> int:
    """Rows of x up to which the matrix-vector kernels are the faster ones on this CPU.

    The card's 4 where bfloat16 products have instructions; without them the kernels stay ahead of torch's
    products up to some 24 rows (AVX2, 4096 x 4096; `benchmarks/nf12.py` prints the crossing).
    """
    return 4 if has_bfloat16_products() else 16


def rows_per_block(columns: int, dtype: torch.dtype) -> int:
    """Rows of a weight whose widened form takes about BLOCK_BYTES; at least 32, for the product's sake."""
    return max(32, BLOCK_BYTES // max(1, columns * dtype.itemsize))


def blocked_linear(x: Tensor, rows: int, widen: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """x W^T block by block: (B, K) -> (B, N), in the dtype of x.

    Args:
        x: bfloat16 or float32, on the CPU.
        rows: N.
        widen: widen(first, last, buffer) gives rows first … last - 1 in the dtype of the buffer, which it may
            fill and return.
    """
    columns = x.shape[1]
    wide = torch.bfloat16 if x.dtype == torch.bfloat16 and has_bfloat16_products() else torch.float32
    size = min(rows_per_block(columns, wide), max(1, rows))
    buffer = torch.empty(size, columns, dtype=wide)
    factor, out = x.to(wide), x.new_empty(x.shape[0], rows)
    for first in range(0, rows, size):
        last = min(rows, first + size)
        block = widen(first, last, buffer[: last - first])
        out[:, first:last] = factor @ block.T
    return out
