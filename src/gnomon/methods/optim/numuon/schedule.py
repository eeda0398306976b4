"""How much of each matrix's rank an update may use, over the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gnomon.core.errors import UsageError, unknown

KINDS = ("fixed", "cosine", "piecewise")


@dataclass(frozen=True, kw_only=True)
class RankSchedule:
    """The rank fraction r(t) in (0, 1], one for all matrices; made by `fixed`, `cosine` and `piecewise`.

    t counts optimizer steps from 0. A run longer than `total_steps` stays at the last fraction.
    """

    kind: Literal["fixed", "cosine", "piecewise"]
    points: tuple[tuple[float, float], ...]
    """(share of the run, rank fraction): of a cosine its start and end, else where each piece begins."""
    total_steps: int | None = None
    """Optimizer steps of the whole run; a fixed fraction needs none."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("rank schedule", self.kind, KINDS)
        for _, r in self.points:
            if not 0 < r <= 1:  # written this way round so that NaN is refused too
                raise UsageError(
                    f"Rank fraction {r} must lie in (0, 1]: it is the share of an update's singular values that is "
                    "kept. 1 is Muon; the smallest useful one keeps a single direction, 1 / min(rows, columns)."
                )
        shares = [share for share, _ in self.points]
        if not shares or not all(0 <= share <= 1 for share in shares) or sorted(shares) != shares:
            raise UsageError(
                f"The points of a rank schedule begin at {shares}, which must be shares of the run in [0, 1], "
                "none smaller than the one before."
            )
        if self.kind == "piecewise" and shares[0] != 0:
            raise UsageError(
                f"The first piece begins at {shares[0]} of the run, so nothing says what comes before it: begin at 0."
            )
        if self.kind != "fixed" and (self.total_steps is None or self.total_steps < 1):
            raise UsageError(
                f"A {self.kind} rank schedule has total_steps={self.total_steps}, but its points are shares of a "
                "whole run. Give the run's number of optimizer steps, at least 1, or use RankSchedule.fixed."
            )

    @classmethod
    def fixed(cls, r: float) -> RankSchedule:
        """The same fraction throughout; 1 is Muon."""
        return cls(kind="fixed", points=((0.0, r),))

    @classmethod
    def cosine(
        cls,
        r_start: float = 1.0,
        r_end: float = 0.25,
        *,
        total_steps: int,
        hold: float = 0.1,
        end: float = 0.8,
    ) -> RankSchedule:
        """`r_start` for the share `hold` of the run, then half a cosine that reaches `r_end` at the share `end`.

        The defaults are the paper's: the last rank is reached before the learning rate's cooldown.
        """
        return cls(kind="cosine", points=((hold, r_start), (end, r_end)), total_steps=total_steps)

    @classmethod
    def piecewise(cls, pieces: Sequence[tuple[float, float]], *, total_steps: int) -> RankSchedule:
        """`(share, r)`: from that share of the run on, r."""
        return cls(kind="piecewise", points=tuple((f, r) for f, r in pieces), total_steps=total_steps)

    @classmethod
    def of(cls, value: float | Mapping[str, Any] | RankSchedule) -> RankSchedule:
        """A number is a fixed fraction; a mapping is what `plain` gave, perhaps read back from JSON."""
        if isinstance(value, RankSchedule):
            return value
        if isinstance(value, Mapping):
            return cls(**{**value, "points": tuple((f, r) for f, r in value["points"])})
        return cls.fixed(value)

    def plain(self) -> dict[str, Any]:
        """A dictionary of strings and numbers, for checkpoints."""
        return asdict(self)

    def fraction(self, t: float) -> float:
        r"""r(t).

        Cosine, with T_h = hold · T and T_d = max(1, (end − hold) · T):

        .. math:: r_{end} + \tfrac12 (r_{start} - r_{end}) (1 + \cos(\pi \min(1, (t - T_h) / T_d)))
        """
        total = self.total_steps or 1
        if self.kind == "cosine":
            (hold, r_start), (end, r_end) = self.points
            if t < hold * total:
                return r_start
            passed = min(1.0, (t - hold * total) / max(1.0, (end - hold) * total))
            return r_end + (r_start - r_end) * (1 + math.cos(math.pi * passed)) / 2
        return next(r for share, r in reversed(self.points) if self.kind == "fixed" or t >= share * total)

    def rank(self, t: float, q: int) -> int:
        """k = ⌈r(t) · q⌉, where q is the smaller side of a matrix; at least 1."""
        return max(1, math.ceil(self.fraction(t) * q - 1e-9))  # 0.07 · 100 is 7.000000000000001, not 8

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"fixed at {self.points[0][1]:g}"
        told = ", ".join(f"{r:g} at {share:.0%}" for share, r in self.points)
        return f"{self.kind} ({told}) over {self.total_steps} steps"
