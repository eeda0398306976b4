"""`nn.Linear` with a bfloat16 weight, fast for generation on a CPU: matrix-vector products near memory speed.

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    fast_linears(model)
    model.generate(...)

Weights stay where they are, tied ones tied, and `state_dict` doesn't change. Outputs differ from torch's in
rounding, because sums are float32 in another order.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.errors import UsageError
from ..blocked import blocked_linear, fused_rows, has_bfloat16_products
from ..tracing import is_transformed
from . import linear

__all__ = ["BF16Linear", "fast_linears"]


class BF16Linear(nn.Linear):
    """`nn.Linear` on a bfloat16 weight; x may be bfloat16 or float32, and keeps its dtype.

    Few rows of x go to the matrix-vector kernel, more of them block by block to a float32 product where the
    processor has none for bfloat16. Training, other devices and other dtypes run as in `nn.Linear`.
    """

    @classmethod
    def of(cls, layer: nn.Linear) -> BF16Linear:
        """The same layer, sharing its parameters.

        Raises:
            UsageError: its weight isn't bfloat16.
        """
        if layer.weight.dtype != torch.bfloat16:
            raise UsageError(
                f"The layer's weight is {layer.weight.dtype}; load the model with dtype=torch.bfloat16."
            )
        fast = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        fast.weight, fast.bias = layer.weight, layer.bias
        return fast.train(layer.training)

    def forward(self, x: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch N"]:
        weight = self.weight
        learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        ours = weight.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) and x.ndim
        if not ours or learns or is_transformed() or weight.dtype != torch.bfloat16:
            return F.linear(x, weight, self.bias)
        flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        if len(flat) <= fused_rows():
            y = linear(flat, weight)
        elif x.dtype == torch.bfloat16 and has_bfloat16_products():
            return F.linear(x, weight, self.bias)
        else:
            y = blocked_linear(flat, weight.shape[0], lambda first, last, out: out.copy_(weight[first:last]))
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])


def fast_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` with a bfloat16 weight by :class:`BF16Linear`, in place.

    Returns:
        how many were replaced.

    Raises:
        UsageError: there is none; the model isn't bfloat16, or not made of `nn.Linear`.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, BF16Linear.of(child))
                count += 1
    if not count:
        raise UsageError(
            f"{type(model).__name__} has no nn.Linear with a bfloat16 weight. Load it with dtype=torch.bfloat16."
        )
    return count
