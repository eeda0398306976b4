"""Rules that compare: paired difference, non-inferiority, timing ratio, exact tests.

All select records the same way (:class:`Comparison`); the intervals and the verdicts come from
:mod:`gnomon.core.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gnomon.core import stats
from gnomon.core.errors import UsageError
from gnomon.core.stats import Side, Verdict

from .arms import Arm, Over, Scalar, Table, check_budget_fields, generator, tabulate, unequal_budgets
from .rule import Judgement, Rule

if TYPE_CHECKING:
    import pandas as pd

MIN_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Comparison(Rule):
    """One metric of one method against a bound, another method, another metric or other tags.

    The difference is always the first minus the second. Everything that isn't named for the second is as in
    the first.
    """

    metric: str
    method: str | None = None
    """None: the only method that recorded the metric."""
    to: str | None = None
    """The other method."""
    to_metric: str | None = None
    """The other metric, of the same units."""
    to_where: Mapping[str, Scalar] | None = None
    """Tags of the second that differ from `where`."""
    where: Mapping[str, Scalar] = field(default_factory=dict)
    """Tags that choose the records: `{"layer": 3}`; `{"seed": 0}` works too."""
    over: Over = "seed"
    """The independent unit: t interval over seeds, or cluster bootstrap over items by their weights."""
    side: Side | None = None
    """The claimed side of the bound; None: the better side by the records' `better`."""
    bound: float = 0.0
    independent: bool = False
    """The two sides have different units (token types of two classes); else every unit must be on both."""
    pool: tuple[str, ...] = ()
    """Tags over which records of one unit are averaged."""
    equal: tuple[str, ...] = ("tokens", "trials")
    """Budget fields that must be equal, and not all unrecorded, for two methods or two choices of tags."""
    at_least: int | None = None
    """Fewest units for a verdict; None: 3 seeds or 6 items."""

    def __post_init__(self) -> None:
        if self.over not in ("seed", "item"):
            raise UsageError(f"over must be 'seed' or 'item', got {self.over!r}.")
        if self.side not in ("above", "below", None):
            raise UsageError(f"side must be 'above', 'below' or None, got {self.side!r}.")
        if not math.isfinite(self.bound):
            raise UsageError(f"bound must be finite, got {self.bound}.")
        if self.independent and not self.compares:
            raise UsageError("independent=True needs a second side: give to, to_metric or to_where.")
        check_budget_fields(self.equal)

    @property
    def compares(self) -> bool:
        """Whether there is a second side."""
        return any(other is not None for other in (self.to, self.to_metric, self.to_where))

    def arms(self) -> list[Arm]:
        """The sides of the comparison, the first first."""
        first = Arm(self.metric, self.method, self.where)
        if not self.compares:
            return [first]
        tags = {**self.where, **(self.to_where or {})}
        return [first, Arm(self.to_metric or self.metric, self.to or self.method, tags)]

    def describe_difference(self) -> str:
        """What is compared, as the subject of a sentence."""
        return " minus ".join(map(str, self.arms()))

    def describe_side(self) -> str:
        """The claimed side in words."""
        if self.side is None:
            return f"on the better side of {self.bound:g}"
        return f"{self.side} {self.bound:g}"

    def _collect(self, frame: pd.DataFrame) -> _Collected:
        arms = self.arms()
        rows = [arm.rows(frame, self.pool) for arm in arms]
        table = tabulate(arms, rows, self.over, independent=self.independent)
        costs_differ = ""
        if self.to is not None or self.to_where is not None:
            costs_differ = unequal_budgets(arms, rows, self.equal)
        return _Collected(arms, rows, table, self._side(rows), costs_differ)

    def _side(self, rows: Sequence[pd.DataFrame]) -> Side:
        if self.side is not None:
            return self.side
        better = {direction for part in rows for direction in part["better"].fillna("").tolist()}
        if better == {"lower"}:
            return "below"
        if better == {"higher"}:
            return "above"
        raise UsageError(
            f"The records of {self.metric} don't agree on a better direction ({sorted(better)}). "
            "Give the rule side='above' or side='below'."
        )

    def _least(self) -> int:
        return self.at_least or (MIN_SEEDS if self.over == "seed" else stats.MIN_UNITS)

    def _judgement(
        self, verdict: Verdict, estimate: stats.Estimate, blockers: Iterable[str] = (), note: str = ""
    ) -> Judgement:
        """The verdict, unless a blocker or too few units leave it open; the numbers are shown either way."""
        least, blocked = self._least(), [text for text in blockers if text]
        if estimate.n < least:
            blocked.append(f"{estimate.n} {self.over}s, at least {least} are needed")
        return Judgement(
            "undecided" if blocked else verdict,
            estimate.value,
            estimate.interval,
            estimate.n,
            "; ".join(text for text in (*blocked, estimate.note, note) if text),
            estimate.p,
            measured=not blocked and (estimate.interval or estimate.p) is not None,
        )


@dataclass(frozen=True)
class _Collected:
    arms: list[Arm]
    rows: list[pd.DataFrame]
    table: Table
    side: Side
    costs_differ: str


@dataclass(frozen=True, kw_only=True)
class Paired(Comparison):
    """PD: the interval of the difference (or of one mean) wholly on the claimed side of the bound."""

    def measure(self, frame: pd.DataFrame) -> Judgement:
        found = self._collect(frame)
        contrast = (1.0, -1.0) if self.compares else (1.0,)
        estimate = found.table.estimate(contrast, self.over, self.bound)
        verdict = stats.decide(estimate.interval, side=found.side, bound=self.bound)
        return self._judgement(verdict, estimate, [found.costs_differ])

    def describe(self) -> str:
        interval = "t interval over seeds" if self.over == "seed" else "bootstrap interval over items"
        subject = self.describe_difference()
        return f"{subject}: the 95 % {interval} lies wholly {self.describe_side()}."


@dataclass(frozen=True)
class ShareOfGap:
    """A margin of `share` of how much better `to` is than `other`, judged as one linear contrast per unit."""

    share: float
    to: str
    other: str


@dataclass(frozen=True)
class ShareOf:
    """A margin of `share` of the reference's own value, judged as one linear contrast per unit."""

    share: float


@dataclass(frozen=True, kw_only=True)
class NonInferior(Comparison):
    """NI(m): the interval of the worsening against the second side wholly below the margin.

    With a margin that is itself measured, the estimate and its interval are those of worsening minus margin.
    """

    margin: float | ShareOfGap | ShareOf

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.margin if isinstance(self.margin, int | float) else self.margin.share
        if not 0 <= size < math.inf:
            raise UsageError(f"A margin must be a finite number >= 0, got {size}.")
        if not self.compares or self.independent or self.bound:
            raise UsageError("NonInferior needs to=, to_metric= or to_where=, paired units and no bound.")

    def arms(self) -> list[Arm]:
        arms = super().arms()
        if isinstance(self.margin, ShareOfGap):
            arms += [Arm(self.metric, name, self.where) for name in (self.margin.to, self.margin.other)]
        return arms

    def measure(self, frame: pd.DataFrame) -> Judgement:
        found = self._collect(frame)
        worse = 1.0 if found.side == "below" else -1.0  # sign that makes a larger difference a worse one
        means = found.table.means(self.over)
        blockers, note = [found.costs_differ], ""
        contrast: tuple[float, ...] = (worse, -worse)
        bound = 0.0
        if isinstance(self.margin, ShareOfGap):
            share, gap = self.margin.share, worse * (means[3] - means[2])
            contrast = (worse, -worse, worse * share, -worse * share)
            if not gap > 0:
                blockers.append(f"{self.margin.to} isn't better than {self.margin.other}, so there is no gap")
            else:
                note = f"{worse * (means[0] - means[1]) / gap:.0%} of the gap of {gap:.4g} lost"
        elif isinstance(self.margin, ShareOf):
            contrast = (worse, -worse - self.margin.share)
            if not means[1] > 0:
                blockers.append(f"a share of {found.arms[1]} = {means[1]:.4g} is no margin")
            else:
                note = f"{worse * (means[0] - means[1]) / means[1]:.2%} worse"
        else:
            bound = float(self.margin)
        estimate = found.table.estimate(contrast, self.over, bound)
        verdict = stats.decide(estimate.interval, side="below", bound=bound)
        return self._judgement(verdict, estimate, blockers, note)

    def describe(self) -> str:
        margin = self.margin
        if isinstance(margin, ShareOfGap):
            limit = f"{margin.share:.0%} of the gap between {margin.to} and {margin.other}"
        elif isinstance(margin, ShareOf):
            limit = f"{margin.share:.0%} of the latter"
        else:
            limit = f"{margin:g}"
        first, second = self.arms()[:2]
        return f"{first} is worse than {second} by less than {limit}: 95 % interval over {self.over}s."


@dataclass(frozen=True, kw_only=True)
class Ratio(Comparison):
    """RATIO(r): how many times faster `method` is than `to`, by the median over interleaved repeats.

    The records come from one `exclusive` stage, with the repeat's number as item. `part` says whether the
    direction (above 1) or the `number` is judged. `at_most` judges the cost instead: the method's time over
    that of `to`, below the number.
    """

    number: float
    part: Literal["direction", "number"] = "number"
    at_most: bool = False
    over: Over = "item"
    equal: tuple[str, ...] = ()  # a timing compares the same work

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.compares and 0 < self.number < math.inf) or self.over != "item":
            raise UsageError(
                f"Ratio needs two sides, over='item' (the repeats) and a number > 0, got {self.number}."
            )
        if self.independent or self.bound or self.side:
            raise UsageError("Ratio takes no bound, side or independent: number and at_most say it all.")
        if self.part not in ("direction", "number") or (self.at_most and self.part == "direction"):
            raise UsageError("Ratio.part is 'direction' or 'number'; at_most judges a number only.")

    def measure(self, frame: pd.DataFrame) -> Judgement:
        found = self._collect(frame)
        if not all(part["exclusive"].eq(True).all() for part in found.rows):
            raise UsageError(f"{self.metric} is a timing: declare its stage with exclusive=True.")
        method, to = found.table.values.T
        slower, faster = (to, method) if (found.side == "below") != self.at_most else (method, to)
        bound = 1.0 if self.part == "direction" else self.number
        estimate = stats.median_ratio(slower, faster, rng=generator(), null=bound)
        side: Side = "below" if self.at_most else "above"
        verdict = stats.decide(estimate.interval, side=side, bound=bound)
        return self._judgement(verdict, estimate, [found.costs_differ], "on this machine")

    def _least(self) -> int:
        return self.at_least or stats.MIN_REPEATS

    def describe(self) -> str:
        first, second = self.arms()
        if self.at_most:
            return f"The median ratio of {first} over {second} lies below {self.number:g}."
        bound = "1" if self.part == "direction" else f"{self.number:g}"
        return f"{first} is better than {second} by a median ratio above {bound}."


@dataclass(frozen=True, kw_only=True)
class Exact(Comparison):
    """EXACT: a test that enumerates (or, for many units, draws) what chance alone would give.

    =================  ==========================================================================
    test               claim
    =================  ==========================================================================
    sign               more than half of the units lie on the claimed side of the bound
    sign-flip          the mean difference lies on the claimed side of the bound
    binomial           the share of yes outcomes (values 0 or 1) lies on that side of the bound
    mcnemar            yes outcomes are more (above) or less frequent in the first than in the second
    rank-correlation   Spearman's rho of the two lies on that side of 0
    =================  ==========================================================================
    """

    test: Literal["sign", "sign-flip", "binomial", "mcnemar", "rank-correlation"]

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("sign", "sign-flip", "binomial", "mcnemar", "rank-correlation")
        if self.test not in known:
            raise UsageError(f"Unknown test {self.test!r}. Known: {', '.join(known)}.")
        if self.independent:
            raise UsageError("Exact tests pair their units; independent=True is for Paired.")
        if self.test == "binomial" and (self.compares or not 0 < self.bound < 1):
            raise UsageError("A binomial test has one side and a bound (the chance level) inside (0, 1).")
        if self.test in ("mcnemar", "rank-correlation") and (not self.compares or self.bound):
            raise UsageError(f"{self.test} needs a second side (to, to_metric or to_where) and no bound.")

    def measure(self, frame: pd.DataFrame) -> Judgement:
        found = self._collect(frame)
        values, side, bound = found.table.values, found.side, self.bound
        if self.test == "sign-flip":
            estimate = stats.sign_flip(found.table.differences(), rng=generator(), null=bound)
            verdict = stats.decide_by_p(estimate, side=side, bound=bound)
        elif self.test == "rank-correlation":
            estimate = stats.rank_correlation(values[:, 0], values[:, 1], rng=generator())
            verdict = stats.decide_by_p(estimate, side=side)
        else:
            if self.test == "sign":
                estimate, bound = stats.sign_test(found.table.differences(), null=bound), 0.5
            elif self.test == "mcnemar":
                estimate, bound = stats.mcnemar(values[:, 0], values[:, 1]), 0.5
            else:
                estimate = stats.proportion(values[:, 0], null=bound)
            verdict = stats.decide(estimate.interval, side=side, bound=bound)
        p = "" if estimate.p is None else f"p = {estimate.p:.3g}"
        return self._judgement(verdict, estimate, [found.costs_differ], p)

    def _least(self) -> int:
        return self.at_least or 1  # the tests themselves know how few units are too few

    def describe(self) -> str:
        verb = "more than half of the units lie" if self.test == "sign" else "lies"
        subject = f"Exact {self.test} test of {self.describe_difference()} over {self.over}s"
        return f"{subject}: {verb} {self.describe_side()}."
