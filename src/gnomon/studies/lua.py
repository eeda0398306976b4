"""Lua-LLM: does a threshold per row, learnt end to end, allocate sparsity better than rules do?

A small model is trained in the study and pruned with every pruner and allocator; with `real_model` a pretrained one is,
too. What each stage does is in `lua_stages`, the figures in `lua_figures`, the questions in `lua_choices`.

Compared at equal achieved sparsity, counted on the stored weights, and at equal text: all may read the same windows of
the training part, and losses are measured on documents that none has read. Lua goes round that text as often as its
steps need, so it costs far more seconds, which are printed beside it. Nothing is tuned: all take their papers'
settings, but for what short runs force (steps and text), which is the same for Lua's variants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import AllOf, Count, Paired, Rule, Tolerance, Withheld
from gnomon.lab.engine import Grade, Handle
from gnomon.studies.lua_choices import CONTINUATIONS, items
from gnomon.studies.lua_figures import cost, gap, losses, pairs, pattern
from gnomon.studies.lua_stages import LUA, dense, learnt, name_of, operator, patterned, prepared, pruned
from gnomon.studies.pretraining import parts, pretrain

PRUNERS = ("magnitude", "wanda", "sparsegpt")
RULES = ("uniform", "owl", "alpha", "atp")
"""Allocations that aren't learnt."""
RIVALS = ("magnitude", "wanda", "wanda + owl", "wanda + alpha", "sparsegpt")
"""What the first claim compares with."""
VARIANTS: dict[str, dict[str, str]] = {
    LUA: {},
    "lua column": {"granularity": "column"},
    "lua layer": {"granularity": "layer"},
    "lua removed": {"reg": "removed"},
    "lua magnitude": {"importance": "magnitude"},
}
"""Changes of one thing each."""
GRANULARITIES = ("lua column", "lua layer")
JUDGED = (0.5, 0.6, 0.7)
SPREAD = 0.01
"""Standard deviation of sparsities above which they count as different: one weight of a row of 96."""
ENOUGH = 50
"""Steps below which nobody expects thresholds to have met their budget."""
SMALL, PRETRAINED = "small", "pretrained"
EQUAL = ("tokens", "trials", "steps")
"""What variants of Lua have in common; rules that aren't learnt take no steps."""


@dataclass(frozen=True, kw_only=True)
class LuaStudy(StudyConfig):
    """Settings, stages and claims of the study."""

    model: str = "tiny:llama-0.5m"
    """The architecture that is trained here."""
    data: str = "stdlib"
    """Text to train, prune and judge on, split by documents: recipe, file or folder (`core.data`)."""
    other: str = "topics"
    """Text of another kind, to judge on only; empty for none."""
    seeds: tuple[int, ...] = (0, 1, 2)
    base_steps: int = 300
    base_batch: int = 8
    base_lr: float = 0.005
    """Of the dense model's training."""
    length: int = 128
    """Tokens of a window."""
    batch: int = 8
    """Windows of a batch of text that pruners read; Lua's step."""
    samples: int = 256
    """Windows that pruners may read, a multiple of `batch`."""
    windows: int = 96
    """Windows that losses are measured on."""
    questions: str = CONTINUATIONS
    """Multiple choice: made from held-out documents, or a .jsonl file with context, choices and answer."""
    items: int = 48
    """Questions."""
    sparsities: tuple[float, ...] = JUDGED
    pruners: tuple[str, ...] = ("magnitude", "wanda", "sparsegpt")
    allocations: tuple[str, ...] = ("uniform", "owl", "alpha")
    """Rules out of `RULES`; pairs with the learnt allocation come with Lua's runs."""
    pair_seeds: int = 1
    """With how many of `seeds` the pairs are run that no claim is about."""
    variants: tuple[str, ...] = ("lua", "lua column", "lua layer")
    """Out of `VARIANTS`."""
    others_at: float = 0.7
    """The sparsity at which those variants are run that no claim is about."""
    lua_steps: int = 120
    lua_lr: float = 5e-3
    group: int = 32
    """Columns of SparseGPT's blocks under a learnt allocation."""
    patterns: tuple[str, ...] = ()
    """N:M patterns, such as 2:4."""
    maskllm_steps: int = 200
    maskllm_lr: float = 5e-3
    """Of the logits; the paper's 5e-5 is for 2,000 steps of a large model."""
    widths: tuple[int, ...] = (96, 320, 576, 1536, 4096, 11008)
    cuts: tuple[float, ...] = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8)
    """Widths of rows and thresholds at which the soft mask is counted."""

    real_model: str | None = None
    """A pretrained model: embedded name, folder or hub id; None leaves it out."""
    real_data: str = "stdlib"
    real_other: str = "topics"
    real_seeds: int = 3
    """How many of `seeds` it is pruned with."""
    real_length: int = 512
    real_batch: int = 1
    real_samples: int = 16
    real_windows: int = 8
    real_items: int = 16
    real_sparsities: tuple[float, ...] = JUDGED
    real_pairs_at: tuple[float, ...] = ()
    """Sparsities at which the other pairs are run, with the first seed."""
    real_extra: tuple[float, ...] = ()
    """Further sparsities, with the first seed."""
    real_steps: int = 32
    real_lr: float = 5e-3
    real_group: int = 128
    real_dtype: str = "float32"

    slug: ClassVar[str] = "lua"
    sources: ClassVar[tuple[str, ...]] = (
        "model",
        "data",
        "other",
        "questions",
        "real_model",
        "real_data",
        "real_other",
    )
    disk_bytes: ClassVar[int] = 500_000_000
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "other": "",
            "seeds": (0,),
            "base_steps": 8,
            "base_batch": 4,
            "length": 32,
            "batch": 4,
            "samples": 8,
            "windows": 8,
            "items": 4,
            "sparsities": (0.6,),
            "allocations": RULES,
            "variants": tuple(VARIANTS),
            "others_at": 0.6,
            "lua_steps": 3,
            "group": 8,
            "patterns": ("2:4",),
            "maskllm_steps": 3,
            "widths": (96, 576, 4096),
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "base_steps": 700,
            "samples": 512,
            "windows": 192,
            "items": 100,
            "sparsities": (0.5, 0.6, 0.7, 0.8),
            "allocations": RULES,
            "variants": tuple(VARIANTS),
            "pair_seeds": 2,
            "lua_steps": 150,
            "patterns": ("2:4",),
            "real_model": "smollm2-135m",
            "real_pairs_at": (0.6, 0.7),
            "real_extra": (0.8,),
        },
        "gpu": {
            "seeds": (0, 1, 2),
            "base_steps": 700,
            "samples": 512,
            "windows": 192,
            "items": 100,
            "sparsities": (0.5, 0.6, 0.7, 0.8),
            "allocations": RULES,
            "variants": tuple(VARIANTS),
            "lua_steps": 200,
            "patterns": ("2:4",),
            "real_model": "meta-llama/Llama-2-7b-hf",
            "real_data": "./c4",  # a folder of .jsonl or .txt files
            "real_other": "./wikitext2.txt",
            "real_length": 2048,
            "real_batch": 2,
            "real_samples": 1024,
            "real_windows": 128,
            "real_items": 400,
            "real_pairs_at": (0.6, 0.7),
            "real_extra": (0.8,),
            "real_steps": 500,
            "real_dtype": "bfloat16",
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known, needed in (
            ("pruners", PRUNERS, PRUNERS),
            ("allocations", RULES, ("uniform", "owl", "alpha")),
            ("variants", tuple(VARIANTS), (LUA, "lua column", "lua layer")),
        ):
            chosen = getattr(self, name)
            for one in chosen:
                if one not in known:
                    raise unknown(f"value of {name}:", one, known)
            if missing := [one for one in needed if one not in chosen]:
                raise UsageError(f"{name} must hold {', '.join(missing)}: claims compare with it.")
        for name in ("sparsities", "real_sparsities", "real_pairs_at", "real_extra", "cuts"):
            if not all(0 < p < 1 for p in getattr(self, name)):
                raise UsageError(f"{name} must be shares in (0, 1), got {getattr(self, name)}.")
        if not self.sparsities or not self.real_sparsities:
            raise UsageError("sparsities and real_sparsities need at least one share each.")
        counts = (
            "base_steps base_batch length batch samples windows items pair_seeds lua_steps group maskllm_steps "
            "real_seeds real_length real_batch real_samples real_windows real_items real_steps real_group"
        )
        for name in counts.split():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for samples, batch in (("samples", "batch"), ("real_samples", "real_batch")):
            if getattr(self, samples) % getattr(self, batch):
                raise UsageError(
                    f"{samples}={getattr(self, samples)} must be a multiple of {batch}={getattr(self, batch)}."
                )
        if not all(rate > 0 for rate in (self.base_lr, self.lua_lr, self.maskllm_lr, self.real_lr)):
            raise UsageError("Learning rates must be positive.")
        if min(self.widths, default=0) < 16:
            raise UsageError(f"widths must be at least 16, got {self.widths}.")

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,) if self.real_model is None else (self.model, self.real_model)

    def check(self) -> None:
        from gnomon.core.data import corpus

        super().check()
        texts = [(self.data, self.other, self.items)]
        if self.real_model is not None:
            texts.append((self.real_data, self.real_other, self.real_items))
        for data, other, count in texts:
            items(self.questions, parts(data).valid, count)
            if other:
                corpus(other)

    # ------------------------------------------------------------------------------------------- stages

    def run(self, lab: Lab) -> None:
        for (claim, part), (rule, grade) in self.rules().items():
            lab.claim(claim, part=part, rule=rule, grade=grade)
        for figure in (losses, pairs, pattern, gap, cost):
            lab.figure(figure)
        lab.stage(operator, widths=self.widths, cuts=self.cuts, seed=0)
        texts = lab.stage(prepared, model=self.model, text=self._text())
        for number, seed in enumerate(self.seeds):
            of = self._base(lab, seed)
            start: dict[str, Any] = {"of": of, "model": "", "on": SMALL, "texts": texts, "seed": seed}
            lab.stage(dense, **start)
            for p in self.sparsities:
                self._by_rule(lab, start, p, everything=number < self.pair_seeds)
                for variant in self._variants(p, shown=number < self.pair_seeds):
                    feeds = PRUNERS if variant == LUA and number < self.pair_seeds else ()
                    self._learnt(lab, start, p, variant, feeds)
            if number < self.pair_seeds:
                for which in self.patterns:
                    self._patterned(lab, start, which)
        if self.real_model is not None:
            self._real(lab, self.real_model)

    def _variants(self, p: float, *, shown: bool) -> list[str]:
        """Variants of Lua that are run at a sparsity; with `shown` those too that no claim is about."""
        judged = [LUA, *(GRANULARITIES if p in JUDGED else ())]
        more = shown and p == self.others_at
        return [one for one in self.variants if one in judged or (more and one not in GRANULARITIES)]

    def _base(self, lab: Lab, seed: int) -> Handle:
        return lab.stage(
            pretrain,
            method="dense",
            make="gnomon.studies.lua_stages:adamw",
            seed=seed,
            lr=self.base_lr,
            model=self.model,
            scratch=True,
            data=self.data,
            steps=self.base_steps,
            batch=self.base_batch,
            length=self.length,
            accumulate=1,
            schedule="cosine",
            warmup=0.1,
            cooldown=0.2,
            clip=1.0,
            points=1,
            windows=self.windows,
        )

    def _text(self) -> dict[str, Any]:
        shared = {
            name: getattr(self, name) for name in ("data", "other", "samples", "batch", "length", "windows")
        }
        return {**shared, "questions": self.questions, "items": self.items, "dtype": "float32"}

    def _real_text(self) -> dict[str, Any]:
        shared = ("data", "other", "samples", "batch", "length", "windows", "items", "dtype")
        return {name: getattr(self, f"real_{name}") for name in shared} | {"questions": self.questions}

    def _by_rule(self, lab: Lab, start: dict[str, Any], p: float, *, everything: bool) -> None:
        for pruner in self.pruners:
            for allocation in self.allocations:
                if everything or name_of(pruner, allocation) in RIVALS:
                    lab.stage(pruned, pruner=pruner, allocation=allocation, sparsity=p, **start)

    def _learnt(
        self, lab: Lab, start: dict[str, Any], p: float, variant: str, feeds: tuple[str, ...]
    ) -> None:
        real = start["on"] == PRETRAINED
        settings: dict[str, Any] = {"granularity": "row", "reg": "kept", "importance": "wanda"} | VARIANTS[
            variant
        ]
        lab.stage(
            learnt,
            method=variant,
            sparsity=p,
            feeds=feeds,
            steps=self.real_steps if real else self.lua_steps,
            lr=self.real_lr if real else self.lua_lr,
            group=self.real_group if real else self.group,
            **settings,
            **start,
        )

    def _patterned(self, lab: Lab, start: dict[str, Any], which: str) -> None:
        for pruner in (*PRUNERS, "maskllm"):
            lab.stage(
                patterned,
                pruner=pruner,
                pattern=which,
                steps=self.maskllm_steps,
                lr=self.maskllm_lr,
                **start,
            )

    def _real(self, lab: Lab, model: str) -> None:
        texts = lab.stage(prepared, model=model, text=self._real_text())
        for number, seed in enumerate(self.seeds[: self.real_seeds]):
            start: dict[str, Any] = {
                "of": None,
                "model": model,
                "on": PRETRAINED,
                "texts": texts,
                "seed": seed,
            }
            lab.stage(dense, **start)
            for p in (*self.real_sparsities, *(self.real_extra if number == 0 else ())):
                everything = number == 0 and p in self.real_pairs_at
                self._by_rule(lab, start, p, everything=everything)
                self._learnt(lab, start, p, LUA, PRUNERS if everything else ())

    # ------------------------------------------------------------------------------------------- claims

    def rules(self) -> dict[tuple[str, str], tuple[Rule, Grade]]:
        """Rule and grade of each part of each claim, by id and part."""
        found: dict[tuple[str, str], tuple[Rule, Grade]] = {}
        grades: tuple[tuple[str, str, Grade], ...] = (("small", SMALL, "T"), ("pretrained", PRETRAINED, "R"))
        for part, on, grade in grades:
            cells = {
                f"{rival} at {p:.0%}": Paired(
                    metric="loss", method=LUA, to=rival, where={"on": on, "sparsity": p}
                )
                for rival in RIVALS
                for p in JUDGED
            }
            found["lua.1", part] = AllOf(cells), grade
        rows = {
            f"{other} at {p:.0%}": Paired(
                metric="loss", method=LUA, to=other, where={"on": SMALL, "sparsity": p}, equal=EQUAL
            )
            for other in ("lua column", "lua layer")
            for p in JUDGED
        }
        found["lua.2", "quality"] = AllOf(rows), "T"
        free = {
            f"{metric.removeprefix('spread of sparsity ')} at {p:.0%}": Paired(
                metric=metric, method=LUA, where={"on": SMALL, "sparsity": p}, side="above", bound=SPREAD
            )
            for metric in ("spread of sparsity between layers", "spread of sparsity inside matrices")
            for p in JUDGED
        }
        found["lua.2", "free"] = AllOf(free), "T"
        mask = {
            "soft sum": Tolerance(metric="soft sum minus (1 - t) C - 1/2", limit=0.05),
            "ranks on each side": Tolerance(metric="fractional ranks on each side", around=4.0, limit=1.0),
        }
        found["lua.3", "mask"] = AllOf(mask), "X"
        # of every run with row thresholds and the default regulariser, on every model and at every sparsity
        budget: Rule = AllOf(
            {
                "trained within 1e-3": Tolerance(metric="raw sparsity minus p", method=LUA, limit=1e-3),
                "exact after the offset": Tolerance(metric="zeros beyond the budget", method=LUA, limit=0.0),
                "kept bit for bit or zero": Count(metric="weights neither kept nor zero", equals=0),
                "only thresholds train": Count(metric="trained numbers beyond the thresholds", equals=0),
                "weights untouched before": Count(metric="matrices changed before apply", equals=0),
            }
        )
        if self.lua_steps < ENOUGH:
            budget = Withheld(budget, f"{self.lua_steps} steps are too few to reach a budget")
        found["lua.3", "budget"] = budget, "X"
        return found
