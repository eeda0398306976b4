"""Planning time of Pace's Algorithm 1, and how fast its simulator runs.

    python benchmarks/pace.py [--quick] [--repeats N] [--json FILE]

The planner gets rows as arrays, groups them, and plans; contexts, progress and deadlines are drawn anew for every copy.
Contenders are the whole planner, its two forms of Algorithm 1 alone (a heap; sorting), and the algorithm as written, a
plain loop that tries every head for each admission. Shapes are requests x branches. The aim is a plan in less than
1 ms at 512 requests of 16 branches.

Both forms are checked against the plain loop, and the plain loop against brute force, before anything is timed. Exits 1
where one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from common import Report, Work, parser_of, run

from gnomon.core.timing import spread
from gnomon.methods.serve.pace import (
    H200_32B,
    Groups,
    LatencyPredictor,
    Mix,
    PaceConfig,
    make_policy,
    mixed_workload,
    simulate_decode,
)
from gnomon.methods.serve.pace import admit as forms
from gnomon.methods.serve.pace.admit import EPS, Extras

PREDICTOR = LatencyPredictor(*H200_32B)
AIM = 1e-3
PLAIN_LIMIT = 600
"""Rows above which the plain loop, whose time grows with requests times admissions, isn't timed."""
ROW_BYTES = 5 * 8


def drawn(requests: int, branches: int, seed: int) -> Groups:
    """Rows of a step in which deadlines bind."""
    rng = np.random.default_rng(seed)
    rows = requests * branches
    return Groups.from_arrays(
        np.repeat(np.arange(requests), branches),
        rng.integers(200, 4000, rows),
        np.repeat(rng.uniform(0.05, 0.06, requests), branches),
        rng.integers(0, 200, rows),
    )


def budget_of(x: Extras) -> float:
    """A budget in whose middle the admissions end."""
    return PREDICTOR.predict(x.n + len(x.place) // 2, x.tokens + int(x.added.sum()) // 2)


def plain(x: Extras, predictor: LatencyPredictor, budget: float) -> list[int]:
    """Algorithm 1 as written."""
    waiting: dict[int, list[int]] = {}
    for j, group in enumerate(x.group.tolist()):
        waiting.setdefault(group, []).append(j)
    added, gain = x.added.tolist(), x.gain.tolist()
    n, tokens, chosen = x.n, x.tokens, []
    while waiting:
        best, found = 0.0, None
        for group in list(waiting):
            j = waiting[group][0]
            if predictor.predict(n + 1, tokens + added[j]) > budget:
                del waiting[group]
                continue
            score = gain[j] / (EPS + predictor.b + predictor.c * added[j])
            if score > best:
                best, found = score, group
        if found is None:
            break
        j = waiting[found].pop(0)
        if not waiting[found]:
            del waiting[found]
        chosen.append(j)
        n, tokens = n + 1, tokens + added[j]
    return chosen


def check(report: Report) -> None:
    """Both forms by the plain loop; its number of rows by all combinations of prefixes."""
    agree, most = True, True
    for seed in range(20):
        for utility in ("linear", "concave"):
            x = forms.extras(drawn(9, 7, seed), utility=utility)  # type: ignore[arg-type]
            budget = budget_of(x)
            wanted = plain(x, PREDICTOR, budget)
            for form in (forms.admit_heap, forms.admit_sorted):
                agree &= form(x, PREDICTOR, budget).tolist() == wanted
        groups = drawn(3, 4, seed)
        for at in range(3):
            groups.context[4 * at : 4 * at + 4].sort()  # heads by context, where greedy is optimal
        x = forms.extras(groups)
        most &= len(plain(x, PREDICTOR, budget_of(x))) == brute(x, budget_of(x))
    report.check("heap and sorted forms decide as the plain loop does", agree)
    report.check("the plain loop admits as many rows as any choice", most)


def brute(x: Extras, budget: float) -> int:
    """Most further rows that fit, over all prefixes of the queues."""
    most = 0
    queues = [x.added[x.group == group] for group in np.unique(x.group)]
    for widths in itertools.product(*(range(len(queue) + 1) for queue in queues)):
        run = np.concatenate([queue[:width] for queue, width in zip(queues, widths, strict=True)])
        if PREDICTOR.predict(x.n + len(run), x.tokens + int(run.sum())) <= budget:
            most = max(most, len(run))
    return most


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    report.begin(options, ["numpy"])
    check(report)
    report.stop_if_wrong()
    for requests, branches in ((4, 4), (8, 4)) if options.quick else ((32, 16), (64, 8), (512, 16)):
        plans(report, requests, branches, options.repeats)
    simulator(report, quick=options.quick)


def plans(report: Report, requests: int, branches: int, repeats: int) -> None:
    """Planning times of one shape."""
    rows, copies = requests * branches, 8
    steps = [drawn(requests, branches, seed) for seed in range(copies)]
    extras = [forms.extras(step) for step in steps]
    budgets = [budget_of(x) for x in extras]
    policy = make_policy("pace")

    def whole(step: Groups, budget: float) -> Callable[[], object]:
        group = np.repeat(np.arange(requests), branches)
        t0 = PREDICTOR.predict(requests, int(step.context[step.start[:-1]].sum()))
        config = PaceConfig(rho=1.0, tpot_slo_s=1.0)
        deadline = np.full(rows, max(budget, t0))

        def call() -> object:
            groups = Groups.from_arrays(group, step.context, deadline, step.progress)
            return policy.select(groups, PREDICTOR, config, 0.0)

        return call

    def form(function: Callable[[Extras, LatencyPredictor, float], object]) -> list[Callable[[], object]]:
        return [
            lambda x=x, budget=budget: function(x, PREDICTOR, budget)  # type: ignore[misc]
            for x, budget in zip(extras, budgets, strict=True)
        ]

    contenders = [
        Work(
            name="planner, rows to plan",
            calls=[whole(step, budget) for step, budget in zip(steps, budgets, strict=True)],
            bytes=rows * ROW_BYTES,
        ),
        Work(name="admission, sorted", calls=form(forms.admit_sorted), bytes=rows * ROW_BYTES),
        Work(name="admission, heap", calls=form(forms.admit_heap), bytes=rows * ROW_BYTES),
    ]
    if rows <= PLAIN_LIMIT:
        contenders.append(Work(name="admission, plain loop", calls=form(plain), bytes=rows * ROW_BYTES))
    else:
        report.leave_out("plain loop", f"{rows} rows would take seconds a plan")
    seconds = report.time(
        f"{requests} requests x {branches} branches", contenders, threads=1, repeats=repeats
    )
    median = spread(seconds["planner, rows to plan"]).median
    report.target(f"1 ms over a plan of {rows} rows", AIM / median, 1.0)


def simulator(report: Report, *, quick: bool) -> None:
    """Steps and tokens that the simulator decodes in a second."""
    requests = mixed_workload(8 if quick else 200, Mix(), np.random.default_rng(0))
    for policy in ("off", "eager", "pace"):
        started = time.perf_counter()
        found = simulate_decode(
            requests, policy, PREDICTOR, concurrency=64, config=PaceConfig(tpot_slo_s=0.018)
        )
        taken = time.perf_counter() - started
        report.note(
            f"simulator, {policy}: {len(found.log.start) / taken:,.0f} steps and {found.log.rows.sum() / taken:,.0f} "
            "tokens a second"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = parser_of(__doc__, threads=[1], repeats=15)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
