"""Stages of the Pace study on a real model: times of packed steps, a predictor fitted to them, policies, memory.

All timings are exclusive stages of `PackedBranchEngine`. Prompts are cut from a text; branches open with a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext

if TYPE_CHECKING:
    from gnomon.methods.serve.pace import BranchSpec, PackedBranchEngine

HELD_OUT = 3
"""Every third step is held out when the predictor's error is measured."""
POLICIES = ("off", "cap:2", "eager", "pace")
SLACK = 1.3
"""The SLO is so many times the median step of `off`."""


def rows_named(n: int) -> str:
    """Name of a packed step as a contender."""
    return f"{n} row{'s' * (n != 1)}"


def _loaded(model: str, **options: Any) -> tuple[PackedBranchEngine, Any]:
    from gnomon.core.models import load
    from gnomon.methods.serve.pace import PackedBranchEngine

    found = load(model, dtype="float32")
    return PackedBranchEngine(found.model, **options), found.tokenizer


def _headers(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    return [tuple(tokenizer(f"\n{k + 1}.", add_special_tokens=False)["input_ids"]) for k in range(count)]


def calibrate(
    ctx: StageContext,
    *,
    model: str,
    data: str,
    sizes: Sequence[int],
    repeats: int,
    prompt: int,
    threads: int,
    seed: int,
) -> dict[str, Any]:
    """Time packed steps of several sizes in turns, and fit T = a + b n + c L to two thirds of them.

    Four requests with prompts of a quarter of `prompt` to all of it branch as far as the largest size needs.
    """
    import numpy as np

    from gnomon.core.timing import threads_set
    from gnomon.methods.serve.pace import BranchSpec, LatencyPredictor, Plan, fit_latency
    from gnomon.studies.nf12_serving import prompts

    engine, tokenizer = _loaded(model)
    ids = prompts(model, data, 4, prompt, seed)
    each = -(-max(sizes) // 4)
    headers = _headers(tokenizer, each)
    length = repeats * len(sizes) + 10
    for k in range(4):
        branches = tuple(BranchSpec(header, length) for header in headers)
        if len(branches) == 1:
            branches = (BranchSpec(headers[0], length),)
        engine.submit(ids[k, : (k + 1) * prompt // 4].tolist(), (branches,))
    seen: list[tuple[int, int, float]] = []
    with threads_set(threads):
        engine.let_in()
        for repeat in range(-1, repeats):  # the first round warms up
            turn = repeat % len(sizes)
            for n in [*sizes[turn:], *sizes[:turn]]:
                rows = engine.ready()
                rows = [rows[(repeat * 7 + k) % len(rows)] for k in range(n)]
                context = sum(row.context_len for row in rows)
                seconds = engine.step(Plan(tuple(row.index for row in rows), (), 0, 0, 0, 0, 0))
                if repeat < 0:
                    continue
                seen.append((n, context, seconds))
                ctx.record(
                    method=rows_named(n),
                    metric="packed step",
                    value=seconds,
                    unit="s",
                    better="lower",
                    item=repeat,
                    tags={"context": context},
                )
    n, context, taken = np.array(seen).T
    held = np.arange(len(taken)) % HELD_OUT == 0
    a, b, c = fit_latency(n[~held], context[~held], taken[~held])
    predicted = LatencyPredictor(a, b, c).predict(n[held], context[held])
    error = float(np.mean(np.abs(predicted - taken[held]) / taken[held]))
    ctx.record(method="predictor", metric="held-out error of the step's time", value=error, better="lower")
    return {"a": a, "b": b, "c": c, "steps": seen}


def _requests(
    tokenizer: Any, ids: Any, count: int, scale: int, seed: int
) -> list[tuple[list[int], tuple[tuple[BranchSpec, ...], ...]]]:
    """Every other request branches; lengths grow with `scale`."""
    import numpy as np

    from gnomon.methods.serve.pace import BranchSpec

    rng = np.random.default_rng(seed)
    headers = _headers(tokenizer, 8)
    end = tuple(tokenizer("\nSo", add_special_tokens=False)["input_ids"])
    found = []
    for k in range(count):
        if k % 2:
            stages: tuple[tuple[BranchSpec, ...], ...] = ((BranchSpec((), 6 * scale),),)
        else:
            wide = int(rng.integers(4, 9))
            branches = tuple(
                BranchSpec(header, int(rng.integers(scale, 2 * scale + 1))) for header in headers[:wide]
            )
            stages = ((BranchSpec((), scale),), branches, (BranchSpec(end, scale),))
        found.append((ids[k].tolist(), stages))
    return found


def engine_runs(
    ctx: StageContext,
    *,
    of: Done,
    model: str,
    data: str,
    requests: int,
    concurrency: int,
    scale: int,
    prompt: int,
    threads: int,
    seed: int,
) -> dict[str, Any]:
    """Policies on the same requests in a closed loop; the SLO is 1.3 times the median step of `off`, timed first."""
    from gnomon.core.timing import threads_set
    from gnomon.methods.serve.pace import LatencyPredictor, PaceConfig, PackedBranchEngine
    from gnomon.studies.nf12_serving import prompts

    engine, tokenizer = _loaded(model)
    ids = prompts(model, data, requests, prompt, seed)
    what = _requests(tokenizer, ids, requests, scale, seed)
    slo, decoded = float("inf"), None
    turn = seed % (len(POLICIES) - 1)
    rest = POLICIES[1:]
    outputs: dict[str, Any] = {}
    with threads_set(threads):
        for name in (
            POLICIES[0],
            POLICIES[0],
            *rest[turn:],
            *rest[:turn],
        ):  # off twice: the first sets the SLO
            engine = PackedBranchEngine(engine.model)
            for ids_of, stages in what:
                engine.submit(ids_of, stages)
            fitted = of.value
            predictor = LatencyPredictor(fitted["a"], fitted["b"], fitted["c"], refit_every_s=0)
            config = PaceConfig(tpot_slo_s=slo, ttft_slo_s=float("inf"))
            report = engine.run(name, predictor=predictor, config=config, concurrency=concurrency)
            if decoded is None:
                slo, decoded = SLACK * report.step_s[50], int(report.log.tokens.sum())
                continue
            outputs[name] = engine.outputs
            values = {
                "engine step time": report.step_s[50],
                "engine victim TPOT": report.victims["mean"],
                "engine goodput, effective": report.goodput["effective"],
                "engine goodput, progress": report.goodput["progress"],
                "engine throughput": report.throughput,
                "engine width": report.width,
                "engine planner time, P99": report.planner_s[99],
                "engine error of the step's time": predictor.mape(),
            }
            for definition in report.attainment:
                for kind, share in report.attainment[definition].items():
                    values[f"engine attainment, {definition}, {kind}"] = share
            for metric, value in values.items():
                lower = any(word in metric for word in ("time", "TPOT", "error"))
                better = None if "width" in metric else "lower" if lower else "higher"
                ctx.record(method=name, metric=metric, value=value, better=better, budget={"tokens": decoded})
    return {"slo": slo, "equal outputs": all(found == outputs[POLICIES[0]] for found in outputs.values())}


def memory(
    ctx: StageContext, *, model: str, data: str, requests: int, scale: int, prompt: int, seed: int
) -> dict[str, Any]:
    """What deferrals do to the pool, and tokens under several schedules against one request and one row at a time."""
    from gnomon.methods.serve.pace import H200_32B, LatencyPredictor, PaceConfig, PackedBranchEngine
    from gnomon.studies.nf12_serving import prompts

    engine, tokenizer = _loaded(model)
    ids = prompts(model, data, requests, prompt, seed)
    what = _requests(tokenizer, ids, requests, scale, seed)
    wanted: dict[int, Any] = {}
    tokens = 0
    # A budget that never fits more than some rows, so that widths change from step to step.
    config = PaceConfig(tpot_slo_s=H200_32B[0] * 1.05, ttft_slo_s=H200_32B[0] * 1.05, rho=1.0)
    for name in ("alone", "off", "eager", "cap:2", "pace"):
        engine = PackedBranchEngine(engine.model, audit=name not in ("alone", "eager"))
        for ids_of, stages in what:
            engine.submit(ids_of, stages)
        engine.run(
            "off" if name == "alone" else name,
            predictor=LatencyPredictor(*H200_32B, refit_every_s=float("inf")),
            config=config,
            concurrency=1 if name == "alone" else requests,
        )
        if name == "alone":
            wanted = engine.outputs
            tokens = sum(len(out) for stages in wanted.values() for stage in stages for out in stage)
            continue
        unlike = sum(
            a != b
            for number, stages in wanted.items()
            for stage, other in zip(stages, engine.outputs[number], strict=True)
            for out, found in zip(stage, other, strict=True)
            for a, b in zip(out, found, strict=True)
        )
        budget = {"tokens": tokens}
        ctx.record(method=name, metric="tokens unlike those alone", value=unlike, budget=budget)
        if engine.audit:
            ctx.record(
                method=name, metric="steps that deferred rows", value=len(engine.deferrals), budget=budget
            )
            for what_of in ("allocated", "freed", "moved"):
                count = sum(abs(getattr(one, what_of)) for one in engine.deferrals)
                ctx.record(method=name, metric=f"{what_of} by deferrals", value=count, budget=budget)
    return {"tokens": tokens}
