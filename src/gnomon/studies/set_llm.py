"""Set-LLM: is a model blind to the order of options, and what does that take and give?

Invariance is exact and needs no training: all orders of a few questions, for the six rungs of the ablation. What it is
worth is asked of adapters that are trained on generated questions with equal steps, each at its best rate of one grid,
and judged on questions whose words were never learnt. Rivals: the causal model, its vote over all orders, and the
causal model with its options sorted. Stages are in `set_llm_stages`, figures in `set_llm_figures`, questions in
`gnomon.methods.layers.set_llm.items`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.core.errors import UsageError
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import AllOf, Count, Exact, HoldsOnly, NonInferior, Paired, Ratio, Tolerance
from gnomon.lab.tune import tune
from gnomon.methods.layers.set_llm.items import GENERATED, OPTIONS, questions
from gnomon.studies.set_llm_figures import accuracies, learning, spreads
from gnomon.studies.set_llm_stages import (
    EXCHANGED,
    FIRST,
    FLIPS,
    LOGITS,
    LOST,
    RANDOM,
    SPREAD,
    VOTE,
    WORST,
    invariance,
    learn,
    sensitivity,
    step_times,
)

MODES = ("causal+pe", "causal+nope", "prefix+nope", "prefix+pe", "prefix+setpe", "setmask+setpe")
SET, CAUSAL, SORTED = "setmask+setpe", "causal+pe", "causal+pe, sorted"
PRETRAINED = "pretrained, "
TOLD_APART = 0.01
"""Nats by which the mask must tell exchanged elements apart; the card measured .65 and, without the mask, 2e-4."""


@dataclass(frozen=True, kw_only=True)
class SetLLMStudy(StudyConfig):
    """Settings, stages and claims of the study."""

    model: str = "smollm2-135m"
    """A decoder with rotary positions: embedded name, `tiny:`, folder or hub id."""
    data: str = GENERATED
    """Questions: "words", or a .jsonl file with question, choices and answer a line (also ARC's form)."""
    dtype: str = "float32"
    """Orders show in less."""
    seeds: tuple[int, ...] = (0, 1, 2)
    modes: tuple[str, ...] = (CAUSAL, SET)
    """Rungs that are trained; claims need causal+pe and setmask+setpe."""
    canonical: bool = False
    """Also train the causal model with sorted options."""
    rates: tuple[float, ...] = (3e-3,)
    tuning_seeds: tuple[int, ...] = (1000,)
    train_questions: int = 2000
    valid_questions: int = 64
    test_questions: int = 24
    """Questions that judge, each in all its orders."""
    exact_questions: int = 1
    """Questions whose log-probabilities are compared over all orders in float64 and float32."""
    permutations: int = 24
    """Orders of a question, at most; with more options than four the first ones count, as in the paper."""
    steps: int = 25
    batch: int = 4
    points: int = 4
    repeats: int = 15
    """Of a timing."""

    slug: ClassVar[str] = "set-llm"
    sources: ClassVar[tuple[str, ...]] = ("model", "data")
    disk_bytes: ClassVar[int] = 2_500_000_000
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "seeds": (0,),
            "modes": MODES,
            "canonical": True,
            "rates": (1e-3, 3e-3),
            "train_questions": 16,
            "valid_questions": 8,
            "test_questions": 2,
            "exact_questions": 1,
            "steps": 2,
            "batch": 4,
            "points": 1,
            "repeats": 3,
        },
        "full": {
            "modes": MODES,
            "canonical": True,
            "rates": (1e-3, 3e-3),
            "test_questions": 60,
            "exact_questions": 3,
            "steps": 60,
            "batch": 8,
            "points": 8,
            "repeats": 31,
        },
        "gpu": {
            "model": "google/gemma-2b",
            "data": "./commonsense_qa.jsonl",
            "modes": MODES,
            "canonical": True,
            "rates": (1e-4, 3e-4, 1e-3, 3e-3),
            "train_questions": 100_000,
            "valid_questions": 500,
            "test_questions": 1_140,
            "exact_questions": 20,
            "steps": 3_000,
            "batch": 10,
            "points": 30,
            "repeats": 31,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for mode in self.modes:
            if mode not in MODES:
                raise UsageError(f"modes holds {mode!r}; known are {', '.join(MODES)}.")
        if missing := [mode for mode in (CAUSAL, SET) if mode not in self.modes]:
            raise UsageError(f"{', '.join(missing)} must be among modes: claims need it.")
        for name in (
            "train_questions valid_questions test_questions exact_questions permutations steps batch points repeats"
        ).split():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.rates or min(self.rates) <= 0:
            raise UsageError(f"rates must be positive learning rates, at least one, got {self.rates}.")

    def check(self) -> None:
        super().check()
        for part, count in (
            ("train", self.train_questions),
            ("valid", self.valid_questions),
            ("test", self.test_questions),
        ):
            questions(self.data, part, count)

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (spreads, accuracies, learning):
            lab.figure(figure)
        of: dict[str, Any] = {"model": self.model, "items": self.data}
        for dtype in ("float64", "float32"):
            lab.stage(invariance, **of, dtype=dtype, count=self.exact_questions, modes=MODES)
        judged: dict[str, Any] = {
            **of,
            "dtype": self.dtype,
            "count": self.test_questions,
            "permutations": self.permutations,
        }
        for mode in self.modes:
            lab.stage(sensitivity, **judged, method=PRETRAINED + mode, mode=mode, canonical=False)
        entrants = [(mode, mode, False) for mode in self.modes]
        entrants += [(SORTED, CAUSAL, True)] if self.canonical else []
        for name, mode, canonical in entrants:
            shared: dict[str, Any] = {
                **of,
                "method": name,
                "mode": mode,
                "canonical": canonical,
                "dtype": self.dtype,
                "learnt": self.train_questions,
                "held_out": self.valid_questions,
                "steps": self.steps,
                "batch": self.batch,
                "points": self.points,
            }
            tuned = tune(lab, learn, grid={"lr": self.rates}, seeds=self.tuning_seeds, score="loss", **shared)
            for seed in lab.seeds:
                trained = lab.stage(learn, seed=seed, **tuned.settings, **shared)
                lab.stage(
                    sensitivity,
                    of=trained,
                    **judged,
                    method=name,
                    mode=mode,
                    canonical=canonical,
                    trials=tuned.trials,
                    seed=seed,
                )
        lab.stage(step_times, exclusive=True, **of, dtype=self.dtype, batch=self.batch, repeats=self.repeats)

    def _claims(self, lab: Lab) -> None:
        shown = {
            "the choice flips": Paired(metric=FLIPS, method=PRETRAINED + CAUSAL, over="item", side="above"),
            "the worst order costs accuracy": Paired(
                metric=LOST, method=PRETRAINED + CAUSAL, over="item", side="above"
            ),
            "the first place is preferred": Exact(
                test="sign-flip",
                metric=FIRST,
                method=PRETRAINED + CAUSAL,
                over="item",
                side="above",
                bound=1 / OPTIONS,
            ),
        }
        lab.claim("set-llm.1", rule=AllOf(shown), grade="R")
        double, single = {"dtype": "float64"}, {"dtype": "float32"}
        blind = {
            "logits in float64": Tolerance(metric=LOGITS, method=SET, limit=1e-10, where=double),
            "log-probabilities in float32": Tolerance(metric=SPREAD, method=SET, limit=1e-3, where=single),
            "no flips": Tolerance(metric=FLIPS, method=SET, limit=0.0, where=single),
            "the exchange trap, with the mask": HoldsOnly(
                Count(metric=EXCHANGED, method=SET, minimum=TOLD_APART, where=single)
            ),
            "the exchange trap, without": Tolerance(
                metric=EXCHANGED, method="prefix+setpe", limit=1e-3, where=single
            ),
        }
        blind |= {  # the same measurement must tell who isn't blind, or it says nothing about who is
            f"{mode} isn't blind": HoldsOnly(Count(metric=SPREAD, method=mode, minimum=1e-3, where=single))
            for mode in (CAUSAL, "prefix+pe")
        }
        lab.claim("set-llm.2", rule=AllOf(blind), grade="X")
        comparable = {
            "over orders, v causal": NonInferior(
                metric=RANDOM, method=SET, to=CAUSAL, margin=0.02, over="item"
            ),
            "over orders, v its vote": NonInferior(
                metric=RANDOM, method=SET, to=CAUSAL, to_metric=VOTE, margin=0.02, over="item"
            ),
            "in the worst order, v causal": Paired(metric=WORST, method=SET, to=CAUSAL, over="item"),
        }
        lab.claim("set-llm.3", part="a", rule=AllOf(comparable), grade="R")
        times = {
            metric: Ratio(metric=metric, method=SET, to=CAUSAL, number=1.1, at_most=True)
            for metric in ("time of a training step", "time of reading")
        }
        lab.claim("set-llm.3", part="b", rule=AllOf(times), grade="R")
