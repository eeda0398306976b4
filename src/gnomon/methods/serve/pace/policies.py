"""Who decides which rows run in a step: `off`, `cap`, `eager` and `pace`, and a register for others.

Paper: Pace's Algorithm 1 and the baselines IRP-Off, IRP-C2 and IRP-C5, IRP-Eager.
Here:  `AdmissionPolicy.select(groups, predictor, config, now) -> Plan`; `hold`, which plans every k steps and keeps the
       widths in between (the paper's ablation).
Not here: deadlines (`deadlines`), engines. Policies know rows, a predictor and the time, and nothing else.
Inferred: a fixed cap has no budget (the repository's cap runs the budget loop, too: `budgeted=True`); a cap without a
       budget needs no predictor, so it caps while that is uncalibrated. `hold` gives a request that it hasn't planned
       for one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Int

from gnomon.core.errors import UsageError, unknown

from .admit import Extras, admit, extras
from .config import PaceConfig
from .predictor import LatencyPredictor
from .rows import Groups

__all__ = [
    "POLICIES",
    "AdmissionPolicy",
    "Cap",
    "Eager",
    "Hold",
    "Off",
    "Pace",
    "Plan",
    "make_policy",
    "register_policy",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step runs.

    Attributes:
        admitted: indices of the rows that advance by one token: each request's most urgent row, group by group, then
            the others in the order of admission.
        deferred: indices of the rows that keep their KV and wait.
        t0: predicted seconds of the baseline, one row a request; NaN while the predictor is uncalibrated.
        budget: seconds the step may take, T0 + rho * slack; inf where the policy has no budget, NaN while uncalibrated.
        min_slack: seconds until the earliest deadline; may be negative.
        predicted: predicted seconds of the step.
        externality: predicted minus t0, what branches cost everyone.
    """

    admitted: tuple[int, ...]
    deferred: tuple[int, ...]
    t0: float
    budget: float
    min_slack: float
    predicted: float
    externality: float


class AdmissionPolicy(ABC):
    """Decides each step anew which ready rows advance."""

    name: ClassVar[str] = ""

    @abstractmethod
    def select(self, groups: Groups, predictor: LatencyPredictor, config: PaceConfig, now: float) -> Plan:
        """The plan of this step; every request gets at least one row.

        Args:
            groups: of `build_groups` or `Groups.from_arrays`.
            predictor: of the step's time.
            now: on the clock of the deadlines.
        """


Policy = TypeVar("Policy", bound=type[AdmissionPolicy])
POLICIES: dict[str, type[AdmissionPolicy]] = {}
"""Policies by name."""


def register_policy(name: str) -> Callable[[Policy], Policy]:
    """Class decorator that gives a policy its name for :func:`make_policy`.

    Raises:
        UsageError: the name is taken by another class, or holds a colon.
    """

    def register(kind: Policy) -> Policy:
        if not name or ":" in name:
            raise UsageError(f"A policy's name must be a text without a colon, got {name!r}.")
        known = POLICIES.get(name)
        if known is not None and known.__qualname__ != kind.__qualname__:
            raise UsageError(f"Policy {name!r} is {known.__qualname__} already. Choose another name.")
        kind.name = name
        POLICIES[name] = kind
        return kind

    return register


def make_policy(name: str | AdmissionPolicy, **options: Any) -> AdmissionPolicy:
    """A policy by name: `off`, `eager`, `pace`, `cap:N`, `hold:K`, or one that was registered.

    Args:
        name: what follows a colon is the policy's first number, so `cap:2` is `cap` with `width=2`.

    Raises:
        UsageError: no such policy (the known ones are listed), or options that it doesn't take.
    """
    if isinstance(name, AdmissionPolicy):
        return name
    kind, _, argument = str(name).partition(":")
    if kind not in POLICIES:
        raise UsageError(f"{unknown('policy', kind, POLICIES)} Known: {', '.join(sorted(POLICIES))}.")
    try:
        return POLICIES[kind](*([int(argument)] if argument else []), **options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"Policy {name!r}: {error}. Give it as in 'off', 'pace', 'cap:2' or 'hold:50'."
        ) from error


@register_policy("off")
class Off(AdmissionPolicy):
    """One row a request (IRP-Off): branches take turns, the least advanced first."""

    def select(self, groups: Groups, predictor: LatencyPredictor, config: PaceConfig, now: float) -> Plan:
        x = extras(groups, context_mode=config.context_mode, width=1)
        t0 = predicted(predictor, x.n, x.tokens)
        return plan_of(groups, x, np.zeros(0, dtype=np.int64), predictor, t0, now)


@register_policy("eager")
class Eager(AdmissionPolicy):
    """All ready rows (IRP-Eager), whatever the deadlines."""

    def select(self, groups: Groups, predictor: LatencyPredictor, config: PaceConfig, now: float) -> Plan:
        x = extras(groups, context_mode=config.context_mode)
        return plan_of(groups, x, np.arange(len(x.place)), predictor, math.inf, now)


@register_policy("pace")
class Pace(AdmissionPolicy):
    """Algorithm 1: as many rows as the batch's slack carries. While uncalibrated it runs everything and observes.

    Args:
        budgeted: False leaves the slack budget out (the paper's ablation), which is `eager` again.
    """

    def __init__(self, *, budgeted: bool = True) -> None:
        self.budgeted = budgeted
        self.width: int | None = None

    def select(self, groups: Groups, predictor: LatencyPredictor, config: PaceConfig, now: float) -> Plan:
        x = extras(groups, utility=config.utility, context_mode=config.context_mode, width=self.width)
        if not self.budgeted:
            return plan_of(groups, x, admit(x, predictor, math.inf), predictor, math.inf, now)
        if not predictor.calibrated:
            x = extras(groups, context_mode=config.context_mode)
            return plan_of(groups, x, np.arange(len(x.place)), predictor, math.nan, now)
        t0 = predictor.predict(x.n, x.tokens)
        slack = float(groups.deadline.min()) - now if groups.rows else math.inf
        budget = t0 + config.rho * max(0.0, slack - t0)
        return plan_of(groups, x, admit(x, predictor, budget), predictor, budget, now)


@register_policy("cap")
class Cap(Pace):
    """At most `width` rows a request (IRP-C2, IRP-C5).

    Args:
        width: >= 1.
        budgeted: also keep to Algorithm 1's budget, as the repository's cap does.
    """

    def __init__(self, width: int = 2, *, budgeted: bool = False) -> None:
        if not (isinstance(width, int) and width >= 1):
            raise UsageError(f"cap: width={width} must be a whole number from 1 on.")
        super().__init__(budgeted=budgeted)
        self.width = width


@register_policy("hold")
class Hold(AdmissionPolicy):
    """Plan in every k-th step and keep the widths in between: what re-planning at each step is worth.

    Args:
        every: k >= 1.
        inner: policy that plans.
    """

    def __init__(self, every: int = 50, inner: str | AdmissionPolicy = "pace") -> None:
        if not (isinstance(every, int) and every >= 1):
            raise UsageError(f"hold: every={every} must be a whole number of steps from 1 on.")
        self.every, self.inner = every, make_policy(inner)
        self._step = 0
        self._widths: dict[Hashable, int] = {}

    def select(self, groups: Groups, predictor: LatencyPredictor, config: PaceConfig, now: float) -> Plan:
        planned = self._step % self.every == 0
        self._step += 1
        if planned:
            plan = self.inner.select(groups, predictor, config, now)
            admitted = np.isin(groups.row_index, plan.admitted)
            owner = np.repeat(np.arange(len(groups)), groups.widths)
            widths = np.bincount(owner[admitted], minlength=len(groups))
            self._widths = dict(zip(groups.names, widths.tolist(), strict=True))
            return plan
        x = extras(groups, context_mode=config.context_mode)
        kept = np.array([self._widths.get(name, 1) for name in groups.names], dtype=np.int64)
        depth = x.place - groups.start[:-1][x.group]
        return plan_of(groups, x, np.flatnonzero(depth < kept[x.group]), predictor, math.inf, now)


def predicted(predictor: LatencyPredictor, n: int, tokens: int) -> float:
    """Predicted seconds, NaN while uncalibrated."""
    return predictor.predict(n, tokens) if predictor.calibrated else math.nan


def plan_of(
    groups: Groups,
    x: Extras,
    chosen: Int[np.ndarray, " A"],
    predictor: LatencyPredictor,
    budget: float,
    now: float,
) -> Plan:
    """The plan that runs the baseline and the chosen further rows."""
    places = np.concatenate((groups.start[:-1], x.place[chosen]))
    waiting = np.ones(groups.rows, dtype=bool)
    waiting[places] = False
    t0 = predicted(predictor, x.n, x.tokens)
    time = predicted(predictor, x.n + len(chosen), x.tokens + int(x.added[chosen].sum()))
    return Plan(
        admitted=tuple(groups.row_index[places].tolist()),
        deferred=tuple(groups.row_index[waiting].tolist()),
        t0=t0,
        budget=budget,
        min_slack=float(groups.deadline.min()) - now if groups.rows else math.inf,
        predicted=time,
        externality=time - t0,
    )
