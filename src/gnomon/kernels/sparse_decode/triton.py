"""Sparse and dense decoding on a GPU, the faces: share out the work, launch. Loads Triton at the first call.

Arguments are checked by the caller. Of a cache, rows must be dense; other strides are as they are. Positions fit in 32
bits, offsets are 64-bit.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gnomon.kernels.launch import interpreted, require, why_not

from .reference import bucket_count, keep

__all__ = ["DTYPES", "dense_decode", "sparse_decode", "why_not"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_BYTES = 1 << 14
"""Of the keys, or values, that a program has before it: three such tiles of both fit an Ampere's shared memory."""
PROGRAMS_PER_SM = 4  # wanted before runs of positions stop being shared out
LEAST_ROWS = 16  # of a tensor core's tile: groups of fewer query heads, and narrower heads, are padded
MOST_SHARES = 256


def sparse_decode(
    q: Float[Tensor, "B Hq d"],
    k: Float[Tensor, "B Hk L d"],
    v: Float[Tensor, "B Hv L d"],
    n: int,
    oversample: int,
    scale: float,
    visible: Bool[Tensor, "B L"] | None,
) -> tuple[Float[Tensor, "B Hq d"], Int[Tensor, "B Hq n"]]:
    """(output in the dtype of q, kept positions, -1 for none).

    Raises:
        MissingExtra, GnomonError: Triton can't run on the device of q.
    """
    require(q.device, "sparse decoding's Triton kernel")
    from gnomon.kernels.sparse_decode import triton_kernels as kernels

    q, k, v, seen = _ready(q, k, v, visible)
    batch, heads, width = q.shape
    length, buckets = k.shape[2], bucket_count(n, oversample, k.shape[2])
    sizes = {"N": _tile(q), "D": _power(width)}
    tiles, rows = math.ceil(buckets / sizes["N"]), math.ceil(length / buckets)
    runs = min(rows, _wanted(q.device, batch * k.shape[1] * tiles))
    a_run = math.ceil(rows / runs)
    runs = math.ceil(rows / a_run)
    best = q.new_empty(batch, heads, runs, buckets, dtype=torch.float32)
    position = torch.empty_like(best, dtype=torch.int32)
    kernels.winners[(batch * k.shape[1], tiles, runs)](
        q, k, q if seen is None else seen, best, position,
        heads, heads // k.shape[1], length, width, buckets, runs, a_run, scale, *k.stride()[:3],
        R=_power(heads // k.shape[1]), MASKED=seen is not None, WIDE=interpreted(), **sizes,
    )  # fmt: skip
    kept = torch.empty(batch, heads, n, dtype=torch.long, device=q.device)
    parts = _parts(q, math.ceil(n / sizes["N"]))
    few = (heads, heads // v.shape[1], width)
    if buckets > n:  # the best of the winners
        kernels.gather[(batch * heads, tiles)](
            best, position, v, kept, *parts, *few, buckets, runs, 1, *v.stride()[:3], KEEP=True, **sizes
        )
        joined, at = best[:, :, 0], position[:, :, 0].long()
        at = keep(joined, at, n)
        slot = at.clamp(min=0) % buckets
        best = joined.gather(-1, slot).masked_fill(at < 0, -torch.inf)[:, :, None].contiguous()
        position, runs, buckets = at.int()[:, :, None].contiguous(), 1, n
    kernels.gather[(batch * heads, parts[0].shape[-1])](
        best,
        position,
        v,
        kept,
        *parts,
        *few,
        buckets,
        runs,
        parts[0].shape[-1],
        *v.stride()[:3],
        KEEP=False,
        **sizes,
    )
    return _combined(q, parts), kept


def dense_decode(
    q: Float[Tensor, "B Hq d"],
    k: Float[Tensor, "B H L d"],
    v: Float[Tensor, "B H L d"],
    scale: float,
    visible: Bool[Tensor, "B L"] | None,
) -> Float[Tensor, "B Hq d"]:
    """As :func:`sparse_decode` with all positions: what it is compared with.

    Raises:
        MissingExtra, GnomonError: Triton can't run on the device of q.
    """
    require(q.device, "sparse decoding's Triton kernel")
    from gnomon.kernels.sparse_decode import triton_kernels as kernels

    q, k, v, seen = _ready(q, k, v, visible)
    batch, heads, width = q.shape
    tiles = math.ceil(k.shape[2] / _tile(q))
    shares = min(tiles, MOST_SHARES, _wanted(q.device, batch * k.shape[1]))
    a_share = math.ceil(tiles / shares)
    parts = _parts(q, math.ceil(tiles / a_share))
    kernels.dense[(batch * k.shape[1], parts[0].shape[-1])](
        q, k, v, q if seen is None else seen, *parts,
        heads, heads // k.shape[1], k.shape[2], width, parts[0].shape[-1], a_share, scale,
        *k.stride()[:3], *v.stride()[:3],
        R=_power(heads // k.shape[1]), N=_tile(q), D=_power(width), MASKED=seen is not None, WIDE=interpreted(),
    )  # fmt: skip
    return _combined(q, parts)


def _ready(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    return q.contiguous(), k, v, None if visible is None else visible.contiguous().view(torch.uint8)


def _power(size: int) -> int:
    """The next power of two, at least a tensor core's tile."""
    return max(LEAST_ROWS, 1 << (size - 1).bit_length())


def _tile(q: Tensor) -> int:
    """How many neighbouring positions, or buckets, a program has before it."""
    return max(LEAST_ROWS, min(64, TILE_BYTES // (_power(q.shape[-1]) * q.element_size())))


def _wanted(device: torch.device, programs: int) -> int:
    """Into how many runs of positions the work of this many programs is cut, so that no processor is idle."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    return max(1, math.ceil(processors * PROGRAMS_PER_SM / programs))


def _parts(q: Tensor, shares: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for each share's largest score, sum of weights and weighted values."""
    batch, heads, width = q.shape
    top, sums = (q.new_empty(batch, heads, shares, dtype=torch.float32) for _ in range(2))
    return top, sums, q.new_empty(batch, heads, shares, width, dtype=torch.float32)


def _combined(q: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    from gnomon.kernels.sparse_decode import triton_kernels as kernels

    out = torch.empty_like(q)
    shares = parts[0].shape[-1]
    kernels.combine[(q.shape[0] * q.shape[1],)](
        *parts, out, q.shape[-1], shares, S=max(2, 1 << (shares - 1).bit_length()), D=_power(q.shape[-1])
    )
    return out
