"""ASVD's search for ranks: what does each layer's compression alone cost?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..calibration import Batch, mean_nll, state_kept
from .config import ASVDConfig
from .factors import factor_asvd, rank_for
from .ranks import require_reachable, sensitivity_ranks


def sensitivities(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, Tensor],
    batches: Sequence[Batch],
    candidates: Sequence[float],
) -> dict[tuple[str, float], float]:
    """(layer, κ) -> mean token loss with that layer alone compressed; one pass each. The model stays as it is.

    Sorting by loss or by perplexity, its exponential, is the same.
    """
    losses: dict[tuple[str, float], float] = {}
    with state_kept(model), torch.no_grad():
        for name, layer in layers.items():
            factored = factor_asvd(layer.weight, scales[name])
            original = layer.weight.data
            try:
                for share in candidates:
                    a, b = factored.cut(rank_for(share, *original.shape))
                    layer.weight.data = (a @ b).to(original.dtype)
                    losses[name, share] = float(mean_nll(model, batches))
            finally:
                layer.weight.data = original
    return losses


def search_ranks(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    scales: Mapping[str, Tensor],
    batches: Sequence[Batch],
    keep: float,
    config: ASVDConfig,
) -> dict[str, int]:
    """Ranks by ASVD's sensitivity search; see `ranks.sensitivity_ranks`."""
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    require_reachable(keep, shapes, config.candidates)
    losses = sensitivities(model, layers, scales, batches, config.candidates)
    return sensitivity_ranks(keep, shapes, losses, config.candidates)
