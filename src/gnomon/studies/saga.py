"""SAGA: what a sparse step reads, how good an approximate choice of positions is, and what fewer key heads cost.

Selectors are compared on a pretrained model all of whose query rows choose. The same model is converted to fewer key
heads in three ways and distilled with equal budgets. A family of small models that differ in head counts alone is
trained from scratch on two tasks, each at its best rate of one grid. Decoding is timed for one layer and for whole
models with random weights. Stages are in `saga_stages`, `saga_family` and `saga_timing`, figures in `saga_figures`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import (
    AllOf,
    Count,
    HoldsOnly,
    NonInferior,
    Paired,
    Ratio,
    Rule,
    ShareOf,
    Tolerance,
    Withheld,
)
from gnomon.lab.tune import tune
from gnomon.studies.saga_family import (
    ACCURACY,
    LOSS,
    RECALL_TASK,
    TASKS,
    TEXT_TASK,
    heads_of,
    learn,
    measure,
    require_room,
)
from gnomon.studies.saga_figures import conversion, family, latency, one_layer, recalls, selectors
from gnomon.studies.saga_stages import (
    BYTES,
    FORMULA,
    GUESSED,
    NLL,
    OVER_MODEL,
    SPEED,
    convert,
    random_scores,
    selection,
    texts,
    traffic,
)
from gnomon.studies.saga_timing import (
    ATTENTION_TIME,
    BYTE_SHARE,
    DENSE,
    STEP_TIME,
    attention,
    decoding,
    saga,
    scoring,
    sized,
    symmetric,
)

SELECTIONS: dict[str, tuple[str, int]] = {
    "dense": ("dense", 1),
    "exact top-N": ("exact", 1),
    "Atop-N, c = 1": ("strided", 1),
    "Atop-N, c = 2": ("strided", 2),
    "Atop-N, c = 4": ("strided", 4),
    "threshold": ("threshold", 1),
    "Quest pages": ("quest", 1),
    "shared, largest": ("shared_max", 1),
    "shared, mean": ("shared_mean", 1),
    "contiguous": ("contiguous", 1),
    "window": ("window", 1),
}
"""Selector and buckets per position, by name."""
WHOLE, EXACT, ATOP = "dense", "exact top-N", "Atop-N, c = 1"
JUDGED_N = 64
GQA, MQA, SAGA, FEW_VALUES = "8,4,4", "8,1,1", "8,1,4", "8,4,1"
LAYOUTS = (GQA, MQA, SAGA, FEW_VALUES)
INITS = ("aligned", "mean", "first")
LEARNT = 0.5
"""Share of right answers from which on the recall task tells models apart; chance is one in as many as symbols."""
LONG = 131072
"""The context at which speed is judged."""


@dataclass(frozen=True, kw_only=True)
class SagaStudy(StudyConfig):
    """Settings, stages and claims of the study."""

    model: str = "smollm2-135m"
    """The pretrained model with grouped queries: embedded name, `tiny:`, folder or hub id."""
    data: str = "mixed"
    """Text of the pretrained model: recipe, file or folder (`core.data`)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the family trained from scratch."""
    documents: int = 6
    """Held-out documents that the pretrained model is judged on."""
    window: int = 256
    """Tokens of each."""
    selectors: tuple[str, ...] = (WHOLE, EXACT, ATOP)
    """Out of `SELECTIONS`; claims need dense, exact top-N and Atop-N, c = 1."""
    kept: tuple[int, ...] = (JUDGED_N,)
    """Positions that selectors keep; claims need 64."""
    random_rows: int = 2000
    """Rows of random scores."""
    inits: tuple[str, ...] = ("aligned", "mean")
    """How key heads are merged; claims need aligned and mean."""
    key_heads: int = 1
    """Of the converted model."""
    conversion_seeds: tuple[int, ...] = (0,)
    """Of the batches of the distillation; intervals are over documents."""
    conversion_lr: float = 3e-4
    conversion_steps: int = 6
    conversion_batch: int = 1
    conversion_length: int = 256
    calibration: int = 16
    """Windows that the alignment looks at."""
    autocast: str = "bf16"
    """Of the distillation's passes: bf16 or none."""
    layers: int = 2
    hidden: int = 64
    inner: int = 128
    """Of the family trained from scratch."""
    steps: int = 300
    batch: int = 16
    length: int = 64
    pairs: int = 8
    symbols: int = 16
    """Of the recall task: pairs a row, and how many keys and values there are."""
    family_data: str = "topics"
    """Text of the family, read byte by byte."""
    family_n: int = 16
    """Positions that Atop-N keeps in the family."""
    rates: tuple[float, ...] = (0.006,)
    """The grid of learning rates of the family, the same for all."""
    tuning_seeds: tuple[int, ...] = (1000,)
    points: int = 8
    windows: int = 128
    sizes: tuple[str, ...] = ("135m:4", "1b:1")
    """Decoders that are timed, `name:layers` out of `saga_timing.SHAPES`; attention alone with the last one's heads."""
    lengths: tuple[int, ...] = (8192, 32768, LONG)
    """Contexts that are timed; claims need 131072 as the longest."""
    top_n: int = 512
    """Positions that are kept where time is measured."""
    cores: int = 2
    """Threads of what is timed."""
    repeats: int = 15
    copies: int = 0
    """Of one layer's caches; 0: as many as make four times the last-level cache. Other numbers give no verdict."""

    slug: ClassVar[str] = "saga"
    sources: ClassVar[tuple[str, ...]] = ("model", "data", "family_data")
    disk_bytes: ClassVar[int] = 3_000_000_000
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "seeds": (0,),
            "documents": 4,
            "window": 128,
            "selectors": tuple(SELECTIONS),
            "random_rows": 400,
            "inits": INITS,
            "conversion_steps": 2,
            "conversion_batch": 2,
            "conversion_length": 32,
            "calibration": 8,
            "autocast": "none",
            "hidden": 32,
            "inner": 32,
            "steps": 3,
            "batch": 4,
            "family_data": "generated:24",
            "rates": (0.003, 0.006),
            "points": 1,
            "windows": 16,
            "sizes": ("tiny:1", "tiny:2"),
            "lengths": (512, 1024),
            "top_n": 64,
            "cores": 1,
            "repeats": 3,
            "copies": 2,
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "documents": 12,
            "window": 512,
            "selectors": tuple(SELECTIONS),
            "kept": (32, JUDGED_N, 128),
            "inits": INITS,
            "conversion_steps": 150,
            "conversion_batch": 2,
            "calibration": 64,
            "steps": 600,
            "batch": 32,
            "pairs": 12,
            "rates": (0.003, 0.006, 0.012),
            "points": 20,
            "windows": 512,
            "sizes": ("135m:15", "1b:6"),
            "lengths": (8192, 32768, 65536, LONG),
            "repeats": 17,
        },
        "gpu": {
            "model": "meta-llama/Llama-3.1-8B",
            "data": "./fineweb-edu",
            "documents": 200,
            "window": 4096,
            "selectors": tuple(SELECTIONS),
            "kept": (JUDGED_N, 256, 512),
            "inits": INITS,
            "key_heads": 2,
            "conversion_steps": 20_000,
            "conversion_batch": 32,
            "conversion_length": 4096,
            "calibration": 256,
            "layers": 12,
            "hidden": 768,
            "inner": 3072,
            "steps": 20_000,
            "batch": 64,
            "length": 1024,
            "pairs": 256,
            "symbols": 512,
            "family_data": "./fineweb-edu",
            "family_n": 64,
            "rates": (0.0003, 0.001, 0.003),
            "points": 40,
            "windows": 2_000,
            "sizes": ("135m:30", "1b:16"),
            "lengths": (8192, 16384, 32768, 65536, LONG),
            "repeats": 31,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, known in (("selectors", SELECTIONS), ("inits", INITS)):
            for name in getattr(self, field):
                if name not in known:
                    raise unknown(f"value of {field}:", name, known)
        for field, needed in (
            ("selectors", (WHOLE, EXACT, ATOP)),
            ("inits", ("aligned", "mean")),
            ("kept", (JUDGED_N,)),
        ):
            if missing := [str(one) for one in needed if one not in getattr(self, field)]:
                raise UsageError(f"{', '.join(missing)} must be among {field}: claims need it.")
        for field in (
            "documents window random_rows key_heads conversion_steps conversion_batch conversion_length calibration "
            "layers hidden inner steps batch length pairs symbols family_n points windows top_n cores repeats"
        ).split():
            if getattr(self, field) < 1:
                raise UsageError(f"{field} must be at least 1, got {getattr(self, field)}.")
        if self.window <= max(self.kept) or min(self.kept) < 1:
            raise UsageError(
                f"kept={self.kept} must be numbers from 1 to below window={self.window}, or nothing is left out."
            )
        if not self.rates or min(*self.rates, self.conversion_lr) <= 0:
            raise UsageError(f"rates={self.rates} and conversion_lr={self.conversion_lr} must be positive.")
        if self.hidden % 16:
            raise UsageError(f"hidden={self.hidden} must be a multiple of 16: 8 query heads of even width.")
        require_room(self.pairs, self.length, self.symbols)
        if not self.sizes or not self.lengths or min(self.lengths) <= self.top_n:
            raise UsageError(
                f"lengths={self.lengths} must be contexts above top_n={self.top_n}, and sizes not empty."
            )
        for size in self.sizes:
            sized(size)
        if self.copies < 0:
            raise UsageError(f"copies={self.copies} must be 0 (as many as needed) or more.")
        if self.autocast not in ("none", "bf16"):
            raise unknown("autocast", self.autocast, ("none", "bf16"))
        if not self.conversion_seeds:
            raise UsageError("conversion_seeds must hold at least one seed.")

    def check(self) -> None:
        from gnomon.studies.pretraining import parts

        super().check()
        texts(self.data)
        parts(self.family_data)

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (selectors, recalls, conversion, family, one_layer, latency):
            lab.figure(figure)
        lab.stage(traffic, query_heads=32, heads=8, length=4096, n=self.top_n, width=8, seed=0)
        lab.stage(
            random_scores, sizes=(16, JUDGED_N, 256), oversamples=(1, 2, 4), rows=self.random_rows, seed=0
        )
        judged: dict[str, Any] = {
            "model": self.model,
            "data": self.data,
            "documents": self.documents,
            "window": self.window,
        }
        for name in self.selectors:
            selector, oversample = SELECTIONS[name]
            for n in self.kept[:1] if name == WHOLE else self.kept:
                lab.stage(selection, method=name, selector=selector, n=n, oversample=oversample, **judged)
        for seed in self.conversion_seeds:
            for init in self.inits:
                lab.stage(
                    convert,
                    method=init,
                    init=init,
                    key_heads=self.key_heads,
                    seed=seed,
                    lr=self.conversion_lr,
                    steps=self.conversion_steps,
                    batch=self.conversion_batch,
                    length=self.conversion_length,
                    calibration=self.calibration,
                    n=JUDGED_N,
                    autocast=self.autocast,
                    **judged,
                )
        for task in TASKS:
            for heads in LAYOUTS:
                shared = self._family(task, heads)
                tuned = tune(
                    lab, learn, grid={"lr": self.rates}, seeds=self.tuning_seeds, score="loss", **shared
                )
                for seed in lab.seeds:
                    of = lab.stage(learn, seed=seed, **tuned.settings, **shared)
                    lab.stage(measure, of=of, heads=heads, task=task, trials=tuned.trials)
        timed: dict[str, Any] = {
            "lengths": self.lengths,
            "n": self.top_n,
            "threads": self.cores,
            "repeats": self.repeats,
        }
        lab.stage(attention, exclusive=True, size=self.sizes[-1], copies=self.copies, **timed)
        for size in self.sizes:
            lab.stage(decoding, exclusive=True, size=size, **timed)

    def _family(self, task: str, heads: str) -> dict[str, Any]:
        """Arguments of `learn` but the rate and the seed."""
        heads_of(heads)
        return {
            "heads": heads,
            "task": task,
            "data": self.family_data if task == TEXT_TASK else "",
            "layers": self.layers,
            "hidden": self.hidden,
            "inner": self.inner,
            "steps": self.steps,
            "batch": self.batch,
            "length": self.length,
            "pairs": self.pairs,
            "symbols": self.symbols,
            "n": self.family_n,
            "points": self.points,
            "windows": self.windows,
        }

    # ------------------------------------------------------------------------------------------------ claims

    def _claims(self, lab: Lab) -> None:
        speed = self.speed_rules()
        lab.claim("saga.1", part="a", rule=speed["saga.1", "a"], grade="R")
        lab.claim("saga.1", part="b, bytes", rule=self._counted(), grade="X")
        better: dict[str, Rule] = {
            f"{task}, v ({other})": Paired(metric=LOSS, method=SAGA, to=other, where={"task": task})
            for task in TASKS
            for other in (MQA, FEW_VALUES)
        }
        lab.claim("saga.1", part="b, heads", rule=AllOf(better), grade="T")
        guess = Tolerance(metric=GUESSED, limit=0.015, at_least=9)
        lab.claim("saga.1", part="c, recall", rule=guess, grade="X")
        near = NonInferior(
            metric=NLL,
            method=ATOP,
            to=EXACT,
            margin=math.log(1.02),
            over="item",
            where={"n": JUDGED_N},
            equal=(),
        )
        lab.claim("saga.1", part="c, perplexity", rule=near, grade="R")
        for part in ("direction", "number"):
            lab.claim("saga.2", part=part, rule=speed["saga.2", part], grade="R")
        nearly: dict[str, Rule] = {
            task: NonInferior(metric=LOSS, method=SAGA, to=GQA, margin=ShareOf(0.01), where={"task": task})
            for task in TASKS
        }
        learnt = Count(metric=ACCURACY, method=GQA, minimum=LEARNT, where={"task": RECALL_TASK})
        nearly["the recall task is learnt"] = HoldsOnly(learnt)  # at chance all are alike
        lab.claim("saga.3", rule=AllOf(nearly), grade="T")
        lab.claim("saga.4", rule=AllOf(self._converted()), grade="R")

    def _counted(self) -> Rule:
        read = 32 * self.top_n * 8
        rules: dict[str, Rule] = {
            f"values, {h} value heads": Count(
                metric=f"{BYTES}, values", where={"value heads": h}, equals=read, at_least=4
            )
            for h in (1, 2, 4, 8)
        }
        rules |= {
            f"{what} as in the formula": Tolerance(metric=f"{OVER_MODEL}, {what}", limit=0.0, around=1.0)
            for what in ("keys", "values")
        }
        rules |= {
            f"speed of {name}": Tolerance(metric=SPEED, method=name, limit=0.0005, around=value)
            for name, value in FORMULA.items()
        }
        return AllOf(rules)

    def _converted(self) -> dict[str, Rule]:
        """Against the original as it is, with dense attention, whatever the converted model attends with."""
        rules: dict[str, Rule] = {
            f"v the original, {attention}": NonInferior(
                metric=NLL,
                method="aligned",
                to=WHOLE,
                margin=math.log(1.1),
                over="item",
                where={"when": "after", "attention": attention},
                to_where={"when": "original", "attention": "dense"},
                equal=(),
            )
            for attention in ("dense", "sparse")
        }
        rules |= {
            f"v the mean, {when}": Paired(
                metric=NLL,
                method="aligned",
                to="mean",
                over="item",
                where={"when": when, "attention": "dense"},
                equal=("tokens", "steps"),
            )
            for when in ("before", "after")
        }
        return rules

    def speed_rules(self) -> dict[tuple[str, str], Rule]:
        """Rules about times by claim and part."""
        longest = max(self.lengths)
        shape, _ = sized(self.sizes[-1])
        where: dict[str, Any] = {"size": self.sizes[-1], "length": longest}
        name = symmetric(shape)
        share: dict[str, Rule] = {
            "time": Ratio(
                metric=ATTENTION_TIME,
                method=name,
                to=scoring(name),
                number=1 / 0.9,
                at_most=True,
                where=where,
            ),
            "bytes": Count(metric=BYTE_SHARE, method=name, minimum=0.9, where=where),
        }
        faster: dict[str, Ratio] = {}
        for size in self.sizes:
            shape, _ = sized(size)
            here: dict[str, Any] = {"size": size, "length": longest}
            faster[size] = Ratio(metric=STEP_TIME, method=saga(shape), to=DENSE, number=2.0, where=here)
        rules: dict[tuple[str, str], Rule] = {
            ("saga.1", "a"): AllOf(share),
            ("saga.2", "direction"): AllOf(
                {s: replace(rule, part="direction") for s, rule in faster.items()}
            ),
            ("saga.2", "number"): AllOf(dict(faster)),
        }
        if self.copies:
            reason = f"copies={self.copies} was set, so caches may lie in the processor"
            rules["saga.1", "a"] = Withheld(rules["saga.1", "a"], reason)
        if longest >= LONG and len({size.partition(":")[0] for size in self.sizes}) > 1:
            return rules
        reason = f"lengths={self.lengths} and sizes={self.sizes} don't reach {LONG} positions at two sizes"
        return {
            key: rule if isinstance(rule, Withheld) else Withheld(rule, reason) for key, rule in rules.items()
        }


__all__ = ["SagaStudy"]
