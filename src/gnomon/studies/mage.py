"""MAGE: does a block's first, all-masked pass name the tokens that its later passes need, and what does that save?

A small block-diffusion model is trained on real text, a model for each seed. In it the sets of seven selectors are
compared beside exact decoding (recall, mass, what sharing one set costs), before training too, and then used for
decoding. Times are those of a model with random weights behind made-up prefixes. Stages are in `mage_stages` and
`mage_timing`, figures in `mage_figures`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnomon.core.errors import UsageError
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.arms import Scalar
from gnomon.lab.claims import AllOf, Count, HoldsOnly, NonInferior, Paired, Ratio, ShareOf
from gnomon.studies.mage_figures import alignment, learning, quality, recalls, sharing, times
from gnomon.studies.mage_stages import (
    ACTIVE,
    AVERAGE,
    EXACT,
    LEAD,
    LOSS,
    MAGE,
    PASSES,
    QUEST,
    RANDOM,
    SHARING,
    SPARSED,
    TRAINED,
    UNTRAINED,
    WINDOW,
    against_exact,
    learn,
    over,
    sets,
)
from gnomon.studies.mage_timing import TIME, latency

LONG, JUDGED_K = 8192, 512
"""What mage.3 speaks of: prefixes of so many tokens, sets of so many."""
LONGEST = 131_072
"""Prefix of mage.4."""
SPEEDS = {"a": (EXACT, 6.82), "b": (QUEST, 3.35), "c": (SPARSED, 2.28)}


@dataclass(frozen=True, kw_only=True)
class MageStudy(StudyConfig):
    """Settings, stages and claims of the study."""

    model: str = "tiny:llama-0.5m"
    """The architecture that is trained: `tiny:`, folder or hub id."""
    scratch: bool = True
    """Weights are drawn anew; False goes on from the model's own."""
    data: str = "stdlib"
    """Text: recipe, file or folder (`core.data`)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    lr: float = 0.003
    """Peak learning rate; nothing is compared across training runs, so nothing is tuned."""
    steps: int = 200
    batch: int = 4
    length: int = 256
    """Tokens of a row in training."""
    block: int = 16
    """Tokens of a block."""
    passes: int = 8
    """Denoising passes of a block where their number is fixed."""
    points: int = 5
    batches: int = 16
    """Of held-out rows for the loss."""
    context: int = 2048
    """Tokens of the prompts that sets are compared behind."""
    k: int = 128
    """Size of these sets."""
    budgets: tuple[int, ...] = (32, 128)
    """Sizes at which the cost of sharing is measured."""
    prompts: int = 4
    blocks: int = 1
    """Blocks that are decoded behind each of these prompts."""
    long_context: int = LONG
    long_k: int = JUDGED_K
    """Prompts and sets of decoding against exact decoding; the claim asks for 8192 and 512."""
    long_prompts: int = 3
    long_blocks: int = 2
    threshold: float = 0.9
    """Confidence above which a position is filled, where the number of passes is free."""
    tile: int = 128
    """Tokens of SparseD's tiles; its own for long contexts."""
    dense_layers: int = 0
    """First layers that read everything; the paper's two would be half of a model of four."""
    timed_contexts: tuple[int, ...] = (8192, 32_768)
    """Prefixes that blocks are timed behind; the claim asks for 131072."""
    timed_block: int = 32
    timed_passes: int = 32
    timed_k: int = JUDGED_K
    timed_layers: int = 4
    timed_heads: int = 4
    timed_key_heads: int = 2
    timed_width: int = 64
    cores: int = 1
    """Threads that are timed."""
    repeats: int = 3
    """Interleaved repeats of a timing; the claim asks for 15 or more."""

    slug: ClassVar[str] = "mage"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "seeds": (0,),
            "steps": 3,
            "batch": 2,
            "length": 64,
            "block": 8,
            "passes": 4,
            "points": 1,
            "batches": 1,
            "context": 96,
            "k": 16,
            "budgets": (8, 16),
            "prompts": 2,
            "long_context": 128,
            "long_k": 32,
            "long_prompts": 2,
            "long_blocks": 1,
            "tile": 8,
            "timed_contexts": (256, 512),
            "timed_block": 8,
            "timed_passes": 4,
            "timed_k": 32,
            "timed_layers": 2,
            "timed_width": 16,
            "repeats": 2,
        },
        "full": {
            "steps": 1200,
            "length": 512,
            "points": 15,
            "context": LONG,
            "k": JUDGED_K,
            "budgets": (64, 128, 256, 512),
            "prompts": 8,
            "long_prompts": 10,
            "long_blocks": 4,
            "timed_contexts": (8192, 16_384, 32_768, 65_536, LONGEST),
            "repeats": 15,
        },
        "gpu": {
            "model": "Qwen/Qwen3-0.6B",
            "scratch": False,
            "data": "./fineweb-edu",
            "lr": 1e-5,
            "steps": 20_000,
            "batch": 16,
            "length": 4096,
            "block": 32,
            "passes": 32,
            "points": 40,
            "context": 32_000,
            "k": JUDGED_K,
            "budgets": (128, 256, 512, 1024),
            "prompts": 32,
            "long_context": 32_000,
            "long_prompts": 64,
            "long_blocks": 8,
            "dense_layers": 2,
            "timed_contexts": (8192, 32_768, LONGEST),
            "timed_layers": 28,
            "timed_heads": 28,
            "timed_key_heads": 4,
            "timed_width": 128,
            "repeats": 31,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = (
            "steps batch block points batches k tile prompts blocks long_k long_prompts long_blocks timed_block "
            "timed_passes timed_k timed_layers timed_heads timed_key_heads timed_width cores repeats"
        ).split()
        # Recall is that of later passes than the first.
        least = {**dict.fromkeys(positive, 1), "passes": 2, "dense_layers": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {getattr(self, name)}.")
        if self.passes > self.block or self.timed_passes > self.timed_block:
            raise UsageError(
                f"passes={self.passes} and timed_passes={self.timed_passes} must not exceed their blocks, "
                f"{self.block} and {self.timed_block}: a pass fills a token or more."
            )
        if self.length % (2 * self.block):
            raise UsageError(f"length={self.length} must be a multiple of two blocks, {2 * self.block}.")
        for name, block in (
            ("context", self.block),
            ("long_context", self.block),
            ("timed_contexts", self.timed_block),
        ):
            given = getattr(self, name)
            if wrong := [n for n in (given if isinstance(given, tuple) else (given,)) if n < 1 or n % block]:
                raise UsageError(f"{name} must be whole blocks of {block} tokens, got {wrong[0]}.")
        if not self.budgets or not self.timed_contexts:
            raise UsageError("budgets and timed_contexts must name at least one number each.")
        if min(self.budgets) < 1 or max(*self.budgets, self.k) >= self.context:
            raise UsageError(
                f"budgets={self.budgets} and k={self.k} must lie in [1, context={self.context}): larger sets are the "
                "whole prefix."
            )
        if self.long_k >= self.long_context or self.timed_k >= min(self.timed_contexts):
            raise UsageError(
                f"long_k={self.long_k} and timed_k={self.timed_k} must be smaller than their prefixes: nothing would "
                "be selected."
            )
        if not self.lr > 0:
            raise UsageError(f"lr must be > 0, got {self.lr}.")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold is a probability, got {self.threshold}.")

    def check(self) -> None:
        super().check()
        from gnomon.studies.pretraining import parts

        parts(self.data)

    @property
    def reach(self) -> int:
        """Positions that training covers."""
        longest = max(
            self.context + self.blocks * self.block,
            self.long_context + self.long_blocks * self.block,
            self.length,
        )
        return -(-longest // self.block) * self.block

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (learning, recalls, sharing, alignment, quality, times):
            lab.figure(figure)
        for seed in lab.seeds:
            trained = lab.stage(
                learn,
                seed=seed,
                lr=self.lr,
                model=self.model,
                scratch=self.scratch,
                data=self.data,
                block=self.block,
                steps=self.steps,
                batch=self.batch,
                length=self.length,
                reach=self.reach,
                points=self.points,
                batches=self.batches,
            )
            of: dict[str, Any] = {
                "of": trained,
                "data": self.data,
                "passes": self.passes,
                "tile": self.tile,
                "dense_layers": self.dense_layers,
            }
            for state in (TRAINED, UNTRAINED):
                lab.stage(
                    sets,
                    **of,
                    state=state,
                    context=self.context,
                    budgets=self.budgets,
                    k=self.k,
                    prompts=self.prompts,
                    blocks=self.blocks,
                )
            lab.stage(
                against_exact,
                **of,
                context=self.long_context,
                k=self.long_k,
                prompts=self.long_prompts,
                blocks=self.long_blocks,
                threshold=self.threshold,
            )
        for context in self.timed_contexts:
            lab.stage(
                latency,
                exclusive=True,
                context=context,
                block=self.timed_block,
                passes=self.timed_passes,
                k=self.timed_k,
                layers=self.timed_layers,
                heads=self.timed_heads,
                key_heads=self.timed_key_heads,
                width=self.timed_width,
                threads=self.cores,
                repeats=self.repeats,
            )

    def _claims(self, lab: Lab) -> None:
        trained: dict[str, Scalar] = {"state": TRAINED, "context": self.context}
        costs = {
            f"{name}, k={k}": Paired(metric=SHARING, method=name, where={**trained, "k": k}, side="above")
            for name in (QUEST, AVERAGE)
            for k in self.budgets
        }
        lab.claim("mage.1", rule=AllOf(costs), grade="T")
        here: dict[str, Scalar] = {**trained, "k": self.k}
        leads = {"cosine, block average over single queries": LEAD}
        leads |= {f"recall, over {name}": over(name) for name in (QUEST, WINDOW, RANDOM)}
        shown = {
            name: Paired(metric=metric, method=MAGE, where=here, side="above")
            for name, metric in leads.items()
        }
        lab.claim("mage.2", part="a", rule=AllOf(shown), grade="T")
        emerges = {
            name: Paired(
                metric=metric,
                method=MAGE,
                where=here,
                to_where={"state": UNTRAINED},
                side="above",
                equal=(),  # training is what is compared
            )
            for name, metric in leads.items()
        }
        lab.claim("mage.2", part="b", rule=AllOf(emerges), grade="T")
        long: dict[str, Scalar] = {"context": LONG, "k": JUDGED_K}
        lossless = {
            "masked loss": NonInferior(
                metric=LOSS, method=MAGE, to=EXACT, margin=ShareOf(0.01), where=long, equal=("tokens",)
            ),
            "forward passes": NonInferior(
                metric=PASSES, method=MAGE, to=EXACT, margin=ShareOf(0.05), where=long, equal=("tokens",)
            ),
            # Where a set by chance does as well, the model doesn't need its prompt, and nothing could be lost.
            "chance is worse": HoldsOnly(
                Paired(metric=LOSS, method=RANDOM, to=MAGE, side="above", where=long, equal=("tokens",))
            ),
            "selection was active": HoldsOnly(Count(metric=ACTIVE, method=MAGE, minimum=1.0, where=long)),
        }
        lab.claim("mage.3", rule=AllOf(lossless), grade="T")
        for part, (rival, number) in SPEEDS.items():
            rule = Ratio(
                metric=TIME,
                method=MAGE,
                to=rival,
                number=number,
                where={"context": LONGEST, "k": JUDGED_K, "passes": 32},
            )
            lab.claim("mage.4", part=f"{part}, direction", rule=replace(rule, part="direction"), grade="R")
            lab.claim("mage.4", part=f"{part}, number", rule=rule, grade="R")
