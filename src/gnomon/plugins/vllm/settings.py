"""What the environment asks for: `GNOMON_VLLM=tail_lru,pace`, and the rest as JSON in `GNOMON_VLLM_SETTINGS`.

An environment variable reaches all processes of an engine, whoever starts them; a command line option would not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gnomon.core.errors import UsageError, number, unknown

from . import POLICIES

SETTINGS = "GNOMON_VLLM_SETTINGS"
"""Environment variable: a JSON object with fields of :class:`Settings`."""

CACHE_POLICIES = ("lru", "tail_lru")
BRANCH_POLICIES = ("eager", "off", "cap", "pace")

__all__ = ["BRANCH_POLICIES", "CACHE_POLICIES", "SETTINGS", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Policies and their numbers."""

    cache_policy: str = "lru"
    """`lru` is vLLM's order, run through the same code; `tail_lru` evicts what cannot hurt the tail first."""
    branch_policy: str = "eager"
    """`eager` runs all branches, as vLLM does; `off` one of each group, `cap:N` at most N, `pace` by slack."""
    slo_ms: float = 200.0
    """Objective of the time to first token. T-LRU derives ξ from it and from the prefill times it sees."""
    margin: float = 0.75
    """ξ as a share of the objective: a trimmed turn whose prompt is longer than Q̂ lands just over ξ."""
    xi_tokens: int | None = None
    """ξ in tokens, instead of deriving it."""
    qhat_tokens: int = 200
    """Q̂, the next prompt's expected length in tokens (the pull request to vLLM's default)."""
    tpot_ms: float = 50.0
    """Pace's objective of the time per output token (its repository's default)."""
    rho: float = 0.8
    """Share of the slack that branches may use, in (0, 1]."""
    deadline_model: str = "request"
    """Pace's deadlines: `request`, `accumulated` or `row`."""
    min_samples: int = 32
    """Decoding steps that Pace observes before it plans; until then all branches run."""
    refit_every_s: float = 60.0
    """Pace's predictor is fitted anew that often."""
    max_body_bytes: int = 16 * 2**20
    """Largest body of a request to the server that `gnomon serve` starts."""

    def __post_init__(self) -> None:
        if self.cache_policy not in CACHE_POLICIES:
            raise unknown("cache policy", self.cache_policy, CACHE_POLICIES)
        kind, _, width = str(self.branch_policy).partition(":")
        if kind not in BRANCH_POLICIES:
            raise unknown("branch policy", self.branch_policy, BRANCH_POLICIES)
        if kind == "cap" and not (width.isdecimal() and int(width) >= 1):
            raise UsageError(
                f"Branch policy {self.branch_policy!r} needs its number of branches. Say cap:2 for two."
            )
        if kind != "cap" and width:
            raise UsageError(f"Branch policy {kind!r} takes no number, got {self.branch_policy!r}.")
        for name in ("slo_ms", "tpot_ms"):
            if not 0 < number(getattr(self, name)) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r} must be a positive number of milliseconds.")
        for name in ("margin", "rho"):
            if not 0 < number(getattr(self, name)) <= 1:
                raise UsageError(f"{name}={getattr(self, name)!r} must lie in (0, 1].")
        for name, low in (
            ("xi_tokens", 0),
            ("qhat_tokens", 0),
            ("min_samples", 1),
            ("max_body_bytes", 1024),
        ):
            value = getattr(self, name)
            if name == "xi_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UsageError(f"{name}={value!r} must be a whole number ≥ {low}.")
        if not 0 <= number(self.refit_every_s) < math.inf:
            raise UsageError(f"refit_every_s={self.refit_every_s!r} must be seconds ≥ 0.")
        if self.deadline_model not in ("request", "accumulated", "row"):
            raise unknown("deadline model", self.deadline_model, ("request", "accumulated", "row"))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read both variables.

        Raises:
            UsageError: an unknown policy or setting (with the nearest known one), two policies of one kind, or text
                that is no JSON object.
        """
        found = os.environ if environment is None else environment
        given = _object(found.get(SETTINGS, ""))
        for name in filter(None, (name.strip() for name in found.get(POLICIES, "").split(","))):
            kind = "cache_policy" if name in CACHE_POLICIES else "branch_policy"
            if kind == "branch_policy" and name.partition(":")[0] not in BRANCH_POLICIES:
                raise unknown(f"policy in {POLICIES}", name, CACHE_POLICIES + BRANCH_POLICIES)
            if kind in given:
                raise UsageError(
                    f"{POLICIES} asks for {given[kind]!r} and {name!r}. It takes one cache policy "
                    f"({', '.join(CACHE_POLICIES)}) and one branch policy ({', '.join(BRANCH_POLICIES)})."
                )
            given[kind] = name
        return cls(**given)

    def environment(self) -> dict[str, str]:
        """The two variables that :meth:`from_environment` reads as this."""
        rest = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("cache_policy", "branch_policy") and value is not None
        }
        return {POLICIES: f"{self.cache_policy},{self.branch_policy}", SETTINGS: json.dumps(rest)}


def _object(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{SETTINGS} is no JSON ({error}). Say, for example, {{'xi_tokens': 1500}}."
        ) from error
    if not isinstance(given, dict):
        raise UsageError(f"{SETTINGS} must hold a JSON object, got {type(given).__name__}.")
    known = [field.name for field in fields(Settings) if not field.name.endswith("_policy")]
    for name in given:
        if name not in known:
            raise unknown(f"setting in {SETTINGS}", name, known)
    return given
