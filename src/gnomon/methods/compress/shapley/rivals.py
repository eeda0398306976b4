r"""Scores that Model Shapley is compared with: random, gradient, gradient trace, Wanda-style; and the released code.

Paper: "MODEL SHAPLEY", NeurIPS 2025, baselines and repository.
Here:  every score as :class:`ShapleyScores`, so that selection and deletion are the same for all.
Inferred: Wanda's |W_ij| ‖x_j‖ is made for single weights; a unit gets their sum.
Differs from the paper: means over sequences instead of sums over batches, which changes no order of the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import is_conv1d, unwrap

from ..calibration import Calib, require_calib, state_kept
from .attribution import ModelShapley
from .curvature import pooled
from .layout import Group, Layout, layout_of, matrix
from .loss import moved, sequence_nll
from .scores import ShapleyScores

Units = str | Callable[[nn.Module], Sequence[Group]]


def random_scores(model: nn.Module, *, units: Units, generator: torch.Generator) -> ShapleyScores:
    """Uniform scores in [0, 1)."""
    layout = layout_of(model, units)
    return _wrapped(
        {n: torch.rand(layout.shape(n), generator=generator, dtype=torch.float64) for n in layout.sizes},
        layout,
        0,
    )


def gradient_scores(model: nn.Module, loader: Iterable[Any], *, units: Units) -> ShapleyScores:
    """|Σ_{i∈u} g_i| of the mean loss's gradient."""
    layout = layout_of(model, units)
    root = unwrap(model)
    total: dict[str, Tensor] = {}
    n = 0
    with state_kept(root):
        weights = {name: module.weight for name, module in layout.modules.items()}
        for weight in weights.values():
            weight.requires_grad_(True)
        for batch in loader:
            losses, tokens = sequence_nll(root, moved(batch, next(root.parameters()).device))
            grads = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)  # type: ignore[arg-type]
            for name, g in zip(weights, grads, strict=True):
                if g is not None:
                    total[name] = total.get(name, torch.zeros_like(g)) + g
            n += int((tokens > 0).sum())
    if not n:
        raise UsageError("The probe set is empty: no batch came, or none with a loss.")
    found = {name: (g.T if is_conv1d(layout.modules[name]) else g) / n for name, g in total.items()}
    return _wrapped({k: v.abs() for k, v in unit_sums(found, layout).items()}, layout, n)


def trace_scores(model: nn.Module, loader: Iterable[Any], *, units: Units) -> ShapleyScores:
    """|Σ_{i∈u} g_i θ_i|, the gradient trace: the absolute first-order part."""
    found = ModelShapley(model, units, curvature="none").fit(loader).scores()
    assert found.layout is not None
    return _wrapped({name: first.abs() for name, first in found.first.items()}, found.layout, found.n)


def wanda_scores(model: nn.Module, calib: Calib, *, units: Units) -> ShapleyScores:
    """Σ_{ij∈u} |W_ij| ‖x_j‖₂ over the probe tokens."""
    layout = layout_of(model, units)
    batches = require_calib(calib, model, "Wanda's score")
    norms = input_norms(model, layout, calib)
    found = {
        name: matrix(module).detach().abs() * norms[name].to(matrix(module))
        for name, module in layout.modules.items()
    }
    return _wrapped(unit_sums(found, layout), layout, sum(len(b.input_ids) for b in batches))


def released_scores(
    model: nn.Module, loader: Iterable[Any], *, path: Literal["finetune", "deactivate"], units: Units = "row"
) -> ShapleyScores:
    """The repository's score +gθ + ½·coop with one mean-gradient Gram matrix a batch.

    Args:
        path: "finetune" as its training code; "deactivate" as its cached path, which multiplies coop by 0.0, so that
            the score is the gradient trace's. Both are ranked by absolute value there.
    """
    if path not in ("finetune", "deactivate"):
        raise unknown("path:", path, ("finetune", "deactivate"))
    found = ModelShapley(model, units, curvature="gram", curvature_sign="paper").fit(loader).scores()
    times = 1.0 if path == "finetune" else 0.0
    first = {name: -value for name, value in found.first.items()}
    second = {name: -times * value for name, value in found.second.items()}
    phi = {name: first[name] + second[name] for name in first}
    return ShapleyScores(phi, first, second, found.n, found.layout)


def input_norms(model: nn.Module, layout: Layout, calib: Calib) -> dict[str, Float[Tensor, " n"]]:
    """‖x_j‖₂ of every input of every scored map, over the real tokens."""
    squares: dict[str, Tensor] = {}
    batches = require_calib(calib, model, "Input norms")

    def hook(name: str) -> Any:
        def add(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1]).double()
            if real is not None:
                x = x[real]
            squares[name] = squares.get(name, torch.zeros_like(x[0])) + x.square().sum(0)

        return add

    root = unwrap(model)
    at = next(root.parameters()).device
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in layout.modules.items()]
    try:
        with state_kept(root), torch.no_grad():
            for batch in batches:
                one = batch.to(at)
                real = None if one.mask is None else one.real.flatten()
                sequence_nll(root, {"input_ids": one.input_ids} | _mask(one.mask))
    finally:
        for handle in handles:
            handle.remove()
    return {name: total.sqrt() for name, total in squares.items()}


def _mask(mask: Tensor | None) -> dict[str, Tensor]:
    return {} if mask is None else {"attention_mask": mask}


def unit_sums(
    values: Mapping[str, Float[Tensor, "m n"]], layout: Layout
) -> dict[str, Float[Tensor, " units"]]:
    """Sums of the maps' entries (out × in) over the units; biases aren't counted."""
    found = {}
    for group in layout.groups:
        out = torch.zeros(1, group.size, dtype=torch.float64)
        for part in group.parts:
            v = values[part.module].double().cpu()
            out = pooled(v.sum(1 if part.axis == "row" else 0)[None], part, out)
        found[group.name] = out[0]
    return found


def _wrapped(phi: dict[str, Tensor], layout: Layout, n: int) -> ShapleyScores:
    zero = {name: torch.zeros_like(values) for name, values in phi.items()}
    return ShapleyScores(phi, phi, zero, n, layout)
