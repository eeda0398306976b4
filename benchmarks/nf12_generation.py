"""Greedy generation with SmolLM2: tokens a second in four forms of the same weights, and whether tokens agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common import Report, Work, counted, ratio, told

from gnomon.core.errors import GnomonError
from gnomon.core.generation import generate
from gnomon.core.models import Loaded, load
from gnomon.core.timing import spread
from gnomon.kernels.bf16.module import fast_linears
from gnomon.methods.compress.nf12 import NF12Weight, compress_model
from gnomon.studies.nf12_timing import threads_set

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
    forms: dict[str, Callable[[], Loaded]] = {
        NF12: _nf12,
        MATCHED: _fast,
        "BF16, torch": partial(load, MODEL, dtype="bfloat16"),
        "FP32, torch": partial(load, MODEL, dtype="float32"),
    }
    try:
        models = {name: make() for name, make in forms.items()}
    except GnomonError as error:
        report.leave_out(f"generation with {MODEL}", str(error))
        return
    ids = [models[NF12].tokenizer(text).input_ids for text in PROMPTS]
    for number in threads:
        for rows, new, repeats in RUNS:
            with threads_set(number):
                _compare(report, models, ids[:rows], new, repeats, number)


def _fast() -> Loaded:
    loaded = load(MODEL, dtype="bfloat16")
    fast_linears(loaded.model)
    return loaded


def _nf12() -> Loaded:
    loaded = load(MODEL, dtype="bfloat16")
    compress_model(loaded.model)
    return loaded


def _compare(
    report: Report, models: dict[str, Loaded], ids: list[list[int]], new: int, repeats: int, threads: int
) -> None:
    """One table. Each call generates from the prompts on, so their part of the work is in it."""
    calls = {
        name: partial(generate, m.model, ids, max_new_tokens=new, eos=(), batch_size=len(ids))
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
            Work(name=name, calls=[call], bytes=new * weight_bytes(models[name].model))
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


def weight_bytes(model: Any) -> int:
    """Of all weights, shared ones once: what a step reads."""
    planes = {id(m): m.tensor.nbytes for m in model.modules() if isinstance(m, NF12Weight)}
    return sum(planes.values()) + sum(int(p.nbytes) for p in model.parameters())
