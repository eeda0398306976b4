"""Which models can be block-diffusion models, and which say that they are."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import unwrap

from ..own_masks import require_own_masks, text_config
from .config import BlockDiffusionConfig

FIELD = "block_diffusion"
"""Entry of a model's configuration that says how it was trained; kept by `save_pretrained`."""


def require_fit(model: nn.Module, cfg: BlockDiffusionConfig, *, attention: str | None = None) -> None:
    """Refuse models whose attention takes no mask of our own, and mask tokens that they have no embedding for.

    Args:
        attention: the implementation that runs, where it isn't the one that the configuration names.

    Raises:
        UsageError: with the reason.
    """
    config = require_own_masks(
        model,
        windows="which see a part of the prefix only and keep no more of it",
        states="which read tokens from left to right only",
        attention=attention,
    )
    root = unwrap(model)
    name = type(root).__name__
    if getattr(config, "num_kv_shared_layers", 0):
        raise UsageError(f"{name} has layers that share a cache, so a block can't be taken back in it.")
    if getattr(config, "alibi", False) or not takes(root, "position_ids"):
        raise UsageError(
            f"{name} takes no position ids (ALiBi, or positions by place), and training needs the same positions "
            "twice. Use a model with rotary or learned positions."
        )
    embedding = root.get_input_embeddings()  # type: ignore[operator]
    if cfg.mask_token_id >= (rows := embedding.weight.shape[0]):
        raise UsageError(
            f"mask_token_id={cfg.mask_token_id}, but {name} has {rows} embeddings. Use a token that texts never hold, "
            "or add one: tokenizer.add_special_tokens({'mask_token': '<|mask|>'}) and "
            "model.resize_token_embeddings(len(tokenizer))."
        )


def takes(root: nn.Module, argument: str) -> bool:
    """Whether the model's forward pass names this argument."""
    return argument in inspect.signature(root.forward).parameters


def require_sparse_fit(model: nn.Module) -> None:
    """Refuse models whose cache isn't one key and one value a head and token.

    Raises:
        UsageError: latent attention (MLA).
    """
    if getattr(text_config(model), "kv_lora_rank", None):
        raise UsageError(
            f"{type(unwrap(model)).__name__} has latent attention (MLA): heads share one compressed cache, and no head "
            "has keys of its own to choose from. Use sparse=None."
        )


def require_room(model: nn.Module, length: int) -> None:
    """Refuse more tokens than the model has positions.

    Raises:
        UsageError: with both numbers.
    """
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UsageError(
            f"{length} tokens (whole blocks) are more than the model's {limit} positions. Shorten the prompt, or ask "
            "for fewer new tokens."
        )


def declare(model: nn.Module, cfg: BlockDiffusionConfig) -> None:
    """Write into the model's configuration that it is trained as a block-diffusion model of this kind.

    `save_pretrained` keeps it, and :func:`generate` asks for it: a causal model fills masks with nonsense.

    Raises:
        UsageError: a model that can't be one.
    """
    require_fit(model, cfg)
    config: Any = unwrap(model).config
    setattr(config, FIELD, _kind(cfg))


def declared(model: nn.Module) -> dict[str, Any] | None:
    """What :func:`declare` wrote, or None."""
    found = getattr(getattr(unwrap(model), "config", None), FIELD, None)
    return dict(found) if isinstance(found, dict) else None


def require_trained(model: nn.Module, cfg: BlockDiffusionConfig) -> None:
    """Refuse models that weren't trained for this.

    Raises:
        UsageError: none or another kind is declared.
    """
    found, wanted = declared(model), _kind(cfg)
    if found is None:
        raise UsageError(
            f"{type(unwrap(model)).__name__} doesn't say that it was trained as a block-diffusion model; a causal "
            "model fills masks with nonsense. Train it (block_diffusion_loss, then declare(model, cfg)), or give "
            "force=True if it was trained elsewhere."
        )
    if differing := {name: value for name, value in wanted.items() if found.get(name) != value}:
        was = ", ".join(f"{name}={found.get(name)}" for name in differing)
        now = ", ".join(f"{name}={value}" for name, value in differing.items())
        raise UsageError(f"The model was trained with {was}, not {now}. Use these, or give force=True.")


def _kind(cfg: BlockDiffusionConfig) -> dict[str, Any]:
    return {
        "block_size": cfg.block_size,
        "mask_token_id": cfg.mask_token_id,
        "token_shift": cfg.token_shift,
    }
