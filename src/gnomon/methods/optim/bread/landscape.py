r"""The constructed case: a frozen last matrix keeps a block from a loss of zero, a rank-1 expansion lets it.

The block's output passes a ReLU, so the frozen W₃ (full column rank) sees z ≥ 0 only:

.. math:: \min_{z \ge 0} \|W_3 z - y\|^2 > 0 \quad\text{if the least-squares } z^* \text{ has a negative entry},
          \qquad \min_{z \ge 0, C} \|(W_3 + C) z - y\|^2 = 0
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import UsageError


def frozen_optimum(w3: Float[Tensor, "m n"], y: Float[Tensor, " m"]) -> tuple[Tensor, float]:
    """(z, loss): the best z ≥ 0 with W₃ frozen, by non-negative least squares in float64."""
    from scipy.optimize import nnls

    _require_numbers(w3, y)
    z, distance = nnls(w3.double().numpy(), y.double().numpy())
    return torch.from_numpy(z), float(distance) ** 2


def rank_one_expansion(
    w3: Float[Tensor, "m n"], y: Float[Tensor, " m"]
) -> tuple[Float[Tensor, "m n"], Float[Tensor, " n"]]:
    """(C, z) with C = (y − W₃e₁)e₁ᵀ and z = e₁, for which (W₃ + C)z = y."""
    _require_numbers(w3, y)
    e1 = torch.zeros(w3.shape[1], dtype=w3.dtype)
    e1[0] = 1
    return torch.outer(y - w3 @ e1, e1), e1


def loss(w3: Float[Tensor, "m n"], z: Float[Tensor, " n"], y: Float[Tensor, " m"]) -> float:
    """‖W₃z − y‖²."""
    return float((w3 @ z - y).square().sum())


def _require_numbers(w3: Tensor, y: Tensor) -> None:
    if not bool(torch.isfinite(w3).all() and torch.isfinite(y).all()):
        raise UsageError("W₃ and y must hold finite numbers.")
