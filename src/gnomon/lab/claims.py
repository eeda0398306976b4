"""The rules of claims: frozen data that turn the records of a run into verdicts.

A rule is declared with `lab.claim(id, rule=..., grade=...)`, judged on the table of all records and described
in plain English by the report. Import every rule from here. A row of claims with a rule of its own is first
tried with `AllOf`, `KofN` and `HoldsOnly`; failing that, a study subclasses :class:`Rule`:

    @dataclass(frozen=True)
    class Reaches(Rule):
        metric: str

        def measure(self, frame: pd.DataFrame) -> Judgement: ...
        def describe(self) -> str: ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from gnomon.core import stats
from gnomon.core.errors import UsageError
from gnomon.core.stats import Verdict

from .arms import Arm, CannotJudge, Scalar
from .comparisons import Comparison, Exact, NonInferior, Paired, Ratio, ShareOf, ShareOfGap
from .rule import Finding, Judgement, Rule

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AllOf",
    "CannotJudge",
    "Comparison",
    "Count",
    "Dip",
    "Exact",
    "Finding",
    "FullScale",
    "HoldsOnly",
    "Judgement",
    "KofN",
    "NonInferior",
    "Paired",
    "Ratio",
    "Rule",
    "Rules",
    "ShareOf",
    "ShareOfGap",
    "Tolerance",
    "UpTo",
    "Withheld",
]

# ------------------------------------------------------------------------------------- checks of each record


@dataclass(frozen=True, kw_only=True)
class _EachRecord(Rule):
    metric: str
    method: str | None = None
    """None: records of all methods."""
    where: Mapping[str, Scalar] = field(default_factory=dict)
    at_least: int = 1
    """Fewest records for `holds`."""

    def _values(self, frame: pd.DataFrame) -> np.ndarray:
        return cast(np.ndarray, self._arm().select(frame)["value"].to_numpy(dtype=float))

    def _arm(self) -> Arm:
        return Arm(self.metric, self.method, self.where)

    def _verdict(self, values: np.ndarray, right: np.ndarray, shown: float) -> Judgement:
        wrong = int(np.sum(~right))
        if wrong:
            return Judgement(
                "fails", shown, n=values.size, note=f"{wrong} of {values.size} records breach it"
            )
        if values.size < self.at_least:
            note = f"{values.size} records, at least {self.at_least} are needed"
            return Judgement("undecided", shown, n=values.size, note=note, measured=False)
        return Judgement("holds", shown, n=values.size)


@dataclass(frozen=True, kw_only=True)
class Tolerance(_EachRecord):
    """TOL(t): every record within `limit` of `around`; one breach fails, and NaN is one."""

    limit: float
    around: float = 0.0

    def measure(self, frame: pd.DataFrame) -> Judgement:
        values = self._values(frame)
        errors = np.abs(values - self.around)
        worst = int(np.argmax(errors))  # a NaN, if there is one
        return self._verdict(values, errors <= self.limit, float(values[worst]))

    def describe(self) -> str:
        return f"Every record of {self._arm()} lies within {self.limit:g} of {self.around:g}."


@dataclass(frozen=True, kw_only=True)
class Count(_EachRecord):
    """COUNT: every record equals a counted number, is at least `minimum` or at most `maximum`."""

    equals: float | None = None
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if sum(limit is not None for limit in (self.equals, self.minimum, self.maximum)) != 1:
            raise UsageError("Count takes one of equals=, minimum= and maximum=.")

    def measure(self, frame: pd.DataFrame) -> Judgement:
        values = self._values(frame)
        if self.equals is not None:
            right = values == self.equals
            return self._verdict(values, right, float(values[np.argmin(right)]))
        if self.minimum is not None:
            return self._verdict(values, values >= self.minimum, float(values.min()))
        return self._verdict(values, values <= self.maximum, float(values.max()))

    def describe(self) -> str:
        limits = {"equals": self.equals, "is at least": self.minimum, "is at most": self.maximum}
        does, number = next((does, number) for does, number in limits.items() if number is not None)
        return f"Every record of {self._arm()} {does} {number:,g}."


@dataclass(frozen=True, kw_only=True)
class Dip(Rule):
    """Hartigan's dip test of one mode on all values of a metric, pooled over its items.

    The values of one item are treated as independent, which the row that asks for the test accepts.
    """

    metric: str
    method: str | None = None
    where: Mapping[str, Scalar] = field(default_factory=dict)
    rejects: bool = True
    """Whether the claim says that one mode is rejected (p < .05) or that it isn't."""
    otherwise: Verdict = "undecided"
    """The verdict when the test goes the other way."""
    at_least: int = 10
    """Fewest items for any verdict."""

    def measure(self, frame: pd.DataFrame) -> Judgement:
        rows = Arm(self.metric, self.method, self.where).select(frame)
        estimate = stats.dip_test(rows["value"].to_numpy(dtype=float))
        items = int(rows["item"].nunique())
        if estimate.p is None or items < self.at_least:
            raise CannotJudge(
                f"{items} items with {len(rows)} values; at least {self.at_least} items are needed"
            )
        verdict: Verdict = "holds" if stats.rejects(estimate) == self.rejects else self.otherwise
        p = estimate.p if self.rejects else None  # not rejecting is no test that Holm could correct
        note = f"dip test of {len(rows)} values, p = {estimate.p:.3g}"
        return Judgement(verdict, estimate.value, None, items, note, p)

    def describe(self) -> str:
        arm, does = Arm(self.metric, self.method, self.where), "rejects" if self.rejects else "doesn't reject"
        return f"The dip test {does} one mode for {arm} (at least {self.at_least} items); otherwise {self.otherwise}."


@dataclass(frozen=True)
class FullScale(Rule):
    """A claim that this scale can't test: always undecided."""

    reason: str

    def measure(self, frame: pd.DataFrame) -> Judgement:
        return Judgement("undecided", note=self.reason, measured=False)

    def describe(self) -> str:
        return f"Full scale only: {self.reason}"


# -------------------------------------------------------------------------------------------- compositions


Rules = Sequence[Rule] | Mapping[str, Rule]
"""Rules in order, or by the name under which a note speaks of them."""


@dataclass(frozen=True)
class AllOf(Rule):
    """Holds if all hold, fails if one fails, else undecided."""

    rules: Rules

    def __post_init__(self) -> None:
        _named(self.rules)

    def measure(self, frame: pd.DataFrame) -> Judgement:
        judged = {name: rule.judge(frame) for name, rule in _named(self.rules).items()}
        verdict = stats.combine([part.verdict for part in judged.values()])
        return Judgement(
            verdict,
            n=min((part.n for part in judged.values() if part.n is not None), default=None),
            note="; ".join(f"{name}: {part}" for name, part in judged.items()),
            p=_joint_p(verdict, judged.values()),
            measured=all(part.measured for part in judged.values()),
            within=tuple(
                Finding(name, part, getattr(_inner(rule), "bound", None))
                for (name, rule), part in zip(_named(self.rules).items(), judged.values(), strict=True)
            ),
        )

    def describe(self) -> str:
        return "All of: " + _list(self.rules)


@dataclass(frozen=True)
class KofN(Rule):
    """At least `k` of the rules hold, each at its Holm-adjusted p value.

    Fails, by default, once so many fail that k can't be reached. A row that speaks of plain intervals and
    "fails if none qualifies" takes `holm=False, fails="none holds"`: with some but fewer than k it stays open.
    """

    k: int
    rules: Rules
    holm: bool = True
    fails: Literal["out of reach", "none holds"] = "out of reach"

    def __post_init__(self) -> None:
        if not 1 <= self.k <= len(_named(self.rules)):
            raise UsageError(f"KofN needs 1 <= k <= {len(self.rules)} (its rules), got k={self.k}.")
        if self.fails not in ("out of reach", "none holds"):
            raise UsageError(f"KofN.fails is 'out of reach' or 'none holds', got {self.fails!r}.")

    def measure(self, frame: pd.DataFrame) -> Judgement:
        judged = {name: rule.judge(frame) for name, rule in _named(self.rules).items()}
        verdicts = {name: part.verdict for name, part in judged.items()}
        if self.holm:
            # Undecided parts count in the family with p = 1; decided ones without a test (identities) with 0.
            p = [1.0 if part.verdict == "undecided" else part.p or 0.0 for part in judged.values()]
            for name, adjusted in zip(judged, stats.holm(p), strict=True):
                if not adjusted < stats.ALPHA:
                    verdicts[name] = "undecided"
        groups = {v: [name for name, found in verdicts.items() if found == v] for v in _VERDICTS}
        holding, failing = len(groups["holds"]), len(groups["fails"])
        measured = all(part.measured for part in judged.values())
        verdict: Verdict = "undecided"
        if holding >= self.k:
            verdict = "holds"
        elif self.fails == "none holds":
            verdict = "fails" if holding == 0 and measured else "undecided"
        elif failing > len(judged) - self.k:
            verdict = "fails"
        note = "; ".join(f"{v}: {', '.join(names)}" for v, names in groups.items() if names)
        if not measured:
            note += "; missing: " + "; ".join(sorted({p.note for p in judged.values() if not p.measured}))
        return Judgement(verdict, holding, None, len(judged), note, measured=measured)

    def describe(self) -> str:
        how = "Holm-adjusted" if self.holm else "each by its own interval"
        fails = "; fails only if none holds" if self.fails == "none holds" else ""
        return f"At least {self.k} of {len(self.rules)} ({how}{fails}): {_list(self.rules)}"


@dataclass(frozen=True)
class UpTo(Rule):
    """ "Up to": the best cell of a grid, chosen on one seed's records and judged on another's.

    A maximum over noisy cells is biased upwards, which separate records undo. The note prints the grid.
    """

    rule: Comparison
    cells: Sequence[Mapping[str, Scalar]]
    """Tags of each cell; they join the rule's `where`."""
    chosen_on: int = 0
    judged_on: int = 1

    def __post_init__(self) -> None:
        if not self.cells or self.chosen_on == self.judged_on:
            raise UsageError("UpTo needs cells, and two different seeds to choose and to judge on.")

    def measure(self, frame: pd.DataFrame) -> Judgement:
        found = [(cell, self._judge(cell, self.chosen_on, frame)) for cell in self.cells]
        grid = [(judged.estimate, cell) for cell, judged in found if judged.estimate is not None]
        if not grid:
            raise CannotJudge("no cell was measured")
        best = max(grid, key=lambda entry: entry[0])[1]
        judged = self._judge(best, self.judged_on, frame)
        shown = "; ".join(f"{_cell(cell)} {value:.3g}" for value, cell in grid)
        note = f"best cell {_cell(best)}, of {shown}" if len(grid) > 1 else f"one cell, {_cell(best)}"
        return replace(judged, note="; ".join(text for text in (note, judged.note) if text))

    def _judge(self, cell: Mapping[str, Scalar], seed: int, frame: pd.DataFrame) -> Judgement:
        return replace(self.rule, where={**self.rule.where, **cell, "seed": seed}).judge(frame)

    def describe(self) -> str:
        return f"In the best of {len(self.cells)} cells, chosen on separate repeats: {self.rule.describe()}"


def _cell(tags: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{tag}={value}" for tag, value in tags.items())


@dataclass(frozen=True)
class HoldsOnly(Rule):
    """Needed for `holds`, but its failing leaves the claim open: `fails` becomes `undecided`."""

    rule: Rule

    def measure(self, frame: pd.DataFrame) -> Judgement:
        judged = self.rule.judge(frame)
        if judged.verdict != "fails":
            return judged
        note = "; ".join(
            text for text in ("went the other way, which leaves the claim open", judged.note) if text
        )
        return Judgement("undecided", judged.estimate, judged.interval, judged.n, note, judged.p)

    def describe(self) -> str:
        return f"{self.rule.describe()} (Otherwise the claim stays open.)"


@dataclass(frozen=True)
class Withheld(Rule):
    """Shows what a rule finds, but gives no verdict: the set-up can't be evidence (random weights, say)."""

    rule: Rule
    reason: str

    def measure(self, frame: pd.DataFrame) -> Judgement:
        judged = self.rule.judge(frame)
        note = f"{self.reason}; the rule alone says: {judged.verdict}"
        if judged.note and not judged.within:
            note += f" ({judged.note})"
        return replace(judged, verdict="undecided", note=note, p=None, measured=False)

    def describe(self) -> str:
        return f"{self.rule.describe()} No verdict here: {self.reason}."


_VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "undecided")


def _inner(rule: Rule) -> Rule:
    """The rule whose numbers a wrapper shows."""
    return _inner(rule.rule) if isinstance(rule, HoldsOnly | Withheld) else rule


def _named(rules: Rules) -> dict[str, Rule]:
    if not rules:
        raise UsageError("A composed rule needs at least one rule; none would hold for no reason.")
    if isinstance(rules, Mapping):
        return dict(rules)
    return {str(number): rule for number, rule in enumerate(rules, 1)}


def _list(rules: Rules, shown: int = 4) -> str:
    named = list(_named(rules).items())
    text = " ".join(f"({name}) {rule.describe()}" for name, rule in named[:shown])
    rest = [name for name, _ in named[shown:]]
    return text + (f" … and likewise ({'), ('.join(rest)})." if rest else "")


def _joint_p(verdict: Verdict, parts: Iterable[Judgement]) -> float | None:
    """p value of the joint verdict: the largest if all hold (intersection-union), Bonferroni's if one fails."""
    parts = list(parts)
    if verdict == "holds":
        return max((part.p for part in parts if part.p is not None), default=None)
    if verdict == "fails":
        failing = [part.p or 0.0 for part in parts if part.verdict == "fails"]
        return min(1.0, len(parts) * min(failing))
    return None
