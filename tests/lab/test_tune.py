"""Truth: the best cell computed by hand on a lab that runs nothing but the function itself."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.lab.tune import Tuned, tune


@dataclass
class Handle:
    call: Any

    @property
    def value(self):
        return self.call()


@dataclass
class FakeLab:
    seeds: tuple[int, ...] = (0, 1, 2)
    declared: list[dict] = field(default_factory=list)

    def stage(self, function, **arguments):
        self.declared.append(arguments)
        return Handle(lambda: function(None, **arguments))

    def compute(self, handles):
        self.computed = len(list(handles))


def train(ctx, *, seed, lr, wd=0.0, optimizer="sgd"):
    """Loss (lr - 3)**2 + wd, best at lr = 3; the seed's part cancels in the mean over seeds 10 and 11."""
    return {"loss": (lr - 3) ** 2 + wd + (seed - 10.5), "accuracy": -((lr - 3) ** 2)}


def diverge(ctx, *, seed, lr):
    if lr >= 10 and seed == 11:
        raise NumericalFailure("loss is nan at step 3")
    return {"loss": {5: math.nan, 7: -math.inf}.get(lr, -lr)}


GRID = {"lr": (1, 2.5, 4), "wd": (0.5, 0.0)}


def test_best_mean_over_every_cell_and_seed():
    lab = FakeLab()
    tuned = tune(lab, train, grid=GRID, seeds=(10, 11), score="loss", optimizer="muon")
    assert tuned == Tuned({"lr": 2.5, "wd": 0.0}, 12, pytest.approx(0.25), at_edge=("wd",))
    assert lab.computed == 12, "cells are run together, so that --jobs helps"
    assert lab.declared == [
        {"seed": seed, "optimizer": "muon", "lr": lr, "wd": wd}
        for lr, wd in itertools.product(*GRID.values())
        for seed in (10, 11)
    ]


def test_higher_scores_and_functions_of_the_value():
    higher = tune(FakeLab(), train, grid={"lr": (1, 4, 9)}, seeds=(10,), score="accuracy", better="higher")
    assert (higher.settings, higher.score) == ({"lr": 4}, -1)
    by_function = tune(FakeLab(), train, grid={"lr": (1, 4, 9)}, seeds=(10,), score=lambda v: -v["accuracy"])
    assert (by_function.settings, by_function.score) == ({"lr": 4}, 1)


@pytest.mark.parametrize(("rates", "first"), [((2, 4), 2), ((4, 2), 4)])
@pytest.mark.parametrize(("score", "better"), [("loss", "lower"), ("accuracy", "higher")])
def test_ties_go_to_the_first_of_the_grid(rates, first, score, better):
    tuned = tune(FakeLab(), train, grid={"lr": rates}, seeds=(10, 11), score=score, better=better)
    assert tuned.settings == {"lr": first}


def test_a_cell_that_diverges_on_one_seed_loses():
    tuned = tune(FakeLab(), diverge, grid={"lr": (1, 2, 5, 7, 10)}, seeds=(10, 11), score="loss")
    assert (tuned.settings, tuned.trials) == ({"lr": 2}, 10)


def test_no_finite_cell_is_refused():
    with pytest.raises(
        NumericalFailure, match=r"none of 2 settings of lr has a finite score on seeds \[11\]"
    ):
        tune(FakeLab(), diverge, grid={"lr": (5, 10)}, seeds=(11,), score="loss")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (2, 10)}, r"\[2\] are verdict seeds \(\[0, 1, 2\]\)"),
        ({"seeds": ()}, "at least one, got"),
        ({"seeds": (10, 10)}, "different seeds"),
        ({"grid": {}}, "no cell"),
        ({"grid": {"lr": ()}}, "no cell"),
        ({"wd": 0.1, "grid": GRID}, "wd can't be both tuned and fixed"),
        ({"grid": {"seed": (1, 2)}}, "seed can't be both"),
        ({"better": "smaller"}, "better must be"),
        ({"score": "los"}, r"'los' is no key of the stage's value \(loss, accuracy\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_misuse_is_refused(changes, message):
    settings = {"grid": {"lr": (1, 2)}, "seeds": (10, 11), "score": "loss"} | changes
    with pytest.raises(UsageError, match=message):
        tune(FakeLab(), train, **settings)
