"""Which masked positions a step fills, and with what.

Shapes: R rows, B tokens of a block, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gnomon.core.generation import inverse_cdf

from .config import BlockDiffusionConfig


def propose(
    logits: Float[Tensor, "R B V"], cfg: BlockDiffusionConfig, generator: torch.Generator | None = None
) -> tuple[Int[Tensor, "R B"], Float[Tensor, "R B"]]:
    """A token for every position, and the probability it was drawn with.

    At temperature 0 the likeliest token (the first of equals) and its probability at temperature 1.

    Args:
        generator: on the CPU, so that devices draw alike; None draws from the ambient random state.
    """
    if cfg.temperature == 0:
        tokens, scores = logits.argmax(-1), logits
    else:
        scores = logits / cfg.temperature
        rows, block, _ = logits.shape
        uniform = torch.rand(rows * block, dtype=torch.float64, generator=generator).to(logits.device)
        tokens = inverse_cdf(scores.flatten(0, 1), uniform).view(rows, block)
    confidence = scores.softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return tokens, confidence


def transfer(
    logits: Float[Tensor, "R B V"],
    masked: Bool[Tensor, "R B"],
    step: int,
    cfg: BlockDiffusionConfig,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "R B"], Bool[Tensor, "R B"]]:
    """Tokens, and the masked positions that take theirs in this step.

    Every strategy fills at least n_s positions (or all that are left), so a block ends within S steps.

    Args:
        step: from 1 to S.
    """
    tokens, confidence = propose(logits, cfg, generator)
    least = masked.sum(-1).clamp(max=cfg.schedule[step - 1])  # (R,)
    if cfg.strategy == "sequential":
        return tokens, masked & (masked.cumsum(-1) <= least[:, None])
    chosen = _first(confidence.masked_fill(~masked, -torch.inf), least) & masked
    if cfg.strategy == "dynamic":
        sure = masked & (confidence > cfg.threshold)
        chosen = torch.where((sure.sum(-1) >= least)[:, None], sure, chosen)
    if cfg.strategy == "entropy":
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1)
        count = bounded(entropy, masked, cfg.entropy_bound)
        count = torch.maximum(count, least)
        chosen = _first((-entropy).masked_fill(~masked, -torch.inf), count) & masked
    return tokens, chosen


def bounded(entropy: Float[Tensor, "R B"], masked: Bool[Tensor, "R B"], bound: float) -> Int[Tensor, " R"]:
    """Most masked positions, by rising entropy, whose Σ H − max H stays within the bound: 1 or more.

    The sum less its largest term bounds what independent draws lose against the joint distribution.
    """
    rising = entropy.masked_fill(~masked, torch.inf).sort(-1).values
    rest = torch.cat([torch.zeros_like(rising[:, :1]), rising[:, :-1].cumsum(-1)], -1)
    return ((rest <= bound) & rising.isfinite()).sum(-1)


def _first(score: Float[Tensor, "R B"], count: Int[Tensor, " R"]) -> Bool[Tensor, "R B"]:
    """The `count` highest scores of each row; of equals the leftmost."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(score.shape[-1], device=score.device).expand_as(order)
    )
    return rank < count[:, None]
