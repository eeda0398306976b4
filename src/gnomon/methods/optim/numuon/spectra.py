"""How low the rank of trained matrices is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure

from .sharded import whole
from .split import split_muon_params


@dataclass(frozen=True)
class Spectrum:
    """What the singular values σ of one matrix say; all zero for a matrix of zeros."""

    shape: tuple[int, int]
    stable_rank: float
    """‖W‖_F² / ‖W‖₂²; at most the rank."""
    effective_rank: float
    """exp(−Σ p log p) with p = σ² / Σ σ²."""
    rank_95: int
    """The fewest singular values with 95 % of Σ σ²."""


def spectrum(w: Float[Tensor, "m n"]) -> Spectrum:
    """Of one matrix, in float32 or better.

    Raises:
        NumericalFailure: W isn't finite.
    """
    w = w.detach().to(torch.promote_types(w.dtype, torch.float32))
    if not bool(torch.isfinite(w).all()):
        raise NumericalFailure(
            f"A {w.shape[0]} x {w.shape[1]} matrix holds NaN or infinity, so it has no singular values. Was it "
            "trained with too high a learning rate?"
        )
    rows, columns = w.shape
    sigma = torch.linalg.svdvals(w).double()
    if not sigma.numel() or float(sigma[0]) == 0:
        return Spectrum((rows, columns), 0.0, 0.0, 0)
    energy = (sigma / sigma[0]) ** 2  # relative to the first, so that squares don't underflow
    p = energy / energy.sum()
    reached = p.cumsum(0) >= 0.95 - 1e-12
    return Spectrum(
        shape=(rows, columns),
        stable_rank=float(energy.sum()),
        effective_rank=float(torch.special.entr(p).sum().exp()),
        rank_95=int(reached.to(torch.uint8).argmax()) + 1,
    )


def spectral_report(model: nn.Module) -> dict[str, Spectrum]:
    """Name of each hidden matrix (:func:`split_muon_params`, trainable or not) -> its spectrum."""
    hidden, _ = split_muon_params(model, frozen=True)
    return {name: spectrum(whole(p).flatten(1)) for name, p in hidden}
