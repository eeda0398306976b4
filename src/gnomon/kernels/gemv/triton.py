"""Launching the shared Triton matrix-vector product: how the work is shared out, and the second pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

WARP = 32
ROWS = 4  # rows of W per program: each lane then has four independent loads under way
MAX_B = 8  # rows of x per launch: B * ROWS sums live in registers
WARPS_PER_SM = 16  # programs wanted per multiprocessor before the columns stop being shared out
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}  # every fma is written out
MIN_STEPS = 4  # a share of the columns is at least this many steps, or its reduction costs more than it hides


def _groups_per_share(n: int, groups: int, device: torch.device) -> int:
    """How many groups of columns one program takes, a multiple of 32: all of them unless N leaves the card idle."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    programs = math.ceil(n / ROWS)
    shares = min(math.ceil(processors * WARPS_PER_SM / programs), max(1, groups // (WARP * MIN_STEPS)))
    return math.ceil(groups / shares / WARP) * WARP


def gemv(x: Float[Tensor, "B K"], weight: tuple[Any, ...], n: int, read: Any) -> Float[Tensor, "B N"]:
    """x W^T with float32 sums, for contiguous x and K a multiple of 8.

    Every eight rows of x read the weights once more: this is for few rows.

    Args:
        weight: what `read` takes as its first argument.
        n: rows of W.
        read: `read(weight, row, group, inside, groups)` -> four (32,) int32, two weights each, the first low.
    """
    from gnomon.kernels.gemv import triton_kernels as kernels

    out = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    groups = x.shape[1] // 8
    if out.numel() == 0 or groups == 0:
        return out.zero_()
    share = _groups_per_share(n, groups, x.device)
    shares = math.ceil(groups / share)
    for rows, y in zip(torch.split(x, MAX_B), torch.split(out, MAX_B), strict=True):
        grid = (math.ceil(n / ROWS), shares)
        if shares == 1:
            kernels.gemv[grid](
                rows, weight, y, n, groups, share, B=len(rows), ROWS=ROWS, read=read, **OPTIONS
            )
            continue
        partial = torch.empty(shares, len(rows), n, dtype=torch.float32, device=x.device)
        kernels.gemv[grid](
            rows, weight, partial, n, groups, share, B=len(rows), ROWS=ROWS, read=read, **OPTIONS
        )
        kernels.add_shares[(math.ceil(y.numel() / 32),)](partial, y, y.numel(), shares, BLOCK=32, **OPTIONS)
    return out
