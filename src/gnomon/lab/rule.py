"""What a rule of a claim is, and what it finds.

Whatever the records don't allow (a stage failed, a method wasn't run in this profile, budgets differ) is
`undecided`, with a note that says why; a rule that doesn't fit its records (an ambiguous selection, no
direction) is a mistake of the study and raises `UsageError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnomon.core.errors import NumericalFailure
from gnomon.core.stats import Verdict

from .arms import CannotJudge

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Judgement:
    """What a rule found.

    Attributes:
        p: two-sided p value that `KofN` corrects; None where the verdict rests on no test.
        measured: False if the verdict is open because something is missing, not because of an interval.
        within: what the rules inside a composed rule found, by name.
    """

    verdict: Verdict
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    n: int | None = None
    note: str = ""
    p: float | None = None
    measured: bool = True
    within: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        text: str = self.verdict
        if self.estimate is not None:
            text += f", {self.estimate:.4g}"
        if self.interval is not None:
            text += f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        return text + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Finding:
    """A judgement inside a composed one; `bound` is what estimate and interval are held against."""

    name: str
    judgement: Judgement
    bound: float | None = None


class Rule(ABC):
    """A rule: subclasses are frozen dataclasses with `measure` and `describe`."""

    def judge(self, frame: pd.DataFrame) -> Judgement:
        """The judgement on a run's records; what can't be judged is undecided with the reason as note."""
        try:
            return self.measure(frame)
        except (CannotJudge, NumericalFailure) as reason:
            return Judgement("undecided", note=str(reason), measured=False)

    @abstractmethod
    def measure(self, frame: pd.DataFrame) -> Judgement:
        """Judge, or raise :class:`gnomon.lab.arms.CannotJudge` with the reason."""

    @abstractmethod
    def describe(self) -> str:
        """The rule in plain English, for the report."""
