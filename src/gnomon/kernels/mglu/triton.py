"""MGLU and GLU on a GPU, the faces: shape the tensors, share out the work, launch. Loads Triton at the first call."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from gnomon.kernels.launch import require, why_not
from gnomon.kernels.mglu.planes import width
from gnomon.kernels.mglu.reference import ACTIVATIONS, canonical

__all__ = ["glu", "mglu", "why_not"]

MOST_SUMS = 24  # accumulators of a program: rows of x times sums
WARPS = 4
PROGRAMS_PER_SM = 8  # wanted before the columns stop being shared out
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}


def mglu(
    x: Float[Tensor, "B h"],
    weight: Float[Tensor, "d h"],
    planes: UInt8[Tensor, "n d w"],
    act: str,
    routes: Float[Tensor, "B n"] | None = None,
) -> Float[Tensor, "B d"]:
    """The sum over routes, in the dtype of x. For few rows: every few rows of x read the weight once more.

    Raises:
        MissingExtra, GnomonError: Triton can't run on the device of x.
    """
    require(x.device, "FlashMGLU's Triton kernel")
    return _run(x, weight.contiguous(), None, planes.contiguous(), act, routes)


def glu(
    x: Float[Tensor, "B h"], gate: Float[Tensor, "d h"], value: Float[Tensor, "d h"], act: str
) -> Float[Tensor, "B d"]:
    """A plain GLU by the same kernel.

    Raises:
        MissingExtra, GnomonError: Triton can't run on the device of x.
    """
    require(x.device, "the Triton GLU")
    return _run(x, gate.contiguous(), value.contiguous(), None, act, None)


def _shares(d: int, groups: int, rows: int, step: int, device: torch.device) -> int:
    """How many groups of columns a program takes, a multiple of a step; all of them unless d leaves the card idle."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    programs = math.ceil(d / rows)
    shares = min(math.ceil(processors * PROGRAMS_PER_SM / programs), max(1, groups // (2 * step)))
    return math.ceil(groups / shares / step) * step


def _run(
    x: Tensor, weight: Tensor, other: Tensor | None, planes: Tensor | None, act: str, routes: Tensor | None
) -> Tensor:
    from gnomon.kernels.mglu import triton_kernels as kernels

    x = x.contiguous()
    d, h = weight.shape
    masks = 0 if planes is None else len(planes)
    out = torch.empty(len(x), d, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or h == 0:
        return out.zero_()
    count, rows, step = max(2, masks + 1), 4 if masks > 4 else 8, 64
    share = _shares(d, width(h), rows, step, x.device)
    shares = math.ceil(width(h) / share)
    abreast = max(1, min(4, MOST_SUMS // count))
    number = list(ACTIVATIONS).index(canonical(act))
    for first in range(0, len(x), abreast):
        part, to = x[first : first + abreast], out[first : first + abreast]
        partial = torch.empty(shares, len(part), count, d, dtype=torch.float32, device=x.device)
        kernels.sums[(math.ceil(d / rows), shares)](
            part, weight, weight if other is None else other, weight if planes is None else planes, partial,
            d, h, width(h), share, B=len(part), MASKS=masks, ROWS=rows, GROUPS=step, **OPTIONS,
        )  # fmt: skip
        kernels.finish[(math.ceil(d / 128), len(part))](
            partial, part if routes is None else routes[first : first + abreast].contiguous(), to, d, shares,
            B=len(part), MASKS=masks, ACT=number, ROUTED=routes is not None, BLOCK=128, **OPTIONS,
        )  # fmt: skip
    return out
