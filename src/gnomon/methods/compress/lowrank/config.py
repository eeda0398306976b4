"""Settings of the pipelines, one dataclass each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gnomon.core.errors import UsageError, unknown

RANKS = ("floor", "fit")
"""How a uniform share becomes ranks: ⌊κ m n / (m + n)⌋, or `fit_ranks`, which comes nearer to it."""


def _require_ranks(value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown("choice of ranks", value, known)


def _require_device(value: str | None) -> None:
    if value is not None and not value:
        raise UsageError("device='' is no device. Use None for the layers' own.")


@dataclass(frozen=True, kw_only=True)
class SVDConfig:
    """Plain SVD; nothing to calibrate."""

    ranks: str = "floor"
    """One of `RANKS`."""

    def __post_init__(self) -> None:
        _require_ranks(self.ranks, RANKS)


@dataclass(frozen=True, kw_only=True)
class ASVDConfig:
    """Activation-aware SVD."""

    alpha: float = 0.5
    """Exponent of the inputs' magnitude."""
    magnitude: str = "mean"
    """"mean" |x_j| or "max" |x_j|."""
    eps: float = 1e-6
    """Added to every scale."""
    ranks: str = "sensitivity"
    """"sensitivity" searches a share for each layer; or one of `RANKS`."""
    candidates: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares the search tries on each layer; it can't keep less than the smallest everywhere."""
    samples: int = 32
    """Sequences of the calibration text on which the search measures; all of it scales the inputs."""

    def __post_init__(self) -> None:
        _require_ranks(self.ranks, ("sensitivity", *RANKS))
        if self.magnitude not in ("mean", "max"):
            raise unknown("magnitude", self.magnitude, ("mean", "max"))
        if not 0 <= self.alpha < math.inf or not 0 < self.eps < math.inf:
            raise UsageError(
                f"alpha={self.alpha} must be at least 0 and eps={self.eps} positive, both finite."
            )
        if not self.candidates or not all(0 < share < 1 for share in self.candidates):
            raise UsageError(f"candidates={self.candidates} must be shares between 0 and 1, at least one.")
        if self.samples < 1:
            raise UsageError(f"samples={self.samples} must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class LoraUpdate:
    """SVD-LLM's second step: an adapter on every A, merged, then one on every B, merged."""

    r: int = 8
    """Rank of the adapters, capped at a factor's smaller side."""
    alpha: float = 16.0
    """Their product is multiplied by alpha / r (inferred: LoRA's usual 2)."""
    lr: float = 1e-4
    """AdamW's rate, falling linearly to zero in each of the two rounds."""
    epochs: int = 2
    """Passes over the batches in each round."""
    seed: int = 0
    """Of the adapters' start and the batches' order."""

    def __post_init__(self) -> None:
        if self.r < 1 or self.epochs < 1 or self.seed < 0:
            raise UsageError(
                f"r={self.r} and epochs={self.epochs} must be at least 1, seed={self.seed} at least 0."
            )
        if not 0 < self.lr < math.inf or not 0 < self.alpha < math.inf:
            raise UsageError(f"lr={self.lr} and alpha={self.alpha} must be positive and finite.")


@dataclass(frozen=True, kw_only=True)
class SVDLLMConfig:
    """SVD-LLM: whitening, and the low-rank update when the method is "svd_llm_lora"."""

    ranks: str = "floor"
    """One of `RANKS`."""
    device: str | None = None
    """Where the Gram matrices lie between batches, such as "cpu"; None: beside their layers."""
    update: LoraUpdate = field(default_factory=LoraUpdate)
    """For "svd_llm_lora" only."""

    def __post_init__(self) -> None:
        _require_ranks(self.ranks, RANKS)
        _require_device(self.device)


@dataclass(frozen=True, kw_only=True)
class DobiConfig:
    """Dobi-SVD; :meth:`small` has settings for models of a few layers."""

    beta: float = 10.0
    """Steepness of the gate: its gradient reaches about 2/β directions to either side of γ."""
    lr: tuple[float, float] = (5.0, 4.0)
    """Adam's first and last rate, in directions a step; linear in between (inferred)."""
    epochs: int = 20
    """Passes over the samples."""
    samples: int = 256
    """Sequences of the calibration text that are used."""
    share_weight: float = 1.0
    """λ of |ratio − target| (not stated: inferred). What a share is worth in nats: far above it all positions move
    together, far below it the share drifts, which the whole ranks then make good in proportion."""
    range_weight: float = 1.0
    """Weight of Σ max(0, γ − q) + max(0, 1 − γ) (inferred)."""

    def __post_init__(self) -> None:
        for name in ("beta", "share_weight", "range_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)} must be positive and finite.")
        if len(self.lr) != 2 or not all(0 < rate < math.inf for rate in self.lr):
            raise UsageError(f"lr={self.lr} must be two positive rates, the first and the last.")
        if self.epochs < 1 or self.samples < 1:
            raise UsageError(f"epochs={self.epochs} and samples={self.samples} must be at least 1.")

    @classmethod
    def small(cls, **changes: Any) -> DobiConfig:
        """For models whose layers have tens of directions, and few steps: a wide gate and small, falling steps."""
        settings: dict[str, Any] = {"beta": 0.5, "lr": (3.0, 0.3), "epochs": 10, "samples": 64}
        return cls(**(settings | changes))
