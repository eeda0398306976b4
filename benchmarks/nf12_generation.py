"""Greedy generation with SmolLM2: tokens a second in four forms of the same weights, and whether tokens agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from common import Report, Work, counted, ratio, told

from gnomon.core.errors import GnomonError
from gnomon.core.evaluate import weight_bytes
from gnomon.core.generation import generate
from gnomon.core.models import load
from gnomon.core.timing import spread, threads_set
from gnomon.studies.nf12_serving import model_in

MODEL = "smollm2-135m"
PROMPTS = [
    "The shadow moves",
    "At noon the",
    "The year is",
    "A child asks",
    "In winter the",
    "The mason",
    "Clocks",
    "Time",
]
"""Short ones: it is the steps after the prompt that are timed."""
RUNS = ((1, 24, 3), (8, 8, 3))
"""(rows, new tokens, repeats): some seconds of each."""
NF12, MATCHED = "NF12", "BF16, fast_linears"


def generation(report: Report, threads: Sequence[int]) -> None:
    """Time it with each number of threads, or say that the model isn't there."""
    kinds = {
        NF12: "NF12",
        MATCHED: "BF16, matched",
        "BF16, torch": "BF16, torch",
        "FP32, torch": "FP32, torch",
    }
    try:
        tokenizer = load(MODEL, dtype="bfloat16").tokenizer
        models = {name: model_in(kind, MODEL) for name, kind in kinds.items()}
    except GnomonError as error:
        report.leave_out(f"generation with {MODEL}", str(error))
        return
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    for number in threads:
        for rows, new, repeats in RUNS:
            with threads_set(number):
                _compare(report, models, ids[:rows], new, repeats, number)


def _compare(
    report: Report, models: dict[str, Any], ids: list[list[int]], new: int, repeats: int, threads: int
) -> None:
    """One table. Each call generates from the prompts on, so their part of the work is in it."""
    calls = {
        name: partial(generate, m, ids, max_new_tokens=new, eos=(), batch_size=len(ids))
        for name, m in models.items()
    }
    tokens = {name: call() for name, call in calls.items()}  # the warm-up, too
    what = f"generation, {counted(len(ids), 'row')}"
    report.check(
        f"{what}, {counted(threads, 'thread')}: NF12 gives the tokens of {MATCHED}",
        tokens[NF12] == tokens[MATCHED],
    )
    report.stop_if_wrong()
    alike = [name for name in tokens if tokens[name] == tokens[NF12]]
    seconds = report.time(
        f"{what} of {MODEL}, {new} new tokens",
        [
            Work(name=name, calls=[call], bytes=new * weight_bytes(models[name]))
            for name, call in calls.items()
        ],
        repeats=repeats,
        warm_up=0,
        threads=threads,
    )
    rates = {name: len(ids) * new / spread(times).median for name, times in seconds.items()}
    for name, rate in rates.items():
        report.rows.append(
            {"kind": "tokens", "what": what, "threads": threads, "contender": name, "tokens_per_s": rate}
            | {"same_tokens_as_nf12": name in alike}
        )
    report.note("tokens/s: " + "; ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    report.note(f"the same tokens: {', '.join(alike)}")
    report.note(f"NF12 over BF16, torch: {told(ratio(seconds['BF16, torch'], seconds[NF12]))} x as fast")
