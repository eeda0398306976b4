"""What a run of a policy came to: goodput, attainment, victims, widths, externality.

TPOT of a request is (t_end - t_first) / (count - 1). What is counted decides which policy wins, so both forms are
always there, and a number called goodput says which:

=============  ==========================================================================================
`effective`    tokens of all branches (the authors' metric): a branching request passes easily
`progress`     steps in which the request advanced: how long its user waits for the next one
=============  ==========================================================================================

Attainment is the share of requests with TPOT <= SLO, those with a single token or step left out; goodput is the tokens
of those that pass, over the time measured. A victim is a serial request during whose decoding another one branched.

Here:  `ServeLog`, what a simulator or an engine notes; `ServeReport`, what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gnomon.core.errors import UsageError

__all__ = ["DEFINITIONS", "KINDS", "ServeLog", "ServeReport"]

DEFINITIONS = ("effective", "progress")
KINDS = ("all", "serial", "parallel")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, eq=False)
class ServeLog:
    """Columns of N finished requests, in the order in which they finished, and of T steps.

    Attributes:
        parallel: whether the request branches.
        arrival, first, end: seconds: arrival, first token, last token.
        tokens, steps: of all branches; steps in which it advanced.
        branching: steps between its first and its last token in which another request had several rows ready.
        start, seconds: when a step began and how long it took.
        requests, rows, ready: requests in the step, rows that ran, rows that could have run.
        context: tokens of context of the rows that ran.
        branched: requests with several ready rows in the step.
        wide: rows that ran of those requests.
        baseline: seconds that the step would have taken with one row a request, by the true model (NaN if unknown).
        slack, budget: of the plan.
        planning: real seconds that the planner took.
        measured: start and end of the time that counts.
    """

    parallel: Bool[np.ndarray, " N"]
    arrival: Float[np.ndarray, " N"]
    first: Float[np.ndarray, " N"]
    end: Float[np.ndarray, " N"]
    tokens: Int[np.ndarray, " N"]
    steps: Int[np.ndarray, " N"]
    branching: Int[np.ndarray, " N"]
    start: Float[np.ndarray, " T"]
    seconds: Float[np.ndarray, " T"]
    requests: Int[np.ndarray, " T"]
    rows: Int[np.ndarray, " T"]
    ready: Int[np.ndarray, " T"]
    context: Int[np.ndarray, " T"]
    branched: Int[np.ndarray, " T"]
    wide: Int[np.ndarray, " T"]
    baseline: Float[np.ndarray, " T"]
    slack: Float[np.ndarray, " T"]
    budget: Float[np.ndarray, " T"]
    planning: Float[np.ndarray, " T"]
    measured: tuple[float, float]

    @classmethod
    def of_rows(
        cls,
        finished: Sequence[Sequence[float]],
        steps: Sequence[Sequence[float]],
        *,
        measured: tuple[float, float],
    ) -> ServeLog:
        """A log from rows whose values are in the order of the columns above."""
        done = np.array(finished, dtype=float).reshape(-1, 7).T
        ran = np.array(steps, dtype=float).reshape(-1, 12).T
        columns: list[Any] = [done[0].astype(bool), *done[1:4], *done[4:].astype(np.int64)]
        columns += [*ran[:2], *ran[2:8].astype(np.int64), *ran[8:]]
        values = dict(zip((one.name for one in fields(cls)), [*columns, measured], strict=True))
        return cls(**values)

    def tpot(self, definition: str) -> Float[np.ndarray, " N"]:
        """Seconds per token (`effective`) or per step of progress; NaN for requests with one of them."""
        count = {"effective": self.tokens, "progress": self.steps}[definition] - 1
        found: Float[np.ndarray, " N"] = np.where(
            count > 0, (self.end - self.first) / np.maximum(count, 1), math.nan
        )
        return found

    @property
    def counted(self) -> Bool[np.ndarray, " N"]:
        """Requests that finished in the time measured."""
        found: Bool[np.ndarray, " N"] = (self.end > self.measured[0]) & (self.end <= self.measured[1])
        return found

    @property
    def counted_steps(self) -> Bool[np.ndarray, " T"]:
        """Steps that began in the time measured."""
        found: Bool[np.ndarray, " T"] = (self.start >= self.measured[0]) & (self.start < self.measured[1])
        return found


@dataclass(frozen=True)
class ServeReport:
    """One policy on one workload.

    Attributes:
        policy: its name.
        slo_s: TPOT that requests should stay below, in seconds.
        requests: finished in the time measured, by kind (`all`, `serial`, `parallel`).
        seconds: time measured.
        throughput: tokens of those requests a second.
        goodput: by definition of TPOT (`effective`, `progress`).
        attainment: by definition, then kind; NaN where no request counts.
        tpot: percentiles 50, 90, 95, 99 in seconds, by definition, then kind.
        ttft: percentiles of the time from arrival to the first token.
        latency: mean seconds from arrival to the last token, by kind.
        victims: how many, and mean and 95th percentile of their TPOT in seconds.
        step_s: percentiles of a step.
        width: mean rows that ran of a request with several ready ones; `widths`: share of steps by that mean, rounded.
        externality: mean seconds by which branches lengthened a step, and as a share of the step without them.
        deferral: share of ready rows that waited.
        planner_s: real seconds of planning, percentiles 50 and 99; not compared.
        speed: simulated steps and tokens per real second; not compared.
        log: what all this was computed from; not compared.
    """

    policy: str
    slo_s: float
    requests: Mapping[str, int]
    seconds: float
    throughput: float
    goodput: Mapping[str, float]
    attainment: Mapping[str, Mapping[str, float]]
    tpot: Mapping[str, Mapping[str, Mapping[int, float]]]
    ttft: Mapping[int, float]
    latency: Mapping[str, float]
    victims: Mapping[str, float]
    step_s: Mapping[int, float]
    width: float
    widths: Mapping[int, float]
    externality: Mapping[str, float]
    deferral: float
    planner_s: Mapping[int, float] = field(compare=False)
    speed: Mapping[str, float] = field(compare=False)
    log: ServeLog = field(compare=False, repr=False)

    @classmethod
    def of(cls, log: ServeLog, *, policy: str, slo_s: float, real_s: float = math.nan) -> ServeReport:
        """The report of a log.

        Args:
            real_s: seconds of real time that the run took.

        Raises:
            UsageError: no request finished in the time measured.
        """
        counted, steps = log.counted, log.counted_steps
        if not counted.any() or not steps.any():
            raise UsageError(
                f"No request finished between {log.measured[0]:.3g} and {log.measured[1]:.3g} s. Give more requests, "
                "or a smaller warm_up."
            )
        seconds = log.measured[1] - log.measured[0]
        of_kind = {"all": counted, "serial": counted & ~log.parallel, "parallel": counted & log.parallel}
        tpot = {name: log.tpot(name) for name in DEFINITIONS}
        meets = {name: tpot[name] <= slo_s for name in DEFINITIONS}  # NaN meets nothing
        victims = of_kind["serial"] & (log.branching > 0) & np.isfinite(tpot["progress"])
        several = steps & (log.branched > 0)
        width = log.wide[several] / log.branched[several]
        shares = np.bincount(np.rint(width).astype(np.int64)) / max(len(width), 1)
        known = steps & np.isfinite(log.baseline)
        added = (log.seconds - log.baseline)[known]
        return cls(
            policy=policy,
            slo_s=slo_s,
            requests={kind: int(these.sum()) for kind, these in of_kind.items()},
            seconds=seconds,
            throughput=float(log.tokens[counted].sum() / seconds),
            goodput={n: float(log.tokens[counted & meets[n]].sum() / seconds) for n in DEFINITIONS},
            attainment={
                name: {
                    kind: _mean(meets[name][these & np.isfinite(tpot[name])])
                    for kind, these in of_kind.items()
                }
                for name in DEFINITIONS
            },
            tpot={
                name: {kind: _percentiles(tpot[name][these]) for kind, these in of_kind.items()}
                for name in DEFINITIONS
            },
            ttft=_percentiles((log.first - log.arrival)[counted]),
            latency={kind: _mean((log.end - log.arrival)[these]) for kind, these in of_kind.items()},
            victims={
                "count": float(victims.sum()),
                "mean": _mean(tpot["progress"][victims]),
                "p95": _percentiles(tpot["progress"][victims])[95],
            },
            step_s=_percentiles(log.seconds[steps]),
            width=_mean(width),
            widths={k: float(share) for k, share in enumerate(shares) if share > 0},
            externality={
                "seconds": _mean(added),
                "share": float(added.sum() / log.baseline[known].sum()) if known.any() else math.nan,
            },
            deferral=float(1 - log.rows[steps].sum() / log.ready[steps].sum()),
            planner_s={k: _percentiles(log.planning[steps])[k] for k in (50, 99)},
            speed={"steps": len(log.start) / real_s, "tokens": float(log.rows.sum()) / real_s},
            log=log,
        )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentiles(values: Float[np.ndarray, " N"]) -> dict[int, float]:
    values = values[np.isfinite(values)]
    if not len(values):
        return dict.fromkeys(PERCENTILES, math.nan)
    found = np.percentile(values, PERCENTILES)
    return {k: float(value) for k, value in zip(PERCENTILES, found, strict=True)}
