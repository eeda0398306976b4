"""Settings of a block-diffusion language model and of its sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnomon.core.errors import UsageError, unknown

STRATEGIES = ("static", "dynamic", "sequential", "entropy")
"""Which masked positions a step fills: the most confident n_s, all above a threshold, the leftmost, or as many as
a bound on their joint entropy allows."""


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionConfig:
    """What a block is, how noise is drawn in training, and how a block is filled."""

    block_size: int
    """B, tokens of a block."""
    mask_token_id: int
    """m, the absorbing token; never predicted."""
    steps: int | None = None
    """S, the most denoising passes of a block; None is B, one token a step."""
    strategy: str = "dynamic"
    """One of `STRATEGIES`."""
    threshold: float = 0.9
    """τ of `dynamic`: every position with a higher confidence is filled."""
    entropy_bound: float = 0.1
    """γ of `entropy`, in nats: positions by rising entropy while Σ H − max H ≤ γ."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    token_shift: bool = False
    """The hidden state at i − 1 predicts token i, as in a causal model."""
    t_min: float = 1e-3
    """Least noise level in training; the loss weight is 1/t."""
    t_max: float = 1.0
    """Highest noise level in training; 1 makes all-masked blocks part of it."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UsageError(f"block_size={self.block_size} must be at least 1.")
        if self.mask_token_id < 0:
            raise UsageError(f"mask_token_id={self.mask_token_id} must be a token of the vocabulary.")
        if self.steps is not None and not 1 <= self.steps <= self.block_size:
            raise UsageError(
                f"steps={self.steps} must lie in [1, block_size={self.block_size}]: a step fills a token or more."
            )
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold={self.threshold} is a probability and must lie in [0, 1].")
        if not self.entropy_bound >= 0:
            raise UsageError(f"entropy_bound={self.entropy_bound} must be at least 0 nats.")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(
                f"temperature={self.temperature} must be finite and at least 0 (0 takes the likeliest token)."
            )
        if not 0 < self.t_min <= self.t_max <= 1:
            raise UsageError(
                f"t_min={self.t_min} and t_max={self.t_max} must satisfy 0 < t_min <= t_max <= 1: the weight is 1/t."
            )

    @property
    def schedule(self) -> tuple[int, ...]:
        """n_s: positions that step s fills at least, ⌊B/S⌋ and one more in the first B mod S steps.

        >>> BlockDiffusionConfig(block_size=32, mask_token_id=0, steps=12).schedule
        (3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2)
        """
        steps = self.block_size if self.steps is None else self.steps
        least, more = divmod(self.block_size, steps)
        return tuple(least + (s < more) for s in range(steps))
