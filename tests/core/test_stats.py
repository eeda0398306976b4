"""Sources of truth: hand values, full enumeration, closed forms, and coverage by simulation.

Coverage is judged as a sampled statistic: the count of covering intervals must lie where a right method
lands in all but one of 10,000 seeds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats as reference

from gnomon.core import stats
from gnomon.core.errors import NumericalFailure, UsageError

ONE_IN_10_000 = 1e-4


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def least(n: int, coverage: float) -> int:
    """Fewest covering intervals out of n that a method of this coverage shows."""
    return int(reference.binom.ppf(ONE_IN_10_000, n, coverage))


# ---------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("interval", "side", "bound", "verdict"),
    [
        ((0.1, 0.3), "above", 0.0, "holds"),
        ((0.1, 0.3), "below", 0.0, "fails"),
        ((-0.3, -0.1), "below", 0.0, "holds"),
        ((-0.3, -0.1), "above", 0.0, "fails"),
        ((-0.1, 0.1), "above", 0.0, "undecided"),
        ((0.0, 0.1), "above", 0.0, "undecided"),  # touching isn't "wholly on one side"
        ((-0.2, 0.04), "below", 0.05, "holds"),  # non-inferiority: worsening below the margin
        ((0.06, 0.2), "below", 0.05, "fails"),
        ((0.5, 0.5), "above", 0.0, "holds"),
        (None, "above", 0.0, "undecided"),
    ],
)
def test_decide(interval, side, bound, verdict):
    assert stats.decide(interval, side=side, bound=bound) == verdict


def test_decide_refuses_what_is_no_interval():
    with pytest.raises(NumericalFailure, match="must be finite"):
        stats.decide((0.0, math.inf), side="above")
    with pytest.raises(NumericalFailure, match="must be finite"):
        stats.decide((math.nan, 1.0), side="above")
    with pytest.raises(UsageError, match=r"from low to high, got \[1, 0\]"):
        stats.decide((1, 0), side="above")


@pytest.mark.parametrize(
    ("value", "p", "side", "verdict"),
    [
        (0.4, 0.049, "above", "holds"),
        (0.4, 0.05, "above", "undecided"),
        (-0.4, 0.01, "above", "fails"),
        (-0.4, 0.01, "below", "holds"),
        (None, 0.01, "below", "undecided"),
        (0.4, None, "above", "undecided"),
    ],
)
def test_decide_by_p(value, p, side, verdict):
    assert stats.decide_by_p(stats.Estimate(value, None, 9, p), side=side) == verdict


@pytest.mark.parametrize(
    ("verdicts", "row"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "undecided"], "undecided"),
        (["undecided", "fails", "holds"], "fails"),
        ([], "undecided"),
    ],
)
def test_combine(verdicts, row):
    assert stats.combine(verdicts) == row


@pytest.mark.parametrize(
    ("graded", "grade"),
    [
        ([("X", "holds"), ("T", "fails"), ("R", "holds")], "T"),
        ([("X", "holds"), ("S", "undecided")], "X"),
        ([("R", "undecided")], None),
        ([], None),
    ],
)
def test_weakest_grade_of_decided_parts(graded, grade):
    assert stats.weakest_grade(graded) == grade


def test_holm_by_hand():
    # Sorted .01, .03, .04 times 3, 2, 1 = .03, .06, .04, made monotone: .03, .06, .06.
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([]) == []


# ------------------------------------------------------------------------------------------- over seeds


def test_paired_t_by_hand():
    # mean 2, standard error 1/sqrt(3), factor 4.302653 at two degrees of freedom.
    estimate = stats.paired_t([1, 2, 3])
    assert estimate.value == 2 and estimate.n == 3
    assert estimate.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)


def test_interval_and_p_agree_about_the_null():
    x, y = [1.0, 1.2, 0.7], [0.1, 0.3, 0.2, 0.1]
    assert stats.paired_t(x, null=stats.paired_t(x).interval[0]).p == pytest.approx(0.05)
    assert stats.two_sample_t(x, y, null=stats.two_sample_t(x, y).interval[1]).p == pytest.approx(0.05)


def test_t_intervals_cover():
    draw, runs = rng(1), 400
    paired = welch = 0
    for _ in range(runs):
        low, high = stats.paired_t(draw.normal(0.3, 2.0, 3)).interval
        paired += low <= 0.3 <= high
        low, high = stats.two_sample_t(draw.normal(1, 2, 8), draw.normal(0, 1, 8)).interval
        welch += low <= 1 <= high
    lower, upper = reference.binom.interval(1 - ONE_IN_10_000, runs, 0.95)
    assert lower <= paired <= upper
    assert lower <= welch <= upper


@pytest.mark.parametrize(
    ("values", "interval", "note"),
    [
        ([], None, "no observations"),
        ([2.0], None, "one unit has no spread"),
        ([0.1 + 0.2, 0.3, 0.3], None, "all 3 units agree"),  # 0.1 + 0.2 differs from 0.3 in the last bit
        ([0.5] * 6, (0.5, 0.5), "all 6 units agree"),
        ([0.0] * 6, (0.0, 0.0), "all 6 units agree"),
    ],
)
def test_units_without_spread(values, interval, note):
    estimate = stats.paired_t(values)
    assert estimate.interval == interval
    assert note in estimate.note


def test_agreeing_units_have_the_p_of_a_sign_test():
    assert stats.paired_t([0.5] * 6).p == pytest.approx(stats.sign_test([0.5] * 6).p)
    assert stats.paired_t([0.0] * 6).p == 1.0


# ------------------------------------------------------------------------------------ over items, clusters


def test_bootstrap_estimates_the_mean_of_observations_not_of_clusters():
    estimate = stats.cluster_bootstrap([1.0, 2, 3, 4, 5, 6], [10, 1, 1, 1, 1, 1], rng=rng())
    assert estimate.value == pytest.approx(30 / 15)


def test_bootstrap_against_all_resamples():
    """Truth: all 6**6 resamples; the expanded level at n = 6 is Phi(-2.5706 * sqrt(6/5)) = .00243."""
    x, w = np.array([0.1, 0.9, 0.4, 0.35, 0.7, 0.55]), np.array([3.0, 1, 4, 1, 5, 9])
    rows = np.array(list(itertools.product(range(6), repeat=6)))
    means = (w * x)[rows].sum(1) / w[rows].sum(1)
    low, high = stats.cluster_bootstrap(x, w, rng=rng(3), draws=40_000).interval
    for beyond, reached in ((means < low, means <= low), (means > high, means >= high)):
        assert np.mean(beyond) < 0.00243 + 0.001  # sampling error of 40,000 draws, four times over
        assert np.mean(reached) > 0.00243 - 0.001


def test_bootstrap_keeps_pairs_together():
    shared = rng(5).normal(0, 10, 12)
    pairs = np.column_stack([shared + 1 + 0.1 * rng(6).normal(size=12), shared])
    paired = stats.cluster_bootstrap(pairs, rng=rng(), contrast=(1, -1))
    apart = np.full((24, 2), np.nan)  # the same numbers as disjoint clusters; absent values are never read
    apart[:12, 0], apart[12:, 1] = pairs[:, 0], pairs[:, 1]
    unpaired = stats.cluster_bootstrap(apart, (~np.isnan(apart)).astype(float), rng=rng(), contrast=(1, -1))
    assert paired.value == pytest.approx(unpaired.value)
    assert np.ptp(paired.interval) < 0.2
    assert np.ptp(unpaired.interval) > 5
    assert stats.decide(paired.interval, side="above") == "holds"
    assert unpaired.n == 12


def test_bootstrap_is_a_function_of_its_generator():
    x = rng(8).normal(size=20)
    assert stats.cluster_bootstrap(x, rng=rng(2)) == stats.cluster_bootstrap(x, rng=rng(2))
    assert stats.cluster_bootstrap(x, rng=rng(2)) != stats.cluster_bootstrap(x, rng=rng(3))


@pytest.mark.parametrize("sign", [1, -1])
def test_bootstrap_p_inverts_the_interval(sign):
    x = sign * rng(11).normal(0.5, 1, 15)
    low, high = stats.cluster_bootstrap(x, rng=rng()).interval
    for edge in (low, high):
        assert stats.cluster_bootstrap(x, rng=rng(), null=edge).p == pytest.approx(0.05, rel=0.1)


def test_bootstrap_covers_with_few_clusters_where_a_plain_percentile_does_not():
    draw, runs = rng(4), 600
    expanded = plain = 0
    for _ in range(runs):
        w = draw.integers(20, 500, 7).astype(float)
        x = draw.normal(0.2, 1, 7) + draw.normal(size=7) / w**0.5
        low, high = stats.cluster_bootstrap(x, w, rng=draw, draws=1000).interval
        expanded += low <= 0.2 <= high
        rows = draw.integers(0, 7, (1000, 7))
        low, high = np.quantile((w * x)[rows].sum(1) / w[rows].sum(1), [0.025, 0.975])
        plain += low <= 0.2 <= high
    assert plain < least(runs, 0.93) <= expanded


def test_bootstrap_of_unpaired_arms_covers():
    draw, runs = rng(9), 500
    hits = 0
    for _ in range(runs):
        x, w = np.zeros((28, 2)), np.zeros((28, 2))
        x[:8, 0], x[8:, 1] = draw.normal(1, 2, 8), draw.normal(0, 1, 20)
        w[:8, 0] = w[8:, 1] = 1
        low, high = stats.cluster_bootstrap(x, w, rng=draw, contrast=(1, -1), draws=1000).interval
        hits += low <= 1 <= high
    assert hits >= least(runs, 0.94)


@pytest.mark.parametrize(
    ("values", "interval", "note"),
    [
        ([], None, "no observations"),
        ([0.1, 0.2, 0.3], None, "3 clusters; a bootstrap over fewer than 6"),
        ([1.0] * 8, (1.0, 1.0), "all 8 units agree"),
    ],
)
def test_bootstrap_of_too_little(values, interval, note):
    estimate = stats.cluster_bootstrap(values, rng=rng())
    assert estimate.interval == interval
    assert note in estimate.note


def test_bootstrap_refuses_impossible_weights():
    with pytest.raises(UsageError, match="can't be negative, got -1"):
        stats.cluster_bootstrap([1.0, 2.0], [1, -1], rng=rng())
    with pytest.raises(UsageError, match="one weight per value"):
        stats.cluster_bootstrap([1.0, 2.0], [1.0], rng=rng())


def test_weighted_t_is_the_t_interval_for_equal_weights_and_by_hand_for_others():
    x = [1.0, 2.0, 4.0]
    assert stats.weighted_t(x, [3, 3, 3])[:3] == pytest.approx((7 / 3, *stats.paired_t(x).interval))
    # mean (1*1 + 3*2)/4 = 1.75, error sqrt(2 (.75² + 9 * .25²)) / 4.
    assert stats.weighted_t([1.0, 2.0], [1, 3])[3] == pytest.approx((2 * (0.5625 + 0.5625)) ** 0.5 / 4)
    assert stats.weighted_t([5.0], [2]) == (5.0, None, None, None)
    with pytest.raises(UsageError, match="at least one value"):
        stats.weighted_t([], [])


def test_median_ratio_cancels_drift_and_covers():
    base = np.linspace(1, 2, 15)
    assert stats.median_ratio(3 * base, base, rng=rng()).interval == pytest.approx((3, 3))
    draw, runs = rng(12), 600
    hits = 0
    for _ in range(runs):
        drift = draw.lognormal(0, 0.5, 15)
        slow, fast = 2 * drift * draw.lognormal(0, 0.1, 15), drift * draw.lognormal(0, 0.1, 15)
        low, high = stats.median_ratio(slow, fast, rng=draw, draws=1000).interval
        hits += low <= 2 <= high
    assert hits >= least(runs, 0.94)


def test_median_ratio_of_bad_timings():
    assert (
        "14 repeats; a timing needs at least 15" in stats.median_ratio([2.0] * 14, [1.0] * 14, rng=rng()).note
    )
    with pytest.raises(NumericalFailure, match="clock was too coarse"):
        stats.median_ratio([1.0] * 15, [0.0] * 15, rng=rng())


# ------------------------------------------------------------------------------------------- exact tests


def test_clopper_pearson_by_closed_form_and_enumeration():
    n = 9
    assert stats.binomial(n, n).interval == pytest.approx((0.025 ** (1 / n), 1.0))  # P(all n) = p**n
    intervals = [stats.binomial(k, n).interval for k in range(n + 1)]
    for p in (0.05, 0.3, 0.5, 0.77):
        chance = reference.binom.pmf(range(n + 1), n, p)
        assert sum(c for c, (low, high) in zip(chance, intervals, strict=True) if low <= p <= high) >= 0.95


def test_sign_test_needs_six_units():
    five, six = stats.sign_test([1.0] * 5), stats.sign_test([1.0] * 6)
    assert (five.p, six.p) == pytest.approx((2 / 32, 2 / 64))
    assert stats.decide(five.interval, side="above", bound=0.5) == "undecided"
    assert stats.decide(six.interval, side="above", bound=0.5) == "holds"
    assert stats.decide(stats.sign_test([-1.0] * 6).interval, side="above", bound=0.5) == "fails"
    assert "at least 6 units" in five.note


def test_sign_test_leaves_ties_out():
    estimate = stats.sign_test([1, 2, 0, 0, -1])
    assert (estimate.value, estimate.n) == (pytest.approx(2 / 3), 3)
    assert "2 ties left out" in estimate.note
    assert stats.sign_test([0.0, 0.0]).interval is None


def test_mcnemar_by_hand():
    # 8 v 2 discordant: p = 2 (1 + 10 + 45) / 1024.
    x, y = [1] * 8 + [0] * 2 + [1] * 5, [0] * 8 + [1] * 2 + [1] * 5
    estimate = stats.mcnemar(x, y)
    assert (estimate.value, estimate.n, estimate.p) == (0.8, 10, pytest.approx(112 / 1024))
    assert stats.mcnemar([1, 0], [1, 0]).interval is None
    with pytest.raises(UsageError, match=r"must be 0 or 1, got 0\.5"):
        stats.mcnemar([0.5], [1])


def test_sign_flip_against_plain_loops():
    x = [0.3, -0.1, 0.4, 0.25, 0.2, -0.05, 0.1]
    count = sum(
        abs(sum(s * v for s, v in zip(signs, x, strict=True))) >= abs(sum(x)) - 1e-12
        for signs in itertools.product((-1, 1), repeat=7)
    )
    estimate = stats.sign_flip(x, rng=rng())
    assert estimate.p == pytest.approx(count / 128)
    assert estimate.note == "all 128 assignments"
    tiny = stats.sign_flip([v * 1e-12 for v in x], rng=rng())  # the test knows no unit
    assert tiny.p == estimate.p
    assert stats.sign_flip([v + 7 for v in x], rng=rng(), null=7).p == pytest.approx(estimate.p)


def test_sign_flip_at_random_agrees_with_the_normal_limit():
    x = rng(2).normal(0.1, 1, 60)
    estimate = stats.sign_flip(x, rng=rng())
    assert estimate.note == "100,000 random assignments"
    assert estimate.p == pytest.approx(2 * reference.norm.sf(abs(x.sum()) / np.sqrt((x**2).sum())), abs=0.01)


@pytest.mark.parametrize(
    ("x", "count"),
    [([1, 2, 3, 4, 7, 5, 6], 62), ([2, 1, 4, 3, 7, 5, 6], 172)],  # squared rank differences 6 and 10
)
def test_rank_correlation_against_all_orders_and_published_counts(x, count):
    """Truth: plain loops over 7! orders, and the p values .0123 and .0341 of claim debate.3."""
    y = [1, 2, 3, 4, 5, 6, 7]

    def rho(order):
        return 1 - 6 * sum((a - b) ** 2 for a, b in zip(order, y, strict=True)) / (7 * 48)

    assert sum(abs(rho(order)) >= abs(rho(x)) - 1e-9 for order in itertools.permutations(y)) == count
    estimate = stats.rank_correlation(x, y, rng=rng())
    assert estimate.value == pytest.approx(rho(x))
    assert estimate.p == pytest.approx(count / 5040)


def test_rank_correlation_with_ties_and_without_variation():
    x, y = [1, 1, 2, 3, 5], [2, 1, 1, 4, 3]
    assert stats.rank_correlation(x, y, rng=rng()).value == pytest.approx(reference.spearmanr(x, y).statistic)
    assert stats.rank_correlation([1, 1, 1, 1], y[:4], rng=rng()).p is None


def test_dip_tells_one_mode_from_two():
    assert stats.dip_test(rng(1).normal(size=300)).p > 0.05
    assert stats.dip_test(np.concatenate([rng(1).normal(-3, 1, 150), rng(2).normal(3, 1, 150)])).p < 0.001
    assert stats.dip_test([1.0, 2.0]).p is None


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "estimate",
    [
        stats.paired_t,
        stats.sign_test,
        stats.dip_test,
        lambda x: stats.two_sample_t([1.0], x),
        lambda x: stats.cluster_bootstrap(x, rng=rng()),
        lambda x: stats.sign_flip(x, rng=rng()),
        lambda x: stats.rank_correlation(x, x, rng=rng()),
        lambda x: stats.median_ratio(x, x, rng=rng()),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_refused(estimate, bad):
    with pytest.raises(NumericalFailure, match=r"1 of 7 .* are NaN or infinite"):
        estimate([1.0, 2, 3, 4, 5, 6, bad])


def test_misuse_is_named():
    with pytest.raises(UsageError, match="equal sizes, got 2 and 1"):
        stats.mcnemar([1, 0], [1])
    with pytest.raises(UsageError, match=r"one axis, got shape \(1, 2\)"):
        stats.paired_t([[1, 2]])
    with pytest.raises(UsageError, match="5 successes out of 3"):
        stats.binomial(5, 3)
    with pytest.raises(UsageError, match="inside"):
        stats.binomial(1, 3, null=1.0)
