"""POET: does training rotations around frozen weights keep spectra, and what does it give and cost?

Competitors are in `poet_entrants`, stages in `poet_stages` and `pretraining`, figures in `poet_figures`. All take the
same tokens and the same grid of learning rates. POET comes in four forms that are judged: block-stochastic with the
Cayley-Neumann form of three terms (the default), with the exact Cayley transform, with smaller blocks, and fully
stochastic; further ones are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab
from gnomon.lab.claims import AllOf, Count, FullScale, NonInferior, Paired, Tolerance
from gnomon.studies.poet_entrants import ENTRANTS, REFERENCE_BLOCK
from gnomon.studies.poet_figures import learning, rates, sizes, spectra
from gnomon.studies.poet_stages import counts, measure, order, spread, step_times
from gnomon.studies.pretraining import PretrainingStudy

METHOD, EXACT = "poet-bs", "poet-bs-exact"
ADAMW, SAME_START = "adamw", "adamw-normalized"


@dataclass(frozen=True, kw_only=True)
class POETStudy(PretrainingStudy):
    """Settings, stages and claims of the study."""

    rivals_run: tuple[str, ...] = (ADAMW, SAME_START)
    """Competitors out of `ENTRANTS`; AdamW from both starts is always needed."""
    variants: tuple[str, ...] = (METHOD, EXACT)
    """Forms of POET: poet-bs, poet-bs-exact, poet-bs-k2, poet-fs."""
    rates: tuple[float, ...] = (0.003, 0.01)
    blocks: tuple[int, ...] = (16, REFERENCE_BLOCK)
    """Block sizes that are compared, smallest first; the last is that of the method."""
    fraction: float = 0.5
    """Of the fully stochastic form."""
    merge_interval: int = 25
    forward: str = "weight"
    weight_decay: float = 0.01
    """Of AdamW and rivals; POET has none on rotations."""
    spread_factor: float = 3.0
    """The stability claim trains at the tuned rate, and at this factor above and below it."""
    rank: int = 24
    """Of LoRA and GaLore."""
    gap: int = 50
    """Steps of one projector of GaLore."""
    schedule: str = "cosine"
    warmup: float = 0.05
    steps: int = 100
    batch: int = 4
    timed_steps: int = 15

    slug: ClassVar[str] = "poet"
    rival_protocol: ClassVar[str] = (
        "make(model, lr=, weight_decay=, total_steps=) -> torch.optim.Optimizer or "
        "gnomon.studies.pretraining.Entrant"
    )
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "seeds": (0,),
            "rivals_run": (ADAMW, SAME_START, "muon", "galore", "lora", "oft"),
            "variants": ("poet-bs", "poet-bs-exact", "poet-bs-k2", "poet-fs"),
            "rates": (0.003,),
            "blocks": (2, 4, 8),
            "merge_interval": 2,
            "rank": 2,
            "gap": 2,
            "steps": 5,
            "batch": 4,
            "length": 32,
            "points": 2,
            "windows": 16,
            "timed_steps": 2,
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "tuning_seeds": (
                1000,
                1001,
                1002,
            ),  # one of them alone picked a rate for AdamW that the others don't bear out
            "rivals_run": (ADAMW, SAME_START, "muon", "galore", "lora", "oft"),
            "variants": ("poet-bs", "poet-bs-exact", "poet-bs-k2", "poet-fs"),
            "rates": (0.001, 0.003, 0.01),
            "blocks": (8, 16, REFERENCE_BLOCK),
            "merge_interval": 50,
            "batch": 8,
            "steps": 300,
            "points": 20,
        },
        "gpu": {
            "model": "./llama-60m",  # a folder with config.json and a tokenizer; weights are drawn anew
            "data": "./c4",
            "rates": (0.001, 0.003, 0.01),
            "rivals_run": (ADAMW, SAME_START, "muon", "galore", "lora", "oft"),
            "variants": ("poet-bs", "poet-bs-exact", "poet-bs-k2", "poet-fs"),
            "blocks": (64, 128, 256),
            "merge_interval": 400,
            "rank": 64,
            "gap": 200,
            "steps": 300_000,
            "batch": 64,
            "length": 256,
            "accumulate": 8,
            "warmup": 0.0,
            "clip": 0.1,
            "points": 60,
            "windows": 2_000,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.rivals_run:
            if name not in ENTRANTS or name == "poet":
                raise unknown("value of rivals_run:", name, [one for one in ENTRANTS if one != "poet"])
        for name in self.variants:
            if name not in self._forms():
                raise unknown("value of variants:", name, self._forms())
        for chosen, needed in ((self.rivals_run, (ADAMW, SAME_START)), (self.variants, (METHOD, EXACT))):
            if missing := [one for one in needed if one not in chosen]:
                raise UsageError(f"{', '.join(missing)} must be among {', '.join(chosen)}: claims need it.")
        if len(self.blocks) < 2 or sorted(set(self.blocks)) != list(self.blocks):
            raise UsageError(f"blocks must be two sizes or more, smallest first, got {self.blocks}.")
        if not self.spread_factor > 1:
            raise UsageError(f"spread_factor={self.spread_factor} must be above 1.")

    def _forms(self) -> dict[str, dict[str, Any]]:
        """Settings of POET's forms, by name."""
        bs = {"variant": "bs", "block_size": self.blocks[-1]}
        return {
            "poet-bs": bs,
            "poet-bs-exact": {**bs, "neumann_terms": "exact"},
            "poet-bs-k2": {**bs, "neumann_terms": 2},
            "poet-fs": {"variant": "fs", "fraction": self.fraction},
        }

    def _poet(self, settings: dict[str, Any]) -> dict[str, Any]:
        common = {"merge_interval": self.merge_interval, "forward": self.forward, "clip": self.clip or 1.0}
        return {"make": ENTRANTS["poet"], "options": {**settings, **common}}

    def _competitors(self) -> dict[str, dict[str, Any]]:
        """Arguments of `pretrain` by name, except the rate and what all share."""
        options: dict[str, dict[str, Any]] = {
            "galore": {"rank": self.rank, "gap": self.gap},
            "lora": {"rank": self.rank, "alpha": 2.0 * self.rank},
            "oft": {"block_size": self.blocks[-1]},
        }
        found = {name: {"make": ENTRANTS[name], "options": options.get(name, {})} for name in self.rivals_run}
        found |= {name: {"make": make, "options": {}} for name, make in self.rival_targets.items()}
        found |= {name: self._poet(self._forms()[name]) for name in self.variants}
        return {
            name: {"method": name, "weight_decay": self.weight_decay, **one} for name, one in found.items()
        }

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (learning, spectra, rates, sizes):
            lab.figure(figure)
        lab.stage(counts)
        competitors = self._competitors()
        tuned = {name: self.tuned(lab, **one) for name, one in competitors.items()}
        blocks = {
            block: {**competitors[METHOD], **self._poet({"variant": "bs", "block_size": block})}
            for block in self.blocks
        }
        for seed in lab.seeds:
            for name, one in competitors.items():
                trained = self.trained(lab, tuned[name], seed, **one)
                lab.stage(measure, of=trained, method=name, trials=tuned[name].trials)
            by_block = [self.trained(lab, tuned[METHOD], seed, **one) for one in blocks.values()]
            lab.stage(
                order,
                of=by_block,
                names=[str(block) for block in blocks],
                method=METHOD,
                trials=tuned[METHOD].trials,
            )
            for name in (ADAMW, SAME_START, METHOD):
                best = tuned[name].settings["lr"]
                grid = [
                    self.trained(lab, replace(tuned[name], settings={"lr": lr}), seed, **competitors[name])
                    for lr in (best / self.spread_factor, best, best * self.spread_factor)
                ]
                lab.stage(spread, of=grid, method=name, trials=tuned[name].trials)
        lab.stage(
            step_times,
            exclusive=True,
            model=self.model,
            scratch=self.scratch,
            competitors={
                ADAMW: competitors[ADAMW],
                **{
                    f"{METHOD}, {forward}": {
                        **competitors[METHOD],
                        "options": {**competitors[METHOD]["options"], "forward": forward},
                    }
                    for forward in ("weight", "input", "input_ckpt")
                },
            },
            batch=self.batch,
            length=self.length,
            repeats=self.timed_steps,
            seed=0,
        )

    def _claims(self, lab: Lab) -> None:
        kept = {
            "exact Cayley": Tolerance(metric="spectrum drift", method=EXACT, limit=1e-5, at_least=3),
            "Neumann form": Tolerance(metric="spectrum drift", method=METHOD, limit=0.03, at_least=3),
        }
        lab.claim("poet.1", rule=AllOf(kept), grade="X")
        better = {
            f"than {name}": Paired(metric="loss", method=METHOD, to=name) for name in (ADAMW, SAME_START)
        }
        lab.claim("poet.2", part="a", rule=AllOf(better), grade="T")
        stable = {
            metric: Paired(metric=metric, method=METHOD, to=ADAMW)
            for metric in ("spread of loss over learning rates", "growth of the top singular value")
        }
        lab.claim("poet.2", part="b", rule=AllOf(stable), grade="T")
        numbers = {
            name: Count(metric="trained numbers of a 60M Llama", method=name, equals=count)
            for name, count in (("poet-bs", 9_661_440), ("poet-fs", 8_544_192), ("adamw", 25_296_896))
        }
        lab.claim("poet.3", part="numbers", rule=AllOf(numbers), grade="X")
        near = NonInferior(metric="loss", method=METHOD, to=EXACT, margin=0.01)
        lab.claim("poet.3", part="approximation", rule=near, grade="T")
        falls = Count(metric="loss falls with block size", method=METHOD, equals=1, at_least=3)
        lab.claim("poet.3", part="scaling", rule=falls, grade="T")
        lab.claim(
            "poet.3",
            part="memory",
            rule=FullScale("27.9 to 33.1 GB against AdamW's 76.3 is peak memory of an 8B model on one GPU"),
            grade="R",
        )
