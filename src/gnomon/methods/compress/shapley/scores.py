r"""Scores of units, and the choice of the best: masks by name.

Here:  :class:`ShapleyScores`, :class:`UnitMasks`, :func:`select_top`.
Differs from the paper: it ranks by |φ|, which keeps units whose removal would help; `by="signed"` ranks by φ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError, unknown

from .layout import Layout


@dataclass(frozen=True)
class ShapleyScores:
    """φ of every unit, by group: shape (units,), or that of the parameter for `units="param"`.

    φ > 0: the loss rises when the unit is removed, the same sign as first and second.
    """

    phi: dict[str, Float[Tensor, "..."]]
    """first + second."""
    first: dict[str, Float[Tensor, "..."]]
    """−gθ, summed over the unit."""
    second: dict[str, Float[Tensor, "..."]]
    """The quadratic part with its sign and scale."""
    n: int
    """Sequences that were read."""
    layout: Layout | None = field(default=None, repr=False)
    """Where the units lie in the model; what masks need to be applied."""

    def flat(self) -> Float[Tensor, " units"]:
        """φ of all units in the order of the groups."""
        return torch.cat([values.flatten() for values in self.phi.values()])


@dataclass(frozen=True)
class UnitMasks:
    """A choice of units: True = chosen (kept by `deactivate`, trained by `MaskedFineTuning`)."""

    chosen: dict[str, Bool[Tensor, "..."]]
    layout: Layout

    def __post_init__(self) -> None:
        sizes = {name: self.layout.shape(name) for name in self.layout.sizes}
        if set(self.chosen) != set(sizes):
            raise UsageError(
                f"Masks are of {', '.join(self.chosen)}, but the units of {', '.join(sizes)}. Give one per group."
            )
        for name, mask in self.chosen.items():
            if mask.dtype != torch.bool or tuple(mask.shape) != sizes[name]:
                raise UsageError(
                    f"The mask of {name} is {mask.dtype} {list(mask.shape)}, not bool {list(sizes[name])}."
                )

    @property
    def share(self) -> float:
        """Chosen units over all units."""
        total = sum(mask.numel() for mask in self.chosen.values())
        return sum(int(mask.sum()) for mask in self.chosen.values()) / total

    def __invert__(self) -> UnitMasks:
        return UnitMasks({name: ~mask for name, mask in self.chosen.items()}, self.layout)


def select_top(
    scores: ShapleyScores,
    ratio: float,
    per: Literal["layer", "global"] = "layer",
    by: Literal["abs", "signed"] = "abs",
) -> UnitMasks:
    """The units with the highest scores; of equal ones the first.

    Args:
        ratio: share that is chosen, in (0, 1], rounded to the nearest number of units, at least one.
        per: rank inside each decoder layer, or over the whole model.
        by: |φ| as in the paper, or φ, which never takes a harmful unit before a useful one.

    Raises:
        UsageError: a ratio outside (0, 1], an unknown `per` or `by`, or one unit per layer to choose from.
        NumericalFailure: a score is NaN.
    """
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio={ratio} must lie in (0, 1]: the share of units that is chosen.")
    if per not in ("layer", "global"):
        raise unknown("per:", per, ("layer", "global"))
    if by not in ("abs", "signed"):
        raise unknown("by:", by, ("abs", "signed"))
    if scores.layout is None:
        raise UsageError("These scores don't say where their units lie. Take those of ModelShapley.scores().")
    if bad := [name for name, values in scores.phi.items() if bool(values.isnan().any())]:
        raise NumericalFailure(
            f"Scores of {', '.join(bad[:3])} are NaN, so there is no order. Score again in float32, or look for the "
            "batch."
        )
    worth = {name: (phi.abs() if by == "abs" else phi).flatten() for name, phi in scores.phi.items()}
    flat = torch.cat(list(worth.values()))
    mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    for members in _rivals(scores.layout, worth, per):
        keep = max(1, int(ratio * len(members) + 0.5))
        order = torch.argsort(flat[members], descending=True, stable=True)
        mask[members[order[:keep]]] = True
    split = torch.split(mask, [len(values) for values in worth.values()])
    chosen = {name: part.view(scores.phi[name].shape) for name, part in zip(worth, split, strict=True)}
    return UnitMasks(chosen, scores.layout)


def _rivals(layout: Layout, worth: Mapping[str, Tensor], per: str) -> list[Tensor]:
    """Sets of units, by flat index, that are ranked against each other."""
    device = next(iter(worth.values())).device
    total = sum(len(values) for values in worth.values())
    if per == "global":
        return [torch.arange(total, device=device)]
    if layout.kind == "param":
        ids = torch.cat(
            [
                torch.full((len(values),), layout.layers[name.rpartition(".")[0]], device=device)
                for name, values in worth.items()
            ]
        )
    else:
        ids = layout.blocks("layer").to(device)
    found = [(ids == one).nonzero().flatten() for one in sorted(set(ids.tolist()))]
    if len(found) > 1 and max(len(members) for members in found) == 1:
        raise UsageError("Every layer holds one unit, so there is nothing to rank in it. Use per='global'.")
    return found
