"""The update direction: the best point of a ball of limited spectral and nuclear norm, and its top-k form.

Shapes: M is m × n (rows = outputs), q = min(m, n), singular values σ_1 ≥ σ_2 ≥ … .
All arithmetic is in float32, or in float64 for float64 input; bfloat16 and float16 are converted first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError, unknown

BACK_ENDS = ("krylov", "svd", "lowrank", "gram")
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that Muon iterates."""
NS_STEPS = 5


class Factors(NamedTuple):
    """The leading singular triples that stand out from rounding; fewer than asked for if the rank is lower."""

    u: Float[Tensor, "m k"]
    sigma: Float[Tensor, " k"]
    v: Float[Tensor, "n k"]

    @property
    def direction(self) -> Float[Tensor, "m n"]:
        """U_k V_kᵀ, whose non-zero singular values are all 1."""
        return self.u @ self.v.T


def lmo_spectral_nuclear(m: Float[Tensor, "m n"], rho: float, tau: float) -> Float[Tensor, "m n"]:
    r"""The minimiser of ⟨M, Δ⟩ over {‖Δ‖₂ ≤ ρ} ∩ {‖Δ‖_* ≤ τ} (Props 3.1 and 3.2).

    .. math:: Δ = -\sum_i d_i u_i v_i^T, \quad d_i = \min(ρ, \max(0, τ - (i - 1) ρ))

    a fractional knapsack: full weight ρ on the first ⌊τ/ρ⌋ directions, what is left on the next. Its value is
    −Σ d_i σ_i. Directions with σ_i = 0 (to rounding) get none.

    Raises:
        UsageError: ρ or τ isn't positive and finite.
        NumericalFailure: M isn't finite.
    """
    for name, value in (("rho", rho), ("tau", tau)):
        if not 0 < value < math.inf:
            raise UsageError(
                f"{name}={value} must be positive and finite: it bounds the update's "
                f"{'spectral' if name == 'rho' else 'nuclear'} norm. An update of zero needs no oracle."
            )
    f = top_k(m, min(m.shape), method="svd")
    spent = rho * torch.arange(len(f.sigma), dtype=f.sigma.dtype, device=f.sigma.device)
    d = (tau - spent).clamp(0, rho)
    return -((f.u * d) @ f.v.T).to(m.dtype)


def top_k(
    m: Float[Tensor, "m n"],
    k: int,
    *,
    method: str = "krylov",
    iters: int = 2,
    oversample: int = 8,
    start: Float[Tensor, "q c"] | None = None,
    generator: torch.Generator | None = None,
) -> Factors:
    """The k leading singular triples of M, by one of `BACK_ENDS`.

    - `svd`: exact.
    - `gram`: from the eigenvectors of the smaller Gram matrix. U_k V_kᵀ has exactly k unit singular values and
      ⟨M, U_k V_kᵀ⟩ is the best to 1e-5; falls back to `svd` where squaring loses more.
    - `krylov`: randomised block Krylov (Algorithm 3); exact where its basis would span everything.
    - `lowrank`: randomised subspace iteration, what `torch.svd_lowrank` does. That one draws from the global
      generator, so the replicas of data parallelism would drift apart; this one doesn't.

    Args:
        k: 1 … q.
        iters: of the two randomised ones, L.
        oversample: p; they work with blocks of min(q, k + p) columns.
        start: columns that a randomised one begins with, on the smaller side of M; Gaussian columns fill up.
        generator: of those; must be given unless the method is exact.

    Returns:
        factors of M's device, in float32 or float64; singular values under about 4 ε √max(m, n) σ_1 are left
        out, because directions that rounding made deserve no unit step.

    Raises:
        UsageError: unknown method, or k out of range.
        NumericalFailure: M isn't finite.
    """
    if method not in BACK_ENDS:
        raise unknown("way to the top singular vectors", method, BACK_ENDS)
    if not 1 <= k <= min(m.shape):
        raise UsageError(f"k={k} must lie in [1, {min(m.shape)}], the smaller side of {tuple(m.shape)}.")
    a = m.to(torch.promote_types(m.dtype, torch.float32))
    peak = float(a.abs().amax())
    if not math.isfinite(peak):
        raise NumericalFailure(
            f"A {m.shape[0]} x {m.shape[1]} matrix holds {peak}, so it has no singular vectors. Lower the learning "
            "rate or clip gradients."
        )
    if peak == 0:
        return Factors(a.new_zeros(m.shape[0], 0), a.new_zeros(0), a.new_zeros(m.shape[1], 0))
    wide = m.shape[0] < m.shape[1]
    a = (a.T if wide else a) / peak  # products of three factors would over- or underflow otherwise
    width = min(a.shape[1], k + oversample)
    exact = width >= a.shape[1] or (method == "krylov" and width * iters >= a.shape[1])
    if method == "svd":
        u, s, v = _by_svd(a, k)
    elif method == "gram" or exact:
        u, s, v = _by_gram(a, k)
    else:
        if generator is None:
            raise UsageError(f"{method} draws a random block: give a generator, or use method='svd'.")
        begin = _block(a, width, start, generator)
        u, s, v = _krylov(a, k, begin, iters) if method == "krylov" else _subspace(a, k, begin, iters)
    standing = int((s > 4 * torch.finfo(a.dtype).eps * math.sqrt(a.shape[0]) * s[0]).sum())
    u, s, v = u[:, :standing], s[:standing] * peak, v[:, :standing]
    return Factors(v, s, u) if wide else Factors(u, s, v)


def newton_schulz(
    m: Float[Tensor, "m n"],
    *,
    steps: int = NS_STEPS,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "m n"]:
    r"""Muon's approximation of the polar factor UVᵀ: singular values land in about [0.68, 1.13], not at 1.

    .. math:: X \leftarrow aX + (bA + cA^2)X, \quad A = XX^T, \quad X_0 = M / \lVert M \rVert_F

    In bfloat16 bit for bit what `torch.optim.Muon` computes, but M isn't touched: there, with bfloat16
    parameters and nesterov=False, the division happens in the momentum buffer itself.
    """
    a, b, c = coefficients
    x = m.to(dtype, copy=True)
    tall = m.shape[0] > m.shape[1]
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


# ------------------------------------------------------------- back ends: all take an m × n matrix with m ≥ n


def _by_svd(a: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return u[:, :k], s[:k], vh[:k].T


def _by_gram(a: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """V_k from AᵀA; U_k = A V_k Σ_k⁻¹, made orthonormal by Newton-Schulz steps X ← X(3I − XᵀX)/2.

    Squaring costs the small ones: the columns of A V_k Σ_k⁻¹ are orthonormal to E ~ ε(σ_1/σ_k)² only. A step takes
    ‖E‖ to ¾‖E‖², and the result is the polar factor of A V_k whichever basis of its span V_k is. The span itself
    leans towards σ_{k+1} by about E, which ⟨M, Δ⟩ feels in second order. Beyond ‖E‖ = .1 the SVD is taken.
    """
    v = torch.linalg.eigh(a.T @ a).eigenvectors[:, -k:].flip(1)  # (n, k) eigenvalues came in ascending order
    w = a @ v  # (m, k)
    s = w.norm(dim=0)
    root = math.sqrt(torch.finfo(a.dtype).eps)
    if not float(s.min()) > root * float(s.max()):
        return _by_svd(a, k)
    u, identity = w / s, torch.eye(k, dtype=a.dtype, device=a.device)
    while True:
        e = identity - u.T @ u
        distance = float(e.norm())
        if not distance < 0.1:
            return _by_svd(a, k)
        u = u + u @ (e / 2)
        if distance < root:
            return u, s, v


def _block(a: Tensor, width: int, start: Tensor | None, generator: torch.Generator) -> Tensor:
    """`width` columns to begin with: those of `start`, then Gaussian ones."""
    n = a.shape[1]
    known = a.new_empty(n, 0) if start is None else start[:, :width].to(a)
    size = (n, width - known.shape[1])
    return torch.cat([known, torch.randn(size, generator=generator, dtype=a.dtype, device=a.device)], dim=1)


def _krylov(a: Tensor, k: int, b: Tensor, iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 3: the best factors within the span of (AᵀA)B, …, (AᵀA)^L B."""
    b = torch.linalg.qr(b).Q  # (n, width)
    blocks = []
    for _ in range(iters):
        b = torch.linalg.qr(a.T @ (a @ b)).Q
        blocks.append(b)
    basis = torch.linalg.qr(torch.cat(blocks, dim=1)).Q  # (n, width · L)
    u, s, v = _by_gram(a @ basis, k)
    return u, s, basis @ v


def _subspace(a: Tensor, k: int, b: Tensor, iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Halko, Martinsson and Tropp, arXiv:0909.4061, Algorithms 4.4 and 5.1."""
    basis = torch.linalg.qr(a @ b).Q  # (m, width)
    for _ in range(iters):
        basis = torch.linalg.qr(a @ torch.linalg.qr(a.T @ basis).Q).Q
    v, s, u = _by_gram(a.T @ basis, k)
    return basis @ u, s, v
