"""Which positions a query keeps: Atop-N's strided buckets and its alternatives behind one protocol.

A selector gets what there is to know about some query rows (:class:`Asked`) and returns positions, -1 where it keeps
fewer. None of them sees the future or padding: hidden keys score -inf before anything is chosen. Selection is not
differentiated.

    strided      bucket of position j is j mod cN; the best of each, then the N best of these (c = 1: all)
    exact        the N best
    threshold    those above a score found by bisection, so that at most N, and nearly N, survive
    quest        the pages whose bound Σ_f max(q_f · min_f, q_f · max_f) is largest, and the newest page
    shared_*     one strided choice per key head, by the largest or mean score of its query heads
    contiguous   the best of each of N runs of neighbours: what strided buckets are compared with
    window       the first a and the last N - a

Inferred: all of it, as the paper's Atop-N isn't known. Buckets are of slots in the cache, so that a choice is stable
from step to step; with padding on the left they are shifted against those of the unpadded text.

Shapes: B sequences, Hq, Hk query and key heads, T query rows, L positions, m kept ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from gnomon.kernels.sparse_decode.reference import bucket_count, keep, winners

from .config import SagaConfig

__all__ = ["BUILDERS", "Asked", "Selector", "choose", "exact", "select", "selector_of", "window"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Some query rows and the keys before them."""

    q: Float[Tensor, "B Hq T d"]
    k: Float[Tensor, "B Hk L d"]
    scores: Float[Tensor, "B Hq T L"]
    """-inf where a key isn't visible."""
    visible: Bool[Tensor, "_ _ T L"] | None
    """None: all are."""


@runtime_checkable
class Selector(Protocol):
    """Positions (B, Hq, T, m), m ≤ n, each at most once; -1 where fewer are kept."""

    def __call__(self, asked: Asked, n: int) -> Tensor: ...


def select(scores: Float[Tensor, "*rows L"], n: int, c: int = 1) -> Int[Tensor, "*rows n"]:
    """Atop-N: positions of the best score of each of n strided buckets; with c > 1 the n best of c n buckets.

    -1 where a bucket is empty; the lower position of equal scores.
    """
    return keep(*winners(scores, bucket_count(n, c, scores.shape[-1])), n)


def exact(scores: Float[Tensor, "*rows L"], n: int) -> Int[Tensor, "*rows n"]:
    """Positions of the n best scores, best first, the lower position of equal ones; -1 where fewer are visible."""
    kept = min(n, scores.shape[-1])
    best, at = scores.topk(kept, dim=-1)  # which of equal scores it takes is left open
    last = best[..., -1:]
    if bool(((scores >= last).sum(-1, keepdim=True) > kept).logical_and(last > -torch.inf).any()):
        at = scores.argsort(dim=-1, descending=True, stable=True)[..., :kept]
        best = scores.gather(-1, at)
    return _padded(at.masked_fill(best == -torch.inf, -1), n)


def _padded(at: Tensor, n: int) -> Tensor:
    return F.pad(at, (0, n - at.shape[-1]), value=-1)


def first_of(mask: Bool[Tensor, "*rows L"], n: int) -> Int[Tensor, "*rows n"]:
    """The first n positions at which a mask is set, in order; -1 where there are fewer."""
    length = mask.shape[-1]
    down = torch.arange(length, 0, -1, device=mask.device)
    found = torch.where(mask, down, 0).topk(min(n, length), dim=-1).values
    return _padded(torch.where(found > 0, length - found, -1), n)


@dataclass(frozen=True)
class Strided:
    """Atop-N."""

    oversample: int = 1

    def __call__(self, asked: Asked, n: int) -> Tensor:
        return select(asked.scores, n, self.oversample)


@dataclass(frozen=True)
class Exact:
    """The true top-N."""

    def __call__(self, asked: Asked, n: int) -> Tensor:
        return exact(asked.scores, n)


@dataclass(frozen=True)
class Threshold:
    """A bisection on the score; of more than N equal best scores those at the lowest positions."""

    steps: int = 24

    def __call__(self, asked: Asked, n: int) -> Tensor:
        scores = asked.scores
        seen = scores > -torch.inf
        top = scores.amax(-1, keepdim=True)
        low = scores.masked_fill(~seen, torch.inf).amin(-1, keepdim=True)
        high = torch.nextafter(top, torch.full_like(top, torch.inf))  # nobody survives it
        few = seen.sum(-1, keepdim=True) <= n
        for _ in range(self.steps):
            middle = low + (high - low) / 2
            fits = (scores >= middle).sum(-1, keepdim=True) <= n
            high, low = torch.where(fits, middle, high), torch.where(fits, low, middle)
        above = seen & (few | (scores >= high))
        none = ~above.any(-1, keepdim=True)
        return first_of(above | (none & seen & (scores == top)), n)


@dataclass(frozen=True)
class Quest:
    """Pages by the bound of Quest (Tang et al. 2024) over each page's smallest and largest keys per dimension.

    The page of the newest visible key is always kept. Pages of another size than N allows shrink to N.
    """

    page: int = 16

    def __call__(self, asked: Asked, n: int) -> Tensor:
        batch, heads, rows, length = asked.scores.shape
        page = min(self.page, n)
        pages = -(-length // page)
        seen = (asked.scores > -torch.inf).any(1, keepdim=True)  # (B, 1, T, L)
        seen = torch.unflatten(F.pad(seen, (0, pages * page - length)), -1, (pages, page))
        k = asked.k.to(asked.scores.dtype)
        k = torch.unflatten(F.pad(k, (0, 0, 0, pages * page - length)), 2, (pages, page))
        real = seen.any(2)[..., None]  # (B, 1, pages, page, 1): some row sees the key
        high = k.masked_fill(~real, -torch.inf).amax(3).nan_to_num(neginf=0.0)
        low = k.masked_fill(~real, torch.inf).amin(3).nan_to_num(posinf=0.0)
        q = asked.q.to(k.dtype).reshape(batch, k.shape[1], -1, k.shape[-1])
        bound = q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)
        some = seen.any(-1)  # (B, 1, T, pages)
        bound = bound.view(batch, heads, rows, pages).masked_fill(~some, -torch.inf)
        number = torch.arange(pages, device=k.device)
        newest = torch.where(some, number, -1).amax(-1, keepdim=True)
        best = exact(bound.masked_fill(number == newest, torch.inf).masked_fill(~some, -torch.inf), n // page)
        at = best[..., None] * page + torch.arange(page, device=k.device)
        at = at.masked_fill(best[..., None] < 0, length).flatten(-2).clamp(max=length)
        past = F.pad(asked.scores, (0, 1), value=-torch.inf)
        return at.masked_fill(past.gather(-1, at) == -torch.inf, -1)


@dataclass(frozen=True)
class Shared:
    """One strided choice for all query heads of a key head: the values of a group are gathered once."""

    pool: str
    oversample: int = 1

    def __call__(self, asked: Asked, n: int) -> Tensor:
        grouped = torch.unflatten(asked.scores, 1, (asked.k.shape[1], -1))
        pooled = grouped.amax(2) if self.pool == "max" else grouped.mean(2)
        at = select(pooled, n, self.oversample)
        return at[:, :, None].expand(-1, -1, grouped.shape[2], -1, -1).flatten(1, 2)


@dataclass(frozen=True)
class Contiguous:
    """The best of each of N runs of neighbouring positions."""

    def __call__(self, asked: Asked, n: int) -> Tensor:
        length = asked.scores.shape[-1]
        width = -(-length // n)
        padded = F.pad(asked.scores, (0, n * width - length), value=-torch.inf)
        best, at = torch.unflatten(padded, -1, (n, width)).max(-1)
        at = at + torch.arange(n, device=at.device) * width
        return at.masked_fill(best == -torch.inf, -1)


@dataclass(frozen=True)
class Window:
    """Nothing beyond what is kept anyway."""

    def __call__(self, asked: Asked, n: int) -> Tensor:
        return asked.scores.new_full((*asked.scores.shape[:-1], n), -1, dtype=torch.long)


BUILDERS: dict[str, Callable[[SagaConfig], Selector]] = {
    "strided": lambda config: Strided(config.oversample),
    "exact": lambda config: Exact(),
    "threshold": lambda config: Threshold(),
    "quest": lambda config: Quest(),
    "shared_max": lambda config: Shared("max", config.oversample),
    "shared_mean": lambda config: Shared("mean", config.oversample),
    "contiguous": lambda config: Contiguous(),
    "window": lambda config: Window(),
}
"""How each selector of `SELECTORS` but `dense` is made."""


def selector_of(config: SagaConfig) -> Selector:
    """The selector that a configuration names."""
    return BUILDERS[config.selector](config)


def window(config: SagaConfig) -> tuple[int, int]:
    """(a, w): the first and last visible positions that are kept whatever their scores."""
    first, last = config.always_keep
    return (first, config.top_n - first) if config.selector == "window" else (first, last)


@torch.no_grad()
def choose(asked: Asked, config: SagaConfig, selector: Selector | None = None) -> Int[Tensor, "B Hq T m"]:
    """Kept positions of some query rows: those that are always kept, then the selector's; at most N in all.

    Args:
        selector: of your own; by default the one that `config` names.
    """
    selector = selector or selector_of(config)
    first, last = window(config)
    if not first + last:
        return selector(asked, config.top_n)
    seen = asked.visible
    if seen is None:
        seen = torch.ones(1, 1, *asked.scores.shape[-2:], dtype=torch.bool, device=asked.scores.device)
    rank = seen.cumsum(-1)
    forced = seen & ((rank <= first) | (rank[..., -1:] - rank < last))
    fixed = first_of(forced, first + last).expand(*asked.scores.shape[:2], -1, -1)
    if first + last == config.top_n:
        return fixed
    rest = replace(asked, scores=asked.scores.masked_fill(forced, -torch.inf), visible=seen & ~forced)
    return torch.cat([fixed, selector(rest, config.top_n - first - last)], -1)
