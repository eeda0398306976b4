"""Model Shapley: do one backward pass and a quadratic part tell what units are worth, and is that of use?

Exactness and cost are in `shapley_exact`, everything on trained models in `shapley_stages` (games over neurons in
`shapley_games`), the compared scores in `shapley_entrants`, figures in `shapley_figures`.

Fixed beforehand: the method is the derived plus sign, the Fisher of sequences times their tokens, blocks of a layer,
ranked by signed φ. The paper's printed sign, its ranking by absolute value, and what its released code computes are
rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Lab
from gnomon.lab.claims import AllOf, Count, Paired, Ratio, Tolerance
from gnomon.lab.engine import Handle
from gnomon.lab.tune import tune
from gnomon.studies.pretraining import PretrainingStudy, parts, pretrain
from gnomon.studies.shapley_entrants import (
    GRADIENT,
    JUDGED,
    METHOD,
    PRINTED,
    RANDOM,
    SCORES,
    TRACE,
)
from gnomon.studies.shapley_exact import (
    ERROR,
    LOGISTIC,
    PASS,
    SECONDS,
    SUM,
    exactness,
    scoring_time,
)
from gnomon.studies.shapley_figures import (
    correlations,
    deletion_curves,
    new_domain,
    quantised,
    signs,
)
from gnomon.studies.shapley_stages import (
    ADAPTED,
    ALL_ROWS,
    BOTTOM,
    BRUTE,
    GPTQ,
    GUIDED,
    HALVES,
    LEFT_OUT,
    NEURONS,
    OBD,
    QUANTISED,
    RISE,
    ROUNDED,
    adapt,
    brute_force,
    deletion,
    measure_adapted,
    measure_quantised,
    quantise,
    real_deletion,
    tokens,
)

BASE = "gnomon.studies.shapley_entrants:adamw"
ADAPTERS = (METHOD, RANDOM, TRACE, BOTTOM)
"""Ways to choose rows that claims are judged on."""
JUDGED_SHARES = (0.1, 0.3, 0.5)
JUDGED_BITS = (8, 4)
FEWEST_REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class ShapleyStudy(PretrainingStudy):
    """Settings, stages and claims of the study."""

    domain: str = "topics"
    """The text that trained models are adapted to."""
    base_lr: float = 0.005
    """Of the models under study."""
    rates: tuple[float, ...] = (0.001, 0.003)
    """The grid of learning rates of adaptation, the same for all."""
    scores: tuple[str, ...] = (METHOD, PRINTED, "released code", TRACE, GRADIENT, "wanda", RANDOM)
    """Out of `SCORES`; those of the claims are always needed."""
    adapters: tuple[str, ...] = ADAPTERS
    """How rows are chosen for adaptation: scores, or the method's lowest rows, or all weights."""
    game_players: tuple[int, ...] = (3, 6, 9, 12)
    """Players of the quadratic games; the logistic one has as many as the largest."""
    players: int = 12
    """Neurons of the game that is played out on trained models."""
    game_probes: int = 4
    game_length: int = 32
    """Windows that this game's utility is measured on, and their tokens."""
    groups: bool = False
    """Also play the game of all neurons in random groups."""
    probes: int = 48
    """Windows that units are scored on, and GPTQ calibrates on."""
    probe_length: int = 64
    """Their tokens."""
    left_out: int = 64
    """Neurons that are left out one at a time."""
    shares: tuple[float, ...] = JUDGED_SHARES
    """Of the neurons that are dropped."""
    judged_windows: int = 64
    """Held-out windows, of `probe_length` tokens, that effects of units are measured on."""
    adapt_ratio: float = 0.1
    """Rows that train, as a share of each layer's."""
    adapt_steps: int = 40
    adapt_points: int = 4
    """Looks at the model while it is adapted."""
    bits: tuple[int, ...] = JUDGED_BITS
    betas: tuple[float, ...] = (0.1, 0.5, 0.9)
    """The grid of Shapley-guided GPTQ; the paper's is .1, .3, .5, .7, .9."""
    dampings: tuple[float, ...] = (0.003, 0.01, 0.03)
    """The grid of plain GPTQ, equally long."""
    timed: str = "tiny:llama-3m"
    """The model whose scoring is timed."""
    timed_batch: int = 8
    timed_length: int = 128
    repeats: int = FEWEST_REPEATS
    real: str = ""
    """A pretrained model whose deletion curves are shown; empty: none."""
    real_probes: int = 16
    real_windows: int = 8

    slug: ClassVar[str] = "shapley"
    sources: ClassVar[tuple[str, ...]] = ("model", "data", "domain", "timed", "real")
    rival_protocol: ClassVar[str] = "score(model, batches, units=, generator=) -> ShapleyScores"
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "data": "generated:60",
            "domain": "generated:30",
            "seeds": (0,),
            "scores": tuple(SCORES),
            "adapters": (*ADAPTERS, ALL_ROWS, "released code"),
            "rates": (0.003,),
            "steps": 4,
            "batch": 4,
            "length": 32,
            "points": 2,
            "windows": 8,
            "game_players": (3, 5),
            "players": 4,
            "game_probes": 2,
            "game_length": 16,
            "groups": True,
            "probes": 8,
            "probe_length": 16,
            "left_out": 8,
            "judged_windows": 8,
            "adapt_steps": 2,
            "adapt_points": 1,
            "betas": (0.5,),
            "dampings": (0.01,),
            "timed": "tiny:llama-10k",
            "timed_batch": 2,
            "timed_length": 16,
            "repeats": 2,
        },
        "full": {
            "seeds": (0, 1, 2, 3, 4),
            "scores": tuple(SCORES),
            "adapters": (
                *ADAPTERS,
                GRADIENT,
                "shapley, absolute",
                PRINTED,
                "released code",
                ALL_ROWS,
            ),
            "rates": (0.0003, 0.001, 0.003, 0.01),
            "steps": 600,
            "points": 20,
            "groups": True,
            "game_probes": 8,
            "probes": 96,
            "left_out": 128,
            "judged_windows": 128,
            "adapt_steps": 100,
            "betas": (0.1, 0.3, 0.5, 0.7, 0.9),
            "dampings": (0.001, 0.003, 0.01, 0.03, 0.1),
            "timed": "smollm2-135m",
            "timed_batch": 1,
            "real": "smollm2-135m",
        },
        "gpu": {
            "model": "Qwen/Qwen2.5-3B-Instruct",
            "scratch": False,
            "data": "./text",  # folders of .jsonl or .txt files; the paper's are MMLU and GSM8K
            "domain": "./domain",
            "scores": tuple(SCORES),
            "adapters": (*ADAPTERS, GRADIENT, "shapley, absolute", PRINTED, "released code", ALL_ROWS),
            "base_lr": 1e-6,
            "rates": (1e-5, 3e-5, 1e-4),
            "steps": 2,  # with `base_lr`, next to nothing: the model is pretrained
            "batch": 8,
            "length": 1024,
            "points": 10,
            "probes": 512,
            "probe_length": 1024,
            "left_out": 128,
            "adapt_steps": 500,
            "betas": (0.1, 0.3, 0.5, 0.7, 0.9),
            "dampings": (0.001, 0.003, 0.01, 0.03, 0.1),
            "timed": "Qwen/Qwen2.5-3B-Instruct",
            "timed_length": 1024,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        adapters = {**SCORES, BOTTOM: "", ALL_ROWS: ""}
        for name, known, needed in (
            ("scores", SCORES, JUDGED),
            ("adapters", adapters, ADAPTERS),
        ):
            given = getattr(self, name)
            for one in given:
                if one not in known:
                    raise unknown(f"value of {name}:", one, known)
            if missing := [one for one in needed if one not in given]:
                raise UsageError(f"{name} must hold {', '.join(missing)}: claims compare with it.")
        for field, values in (("shares", self.shares), ("adapt_ratio", (self.adapt_ratio,))):
            if not values or not all(0 < value < 1 for value in values):
                raise UsageError(f"{field} must be shares in (0, 1), got {values}.")
        if len(self.betas) != len(self.dampings):
            raise UsageError(
                f"betas has {len(self.betas)} values and dampings {len(self.dampings)}: both methods must be tuned "
                "with as many trials."
            )
        if not all(0 < beta <= 1 for beta in self.betas) or not all(d > 0 for d in self.dampings):
            raise UsageError("betas must lie in (0, 1] and dampings above 0.")
        if not all(1 <= n <= 12 for n in (*self.game_players, self.players)):
            raise UsageError("Games have 1 to 12 players here: all coalitions are played.")
        if not all(2 <= bits <= 8 for bits in self.bits):
            raise UsageError(f"bits must be 2 to 8, got {self.bits}.")
        least = {
            "game_probes": 1,
            "game_length": 2,
            "probes": 16 if self.players > 8 else 2,
            "probe_length": 2,
        }
        least |= {
            "left_out": 3,
            "judged_windows": 1,
            "adapt_steps": 1,
            "adapt_points": 1,
            "timed_batch": 1,
            "timed_length": 2,
        }
        for name, minimum in (least | {"repeats": 1, "real_probes": 1, "real_windows": 1}).items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {getattr(self, name)}.")
        if len(self.tuning_seeds) != 1:
            raise UsageError(
                f"tuning_seeds must be one seed, got {self.tuning_seeds}: its model is what is tuned on."
            )

    def check(self) -> None:
        super().check()
        parts(self.domain)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in (self.model, self.timed, self.real) if name))

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (signs, correlations, deletion_curves, new_domain, quantised):
            lab.figure(figure)
        makes = {name: SCORES[name] for name in self.scores} | self.rival_targets
        for seed in lab.seeds:
            lab.stage(exactness, players=self.game_players, seed=seed)
        lab.stage(
            scoring_time,
            exclusive=True,
            model=self.timed,
            batch=self.timed_batch,
            length=self.timed_length,
            repeats=self.repeats,
            threads=self.threads,
            seed=0,
        )
        texts = lab.stage(tokens, model=self.model, data=self.data, domain=self.domain)
        bases = {seed: self._base(lab, seed) for seed in (*self.tuning_seeds, *lab.seeds)}
        for seed in lab.seeds:
            self._games(lab, bases[seed], texts, makes, seed)
        self._adapt(lab, bases, texts, makes)
        self._quantise(lab, bases, texts)
        if self.real:
            lab.stage(
                real_deletion,
                model=self.real,
                data="mixed",
                makes={n: m for n, m in makes.items() if n in (*JUDGED, PRINTED, "wanda")},
                probes=self.real_probes,
                length=128,
                windows=self.real_windows,
                shares=self.shares,
                seed=0,
            )

    def _base(self, lab: Lab, seed: int) -> Handle:
        return lab.stage(pretrain, method="base", make=BASE, seed=seed, lr=self.base_lr, **self.training())

    def _games(self, lab: Lab, base: Handle, texts: Handle, makes: dict[str, str], seed: int) -> None:
        lab.stage(
            brute_force,
            of=base,
            texts=texts,
            makes=makes,
            players=self.players,
            probes=self.game_probes,
            length=self.game_length,
            groups=self.groups,
            seed=seed,
        )
        lab.stage(
            deletion,
            of=base,
            texts=texts,
            makes=makes,
            probes=self.probes,
            length=self.probe_length,
            windows=self.judged_windows,
            left=self.left_out,
            shares=self.shares,
            seed=seed,
        )

    def _adapt(self, lab: Lab, bases: dict[int, Handle], texts: Handle, makes: dict[str, str]) -> None:
        (tuning,) = self.tuning_seeds
        same: dict[str, Any] = {
            "texts": texts,
            "ratio": self.adapt_ratio,
            "steps": self.adapt_steps,
            "batch": self.batch,
            "length": self.length,
            "probes": self.probes,
            "windows": self.windows,
            "warmup": self.warmup,
            "points": self.adapt_points,
        }
        for name in (*self.adapters, *self.rival_targets):
            make = {**makes, **SCORES, BOTTOM: SCORES[METHOD], ALL_ROWS: ""}[name]
            own: dict[str, Any] = {"method": name, "make": make, "lowest": name == BOTTOM}
            tuned = tune(
                lab,
                adapt,
                grid={"lr": self.rates},
                seeds=self.tuning_seeds,
                score="loss",
                of=bases[tuning],
                **own,
                **same,
            )
            for seed in lab.seeds:
                done = lab.stage(adapt, of=bases[seed], seed=seed, **tuned.settings, **own, **same)
                lab.stage(measure_adapted, of=done, method=name, trials=tuned.trials)

    def _quantise(self, lab: Lab, bases: dict[int, Handle], texts: Handle) -> None:
        (tuning,) = self.tuning_seeds
        same: dict[str, Any] = {
            "texts": texts,
            "probes": self.probes,
            "length": self.probe_length,
            "windows": self.judged_windows,
        }
        usual: dict[str, Any] = {"beta": 0.0, "damping": 0.01}
        for bits in self.bits:
            for name, hessian, grid in (
                (GPTQ, "full", {"damping": self.dampings}),
                (GUIDED, "full", {"beta": self.betas}),
                (OBD, "diagonal", {}),
                (ROUNDED, "none", {}),
            ):
                own: dict[str, Any] = {"bits": bits, "hessian": hessian}
                settings, trials = dict(usual), 0
                if grid:
                    rest = {key: value for key, value in usual.items() if key not in grid}
                    tuned = tune(
                        lab,
                        quantise,
                        grid=grid,
                        seeds=self.tuning_seeds,
                        score="loss",
                        of=bases[tuning],
                        **own,
                        **rest,
                        **same,
                    )
                    settings, trials = {**usual, **tuned.settings}, tuned.trials
                for seed in lab.seeds:
                    made = lab.stage(quantise, of=bases[seed], seed=seed, **own, **settings, **same)
                    lab.stage(measure_quantised, of=made, method=name, trials=trials)

    def _claims(self, lab: Lab) -> None:
        exact = {
            "values": Tolerance(metric=ERROR, method=METHOD, limit=1e-10),
            "efficiency": Tolerance(metric=SUM, method=METHOD, limit=1e-10),
            "the printed sign breaks it": Count(metric=ERROR, method=PRINTED, minimum=1e-3),
            "Fisher form, logistic loss": Paired(metric=LOGISTIC, method="shapley, Fisher", side="above"),
        }
        lab.claim("shapley.1", part="a", rule=AllOf(exact), grade="X")
        cost = Ratio(metric=SECONDS, method=METHOD, to=PASS, number=1.5, at_most=True)
        lab.claim("shapley.1", part="b", rule=cost, grade="R")

        def better(metric: str, to: str, **where: Any) -> Paired:
            return Paired(metric=metric, method=METHOD, to=to, where=where)

        synergy = {
            f"{name} v {other}": better(metric, other, **where)
            for name, metric, where in (
                ("brute force", BRUTE, {"game": NEURONS}),
                ("leave-one-out", LEFT_OUT, {}),
            )
            for other in (GRADIENT, TRACE)
        }
        lab.claim("shapley.2", part="a", rule=AllOf(synergy), grade="T")
        halves = Paired(metric=HALVES, method=METHOD, side="above", bound=0.8)
        lab.claim("shapley.2", part="b", rule=halves, grade="T")

        rivals = {f"v {other}": better(ADAPTED, other) for other in (RANDOM, TRACE, BOTTOM)}
        lab.claim("shapley.3", rule=AllOf(rivals), grade="T")

        dropped = {
            f"{share:.0%} v {other}": better(RISE, other, dropped=share)
            for share in JUDGED_SHARES
            for other in (TRACE, GRADIENT, RANDOM)
        }
        lab.claim("shapley.4", part="a", rule=AllOf(dropped), grade="T")
        guided = {
            f"INT{bits}": Paired(metric=QUANTISED, method=GUIDED, to=GPTQ, where={"bits": bits})
            for bits in JUDGED_BITS
        }
        lab.claim("shapley.4", part="b", rule=AllOf(guided), grade="T")
