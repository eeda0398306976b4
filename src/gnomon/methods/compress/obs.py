r"""The optimal brain surgeon's algebra that one-shot pruning and quantisation share: a factor of a damped inverse.

Paper: "SparseGPT" and "GPTQ", by the description in the methods that are compared with them.
Here:  the upper Cholesky factor U of H⁻¹ = Uᵀ U. Its row j holds, from the diagonal on, what column j's error changes
       in the columns after it once the columns before it are fixed: [H_{j:,j:}⁻¹]_{j,j} = U_jj².
Not here: the sweep over columns, which is each method's own.

Shapes: n inputs of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError

DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal (SparseGPT, GPTQ)."""
MOST = 1e3
"""Damping at which the diagonal has drowned everything else: there is nothing left to invert."""


class InverseFactor(NamedTuple):
    """A factor of the inverse, and what it took."""

    upper: Float[Tensor, "n n"]
    """U, float64, upper triangular with positive diagonal: (H + shift I)⁻¹ = Uᵀ U."""
    damping: float
    """Share of the mean diagonal that was added; above what was asked for where that didn't suffice."""
    dead: Bool[Tensor, " n"]
    """Inputs that are always zero: their diagonal was set to 1, and their weights do nothing."""


def inverse_factor(gram: Float[Tensor, "n columns"], *, damping: float = DAMPING) -> InverseFactor:
    """Factor (H + damping · mean(diag H) · I)⁻¹ in float64; damping grows tenfold until that works.

    Args:
        gram: H = Σ x xᵀ or a multiple of it. Not changed.
        damping: ≥ 0.

    Raises:
        UsageError: not square, or a negative damping.
        NumericalFailure: H holds NaN or infinity, or has a negative diagonal, so that no damping helps.
    """
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise UsageError(f"H has the shape {list(gram.shape)}, but must be square: inputs by inputs.")
    if not damping >= 0:
        raise UsageError(f"damping={damping} must be a share of the mean diagonal, 0 or more.")
    h = gram.detach().to(torch.float64, copy=True)
    if not bool(torch.isfinite(h).all()):
        raise NumericalFailure(
            "H = Σ x xᵀ of a layer's inputs holds NaN or infinity. Look for huge activations, or gather it in float32 "
            "or more."
        )
    diagonal = h.diagonal()
    if bool((diagonal < 0).any()):
        raise NumericalFailure("H has a negative diagonal entry, so it is no sum of x xᵀ.")
    dead = diagonal == 0
    diagonal[dead] = 1.0
    mean = float(diagonal.mean())
    while True:
        shift, given = damping * mean, h.clone()
        given.diagonal().add_(shift)
        lower, failed = torch.linalg.cholesky_ex(given)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return InverseFactor(upper, damping, dead)
        damping = max(10 * damping, 1e-8)
        if damping > MOST:
            raise NumericalFailure(
                f"H stays indefinite even with {MOST:g} times its mean diagonal added. Was it gathered in float32?"
            )
