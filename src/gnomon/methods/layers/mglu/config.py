"""The settings of an MGLU layer, with the paper's defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gnomon.core.errors import UsageError, number, unknown
from gnomon.kernels.mglu.planes import MOST_MASKS
from gnomon.kernels.mglu.reference import canonical

MASKED = ("both", "gate", "value", "neither")


@dataclass(frozen=True, kw_only=True)
class MGLUConfig:
    """One layer's masks, activation and routing."""

    n_masks: int = 4
    """n_m, the number of masks and routes. The paper's best balance is 4."""
    hidden_act: str = "silu"
    """g: silu (SwiMGLU), gelu (GeMGLU), relu (ReMGLU), gelu_tanh, sigmoid or identity."""
    mask_init_std: float = 0.01
    """Standard deviation of the mask logits S at first; about half of a mask are ones."""
    top_k: int | None = None
    """Of the routed variant: how many routes a token takes. None sums all of them, without weights."""
    mask_weight_decay: float | None = None
    """Of the mask logits, for `param_groups`. None: that of the other matrices (the paper has one AdamW)."""
    learned: bool = True
    """False: the ablation in which masks stay as they were drawn."""
    masked: str = "both"
    """Ablations: "gate" masks W in the gate only, g(x(M*W)) * (xW); "value" in the value only; "neither" is one
    matrix shared by gate and value, with n_masks=1."""

    def __post_init__(self) -> None:
        require_masks(self.n_masks)
        canonical(self.hidden_act)
        if not 0 < number(self.mask_init_std) < math.inf:
            raise UsageError(
                f"mask_init_std={self.mask_init_std!r} must be positive and finite: all logits at 0 would make every "
                "mask 0. The paper's is 0.01."
            )
        if not isinstance(self.learned, bool):
            raise UsageError(f"learned={self.learned!r} must be True or False.")
        if self.masked not in MASKED:
            raise unknown("choice of what is masked", self.masked, MASKED)
        if self.masked == "neither" and self.n_masks != 1:
            raise UsageError(
                f"masked='neither' with n_masks={self.n_masks} would add up equal routes. Use n_masks=1."
            )
        whole = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        if self.top_k is not None and not (whole and 1 <= self.top_k <= self.n_masks):
            raise UsageError(f"top_k={self.top_k!r} routes can't be taken of n_masks={self.n_masks}.")
        if self.mask_weight_decay is not None and not 0 <= number(self.mask_weight_decay) < math.inf:
            raise UsageError(f"mask_weight_decay={self.mask_weight_decay!r} must be 0 or more, and finite.")


def require_masks(n_masks: Any) -> None:
    """Refuse a number of masks that makes no sense.

    Raises:
        UsageError: less than 1, or more than 16.
    """
    if isinstance(n_masks, bool) or not isinstance(n_masks, int) or not 1 <= n_masks <= MOST_MASKS:
        raise UsageError(
            f"n_masks={n_masks!r} must be a whole number from 1 to {MOST_MASKS}: with 16 masks on 16-bit weights "
            "nothing is saved against a GLU any more. The paper's default is 4."
        )
