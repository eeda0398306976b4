"""From records to the numbers a rule compares: pick them, refuse ambiguity, pair them, check the budgets.

An *arm* is one side of a comparison: the records of one metric, one method and certain tags. A *unit* is
what is independent: a seed (its items averaged by weight) or an item (its seeds averaged by weight).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.core import stats
from gnomon.core.errors import GnomonError, UsageError

from .records import BUDGET_FIELDS, FIELDS

if TYPE_CHECKING:
    import pandas as pd

Over = Literal["seed", "item"]
Scalar = str | int | float | bool
Unit = str | int
BOOTSTRAP_SEED = 20_251_130
"""Constant, so that `gnomon report --check` finds the same intervals again."""


class CannotJudge(GnomonError):
    """The records don't allow a verdict; the message becomes the note of an undecided judgement."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison; `method` None takes the only method there is."""

    metric: str
    method: str | None = None
    where: Mapping[str, Scalar] = field(default_factory=dict)

    def __str__(self) -> str:
        tags = ", ".join(f"{tag}={value}" for tag, value in self.where.items())
        return f"{self.metric}{f' of {self.method}' if self.method else ''}{f' ({tags})' if tags else ''}"

    def select(self, frame: pd.DataFrame) -> pd.DataFrame:
        """This arm's records, of all methods if it names none.

        Raises:
            CannotJudge: if there are none.
        """
        if frame.empty:
            raise CannotJudge(f"no record of {self}")
        chosen = frame[frame["metric"] == self.metric]
        if self.method is not None:
            chosen = chosen[chosen["method"] == self.method]
        for tag, value in self.where.items():
            chosen = chosen[chosen[tag] == value] if tag in chosen else chosen.iloc[:0]
        if chosen.empty:
            raise CannotJudge(f"no record of {self}")
        return chosen

    def rows(self, frame: pd.DataFrame, pool: Sequence[str] = ()) -> pd.DataFrame:
        """This arm's records of one method, finite and at most one per seed and item.

        Args:
            frame: all records of the run.
            pool: tags over which records of one seed and item are averaged.

        Raises:
            CannotJudge: if there are none or one isn't finite.
            UsageError: if a seed and item has several records that no tag of `where` or `pool` tells apart.
        """
        chosen = self.select(frame)
        if bad := int((~np.isfinite(chosen["value"].astype(float))).sum()):
            raise CannotJudge(f"{bad} of {len(chosen)} records of {self} are not finite")
        self._refuse_ambiguity(chosen, pool)
        return chosen

    def _refuse_ambiguity(self, rows: pd.DataFrame, pool: Sequence[str]) -> None:
        if rows["method"].nunique() > 1:
            names = ", ".join(sorted(rows["method"].unique()))
            raise UsageError(f"{self} was recorded for several methods ({names}). Give the rule a method.")
        alike = rows[rows.duplicated(["seed", "item"], keep=False)]
        if alike.empty:
            return
        tags = [name for name in rows if name not in FIELDS and not name.startswith("budget.")]
        varying = [tag for tag in tags if alike[tag].nunique(dropna=False) > 1]
        if not varying:
            raise UsageError(
                f"{self} was recorded twice for one seed and item. Give the records a tag or item."
            )
        if unnamed := sorted(set(varying) - set(pool)):
            raise UsageError(
                f"{self} has several records per seed and item, which differ in {', '.join(unnamed)}. "
                "Choose one with where={...}, or average them with pool=(...)."
            )


@dataclass(frozen=True)
class Table:
    """Values (n, k) and weights (n, k) of n units in k arms; weight 0 where a unit isn't in an arm."""

    values: NDArray[np.float64]
    weights: NDArray[np.float64]

    def estimate(self, contrast: Sequence[float], over: Over, null: float = 0.0) -> stats.Estimate:
        """The contrast of the arms' means: t interval over seeds, cluster bootstrap over items."""
        if over == "item":
            return stats.cluster_bootstrap(
                self.values, self.weights, rng=generator(), contrast=contrast, null=null
            )
        if self.paired:
            return stats.paired_t(self.values @ np.asarray(contrast), null=null)
        first, second = (contrast[k] * self.values[self.weights[:, k] > 0, k] for k in range(2))
        return stats.two_sample_t(first, -second, null=null)

    @property
    def paired(self) -> bool:
        """Whether every unit is in every arm."""
        return bool((self.weights > 0).all())

    def means(self, over: Over) -> NDArray[np.float64]:
        """Mean of every arm (k,): seeds count alike, items by their weight."""
        weights = (self.weights > 0).astype(float) if over == "seed" else self.weights
        return np.asarray((self.values * weights).sum(axis=0) / weights.sum(axis=0))

    def differences(self) -> NDArray[np.float64]:
        """First arm, less the second where there is one: (n,)."""
        return self.values[:, 0] - self.values[:, 1] if self.values.shape[1] > 1 else self.values[:, 0]


def generator() -> np.random.Generator:
    """A fresh generator in the same state for every judgement."""
    return np.random.default_rng(BOOTSTRAP_SEED)


def tabulate(
    arms: Sequence[Arm], rows: Sequence[pd.DataFrame], over: Over, *, independent: bool = False
) -> Table:
    """Align the arms by unit.

    Args:
        arms: k arms, for messages.
        rows: their records.
        independent: the arms' units are different ones (token types of two classes); else they must agree.

    Raises:
        CannotJudge: if a unit is missing in an arm, since a dropped unit could be the one that failed.
    """
    means = [_unit_means(arm, part, over) for arm, part in zip(arms, rows, strict=True)]
    if independent:
        units: list[Any] = [(k, unit) for k, arm in enumerate(means) for unit in _ordered(arm)]
        means = [{(k, unit): mean for unit, mean in arm.items()} for k, arm in enumerate(means)]
    else:
        units = _ordered(set().union(*means))
        for arm, mean in zip(arms, means, strict=True):
            if missing := [str(unit) for unit in units if unit not in mean]:
                shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                raise CannotJudge(f"no record of {arm} for {over} {shown}")
    cells = np.array([[mean.get(unit, (0.0, 0.0)) for mean in means] for unit in units])  # (n, k, 2)
    return Table(cells[..., 0], cells[..., 1])


def _unit_means(arm: Arm, rows: pd.DataFrame, over: Over) -> dict[Any, tuple[float, float]]:
    """Weighted mean and summed weight by unit."""
    if over == "item" and rows["item"].isna().any():
        raise UsageError(
            f"{arm} has records without an item, so there is nothing to resample. Judge it over seeds."
        )
    sums: dict[Any, tuple[float, float]] = {}
    for unit, value, weight in zip(rows[over].tolist(), rows["value"], rows["weight"], strict=True):
        total, count = sums.get(unit, (0.0, 0.0))
        sums[unit] = total + value * weight, count + weight
    return {unit: (total / count, count) for unit, (total, count) in sums.items()}


def _ordered(units: Any) -> list[Any]:
    """Numbers before names: an order that doesn't depend on which stage finished first."""
    return sorted(units, key=lambda unit: (isinstance(unit, str), unit))


def unequal_budgets(arms: Sequence[Arm], rows: Sequence[pd.DataFrame], fields: Sequence[str]) -> str:
    """What differs between the arms' budgets, "" if nothing does; compared per seed where seeds agree.

    Of several fields some may be recorded nowhere (trials where nothing was tuned), but not all.
    """
    if fields and not any(_states(part, name) for part in rows for name in fields):
        return f"budgets not recorded: {', '.join(fields)}"
    found = []
    for name in fields:
        costs = [_costs(part, name) for part in rows]
        if len({frozenset(cost) for cost in costs}) > 1:  # different seeds: compare their means
            costs = [{"mean": float(np.mean(list(cost.values())))} for cost in costs]
        for seed in costs[0]:
            here = [cost[seed] for cost in costs]
            unstated = all(math.isnan(cost) for cost in here) and not any(
                _states(part, name) for part in rows
            )
            if not unstated and not all(math.isclose(here[0], other, rel_tol=1e-9) for other in here):
                shown = [
                    f"{arm} {'not recorded' if math.isnan(cost) else f'{cost:g}'}"
                    for arm, cost in zip(arms, here, strict=True)
                ]
                found.append(f"{name} ({', '.join(dict.fromkeys(shown))})")
                break
    return f"budgets differ: {'; '.join(found)}" if found else ""


def _states(rows: pd.DataFrame, name: str) -> bool:
    """Whether any record states this cost."""
    return f"budget.{name}" in rows and bool(rows[f"budget.{name}"].notna().any())


def _costs(rows: pd.DataFrame, name: str) -> dict[Any, float]:
    """Mean cost by seed; NaN where none, or not every record, states it."""
    column = f"budget.{name}"
    if column not in rows:
        return dict.fromkeys(rows["seed"].tolist(), math.nan)
    return {seed: float(part[column].mean(skipna=False)) for seed, part in rows.groupby("seed")}


def check_budget_fields(fields: Sequence[str]) -> None:
    """Refuse a name that no record can carry."""
    for name in fields:
        if name not in BUDGET_FIELDS:
            raise UsageError(f"Unknown budget field {name!r} in equal=. Known: {', '.join(BUDGET_FIELDS)}.")
