"""Shares of blocks. Sources of truth: the card's numbers, counts by hand, a power law of known exponent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.pruning import (
    Allocation,
    alpha_shares,
    atp_grid,
    atp_shares,
    exact_mean,
    hill_alpha,
    outlier_percentage,
    owl_shares,
)


def close(values: torch.Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------- the card's numbers


def test_example_d() -> None:
    close(owl_shares([6, 2, 4], [1, 1, 1], 0.7), [0.62, 0.78, 0.70], 1e-12)
    close(alpha_shares([3, 4, 6], [100, 100, 200], 0.5), [0.333333, 0.428571, 0.619048])
    assert hill_alpha(torch.tensor([1.0, 2, 4, 8])) == pytest.approx(3.885390, abs=1e-6)


# ------------------------------------------------------------------------------------------------------ the mean


statistics = st.lists(st.tuples(st.floats(1, 50), st.integers(1, 1000)), min_size=1, max_size=10)


@given(statistics, st.floats(0.02, 0.98))
@settings(max_examples=150, deadline=None)
def test_the_mean_is_exactly_p(blocks: list[tuple[float, int]], p: float) -> None:
    """Invariant 7, for blocks of any sizes; shares stay shares; the order is that of the statistic."""
    values, sizes = [v for v, _ in blocks], [n for _, n in blocks]
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    for shares, sign in (
        (owl_shares(values, sizes, p), -1),
        (alpha_shares(values, sizes, p), 1),
        (atp_shares(len(sizes), sizes, p, atp_grid(len(sizes), p)[-1]), 0),
    ):
        assert float((shares * weights).sum()) == pytest.approx(p, abs=1e-9)
        assert bool(((shares >= 0) & (shares <= 1)).all())
        if sign:
            order = torch.tensor(values).argsort()
            assert bool((sign * shares[order].diff() >= -1e-9).all())


def test_equal_blocks_get_p_and_a_single_one_too() -> None:
    for shares in (
        owl_shares([2, 2], [3, 5], 0.6),
        alpha_shares([2, 2], [3, 5], 0.6),
        atp_shares(2, [3, 5], 0.6, 0),
    ):
        close(shares, [0.6, 0.6], 1e-12)
    assert atp_grid(1, 0.6) == [0.0]
    close(owl_shares([3.0], [7], 0.6), [0.6], 1e-12)


def test_owl_prunes_every_block_a_little() -> None:
    shares = owl_shares([0, 100], [1, 1], 0.05)
    assert float(shares.min()) == pytest.approx(0.01) and float(shares.mean()) == pytest.approx(0.05)


def test_shares_above_one_are_cut_and_made_good() -> None:
    shares = alpha_shares([1, 2], [1, 1], 0.9)
    close(shares, [0.8, 1.0], 1e-9)
    close(exact_mean(torch.tensor([0.2, 0.4]).double(), [1, 3], 0.5), [0.35, 0.55], 1e-7)


def test_atp_rises_with_depth() -> None:
    close(atp_shares(3, [1, 1, 1], 0.6, 0.1), [0.5, 0.6, 0.7], 1e-12)
    grid = atp_grid(4, 0.7, points=5)
    assert grid[0] == 0 and len(grid) == 5
    close(atp_shares(4, [1] * 4, 0.7, grid[-1]), [0.4, 0.6, 0.8, 1.0], 1e-9)  # the largest step that fits


# -------------------------------------------------------------------------------------------------- the statistics


def test_outliers_are_counted_under_one_mean() -> None:
    """Pooled: mean 2 over both, so 11 alone lies above 10; apart, the second matrix would have none."""
    one, two = torch.tensor([[0.5, 0.5, 0.5, 0.5]]), torch.tensor([[1.0, 1.0, 1.0, 11.0]])
    assert outlier_percentage([one, two]) == 100 / 8
    assert outlier_percentage([two]) == 0.0  # mean 3.5
    assert outlier_percentage([two], outlier=3.0) == 25.0


@pytest.mark.parametrize("tail", ["middle", "xmin_peak"])
def test_hill_finds_the_exponent_of_a_power_law(tail: str) -> None:
    """Density ∝ λ^−α: quantiles (1−u)^(−1/(α−1))."""
    for alpha in (2.0, 3.5):
        u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
        values = (1 - u) ** (-1 / (alpha - 1))
        assert hill_alpha(values, tail=tail) == pytest.approx(alpha, rel=0.03)
        assert hill_alpha(7 * values.flip(0), tail=tail) == pytest.approx(
            alpha, rel=0.03
        )  # of no scale or order


def test_spectra_without_a_tail() -> None:
    for values in (torch.ones(5), torch.zeros(5), torch.ones(1)):
        for tail in ("middle", "xmin_peak"):
            with pytest.raises(NumericalFailure, match="tail"):
                hill_alpha(values, tail=tail)
    with pytest.raises(UsageError, match="Did you mean 'xmin_peak'"):
        hill_alpha(torch.rand(5), tail="xmin_peek")


# ------------------------------------------------------------------------------------------------- the type itself


def test_an_allocation_knows_its_means() -> None:
    shapes = {"a": (2, 10), "b": (4, 5)}
    rows = Allocation(ratios={"a": torch.tensor([0.2, 0.6]), "b": 0.5}, axis="row")
    rows.require(shapes)
    assert rows.of("a", (2, 10)) == pytest.approx(0.4) and rows.mean(shapes) == pytest.approx(0.45)
    groups = Allocation(ratios={"a": torch.tensor([1.0, 0.0, 0.5])}, axis="column", group=4)
    assert groups.units((2, 10)).tolist() == [8, 8, 4]  # the last group is narrower
    assert groups.of("a", (2, 10)) == pytest.approx(0.5)
    assert Allocation(ratios={"a": 0.25}).wanted("a", (2, 10)) == 5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Allocation(ratios={"a": 1.2}), "holds 1.2, but a share"),
        (lambda: Allocation(ratios={"a": torch.tensor([0.5, math.nan])}, axis="row"), "holds nan"),
        (lambda: Allocation(ratios={"a": torch.tensor([0.5, 0.5])}), "takes one number"),
        (lambda: Allocation(ratios={}, axis="column", group=0), "at least one column"),
    ],
)
def test_what_is_no_allocation(build: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()  # type: ignore[operator]


def test_what_does_not_fit() -> None:
    shapes = {"layers.0.up": (2, 4), "layers.0.down": (4, 2)}
    with pytest.raises(UsageError, match=r"no ratio for layers\.0\.down \(1 of 2"):
        Allocation(ratios={"layers.0.up": 0.5}).require(shapes)
    with pytest.raises(UsageError, match=r"names 'layers\.0\.upp'.*Did you mean 'layers\.0\.up'"):
        Allocation(ratios=dict.fromkeys(shapes, 0.5) | {"layers.0.upp": 0.5}).require(shapes)
    with pytest.raises(UsageError, match=r"shape \[4\], but 2 are needed: one for each row"):
        Allocation(ratios=dict.fromkeys(shapes, torch.full((4,), 0.5)), axis="row").require(shapes)


@pytest.mark.parametrize("p", [0.0, 1.0, -0.5, math.nan])
def test_shares_outside(p: float) -> None:
    for make in (
        lambda: owl_shares([1, 2], [1, 1], p),
        lambda: alpha_shares([1, 2], [1, 1], p),
        lambda: atp_shares(2, [1, 1], p, 0.0),
        lambda: atp_grid(2, p),
    ):
        with pytest.raises(UsageError, match="between 0 and 1"):
            make()
    with pytest.raises(UsageError, match="give no shares"):
        owl_shares([1, math.inf], [1, 1], 0.5)
