"""One decoding step of Atop-N attention in plain torch: what a faster path has to equal.

    s_ij = scale · q_i · k_{κ(i), j}                    all cached keys, sums in float32
    winners: of each bucket (j mod cN) the best score and its position; the lower position of equal ones
    keep:    of the cN winners the N best (all of them where c = 1)
    o_i = Σ_{j kept} softmax_j(s_ij) v_{ν(i), j}        N rows of values per query head are read

A kernel reads K once for all query heads of a key head. It may cut the positions into chunks whose length is a
multiple of the number of buckets, make the winners of each (`winners` with `first`) and join them (`join`, which is
associative), so that nothing of length L is ever written. It skips a run of positions of which `visible` shows none:
a cache of fixed size is mostly empty.

Here:  these pieces and `decode`, which is made of them.
Not here: other ways to select, many query rows at once, gradients (`methods/layers/saga`).
Source: the SAGA card, "Atop-N" and "CPU decode kernel" (inferred from the abstract).
Limits: a score that is NaN wins its bucket. Scores that differ in their last bits may be ranked otherwise by a kernel
        that sums in another order; kept mass, not positions, is what such a kernel has to reproduce.

Shapes: B sequences, Hq, Hk, Hv query, key and value heads, L cached positions, d head dimension, n kept positions.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["attend", "bucket_count", "decode", "join", "keep", "scores", "winners"]

EMPTY = -1
"""Position of a bucket that no visible key fell into."""


def scores(
    q: Float[Tensor, "B Hq d"],
    k: Float[Tensor, "B Hk L d"],
    scale: float,
    visible: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B Hq L"]:
    """Scaled scores in float32 (float64 for such q), -inf where a key isn't visible."""
    batch, heads, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], width).to(wide)
    found = (grouped @ k.to(wide).transpose(-1, -2)).reshape(batch, heads, k.shape[2]) * scale
    return found if visible is None else found.masked_fill(~visible[:, None], -torch.inf)


def bucket_count(n: int, oversample: int, length: int) -> int:
    """Buckets that make a difference: where there is one per position, more of them change nothing."""
    return min(n * oversample, max(n, length))


def winners(
    scores: Float[Tensor, "*rows L"], buckets: int, first: int = 0
) -> tuple[Float[Tensor, "*rows buckets"], Int[Tensor, "*rows buckets"]]:
    """(best score, its position) of each bucket; (-inf, -1) where a bucket has none.

    Args:
        first: position of the first score, a multiple of `buckets`.
    """
    length = scores.shape[-1]
    rows = -(-length // buckets)
    padded = torch.nn.functional.pad(scores, (0, rows * buckets - length), value=-torch.inf)
    best, row = torch.unflatten(padded, -1, (rows, buckets)).max(
        -2
    )  # the first of equal ones: the lower position
    at = first + row * buckets + torch.arange(buckets, device=scores.device)
    return best, at.masked_fill(best == -torch.inf, EMPTY)


def join(
    best: Float[Tensor, "*rows m"],
    at: Int[Tensor, "*rows m"],
    other_best: Float[Tensor, "*rows m"],
    other_at: Int[Tensor, "*rows m"],
) -> tuple[Float[Tensor, "*rows m"], Int[Tensor, "*rows m"]]:
    """The winners of two runs of positions, of which `other` comes later."""
    later = other_best > best
    return torch.where(later, other_best, best), torch.where(later, other_at, at)


def keep(best: Float[Tensor, "*rows m"], at: Int[Tensor, "*rows m"], n: int) -> Int[Tensor, "*rows n"]:
    """Positions of the n best winners, the lower position of equal ones; -1 where there are fewer."""
    if at.shape[-1] == n:
        return at
    order = at.masked_fill(at < 0, torch.iinfo(at.dtype).max).argsort(
        -1
    )  # by position, so that ties fall right
    best, at = best.gather(-1, order), at.gather(-1, order)
    order = best.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return at.gather(-1, order)


def attend(
    scores: Float[Tensor, "B Hq L"], at: Int[Tensor, "B Hq n"], v: Float[Tensor, "B Hv L d"]
) -> Float[Tensor, "B Hq d"]:
    """Softmax over the kept scores and the sum of the gathered values, in the dtype of the scores.

    A query without any kept position gets 0.
    """
    batch, heads, kept = at.shape
    held, width = v.shape[1], v.shape[-1]
    live, safe = at >= 0, at.clamp(min=0)
    chosen = scores.gather(-1, safe).masked_fill(~live, -torch.inf)
    p = torch.softmax(chosen, -1).masked_fill(
        ~live, 0
    )  # rows of -inf alone give NaN, which this removes, too
    index = safe.reshape(batch, held, -1, 1).expand(-1, -1, -1, width)
    rows = v.gather(2, index).view(batch, heads, kept, width).to(p.dtype)
    return (p[..., None, :] @ rows).squeeze(-2)


def decode(
    q: Float[Tensor, "B Hq d"],
    k: Float[Tensor, "B Hk L d"],
    v: Float[Tensor, "B Hv L d"],
    n: int,
    oversample: int,
    scale: float,
    visible: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B Hq d"], Int[Tensor, "B Hq n"]]:
    """(output in the dtype of q, kept positions)."""
    found = scores(q, k, scale, visible)
    at = keep(*winners(found, bucket_count(n, oversample, k.shape[2])), n)
    return attend(found, at, v).to(q.dtype), at
