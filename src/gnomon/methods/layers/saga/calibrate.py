"""What a model's own keys look like on some text: the moments that the alignment is made from, in one pass.

Differs from the card: S_f = E[z zᴴ] is summed over the keys that the projections put out, not made from E[x xᵀ], which
        is the same (biases included) and takes r² numbers per frequency instead of D² per layer.

Shapes: B sequences, T tokens, K new key heads, r old ones each, F = d/2.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Complex
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import decoder_stack, unwrap
from gnomon.core.scoring import evaluating, position_ids

from .align import moments, pairs
from .model import attentions

__all__ = ["Calib", "key_moments"]

Calib = Sequence[Tensor | Mapping[str, Tensor]]
"""Batches: token ids (B, T), or dictionaries with `input_ids` and perhaps `attention_mask`, both (B, T)."""


def key_moments(
    model: nn.Module, key_heads: int, calibration: Calib
) -> tuple[list[Complex[Tensor, "K F r r"]], int]:
    """(S of each layer, tokens): mean of z zᴴ over real tokens, in one pass of the dense model.

    Raises:
        UsageError: no batches, or bad ones.
        NumericalFailure: keys that aren't finite; names the layer.
    """
    batches = list(_checked(calibration, model))
    modules = attentions(model)
    sums: list[Any] = [0.0] * len(modules)
    real: list[Tensor] = []

    def hook(depth: int, width: int) -> Any:
        def add(module: nn.Module, args: Any, keys: Tensor) -> None:
            rows = keys.detach().flatten(0, -2)[real[-1].flatten().to(keys.device)]
            if not bool(torch.isfinite(rows).all()):
                raise NumericalFailure(
                    f"The keys of layer {depth} hold NaN or infinity on the calibration text. Run the model in "
                    "bfloat16 or float32."
                )
            z = pairs(rows.T, width)  # (heads, F, N)
            sums[depth] = sums[depth] + moments(z, key_heads).cpu()

        return add

    handles = [attn.k_proj.register_forward_hook(hook(i, attn.head_dim)) for i, attn in enumerate(modules)]
    runner = decoder_stack(model).runner  # without the head, whose logits nobody needs here
    at = next(model.parameters()).device
    try:
        with evaluating(model):
            for ids, mask in batches:
                real.append(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0)
                runner(**_arguments(runner, ids.to(at), None if mask is None else mask.to(at)))
    finally:
        for handle in handles:
            handle.remove()
    tokens = int(sum(int(one.sum()) for one in real))
    return [s / tokens for s in sums], tokens


def _arguments(runner: nn.Module, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if mask is not None:
        inputs["attention_mask"] = mask
        if "position_ids" in inspect.signature(runner.forward).parameters:
            inputs["position_ids"] = position_ids(mask)
    return inputs


def _checked(calibration: Any, model: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    if (
        isinstance(calibration, str | Mapping | Tensor)
        or not isinstance(calibration, Sequence)
        or not len(calibration)
    ):
        raise UsageError(
            "calibration must be a list of batches: token ids of shape (B, T), or dictionaries with input_ids and "
            "attention_mask. Pass calibration=[ids, ...]."
        )
    embedding = getattr(unwrap(model), "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    some = False
    for i, one in enumerate(calibration):
        ids = one.get("input_ids") if isinstance(one, Mapping) else one
        mask = one.get("attention_mask") if isinstance(one, Mapping) else None
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise UsageError(f"Batch {i} of calibration holds no token ids of shape (B, T).")
        if mask is not None and mask.shape != ids.shape:
            raise UsageError(
                f"Batch {i} has input_ids of {list(ids.shape)} and a mask of {list(mask.shape)}."
            )
        if ids.numel() and vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise UsageError(
                f"Batch {i} holds ids from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to "
                f"{vocabulary - 1}. Was it made with another tokenizer?"
            )
        some = some or bool(ids.numel() if mask is None else (mask != 0).any())
        yield ids, mask
    if not some:
        raise UsageError("The calibration text holds no tokens.")
