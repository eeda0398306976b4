"""What training did to spectra and directions of neurons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import is_conv1d, linears

from .cayley import orthogonality_error
from .layer import POETLinear

Spectra = Mapping[str, Tensor]
"""Name of a layer -> its singular values, largest first, in float64 on the CPU."""


def singular_values(w: Float[Tensor, "o i"]) -> Float[Tensor, " q"]:
    """σ of one matrix, in float64 on the CPU.

    Raises:
        NumericalFailure: W isn't finite.
    """
    w = w.detach().to(torch.promote_types(w.dtype, torch.float32))
    if not bool(torch.isfinite(w).all()):
        raise NumericalFailure(
            f"A {w.shape[0]} x {w.shape[1]} weight holds NaN or infinity, so it has no singular values. Was it trained "
            "with too high a learning rate?"
        )
    found: Tensor = torch.linalg.svdvals(w)
    return found.double().cpu()


def spectrum_drift(sigma: Float[Tensor, " q"], start: Float[Tensor, " q"]) -> float:
    """max |σ_i − σ_i⁰| / σ_1⁰."""
    return float((sigma - start).abs().max() / start[0])


def svd_entropy(sigma: Float[Tensor, " q"]) -> float:
    """−(1 / log q) Σ p log p with p = σ² / Σ σ²: 1 for equal singular values, 0 for a single one."""
    if len(sigma) == 1:
        return 1.0
    energy = (sigma / sigma[0].clamp(min=torch.finfo(sigma.dtype).tiny)) ** 2
    return float(torch.special.entr(energy / energy.sum()).sum()) / math.log(len(sigma))


def hyperspherical_energy(w: Float[Tensor, "o i"]) -> float:
    """Σ_{i≠j} ‖ŵ_i − ŵ_j‖⁻¹ over ordered pairs of rows on the unit sphere; infinite if two of them coincide."""
    unit = w.detach().double()
    unit = unit / unit.norm(dim=1, keepdim=True)
    distances = torch.nn.functional.pdist(unit)  # exact for near rows, unlike the form by products
    return 2 * float((1 / distances).sum())


@dataclass(frozen=True)
class LayerReport:
    """One matrix."""

    shape: tuple[int, int]
    drift: float | None
    """max |σ_i − σ_i⁰| / σ_1⁰ since `before`; None without it."""
    entropy: float
    """SVD entropy, in [0, 1]."""
    sigma_max: float
    energy: float | None
    """Hyperspherical energy; None unless asked for."""
    orthogonality: float | None
    """The larger e_orth of the two live rotations, block by block the worst; None of a plain layer."""


def record_spectra(model: nn.Module) -> dict[str, Tensor]:
    """Singular values of each linear layer inside the decoder (or of each POET layer in a model without one).

    Plain and wrapped layers have the same names, so a run can be compared with its start and with a rival's.
    """
    return {name: singular_values(w) for name, w in _matrices(model).items()}


def spectrum_report(
    model: nn.Module, before: Spectra | None = None, *, energy: bool = False
) -> dict[str, LayerReport]:
    """Name of each layer -> what became of it. A layer's drift says how far POET's promise holds: always look at it.

    Args:
        before: what :func:`record_spectra` gave after apply_poet.
        energy: also compute the hyperspherical energy, quadratic in the rows.

    Raises:
        UsageError: `before` lacks a layer, or is of other shapes.
        NumericalFailure: a weight that isn't finite.
    """
    found = {}
    modules = dict(model.named_modules())
    for name, w in _matrices(model).items():
        sigma = singular_values(w)
        start = None
        if before is not None:
            start = before.get(name)
            if start is None or start.shape != sigma.shape:
                raise UsageError(
                    f"The spectra of before {'lack' if start is None else 'have another shape for'} {name}. They are "
                    f"of another model: {len(before)} layers, such as {next(iter(before), 'none')}."
                )
        layer = modules[name]
        found[name] = LayerReport(
            shape=(w.shape[0], w.shape[1]),
            drift=None if start is None else spectrum_drift(sigma, start.to(sigma)),
            entropy=svd_entropy(sigma),
            sigma_max=float(sigma[0]),
            energy=hyperspherical_energy(w) if energy else None,
            orthogonality=_orthogonality(layer) if isinstance(layer, POETLinear) else None,
        )
    return found


@torch.no_grad()
def _orthogonality(layer: POETLinear) -> float:
    return max(float(orthogonality_error(g).max()) for g in layer.rotations())


@torch.no_grad()
def _matrices(model: nn.Module) -> dict[str, Tensor]:
    names = {id(module): name for name, module in model.named_modules()}
    wrapped = {id(m): m for m in model.modules() if isinstance(m, POETLinear)}
    try:
        plain = list(linears(model).values())
    except UsageError:
        if not wrapped:
            raise
        plain = []
    modules = wrapped | {id(m): m for m in plain}
    return {
        name: _weight(modules[key]) for key, name in names.items() if key in modules
    }  # in the model's order


def _weight(module: nn.Module) -> Tensor:
    if isinstance(module, POETLinear):
        return module.merged()
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.T if is_conv1d(module) else weight
