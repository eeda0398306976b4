"""Tail-Optimized LRU: what is proved about it, what a simulator shows, and what a trace of one's own would gain.

Proofs are checked exactly: a family of traces on which LRU's excess grows without bound, hindsight against linear
programs, the expected form against brute force. Random traces by the method card go through every policy at all
capacities and thresholds; capacity and threshold of the "up to" claims are chosen on seeds that judge nothing. A trace
from a file (`-o trace=FILE`) is cut in two, one part choosing, one judging; a real model serves conversations from a
store of KV caches. Stages are in `tail_lru_stages` and `tail_lru_replay`, figures in `tail_lru_figures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gnomon.core.errors import UsageError, number, unknown
from gnomon.lab import Lab, StudyConfig
from gnomon.lab.claims import AllOf, Count, FullScale, Paired, Rule, Tolerance
from gnomon.lab.tune import tune
from gnomon.studies.tail_lru_figures import (
    excess,
    gains,
    measured_tails,
    own_gains,
    own_tails,
    tails_by_capacity,
)
from gnomon.studies.tail_lru_policies import LRU, METHOD, POLICIES, THRESHOLDED
from gnomon.studies.tail_lru_replay import (
    CHOSEN,
    MEASURED,
    OF_TREES,
    OF_TURNS,
    OVER,
    choose,
    measured,
    replay,
    trace_of,
    verdict,
)
from gnomon.studies.tail_lru_stages import (
    AS_LRU,
    AS_TAIL,
    EXPECTED,
    GAP,
    LINES,
    LOWER,
    UNBOUNDED,
    expected,
    gain,
    judged,
    lines,
    lru_is_bad,
    optimum,
    special_cases,
    sweep,
)

LETTERS = {"a": ("P90", 27.5), "b": ("P95", 23.9), "c": ("violations", 38.9)}
"""What the abstract says is up to so many per cent lower, by the part's letter."""


@dataclass(frozen=True, kw_only=True)
class TailLRUStudy(StudyConfig):
    """Settings, stages and claims of the study."""

    model: str = "smollm2-135m"
    """A decoder with full attention: embedded name, `tiny:`, folder or hub id."""
    trace: str = ""
    """A trace of one's own: a .jsonl, .json or .csv file; also Azure's, Mooncake's, WildChat's or ShareGPT's."""
    format: str = "auto"
    """Of the trace: turns, wildchat, sharegpt, azure, mooncake; auto looks at its first line."""
    requests: int = 0
    """Lines of the trace that are read; 0: all."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seeds: tuple[int, ...] = (1000, 1001, 1002)
    turns: int = 2000
    """Of a random trace."""
    capacities: tuple[int, ...] = (1000, 2000, 4000, 8000)
    """Tokens that fit into the cache."""
    thresholds_ms: tuple[float, ...] = (100.0, 150.0, 200.0, 500.0)
    reference_ms: float = 150.0
    """Threshold of the policies that aren't swept, and at which every policy's tail excess is counted."""
    slo_ms: float = 200.0
    alpha_ms: float = 0.1
    """Milliseconds of an uncached token."""
    qhat: int = 200
    """Estimate of the next prompt, in tokens."""
    policies: tuple[str, ...] = POLICIES
    shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    """Capacities for the trace of one's own, as shares of all that it ever holds."""
    own_thresholds_ms: tuple[float, ...] = (500.0, 1000.0, 2000.0, 4000.0)
    own_slo_ms: float = 2000.0
    own_qhat: int = 600
    """Tokens that a turn of one's own trace adds: prompt, and in Mooncake traces the answer before it."""
    exact_traces: int = 400
    """Traces that are solved as linear programs."""
    allocations: int = 200
    special_traces: int = 1000
    sizes: tuple[int, ...] = (10, 100, 1000, 10_000, 100_000)
    """Of the family on which LRU's excess grows."""
    conversations: int = 20
    """That the real model serves."""
    store_seeds: tuple[int, ...] = (0,)
    store_policies: tuple[str, ...] = (LRU, METHOD)
    mean_prompt: float = 40.0
    answer: int = 4
    """Tokens the real model generates in a turn."""
    room: float = 0.25
    """Share of all tokens that the store has room for."""
    quantile: float = 0.9
    """Of LRU's simulated uncached lengths: the real store's threshold."""

    slug: ClassVar[str] = "tail_lru"
    sources: ClassVar[tuple[str, ...]] = ("model", "trace")
    profiles: ClassVar[dict[str, dict[str, Any]]] = {
        "smoke": {
            "model": "tiny:llama-10k",
            "seeds": (0,),
            "tuning_seeds": (1000,),
            "turns": 300,
            "capacities": (1000, 4000),
            "thresholds_ms": (150.0, 500.0),
            "shares": (0.05, 0.2),
            "own_thresholds_ms": (1000.0, 2000.0),
            "exact_traces": 40,
            "allocations": 20,
            "special_traces": 50,
            "sizes": (10, 100, 1000),
            "conversations": 4,
            "mean_prompt": 15.0,
        },
        "full": {
            "tuning_seeds": (1000, 1001, 1002, 1003, 1004),
            "capacities": (1000, 2000, 4000, 6000, 8000, 10_000),
            "thresholds_ms": (50.0, 100.0, 150.0, 200.0, 300.0, 500.0),
            "shares": (0.01, 0.02, 0.05, 0.1, 0.2, 0.4),
            "own_thresholds_ms": (250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0),
            "exact_traces": 1000,
            "allocations": 1000,
            "special_traces": 5000,
            "store_seeds": (0, 1, 2, 3, 4),
            "store_policies": (LRU, METHOD, "end-aware", "tail-belady"),
            "mean_prompt": 100.0,
            "answer": 8,
        },
        "gpu": {
            "model": "./llama-3.1-8b",
            "capacities": (10_000, 20_000, 50_000, 100_000),
            "store_seeds": (0, 1, 2, 3, 4),
            "conversations": 200,
            "mean_prompt": 200.0,
            "answer": 350,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("policies", "store_policies"):
            for name in getattr(self, field):
                if name not in POLICIES:
                    raise unknown(f"value of {field}:", name, POLICIES)
            if missing := [name for name in (LRU, METHOD) if name not in getattr(self, field)]:
                raise UsageError(f"{', '.join(missing)} must be among {field}: claims need it.")
        least = {
            "turns": 10, "exact_traces": 1, "allocations": 1, "special_traces": 1, "conversations": 2, "answer": 1,
            "qhat": 0, "own_qhat": 0, "requests": 0,
        }  # fmt: skip
        for field, low in least.items():
            if getattr(self, field) < low:
                raise UsageError(f"{field}={getattr(self, field)} must be at least {low}.")
        for field in ("capacities", "thresholds_ms", "own_thresholds_ms", "shares", "sizes"):
            values: Sequence[float] = getattr(self, field)
            if not values or not min(map(number, values)) > 0:
                raise UsageError(f"{field} must be positive, at least one, got {values}.")
        if max(self.shares) > 1 or not 0 < self.room <= 1 or not 0 < self.quantile < 1:
            raise UsageError(
                f"shares={self.shares}, room={self.room} and quantile={self.quantile} are shares, at most 1."
            )
        if self.reference_ms not in self.thresholds_ms:
            raise UsageError(
                f"reference_ms={self.reference_ms} must be among thresholds_ms={self.thresholds_ms}."
            )

    def check(self) -> None:
        """Refuse a trace that can't be read, and capacities below one request."""
        super().check()
        if self.qhat > min(self.capacities):
            raise UsageError(
                f"A capacity of {min(self.capacities)} tokens is below one request: its prompt alone has {self.qhat} "
                "in the mean (qhat). Take larger capacities, or a smaller qhat."
            )
        if self.trace:
            part = trace_of(self.trace, self.format, "all", self.requests or None)
            if len(part) < 100:
                raise UsageError(
                    f"{self.trace} holds {len(part)} requests; at least 100 make percentiles of both halves."
                )

    def run(self, lab: Lab) -> None:
        self._claims(lab)
        for figure in (tails_by_capacity, gains, excess, measured_tails):
            lab.figure(figure)
        self._exact(lab)
        shared: dict[str, Any] = {
            "slo_ms": self.slo_ms, "alpha_ms": self.alpha_ms, "qhat": self.qhat, "turns": self.turns,
        }  # fmt: skip
        for name in self.policies:
            swept = self.thresholds_ms if name == METHOD else (self.reference_ms,)
            for capacity in self.capacities:
                for xi_ms in swept:
                    for seed in lab.seeds:
                        cell: dict[str, Any] = {
                            "policy": name,
                            "capacity": capacity,
                            "xi_ms": xi_ms,
                            "seed": seed,
                        }
                        lab.stage(sweep, reference_ms=self.reference_ms, **cell, **shared)
        grid = {"capacity": self.capacities, "xi_ms": self.thresholds_ms}
        for what, _ in LETTERS.values():
            tuned = tune(lab, gain, grid=grid, seeds=self.tuning_seeds, score=what, better="higher", **shared)
            for seed in lab.seeds:
                lab.stage(
                    judged,
                    of=lab.stage(gain, seed=seed, **tuned.settings, **shared),
                    what=what,
                    trials=tuned.trials,
                )
        if self.trace:
            self._own(lab)
        for seed in self.store_seeds:
            lab.stage(
                measured, exclusive=True, model=self.model, policies=list(self.store_policies),
                conversations=self.conversations, mean_prompt=self.mean_prompt, tokens=self.answer, room=self.room,
                quantile=self.quantile, threads=self.threads, seed=seed,
            )  # fmt: skip

    def _exact(self, lab: Lab) -> None:
        lab.stage(lru_is_bad, sizes=list(self.sizes))
        lab.stage(lines)
        parts = 2
        for seed in range(parts):  # two, so that jobs can share them
            lab.stage(optimum, count=-(-self.exact_traces // parts), seed=seed)
            lab.stage(expected, count=-(-self.allocations // parts), seed=seed)
            lab.stage(special_cases, count=-(-self.special_traces // parts), seed=seed)

    def _own(self, lab: Lab) -> None:
        """The trace from a file: all cells on the part that chooses, the best on the other."""
        from gnomon.methods.serve.tail_lru import PrefixTrace

        for figure in (own_tails, own_gains):
            lab.figure(figure)
        limit = self.requests or None
        tree = isinstance(trace_of(self.trace, self.format, "all", limit), PrefixTrace)
        shared: dict[str, Any] = {
            "trace": self.trace, "format": self.format, "slo_ms": self.own_slo_ms, "alpha_ms": self.alpha_ms,
            "qhat": self.own_qhat, "limit": limit,
        }  # fmt: skip
        cells = {
            (name, share, xi): lab.stage(replay, part="choose", policy=name, share=share, xi_ms=xi, **shared)
            for name in (OF_TREES if tree else OF_TURNS)
            for share in self.shares
            for xi in (self.own_thresholds_ms if name in THRESHOLDED else (0.0,))
        }
        for what, _ in LETTERS.values():
            chosen = lab.stage(
                choose,
                of=[handle for (name, *_), handle in cells.items() if name == METHOD],
                to=[handle for (name, *_), handle in cells.items() if name == LRU],
                what=what,
            )
            lab.stage(verdict, of=chosen, what=what, **shared)

    def _claims(self, lab: Lab) -> None:
        grows = Count(metric=UNBOUNDED, method=LRU, equals=1, at_least=5)
        lab.claim("tail_lru.1", rule=grows, grade="X")
        exact: dict[str, Rule] = {
            "optimum": Tolerance(metric=GAP, method="tail-belady", limit=1e-6, at_least=400),
            "expected": Tolerance(metric=EXPECTED, method="et-lru", limit=1e-9, at_least=200),
            "lru": Count(metric=AS_LRU, method="et-lru", equals=0),
            "t-lru": Count(metric=AS_TAIL, method="et-lru", equals=0),
            "lines": Count(metric=LINES, method=METHOD, equals=2),
        }
        for part, rule in exact.items():
            lab.claim("tail_lru.2", part=part, rule=rule, grade="X")
        for part, (what, reached) in LETTERS.items():
            lower = {
                "direction": Paired(metric=LOWER[what], method=METHOD, side="above"),
                f"{reached} %": Paired(metric=LOWER[what], method=METHOD, side="above", bound=reached),
            }
            lab.claim("tail_lru.3", part=part, rule=lower["direction"], grade="S")
            lab.claim("tail_lru.3", part=f"{part}-number", rule=lower[f"{reached} %"], grade="S")
        replayed: Rule = FullScale("no trace was given: -o trace=FILE replays one")
        if self.trace:
            replayed = AllOf(
                {
                    what: Paired(metric=OVER[what], method=CHOSEN, to=LRU, over="item", equal=("calls",))
                    for what, _ in LETTERS.values()
                }
            )
        lab.claim("tail_lru.3", part="replay", rule=replayed, grade="R")
        store = Paired(metric=MEASURED, method=METHOD, to=LRU, equal=("tokens", "calls"))
        lab.claim("tail_lru.3", part="store", rule=store, grade="R")
