"""NuMuon: does a budget on the update's nuclear norm make trained weights easier to compress, and at what price?

Trains one model with each optimizer (`numuon_optimizers`) and compresses each with every pipeline
(`numuon_stages`); the figures are in `numuon_figures`.

All runs take the same tokens and the same grid of learning rates. What decides how much of its random start a weight
still holds is Σ ηλ over the run: e^-Σηλ of it. The paper's Muon and NuMuon runs lie at 6 to 15, its AdamW runs
below 1. So the study fixes this sum for each kind and lets the decay λ follow from the learning rate. Runs as short as
these pay for a sum of 6 with a tenth of a nat and more; 2 leaves e^-2 = 14 % of the start. The controls take others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab
from gnomon.lab.claims import AllOf, NonInferior, Paired, ShareOfGap, Tolerance
from gnomon.lab.engine import Handle
from gnomon.studies.numuon_figures import (
    CONTROL,
    PIPELINE_NAMES,
    after_compression,
    decay,
    layers,
    learning,
    trade_off,
)
from gnomon.studies.numuon_optimizers import OPTIMIZERS
from gnomon.studies.numuon_stages import CALIBRATION_BATCH, compress, exact_update, measure
from gnomon.studies.pretraining import PretrainingStudy, catch_up

PIPELINES = ("svd", "asvd", "svd_llm", "svd_llm_lora", "dobi")
JUDGED_PIPELINES = ("svd", "asvd", "svd_llm", "dobi")
JUDGED_KEEPS = (0.6, 0.4)
CONTROL_PIPELINES = ("svd_llm",)
WATCH = "gnomon.studies.numuon_stages:spectra"
METHOD, MUON, ADAMW = "numuon-cosine", "muon", "adamw"
"""The paper's schedule is the one that claims are judged on; the others are shown beside it."""


@dataclass(frozen=True, kw_only=True)
class NuMuonStudy(PretrainingStudy):
    """Settings, stages and claims of the study."""

    optimizers: tuple[str, ...] = (ADAMW, MUON, METHOD)
    """Out of `OPTIMIZERS`; the first two and the paper's schedule are always needed."""
    pipelines: tuple[str, ...] = ("svd", "svd_llm")
    """Out of `PIPELINES`."""
    keeps: tuple[float, ...] = (0.8, 0.6, 0.4)
    """Shares of the linears' numbers that are kept."""
    summed_decay: float = 2.0
    """Σ ηλ of the Muon kind and of rivals."""
    adamw_summed_decay: float = 0.3
    """Σ ηλ of AdamW."""
    controls: tuple[float, ...] = ()
    """Further sums at which every optimizer is trained once more, with the seeds of `control_seeds`."""
    control_seeds: tuple[int, ...] = (0, 1, 2)
    calibration: int = 64
    """Windows of the training text that pipelines calibrate on."""
    draws: int = 100
    """Random feasible directions that the oracle is compared with, per matrix."""
    asvd_candidates: tuple[float, ...] = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares whose effect ASVD tries on each layer; its own grid begins at 0.4."""
    asvd_samples: int = 8
    """Windows on which it tries them."""
    lora_lr: float = 1e-3
    lora_epochs: int = 4
    """Of SVD-LLM's second step; passes over the calibration text."""
    dobi_beta: float = 0.5
    dobi_lr: tuple[float, float] = (1.0, 0.1)
    dobi_epochs: int = 5
    """Dobi-SVD's gate, rates and passes for layers of tens of directions; the profile `gpu` has its own defaults."""

    slug: ClassVar[str] = "numuon"
    rival_protocol: ClassVar[str] = "make(model, lr=, weight_decay=, total_steps=) -> torch.optim.Optimizer"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "seeds": (0,),
            "optimizers": tuple(OPTIMIZERS),
            "pipelines": PIPELINES,
            "keeps": (0.6, 0.4),
            "rates": (0.003, 0.01),
            "controls": (1.0,),
            "control_seeds": (0,),
            "steps": 4,
            "batch": 4,
            "length": 32,
            "points": 3,
            "windows": 16,
            "calibration": 8,
            "draws": 5,
            "asvd_candidates": (0.3, 0.5, 0.8),
            "asvd_samples": 4,
            "lora_epochs": 1,
            "dobi_epochs": 1,
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "optimizers": tuple(OPTIMIZERS),
            "pipelines": PIPELINES,
            "keeps": (0.8, 0.6, 0.4, 0.2),
            "rates": (0.0025, 0.005, 0.01, 0.02),
            "controls": (0.3, 6.0),
            "steps": 600,
            "points": 20,
            "draws": 1000,
        },
        "gpu": {
            "model": "Qwen/Qwen3-0.6B",
            "data": "./fineweb-edu",  # a folder of .jsonl or .txt files
            "seeds": (0, 1, 2),
            "optimizers": tuple(OPTIMIZERS),
            "pipelines": PIPELINES,
            "keeps": (0.8, 0.6, 0.4, 0.2),
            "rates": (0.003, 0.01, 0.03),
            "summed_decay": 6.0,
            "steps": 8000,
            "batch": 16,
            "length": 2048,
            "accumulate": 64,
            "warmup": 0.25,
            "points": 40,
            "windows": 256,
            "calibration": 256,
            "asvd_samples": 32,
            "lora_lr": 1e-4,
            "lora_epochs": 2,
            "dobi_beta": 10.0,
            "dobi_lr": (5.0, 4.0),
            "dobi_epochs": 20,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known, needed in (
            ("optimizers", OPTIMIZERS, (ADAMW, MUON, METHOD)),
            ("pipelines", PIPELINES, ()),
        ):
            chosen = getattr(self, name)
            for one in chosen:
                if one not in known:
                    raise unknown(f"value of {name}:", one, known)
            if missing := [one for one in needed if one not in chosen]:
                raise UsageError(f"{name} must hold {', '.join(missing)}: claims compare with it.")
        if not self.keeps or not all(0 < keep < 1 for keep in self.keeps):
            raise UsageError(f"keeps must be shares in (0, 1), at least one, got {self.keeps}.")
        for total in (self.summed_decay, self.adamw_summed_decay, *self.controls):
            if total < 0:
                raise UsageError(f"A sum Σηλ can't be negative, got {total}.")
        if self.draws < 1:
            raise UsageError(f"draws must be at least 1, got {self.draws}.")
        if self.calibration < 1 or self.calibration % CALIBRATION_BATCH:
            raise UsageError(
                f"calibration must be a positive multiple of {CALIBRATION_BATCH}, got {self.calibration}."
            )
        if set(self.control_seeds) - set(self.seeds):
            raise UsageError(f"control_seeds {self.control_seeds} must be among seeds {self.seeds}.")

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (learning, after_compression, trade_off, layers, decay):
            if figure is not decay or self.controls:
                lab.figure(figure)
        start: dict[str, Any] = {"model": self.model, "scratch": self.scratch, "data": self.data}
        lab.stage(exact_update, length=self.length, draws=self.draws, seed=0, **start)
        makes = {name: OPTIMIZERS[name] for name in self.optimizers} | self.rival_targets

        def competitor(name: str, total: float | None = None) -> dict[str, Any]:
            sums = self._summed_decay(name) if total is None else total
            return {"method": name, "make": makes[name], "summed_decay": sums, "watch": WATCH}

        tuned = {name: self.tuned(lab, **competitor(name)) for name in makes}
        for seed in lab.seeds:
            reference = self.trained(lab, tuned[ADAMW], seed, **competitor(ADAMW))
            for name in makes:
                model = self.trained(lab, tuned[name], seed, **competitor(name))
                lab.stage(measure, of=model, method=name, trials=tuned[name].trials)
                self._compress(lab, model, name, self.pipelines, tuned[name].trials)
                if name != ADAMW:
                    lab.stage(catch_up, of=model, reference=reference, method=name, to=ADAMW)
        for total in self.controls:
            for seed in self.control_seeds:
                for name in (ADAMW, MUON, METHOD):
                    model = self.trained(lab, tuned[name], seed, **competitor(name, total))
                    called = f"{name}{CONTROL} = {total:g}"
                    lab.stage(measure, of=model, method=called, trials=tuned[name].trials)
                    self._compress(lab, model, called, CONTROL_PIPELINES, tuned[name].trials)

    def _summed_decay(self, name: str) -> float:
        return self.adamw_summed_decay if name == ADAMW else self.summed_decay

    def _compress(
        self, lab: Lab, model: Handle, method: str, pipelines: tuple[str, ...], trials: int
    ) -> None:
        settings: dict[str, dict[str, Any]] = {
            "asvd": {"candidates": self.asvd_candidates, "samples": self.asvd_samples},
            "svd_llm_lora": {"update": {"lr": self.lora_lr, "epochs": self.lora_epochs}},
            "dobi": {"beta": self.dobi_beta, "lr": self.dobi_lr, "epochs": self.dobi_epochs},
        }
        for pipeline in pipelines:
            lab.stage(
                compress,
                of=model,
                method=method,
                pipeline=pipeline,
                keeps=self.keeps,
                data=self.data,
                length=self.length,
                windows=self.windows,
                calibration=self.calibration,
                settings=settings.get(pipeline, {}),
                trials=trials,
            )

    def _claims(self, lab: Lab) -> None:
        gaussian = Paired(
            metric="stable rank over that of Gaussian matrices", method=MUON, side="below", bound=0.5
        )
        lab.claim("numuon.1", part="a", rule=gaussian, grade="T")
        compressible = {
            f"{keep:.0%} kept": NonInferior(
                metric="rise of loss",
                method=MUON,
                to=ADAMW,
                where={"pipeline": "svd_llm", "keep": keep},
                margin=0.05,
            )
            for keep in (0.8, 0.6)
        }
        lab.claim("numuon.1", part="b", rule=AllOf(compressible), grade="T")

        identities = {
            metric: Tolerance(metric=metric, method="numuon", limit=limit)
            for metric, limit in (
                ("error of the update's singular values", 1e-5),
                ("how far a feasible draw beats the oracle", 1e-5),
                ("difference from torch.optim.Muon at full rank", 0.0),
            )
        }
        lab.claim("numuon.2", part="update", rule=AllOf(identities), grade="X")
        lower = {
            metric: Paired(metric=metric, method=METHOD, to=MUON)
            for metric in ("stable rank", "rank of 95 % energy")
        }
        lab.claim("numuon.2", part="weights", rule=AllOf(lower), grade="T")

        for part, metric in (("absolute", "loss after compression"), ("rise", "rise of loss")):
            cells = {
                f"{PIPELINE_NAMES[pipeline]} at {keep:.0%}": Paired(
                    metric=metric, method=METHOD, to=MUON, where={"pipeline": pipeline, "keep": keep}
                )
                for pipeline in JUDGED_PIPELINES
                for keep in JUDGED_KEEPS
            }
            lab.claim("numuon.3", part=part, rule=AllOf(cells), grade="T")

        margin = ShareOfGap(0.25, MUON, ADAMW)
        lab.claim(
            "numuon.4", rule=NonInferior(metric="loss", method=METHOD, to=MUON, margin=margin), grade="T"
        )
