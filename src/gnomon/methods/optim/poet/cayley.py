"""Small rotations from skew-symmetric matrices: the Cayley map, its Neumann form, and their gradients by hand.

q are the b(b − 1)/2 numbers above the diagonal of Q, row by row; Q = Q_up − Q_upᵀ. The exact map is
G = (I + Q)(I − Q)⁻¹; with k terms of the Neumann series it is G_k = (I + Q)(I + Q + … + Q^k). The count k is the
paper's: it counts the powers and not the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

Terms = int | str
"""k of the Neumann form, or "exact"."""


def size_of(numbers: int) -> int:
    """b, of which b(b − 1)/2 is `numbers`."""
    return int((1 + (1 + 8 * numbers) ** 0.5) / 2 + 0.5)


def skew(q: Float[Tensor, "*n k"]) -> Float[Tensor, "*n b b"]:
    """Q, with k = b(b − 1)/2."""
    b = size_of(q.shape[-1])
    upper = q.new_zeros(*q.shape[:-1], b * b).index_copy(-1, _positions(b, q.device), q)
    upper = upper.view(*q.shape[:-1], b, b)
    return upper - upper.mT


def above(m: Float[Tensor, "*n b b"]) -> Float[Tensor, "*n k"]:
    """M − Mᵀ above the diagonal: the gradient by q, if M is that by Q."""
    b = m.shape[-1]
    return (m - m.mT).flatten(-2).index_select(-1, _positions(b, m.device))


def _positions(b: int, device: torch.device) -> Tensor:
    """Where the entries above the diagonal lie in a flattened b × b matrix."""
    at = torch.triu_indices(b, b, 1, device=device)
    return torch.add(at[1], at[0], alpha=b)


def cayley(skew_q: Float[Tensor, "*n b b"]) -> Float[Tensor, "*n b b"]:
    """(I + Q)(I − Q)⁻¹, in SO(b); the two factors commute."""
    eye = torch.eye(skew_q.shape[-1], dtype=skew_q.dtype, device=skew_q.device)
    solved: Tensor = torch.linalg.solve(eye - skew_q, eye + skew_q)
    return solved


def cayley_neumann(skew_q: Float[Tensor, "*n b b"], terms: int) -> Float[Tensor, "*n b b"]:
    """G_k = (I + Q)(I + Q + … + Q^k) = (I − Q^{k+1}) Cayley(Q); needs ‖Q‖₂ < 1 to be near a rotation."""
    eye = torch.eye(skew_q.shape[-1], dtype=skew_q.dtype, device=skew_q.device)
    if terms == 3:  # I + 2Q + 2Q² + 2Q³ + Q⁴ in two products
        square = skew_q @ skew_q
        return eye + 2 * (skew_q + square) + square @ (2 * skew_q + square)
    series = eye.expand_as(skew_q)
    for _ in range(terms):
        series = eye + skew_q @ series
    return series + skew_q @ series


def cayley_backward(g: Float[Tensor, "*n b b"], dg: Float[Tensor, "*n b b"]) -> Float[Tensor, "*n b b"]:
    """Gradient by Q of the exact map: 2 MᵀdG Mᵀ, where M = (I − Q)⁻¹ is (G + I)/2, so nothing is solved again."""
    eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    twice = (g + eye).mT
    return twice @ dg @ twice / 2


def cayley_neumann_backward(
    skew_q: Float[Tensor, "*n b b"], dg: Float[Tensor, "*n b b"], terms: int
) -> Float[Tensor, "*n b b"]:
    """Gradient by Q of G_k.

    For k = 3, with A = QᵀdG + dG Qᵀ: 2(dG + A) + (2Qᵀ + Q²ᵀ)A + (2dG + A)Q²ᵀ, five products. Otherwise back through
    the recurrence S_j = I + Q S_{j−1}, G = (I + Q) S_k.
    """
    qt = -skew_q
    if terms == 3:
        square = qt @ qt
        a = qt @ dg + dg @ qt
        return 2 * (dg + a) + (2 * qt + square) @ a + (2 * dg + a) @ square
    eye = torch.eye(skew_q.shape[-1], dtype=skew_q.dtype, device=skew_q.device)
    series = [eye.expand_as(skew_q)]
    for _ in range(terms):
        series.append(eye + skew_q @ series[-1])
    dq, ds = dg @ series[-1].mT, dg + qt @ dg
    for before in reversed(series[:-1]):
        dq, ds = dq + ds @ before.mT, qt @ ds
    return dq


def rotation(q: Float[Tensor, "*n k"], terms: Terms) -> Float[Tensor, "*n b b"]:
    """G of each row of q, with the gradients above; in q's precision also under autocast. Only q (exact: G) is
    kept for the way back.

    Args:
        terms: k, or "exact".
    """
    g: Tensor = _Rotation.apply(q, terms)  # type: ignore[no-untyped-call]
    return g


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, terms: Terms) -> Tensor:
        ctx.terms = terms
        with torch.autocast(q.device.type, enabled=False):
            g = cayley(skew(q)) if isinstance(terms, str) else cayley_neumann(skew(q), terms)
        ctx.save_for_backward(g if isinstance(terms, str) else q)
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        with torch.autocast(dg.device.type, enabled=False):
            exact = isinstance(ctx.terms, str)
            dq = cayley_backward(kept, dg) if exact else cayley_neumann_backward(skew(kept), dg, ctx.terms)
        return above(dq), None


def orthogonality_error(r: Float[Tensor, "*n d d"]) -> Float[Tensor, "*n"]:
    """e_orth = ‖R Rᵀ − I‖_F / ‖I‖_F."""
    eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    error: Tensor = torch.linalg.matrix_norm(r @ r.mT - eye) / r.shape[-1] ** 0.5
    return error


def norm_bound(q: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """‖Q‖_F / √2 = ‖q‖₂, which ‖Q‖₂ can't exceed: the eigenvalues of Q come in pairs ±it."""
    bound: Tensor = torch.linalg.vector_norm(q, dim=-1)
    return bound
