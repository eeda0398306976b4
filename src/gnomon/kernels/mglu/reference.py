"""MGLU on packed masks in plain torch: what every faster path has to equal.

    out = sum_i r_i g(x (M_i * W)) * (x ((1 - M_i) * W))        with sums in float32, rounded once

Here:  both products of every route by themselves, 2 n_m of them: no difference is formed, so none can cancel.
Not here: training (`methods/layers/mglu`).
Source: the MGLU card, "Method" 3.      Shapes: B rows of x, h inputs, d outputs, n masks, w = ceil(h / 8).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import unknown
from .planes import unpack

__all__ = ["ACTIVATIONS", "activation", "canonical", "glu", "linear", "mglu", "naive"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
"""g by name; the C++ kernels know them by their positions."""

_ALIASES = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "linear": "identity",
}


def canonical(name: str) -> str:
    """A name of `ACTIVATIONS` for this one or one that Transformers has for it.

    Raises:
        UsageError: unknown.
    """
    found = _ALIASES.get(name, name)
    if found not in ACTIVATIONS:
        raise unknown("activation", name, [*ACTIVATIONS, *_ALIASES])
    return found


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """g.

    Raises:
        UsageError: unknown.
    """
    return ACTIVATIONS[canonical(name)]


def linear(x: Float[Tensor, "B h"], weight: Float[Tensor, "d h"]) -> Float[Tensor, "B d"]:
    """x W^T with sums in float32 (float64 for such x), in that dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ weight.to(wide).T


def mglu(
    x: Float[Tensor, "B h"],
    weight: Float[Tensor, "d h"],
    planes: UInt8[Tensor, "n d w"],
    act: str,
    routes: Float[Tensor, "B n"] | None = None,
) -> Float[Tensor, "B d"]:
    """The sum over all routes, in the dtype of x; differentiable in x, the weight and the routes."""
    g, total = activation(act), None
    for i, mask in enumerate(unpack(planes, x.shape[1])):
        part = g(linear(x, weight.masked_fill(~mask, 0))) * linear(x, weight.masked_fill(mask, 0))
        part = part if routes is None else part * routes[:, i : i + 1].to(part.dtype)
        total = part if total is None else total + part
    assert total is not None
    return total.to(x.dtype)


def glu(
    x: Float[Tensor, "B h"], gate: Float[Tensor, "d h"], value: Float[Tensor, "d h"], act: str
) -> Float[Tensor, "B d"]:
    """g(x W_g) * (x W_v), in the dtype of x."""
    return (activation(act)(linear(x, gate)) * linear(x, value)).to(x.dtype)


def naive(
    x: Float[Tensor, "B h"], weight: Float[Tensor, "d h"], masks: Float[Tensor, "n d h"], act: str
) -> Float[Tensor, "B d"]:
    """What the paper compares with: 2 n_m linear layers on W * M, in the dtype of W; masks are of it, too."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    for mask in masks:
        total += activation(act)(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask))
    return total
