"""Scores that the Model Shapley study compares.

A score is a function `make(model, batches, *, units, generator) -> ShapleyScores`; higher φ = more worth keeping. Ranks
by absolute value are scores of their own, so that selection is the same for all: the highest stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.methods.compress.shapley import Group, ShapleyScores

    Units = str | Callable[[nn.Module], Sequence[Group]]

METHOD, GRADIENT, TRACE, WANDA, RANDOM = "shapley", "gradient", "gradient trace", "wanda", "random"
UNIT, GLOBAL, EXACT, ABSOLUTE = (
    "shapley, unit blocks",
    "shapley, global block",
    "shapley, exact Hessian",
    "shapley, absolute",
)
FIRST, PRINTED, PRINTED_ABSOLUTE = "first order", "printed sign", "printed sign, absolute"
RELEASED, CACHED = "released code", "released code, cached"
COLUMNS, EXACT_COLUMNS = "shapley, down columns", "shapley, exact Hessian, down columns"
_HERE = "gnomon.studies.shapley_entrants"
SCORES = {
    METHOD: f"{_HERE}:shapley",
    UNIT: f"{_HERE}:shapley_unit",
    GLOBAL: f"{_HERE}:shapley_global",
    EXACT: f"{_HERE}:shapley_exact",
    ABSOLUTE: f"{_HERE}:shapley_absolute",
    COLUMNS: f"{_HERE}:shapley_columns",
    EXACT_COLUMNS: f"{_HERE}:shapley_exact_columns",
    FIRST: f"{_HERE}:first_order",
    PRINTED: f"{_HERE}:printed",
    PRINTED_ABSOLUTE: f"{_HERE}:printed_absolute",
    RELEASED: f"{_HERE}:released",
    CACHED: f"{_HERE}:released_cached",
    TRACE: f"{_HERE}:trace",
    GRADIENT: f"{_HERE}:gradient",
    WANDA: f"{_HERE}:wanda",
    RANDOM: f"{_HERE}:random",
}
"""Competitors by name; the first is the method: Fisher over sequences, plus sign, blocks of a layer, signed."""
JUDGED = (METHOD, TRACE, GRADIENT, RANDOM)
"""What claims are judged on."""


def shapley(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    return _model_shapley(model, batches, units)


def shapley_unit(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    return _model_shapley(model, batches, units, block="unit")


def shapley_global(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    return _model_shapley(model, batches, units, block="global")


def shapley_exact(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    return _model_shapley(model, batches, units, curvature="hvp")


def shapley_columns(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """A neuron's down column alone: its removal has the same effect, and the model is linear in it."""
    return _model_shapley(model, batches, _columns(units))


def shapley_exact_columns(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    return _model_shapley(model, batches, _columns(units), curvature="hvp")


def shapley_absolute(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """The paper's ranking, with the derived sign."""
    return _absolute(_model_shapley(model, batches, units))


def first_order(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """−a, signed."""
    return _model_shapley(model, batches, units, curvature="none")


def printed(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """The sign of the paper's Algorithm 2, signed."""
    return _model_shapley(model, batches, units, curvature_sign="paper")


def printed_absolute(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """Algorithm 2 as it is used: its sign, ranked by absolute value."""
    return _absolute(_model_shapley(model, batches, units, curvature_sign="paper"))


def released(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """The repository's training path: one mean-gradient Gram matrix, absolute."""
    from gnomon.methods.compress.shapley import released_scores

    return _absolute(released_scores(model, batches, path="finetune", units=units))


def released_cached(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    """Its cached deactivation path, which multiplies the cooperative part by 0.0."""
    from gnomon.methods.compress.shapley import released_scores

    return _absolute(released_scores(model, batches, path="deactivate", units=units))


def trace(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    from gnomon.methods.compress.shapley import trace_scores

    return trace_scores(model, batches, units=units)


def gradient(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    from gnomon.methods.compress.shapley import gradient_scores

    return gradient_scores(model, batches, units=units)


def wanda(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    from gnomon.methods.compress.shapley import wanda_scores

    return wanda_scores(model, batches, units=units)


def random(
    model: nn.Module, batches: Sequence[Tensor], *, units: Units, generator: torch.Generator
) -> ShapleyScores:
    from gnomon.methods.compress.shapley import random_scores

    return random_scores(model, units=units, generator=generator)


def _model_shapley(
    model: nn.Module, batches: Sequence[Tensor], units: Units, **options: Any
) -> ShapleyScores:
    from gnomon.methods.compress.shapley import ModelShapley

    return ModelShapley(model, units, **options).fit(batches).scores()


def _columns(units: Units) -> Units:
    """The same units without their rows; units that are rows only stay as they are."""

    def groups(model: nn.Module) -> Sequence[Group]:
        from gnomon.methods.compress.shapley import layout_of

        whole = layout_of(model, units).groups
        if not any(part.axis == "column" for group in whole for part in group.parts):
            return whole
        return [replace(g, parts=tuple(p for p in g.parts if p.axis == "column")) for g in whole]

    return groups


def _absolute(scores: ShapleyScores) -> ShapleyScores:
    return replace(scores, phi={name: phi.abs() for name, phi in scores.phi.items()})


def adamw(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> torch.optim.Optimizer:
    """What the base models are trained with."""
    from gnomon.studies.pretraining import adamw as plain

    return plain(model, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95))
