"""A decoding engine in numbers: what a policy does to a batch whose step time is known.

Each step takes T(n, L) of a model given as truth, times noise; requests keep their slots, rows of all slots lie in one
array, and a step is a few NumPy calls over it, so that a run of 600 requests takes seconds.

Here:  `simulate_decode` with closed loop, Poisson arrivals, or a trace's own arrivals.
Not here: prefill (a request's prompt costs nothing), KV memory, admission of requests (a full engine lets them wait).
Inferred: warm-up ends when a tenth of the requests have finished, and measuring ends when the last one was let in.
Limits: under overload (T of the baseline above the SLO) requests stay longer, the batch grows and all policies fail:
       pair the controller with admission control of requests, and don't compare there.

Shapes: C slots for requests, W branches at most; row j of slot s is number s * W + j.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from gnomon.core.errors import UsageError, number

from .config import PaceConfig
from .deadlines import row_deadlines
from .policies import AdmissionPolicy, make_policy
from .predictor import LatencyPredictor
from .report import ServeLog, ServeReport
from .rows import Groups
from .workload import DecodeRequest

__all__ = ["simulate_decode"]

Load = Literal["closed", "open", "trace"]


def simulate_decode(
    workload: Sequence[DecodeRequest],
    policy: str | AdmissionPolicy,
    true_latency: LatencyPredictor,
    load: Load | Sequence[float] = "closed",
    concurrency: int = 64,
    noise: float = 0.0,
    seed: int = 0,
    *,
    config: PaceConfig | None = None,
    predictor: LatencyPredictor | None = None,
    rate: float = 8.0,
    warm_up: float = 0.1,
    drain: bool = False,
) -> ServeReport:
    """Decode a workload under a policy.

    Args:
        policy: a name as of :func:`make_policy`, or a policy.
        true_latency: T(n, L) of a step, calibrated.
        load: `closed` keeps `concurrency` requests in flight; `open` lets them arrive at random at `rate`; `trace`
            takes their own arrivals; a sequence of seconds gives one arrival for each.
        concurrency: largest number of requests in flight; others wait.
        noise: each step takes T * exp(noise * z - noise² / 2), z standard normal; its mean is T.
        seed: of noise and arrivals.
        config: SLO, rho, utility, deadlines.
        predictor: what the planner believes, learning from each step; the truth itself without it.
        rate: requests a second.
        warm_up: share of the requests that finish before measuring begins.
        drain: measure until the last request has finished, not only until the last was let in.

    Raises:
        UsageError: no request, an uncalibrated truth, values outside their ranges.
    """
    config = config or PaceConfig()
    chosen = make_policy(policy)
    _check(workload, true_latency, concurrency, noise, rate, warm_up)
    begun = time.perf_counter()
    rng = np.random.default_rng(seed)
    arrivals = _arrivals(workload, load, rate, rng)
    engine = _Engine(workload, arrivals, min(concurrency, len(workload)), config)
    steps: list[tuple[float, ...]] = []
    learning = predictor is not None
    believed = predictor if predictor is not None else true_latency
    dedup = config.context_mode == "dedup"
    while engine.left:
        engine.let_in()
        groups = engine.groups()
        started = time.perf_counter()
        plan = chosen.select(groups, believed, config, engine.now)
        planning = time.perf_counter() - started
        run = np.array(plan.admitted, dtype=np.int64)
        first = groups.start[:-1]
        n, context = len(run), engine.context_of(run, dedup=dedup)
        if n == 0 or engine.requests_in(run) < len(groups):
            raise UsageError(
                f"Policy {chosen.name!r} left a request without a row. Admit at least one of each group."
            )
        baseline = true_latency.predict(len(groups), int(groups.context[first].sum()))
        seconds = true_latency.predict(n, context)
        if noise:
            factor = math.exp(noise * float(rng.standard_normal()) - noise * noise / 2)
            seconds, baseline = seconds * factor, baseline * factor
        branched = groups.widths > 1
        wide = n - int((~branched).sum())
        counts = (len(groups), n, groups.rows, context, int(branched.sum()), wide)
        steps.append((engine.now, seconds, *counts, baseline, plan.min_slack, plan.budget, planning))
        engine.advance(run, seconds, branching=bool(branched.any()))
        if learning:
            believed.record(n, context, seconds, now=engine.now)
    log = engine.log(steps, warm_up=warm_up, drain=drain)
    real = time.perf_counter() - begun
    return ServeReport.of(log, policy=chosen.name, slo_s=config.tpot_slo_s, real_s=real)


def _check(
    workload: Sequence[DecodeRequest],
    truth: LatencyPredictor,
    concurrency: int,
    noise: float,
    rate: float,
    warm_up: float,
) -> None:
    if not workload:
        raise UsageError("There is no request to decode.")
    if not truth.calibrated:
        raise UsageError("true_latency must have coefficients: LatencyPredictor(a, b, c).")
    if not truth.predict(1, 1) > 0:
        raise UsageError(f"{truth} takes no time, so nothing can be measured.")
    if concurrency < 1 or not 0 <= number(noise) <= 2:
        raise UsageError(f"concurrency={concurrency} must be at least 1, and noise={noise} from 0 to 2.")
    if not 0 < number(rate) < math.inf or not 0 <= number(warm_up) < 1:
        raise UsageError(f"rate={rate} must be positive and finite, and warm_up={warm_up} in [0, 1).")


def _arrivals(
    workload: Sequence[DecodeRequest], load: Load | Sequence[float], rate: float, rng: np.random.Generator
) -> Float[np.ndarray, " N"] | None:
    """Seconds of all arrivals, ascending; None in a closed loop."""
    if isinstance(load, str):
        if load == "closed":
            return None
        if load == "open":
            return np.cumsum(rng.exponential(1 / rate, len(workload)))
        if load != "trace":
            raise UsageError(f"load={load!r} must be 'closed', 'open', 'trace', or seconds of arrival.")
        load = [request.arrival for request in workload]
    found = np.asarray(load, dtype=float)
    if len(found) != len(workload) or not np.isfinite(found).all() or (np.diff(found) < 0).any():
        raise UsageError(
            f"load has {len(found)} arrivals for {len(workload)} requests; they must be finite and ascending."
        )
    return found


class _Engine:
    """Slots, rows and the clock."""

    def __init__(
        self,
        workload: Sequence[DecodeRequest],
        arrivals: Float[np.ndarray, " N"] | None,
        slots: int,
        config: PaceConfig,
    ) -> None:
        self.workload, self.arrivals, self.config = workload, arrivals, config
        self.width = max(len(stage) for request in workload for stage in request.stages)
        rows = slots * self.width
        self.now, self.left, self.next = 0.0, len(workload), 0
        self.closed_at = math.inf  # when the last request was let in
        # Rows: tokens still to come, context, shared part of it, tokens produced, start of the last own step.
        self.todo, self.context, self.prefix, self.done = np.zeros((4, rows), dtype=np.int64)
        self.last = np.zeros(rows)
        # Slots: the request (-1 is none), its stage, rows of the stage that haven't ended, context at its start.
        self.request = np.full(slots, -1, dtype=np.int64)
        self.stage, self.open, self.base, self.steps = np.zeros((4, slots), dtype=np.int64)
        self.arrival, self.first, self.progress, self.weight = np.zeros((4, slots))
        self.branching_then = np.zeros(slots, dtype=np.int64)
        self.branching = 0
        self.finished: list[tuple[float, ...]] = []

    def let_in(self) -> None:
        """Fill free slots with requests that have arrived; wait for the next one when nothing runs."""
        free = np.flatnonzero(self.request < 0)
        if not len(free) or self.next == len(self.workload):
            return
        if self.arrivals is not None and len(free) == len(self.request):
            self.now = max(self.now, float(self.arrivals[self.next]))
        for slot in free.tolist():
            if self.next == len(self.workload):
                break
            arrival = self.now if self.arrivals is None else float(self.arrivals[self.next])
            if arrival > self.now:
                break
            request = self.workload[self.next]
            self.request[slot], self.arrival[slot], self.weight[slot] = self.next, arrival, request.weight
            self.base[slot], self.steps[slot] = request.prompt, 0
            self._begin(slot, 0)
            self.next += 1
            if self.next == len(self.workload):
                self.closed_at = self.now

    def _begin(self, slot: int, stage: int) -> None:
        """Make a stage's rows ready."""
        lengths = self.workload[int(self.request[slot])].stages[stage]
        rows = slice(slot * self.width, slot * self.width + len(lengths))
        self.stage[slot], self.open[slot] = stage, len(lengths)
        self.todo[rows] = lengths
        self.context[rows] = self.prefix[rows] = self.base[slot]
        self.done[rows] = 0
        self.last[rows] = self.now
        self.base[slot] += sum(lengths)  # where the next stage begins

    def groups(self) -> Groups:
        """All ready rows."""
        rows = np.flatnonzero(self.todo)
        slot = rows // self.width
        live = np.flatnonzero(self.request >= 0)
        number_of = np.zeros(len(self.request), dtype=np.int64)
        number_of[live] = np.arange(len(live))
        config = self.config
        if config.deadline_model == "row":
            deadline = row_deadlines(self.last[rows], self.now, config.tpot_slo_s)
        else:
            if config.deadline_model == "request":
                due = self.progress + config.tpot_slo_s
            else:
                due = self.first + config.tpot_slo_s * self.steps
            deadline = np.where(self.steps > 0, due, self.arrival + config.ttft_slo_s)[slot]
        return Groups.from_arrays(
            number_of[slot],
            self.context[rows],
            deadline,
            self.done[rows],
            prefix=self.prefix[rows],
            index=rows,
            names=self.request[live].tolist(),
            weights=self.weight[live],
            checked=False,
        )

    def context_of(self, run: Int[np.ndarray, " n"], *, dedup: bool) -> int:
        """L of the step."""
        total = int(self.context[run].sum())
        if dedup:
            ordered = np.sort(run)
            again = np.flatnonzero(np.diff(ordered // self.width) == 0) + 1
            total -= int(self.prefix[ordered[again]].sum())
        return total

    def requests_in(self, run: Int[np.ndarray, " n"]) -> int:
        """How many requests the rows belong to."""
        return int(np.count_nonzero(np.bincount(run // self.width)))

    def advance(self, run: Int[np.ndarray, " n"], seconds: float, *, branching: bool) -> None:
        """Run a step: every row of it gets a token; ended stages and requests make room for the next."""
        self.last[run] = self.now
        self.now += seconds
        self.todo[run] -= 1
        self.context[run] += 1
        self.done[run] += 1
        live = self.request >= 0
        begins = live & (self.steps == 0)
        self.first[begins] = self.now
        self.branching_then[begins] = self.branching + branching
        self.branching += branching
        self.progress[live] = self.now
        self.steps[live] += 1
        ended = run[self.todo[run] == 0]
        for slot in (ended // self.width).tolist():
            self.open[slot] -= 1
            if self.open[slot] == 0:
                self._end_stage(slot)

    def _end_stage(self, slot: int) -> None:
        request = self.workload[int(self.request[slot])]
        if self.stage[slot] + 1 < len(request.stages):
            self._begin(slot, int(self.stage[slot]) + 1)
            return
        times = (self.arrival[slot], self.first[slot], self.now)
        counts = (request.tokens, self.steps[slot], self.branching - self.branching_then[slot])
        self.finished.append((request.parallel, *times, *counts))
        self.request[slot] = -1
        self.left -= 1

    def log(self, steps: list[tuple[float, ...]], *, warm_up: float, drain: bool) -> ServeLog:
        """Everything noted, as columns."""
        ends = np.array([row[3] for row in self.finished])
        skipped = int(warm_up * len(ends))
        begin = float(ends[skipped - 1]) if skipped else 0.0
        end = self.now if drain or self.closed_at <= begin else self.closed_at
        if not ((ends > begin) & (ends <= end)).any():
            begin, end = 0.0, self.now  # so few requests that nothing is left between warm-up and drain

        return ServeLog.of_rows(self.finished, steps, measured=(begin, end))
