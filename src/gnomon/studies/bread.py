"""BREAD: does updating inactive blocks in the same backward pass mend block coordinate descent, and what does it take?

A tiny model is pretrained by AdamW on text and fine-tuned on arithmetic by every competitor (`bread_entrants`); a real
one is fine-tuned by the nearest of them. The fine-tuning itself is in `finetuning`, other stages in `bread_stages`,
figures in `bread_figures`. All take the same items, batches, schedule and grid of learning rates; the grid is tuned on
other items than those that judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import AllOf, Count, FullScale, NonInferior, Paired, Rule, ShareOfGap, Tolerance
from gnomon.lab.engine import Handle
from gnomon.lab.tune import tune
from gnomon.studies.bread_entrants import BLOCKWISE, COMPETITORS, maker
from gnomon.studies.bread_figures import bytes_and_loss, idle_work, learning, memory
from gnomon.studies.bread_stages import (
    LIMITS_GB,
    SHAPES,
    constructed,
    formula,
    gap,
    idle,
    measure,
    one_pass,
    state_sizes,
)
from gnomon.studies.finetuning import ARITHMETIC, finetune, problems
from gnomon.studies.pretraining import parts, pretrain

METHOD, BADAM, ADAMW = "bread-lora", "badam", "adamw"
NEAREST = (METHOD, BADAM, "lora", "galore", ADAMW)
"""What claims compare."""
COUNTED = (BADAM, METHOD, "bread-lora-partial", "bread-sgd")
HERE, REAL = "pretrained here", "real"
"""Names of the two bases in the records."""
GRADES: dict[str, Literal["T", "R"]] = {HERE: "T", REAL: "R"}


@dataclass(frozen=True, kw_only=True)
class BREADStudy(StudyConfig):
    """Settings, stages and claims of the study; those that begin with `real_` are for the real model."""

    model: str = "tiny:llama-0.5m"
    """What is pretrained here, and then fine-tuned."""
    data: str = "stdlib"
    """Text of its pretraining: recipe, file or folder."""
    base_steps: int = 300
    base_batch: int = 8
    base_length: int = 128
    base_lr: float = 3e-3
    items: str = ARITHMETIC
    """What is fine-tuned on: "arithmetic", a .jsonl file of instructions and outputs, or a folder of such."""
    kinds: tuple[str, ...] = ("sum", "difference")
    """Of arithmetic; none is all."""
    train_items: int = 2000
    test_items: int = 256
    """Items that are judged on; as many others are tuned on."""
    answers: int = 64
    """Of these, how many are answered and scored by exact match."""
    competitors: tuple[str, ...] = NEAREST
    """Out of `COMPETITORS`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (0.004, 0.02)
    """The grid of learning rates, the same for all. It is wide, because GaLore scales its steps by a quarter."""
    tuning_seeds: tuple[int, ...] = (1000,)
    """The first is also the base's."""
    steps: int = 120
    batch: int = 8
    longest: int = 256
    """Items with more tokens are left out."""
    schedule: str = "cosine"
    warmup: float = 0.03
    points: int = 8
    """Looks at a model while it trains."""
    switch_every: int = 10
    """K, steps of a block's turn."""
    order: str = "random"
    rank: int = 4
    """Of BREAD's adapters; ranks of LoRA and GaLore follow from the bytes of its state."""
    sgd_scale: float = 50.0
    """Plain gradient steps (BREAD-SGD, LOMO) over Adam's rate."""
    sign_scale: float = 0.1
    """Steps of a gradient's sign over Adam's rate."""
    gap: int = 50
    """Steps of one projector of GaLore."""
    lisa_layers: int = 2
    draws: int = 200
    """Random cases of the frozen head."""
    counted: tuple[str, ...] = ("8B",)
    """Shapes of large models whose backward passes are counted too."""

    real_model: str | None = None
    """A pretrained model: embedded name, folder or hub id; None leaves it out."""
    real_items: str = ARITHMETIC
    real_kinds: tuple[str, ...] = ("sum", "difference")
    real_train_items: int = 2000
    real_test_items: int = 64
    real_answers: int = 16
    real_competitors: tuple[str, ...] = NEAREST
    real_seeds: int = 3
    """How many of `seeds` it is fine-tuned with."""
    real_rates: tuple[float, ...] = (0.0002, 0.001)
    real_steps: int = 60
    real_batch: int = 2
    real_points: int = 2
    real_longest: int = 256
    real_switch_every: int = 2
    real_rank: int = 8
    real_gap: int = 200
    real_dtype: str = "float32"
    real_checkpointing: bool = False

    slug: ClassVar[str] = "bread"
    sources: ClassVar[tuple[str, ...]] = ("model", "data", "items", "real_model", "real_items")
    disk_bytes: ClassVar[int] = 1_500_000_000
    rival_protocol: ClassVar[str] = (
        "make(model, lr=, weight_decay=, total_steps=) -> torch.optim.Optimizer or "
        "gnomon.studies.pretraining.Entrant"
    )
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "base_steps": 6,
            "base_batch": 4,
            "base_length": 32,
            "train_items": 32,
            "test_items": 8,
            "answers": 2,
            "competitors": COMPETITORS,
            "seeds": (0,),
            "rates": (0.003, 0.01),
            "steps": 6,
            "batch": 4,
            "points": 2,
            "switch_every": 2,
            "rank": 2,
            "gap": 3,
            "draws": 5,
            "counted": (),
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "competitors": COMPETITORS,
            "base_steps": 600,
            "rates": (0.0015, 0.003, 0.006, 0.012, 0.024),
            "steps": 200,
            "batch": 12,
            "points": 20,
            "switch_every": 10,
            "real_model": "smollm2-135m",
            "real_rates": (0.00005, 0.0002, 0.001),
        },
        "gpu": {
            "competitors": COMPETITORS,
            "seeds": (0, 1, 2),
            "base_steps": 600,
            "rates": (0.0015, 0.003, 0.006, 0.012, 0.024),
            "steps": 200,
            "points": 20,
            "real_model": "meta-llama/Llama-3.1-8B",
            "real_items": "./mathinstruct.jsonl",
            "real_train_items": 100_000,
            "real_test_items": 512,
            "real_rates": (1e-6, 1e-5, 1e-4),
            "real_steps": 18_750,
            "real_batch": 16,
            "real_points": 30,
            "real_longest": 1024,
            "real_switch_every": 100,
            "real_dtype": "bfloat16",
            "real_checkpointing": True,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("competitors", "real_competitors"):
            chosen = getattr(self, name)
            for one in chosen:
                if one not in COMPETITORS:
                    raise unknown(f"value of {name}:", one, COMPETITORS)
            if missing := [one for one in NEAREST if one not in chosen]:
                raise UsageError(f"{name} must hold {', '.join(missing)}: claims compare with it.")
        for name in ("rates", "real_rates"):
            if not getattr(self, name) or min(getattr(self, name)) <= 0:
                raise UsageError(f"{name} must be positive learning rates, at least one.")
        numbers = (
            "base_steps base_batch base_length train_items test_items steps batch longest points switch_every rank gap "
            "lisa_layers draws real_train_items real_test_items real_seeds real_steps real_batch real_longest "
            "real_points real_switch_every real_rank real_gap"
        )
        for name in numbers.split():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("answers", "real_answers"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} can't be negative; 0 answers none.")
        if not (self.sgd_scale > 0 and self.sign_scale > 0):
            raise UsageError("sgd_scale and sign_scale must be positive factors of the learning rate.")
        for shape in self.counted:
            if shape not in SHAPES:
                raise unknown("value of counted:", shape, SHAPES)
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup={self.warmup} must be a share of the run in [0, 1).")

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,) if self.real_model is None else (self.model, self.real_model)

    def check(self) -> None:
        super().check()
        parts(self.data)
        sizes = [(self.items, self.kinds, self.train_items, self.test_items)]
        if self.real_model is not None:
            sizes.append((self.real_items, self.real_kinds, self.real_train_items, self.real_test_items))
        for recipe, kinds, learnt, held_out in sizes:
            for split, count in (("train", learnt), ("valid", held_out), ("test", held_out)):
                problems(recipe, split, count, kinds)

    # ------------------------------------------------------------------------------------------- stages

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (learning, bytes_and_loss, idle_work, memory):
            lab.figure(figure)
        lab.stage(constructed, draws=self.draws, seed=0)
        lab.stage(formula, ranks=self.real_rank)
        lab.stage(idle, model=self.model, length=32, rank=self.rank, forms=COUNTED)
        for shape in self.counted:
            # Without weights an update during the backward pass can't be prepared, so BREAD-SGD isn't among them.
            lab.stage(idle, model=shape, length=32, rank=self.real_rank, forms=(BADAM, METHOD))
        lab.stage(one_pass, model=self.model, rank=self.rank, forms=COUNTED, seed=0)
        base = self._base(lab)
        self._compete(lab, HERE, {"of": base}, self._here(), self.competitors, self.rates, self.seeds)
        if self.real_model is not None:
            start = {"model": self.real_model}
            seeds = self.seeds[: self.real_seeds]
            self._compete(lab, REAL, start, self._real(), self.real_competitors, self.real_rates, seeds)

    def _base(self, lab: Lab) -> Handle:
        return lab.stage(
            pretrain,
            method="base",
            make="gnomon.studies.bread_entrants:everything",
            seed=self.tuning_seeds[0],
            lr=self.base_lr,
            model=self.model,
            scratch=True,
            data=self.data,
            steps=self.base_steps,
            batch=self.base_batch,
            length=self.base_length,
            accumulate=1,
            schedule="wsd",
            warmup=0.1,
            cooldown=0.2,
            clip=1.0,
            points=2,
            windows=64,
        )

    def _here(self) -> dict[str, Any]:
        """Arguments of `finetune` that all competitors share, for the model that was pretrained here."""
        return {
            "items": self.items,
            "kinds": self.kinds,
            "learnt": self.train_items,
            "held_out": self.test_items,
            "steps": self.steps,
            "batch": self.batch,
            "longest": self.longest,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "points": self.points,
        }

    def _real(self) -> dict[str, Any]:
        """The same for the real model."""
        return {
            **self._here(),
            "items": self.real_items,
            "kinds": self.real_kinds,
            "learnt": self.real_train_items,
            "held_out": self.real_test_items,
            "steps": self.real_steps,
            "batch": self.real_batch,
            "longest": self.real_longest,
            "points": self.real_points,
            "dtype": self.real_dtype,
            "checkpointing": self.real_checkpointing,
        }

    def _options(self, base: str, ranks: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Options of every competitor's factory."""
        real = base == REAL
        every = self.real_switch_every if real else self.switch_every
        forms = {
            form: {
                "form": form,
                "switch_every": every,
                "rank": self.real_rank if real else self.rank,
                "sgd_scale": self.sgd_scale,
                "sign_scale": self.sign_scale,
                "order": self.order,
            }
            for form in BLOCKWISE
        }
        return {
            **forms,
            "adamw": {},
            "lora": {"rank": ranks["lora"]},
            "galore": {"rank": ranks["galore"], "gap": self.real_gap if real else self.gap},
            "lomo": {"sgd_scale": self.sgd_scale},
            "lisa": {"layers": self.lisa_layers, "switch_every": every},
        }

    def _compete(
        self,
        lab: Lab,
        base: str,
        start: Mapping[str, Any],
        shared: Mapping[str, Any],
        names: tuple[str, ...],
        rates: tuple[float, ...],
        seeds: tuple[int, ...],
    ) -> None:
        """Tune and train every competitor from one base."""
        tiny = base == HERE
        sizes = lab.stage(
            state_sizes,
            **start,
            base=base,
            blocks=("layer", "sublayer", "matrix") if tiny else ("layer",),
            dtypes=("float32", "bfloat16") if tiny else (self.real_dtype,),
            rank=self.rank if tiny else self.real_rank,
            seed=0,
        )
        options = self._options(base, sizes.value)
        entered: dict[str, dict[str, Any]] = {
            name: {"method": name, "make": maker(name), "options": options[name]} for name in names
        }
        entered |= {
            name: {"method": name, "make": make, "options": {}} for name, make in self.rival_targets.items()
        }
        common = {**start, **shared, "base": base}
        tuned = {
            name: tune(
                lab,
                finetune,
                grid={"lr": rates},
                seeds=self.tuning_seeds,
                score="loss",
                split="valid",
                answers=0,
                **one,
                **common,
            )
            for name, one in entered.items()
        }
        for seed in seeds:
            trained = {
                name: lab.stage(
                    finetune,
                    seed=seed,
                    split="test",
                    answers=self.answers if tiny else self.real_answers,
                    **tuned[name].settings,
                    **one,
                    **common,
                )
                for name, one in entered.items()
            }
            for name, one in trained.items():
                lab.stage(measure, of=one, method=name, base=base, trials=tuned[name].trials)
                lab.stage(gap, of=one, low=trained[BADAM], high=trained[ADAMW], method=name, base=base)

    # ------------------------------------------------------------------------------------------- claims

    def _claims(self, lab: Lab) -> None:
        wasted = "idle share of input gradients"
        same_pass: dict[str, Rule] = {
            "BAdam wastes work in every turn but the deepest": Count(
                metric="turns with idle work, of those below other blocks", method=BADAM, equals=1
            ),
            "BREAD wastes none": Tolerance(metric=wasted, method=METHOD, limit=0),
            "BREAD-partial wastes none": Tolerance(metric=wasted, method="bread-lora-partial", limit=0),
            "one backward pass a step": Tolerance(
                metric="backward passes a step", method=METHOD, limit=0, around=1
            ),
            "it updates every inactive matrix": Count(
                metric="inactive matrices that the pass updates", method=METHOD, equals=1
            ),
        }
        lab.claim("bread.1", part="a", rule=AllOf(same_pass), grade="X")
        head: dict[str, Rule] = {
            "frozen": Count(metric="best loss with a frozen head", minimum=1e-6),
            "expanded": Tolerance(metric="loss after a rank-1 expansion", limit=1e-8),
        }
        lab.claim("bread.1", part="b", rule=AllOf(head), grade="X")
        for base, part in ((HERE, "trained"), (REAL, "real")):
            where = {"base": base}
            better = {
                f"than {name}": Paired(metric="loss", method=METHOD, to=name, where=where)
                for name in (BADAM, "lora", "galore")
            }
            lab.claim("bread.2", part=part, rule=AllOf(better), grade=GRADES[base])
            near = NonInferior(
                metric="loss", method=METHOD, to=ADAMW, where=where, margin=ShareOfGap(0.1, ADAMW, BADAM)
            )
            lab.claim("bread.3", part=part, rule=near, grade=GRADES[base])
        paper = {"8B": (19.55, 0.005), "70B": (154.8, 0.05)}  # the figures' own rounding
        numbers: dict[str, Rule] = {}
        for size, (figure, rounding) in paper.items():
            where = {"size": size}
            numbers[f"{size} without an expansion"] = Tolerance(
                metric="GB before activations", method=BADAM, where=where, around=figure, limit=rounding
            )
            for method in (METHOD, "bread-sgd"):
                numbers[f"{size}, {method}"] = Count(
                    metric="GB before activations", method=method, where=where, maximum=LIMITS_GB[size]
                )
        lab.claim("bread.4", part="formula", rule=AllOf(numbers), grade="X")
        held: dict[str, Rule] = {
            "the formula": Tolerance(metric="error of the formula", where={"base": HERE}, limit=0.05),
            "BREAD v AdamW": Count(
                metric="state bytes over AdamW's", method=METHOD, where={"base": HERE}, maximum=0.999
            ),
        }
        lab.claim("bread.4", part="bytes", rule=AllOf(held), grade="T")
        lab.claim(
            "bread.4",
            part="peak",
            rule=FullScale("24 GB and 300 GB are peaks on GPUs, with the activations of 8B and 70B models"),
            grade="R",
        )
