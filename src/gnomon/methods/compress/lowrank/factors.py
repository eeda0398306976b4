"""Two thin factors for one matrix, by three criteria: the weights', scaled weights' or the outputs' error.

Factors are A = U Σ^½ and B = Σ^½ Vᵀ (times the inverse of the scaling), so that both have the same size.
Computed in float32 or better (SVD-LLM: float64) and returned so; whoever stores them chooses a dtype.

Shapes: W is m × n (outputs × inputs), rank k ≤ min(m, n), A m × k, B k × n; N calibration tokens, X n × N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError


@dataclass(frozen=True)
class Factored:
    """All of a matrix' directions, best first, from which every rank can be cut."""

    left: Float[Tensor, "m q"]
    """U Σ^½; q = min(m, n)."""
    right: Float[Tensor, "q n"]
    """Σ^½ Vᵀ D⁻¹, with D the scaling of the inputs."""
    sigma: Float[Tensor, " q"]
    """Singular values of W D."""

    def cut(self, k: int) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]:
        """(A, B) of rank k."""
        if not 1 <= k <= len(self.sigma):
            raise UsageError(
                f"rank k={k} must lie in [1, {len(self.sigma)}], the smaller side of a "
                f"{self.left.shape[0]} x {self.right.shape[1]} matrix."
            )
        return self.left[:, :k].contiguous(), self.right[:k].contiguous()


def svd_factors(w: Float[Tensor, "m n"], k: int) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]:
    """The rank-k matrix nearest to W in the Frobenius norm (Eckart and Young)."""
    return factor_svd(w).cut(k)


def factor_svd(w: Float[Tensor, "m n"]) -> Factored:
    """Plain SVD, uncut."""
    u, sigma, vt = _svd(_checked(w))
    root = sigma.sqrt()
    return Factored(u * root, root[:, None] * vt, sigma)


def asvd_scale(magnitude: Float[Tensor, " n"], alpha: float = 0.5, eps: float = 1e-6) -> Float[Tensor, " n"]:
    """The diagonal of D = diag(magnitude^α + ε), from mean |x_j| (the default of ASVD) or max |x_j| of each input."""
    if not bool((magnitude >= 0).all()) or not bool(torch.isfinite(magnitude).all()):
        raise NumericalFailure("Magnitudes of inputs must be finite and at least 0; was the calibration NaN?")
    if not 0 <= alpha < float("inf") or not eps > 0:
        raise UsageError(f"alpha={alpha} must be at least 0 and eps={eps} positive.")
    return magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)) ** alpha + eps


def asvd_factors(
    w: Float[Tensor, "m n"], k: int, scale: Float[Tensor, " n"]
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]:
    """The rank-k matrix nearest to W when column j counts `scale[j]`: truncated SVD of W D, then B = Σ^½ Vᵀ D⁻¹."""
    return factor_asvd(w, scale).cut(k)


def factor_asvd(w: Float[Tensor, "m n"], scale: Float[Tensor, " n"]) -> Factored:
    """ASVD, uncut."""
    w, scale = _checked(w), scale.to(w.device)
    if not bool((scale > 0).all()) or not bool(torch.isfinite(scale).all()):
        raise NumericalFailure("The scale of every input must be positive and finite; see `asvd_scale`.")
    w = w.to(torch.promote_types(w.dtype, scale.dtype))
    u, sigma, vt = _svd(w * scale)
    root = sigma.sqrt()
    return Factored(u * root, root[:, None] * vt / scale, sigma)


def svd_llm_factors(
    w: Float[Tensor, "m n"], k: int, gram: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]:
    r"""The rank-k matrix whose outputs on the calibration tokens are nearest to W's.

    .. math:: \min_{W_k} \lVert W X - W_k X \rVert_F^2 = \sum_{i>k} \sigma_i(W S)^2, \quad S S^T = H = X X^T

    Args:
        gram: H = Σ_t x_t x_tᵀ. All zero (no token reached the layer): as the plain SVD.
    """
    return factor_svd_llm(w, gram).cut(k)


def factor_svd_llm(w: Float[Tensor, "m n"], gram: Float[Tensor, "n n"]) -> Factored:
    """SVD-LLM (whitening), uncut; float64.

    B = Σ^½ Vᵀ S⁻¹ is taken as Σ^{-½} Uᵀ W, which is the same (W S = U Σ Vᵀ) and inverts no near-singular S. Directions
    without any output (σ_i = 0) get weight 1 on both sides instead of 0/0; they keep what W does off the tokens.
    """
    w = _checked(w).double()
    u, sigma, _ = _svd(w @ whitening(gram.to(w.device)))
    used = sigma > sigma[:1] * (max(w.shape) * torch.finfo(sigma.dtype).eps)
    root = torch.where(used, sigma, torch.ones_like(sigma)).sqrt()
    return Factored(u * root, (u.T @ w) / root[:, None], sigma)


def whitening(gram: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Lower triangular S with S Sᵀ = H in float64; H is shifted by (1e-6 − λ_min) I where it isn't positive definite.

    Rounding can leave even the shifted matrix indefinite when H is large; the shift then grows tenfold at a time.

    Raises:
        NumericalFailure: H isn't finite.
    """
    gram = gram.double()
    if not bool(torch.isfinite(gram).all()):
        raise NumericalFailure(
            "The Gram matrix of a layer's inputs holds NaN or infinity, so it can't be whitened. Look for huge "
            "activations or NaN weights."
        )
    gram = (gram + gram.T) / 2
    s: Tensor
    s, failed = torch.linalg.cholesky_ex(gram)
    if not int(failed):
        return s
    shift = 1e-6 - min(0.0, float(torch.linalg.eigvalsh(gram)[0]))
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    while True:  # ends: a shift above n times the largest entry makes any symmetric matrix positive definite
        s, failed = torch.linalg.cholesky_ex(gram + shift * eye)
        if not int(failed):
            return s
        shift *= 10


def rank_for(keep: float, m: int, n: int) -> int:
    """k = max(1, ⌊κ m n / (m + n)⌋): k (m + n) numbers are at most the share κ of m n, rank 1 excepted."""
    require_keep(keep)
    if m < 1 or n < 1:
        raise UsageError(f"A {m} x {n} matrix has no rank.")
    return max(1, int(keep * (m * n) / (m + n) + 1e-9))  # κ = .3 times 10 is 3, though not in binary


def require_keep(keep: float) -> None:
    """Refuse a share of numbers to keep that isn't in (0, 1]."""
    if not 0 < keep <= 1:
        raise UsageError(
            f"keep={keep} is the share of the numbers that stays and must lie in (0, 1]; 1 leaves the model as it is."
        )


def _checked(w: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    if not w.numel():
        raise UsageError(f"A {w.shape[0]} x {w.shape[1]} matrix has nothing to factor.")
    if not bool(torch.isfinite(w).all()):
        raise NumericalFailure(
            f"A {w.shape[0]} x {w.shape[1]} weight holds NaN or infinity, so it has no singular values. Was it "
            "trained with too high a learning rate?"
        )
    return w.detach().to(torch.promote_types(w.dtype, torch.float32))


def _svd(
    w: Float[Tensor, "m n"],
) -> tuple[Float[Tensor, "m q"], Float[Tensor, " q"], Float[Tensor, "q n"]]:
    u, sigma, vt = torch.linalg.svd(w, full_matrices=False)
    return u, sigma, vt
