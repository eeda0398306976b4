"""Tuning that stays fair: one grid, every cell on the same seeds, none of which a verdict is judged on.

    tuned = tune(lab, train, grid={"lr": (1e-3, 3e-3, 1e-2)}, seeds=(100, 101), score="val_loss", optimizer="muon")
    for seed in lab.seeds:
        trained = lab.stage(train, seed=seed, optimizer="muon", **tuned.settings)
        lab.stage(measure, of=trained, trials=tuned.trials)

The tuned stage returns its score and records nothing, or its tuning seeds would be judged too; the stage that
records writes `trials` into the budget, and a comparing rule then refuses methods tuned with unequal effort.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gnomon.core.errors import NumericalFailure, UsageError

if TYPE_CHECKING:
    from .engine import Lab


@dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
        settings: the best cell of the grid, by argument name.
        trials: runs that were spent, cells times seeds; belongs into the budget of every later record.
        score: the best cell's mean over the tuning seeds.
        at_edge: names of numbers whose best value is the grid's smallest or largest: widen these.
    """

    settings: dict[str, Any]
    trials: int
    score: float
    at_edge: tuple[str, ...] = ()


def tune(
    lab: Lab,
    stage: Callable[..., Any],
    *,
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    score: Callable[[Any], float] | str,
    better: Literal["lower", "higher"] = "lower",
    **fixed: Any,
) -> Tuned:
    """Run a stage on every cell of a grid and return the cell of the best mean score.

    Args:
        lab: where the stages are declared; they are forced here, because later stages depend on the result.
        stage: a stage function that takes `seed`, the grid's names and `fixed`.
        grid: values by argument name; cells are their product, in the order written.
        seeds: tuning seeds, none of them in `lab.seeds`.
        score: the number to compare, from the stage's value, or its key there.
        better: which end of the score is better. Among equal scores the first cell of the grid wins.
        fixed: arguments that all cells share.

    A cell that fails numerically or scores NaN or infinity on any seed loses against every cell that doesn't.

    Raises:
        UsageError: for an empty grid, a name given twice, or seeds that verdicts are judged on.
        NumericalFailure: if no cell has a finite score.
    """
    _check(lab.seeds, grid, seeds, better, fixed)
    cells = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    handles = [[lab.stage(stage, seed=seed, **fixed, **cell) for seed in seeds] for cell in cells]
    lab.compute(itertools.chain.from_iterable(handles))
    best, best_score = None, math.inf
    sign = 1 if better == "lower" else -1
    for cell, runs in zip(cells, handles, strict=True):
        mean = sum(_score(run, score) for run in runs) / len(runs)
        if math.isfinite(mean) and sign * mean < best_score:
            best, best_score = cell, sign * mean
    trials = len(cells) * len(seeds)
    if best is None:
        raise NumericalFailure(
            f"Tuning {stage.__name__}: none of {len(cells)} settings of {', '.join(grid)} has a finite score on "
            f"seeds {list(seeds)}. Move the grid to where training is stable."
        )
    edges = tuple(name for name, values in grid.items() if _at_edge(best[name], values))
    return Tuned(best, trials, sign * best_score, edges)


def _at_edge(value: Any, values: Sequence[Any]) -> bool:
    """Whether the best of several numbers is the smallest or largest, so that a better one may lie beyond."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(numbers) == len(values) > 1 and value in (min(numbers), max(numbers))


def _score(handle: Any, score: Callable[[Any], float] | str) -> float:
    """The score of one run; NaN if the stage left the numbers."""
    try:
        value = handle.value
    except NumericalFailure:
        return math.nan
    if callable(score):
        return float(score(value))
    if not isinstance(value, Mapping) or score not in value:
        known = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise UsageError(
            f"score={score!r} is no key of the stage's value ({known}). Return it, or give a function."
        )
    return float(value[score])


def _check(
    verdict_seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    better: str,
    fixed: Mapping[str, Any],
) -> None:
    if better not in ("lower", "higher"):
        raise UsageError(f"better must be 'lower' or 'higher', got {better!r}.")
    if not grid or not all(len(values) for values in grid.values()):
        raise UsageError(f"The tuning grid has no cell: {dict(grid)}. Give every name at least one value.")
    if twice := sorted(set(grid) & {*fixed, "seed"}):
        raise UsageError(f"{', '.join(twice)} can't be both tuned and fixed.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"Tuning needs different seeds, at least one, got {list(seeds)}.")
    if shared := sorted(set(seeds) & set(verdict_seeds)):
        raise UsageError(
            f"Tuning seeds {shared} are verdict seeds ({list(verdict_seeds)}): the comparison would be judged on "
            "what it was tuned on. Choose others, such as 1000 and up."
        )
