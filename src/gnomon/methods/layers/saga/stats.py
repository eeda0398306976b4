"""How good a choice of positions is: kept probability mass, and recall against the exact top-N, per layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.core.errors import UsageError

from .model import attentions, saga_config
from .select import Asked, exact

__all__ = ["LayerSelection", "kept_mass", "recall", "selection_stats"]


def kept_mass(scores: Float[Tensor, "*rows L"], at: Int[Tensor, "*rows m"]) -> Float[Tensor, "*rows"]:
    """Σ_{j ∈ I} softmax(s)_j, the probability that dense attention gives to the kept positions."""
    p = torch.softmax(scores, -1)
    return p.gather(-1, at.clamp(min=0)).masked_fill(at < 0, 0).sum(-1)


def recall(scores: Float[Tensor, "*rows L"], at: Int[Tensor, "*rows m"], n: int) -> Float[Tensor, "*rows"]:
    """Share of the exact top-N (or of all visible positions, where they are fewer) among the kept ones."""
    best = exact(scores, n)
    room = torch.zeros(*at.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool, device=at.device)
    room = room.scatter(-1, at.masked_fill(at < 0, scores.shape[-1]), True)
    hit = room.gather(-1, best.clamp(min=0)) & (best >= 0)
    return hit.sum(-1) / (best >= 0).sum(-1).clamp(min=1)


@dataclass
class LayerSelection:
    """Sums over the query rows of one layer, all heads."""

    rows: int = 0
    mass_sum: float = 0.0
    recall_sum: float = 0.0
    kept_sum: int = 0

    @property
    def mass(self) -> float:
        """Mean kept mass."""
        return self.mass_sum / max(self.rows, 1)

    @property
    def recall(self) -> float:
        """Mean recall against the exact top-N."""
        return self.recall_sum / max(self.rows, 1)

    @property
    def kept(self) -> float:
        """Mean number of kept positions."""
        return self.kept_sum / max(self.rows, 1)


@contextmanager
def selection_stats(model: nn.Module, *, skip: int = 0) -> Iterator[dict[int, LayerSelection]]:
    """Statistics of every choice that a SAGA model makes inside the block, by depth of the layer.

    Layers that are dense, and prompts without `sparse_prefill`, choose nothing and so aren't counted. It costs a full
    softmax and an exact top-N per row.

    Args:
        skip: leave out rows that see at most so many positions, such as the first half of a text.

    Raises:
        UsageError: no SAGA model; statistics that are being taken already.
    """
    n = saga_config(model).top_n
    found: dict[int, LayerSelection] = {}
    modules = attentions(model)
    if any(getattr(attn, "saga_watch", None) is not None for attn in modules):
        raise UsageError("Statistics of this model are being taken already. Leave the outer block first.")

    def watch(depth: int) -> object:
        def add(asked: Asked, at: Tensor) -> None:
            seen = (asked.scores > -torch.inf).sum(-1)
            counts = seen > skip
            if not bool(counts.any()):
                return
            one = found.setdefault(depth, LayerSelection())
            one.rows += int(counts.sum())
            one.mass_sum += float(kept_mass(asked.scores, at)[counts].double().sum())
            one.recall_sum += float(recall(asked.scores, at, n)[counts].double().sum())
            one.kept_sum += int((at >= 0).sum(-1)[counts].sum())

        return add

    for depth, attn in enumerate(modules):
        attn.saga_watch = watch(depth)
    try:
        yield found
    finally:
        for attn in modules:
            attn.saga_watch = None
