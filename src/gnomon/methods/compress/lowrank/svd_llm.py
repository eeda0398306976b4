"""SVD-LLM's second step: the factors are trained a little, first every A, then every B.

Both rounds train adapters of rank r (W ≈ (A + s P Q) B, then A (B + s P Q)) on all layers together and merge them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gnomon.core.errors import UsageError
from gnomon.core.train import TrainConfig, train

from ..calibration import Batch, Calib, require_calib, state_kept
from .config import LoraUpdate
from .linear import LowRankLinear


def lora_update(model: nn.Module, batches: Calib, config: LoraUpdate | None = None) -> nn.Module:
    """Train a compressed model's factors on batches of tokens, in place.

    Args:
        batches: as calibration batches; each is one step. Padding has to be on the right.

    Raises:
        UsageError: no layer is compressed, or batches that can't be trained on.
        NumericalFailure: training diverged; the model may then be partly updated.
    """
    config = config or LoraUpdate()
    layers = [module for module in model.modules() if isinstance(module, LowRankLinear)]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no LowRankLinear to update. Compress it first (compress_lowrank)."
        )
    source = [batch for batch in require_calib(batches, model, "The low-rank update") if batch.targets]
    generator = torch.Generator().manual_seed(config.seed)
    for factor in ("a", "b"):
        with state_kept(model):
            _round(model, layers, factor, source, config, generator)
    return model


def _round(
    model: nn.Module,
    layers: Sequence[LowRankLinear],
    factor: str,
    source: list[Batch],
    config: LoraUpdate,
    generator: torch.Generator,
) -> None:
    adapters = [_Adapter(getattr(layer, factor), config, generator) for layer in layers]
    done = False
    try:
        for layer, adapter in zip(layers, adapters, strict=True):
            parametrize.register_parametrization(layer, factor, adapter)
        optimizer = torch.optim.AdamW(
            [parameter for adapter in adapters for parameter in adapter.parameters()],
            lr=config.lr,
            weight_decay=0.0,
        )
        steps = TrainConfig(steps=config.epochs * len(source), schedule="linear")
        train(model, _Epochs(source, generator), optimizer, steps, name=f"lowrank-{factor}")
        done = True
    finally:
        for layer in layers:
            if parametrize.is_parametrized(layer, factor):
                parametrize.remove_parametrizations(layer, factor, leave_parametrized=done)


class _Adapter(nn.Module):
    """M + s P Q in float32, as a parametrisation; P starts at zero."""

    def __init__(self, matrix: Tensor, config: LoraUpdate, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = matrix.shape
        r = min(config.r, rows, columns)
        q = torch.randn(r, columns, generator=generator) / math.sqrt(columns)
        self.p = nn.Parameter(torch.zeros(rows, r, device=matrix.device))
        self.q = nn.Parameter(q.to(matrix.device))
        self.scale = config.alpha / config.r

    def forward(self, matrix: Tensor) -> Tensor:
        return (
            matrix.to(torch.promote_types(matrix.dtype, torch.float32)) + self.scale * self.p @ self.q
        ).to(matrix.dtype)


class _Epochs:
    """Batches in a new order every epoch, without end."""

    def __init__(self, batches: list[Batch], generator: torch.Generator) -> None:
        self.batches, self.generator = batches, generator
        self.order: list[int] = []

    def __next__(self) -> Tensor | Mapping[str, Tensor]:
        if not self.order:
            self.order = torch.randperm(len(self.batches), generator=self.generator).tolist()
        batch = self.batches[self.order.pop()]
        if batch.mask is None:
            return batch.input_ids
        return {"input_ids": batch.input_ids, "attention_mask": batch.mask}

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])
        self.generator.set_state(state["generator"])
