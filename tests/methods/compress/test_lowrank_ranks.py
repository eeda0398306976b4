"""Ranks for a budget. Sources of truth: integer arithmetic on many odd shapes, all choices tried, a search by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gnomon.core.errors import UsageError
from gnomon.methods.compress.lowrank import (
    budget_ranks,
    fit_ranks,
    kept_share,
    rank_for,
    sensitivity_ranks,
    uniform_ranks,
)

SHAPES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8).map(
    lambda shapes: {f"layer.{i}": shape for i, shape in enumerate(shapes)}
)


def numbers(ranks: dict[str, int], shapes: dict[str, tuple[int, int]]) -> int:
    return sum(k * sum(shapes[name]) for name, k in ranks.items())


def dense(shapes: dict[str, tuple[int, int]]) -> int:
    return sum(m * n for m, n in shapes.values())


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.floats(0.05, 0.99))
def test_fit_is_the_best_of_all_choices(shapes: dict[str, tuple[int, int]], keep: float) -> None:
    """Every subset of layers that take one more than their floor is tried."""
    assume(sum(m + n for m, n in shapes.values()) <= keep * dense(shapes))
    ranks = fit_ranks(keep, shapes)
    spent, budget = numbers(ranks, shapes), keep * dense(shapes)
    assert spent <= budget + 1e-3
    floors = uniform_ranks(keep, shapes)
    assert all(1 <= ranks[name] <= min(shapes[name]) for name in shapes)
    if numbers(floors, shapes) > budget:  # the least rank of 1 already asks for more than a share
        return
    assert all(floors[name] <= ranks[name] <= floors[name] + 1 for name in shapes)
    best = max(
        total
        for more in itertools.product((0, 1), repeat=len(shapes))
        if (
            total := numbers(
                {name: floors[name] + one for name, one in zip(shapes, more, strict=True)}, shapes
            )
        )
        <= budget + 1e-3
        and all(floors[name] + one <= min(shapes[name]) for name, one in zip(shapes, more, strict=True))
    )
    assert spent == best


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.floats(0.05, 0.99), st.data())
def test_budgets_are_met(shapes: dict[str, tuple[int, int]], keep: float, data: st.DataObject) -> None:
    """Never above the share; below it by less than the dearest direction that could still be added."""
    assume(sum(m + n for m, n in shapes.values()) <= keep * dense(shapes))
    wanted = {name: data.draw(st.floats(0, min(shape))) for name, shape in shapes.items()}
    ranks = budget_ranks(wanted, keep, shapes)
    assert numbers(ranks, shapes) <= keep * dense(shapes) + 1e-3
    assert all(1 <= ranks[name] <= min(shapes[name]) for name in shapes)
    assert kept_share(ranks, shapes) == pytest.approx(numbers(ranks, shapes) / dense(shapes))
    open_ = [sum(shapes[name]) for name in shapes if ranks[name] < min(shapes[name]) and wanted[name] > 1e-3]
    if open_:
        assert keep * dense(shapes) - numbers(ranks, shapes) < max(open_) * len(shapes)


def test_proportions_are_kept() -> None:
    shapes = {"a": (100, 100), "b": (100, 100)}
    assert budget_ranks({"a": 10.0, "b": 30.0}, 0.4, shapes) == {"a": 10, "b": 30}
    assert budget_ranks({"a": 1.0, "b": 3.0}, 0.4, shapes) == {"a": 10, "b": 30}
    assert budget_ranks({"a": 50.0, "b": 0.0}, 0.4, shapes) == {"a": 39, "b": 1}


def test_small_matrices_at_equal_size() -> None:
    """The layers of `tiny:llama-0.5m`: the floor loses up to 3 %, the fit nothing that the smallest unit could give."""
    one = [(96, 96), (32, 96), (32, 96), (96, 96), (320, 96), (320, 96), (96, 320)]
    shapes = {f"{layer}.{i}": shape for layer in range(4) for i, shape in enumerate(one)}
    for keep in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        assert kept_share(uniform_ranks(keep, shapes), shapes) < keep
        assert keep - kept_share(fit_ranks(keep, shapes), shapes) < 64 / dense(shapes)


def test_a_budget_below_rank_one() -> None:
    with pytest.raises(
        UsageError, match=r"keep=0.1 can't be met: rank 1 in each of the 2 layers stores 0.5000"
    ):
        fit_ranks(0.1, {"a": (4, 4), "b": (4, 4)})
    assert uniform_ranks(0.1, {"a": (4, 4)}) == {"a": 1}


def test_shares_of_dense_layers() -> None:
    shapes = {"a": (10, 10), "b": (10, 30)}
    assert kept_share({}, shapes) == 1
    assert kept_share({"a": 2}, shapes) == pytest.approx((40 + 300) / 400)
    with pytest.raises(UsageError, match="needs the shapes"):
        kept_share({"a": 2})
    with pytest.raises(UsageError, match="rank for 'c'"):
        kept_share({"c": 2}, shapes)


def test_sensitivity_by_hand() -> None:
    """Two 40 × 40 layers, κ ∈ {.4, .8}: ranks 8 and 16, shares .4 and .8. In order of loss b.8, b.4, a.8, a.4."""
    shapes = {"a": (40, 40), "b": (40, 40)}
    losses = {("b", 0.8): 1.0, ("b", 0.4): 2.0, ("a", 0.8): 3.0, ("a", 0.4): math.nan}
    for keep, expected in (
        (0.95, {"b": 16}),  # share .9
        (0.89, {"b": 8}),  # .7
        (0.7, {"b": 8}),
        (0.65, {"b": 8, "a": 16}),  # .6
        (0.4, {"b": 8, "a": 8}),
    ):
        assert sensitivity_ranks(keep, shapes, losses, (0.4, 0.8)) == expected
    flipped = {key: -value for key, value in losses.items()}
    assert sensitivity_ranks(0.89, shapes, flipped, (0.4, 0.8)) != {"b": 8}


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.floats(0.45, 0.99), st.randoms(use_true_random=False))
def test_the_search_is_the_first_cut_that_fits(
    shapes: dict[str, tuple[int, int]], keep: float, random: object
) -> None:
    """A plain walk over all cuts finds the same."""
    candidates = (0.4, 0.6, 0.9)
    losses = {(name, share): random.random() for name in shapes for share in candidates}  # type: ignore[attr-defined]
    try:
        found = sensitivity_ranks(keep, shapes, losses, candidates)
    except UsageError:
        assert kept_share(uniform_ranks(0.4, shapes), shapes) > keep
        return
    admitted: dict[str, float] = {}
    walk: dict[str, int] = {}
    for name, share in sorted(losses, key=lambda one: losses[one]):
        if kept_share(walk, shapes) <= keep + 1e-9:
            break
        admitted[name] = min(share, admitted.get(name, 1.0))
        walk = {name: rank_for(share, *shapes[name]) for name, share in admitted.items()}
    # rank 1 of a very small matrix can store more than the dense one, so that shares don't always fall
    if all(rank_for(0.4, *shape) * sum(shape) <= 0.4 * math.prod(shape) for shape in shapes.values()):
        assert found == walk
    assert kept_share(found, shapes) <= keep + 1e-9


def test_below_the_smallest_candidate() -> None:
    shapes = {"a": (40, 40)}
    with pytest.raises(
        UsageError, match=r"candidates, 0.4, keeps 0.400 when every layer takes it. Pass candidates="
    ):
        sensitivity_ranks(0.3, shapes, {}, (0.4, 0.9))


def test_bad_ranks() -> None:
    for wanted in ({"a": math.nan}, {"a": -1.0}, {}):
        with pytest.raises(UsageError, match="finite rank"):
            budget_ranks(wanted, 0.5, {"a": (40, 40)})
    with pytest.raises(UsageError, match="no layer"):
        fit_ranks(0.5, {})
