r"""Mixture of element-wise gating: masks, the two products of each route, and the sum over routes.

.. math:: \mathrm{MGLU}(x) = \sum_{i=1}^{n_m} g\bigl(x (M_i \odot W)\bigr) \odot \bigl(x (\bar M_i \odot W)\bigr)

with :math:`\bar M_i = 1 - M_i`, one W for all routes, and no weights on them unless they are routed.
A mask has W's full shape. With one bit an output channel each channel would be all gate or all value, and with
g(0) = 0 every output 0.

Shapes: x (..., h), W (d, h) as in `nn.Linear` (the paper's is its transpose), masks (n, d, h), n = n_m.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.errors import UsageError, unknown
from gnomon.kernels.mglu.reference import activation

from .config import MASKED

__all__ = ["gate_value", "hard_masks", "mglu", "mix", "straight_through", "top_k_routes"]


def hard_masks(logits: Float[Tensor, "n d h"]) -> Bool[Tensor, "n d h"]:
    """M_i = 1[S_i > 0]: a logit of exactly 0 counts as mask 0, here and wherever masks are packed."""
    return logits > 0


class _StraightThrough(torch.autograd.Function):
    """1[S > 0] forward, the identity backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, dtype: torch.dtype) -> Tensor:
        return (logits > 0).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, dtype: None) -> Tensor:
        return tangent


def straight_through(logits: Float[Tensor, "n d h"], dtype: torch.dtype) -> Float[Tensor, "n d h"]:
    """Hard masks whose gradient reaches the logits unchanged: dL/dS = dL/dM, whatever S is.

    Args:
        dtype: of the masks: that of the weight which they multiply.
    """
    masks: Tensor = _StraightThrough.apply(logits, dtype)  # type: ignore[no-untyped-call]
    return masks


def gate_value(
    x: Float[Tensor, "*batch h"],
    weight: Float[Tensor, "d h"],
    masks: Float[Tensor, "n d h"],
    masked: str = "both",
) -> tuple[Float[Tensor, "*batch n d"], Float[Tensor, "*batch n d"]]:
    """(x (M_i * W)^T, x ((1 - M_i) * W)^T) for every i; the two add up to x W^T.

    In float32 and float64 the value is the difference xW - gate, which saves n_m - 1 products. In narrower dtypes,
    and under autocast, that difference would cancel, so both are multiplied out.

    Args:
        masked: which of the two is masked, see `MGLUConfig.masked`.

    Raises:
        UsageError: masks of another shape than the weight's; an unknown `masked`.
    """
    if masks.shape[1:] != weight.shape:
        raise UsageError(
            f"Masks of shape {tuple(masks.shape)} don't fit a weight of {tuple(weight.shape)}: a mask has a bit for "
            "each weight. One bit an output channel would make every output 0."
        )
    if masked not in MASKED:
        raise unknown("choice of what is masked", masked, MASKED)

    weight_rows = (len(masks), weight.shape[0])

    def routes(factors: Tensor) -> Tensor:
        """x times n matrices in one product."""
        return F.linear(x, (weight * factors).flatten(0, 1)).view(*x.shape[:-1], *weight_rows)

    def whole() -> Tensor:
        return F.linear(x, weight).unsqueeze(-2).expand(*x.shape[:-1], len(masks), -1)

    if masked == "neither":
        return whole(), whole()
    if masked == "value":
        return whole(), routes(1 - masks)
    gate = routes(masks)
    if masked == "gate":
        return gate, whole()
    if x.dtype.itemsize >= 4 and gate.dtype.itemsize >= 4:
        return gate, whole() - gate
    return gate, routes(1 - masks)


def mix(
    gate: Float[Tensor, "*batch n d"],
    value: Float[Tensor, "*batch n d"],
    act: str,
    routes: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch d"]:
    """The sum over routes of g(gate) * value, each route times its weight if there are some."""
    parts = activation(act)(gate) * value
    return (parts if routes is None else parts * routes.to(parts.dtype).unsqueeze(-1)).sum(-2)


def mglu(
    x: Float[Tensor, "*batch h"],
    weight: Float[Tensor, "d h"],
    masks: Float[Tensor, "n d h"],
    act: str = "silu",
    routes: Float[Tensor, "*batch n"] | None = None,
    *,
    masked: str = "both",
) -> Float[Tensor, "*batch d"]:
    """The whole layer but for the output projection."""
    return mix(*gate_value(x, weight, masks, masked), act, routes)


def top_k_routes(logits: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch n"]:
    """G(x): softmax of the k largest logits, 0 elsewhere.

    Raises:
        UsageError: k is not 1 … n.
    """
    n = logits.shape[-1]
    if not 1 <= k <= n:
        raise UsageError(f"k={k} routes can't be taken of {n}.")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = wide.topk(k, dim=-1).indices
    dropped = torch.ones_like(wide, dtype=torch.bool).scatter(-1, chosen, False)
    return wide.masked_fill(dropped, float("-inf")).softmax(-1)
