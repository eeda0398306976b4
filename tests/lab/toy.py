"""A tiny study for the lab's own tests: no torch work, every kind of stage."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gnomon.core.errors import NumericalFailure
from gnomon.core.files import dump_json, read_json, write_atomic
from gnomon.lab import Lab, StudyConfig


def counter(ctx, *, seed: int, steps: int, log: str) -> float:
    """A resumable loop, as training is: its checkpoint holds position, state and the records so far."""
    state = {"step": 0, "total": 0.0, "records": []}
    file = ctx.checkpoint / "state.json"
    if file.exists():
        state = read_json(file)
        ctx.restore(state["records"])
        note(log, f"resumed {seed} at {state['step']}")
    for step in range(state["step"], steps):
        state["total"] += float(np.random.default_rng([seed, step]).normal())
        ctx.record(method="toy", metric="total", value=state["total"], tags={"step": step})
        state |= {"step": step + 1, "records": ctx.snapshot()}
        if ctx.first:
            ctx.checkpoint.mkdir(exist_ok=True)
            write_atomic(file, dump_json(state))
        if step == 3 and os.environ.get("TOY_HOLD") == str(seed):
            time.sleep(600)  # until the test kills this process
    note(log, f"counter {seed}")
    write_atomic(ctx.dir / "artefact.txt", repr(state["total"]))
    return state["total"]


def double(ctx, *, of, log: str) -> float:
    assert (of.dir / "artefact.txt").read_text() == str(of.value)
    ctx.record(method="toy", metric="double", value=2 * of.value, better="higher", budget={"steps": 1})
    ctx.record(
        method="base",
        metric="double",
        value=2 * of.value - 1 - 0.01 * ctx.seed,
        better="higher",
        budget={"steps": 1},
    )
    note(log, f"double {ctx.seed}")
    return 2 * of.value


def total(ctx, *, parts, log: str) -> float:
    ctx.record(method="toy", metric="sum", value=sum(p.value for p in parts))
    note(log, "total")
    return sum(p.value for p in parts)


def timing(ctx, *, log: str) -> None:
    began = time.time()
    time.sleep(0.05)
    ctx.record(method="toy", metric="seconds", value=time.time() - began, unit="s", budget={"seconds": 0.05})
    note(log, f"timing {began} {time.time()}")


def diverge(ctx, *, seed: int) -> float:
    ctx.record(method="toy", metric="loss", value=1.0)
    raise NumericalFailure("loss is nan at step 3")


def crash(ctx) -> None:
    raise RuntimeError("a bug")


def misplaced(ctx) -> None:
    raise NumericalFailure(f"{ctx.dir / 'loss.txt'} holds nan")


def exit(ctx) -> None:
    sys.exit(0)


def pipe(ctx) -> None:
    raise BrokenPipeError


def note(log: str, text: str) -> None:
    if log:
        with Path(log).open("a") as file:
            file.write(text + "\n")


@dataclass(frozen=True, kw_only=True)
class ToyStudy(StudyConfig):
    """A toy."""

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 3
    log: str = ""
    fail: str = ""
    data: str | None = None

    profiles: ClassVar[dict[str, dict[str, Any]]] = {"smoke": {"steps": 1}, "full": {"steps": 5}}
    disk_bytes: ClassVar[int] = 1000

    def run(self, lab: Lab) -> None:
        from gnomon.lab.claims import Paired

        doubled = []
        for seed in lab.seeds:
            counted = lab.stage(counter, seed=seed, steps=self.steps, log=self.log)
            doubled.append(lab.stage(double, of=counted, log=self.log))
        lab.stage(total, parts=doubled, log=self.log)
        lab.stage(timing, log=self.log, exclusive=True)
        if self.fail == "diverge":
            lab.stage(double, of=lab.stage(diverge, seed=0), log=self.log)
        if stage := {"crash": crash, "exit": exit, "pipe": pipe}.get(self.fail):
            lab.stage(stage)
        lab.claim("toy.1", rule=Paired(metric="double", method="toy", to="base", equal=("steps",)), grade="T")
        lab.figure(totals)


def totals(records, done, path):
    """Totals per step: the toy's only figure.

    Not part of the caption.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(4, 3))
    rows = records[records.metric == "total"]
    for seed, group in rows.groupby("seed"):
        ax.plot(group.step, group.value, label=f"seed {seed}")
    ax.legend()
    fig.savefig(path)
