"""Attention with different numbers of query, key and value heads, dense or over kept positions only.

    s_ij = q_i · k_{κ(i), j} / √d,   I_i = select(s_i),   o_i = Σ_{j ∈ I_i} softmax_{I_i}(s_i)_j v_{ν(i), j}
    κ(i) = ⌊i H_k / H_q⌋,   ν(i) = ⌊i H_v / H_q⌋

A single query row reads only the values that it keeps; several rows at once are a masked softmax, block by block, so
that no more than :data:`ROOM` scores exist at a time (but gradients keep all of them).

Here:  these functions.
Not here: what is kept (`select`), the single step's kernels (`gnomon.kernels.sparse_decode`), the functions that
       Transformers calls (`interface`).

Shapes: B sequences, Hq, Hk, Hv heads, T query rows, L positions, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from gnomon.kernels.sparse_decode import sparse_decode

from .config import SagaConfig
from .select import Asked, choose, window

__all__ = [
    "dense_attention",
    "dense_weights",
    "head_map",
    "kept_mask",
    "sparse_attention",
    "values",
]

ROOM = 1 << 24
"""Scores held at a time where several query rows are sparse."""

Watch = Callable[[Asked, Tensor], None]
"""Told what each block of query rows was asked, and the positions that it keeps: for statistics."""


def head_map(heads: int, shared: int) -> list[int]:
    """κ or ν: which of `shared` heads each of `heads` query heads reads."""
    return [i * shared // heads for i in range(heads)]


def expand(x: Float[Tensor, "B h L d"], heads: int) -> Float[Tensor, "B Hq L d"]:
    """Each query head's own view of the keys or values."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(B, Hq, T, L), without copies of k for each query head."""
    batch, heads, rows, width = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, width)  # the group's heads and rows beside each other
    return (grouped @ k.transpose(-1, -2)).view(batch, heads, rows, -1) * scale


def values(p: Float[Tensor, "B Hq T L"], v: Float[Tensor, "B Hv L d"]) -> Float[Tensor, "B Hq T d"]:
    """Sums of values by weights, without copies of v for each query head."""
    batch, heads, rows, length = p.shape
    return (p.reshape(batch, v.shape[1], -1, length) @ v).view(batch, heads, rows, -1)


def _causal(rows: int, length: int, device: torch.device, first: int = 0) -> Tensor:
    """(1, 1, T, L): row t sees the positions up to `first` + t."""
    at = torch.arange(first, first + rows, device=device)
    return (torch.arange(length, device=device) <= at[:, None])[None, None]


def seen_and_bias(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(which keys are visible, what is added to their scores) of a boolean or an additive mask."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    return mask > torch.finfo(mask.dtype).min / 2, mask


def dense_attention(
    q: Float[Tensor, "B Hq T d"],
    k: Float[Tensor, "B Hk L d"],
    v: Float[Tensor, "B Hv L d"],
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    dropout: float = 0.0,
) -> Float[Tensor, "B Hq T d"]:
    """Attention to all visible positions, by torch's scaled_dot_product_attention.

    Args:
        mask: boolean or additive, to (B, Hq, T, L); None: causal from position 0 on, and all for a single row.
        causal: False: no mask is none for several rows, too.
    """
    heads, rows, length = q.shape[1], q.shape[2], k.shape[2]
    causal = causal and mask is None and rows > 1
    if causal and length > rows:  # an empty cache of fixed size: what lies behind holds nothing yet
        k, v = k[:, :, :rows], v[:, :, :rows]
    grouped = k.shape[1] == v.shape[1] != heads and mask is None
    if not grouped:
        k, v = expand(k, heads), expand(v, heads)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def dense_weights(
    q: Float[Tensor, "B Hq T d"],
    k: Float[Tensor, "B Hk L d"],
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
) -> Float[Tensor, "B Hq T L"]:
    """Softmax of the scores of all visible positions, in float32 at least; 0 for a row that sees none."""
    seen, bias = seen_and_bias(mask)
    if mask is None and causal and q.shape[2] > 1:
        seen = _causal(q.shape[2], k.shape[2], q.device)
    return _softmax(_scores(q, k, scale), seen, bias)


def _softmax(scores: Tensor, seen: Tensor | None, bias: Tensor | None) -> Tensor:
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    if seen is None:
        return torch.softmax(scores, -1)
    lost = ~seen.any(-1, keepdim=True)  # such a row would give NaN, in the gradient as well
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(lost, 0)
    return torch.softmax(scores, -1).masked_fill(~seen, 0)


def kept_mask(at: Int[Tensor, "*rows m"], length: int) -> Bool[Tensor, "*rows L"]:
    """Kept positions as a mask."""
    room = torch.zeros(*at.shape[:-1], length + 1, dtype=torch.bool, device=at.device)
    return room.scatter(-1, at.masked_fill(at < 0, length), True)[..., :length]


def sparse_attention(
    q: Float[Tensor, "B Hq T d"],
    k: Float[Tensor, "B Hk L d"],
    v: Float[Tensor, "B Hv L d"],
    config: SagaConfig,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    dropout: float = 0.0,
    watch: Watch | None = None,
    weights: bool = False,
) -> tuple[Float[Tensor, "B Hq T d"], Float[Tensor, "B Hq T L"] | None]:
    """Attention to the kept positions, and its weights if asked for. Gradients flow through the kept entries.

    Args:
        mask, causal: as in :func:`dense_attention`. A query row without any visible position gets 0.
        watch: see :data:`Watch`.
    """
    rows, length = q.shape[2], k.shape[2]
    seen, bias = seen_and_bias(mask)
    plain = config.selector == "strided" and window(config) == (0, 0) and bias is None
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if rows == 1 and plain and not (weights or watch or learns or dropout) and _per_sequence(seen):
        slots = None if seen is None else seen[:, 0, 0].expand(q.shape[0], -1)
        out, _ = sparse_decode(
            q[:, :, 0], k, v, n=config.top_n, oversample=config.oversample, scale=scale, visible=slots
        )
        return out[:, :, None], None
    step = max(1, ROOM // (q.shape[0] * q.shape[1] * length))
    outs, shares = [], []
    for t in range(0, rows, step):
        part = slice(t, min(t + step, rows))
        if mask is None and causal and rows > 1:
            some: Tensor | None = _causal(part.stop - t, length, q.device, first=t)
        else:
            some = None if seen is None else _rows(seen, part)
        p = _sparse_weights(
            q[:, :, part], k, some, None if bias is None else _rows(bias, part), config, scale, watch
        )
        p = F.dropout(p, dropout) if dropout else p
        outs.append(values(p.to(v.dtype), v))
        shares += [p] if weights else []
    return torch.cat(outs, 2).to(q.dtype), torch.cat(shares, 2) if weights else None


def _per_sequence(seen: Tensor | None) -> bool:
    """Whether all heads see the same, as a kernel expects."""
    return seen is None or seen.shape[1] == 1


def _rows(mask: Tensor, part: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., part, :]


def _sparse_weights(
    q: Tensor,
    k: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    config: SagaConfig,
    scale: float,
    watch: Watch | None,
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q.to(wide), k.to(wide), scale)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    asked = Asked(
        q=q.detach(),
        k=k.detach(),
        scores=scores.detach(),
        visible=None if seen is None else seen.expand(-1, -1, q.shape[2], -1),
    )
    at = choose(asked, config)
    if watch is not None:
        watch(asked, at)
    return _softmax(scores, kept_mask(at, k.shape[2]), None)
