r"""Shapley-guided GPTQ: the second-order scores of a layer's weights reweigh the diagonal of its input Hessian.

Paper: "MODEL SHAPLEY", NeurIPS 2025, Algorithm 1.
Here:  per input j: :math:`\phi_j = -\frac{1}{2}\sum_o \theta_{oj}(H\theta)_{oj}`, :math:`s_j = -\frac{1}{2}\sum_o
       \theta_{oj}^2 H_{jj}`, :math:`w_j = |\phi_j/(s_j+\epsilon)|`, :math:`\tilde H_{jj} = \beta w_j H_{jj} + (1-\beta)
       H_{jj}`.
Not here: GPTQ itself (`methods.compress.gptq`).
Differs from the paper: its released code replaces H by a diagonal matrix, so that GPTQ compensates no error, and
       corrects inside the loop over batches. Here the diagonal alone changes, once, after H is complete.

Shapes: W is out × in, H in × in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError

EPSILON = 1e-6


class SecondOrder(NamedTuple):
    """Scores of the inputs of one matrix."""

    joint: Float[Tensor, " n"]
    """φ_j, with all interactions of the input's weights."""
    alone: Float[Tensor, " n"]
    """s_j, with the diagonal of H only."""


def second_order(W: Float[Tensor, "m n"], H: Float[Tensor, "rows columns"]) -> SecondOrder:
    """φ⁽²⁾ and s of every input, float64."""
    if H.ndim != 2 or H.shape != (W.shape[1], W.shape[1]):
        raise UsageError(
            f"W of {list(W.shape)} (out × in) needs H of {[W.shape[1]] * 2}, got {list(H.shape)}."
        )
    w, h = W.detach().double(), H.detach().to(W.device).double()
    joint = -(w * (w @ h)).sum(0) / 2  # (θH)_oj = (Hθ)_oj, since H is symmetric
    return SecondOrder(joint, -w.square().sum(0) * h.diagonal() / 2)


def shapley_gptq_hessian(
    W: Float[Tensor, "m n"], H: Float[Tensor, "rows columns"], beta: float, *, eps: float = EPSILON
) -> Float[Tensor, "rows columns"]:
    """H with a reweighed diagonal; a copy in H's dtype. Entries off the diagonal stay as they are.

    Args:
        beta: share of the correction in [0, 1]; 0 gives H.
        eps: added to s_j; s ≤ 0, so an input whose weights are all zero keeps w_j = 0 / eps = 0. Its diagonal then
            shrinks to (1 − β) H_jj, which only matters to weights that are zero.

    Raises:
        UsageError: shapes that don't fit, beta outside [0, 1].
        NumericalFailure: a diagonal that isn't finite and positive where H's was.
    """
    if not 0 <= beta <= 1:
        raise UsageError(f"beta={beta} must lie in [0, 1]: the share of the corrected diagonal.")
    joint, alone = second_order(W, H)
    diagonal = H.detach().diagonal().to(W.device).double()
    # s is negative or zero; the paper adds eps to it, which flips its sign where |s| < eps
    weight = (joint / (alone + eps)).abs()
    mixed = beta * weight * diagonal + (1 - beta) * diagonal
    if not bool(torch.isfinite(mixed).all()):
        raise NumericalFailure("The corrected diagonal of H holds NaN or infinity: H or W does too.")
    # with beta = 1 a weight w_j of 0 would leave no diagonal
    mixed = torch.where((mixed > 0) | (diagonal <= 0), mixed, diagonal)
    out = H.detach().clone()
    out.diagonal().copy_(mixed.to(H))
    return out
