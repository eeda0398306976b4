"""Stages of the Pace study in the simulator: loads, policies, what the safe width depends on, how long planning takes.

Loads are drawn by `methods.serve.pace.workload`; the true step time is that of a 32B model on 8 H200, as the authors'
repository has it. One stage is one load and one seed, and all policies serve the same requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import unknown
from gnomon.lab import StageContext

if TYPE_CHECKING:
    from gnomon.methods.serve.pace import DecodeRequest, LatencyPredictor, ServeReport

OFF, EAGER, PACE, ACCUMULATED = "off", "eager", "pace", "pace, accumulated"
ROW, HOLD, NO_BUDGET = "pace, row", "pace, plan every 50 steps", "pace, no budget"
TIMID, BOLD, CONSTANT = "pace, b and c x 6", "pace, b and c / 6", "pace, constant step"
REGIMES = ("branchy", "mixed")
"""The card's two; claims about goodput are judged on both."""
FLOOR = 1.0
"""Tokens a second below which a goodput counts as this when its logarithm is taken: it narrows what Pace gains."""

LOADS: dict[str, dict[str, Any]] = {
    "branchy": {"concurrency": 64, "slo": 0.018, "mix": {}},
    "mixed": {"concurrency": 96, "slo": 0.018, "mix": {"parallel": 0.5, "branches": (3, 8)}},
    "few": {"concurrency": 16, "slo": 0.018, "mix": {}},
    "long": {"concurrency": 48, "slo": 0.018, "mix": {"prompt": (4000, 8000)}},
    "loose": {"concurrency": 64, "slo": 0.03, "mix": {}},
    "strict": {"concurrency": 64, "slo": 0.0135, "mix": {}},
    "arrivals": {"concurrency": 128, "slo": 0.018, "mix": {}, "rate": 3.5},
}
"""Requests in flight (the most, where they arrive at random at `rate` a second), TPOT SLO in seconds, and what requests
are drawn from."""


def policies(caps: Sequence[int], *, ablations: bool) -> list[str]:
    """Names of what serves a load."""
    found = [OFF, *(f"cap:{n}" for n in caps), EAGER, PACE, ACCUMULATED]
    return found + ([ROW, HOLD, NO_BUDGET, TIMID, BOLD, CONSTANT] if ablations else [])


def serve(
    ctx: StageContext, *, load: str, seed: int, requests: int, policies: Sequence[str], noise: float
) -> dict[str, Any]:
    """All policies on the same requests of one load."""
    settings = LOADS[load]
    workload = drawn(load, requests, seed)
    tokens = sum(request.tokens for request in workload)
    for name in policies:
        report = one(name, workload, settings, noise=noise, seed=seed)
        for metric, value, unit, better in _told(report):
            if math.isfinite(value):
                ctx.record(
                    method=name,
                    metric=metric,
                    value=value,
                    unit=unit,
                    better=better,
                    tags={"load": load},
                    budget={"tokens": tokens},
                )
    return {"requests": requests, "tokens": tokens}


def drawn(load: str, requests: int, seed: int) -> list[DecodeRequest]:
    """Requests of a load."""
    import numpy as np

    from gnomon.methods.serve.pace import Mix, mixed_workload

    return mixed_workload(requests, Mix(**LOADS[load]["mix"]), np.random.default_rng(seed))


def one(
    name: str, workload: Sequence[DecodeRequest], settings: dict[str, Any], *, noise: float, seed: int
) -> ServeReport:
    """One policy's report."""
    from gnomon.methods.serve.pace import H200_32B, LatencyPredictor, PaceConfig, make_policy, simulate_decode

    a, b, c = H200_32B
    believed: LatencyPredictor | None = None
    policy, model = make_policy(PACE if name.startswith(PACE) else name), "request"
    if name == ACCUMULATED:
        model = "accumulated"
    elif name == ROW:
        model = "row"
    elif name == HOLD:
        policy = make_policy("hold:50")
    elif name == NO_BUDGET:
        policy = make_policy(PACE, budgeted=False)
    elif name in (TIMID, BOLD):
        times = 6 if name == TIMID else 1 / 6
        believed = LatencyPredictor(a, times * b, times * c, refit_every_s=math.inf)
    elif name == CONSTANT:
        believed = LatencyPredictor(0.7 * settings["slo"], 0.0, 0.0, refit_every_s=math.inf)
    elif name.startswith(PACE) and name != PACE:
        raise unknown("policy of the study", name, policies((2,), ablations=True))
    more = {"load": "open", "rate": settings["rate"]} if "rate" in settings else {}
    return simulate_decode(
        workload,
        policy,
        LatencyPredictor(a, b, c),
        concurrency=settings["concurrency"],
        noise=noise,
        seed=seed,
        config=PaceConfig(tpot_slo_s=settings["slo"], deadline_model=model),  # type: ignore[arg-type]
        predictor=believed,
        **more,
    )


def _told(report: ServeReport) -> list[tuple[str, float, str, str | None]]:
    """Metric, value, unit and better direction of all that is recorded of a report."""
    found: list[tuple[str, float, str, str | None]] = [
        ("throughput", report.throughput, "tokens/s", "higher"),
        ("step time", report.step_s[50], "s", "lower"),
        ("victim TPOT", report.victims["mean"], "s", "lower"),
        ("latency, parallel", report.latency["parallel"], "s", "lower"),
        ("externality", report.externality["seconds"], "s", None),
        ("width", report.width, "rows", None),
        ("deferred share", report.deferral, "", None),
        ("TTFT, P95", report.ttft[95], "s", "lower"),
    ]
    for definition in report.goodput:
        goodput = report.goodput[definition]
        found.append((f"goodput, {definition}", goodput, "tokens/s", "higher"))
        found.append((f"log goodput, {definition}", math.log(max(goodput, FLOOR)), "", "higher"))
        for kind, share in report.attainment[definition].items():
            found.append((f"attainment, {definition}, {kind}", share, "", "higher"))
        found.append((f"TPOT P95, {definition}", report.tpot[definition]["all"][95], "s", "lower"))
    return found


CAUSES = ("batch", "context", "slack")


def safe_width(ctx: StageContext, *, seed: int, requests: int, points: int = 300) -> dict[str, list[float]]:
    """Width that the batch could carry against what it depends on, over the steps in which the budget bound.

    Random arrivals make the batch vary, prompts of 200 to 6,000 tokens the contexts, `accumulated` deadlines the slack.
    Width is rows a branching request; columns are standardised, so a slope is the change in width for one standard
    deviation of a cause.
    """
    import numpy as np

    from gnomon.methods.serve.pace import (
        H200_32B,
        LatencyPredictor,
        Mix,
        PaceConfig,
        mixed_workload,
        simulate_decode,
    )

    workload = mixed_workload(requests, Mix(prompt=(200, 6000)), np.random.default_rng(seed))
    report = simulate_decode(
        workload,
        PACE,
        LatencyPredictor(*H200_32B),
        load="open",
        rate=4.0,
        concurrency=96,
        noise=0.2,
        seed=seed,
        config=PaceConfig(tpot_slo_s=0.018, deadline_model="accumulated"),
    )
    log = report.log
    bound = (log.rows < log.ready) & (log.branched > 0) & log.counted_steps
    width = (log.wide / np.maximum(log.branched, 1))[bound]
    causes = np.stack([log.requests, log.context / log.rows, log.slack], axis=1)[bound]
    ctx.record(method=PACE, metric="steps at the budget", value=int(bound.sum()))
    if bound.sum() > 10 and (causes.std(0) > 0).all():
        standard = (causes - causes.mean(0)) / causes.std(0)
        columns = np.concatenate([np.ones((len(width), 1)), standard], axis=1)
        slopes = np.linalg.lstsq(columns, width, rcond=None)[0]
        explained = 1 - float(((width - columns @ slopes) ** 2).sum() / ((width - width.mean()) ** 2).sum())
        for cause, slope in zip(CAUSES, slopes[1:], strict=True):
            ctx.record(method=PACE, metric="slope of the safe width", value=slope, tags={"cause": cause})
        ctx.record(method=PACE, metric="variance of the safe width explained", value=explained)
    shown = np.random.default_rng(0).permutation(len(width))[:points]
    return {
        "width": width[shown].tolist(),
        **{cause: causes[shown, k].tolist() for k, cause in enumerate(CAUSES)},
    }


def planning(
    ctx: StageContext, *, requests: int, branches: int, repeats: int, plans: int
) -> dict[str, float]:
    """Real seconds that a plan takes, rows given as arrays: median and 99th percentile of each repeat."""
    import numpy as np

    from gnomon.methods.serve.pace import H200_32B, Groups, LatencyPredictor, PaceConfig, make_policy

    rng = np.random.default_rng(0)
    predictor, config, policy = LatencyPredictor(*H200_32B), PaceConfig(tpot_slo_s=0.2), make_policy(PACE)
    rows = requests * branches
    group = np.repeat(np.arange(requests), branches)
    last = 0.0
    for repeat in range(repeats):
        taken = []
        for _ in range(plans):
            context = rng.integers(200, 4000, rows)
            progress = rng.integers(0, 200, rows)
            deadline = np.full(rows, 0.2)
            started = time.perf_counter()
            groups = Groups.from_arrays(group, context, deadline, progress)
            plan = policy.select(groups, predictor, config, 0.0)
            taken.append(time.perf_counter() - started)
            last = len(plan.admitted) / rows
        for metric, value in (
            ("planner time, P50", np.median(taken)),
            ("planner time, P99", np.quantile(taken, 0.99)),
        ):
            ctx.record(
                method=PACE,
                metric=metric,
                value=value,
                unit="s",
                better="lower",
                item=repeat,
                tags={"requests": requests, "branches": branches},
            )
    return {"admitted share": last}
