"""Settings of the controller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gnomon.core.errors import UsageError, number, unknown

__all__ = ["ContextMode", "DeadlineModel", "PaceConfig", "Utility"]

Utility = Literal["linear", "concave", "priority"]
ContextMode = Literal["raw", "dedup"]
DeadlineModel = Literal["request", "row", "accumulated"]


@dataclass(frozen=True, kw_only=True)
class PaceConfig:
    """What a step may cost, and what a branch is worth."""

    rho: float = 0.8
    """Share of the slack that branches may use, in (0, 1] (the repository's; a port to vLLM has 1)."""
    tpot_slo_s: float = 0.05
    """Service level objective of the time per output token, in seconds (the repository's)."""
    ttft_slo_s: float = 1.0
    """Deadline of the first token after arrival, in seconds (inferred)."""
    utility: Utility = "linear"
    """Of k extra branches: k, log(1 + k), or k times the request's priority."""
    context_mode: ContextMode = "raw"
    """Whether each row counts its whole context, or a shared prefix counts once a request."""
    deadline_model: DeadlineModel = "request"
    """Where deadlines come from (`deadlines`)."""

    def __post_init__(self) -> None:
        if not 0 < number(self.rho) <= 1:
            raise UsageError(
                f"PaceConfig: rho={self.rho} must lie in (0, 1]. Policy 'off' is what rho=0 would be."
            )
        for name in ("tpot_slo_s", "ttft_slo_s"):
            if not 0 < number(getattr(self, name)) <= math.inf:
                raise UsageError(f"PaceConfig: {name}={getattr(self, name)} must be > 0 seconds.")
        for name, kinds in (
            ("utility", Utility),
            ("context_mode", ContextMode),
            ("deadline_model", DeadlineModel),
        ):
            if getattr(self, name) not in get_args(kinds):
                raise unknown(f"PaceConfig.{name}", getattr(self, name), get_args(kinds))
