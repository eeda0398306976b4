"""A linear layer with a bfloat16 weight in plain torch: sums in float32, rounded once."""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor


def linear(x: Float[Tensor, "B K"], weight: BFloat16[Tensor, "N K"]) -> Float[Tensor, "B N"]:
    """x W^T with sums in float32 (float64 for such x), in the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)
