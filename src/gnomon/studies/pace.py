"""Pace: what branches cost the requests beside them, and what planning each step's width gains.

Policies serve the same requests in a simulator whose step time is that of a 32B model on 8 H200 (`pace_stages`), and a
real model decodes branches in packed steps (`pace_engine`). Goodput is always there twice: by effective TPOT (tokens
of all branches, the authors' definition) and by progress (steps in which the request advanced). Claims about the ratio
of goodputs are judged by both, those about caps by progress, since by tokens any branching request passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import AllOf, Count, KofN, Paired, Ratio, Rule
from gnomon.studies.pace_engine import calibrate, engine_runs, memory, rows_named
from gnomon.studies.pace_figures import ablations, attainments, goodputs, step_times, widths
from gnomon.studies.pace_stages import (
    CAUSES,
    EAGER,
    LOADS,
    OFF,
    PACE,
    REGIMES,
    planning,
    policies,
    safe_width,
    serve,
)

DEFINITIONS = ("effective", "progress")
CLAIMED_OFF, CLAIMED_EAGER = 1.77, 1.48
NEAR = 0.95
"""A cap is near Pace where it has so much of its goodput."""
EXPECTED = {"batch": "below", "context": "below", "slack": "above"}
"""Side of 0 on which each cause's slope should lie."""
PLANNER_LIMIT = 1e-3


@dataclass(frozen=True, kw_only=True)
class PaceStudy(StudyConfig):
    """Settings, stages and claims of the study."""

    loads: tuple[str, ...] = ("branchy", "mixed", "few", "long")
    """Out of `LOADS`; claims need branchy, mixed and few, and at least four."""
    caps: tuple[int, ...] = (2, 3, 5)
    """Fixed widths; claims need 2 and 5."""
    turns: float = 3.0
    """Requests of a load for each seed, as a multiple of those in flight: too few never reach a steady state."""
    noise: float = 0.05
    """Of a step's time, as the standard deviation of its logarithm."""
    ablated: tuple[str, ...] = ("branchy", "mixed")
    """Loads on which Pace's parts are left out one by one."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Of the requests drawn."""
    model: str = "smollm2-135m"
    """The model that decodes branches for real."""
    data: str = "stdlib"
    """Text that its prompts are cut from."""
    sizes: tuple[int, ...] = (1, 4, 12, 32)
    """Rows of the packed steps that are timed; the claim compares the least with the most."""
    repeats: int = 15
    """Interleaved repeats of each size."""
    engine_seeds: tuple[int, ...] = (0, 1, 2)
    """Of the real engine's requests."""
    engine_requests: int = 12
    engine_concurrency: int = 4
    scale: int = 6
    """Tokens of a serial stage of the real engine's branching requests; all lengths follow."""
    prompt: int = 64
    """Tokens of the longest prompt."""
    plans: int = 50
    """Plans of each of the repeats in which planning is timed."""

    slug: ClassVar[str] = "pace"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "turns": 0.15,
            "seeds": (0,),
            "caps": (2, 5),
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "sizes": (1, 8),
            "repeats": 2,
            "engine_seeds": (0,),
            "engine_requests": 4,
            "scale": 2,
            "prompt": 16,
            "plans": 3,
        },
        "full": {
            "loads": tuple(LOADS),
            "caps": (2, 3, 4, 5, 8),
            "turns": 6.0,
            "ablated": tuple(LOADS),
            "seeds": (0, 1, 2, 3, 4, 5, 6, 7),
            "repeats": 21,
            "engine_seeds": (0, 1, 2, 3, 4, 5),
            "engine_requests": 12,
            "scale": 10,
            "prompt": 128,
            "plans": 400,
        },
        "gpu": {
            "loads": tuple(LOADS),
            "caps": (2, 3, 4, 5, 8),
            "turns": 9.0,
            "ablated": tuple(LOADS),
            "seeds": tuple(range(10)),
            "model": "Qwen/Qwen3-8B",
            "sizes": (1, 8, 32, 128),
            "repeats": 31,
            "engine_seeds": (0, 1, 2, 3, 4, 5),
            "engine_requests": 48,
            "engine_concurrency": 16,
            "scale": 60,
            "prompt": 1024,
            "plans": 400,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("loads", "ablated"):
            for load in getattr(self, name):
                if load not in LOADS:
                    raise unknown(f"value of {name}:", load, LOADS)
        if missing := {"branchy", "mixed", "few"} - set(self.loads):
            raise UsageError(f"loads lacks {', '.join(sorted(missing))}, which claims are judged on.")
        if len(set(self.loads)) < 4:
            raise UsageError(f"loads={self.loads}: the claim about caps needs at least four loads.")
        if not {2, 5} <= set(self.caps) or min(self.caps) < 1:
            raise UsageError(f"caps must be widths from 1 on with 2 and 5 among them, got {self.caps}.")
        if not 0 < self.turns <= 100:
            raise UsageError(f"turns={self.turns} must lie in (0, 100].")
        for name in ("repeats", "engine_requests", "engine_concurrency", "scale", "plans"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.prompt < 4:
            raise UsageError(f"prompt={self.prompt} must be at least 4: the shortest has a quarter of it.")
        if len(self.sizes) < 2 or min(self.sizes) < 1 or not self.engine_seeds:
            raise UsageError(f"sizes={self.sizes} must be two numbers of rows or more, and engine_seeds one.")

    def run(self, lab: Lab) -> None:
        for seed in lab.seeds:
            for load in self.loads:
                lab.stage(
                    serve,
                    load=load,
                    seed=seed,
                    requests=self._requests(load),
                    policies=policies(self.caps, ablations=load in self.ablated),
                    noise=self.noise,
                )
            lab.stage(safe_width, seed=seed, requests=self._requests("mixed"))
        of_text: dict[str, Any] = {"model": self.model, "data": self.data}
        lab.stage(memory, requests=4, scale=self.scale, prompt=max(4, self.prompt // 2), seed=0, **of_text)
        for requests in (32, 512):
            lab.stage(
                planning,
                exclusive=True,
                requests=requests,
                branches=16,
                repeats=self.repeats,
                plans=self.plans,
            )
        timed = lab.stage(
            calibrate,
            exclusive=True,
            sizes=self.sizes,
            repeats=self.repeats,
            prompt=self.prompt,
            threads=self.threads,
            seed=0,
            **of_text,
        )
        for seed in self.engine_seeds:
            lab.stage(
                engine_runs,
                exclusive=True,
                of=timed,
                requests=self.engine_requests,
                concurrency=self.engine_concurrency,
                scale=self.scale,
                prompt=self.prompt,
                threads=self.threads,
                seed=seed,
                **of_text,
            )
        self._claims(lab)
        for figure in (goodputs, attainments, step_times, widths, ablations):
            lab.figure(figure)

    def _requests(self, load: str) -> int:
        in_flight: int = LOADS[load]["concurrency"]
        return max(8, round(self.turns * in_flight))

    def _claims(self, lab: Lab) -> None:
        lab.claim("pace.1", part="simulated", rule=AllOf(self._inflates()), grade="S")
        slower = Ratio(
            metric="packed step",
            method=rows_named(min(self.sizes)),
            to=rows_named(max(self.sizes)),
            number=1.0,
            part="direction",
        )
        lab.claim("pace.1", part="step", rule=slower, grade="R")
        victims = {
            "step time": Paired(metric="engine step time", method=EAGER, to=OFF, side="above"),
            "victims' TPOT": Paired(metric="engine victim TPOT", method=EAGER, to=OFF, side="above"),
            "serial attainment": Paired(
                metric="engine attainment, progress, serial", method=EAGER, to=OFF, side="below"
            ),
        }
        lab.claim("pace.1", part="engine", rule=AllOf(victims), grade="R")
        lab.claim("pace.2", part="best cap", rule=AllOf(_best_cap_differs()), grade="S")
        lab.claim("pace.2", part="no cap", rule=AllOf(self._no_cap_is_near()), grade="S")
        slopes = {
            cause: Paired(
                metric="slope of the safe width",
                method=PACE,
                where={"cause": cause},
                side=EXPECTED[cause],  # type: ignore[arg-type]
            )
            for cause in CAUSES
        }
        lab.claim("pace.2", part="causes", rule=AllOf(slopes), grade="S")
        for part, to, number in (("a", OFF, CLAIMED_OFF), ("b", EAGER, CLAIMED_EAGER)):
            lab.claim("pace.3", part=part, rule=AllOf(_gains(to, 1.0)), grade="S")
            lab.claim("pace.3", part=f"{part}, number", rule=AllOf(_gains(to, number)), grade="S")
        attained = {
            f"{load}, {definition}": Paired(
                metric=f"attainment, {definition}, all",
                method=PACE,
                where={"load": load},
                side="above",
                bound=0.95,
            )
            for load in REGIMES
            for definition in DEFINITIONS
        }
        lab.claim("pace.3", part="c", rule=AllOf(attained), grade="S")
        still: dict[str, Rule] = {
            what: Count(metric=f"{what} by deferrals", equals=0) for what in ("allocated", "freed", "moved")
        }
        still["deferrals happened"] = Count(metric="steps that deferred rows", minimum=1)
        lab.claim("pace.4", part="memory", rule=AllOf(still), grade="R")
        same = Count(metric="tokens unlike those alone", equals=0)
        lab.claim("pace.4", part="tokens", rule=same, grade="R")
        quick = {
            f"{quantile}, {requests} x 16": Paired(
                metric=f"planner time, {quantile}",
                method=PACE,
                where={"requests": requests},
                over="item",
                side="below",
                bound=PLANNER_LIMIT,
            )
            for requests in (32, 512)
            for quantile in ("P50", "P99")
        }
        lab.claim("pace.4", part="planner", rule=AllOf(quick), grade="R")

    def _inflates(self) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        for load in REGIMES:
            for metric, side in (
                ("step time", "above"),
                ("victim TPOT", "above"),
                ("attainment, progress, serial", "below"),
            ):
                found[f"{load}, {metric}"] = Paired(
                    metric=metric,
                    method=EAGER,
                    to=OFF,
                    where={"load": load},
                    side=side,  # type: ignore[arg-type]
                )
        return found

    def _no_cap_is_near(self) -> dict[str, Rule]:
        """For each cap a load on which it has less than 95 % of Pace's goodput."""
        found: dict[str, Rule] = {}
        for cap in self.caps:
            below: dict[str, Rule] = {
                load: Paired(
                    metric="log goodput, progress",
                    method=f"cap:{cap}",
                    to=PACE,
                    where={"load": load},
                    side="below",
                    bound=math.log(NEAR),
                )
                for load in self.loads
            }
            found[f"cap {cap}"] = KofN(1, below)
        return found


def _best_cap_differs() -> dict[str, Rule]:
    """Two loads and two caps, fixed beforehand: narrow wins where many requests branch, wide where few are there."""
    better: Sequence[tuple[str, int, int]] = (("branchy", 2, 5), ("few", 5, 2))
    return {
        f"{load}: {first} before {second}": Paired(
            metric="goodput, progress", method=f"cap:{first}", to=f"cap:{second}", where={"load": load}
        )
        for load, first, second in better
    }


def _gains(to: str, number: float) -> dict[str, Rule]:
    return {
        f"{load}, {definition}": Paired(
            metric=f"log goodput, {definition}",
            method=PACE,
            to=to,
            where={"load": load},
            side="above",
            bound=math.log(number),
        )
        for load in REGIMES
        for definition in DEFINITIONS
    }
