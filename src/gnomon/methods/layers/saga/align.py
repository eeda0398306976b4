"""Merging key heads: by the alignment that commutes with rotary positions, by their mean, or by taking the first.

Dimensions f and f + d/2 of a key head are one complex number z_{g,f} = k_{g,f} + i k_{g,f+d/2}; a rotary position
multiplies it by a phase, and a score is Re Σ_f conj(q_f) z_f e^{iθ}. Over the r heads to be merged

    S_f = E[z_f z_fᴴ]   (r x r),   u_f its top eigenvector,   z'_f = Σ_g conj(u_{g,f}) z_{g,f},   z_{g,f} ≈ u_{g,f} z'_f

so the shared key row is the mix z', and u goes into the queries: q'_{i,f} = conj(u_{g(i),f}) q_{i,f}. Both are real
2 x 2 rotation-scalings of rows of W_K and W_Q (and their biases), which commute with the position's rotation. It is
the best approximation of rank 1; the mean is the special case of constant u.

Here:  the algebra on weights, and S from weights and E[x xᵀ].
Not here: S from a model's own keys, whole models (`convert`).
Inferred: all of it.       Limits: half-split pairs (f, f + d/2), the whole head rotated, no norm after the projections.

Shapes: H_k old key heads, K new ones, r = H_k / K, F = d/2 pairs, D inputs; rows of weights are outputs.
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

__all__ = ["align", "fold_queries", "merge_keys", "moments", "pairs", "retained", "unpaired"]


def pairs(rows: Float[Tensor, "out ..."], width: int) -> Complex[Tensor, "heads F ..."]:
    """Rows of a projection (or a bias) as complex rows per head and frequency."""
    halves = torch.unflatten(rows.double(), 0, (-1, 2, width // 2))
    return torch.complex(halves[:, 0].contiguous(), halves[:, 1].contiguous())


def unpaired(z: Complex[Tensor, "heads F ..."]) -> Float[Tensor, "out ..."]:
    """The real rows of complex ones."""
    return torch.stack([z.real, z.imag], 1).flatten(0, 2)


def moments(
    z: Complex[Tensor, "heads F D"], groups: int, cov: Float[Tensor, "D D"] | None = None
) -> Complex[Tensor, "K F r r"]:
    """S_f = Z_f C Z_fᴴ of each group of heads.

    Args:
        cov: C = E[x xᵀ]; None is the identity.
    """
    z = torch.unflatten(z, 0, (groups, -1)).transpose(1, 2)  # (K, F, r, D)
    left = z if cov is None else z @ cov.to(z.dtype)
    return left @ z.mH


def align(s: Complex[Tensor, "K F r r"]) -> Complex[Tensor, "K F r"]:
    """u: the top eigenvector of each S, its largest component real and positive; of S = 0 the first head."""
    u = torch.linalg.eigh(s).eigenvectors[..., -1]
    largest = u.gather(-1, u.abs().argmax(-1, keepdim=True))
    u = u * (largest.abs() / largest)
    zero = s.diagonal(dim1=-2, dim2=-1).real.sum(-1, keepdim=True) <= 0
    first = torch.nn.functional.one_hot(torch.zeros((), dtype=torch.long), u.shape[-1]).to(u)
    return torch.where(zero, first, u)


def retained(s: Complex[Tensor, "K F r r"]) -> Float[Tensor, "K F"]:
    """Share of the keys' energy that the shared head keeps: λ_max / tr S, 1 where there is none."""
    total = s.diagonal(dim1=-2, dim2=-1).real.sum(-1)
    top = torch.linalg.eigvalsh(s)[..., -1]
    return torch.where(
        total > 0, top / total.clamp(min=torch.finfo(total.dtype).tiny), torch.ones_like(total)
    )


def merge_keys(
    rows: Float[Tensor, "out ..."], u: Complex[Tensor, "K F r"], width: int
) -> Float[Tensor, "kept ..."]:
    """W'_K (or its bias): z'_f = Σ_g conj(u_{g,f}) z_{g,f}."""
    z = torch.unflatten(pairs(rows, width), 0, (u.shape[0], u.shape[2])).transpose(1, 2)  # (K, F, r, *D)
    mixed = (u.conj().reshape(*u.shape, *[1] * (z.ndim - 3)) * z).sum(2)
    return unpaired(mixed).to(rows.dtype)


def fold_queries(
    rows: Float[Tensor, "out ..."], u: Complex[Tensor, "K F r"], width: int
) -> Float[Tensor, "out ..."]:
    """W'_Q (or its bias): q'_{i,f} = conj(u_{g(i),f}) q_{i,f}."""
    z = pairs(rows, width)
    heads = u.shape[0] * u.shape[2]
    own = u.transpose(1, 2).flatten(0, 1).repeat_interleave(z.shape[0] // heads, 0)  # (Hq, F)
    return unpaired(own.conj().reshape(*own.shape, *[1] * (z.ndim - 2)) * z).to(rows.dtype)


def mean_keys(rows: Float[Tensor, "out ..."], groups: int, width: int) -> Float[Tensor, "kept ..."]:
    """The mean of the heads of each group, as GQA is made from multi-head attention."""
    heads = torch.unflatten(rows, 0, (groups, -1, width))
    return heads.double().mean(1).flatten(0, 1).to(rows.dtype)


def first_keys(rows: Float[Tensor, "out ..."], groups: int, width: int) -> Float[Tensor, "kept ..."]:
    """The first head of each group."""
    return torch.unflatten(rows, 0, (groups, -1, width))[:, 0].flatten(0, 1).clone()
