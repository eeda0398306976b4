"""MGLU: what one matrix with masks saves against a GLU, how fast its kernel is, and how good the models are.

Competitors are in `mglu_entrants`, stages in `mglu_stages`, `mglu_timing` and `pretraining`, figures in
`mglu_figures`. Trained models see the same tokens, each at its best rate of one grid; judged is SwiMGLU with four
masks, against a GELU layer, SwiGLU of the same width, SwiGLU with one matrix for gate and value, and (shown, for the
paper lacks it) SwiGLU of as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab
from gnomon.lab.claims import (
    AllOf,
    Count,
    FullScale,
    NonInferior,
    Paired,
    Ratio,
    Rule,
    ShareOf,
    Tolerance,
    UpTo,
    Withheld,
)
from gnomon.studies.mglu_entrants import ENTRANTS
from gnomon.studies.mglu_figures import gates, learning, quality_by_bytes, times
from gnomon.studies.mglu_stages import bytes_per_token, footprints, masked, masks, measure, packed_files
from gnomon.studies.mglu_timing import TORCH, flash, naive, products
from gnomon.studies.nf12 import rows_and_columns
from gnomon.studies.pretraining import PretrainingStudy

JUDGED_MASKS = 4
JUDGED = masked(JUDGED_MASKS)
GELU, SWIGLU, SHARED, SAME_BYTES = "gelu", "swiglu", "swiglu-shared", "swiglu-bytes"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    GELU: ("gelu", {}),
    SWIGLU: ("swiglu", {}),
    SHARED: ("swiglu-shared", {}),
    SAME_BYTES: ("swiglu-bytes", {"n_masks": JUDGED_MASKS}),
    JUDGED: ("swimglu", {"n_masks": JUDGED_MASKS}),
    masked(1): ("swimglu", {"n_masks": 1}),
    masked(2): ("swimglu", {"n_masks": 2}),
    "fixed-2": ("swimglu", {"n_masks": 2, "learned": False}),
    "unmasked-gate": ("swimglu", {"n_masks": 1, "masked": "value"}),
    "unmasked-value": ("swimglu", {"n_masks": 1, "masked": "gate"}),
    "routed-2": ("swimglu", {"n_masks": JUDGED_MASKS, "top_k": 2}),
    "routed-4": ("swimglu", {"n_masks": JUDGED_MASKS, "top_k": JUDGED_MASKS}),
}
"""Factory out of `ENTRANTS` and its options, by name."""
NEEDED = (GELU, SWIGLU, SHARED, JUDGED)
COUNTED = (1, 2, 4, 8, 16)
"""Numbers of masks whose files are written and counted; with 16 of them nothing is saved any more."""
NAIVE_GROWS, KERNEL_GROWS = 4.0, 1.5
"""From one mask to eight: the naive form takes at least so many times as long, the kernel at most."""


@dataclass(frozen=True, kw_only=True)
class MGLUStudy(PretrainingStudy):
    """Settings, stages and claims of the study."""

    competitors: tuple[str, ...] = (*NEEDED, SAME_BYTES)
    """Out of `FORMS`; claims need gelu, swiglu, swiglu-shared and swimglu-4."""
    rates: tuple[float, ...] = (0.003, 0.006, 0.012)
    mask_init_std: float = 0.01
    """Of mask logits at first (the paper's)."""
    weight_decay: float = 0.1
    """Of all matrices, mask logits among them (the paper's)."""
    schedule: str = "cosine"
    warmup: float = 0.05
    steps: int = 240
    batch: int = 4
    shapes: tuple[str, ...] = ("8192x2048",)
    """Matrices that products are timed on, outputs by inputs; the number of mglu.3 is judged on the first."""
    masks: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of masks that are timed; claims need 1 and 8."""
    cores: tuple[int, ...] = (1,)
    """Numbers of threads that are timed."""
    repeats: int = 15
    """Interleaved repeats of a timing that is judged; a third of them choose the best cell beforehand."""
    copies: int = 0
    """Of the operands; 0: as many as make four times the last-level cache. Other numbers give no verdict."""

    slug: ClassVar[str] = "mglu"
    rival_protocol: ClassVar[str] = (
        "make(model, lr=, weight_decay=, total_steps=) -> torch.optim.Optimizer or "
        "gnomon.studies.pretraining.Entrant"
    )
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "seeds": (0,),
            "competitors": tuple(FORMS),
            "rates": (0.003, 0.006),
            "steps": 3,
            "batch": 2,
            "length": 32,
            "points": 1,
            "windows": 16,
            "shapes": ("128x256", "96x64"),
            "repeats": 2,
            "copies": 2,
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "tuning_seeds": (1000, 1001),
            "competitors": tuple(FORMS),
            "rates": (0.0015, 0.003, 0.006, 0.012),
            "steps": 400,
            "points": 20,
            "shapes": ("8192x2048", "14336x4096"),
            "cores": (1, 2),
            "repeats": 31,
        },
        "gpu": {
            "model": "./mglu-small",  # a folder with config.json and a tokenizer: h 768, d 3072, 12 layers
            "data": "./fineweb-edu",
            "competitors": tuple(FORMS),
            "rates": (0.0001, 0.0003, 0.001),
            "steps": 19_000,
            "batch": 32,
            "length": 1024,
            "accumulate": 16,
            "points": 60,
            "windows": 2_000,
            "shapes": ("8192x2048", "14336x4096"),
            "repeats": 31,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.competitors:
            if name not in FORMS:
                raise unknown("value of competitors:", name, FORMS)
        if missing := [name for name in NEEDED if name not in self.competitors]:
            raise UsageError(
                f"{', '.join(missing)} must be among {', '.join(self.competitors)}: claims need it."
            )
        if not self.shapes:
            raise UsageError("shapes must name at least one matrix, such as 8192x2048.")
        for shape in self.shapes:
            rows_and_columns(shape)
        if not {1, 8} <= set(self.masks) or not all(1 <= n <= 16 for n in self.masks):
            raise UsageError(f"masks must be numbers from 1 to 16 with 1 and 8 among them, got {self.masks}.")
        if not self.cores or min(self.cores) < 1:
            raise UsageError(f"cores must be numbers of threads from 1 on, got {self.cores}.")
        if self.repeats < 1 or self.copies < 0:
            raise UsageError(
                f"repeats={self.repeats} must be at least 1, and copies={self.copies} 0 (as many as needed) or more."
            )
        if not 0 < self.mask_init_std < float("inf"):
            raise UsageError(f"mask_init_std={self.mask_init_std} must be positive and finite.")

    def _competitors(self) -> dict[str, dict[str, Any]]:
        """Arguments of `pretrain` by name, except the rate and what all share."""
        found = {name: self._form(*FORMS[name]) for name in self.competitors}
        found |= {name: {"make": make, "options": {}} for name, make in self.rival_targets.items()}
        return {
            name: {"method": name, "weight_decay": self.weight_decay, **one} for name, one in found.items()
        }

    def _form(self, factory: str, options: dict[str, Any]) -> dict[str, Any]:
        drawn = {"mask_init_std": self.mask_init_std} if factory == "swimglu" else {}
        return {"make": ENTRANTS[factory], "options": {**options, **drawn}}

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (learning, quality_by_bytes, times, gates):
            lab.figure(figure)
        lab.stage(packed_files, model=self.model, scratch=self.scratch, masks=COUNTED)
        text = lab.stage(bytes_per_token, model=self.model, data=self.data)
        competitors = self._competitors()
        lab.stage(footprints, model=self.model, scratch=self.scratch, competitors=competitors)
        tuned = {name: self.tuned(lab, **one) for name, one in competitors.items()}
        on_text: dict[str, Any] = {"data": self.data, "length": self.length, "windows": self.windows}
        for seed in lab.seeds:
            for name, one in competitors.items():
                trained = self.trained(lab, tuned[name], seed, **one)
                lab.stage(measure, of=trained, text=text, method=name, trials=tuned[name].trials)
                if name.startswith("swimglu-"):
                    lab.stage(masks, of=trained, method=name, **on_text)
        for seed, repeats in ((0, max(1, self.repeats // 3)), (1, self.repeats)):
            for shape in self.shapes:
                rows, columns = rows_and_columns(shape)
                for threads in self.cores:
                    lab.stage(
                        products,
                        exclusive=True,
                        rows=rows,
                        columns=columns,
                        masks=self.masks,
                        threads=threads,
                        repeats=repeats,
                        copies=self.copies,
                        seed=seed,
                    )

    def _claims(self, lab: Lab) -> None:
        bits: dict[str, Rule] = {
            f"{name}, {what}": Count(metric=f"bits {what} a weight", method=name, equals=number)
            for what in ("stored", "read")
            for name, number in ((masked(n), 16 + n) for n in COUNTED)
        }
        bits["GLU, stored"] = Count(metric="bits stored a weight", method=SWIGLU, equals=32)
        for n, saving in ((1, 0.46875), (JUDGED_MASKS, 0.375)):
            bits[f"saving, {masked(n)}"] = Count(
                metric="saving against a GLU", method=masked(n), equals=saving
            )
        lab.claim("mglu.1", part="bits", rule=AllOf(bits), grade="X")
        identity = Tolerance(metric="relative error of gate + value", limit=1e-5)
        lab.claim("mglu.1", part="identity", rule=identity, grade="X")
        for (id, part), rule in self.speed_rules().items():
            lab.claim(id, part=part, rule=rule, grade="R")
        near = NonInferior(metric="bits per byte", method=JUDGED, to=SWIGLU, margin=ShareOf(0.01))
        lab.claim("mglu.4", part="a", rule=near, grade="T")
        better = {
            f"than {name}": Paired(metric="bits per byte", method=JUDGED, to=name) for name in (GELU, SHARED)
        }
        lab.claim("mglu.4", part="b", rule=AllOf(better), grade="T")
        reason = (
            "accuracy on downstream tasks needs a model of 1 billion weights trained on 100 billion tokens"
        )
        lab.claim("mglu.4", part="downstream", rule=FullScale(reason), grade="R")

    def speed_rules(self) -> dict[tuple[str, str], Rule]:
        """Rules about times by claim and part."""
        cells: list[dict[str, str | int | float | bool]] = [
            {"shape": "{} x {}".format(*rows_and_columns(shape)), "threads": threads}
            for shape in self.shapes
            for threads in self.cores
        ]
        here: dict[str, str | int | float | bool] = {
            "shape": cells[0]["shape"],
            "threads": max(self.cores),
            "seed": 1,
        }
        naively = Ratio(metric="time", method=flash(8), to=naive(8), number=19.7)
        grows = Ratio(metric="time", method=naive(1), to=naive(8), number=NAIVE_GROWS, where=here)
        barely = Ratio(
            metric="time", method=flash(8), to=flash(1), number=KERNEL_GROWS, at_most=True, where=here
        )
        dense = Ratio(metric="time", method=flash(1), to=TORCH, number=1.51, where=here)
        everywhere = {
            f"{cell['shape']}, threads={cell['threads']}": replace(
                dense, part="direction", where={**cell, "seed": 1}
            )
            for cell in cells
        }
        rules: dict[tuple[str, str], Rule] = {
            ("mglu.2", "direction"): UpTo(replace(naively, part="direction"), cells),
            ("mglu.2", "number"): UpTo(naively, cells),
            ("mglu.2", "growth"): AllOf({"naive grows": grows, "kernel barely": barely}),
            ("mglu.3", "direction"): AllOf(everywhere),
            ("mglu.3", "number"): dense,
        }
        if not self.copies:
            return rules
        reason = f"copies={self.copies} was set, so operands may lie in a cache"
        return {key: Withheld(rule, reason) for key, rule in rules.items()}
