"""The plain BF16 matrix-vector product on a GPU: the same kernel as NF12's but for the decode.

It exists to be compared with: what a compressed format gains or loses is the difference to this one, and its
results are bit-identical, because everything but the reading of weights is one piece of code.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

from gnomon.kernels.launch import require, why_not

__all__ = ["linear", "why_not"]


def linear(x: Float[Tensor, "B K"], weight: BFloat16[Tensor, "N K"]) -> Float[Tensor, "B N"]:
    """x W^T with float32 sums, rounded once to the dtype of x. For few rows of x.

    A weight whose K is not a multiple of 8 is copied to pad it, at every call.

    Raises:
        MissingExtra, GnomonError: Triton can't run on the device of x.
    """
    require(x.device, "the Triton BF16 GEMV")
    from gnomon.kernels.bf16 import triton_kernels as kernels
    from gnomon.kernels.gemv import triton as gemv

    if missing := -x.shape[1] % 8:
        x, weight = (torch.nn.functional.pad(t, (0, missing)) for t in (x, weight))
    weight = weight.contiguous()
    if weight.data_ptr() % 16:
        weight = weight.clone()
    return gemv.gemv(x.contiguous(), (weight.view(torch.int32),), len(weight), kernels.read)
