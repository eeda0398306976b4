"""MGLU on a GPU: the sums of each row, and what becomes of them. Imported only when called: this module needs Triton.

    program (i, s)   ROWS rows of W from ROWS i on, the s-th share of the columns
    a step           a tile (ROWS, GROUPS, 8) of W, read once; of each plane (ROWS, GROUPS) bytes, whose bits are spread
                     along the last axis; sums for x.w and for each mask
    shares           are stored apart and added in order by a second pass: no atomics, so equal runs give equal bits

Products are rounded before they are added (no fused multiply-add), so that with a mask of ones both sums are equal, and
their difference is exactly 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, ACT: tl.constexpr):
    """g by its number in reference.ACTIVATIONS."""
    if ACT == 0:
        x = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 2:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACT == 3:
        x = tl.where(x < 0, 0.0, x)
    elif ACT == 4:
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit
def sums(
    x,
    weight,
    other,
    planes,
    partial,
    d,
    h,
    width,
    share,
    B: tl.constexpr,
    MASKS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """partial[s, b, k, row] over share s: k = 0 is x.w, then the masked sums; without masks the second weight's."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < d
    start = tl.program_id(1) * share
    at = row.to(tl.int64)
    eight = tl.arange(0, 8)
    COUNT: tl.constexpr = MASKS + 1 if MASKS > 0 else 2
    total = (tl.zeros([ROWS, GROUPS], tl.float32),) * (B * COUNT)
    for step in range(start, tl.minimum(start + share, width), GROUPS):
        group = step + tl.arange(0, GROUPS)
        column = group[:, None] * 8 + eight[None, :]
        near = column < h
        here = inside[:, None, None] & near[None, :, :]
        w = tl.load(weight + at[:, None, None] * h + column[None, :, :], mask=here, other=0.0).to(tl.float32)
        bits = ()
        if MASKS > 0:
            for i in tl.static_range(MASKS):
                place = planes + (i * d.to(tl.int64) + at[:, None]) * width + group[None, :]
                byte = tl.load(place, mask=inside[:, None] & (group < width)[None, :], other=0).to(tl.int32)
                bits = bits + (((byte[:, :, None] >> eight[None, None, :]) & 1) != 0,)  # noqa: RUF005
        else:
            v = tl.load(other + at[:, None, None] * h + column[None, :, :], mask=here, other=0.0).to(
                tl.float32
            )
        added = ()
        for b in tl.static_range(B):
            xs = tl.load(x + b * h + column, mask=near, other=0.0).to(tl.float32)[None, :, :]
            product = w * xs
            added = added + (total[b * COUNT] + tl.sum(product, 2),)  # noqa: RUF005
            if MASKS > 0:
                for i in tl.static_range(MASKS):
                    part = tl.sum(tl.where(bits[i], product, 0.0), 2)
                    added = added + (total[b * COUNT + 1 + i] + part,)  # noqa: RUF005
            else:
                added = added + (total[b * COUNT + 1] + tl.sum(v * xs, 2),)  # noqa: RUF005
        total = added
    for b in tl.static_range(B):
        for k in tl.static_range(COUNT):
            place = partial + ((tl.program_id(1) * B + b) * COUNT + k).to(tl.int64) * d + row
            tl.store(place, tl.sum(total[b * COUNT + k], 1), mask=inside)


@triton.jit
def finish(
    partial,
    routes,
    out,
    d,
    shares,
    B: tl.constexpr,
    MASKS: tl.constexpr,
    ACT: tl.constexpr,
    ROUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[b, row] from the sums of all shares."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < d
    b = tl.program_id(1)
    COUNT: tl.constexpr = MASKS + 1 if MASKS > 0 else 2
    whole = tl.zeros([BLOCK], tl.float32)
    for s in range(shares):
        whole += tl.load(partial + ((s * B + b) * COUNT).to(tl.int64) * d + row, mask=inside, other=0.0)
    result = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(1, COUNT):
        part = tl.zeros([BLOCK], tl.float32)
        for s in range(shares):
            part += tl.load(
                partial + ((s * B + b) * COUNT + k).to(tl.int64) * d + row, mask=inside, other=0.0
            )
        if MASKS > 0:
            route = activate(part, ACT) * (whole - part)
            if ROUTED:
                route = route * tl.load(routes + b * MASKS + k - 1).to(tl.float32)
            result += route
        else:
            result = activate(whole, ACT) * part
    tl.store(out + b.to(tl.int64) * d + row, result, mask=inside)
