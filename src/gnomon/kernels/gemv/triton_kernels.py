"""The Triton matrix-vector product under every weight format: one structure, so that formats compare fairly.

A weight format is a `read` function that gives the eight BF16 weights of one row and one group of eight columns
as four packed 32-bit words. Everything else (who reads what, the order of every sum) is the same code, which is
why a compressed matrix gives the same bits as the plain one.

    program (i, s)   one warp; rows ROWS i .. ROWS i + ROWS - 1 of W, the s-th share of the columns
    lane             one group of eight columns per step, neighbours in neighbouring lanes
    sums             per lane by explicit fma over its columns in order, then the warp's tree, then the shares
                     in order in a second pass: no atomics, so equal runs give equal bits

One group per lane and one warp per program also leave Triton no choice of layout: its reduction tree can't
differ between formats.      Shapes: B rows of x, N rows and K columns of W, G = K/8 groups.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def eight(x):
    """The columns of a (32, 8) tile as a tuple of eight (32,) tensors, without moving data between lanes."""
    even, odd = tl.split(tl.reshape(x, [32, 4, 2]))
    x04, x26 = tl.split(tl.reshape(even, [32, 2, 2]))
    x15, x37 = tl.split(tl.reshape(odd, [32, 2, 2]))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def four(words):
    """The columns of a (32, 4) tile as a tuple of four (32,) tensors."""
    even, odd = tl.split(tl.reshape(words, [32, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def gemv(x, weight, out, n, groups, share, B: tl.constexpr, ROWS: tl.constexpr, read: tl.constexpr):
    """out[s, b, row] = sum over share s of x[b] * W[row]; `share` is a multiple of 32 groups."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    start = tl.program_id(1) * share
    lane = tl.arange(0, 32)
    sums = (tl.zeros([32], tl.float32),) * (B * ROWS)
    for step in range(start, tl.minimum(start + share, groups), 32):
        group = step + lane
        inside = group < groups
        columns = group[:, None] * 8 + tl.arange(0, 8)[None, :]
        words = ()
        for r in tl.static_range(ROWS):  # rows past the end repeat the last one and store it again
            words = words + (read(weight, tl.minimum(first + r, n - 1), group, inside, groups),)  # noqa: RUF005
        added = ()
        for b in tl.static_range(B):
            xs = eight(tl.load(x + b * groups * 8 + columns, mask=inside[:, None], other=0.0).to(tl.float32))
            for r in tl.static_range(ROWS):
                total = sums[b * ROWS + r]
                for pair in tl.static_range(4):
                    low = (words[r][pair] << 16).to(tl.float32, bitcast=True)
                    high = (words[r][pair] & -65536).to(tl.float32, bitcast=True)
                    total = tl.fma(xs[2 * pair], low, total)
                    total = tl.fma(xs[2 * pair + 1], high, total)
                added = added + (total,)  # noqa: RUF005
        sums = added
    for b in tl.static_range(B):
        for r in tl.static_range(ROWS):
            row = tl.minimum(first + r, n - 1)
            tl.store(out + (tl.program_id(1) * B + b).to(tl.int64) * n + row, tl.sum(sums[b * ROWS + r], 0))


@triton.jit
def add_shares(partial, out, count, shares, BLOCK: tl.constexpr):
    """out[i] = partial[0, i] + partial[1, i] + ..., in this order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    total = tl.load(partial + i, mask=inside, other=0.0)
    for share in range(1, shares):
        total += tl.load(partial + share * count + i, mask=inside, other=0.0)
    tl.store(out + i, total, mask=inside)
