"""A linear layer with a bfloat16 weight for a few rows of x: batch-1 generation on a CPU, near memory speed.

The kernel has the structure of the one for NF12, with loads in place of the decoder: it is what that one is
compared with. `linear` chooses the fastest implementation that runs where the tensors are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import UsageError
from .. import native
from ..choosing import Choice, matrix_vector
from ..tracing import is_plain
from . import cpu, reference

__all__ = ["choice", "linear"]  # the layer is in `module`


def choice(device: str = "cpu", *, dtype: torch.dtype = torch.bfloat16, impl: str = "auto") -> Choice:
    """What `linear` runs for an x of this dtype on such a device, and why."""
    return matrix_vector("bf16", device, dtype, impl)


def linear(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """y = x W^T, (..., K) and bfloat16 (N, K) -> (..., N) in the dtype of x; sums in float32.

    Raises:
        UsageError: a weight that isn't bfloat16 with dense rows, an x of another width or device.
    """
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.stride(1) != 1:
        raise UsageError(
            f"weight has to be a bfloat16 matrix with dense rows, not {weight.dtype} {weight.stride()}."
        )
    if x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise UsageError(
            f"x {tuple(x.shape)} on {x.device} doesn't fit {tuple(weight.shape)} on {weight.device}."
        )
    if is_plain(x) and not (weight.requires_grad and torch.is_grad_enabled()):
        name = choice(x.device.type, dtype=x.dtype, impl=impl).name
        if name in native.ISAS:
            return cpu.linear(x, weight, name)
    y: Tensor = _linear_op(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight, impl)
    return y.view(*x.shape[:-1], weight.shape[0])


def _linear(x: Tensor, weight: Tensor, impl: str) -> Tensor:
    name = choice(x.device.type, dtype=x.dtype, impl=impl).name
    if name == "reference":
        return reference.linear(x, weight)
    if name == "triton":
        from . import triton

        return triton.linear(x, weight)
    return cpu.linear(x, weight, name)


_linear_op = torch.library.custom_op(
    "gnomon::bf16_linear",
    _linear,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, str impl) -> Tensor",
)


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, impl: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
