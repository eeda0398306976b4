"""SAGA's attention in the form of Transformers' AttentionInterface, and when a layer chooses among positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import UsageError

from .attention import dense_attention, dense_weights, sparse_attention, values
from .config import SagaConfig

__all__ = ["chooses", "saga_attention", "saga_attention_eager"]


def saga_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention (B, T, Hq, d) of a layer, in the form of Transformers' AttentionInterface; its name there is `saga`.

    Args:
        module: `module.saga` is its :class:`SagaConfig`; without one it is dense. `module.layer_idx` is its depth.
        query, key, value: (B, Hq, T, d), (B, Hk, L, d), (B, Hv, L, d).

    Raises:
        UsageError: what only other implementations can do: a paged cache, a position bias.
    """
    return _attention(module, query, key, value, attention_mask, scaling, dropout, is_causal, False, kwargs)[
        0
    ], None


def saga_attention_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """As :func:`saga_attention`, in plain torch, with the weights (B, Hq, T, L); its name is `saga_eager`."""
    out, p = _attention(module, query, key, value, attention_mask, scaling, dropout, is_causal, True, kwargs)
    assert p is not None
    return out, p


def _attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    eager: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    for name in ("cache", "position_bias", "s_aux", "softcap", "sliding_window"):
        if kwargs.get(name) is not None:
            raise UsageError(f"SAGA attention has no {name}; {type(module).__name__} asks for it.")
    config: SagaConfig | None = getattr(module, "saga", None)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if config is not None and chooses(
        config, getattr(module, "layer_idx", None) or 0, q.shape[2], k.shape[2]
    ):
        watch = getattr(module, "saga_watch", None)
        out, p = sparse_attention(
            q, k, v, config, mask, scale=scale, causal=causal, dropout=dropout, watch=watch, weights=eager
        )
    elif eager:
        p = dense_weights(q, k, mask, scale=scale, causal=causal)
        out = values((F.dropout(p, dropout) if dropout else p).to(v.dtype), v)
    else:
        p, out = None, dense_attention(q, k, v, mask, scale=scale, causal=causal, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None if p is None else p.to(q.dtype)


def chooses(config: SagaConfig, layer: int, rows: int, length: int) -> bool:
    """Whether a layer chooses among `length` positions for `rows` query rows; else it is dense."""
    several = rows > 1 and not config.sparse_prefill
    return not (
        several or config.selector == "dense" or layer < config.dense_layers or length <= config.top_n
    )
