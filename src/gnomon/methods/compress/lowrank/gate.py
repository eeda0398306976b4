"""Dobi-SVD's soft truncation of activations: a gate with a real position, and a backward pass that stays finite.

Shapes: Y is N × p (tokens × outputs), q = min(N, p); T is the gate, one number per direction.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

TAYLOR_TERMS = 10
"""Terms of q/(1 − q) = q + q² + ... that stand in for it where two singular values are nearly equal, q ≈ 1."""
NEAR = 1e-3
"""Relative gap below which two singular values count as nearly equal."""


def gate(gamma: Float[Tensor, ""], q: int, beta: float = 10.0) -> Float[Tensor, " q"]:
    """T_i = ½ tanh(β(γ − i)) + ½ for the q directions, largest first.

    The positions i are ½, 1½, ... (inferred), so that the gate's sum is about γ and γ reads as a rank. β → ∞ with a
    whole γ keeps exactly the first γ directions.
    """
    i = torch.arange(q, device=gamma.device, dtype=gamma.dtype) + 0.5
    return (torch.tanh(beta * (gamma - i)) + 1) / 2


def truncate(y: Float[Tensor, "N p"], t: Float[Tensor, " q"]) -> Float[Tensor, "N p"]:
    """U diag(T σ) Vᵀ of Y = U diag(σ) Vᵀ, differentiable in Y and T."""
    result: Tensor = _Truncate.apply(y, t)  # type: ignore[no-untyped-call]
    return result


def right_vectors(y: Float[Tensor, "N p"]) -> tuple[Float[Tensor, " q"], Float[Tensor, "p q"]]:
    """(σ, V) of Y in float64, largest first; by way of YᵀY where that is the smaller matrix."""
    y = y.double()
    if len(y) >= y.shape[1]:
        values, vectors = torch.linalg.eigh(y.T @ y)
        return values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    _, sigma, vt = torch.linalg.svd(y, full_matrices=False)
    return sigma, vt.T


class _Truncate(torch.autograd.Function):
    r"""The differential of U diag(f) Vᵀ, f = T σ, in the singular basis, C = Uᵀ dY V:

    dỸ = U K Vᵀ + (I − U Uᵀ) dY V diag(T) Vᵀ + U diag(T) Uᵀ dY (I − V Vᵀ), with K_ii = T_i C_ii and, for i ≠ j,
    K_ij = (f_i − f_j)/(σ_i − σ_j) · (C_ij + C_ji)/2 + (f_i + f_j)/(σ_i + σ_j) · (C_ij − C_ji)/2.

    It is its own adjoint, so the backward pass is the same map. Only σ_j (T_i − T_j)/(σ_i − σ_j), a part of the
    first quotient, can blow up: with r = σ_j/σ_i < 1 it is (T_i − T_j) r/(1 − r), whose series is cut off near r = 1.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, t: Tensor) -> Tensor:
        sigma, v = right_vectors(y.detach())
        ctx.save_for_backward(y, t, sigma, v)
        wide = y.double()
        return (((wide @ v) * t.double()) @ v.T).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, t, sigma, v = ctx.saved_tensors
        t64, g = t.double(), grads[0].double()
        real = sigma > 1e-6 * sigma[:1]  # below, U = Y V/σ would be rounding noise; σ = 0 has no U
        u = (y.double() @ v) * torch.where(real, sigma.reciprocal(), torch.zeros_like(sigma))
        c = u.T @ g @ v
        grad_t = (c.diagonal() * sigma).to(t.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_t
        k = _quotients(sigma, t64, c)
        gv, ug = g @ v, u.T @ g
        grad_y = u @ (k @ v.T) + ((gv - u @ c) * t64) @ v.T
        if v.shape[0] > v.shape[1]:
            grad_y += (u * t64) @ (ug - c @ v.T)
        return grad_y.to(y.dtype), grad_t


def _quotients(sigma: Tensor, t: Tensor, c: Tensor) -> Tensor:
    """K of :class:`_Truncate`."""
    large = torch.maximum(sigma[:, None], sigma[None])
    ratio = torch.minimum(sigma[:, None], sigma[None]) / large.clamp(min=torch.finfo(sigma.dtype).tiny)
    near = 1 - ratio < NEAR
    exact = ratio / (1 - torch.where(near, torch.zeros_like(ratio), ratio))
    series = sum((ratio**n for n in range(1, TAYLOR_TERMS + 1)), torch.zeros_like(ratio))
    # with i the larger of the two: (f_i - f_j)/(σ_i - σ_j) = T_i + (T_i - T_j) r/(1 - r)
    first = torch.arange(len(sigma), device=sigma.device)[:, None] < torch.arange(
        len(sigma), device=sigma.device
    )
    t_large = torch.where(first, t[:, None], t[None])
    t_small = torch.where(first, t[None], t[:, None])
    minus = t_large + (t_large - t_small) * torch.where(near, series, exact)
    plus = (t_large + t_small * ratio) / (1 + ratio)
    return minus * (c + c.T) / 2 + plus * (c - c.T) / 2
