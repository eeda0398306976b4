r"""Take units out of a model for a while: their rows, bias entries and columns are zero inside the block.

Paper: "MODEL SHAPLEY", NeurIPS 2025, "deactivation".
Here:  :func:`deactivate`. A SwiGLU neuron without its gate row, up row or down column gives nothing, so all three go.
Differs from the paper: its code zeroes rows of projections only; a row of `down_proj` is a dimension of the residual
       stream, not a neuron. `units="row"` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import is_conv1d, unwrap

from .layout import Layout
from .scores import UnitMasks


@contextmanager
def deactivate(model: nn.Module, masks: UnitMasks) -> Iterator[nn.Module]:
    """Zero every unit that isn't chosen; on leaving, the weights are bit for bit what they were.

    Args:
        model: the model that was scored, or another one of the same form.
        masks: True = the unit stays.

    Raises:
        UsageError: the model lacks a map of the masks, or has it in another size.
    """
    root = unwrap(model)
    saved: list[tuple[Tensor, tuple[Tensor | slice, ...], Tensor]] = []
    try:
        for view, index in _removed(root, masks):
            saved.append((view, index, view[index].clone()))
            view[index] = 0
        yield model
    finally:
        for view, index, values in reversed(saved):  # a weight may lose rows and columns, which overlap
            view[index] = values


def _removed(root: nn.Module, masks: UnitMasks) -> Iterator[tuple[Tensor, tuple[Tensor | slice, ...]]]:
    """Views of what is stored, and the entries in them that go."""
    layout = masks.layout
    if layout.kind == "param":
        for name, chosen in masks.chosen.items():
            module, _, leaf = name.rpartition(".")
            view = getattr(_same(root, module, layout), leaf).detach()
            if bool((~chosen).any()):
                yield view, (~chosen.to(view.device),)
        return
    for group in layout.groups:
        gone = ~masks.chosen[group.name].cpu()
        for part in group.parts:
            mine = ((part.units >= 0) & gone[part.units.clamp(min=0)]).nonzero().flatten()
            if not len(mine):
                continue
            module_ = _same(root, part.module, layout)
            weight: Tensor = module_.weight.detach()  # type: ignore[operator]
            at = mine.to(weight.device)
            rows_first = (part.axis == "row") != is_conv1d(module_)
            yield weight, (at,) if rows_first else (slice(None), at)
            bias = getattr(module_, "bias", None)
            if layout.bias and part.axis == "row" and bias is not None:
                yield bias.detach(), (at,)


def _same(root: nn.Module, name: str, layout: Layout) -> nn.Module:
    try:
        module = root.get_submodule(name)
    except AttributeError:
        raise UsageError(
            f"This model has no {name}, which the masks speak of. Pass the model that was scored."
        ) from None
    mine, theirs = (getattr(m, "weight", torch.empty(0)).shape for m in (module, layout.modules[name]))
    if mine != theirs:
        raise UsageError(f"{name} is {list(mine)} here, but was {list(theirs)} when it was scored.")
    return module
