"""Masks of four dimensions that a method hands to a Transformers model: which models take them, and in which form.

Shapes: B sequences, T queries, L keys.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import unwrap

ATTENTION = ("sdpa", "eager")
"""Implementations that take any mask of four dimensions. Flash attention has none; flex attention has its own kind."""


def attention_of(model: nn.Module) -> str:
    """Name of the attention implementation that the model runs."""
    return str(getattr(unwrap(model).config, "_attn_implementation", "eager"))


def additive(seen: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """The mask as what eager attention adds to its scores: 0, and the dtype's least number where nothing may be seen.

    Eager attention takes a boolean mask for 0 and 1, adds that, and masks nothing.
    """
    zero = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zero.masked_fill(~seen, torch.finfo(dtype).min)


def as_given(seen: Bool[Tensor, "..."], model: nn.Module) -> Tensor:
    """A mask as the model's attention takes it: boolean for sdpa, additive for eager."""
    if attention_of(model) == "eager":
        return additive(seen, next(p.dtype for p in model.parameters() if p.is_floating_point()))
    return seen


def text_config(model: nn.Module) -> Any:
    """Configuration of the language model inside wrappers.

    Raises:
        UsageError: it isn't one of Transformers'.
    """
    root = unwrap(model)
    config: Any = getattr(root, "config", None)
    if config is None or not hasattr(root, "generate"):
        raise UsageError(f"{type(root).__name__} is no language model of Transformers.")
    return config.get_text_config(decoder=True)


def require_own_masks(model: nn.Module, *, windows: str, states: str, attention: str | None = None) -> Any:
    """Refuse models that can't be told who sees whom by a mask alone.

    Args:
        windows, states: what is wrong with sliding windows, and with state-space layers, as the end of a sentence.
        attention: the implementation that runs, where it isn't the one that the configuration names.

    Returns:
        configuration of the language model.

    Raises:
        UsageError: with the reason.
    """
    config, root = text_config(model), unwrap(model)
    name = type(root).__name__
    if (kind := attention or attention_of(root)) not in ATTENTION:
        raise UsageError(
            f"{name} runs {kind}, which takes no mask of four dimensions. Load it with attn_implementation='sdpa'."
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window or kinds - {"full_attention"}:
        what = ", ".join(sorted(kinds - {"full_attention"})) or f"a window of {window} tokens"
        raise UsageError(
            f"{name} has layers with {what}, {windows}. Use a model with full attention in all layers."
        )
    modules = [type(module).__name__.lower() for module in root.modules()]
    if any("mamba" in module or "ssm" in module for module in modules):
        raise UsageError(f"{name} has state-space layers, {states}.")
    return config
