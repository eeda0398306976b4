r"""Attention of one block of queries over a long prefix, in plain torch: what every faster path has to equal.

    P = softmax(scaling · q [K; K']ᵀ)        over the prefix keys K and the block's own keys K'
    ᾱ_j = mean of P_{g,b,j} over the heads g of a group and the block's queries b
    out = softmax(scaling · q [K[S]; K']ᵀ) [V[S]; V'],    S one set for each row and key head

Here:  importance, index sets, gather, sparse and exact block attention; sums in float32 (float64 for such inputs).
Not here: policies that say when and how sets are chosen (`methods/layers/mage`); C++ and Triton.
Source: the MAGE card, "Method".
Shapes: R rows, H key heads, G query heads each, B queries of the block, N prefix keys, d head dim, k chosen keys.
    Query head h·G + g belongs to key head h, as in Transformers.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.errors import UsageError, unknown

__all__ = [
    "NORMALISE",
    "block_attention",
    "block_decode",
    "exact_with_importance",
    "gather",
    "importance",
    "mean_over_queries",
    "query_importance",
    "top_sets",
]

NORMALISE = ("row", "prefix")
"""What a query's weights on the prefix sum up to 1 with: the block's keys too, or nothing else."""

CHUNK = 8192
"""Keys that are widened at a time."""


def query_importance(
    q: Float[Tensor, "R Hq B d"],
    keys: Float[Tensor, "R H N d"],
    block_keys: Float[Tensor, "R H B d"],
    *,
    scaling: float,
    normalise: str = "row",
    softcap: float | None = None,
) -> Float[Tensor, "R H B N"]:
    """Softmax weight of every prefix key for every query of the block, averaged over the heads of a group.

    Holds R·H·B·N numbers; the heads of a group are added up one after another.

    Args:
        scaling: factor of the scores, usually d ** -0.5.
        normalise: one of `NORMALISE`.
        softcap: c, where a model's scores are c · tanh(score / c).

    Raises:
        UsageError: query heads that aren't a multiple of the key heads; an unknown `normalise`.
    """
    if normalise not in NORMALISE:
        raise unknown("normalise", normalise, NORMALISE)
    grouped = _grouped(q, keys.shape[1])
    wide, n = grouped.dtype, keys.shape[2]
    total = torch.zeros(*grouped.shape[:2], grouped.shape[3], n, dtype=wide, device=q.device)
    block = block_keys.to(wide).transpose(-1, -2)
    for g in range(grouped.shape[2]):
        one = grouped[:, :, g] * scaling
        scores = torch.empty_like(total)
        for first in range(0, n, CHUNK):
            part = keys[:, :, first : first + CHUNK].to(wide)
            scores[..., first : first + CHUNK] = one @ part.transpose(-1, -2)
        scores = _capped(scores, softcap)
        norm = scores.logsumexp(-1, keepdim=True)
        if normalise == "row":
            norm = torch.logaddexp(norm, _capped(one @ block, softcap).logsumexp(-1, keepdim=True))
        total += (scores - norm).exp()
    return total / grouped.shape[2]


def mean_over_queries(
    x: Float[Tensor, "R H B *rest"], queries: Bool[Tensor, "R B"] | None
) -> Float[Tensor, "R H *rest"]:
    """Mean over the block's queries that count; over all in a row where none does, or without `queries`."""
    if queries is None:
        return x.mean(2)
    queries = queries.to(x.device)  # layers of a large model may lie on other devices than its tokens
    counted = torch.where(queries.any(-1, keepdim=True), queries, torch.ones_like(queries))
    weights = counted.to(x.dtype) / counted.sum(-1, keepdim=True).to(x.dtype)  # (R, B)
    shape = (weights.shape[0], 1, weights.shape[1], *[1] * (x.ndim - 3))
    return (x * weights.view(shape)).sum(2)


def importance(
    q: Float[Tensor, "R Hq B d"],
    keys: Float[Tensor, "R H N d"],
    block_keys: Float[Tensor, "R H B d"],
    *,
    scaling: float,
    queries: Bool[Tensor, "R B"] | None = None,
    normalise: str = "row",
    softcap: float | None = None,
) -> Float[Tensor, "R H N"]:
    """ᾱ: :func:`query_importance` averaged over the queries that count (all by default)."""
    each = query_importance(q, keys, block_keys, scaling=scaling, normalise=normalise, softcap=softcap)
    return mean_over_queries(each, queries)


def top_sets(scores: Float[Tensor, "*rest N"], k: int) -> Int[Tensor, "*rest k"]:
    """Indices of the min(k, N) largest scores, ascending; of equal scores the first ones.

    Raises:
        UsageError: k < 1.
    """
    if k < 1:
        raise UsageError(f"k={k} would read no token of the prefix. Use 1 or more.")
    n = scores.shape[-1]
    if k >= n:
        return torch.arange(n, device=scores.device).expand(scores.shape)
    least = scores.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    if bool(least.isnan().any()) or bool(scores.isnan().any()):  # the largest of all, as torch sorts them
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., :k].sort(-1).values
    # topk breaks ties as it likes, so only its least value is used: all above it, and the first ones equal to it.
    above, equal = scores > least, scores == least
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, -1].view(*scores.shape[:-1], k)


def gather(x: Float[Tensor, "R H N d"], idx: Int[Tensor, "R H k"]) -> Float[Tensor, "R H k d"]:
    """The rows of a cache that each key head's set names, in the set's order."""
    return x.gather(2, idx[..., None].expand(-1, -1, -1, x.shape[-1]))


def block_attention(
    q: Float[Tensor, "R Hq B d"],
    keys: Float[Tensor, "R H M d"],
    values: Float[Tensor, "R H M e"],
    *,
    scaling: float,
    softcap: float | None = None,
) -> Float[Tensor, "R Hq B e"]:
    """Every query over all keys, without a mask; in the dtype of q."""
    grouped = _grouped(q, keys.shape[1])
    wide = grouped.dtype
    scores = _capped((grouped * scaling) @ keys.to(wide).transpose(-1, -2)[:, :, None], softcap)
    out = scores.softmax(-1) @ values.to(wide)[:, :, None]
    return out.flatten(1, 2).to(q.dtype)


def block_decode(
    q: Float[Tensor, "R Hq B d"],
    keys: Float[Tensor, "R H N d"],
    values: Float[Tensor, "R H N e"],
    block_keys: Float[Tensor, "R H B d"],
    block_values: Float[Tensor, "R H B e"],
    idx: Int[Tensor, "R H k"] | None,
    *,
    scaling: float,
    softcap: float | None = None,
) -> Float[Tensor, "R Hq B e"]:
    """Attention over [K[S]; K'], S = idx for each row and key head; None reads the whole prefix."""
    if idx is not None:
        keys, values = gather(keys, idx), gather(values, idx)
    return block_attention(
        q,
        torch.cat([keys, block_keys], 2),
        torch.cat([values, block_values], 2),
        scaling=scaling,
        softcap=softcap,
    )


def exact_with_importance(
    q: Float[Tensor, "R Hq B d"],
    keys: Float[Tensor, "R H N d"],
    values: Float[Tensor, "R H N e"],
    block_keys: Float[Tensor, "R H B d"],
    block_values: Float[Tensor, "R H B e"],
    *,
    scaling: float,
    queries: Bool[Tensor, "R B"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "R Hq B e"], Float[Tensor, "R H N"]]:
    """What the first step of a block computes: exact attention and ᾱ. A kernel reads each key once for both."""
    out = block_decode(q, keys, values, block_keys, block_values, None, scaling=scaling, softcap=softcap)
    mass = importance(q, keys, block_keys, scaling=scaling, queries=queries, softcap=softcap)
    return out, mass


def _grouped(q: Tensor, heads: int) -> Float[Tensor, "R H G B d"]:
    """Query heads by key head, widened."""
    if q.shape[1] % heads:
        raise UsageError(
            f"{q.shape[1]} query heads can't be shared out among {heads} key heads: give a multiple."
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, _, block, width = q.shape
    return q.to(wide).reshape(rows, heads, -1, block, width)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
