"""A linear layer of low rank: y = x (AB)^T + bias with A (m, k), B (k, n), so k(m + n) numbers in place of mn.

Shapes: m outputs, n inputs, k the rank, as in W ~ AB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)


class LowRankLinear(nn.Module):
    """Stands where a linear layer stood, and trains like one: `a` and `b` are ordinary parameters."""

    a: nn.Parameter
    b: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            in_features, out_features: n and m.
            rank: k, at most the smaller of the two.
            bias: whether one is added.

        Raises:
            UsageError: a rank that no m x n matrix has.
        """
        super().__init__()
        if not 1 <= rank <= min(in_features, out_features):
            raise UsageError(
                f"rank={rank} must lie between 1 and {min(in_features, out_features)}, the smaller of "
                f"in_features={in_features} and out_features={out_features}."
            )
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.a = nn.Parameter(torch.empty(out_features, rank, **place))
        self.b = nn.Parameter(torch.empty(rank, in_features, **place))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **place)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw AB with the variance 1/(3n) that `nn.Linear` draws W with, and the bias as it does."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.b, -bound, bound)
        nn.init.uniform_(self.a, -math.sqrt(3 / self.rank), math.sqrt(3 / self.rank))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_factors(
        cls,
        a: Float[Tensor, "m k"],
        b: Float[Tensor, "k n"],
        bias: Float[Tensor, " m"] | None = None,
    ) -> Self:
        """The layer of these factors, which it takes over without a copy where they are contiguous.

        Raises:
            UsageError: shapes that don't fit together.
        """
        fit = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
        if not fit or (bias is not None and bias.shape != a.shape[:1]):
            said = "none" if bias is None else tuple(bias.shape)
            raise UsageError(
                f"a {tuple(a.shape)}, b {tuple(b.shape)} and bias {said} don't fit: they must be (m, k), (k, n), (m,)."
            )
        layer = cls(b.shape[1], a.shape[0], a.shape[1], bias is not None, device="meta")
        layer.a, layer.b = nn.Parameter(a.detach().contiguous()), nn.Parameter(b.detach().contiguous())
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().contiguous())
        return layer

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        return F.linear(F.linear(x, self.b), self.a, self.bias)

    def product(self) -> Float[Tensor, "m n"]:
        """AB, multiplied in at least float32 and then in the factors' dtype. Passes gradients on."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return (self.a.to(wide) @ self.b.to(wide)).to(self.a.dtype)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` with the weight AB, which trains if the factors do."""
        with torch.device("meta"):  # neither memory nor random numbers for what is replaced at once
            made = nn.Linear(self.in_features, self.out_features, bias=False)
        made.weight = nn.Parameter(self.product().detach(), requires_grad=self.a.requires_grad)
        made.register_parameter("bias", self.bias)
        return made.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}"
        )


def low_rank_layers(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    """Every low-rank layer by each of its dotted names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LowRankLinear):
            yield name, module


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` at a dotted name of `model`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def to_dense(model: Model) -> Model:
    """Replace every low-rank layer by a plain linear layer with the weight AB, in place.

    The result has the original's shapes and size again and Transformers saves it as an ordinary model; its
    weights are those of rank k, not the original ones.

    Raises:
        UsageError: the model has no low-rank layers.
    """
    plain: dict[int, nn.Module] = {}
    for name, layer in list(low_rank_layers(model)):
        if not name:
            raise UsageError("This is a low-rank layer itself; layer.to_dense() gives the plain one.")
        if id(layer) not in plain:
            plain[id(layer)] = layer.to_dense()
        put(model, name, plain[id(layer)])
    if not plain:
        raise UsageError(f"{type(model).__name__} has no low-rank layers. compress_lowrank puts them in.")
    for module in model.modules():
        vars(module).pop("save_pretrained", None)
        loader = getattr(module, "hf_quantizer", None)  # one that `gnomon.hf` loaded
        if loader is not None:
            loader.remove_quantization_config(module)
    return model


def guard_saving(model: nn.Module) -> None:
    """Make `save_pretrained` of every Transformers model in `model` refuse.

    It would write factors under an ordinary configuration, and Transformers would later fill the layers with random
    weights.
    """
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            vars(module)["save_pretrained"] = refuse_to_save


def refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    """Stands in for `save_pretrained` of a model compressed in memory."""
    raise UsageError(
        "save_pretrained can't write a model compressed in memory: plain Transformers would load it with random "
        "weights. Call gnomon.hf.save_lowrank(model, folder), or to_dense first."
    )
