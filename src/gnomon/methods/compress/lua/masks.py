r"""Soft and hard masks from scores and thresholds, and the regulariser that holds the budget.

.. math::
    \tilde m_{ij} = \sigma(\lambda (s_{ij} - t)) \qquad m_{ij} = [s_{ij} > t] \qquad
    \partial \tilde m_{ij} / \partial t = -\lambda \tilde m_{ij} (1 - \tilde m_{ij})

With λ = n the exponents of neighbouring ranks differ by 1, so that about four ranks on each side of the cut are
fractional at any width, and moving t by 1/n moves one weight.

Shapes: W is m × n; t is m × 1 (rows), 1 × n (columns) or 1 × 1 (one for the matrix).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gnomon.core.errors import unknown

from .scores import as_scores

REGULARISERS = ("kept", "removed")


def soft_mask(
    scores: Float[Tensor, "m n"], thresholds: Float[Tensor, "rows columns"], slope: float | None = None
) -> Float[Tensor, "m n"]:
    """The soft top-k mask σ(λ(s − t)).

    Args:
        slope: λ; None is n, the width of a row.
    """
    return torch.sigmoid((scores.shape[-1] if slope is None else slope) * (scores - thresholds))


def hard_mask(scores: Float[Tensor, "m n"], thresholds: Float[Tensor, "rows columns"]) -> Bool[Tensor, "m n"]:
    """The final mask s > t: true where a weight stays.

    The paper writes s ≥ t, which at t = p keeps one weight of each row too many.
    """
    return scores > thresholds


def budget_loss(
    kept: Float[Tensor, ""], total: int, sparsity: float, form: str = "kept"
) -> Float[Tensor, ""]:
    r"""How far the number of kept weights is from its target, as a log-ratio; 0 on target.

    `kept`: :math:`|\log (N_{kept} / (1 - p) N)|`, as the released code has it.
    `removed`: :math:`|\log (N_{removed} / p N)|`, as the paper has it; weaker at high sparsity.

    Args:
        kept: weights that stay, a number from 0 to `total`.
        total: N.
        sparsity: p.
    """
    if form not in REGULARISERS:
        raise unknown("regulariser", form, REGULARISERS)
    count, target = (kept, (1 - sparsity) * total) if form == "kept" else (total - kept, sparsity * total)
    count = (
        count + (1 - count).clamp(min=0).detach()
    )  # the logarithm of less than one weight, still with a slope
    return (count / target).log().abs()


class Masked(Function):
    """(W ⊙ M̃, number of kept weights): the first with the soft mask, the second counted on the hard one.

    Backward gives t the derivative of both, the count's by straight-through. Nothing is saved but what exists
    already (W, ranks, t): the mask is made again, so that a layer keeps one matrix more, its masked weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Float[Tensor, "m n"],
        rank: Int[Tensor, "m n"],
        thresholds: Float[Tensor, "rows columns"],
        slope: float,
        min_kept: int,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            rank: 1 to n, see `scores.ranks`.
            slope: λ.
            min_kept: the highest ranks of each row that stay whatever t is.
        """
        ctx.save_for_backward(weight, rank, thresholds)
        ctx.slope, ctx.min_kept = slope, min_kept
        distance = as_scores(rank) - thresholds.detach()
        if min_kept:
            distance.masked_fill_(protected(rank, min_kept), float("inf"))
        kept = ((distance > 0) & (weight != 0)).sum(dtype=torch.int64).double()
        mask = distance.mul_(slope).sigmoid_()
        return weight * mask.to(weight.dtype), kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_kept: Tensor | None) -> tuple[Tensor | None, ...]:
        """The mask's derivative is zero where a weight always stays."""
        weight, rank, thresholds = ctx.saved_tensors
        mask = as_scores(rank).sub(thresholds).mul_(ctx.slope).sigmoid_()
        for_weight = for_thresholds = None
        if ctx.needs_input_grad[0] and grad is not None:
            stays = mask.masked_fill(protected(rank, ctx.min_kept), 1.0) if ctx.min_kept else mask
            for_weight = grad * stays.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            slopes = mask.addcmul_(mask, mask, value=-1).masked_fill_(weight == 0, 0.0)  # m(1 − m), in place
            if ctx.min_kept:
                slopes.masked_fill_(protected(rank, ctx.min_kept), 0.0)
            total = torch.zeros_like(thresholds)
            if grad_kept is not None:
                total = total + grad_kept.to(mask.dtype) * slopes.sum_to_size(thresholds.shape)
            if grad is not None:
                total = total + slopes.mul_(weight).mul_(grad).sum_to_size(thresholds.shape)
            for_thresholds = -ctx.slope * total
        return for_weight, None, for_thresholds, None, None


def masked(
    weight: Float[Tensor, "m n"],
    rank: Int[Tensor, "m n"],
    thresholds: Float[Tensor, "rows columns"],
    *,
    slope: float | None = None,
    min_kept: int = 0,
) -> tuple[Float[Tensor, "m n"], Float[Tensor, ""]]:
    """:class:`Masked` as a function; zeros of W count as removed whatever the mask says."""
    steep = float(rank.shape[-1] if slope is None else slope)
    return cast(tuple[Tensor, Tensor], Masked.apply(weight, rank, thresholds, steep, min_kept))  # type: ignore[no-untyped-call]


def protected(rank: Int[Tensor, "m n"], min_kept: int) -> Bool[Tensor, "m n"]:
    """The `min_kept` highest of each row (all, where fewer are there); with ties at the top, all of these."""
    return rank > rank.shape[-1] - min_kept
