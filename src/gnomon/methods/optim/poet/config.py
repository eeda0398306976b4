"""Settings of POET, the four initialisations of the frozen weight, and how many numbers are trained."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import UsageError, number, unknown

from .cayley import Terms

VARIANTS = ("bs", "fs")
INITS = ("normalized", "standard", "xavier", "uniform_spectrum", "keep")
FORWARDS = ("weight", "input", "input_ckpt")
ON_INDIVISIBLE = ("error", "skip")
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class POETConfig:
    """Settings with the paper's defaults."""

    variant: Literal["bs", "fs"] = "bs"
    """Block-stochastic: all coordinates move, in blocks. Fully stochastic: one random set of coordinates does."""
    block_size: int = 256
    """b of "bs"; must divide both sides of each matrix."""
    fraction: float = 0.5
    """Of "fs": b is this share of each side, rounded down."""
    neumann_terms: int | Literal["exact"] = 3
    """k of the Cayley-Neumann form. Even ones keep the spectrum better than odd ones; "exact" keeps it."""
    merge_interval: int = 400
    """T_m, optimizer steps from one merge to the next."""
    init: Literal["normalized", "standard", "xavier", "uniform_spectrum", "keep"] = "normalized"
    """Of the frozen weight. All but "keep" draw it anew: fine-tuning needs "keep"."""
    target_modules: tuple[str, ...] | None = None
    """Names, their ends or patterns of linear layers; None takes all inside the decoder layers."""
    exclude_modules: tuple[str, ...] = ("lm_head",)
    """The same of layers to leave as they are."""
    forward: Literal["weight", "input", "input_ckpt"] = "weight"
    """Form W_eff in each pass, or (POET-X) rotate the activations, keeping them or only the input for the backward."""
    lr_scale: float = 1.0
    """Multiplies the rotations' learning rate; POET-X has .5."""
    clip_ramp_steps: int = 10
    """Steps after a merge in which the clipping threshold rises from a tenth to its whole."""
    on_indivisible: Literal["error", "skip"] = "error"
    """What to do with a matrix whose sides b doesn't divide, or exceeds; a skipped one stays an ordinary layer."""
    seed: int = 0
    """Of initial weights and of all permutations, which depend on it, the merge and the layer alone."""

    def __post_init__(self) -> None:
        for name, known in (
            ("variant", VARIANTS),
            ("init", INITS),
            ("forward", FORWARDS),
            ("on_indivisible", ON_INDIVISIBLE),
        ):
            if getattr(self, name) not in known:
                raise unknown(name, str(getattr(self, name)), known)
        if not _whole(self.block_size) or self.block_size < 2:
            raise UsageError(
                f"block_size={self.block_size} must be a whole number, at least 2: a 1 x 1 rotation is the number 1 "
                "and trains nothing."
            )
        if not 0 < number(self.fraction) <= 1:  # written this way round so that NaN is refused too
            raise UsageError(
                f"fraction={self.fraction!r} must lie in (0, 1]: it is the share of coordinates that a rotation moves."
            )
        if self.neumann_terms != "exact" and (not _whole(self.neumann_terms) or self.neumann_terms < 1):
            raise UsageError(
                f"neumann_terms={self.neumann_terms} must be a whole number, at least 1, or 'exact'. It counts "
                "the powers Q, …, Q^k; without any, I + Q stretches with every step and training diverges."
            )
        if not _whole(self.merge_interval) or self.merge_interval < 1:
            raise UsageError(
                f"merge_interval={self.merge_interval} must be a whole number of steps, at least 1. For a run without "
                "merges give its number of steps or more."
            )
        if not _whole(self.clip_ramp_steps) or self.clip_ramp_steps < 0:
            raise UsageError(
                f"clip_ramp_steps={self.clip_ramp_steps} must be a whole number of steps, 0 for none."
            )
        if not 0 < number(self.lr_scale) < math.inf:
            raise UsageError(f"lr_scale={self.lr_scale!r} must be positive and finite.")
        if not _whole(self.seed) or not 0 <= self.seed < 2**32:
            raise UsageError(f"seed={self.seed} must be a whole number in [0, 2**32).")
        for name in ("target_modules", "exclude_modules"):
            names = getattr(self, name)
            if isinstance(names, str):
                raise UsageError(f"{name}={names!r} must be a tuple of names, such as ({names!r},).")
            if names is None and name == "target_modules":
                continue
            if not isinstance(names, Collection) or not all(isinstance(one, str) for one in names):
                raise UsageError(
                    f"{name}={names!r} must be a tuple of names, such as ('q_proj',); () is none."
                )

    @property
    def terms(self) -> Terms:
        return self.neumann_terms


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def blocks_of(d: int, cfg: POETConfig) -> tuple[int, int]:
    """(n, b) of a side of width d.

    Raises:
        UsageError: b doesn't fit.
    """
    if cfg.variant == "fs":
        b = math.floor(cfg.fraction * d + 1e-9)  # 1/3 of 12 is 4 in floating point, too
        if b < 2:
            raise UsageError(
                f"fraction={cfg.fraction:g} of a side of {d} is {b} coordinates, but a rotation needs 2. Use at least "
                f"{2 / d:.3g}, or exclude the layer."
            )
        return 1, b
    b = cfg.block_size
    if b > d or d % b:
        fitting = [str(c) for c in range(2, min(d, 512) + 1) if d % c == 0][-6:]
        raise UsageError(
            f"block_size={b} {'exceeds' if b > d else 'does not divide'} a side of {d}. Of sizes up to 512, "
            f"{', '.join(fitting) or 'none'} divide it; or set variant='fs', exclude the layer, or "
            "on_indivisible='skip', which leaves it an ordinary trainable layer."
        )
    return d // b, b


def rotation_numbers(rows: int, columns: int, cfg: POETConfig) -> int:
    """Trained numbers of one matrix: ½ Σ n b(b − 1) over its two sides."""
    return sum(n * b * (b - 1) // 2 for n, b in (blocks_of(rows, cfg), blocks_of(columns, cfg)))


def initial_weight(
    w: Float[Tensor, "o i"], init: str, generator: torch.Generator | None
) -> Float[Tensor, "o i"]:
    """The frozen weight W₀ in place of `w`, drawn in float32 or better.

    normalized: Gaussian, each row (a neuron's weights) of length 1; standard: N(0, .02²); xavier: Gaussian with
    variance 2 / (rows + columns); uniform_spectrum: a Gaussian whose singular values are all set to 1; keep: `w`.
    """
    if init == "keep":
        return w
    if w.is_meta:
        return torch.empty_like(w)
    wide = torch.promote_types(w.dtype, torch.float32)
    device = generator.device if generator is not None else w.device
    g = torch.randn(w.shape, generator=generator, dtype=wide, device=device)
    if init == "normalized":
        g = g / g.norm(dim=1, keepdim=True)
    elif init == "standard":
        g = g * STANDARD_DEVIATION
    elif init == "xavier":
        g = g * math.sqrt(2 / sum(w.shape))
    else:
        u, _, vh = torch.linalg.svd(g, full_matrices=False)
        g = u @ vh
    return g.to(dtype=w.dtype, device=w.device)
