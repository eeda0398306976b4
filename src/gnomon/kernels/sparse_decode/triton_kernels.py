"""Sparse and dense decoding on a GPU. Imported only when called: this module needs Triton.

    winners   program (b, key head; tile of buckets; run of positions): each key is read once for all query heads of its
              key head; the best score of each bucket and its position stay in registers while positions j, j + m,
              j + 2m, ... pass by (a tile of buckets is a tile of neighbouring positions)
    gather    program (b, query head; share of the buckets): joins the runs, writes the kept positions, weighs their
              values; joins only where the best of the winners are still to be found (`KEEP`)
    dense     program (b, head; run of positions): ordinary attention over the run
    combine   program (b, query head): adds the shares' weighted values up, each scaled by its own largest score

Shares and runs are stored apart and added in order: no atomics, so equal runs give equal bits. Sums are float32.
Keys and values that aren't visible, and values that aren't kept, are never read. WIDE multiplies in float32, which
changes no product of keys: for Triton's interpreter, whose tl.dot takes bfloat16 for whole numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def beats(later, earlier):
    """Whether a later score takes an earlier one's place: equal ones don't, the first that is no number does."""
    return (later > earlier) | ((later != later) & (earlier == earlier))  # noqa: PLR0124


@triton.jit
def tile(
    q, k, visible, at, live, dims, near, stride, scale, MASKED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Scores (R, N) of the queries q (R, D) with the keys at these positions, -inf where nothing is to be seen."""
    if MASKED:
        live = live & (tl.load(visible + at, mask=live, other=0) != 0)
    place = k + at.to(tl.int64)[:, None] * stride + dims[None, :]
    keys = tl.load(place, mask=live[:, None] & near[None, :], other=0.0)  # (N, D)
    if WIDE:
        keys = keys.to(tl.float32)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    return tl.where(live[None, :], scores, float("-inf"))


@triton.jit
def queries(q, first, rows, d, dims, near, R: tl.constexpr, WIDE: tl.constexpr):
    """The group's query rows, padded to R."""
    row = tl.arange(0, R)
    place = q + (first + row).to(tl.int64)[:, None] * d + dims[None, :]
    found = tl.load(place, mask=(row < rows)[:, None] & near[None, :], other=0.0)
    return found.to(tl.float32) if WIDE else found


@triton.jit
def winners(
    q, k, visible, best, position,
    heads, group, length, d, buckets, runs, rows_a_run, scale, k_batch, k_head, k_row,
    R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """best, position (B, Hq, runs, buckets) of each run of rows; a row is `buckets` neighbouring positions."""
    own = tl.program_id(0).to(tl.int64)  # b * Hk + key head
    key_heads = heads // group
    b, head = own // key_heads, own % key_heads
    run = tl.program_id(2)
    bucket = tl.program_id(1) * N + tl.arange(0, N)
    dims = tl.arange(0, D)
    near = dims < d
    first = b * heads + head * group
    asked = queries(q, first, group, d, dims, near, R, WIDE)
    keys = k + b * k_batch + head * k_head
    top = tl.full([R, N], float("-inf"), tl.float32)
    where = tl.full([R, N], -1, tl.int32)
    last = tl.minimum((run + 1) * rows_a_run, tl.cdiv(length, buckets))
    for row in range(run * rows_a_run, last):
        at = row * buckets + bucket
        live = (bucket < buckets) & (at < length)
        scores = tile(asked, keys, visible + b * length, at, live, dims, near, k_row, scale, MASKED, WIDE)
        wins = beats(scores, top)
        top = tl.where(wins, scores, top)
        where = tl.where(wins, at[None, :], where)
    row = tl.arange(0, R)
    place = ((first + row)[:, None] * runs + run) * buckets + bucket[None, :]
    inside = (row < group)[:, None] & (bucket < buckets)[None, :]
    tl.store(best + place, top, mask=inside)
    tl.store(position + place, where, mask=inside)


@triton.jit
def gather(
    best, position, v, kept, top, sums, weighted,
    heads, group, d, buckets, runs, shares, v_batch, v_head, v_row,
    N: tl.constexpr, D: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Joins runs, into the first one's place (KEEP), or to kept positions and a share's largest score, sum and values.

    best, position (B, Hq, runs, buckets); kept (B, Hq, buckets); top, sums (B, Hq, shares); weighted (…, d).
    """
    own = tl.program_id(0).to(tl.int64)  # b * Hq + query head
    share = tl.program_id(1)
    bucket = share * N + tl.arange(0, N)
    inside = bucket < buckets
    start = own * runs * buckets + bucket
    score = tl.load(best + start, mask=inside, other=float("-inf"))
    at = tl.load(position + start, mask=inside, other=-1)
    for run in range(1, runs):
        other = tl.load(best + start + run * buckets, mask=inside, other=float("-inf"))
        later = tl.load(position + start + run * buckets, mask=inside, other=-1)
        wins = beats(other, score)
        score = tl.where(wins, other, score)
        at = tl.where(wins, later, at)
    if KEEP:
        tl.store(best + start, score, mask=inside)
        tl.store(position + start, at, mask=inside)
    else:
        tl.store(kept + own * buckets + bucket, at.to(tl.int64), mask=inside)
        live = at >= 0
        largest = tl.max(score, 0)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        p = tl.where(live, tl.exp(score - base), 0.0)
        dims = tl.arange(0, D)
        near = dims < d
        b, head = own // heads, (own % heads) // group
        place = v + b * v_batch + head * v_head + at.to(tl.int64)[:, None] * v_row + dims[None, :]
        values = tl.load(place, mask=live[:, None] & near[None, :], other=0.0).to(tl.float32)
        to = own * shares + share
        tl.store(top + to, largest)
        tl.store(sums + to, tl.sum(p, 0))
        tl.store(weighted + to * d + dims, tl.sum(p[:, None] * values, 0), mask=near)


@triton.jit
def dense(
    q, k, v, visible, top, sums, weighted,
    heads, group, length, d, shares, tiles_a_share, scale, k_batch, k_head, k_row, v_batch, v_head, v_row,
    R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A share's largest score, sum and weighted values for all query heads of a key head, from one pass over both."""
    own = tl.program_id(0).to(tl.int64)
    key_heads = heads // group
    b, head = own // key_heads, own % key_heads
    share = tl.program_id(1)
    dims = tl.arange(0, D)
    near = dims < d
    first = b * heads + head * group
    asked = queries(q, first, group, d, dims, near, R, WIDE)
    keys = k + b * k_batch + head * k_head
    rows = v + b * v_batch + head * v_head
    largest = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    last = tl.minimum((share + 1) * tiles_a_share, tl.cdiv(length, N))
    for step in range(share * tiles_a_share, last):
        at = step * N + tl.arange(0, N)
        live = at < length
        scores = tile(asked, keys, visible + b * length, at, live, dims, near, k_row, scale, MASKED, WIDE)
        after = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(after > float("-inf"), after, 0.0)
        p = tl.exp(scores - base[:, None])  # (R, N)
        shrink = tl.exp(largest - base)
        if MASKED:
            live = live & (tl.load(visible + b * length + at, mask=live, other=0) != 0)
        place = rows + at.to(tl.int64)[:, None] * v_row + dims[None, :]
        values = tl.load(place, mask=live[:, None] & near[None, :], other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        largest = after
    row = tl.arange(0, R)
    inside = row < group
    to = (first + row) * shares + share
    tl.store(top + to, largest, mask=inside)
    tl.store(sums + to, total, mask=inside)
    tl.store(weighted + to[:, None] * d + dims[None, :], acc, mask=inside[:, None] & near[None, :])


@triton.jit
def combine(top, sums, weighted, out, d, shares, S: tl.constexpr, D: tl.constexpr):
    """out (B, Hq, d): the shares' values over their sums; 0 where nothing was visible."""
    own = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, D)
    near = dims < d
    share = tl.arange(0, S)
    inside = share < shares
    largest = tl.load(top + own * shares + share, mask=inside, other=float("-inf"))
    most = tl.max(largest, 0)
    base = tl.where(most > float("-inf"), most, 0.0)
    factor = tl.exp(largest - base)
    total = tl.sum(tl.load(sums + own * shares + share, mask=inside, other=0.0) * factor, 0)
    acc = tl.zeros([D], tl.float32)
    for one in range(shares):
        scale = tl.exp(tl.load(top + own * shares + one) - base)
        acc += scale * tl.load(weighted + (own * shares + one) * d + dims, mask=near, other=0.0)
    result = tl.where(most > float("-inf"), acc / tl.where(total > 0, total, 1.0), 0.0)
    result = tl.where(total == total, result, total)  # noqa: PLR0124
    tl.store(out + own * d + dims, result, mask=near)
