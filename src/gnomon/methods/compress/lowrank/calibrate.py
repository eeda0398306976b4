"""Calibration of everything that low rank can compress."""

from __future__ import annotations

import torch
from torch import nn

from ..calibration import Calib, LayerStats, gather, require_calib
from .layers import compressible


def calibrate(
    model: nn.Module, calib: Calib, *, gram: bool = True, device: torch.device | str | None = None
) -> dict[str, LayerStats]:
    """Run the batches through the dense model and sum over the inputs of every layer that can be compressed.

    Args:
        gram: also Σ x xᵀ in float64, n² numbers a layer.
        device: where the sums lie between batches, such as "cpu" when they don't fit beside the model; by default
            beside the layer.

    Raises:
        UsageError: see :func:`require_calib` and `compressible`.
        NumericalFailure: an activation that isn't finite; names the layer.
    """
    layers = compressible(model)
    return gather(model, layers, require_calib(calib, model, "Calibration"), gram=gram, device=device)
