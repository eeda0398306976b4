"""A linear layer held as two thin factors, W ≈ A B.

Shapes: A is m × k, B is k × n, with m outputs, n inputs and rank k.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Model = TypeVar("Model", bound=nn.Module)


class LowRankLinear(nn.Module):
    """y = x Bᵀ Aᵀ + bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.a = nn.Parameter(torch.empty(out_features, rank, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype))
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(
                torch.zeros(out_features, device=device, dtype=dtype)
            )
        else:
            self.register_parameter("bias", None)
        if not self.a.is_meta:
            nn.init.normal_(self.a, std=rank**-0.5)
            nn.init.normal_(self.b, std=in_features**-0.5)

    @classmethod
    def from_factors(
        cls, a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], bias: Float[Tensor, " m"] | None = None
    ) -> LowRankLinear:
        """A layer that holds these factors."""
        layer = cls(b.shape[1], a.shape[0], a.shape[1], bias is not None, device="meta", dtype=a.dtype)
        layer.a, layer.b = nn.Parameter(a.detach()), nn.Parameter(b.detach())
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach())
        return layer

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        return F.linear(F.linear(x, self.b), self.a, self.bias)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` with W = A B."""
        dense = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta", dtype=self.a.dtype
        )
        dense.weight = nn.Parameter((self.a.detach().float() @ self.b.detach().float()).to(self.a.dtype))
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach())
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def to_dense(model: Model) -> Model:
    """Replace every `LowRankLinear` of a model by its dense layer, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LowRankLinear) and name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.to_dense())
    return model
