"""SAGA in a decoder: which attention modules take it, their key projections, and settings that may change at any time.

Nothing here knows a model class by name. An attention module qualifies if it owns `q_proj`, `k_proj` and `v_proj` as
linear layers of whole heads and hands q, k and v to Transformers' attention functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import decoder_stack, sublayers, unwrap

from .config import SagaConfig

__all__ = ["attentions", "configure", "narrow_keys", "require_fit", "saga_config"]


def attentions(model: nn.Module) -> list[Any]:
    """The attention modules of a decoder, in order of depth."""
    return [sublayers(layer).attn for layer in decoder_stack(model).layers]


def require_fit(model: nn.Module) -> None:
    """Refuse decoders that SAGA has no rule for.

    Raises:
        UsageError: sliding windows, latent attention, fused or missing projections, a norm over all key heads, soft
            caps, attention sinks, layers that share keys.
    """
    root = unwrap(model)
    name = type(root).__name__
    config: Any = getattr(root, "config", None)
    if config is None:
        raise UsageError(f"{name} is no model of Transformers.")
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if window or kinds:
        what = f"layers of type {', '.join(sorted(kinds))}" if kinds else f"a window of {window} tokens"
        raise UsageError(
            f"{name} has {what}, and there is no rule for choosing positions there. Use a model with full attention in "
            "all layers."
        )
    for option, what in (
        ("kv_lora_rank", "latent attention (MLA), whose keys are no heads of their own"),
        ("attn_logit_softcapping", "soft-capped scores"),
        ("alibi", "position biases (ALiBi)"),
        ("num_kv_shared_layers", "layers that share their keys"),
    ):
        if getattr(config, option, None):
            raise UsageError(f"{name} has {what}, which SAGA attention doesn't compute. Use another model.")
    for attn in attentions(root):
        _require_attention(attn, name, config)


def _require_attention(attn: Any, name: str, config: Any) -> None:
    parts = [getattr(attn, part, None) for part in ("q_proj", "k_proj", "v_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts):
        owned = ", ".join(child for child, _ in attn.named_children()) or "nothing"
        raise UsageError(
            f"{type(attn).__name__} owns {owned}, not q_proj, k_proj and v_proj as linear layers, so its keys can't be "
            "cut by themselves. SAGA takes decoders such as Llama, Mistral, Qwen 2 and 3, Gemma and OLMo."
        )
    heads, held = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    width = getattr(attn, "head_dim", None)
    if held is None or width is None:
        raise UsageError(
            f"{name} doesn't state num_key_value_heads and head_dim, so its heads can't be counted."
        )
    if (parts[0].out_features, parts[2].out_features) != (heads * width, held * width):  # type: ignore[union-attr]
        raise UsageError(
            f"{type(attn).__name__} projects to {parts[0].out_features} and {parts[2].out_features} numbers, which "  # type: ignore[union-attr]
            f"are not {heads} query heads and {held} value heads of {width}."
        )
    if getattr(attn, "sinks", None) is not None:
        raise UsageError(f"{type(attn).__name__} has attention sinks, which SAGA attention doesn't compute.")
    norm = key_norm(attn)
    size = 0 if norm is None else next((p.shape[-1] for p in norm.parameters()), width)
    if norm is not None and size != width:
        raise UsageError(
            f"{type(attn).__name__} normalises all its key heads together ({size} numbers), so they can't be cut. "
            "Use a model whose norm is per head, or none."
        )


def key_norm(attn: nn.Module) -> nn.Module | None:
    """The norm between key projection and rotary positions, where there is one."""
    for name in ("k_norm", "k_layernorm", "key_norm"):
        if isinstance(norm := getattr(attn, name, None), nn.Module):
            return norm
    return None


def narrow_keys(attn: Any, key_heads: int) -> None:
    """Put a key projection of `key_heads` heads into an attention module; its numbers are drawn as torch draws them."""
    old: nn.Linear = attn.k_proj
    wanted = key_heads * attn.head_dim
    if old.out_features != wanted:
        attn.k_proj = nn.Linear(
            old.in_features, wanted, old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
        ).train(old.training)


def saga_config(model: nn.Module) -> SagaConfig:
    """The settings of a SAGA model.

    Raises:
        UsageError: it isn't one.
    """
    stated_by = [getattr(module, "saga", None) for module in unwrap(model).modules()]
    found = {one for one in stated_by if isinstance(one, SagaConfig)}
    if len(found) != 1:
        raise UsageError(
            f"{type(unwrap(model)).__name__} is no SAGA model. Convert one with to_saga(model, config)."
        )
    return found.pop()


def configure(model: nn.Module, **changes: Any) -> SagaConfig:
    """Change how positions are chosen, in place: any field of :class:`SagaConfig` but the head counts.

    `configure(model, selector="dense")` attends to everything; `configure(model, sparse_prefill=True)` chooses for
    every row of a prompt, too, as perplexity under sparse attention needs it.

    Raises:
        UsageError: no SAGA model; head counts; bad values; within a generation a change is the caller's risk.
    """
    before = saga_config(model)
    for name in ("num_key_heads", "num_value_heads", "allow_fewer_values"):
        if name in changes:
            raise UsageError(
                f"{name} is a matter of weights. Convert the original model again: to_saga(model, config)."
            )
    known = {field.name for field in dataclasses.fields(SagaConfig)}
    if odd := changes.keys() - known:
        raise UsageError(f"SagaConfig has no field {min(odd)!r}; it has {', '.join(sorted(known))}.")
    after = dataclasses.replace(before, **changes)
    root: Any = unwrap(model)
    for attn in attentions(root):
        attn.saga = after
    if hasattr(root.config, "saga"):
        root.config.saga = stated(after)
    return after


def stated(config: SagaConfig) -> dict[str, Any]:
    """What `config.json` holds under `saga`: all but the head counts, as JSON values."""
    fields = dataclasses.asdict(config)
    del fields["num_key_heads"], fields["num_value_heads"]
    return {**fields, "always_keep": list(config.always_keep)}
