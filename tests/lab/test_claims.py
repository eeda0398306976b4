"""Rules on records. Truth: hand values, `core.stats` on the same numbers, and both directions of each verdict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from gnomon.core import stats
from gnomon.core.errors import UsageError
from gnomon.lab.arms import Arm, tabulate
from gnomon.lab.claims import (
    AllOf,
    Count,
    Dip,
    Exact,
    FullScale,
    HoldsOnly,
    Judgement,
    KofN,
    NonInferior,
    Paired,
    Ratio,
    Rule,
    ShareOf,
    ShareOfGap,
    Tolerance,
    UpTo,
    Withheld,
)
from gnomon.lab.records import frame, make_record

NOISE = (0.01, -0.02, 0.015, 0.0, -0.01)


def record(method="ours", metric="loss", value=1.0, *, exclusive=False, better="lower", **more):
    known = {"budget": {"tokens": 10, "calls": 1}, **more}
    return make_record(method=method, metric=metric, value=value, better=better, **known) | {
        "exclusive": exclusive
    }


def seeds(method, mean, *, noise=NOISE, **more):
    return [record(method, value=mean + e, seed=seed, **more) for seed, e in enumerate(noise)]


def items(method, values, *, metric="share", weight=1.0, prefix="d", **more):
    return [
        record(method, metric, v, item=f"{prefix}{i}", weight=weight, better="higher", **more)
        for i, v in enumerate(values)
    ]


def judge(rule, *groups):
    return rule.judge(frame([row for group in groups for row in group]))


def at_p(p):
    """A rule that finds what it is told."""
    return Fixed(Judgement("holds", 1.0, (0.5, 1.5), 5, p=p))


@dataclass(frozen=True)
class Fixed(Rule):
    judgement: Judgement

    def measure(self, frame):
        return self.judgement

    def describe(self):
        return "It is told."


HOLDS, FAILS = Fixed(Judgement("holds", n=4)), Fixed(Judgement("fails", n=3))
OPEN = Fixed(Judgement("undecided", interval=(-1, 1)))
MISSING = Fixed(Judgement("undecided", note="no record of it", measured=False))


# ----------------------------------------------------------------------------------------------- paired


@pytest.mark.parametrize(
    ("better", "ours", "verdict"),
    [("lower", 0.5, "holds"), ("lower", 1.5, "fails"), ("higher", 1.5, "holds"), ("higher", 0.5, "fails")],
)
def test_paired_takes_the_better_side_from_the_records(better, ours, verdict):
    rule = Paired(metric="loss", method="ours", to="base")
    theirs = [record("base", value=1 + 2 * e, seed=s, better=better) for s, e in enumerate(NOISE)]
    judged = judge(rule, seeds("ours", ours, better=better), theirs)
    assert judged.verdict == verdict
    by_hand = stats.paired_t([ours - 1 - e for e in NOISE])
    assert (judged.estimate, judged.interval) == (
        pytest.approx(by_hand.value),
        pytest.approx(by_hand.interval),
    )
    assert judged.n == 5


def test_paired_pairs_by_seed_not_by_order():
    apart = [record("base", value=s + 1.0, seed=s) for s in (4, 2, 0, 3, 1)]
    ours = [record("ours", value=s + NOISE[s], seed=s) for s in range(5)]
    judged = judge(Paired(metric="loss", method="ours", to="base"), apart, ours)
    assert judged.verdict == "holds"
    assert np.ptp(judged.interval) < 0.1  # the seeds differ by 1, the differences by .01


def test_seed_is_the_weighted_mean_of_its_items():
    rows = [
        record(value=v, item=i, weight=w, seed=s)
        for s in range(3)
        for i, (v, w) in enumerate([(1.0 + s, 3), (5.0 + s, 1)])
    ]
    assert judge(Paired(metric="loss"), rows).estimate == pytest.approx(3.0)  # (1*3 + 5*1)/4 + mean seed


def test_one_sample_against_a_bound_over_items_uses_weights():
    heavy, light = items("ours", [0.95] * 3 + [0.96] * 3, weight=100), items("ours", [0.1], prefix="odd")
    rule = Paired(metric="share", over="item", side="above", bound=0.9)
    judged = judge(rule, heavy, light)
    assert judged.estimate == pytest.approx((0.95 * 300 + 0.96 * 300 + 0.1) / 601)
    assert judged.verdict == "holds"
    assert (
        judge(Paired(metric="share", over="item", side="below", bound=0.9), heavy, light).verdict == "fails"
    )


def test_another_metric_of_the_same_items():
    real = items("model", [-0.2, -0.1, -0.15, -0.3, -0.12, -0.22], metric="cosine", tags={"pair": 3})
    null = items("model", [-0.02, 0.1, 0.05, -0.1, 0.08, -0.02], metric="null", tags={"pair": 3})
    other = items("model", [9.0] * 6, metric="cosine", tags={"pair": 4})
    rule = Paired(metric="cosine", to_metric="null", over="item", where={"pair": 3}, side="below")
    judged = judge(rule, real, null, other)
    assert judged.verdict == "holds"
    assert judged.estimate == pytest.approx(np.mean([-0.18, -0.2, -0.2, -0.2, -0.2, -0.2]))


def test_independent_items_of_two_tags():
    marks = items("model", [12.0, 11, 13, 12.5, 14, 12], tags={"class": "mark"}, prefix="m")
    words = items("model", [7.0, 8, 6, 7.5, 7, 8, 6.5], tags={"class": "word"}, prefix="w")
    rule = Paired(
        metric="share", where={"class": "mark"}, to_where={"class": "word"}, over="item", independent=True
    )
    judged = judge(rule, marks, words)
    assert (judged.verdict, judged.n) == ("holds", 6)
    paired = Paired(metric="share", where={"class": "mark"}, to_where={"class": "word"}, over="item")
    assert "no record of share (class=mark) for item w0" in judge(paired, marks, words).note


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ([], "no record of loss of ours"),
        (seeds("ours", 1), "no record of loss of base"),
        (seeds("ours", 1) + seeds("base", 2)[1:], "no record of loss of base for seed 0"),
        (seeds("ours", 1)[:2] + seeds("base", 2)[:2], "2 seeds, at least 3 are needed"),
        (
            seeds("ours", 1)[:1] + seeds("base", 2)[:1],
            "1 seeds, at least 3 are needed; one unit has no spread",
        ),
        (seeds("ours", 1, noise=[0] * 3) + seeds("base", 2, noise=[0] * 3), "all 3 units agree"),
    ],
)
def test_what_is_missing_leaves_the_claim_open(rows, note):
    judged = judge(Paired(metric="loss", method="ours", to="base"), rows)
    assert (judged.verdict, judged.measured) == ("undecided", False)
    assert note in judged.note


def test_values_are_shown_even_when_too_few():
    judged = judge(
        Paired(metric="loss", method="ours", to="base"), seeds("ours", 1)[:2], seeds("base", 2)[:2]
    )
    assert judged.estimate == pytest.approx(-1)


def test_missing_tag_and_nan_leave_the_claim_open():
    assert (
        "no record of loss (layer=3)"
        in judge(Paired(metric="loss", where={"layer": 3}), seeds("ours", 1)).note
    )
    table = frame(seeds("ours", 1))
    table.loc[2, "value"] = np.nan
    assert "1 of 5 records of loss are not finite" in Paired(metric="loss").judge(table).note


def test_ambiguous_records_are_a_mistake_of_the_study():
    both = [r for keep in (0.6, 0.8) for r in seeds("ours", 1 + keep, tags={"keep": keep})]
    with pytest.raises(UsageError, match=r"differ in keep. Choose one with where"):
        judge(Paired(metric="loss"), both)
    assert judge(Paired(metric="loss", pool=("keep",)), both).estimate == pytest.approx(1.7 + np.mean(NOISE))
    assert judge(Paired(metric="loss", where={"keep": 0.6}), both).estimate == pytest.approx(
        1.6 + np.mean(NOISE)
    )
    with pytest.raises(UsageError, match=r"several methods \(base, ours\)"):
        judge(Paired(metric="loss"), seeds("ours", 1), seeds("base", 1))
    with pytest.raises(UsageError, match="recorded twice for one seed"):
        judge(Paired(metric="loss"), seeds("ours", 1), seeds("ours", 1))
    with pytest.raises(UsageError, match="without an item"):
        judge(Paired(metric="loss", over="item"), seeds("ours", 1))
    with pytest.raises(UsageError, match="side='above'"):
        judge(Paired(metric="loss"), seeds("ours", 1, better=None))


@pytest.mark.parametrize(
    ("ours", "theirs", "equal", "note"),
    [
        ({"tokens": 100}, {"tokens": 100, "seconds": 9}, ("tokens", "trials"), ""),
        (
            {"tokens": 100},
            {"tokens": 200},
            ("tokens",),
            "budgets differ: tokens (loss of ours 100, loss of base 200)",
        ),
        ({"tokens": 100}, {}, ("tokens",), "loss of base not recorded"),
        ({"trials": 3}, {"trials": 4}, ("tokens", "trials"), "budgets differ: trials"),
        ({"tokens": 100}, {"tokens": 200}, (), ""),
        ({"calls": 1, "seconds": 1}, {"calls": 2, "seconds": 2}, (), ""),
        ({"calls": 1}, {"calls": 1}, ("tokens", "trials"), "budgets not recorded: tokens, trials"),
        ({}, {}, ("tokens",), "budgets not recorded: tokens"),
        ({"calls": 1}, {"calls": 2}, ("calls",), "budgets differ: calls"),
    ],
)
def test_unequal_budgets_leave_the_claim_open(ours, theirs, equal, note):
    rule = Paired(metric="loss", method="ours", to="base", equal=equal)
    judged = judge(rule, seeds("ours", 0.5, budget=ours), seeds("base", 1, noise=[0] * 5, budget=theirs))
    assert judged.verdict == ("undecided" if note else "holds")
    assert note in judged.note
    assert judged.estimate is not None


def test_budget_of_one_seed_counts():
    ours = [record(value=e, seed=s, budget={"tokens": 100 + (s == 3)}) for s, e in enumerate(NOISE)]
    judged = judge(
        Paired(metric="loss", method="ours", to="base"),
        ours,
        seeds("base", 1, noise=[0] * 5, budget={"tokens": 100}),
    )
    assert "tokens (loss of ours 101, loss of base 100)" in judged.note


def test_budget_that_one_record_leaves_out_is_not_recorded():
    ours = [record(value=e, seed=0, item=i, budget={"calls": 1} if i else {}) for i, e in enumerate(NOISE)]
    theirs = [r | {"method": "base", "budget": {"calls": 1}} for r in ours]
    rule = Paired(metric="loss", method="ours", to="base", equal=("calls",))
    assert "loss of ours not recorded, loss of base 1" in judge(rule, ours, theirs).note


def test_budgets_that_both_sides_state_in_part_do_not_count_as_equal():
    ours = [record(value=e, seed=0, item=i, budget={"calls": 1} if i else {}) for i, e in enumerate(NOISE)]
    theirs = [r | {"method": "base", "budget": {"calls": 900} if r["item"] else {}} for r in ours]
    judged = judge(Paired(metric="loss", method="ours", to="base", equal=("calls",)), ours, theirs)
    assert judged.verdict == "undecided" and "budgets differ: calls" in judged.note


def test_independent_seeds_are_judged_by_welch():
    ours, theirs = [1.0, 1.1, 0.9, 1.05], [2.0, 2.4, 2.1]
    rows = [record("ours", value=v, seed=s) for s, v in enumerate(ours)]
    rows += [record("base", value=v, seed=100 + s) for s, v in enumerate(theirs)]
    judged = judge(Paired(metric="loss", method="ours", to="base", independent=True), rows)
    assert judged.verdict == "holds"
    assert judged.interval == pytest.approx(stats.two_sample_t(ours, theirs).interval)


def test_units_stand_in_an_order_of_their_own():
    rows = frame([record(value=v, item=i) for v, i in ((1, "b"), (2, 10), (3, "a"), (4, 9))])
    arm = Arm("loss")
    assert tabulate([arm], [arm.rows(rows)], "item").values.ravel().tolist() == [4, 2, 3, 1]  # 9, 10, a, b


@pytest.mark.parametrize("over", ["seed", "item"])
def test_judging_twice_gives_the_same_to_the_bit_in_any_order_of_records(over):
    rows = [
        record("model", "x", v, seed=i % 5, item=i, better="lower")
        for i, v in enumerate(np.random.default_rng(0).normal(0.3, 1, 20))
    ]
    rule = Paired(metric="x", over=over)
    assert judge(rule, rows) == judge(rule, rows)
    shuffled = judge(rule, [rows[i] for i in np.random.default_rng(1).permutation(20)])
    assert shuffled.interval == pytest.approx(judge(rule, rows).interval, rel=1e-12)


# ------------------------------------------------------------------------------------------ non-inferior


@pytest.mark.parametrize(
    ("ours", "better", "margin", "verdict"),
    [
        (1.02, "lower", 0.1, "holds"),
        (1.3, "lower", 0.1, "fails"),
        (1.1, "lower", 0.1, "undecided"),
        (0.98, "higher", 0.1, "holds"),
        (0.7, "higher", 0.1, "fails"),
        (1.5, "higher", 0.1, "holds"),  # being better is no worsening
        (1.02, "lower", ShareOf(0.1), "holds"),
        (1.3, "lower", ShareOf(0.1), "fails"),
        (0.7, "higher", ShareOf(0.1), "fails"),
    ],
)
def test_non_inferior_in_both_directions(ours, better, margin, verdict):
    rule = NonInferior(metric="loss", method="ours", to="base", margin=margin)
    base = seeds("base", 1, noise=(0.0, 0.01, 0.0, -0.01, 0.0), better=better)
    assert judge(rule, seeds("ours", ours, better=better), base).verdict == verdict


@pytest.mark.parametrize(("better", "sign"), [("lower", 1), ("higher", -1)])
@pytest.mark.parametrize(("lost", "verdict"), [(0.1, "holds"), (0.6, "fails")])
def test_share_of_gap_is_the_linear_contrast_per_seed(better, sign, lost, verdict):
    """muon -> numuon loses `lost` of the gap muon-adamw, in units where the gap is about 1."""
    draw = np.random.default_rng(0)
    muon, adamw = sign * draw.normal(2, 0.05, 5), sign * draw.normal(3, 0.05, 5)
    ours = muon + lost * (adamw - muon) + draw.normal(0, 0.01, 5)
    rows = [
        record(name, value=v, seed=s, better=better)
        for name, values in (("numuon", ours), ("muon", muon), ("adamw", adamw))
        for s, v in enumerate(values)
    ]
    rule = NonInferior(metric="loss", method="numuon", to="muon", margin=ShareOfGap(0.25, "muon", "adamw"))
    judged = judge(rule, rows)
    by_hand = stats.paired_t(sign * (ours - muon - 0.25 * (adamw - muon)))
    assert judged.verdict == verdict
    assert judged.interval == pytest.approx(by_hand.interval)
    assert f"{np.mean(ours - muon) / np.mean(adamw - muon):.0%} of the gap" in judged.note


def test_no_gap_no_share():
    rows = seeds("numuon", 1), seeds("muon", 1.2, noise=NOISE[::-1]), seeds("adamw", 1.1, noise=[0] * 5)
    rule = NonInferior(metric="loss", method="numuon", to="muon", margin=ShareOfGap(0.25, "muon", "adamw"))
    judged = judge(rule, *rows)
    assert (judged.verdict, judged.measured) == ("undecided", False)
    assert "muon isn't better than adamw" in judged.note


def test_budgets_of_all_three_methods_count():
    tokens = {"budget": {"tokens": 5}}
    rows = seeds("a", 1, **tokens), seeds("b", 1, **tokens), seeds("c", 2, budget={"tokens": 6})
    rule = NonInferior(metric="loss", method="a", to="b", margin=ShareOfGap(0.25, "b", "c"))
    assert "tokens (loss of a 5, loss of b 5, loss of c 6)" in judge(rule, *rows).note


# ------------------------------------------------------------------------------------------- ratio, exact


def times(method, values, exclusive=True, better="lower"):
    return [
        record(method, "time", v, item=i, unit="s", exclusive=exclusive, better=better)
        for i, v in enumerate(values)
    ]


BASE = np.linspace(1.0, 1.2, 15)
JITTER = 1 + 0.01 * np.sin(np.arange(15))


@pytest.mark.parametrize(
    ("speedup", "options", "verdict"),
    [
        (2.5, {"number": 2}, "holds"),
        (1.5, {"number": 2}, "fails"),
        (1.5, {"number": 2, "part": "direction"}, "holds"),
        (0.7, {"number": 2, "part": "direction"}, "fails"),
        (1 / 1.05, {"number": 1.1, "at_most": True}, "holds"),
        (1 / 1.2, {"number": 1.1, "at_most": True}, "fails"),
    ],
)
def test_ratio_judges_direction_number_and_cost(speedup, options, verdict):
    rule = Ratio(metric="time", method="ours", to="base", **options)
    judged = judge(rule, times("ours", BASE / speedup * JITTER), times("base", BASE))
    assert judged.verdict == verdict
    assert "on this machine" in judged.note
    rates = judge(
        rule,
        times("ours", speedup / BASE / JITTER, better="higher"),
        times("base", 1 / BASE, better="higher"),
    )
    assert rates.estimate == pytest.approx(judged.estimate)  # a rate says the same as a time


def cells(speedups, seed):
    """Times of two methods in the cells of a grid, on one seed."""
    return [
        row | {"seed": seed, "tags": {"threads": cell}}
        for cell, speedup in enumerate(speedups, 1)
        for row in (*times("ours", BASE / speedup * JITTER), *times("base", BASE))
    ]


@pytest.mark.parametrize(
    ("chosen", "judged", "verdict", "best"),
    [
        ([1.1, 1.5], [1.1, 1.5], "holds", "threads=2"),
        ([1.5, 1.1], [1.1, 1.5], "fails", "threads=1"),  # a lucky cell must hold on other records
        ([1.1, 1.2], [1.9, 1.2], "fails", "threads=2"),  # and a cell may not be chosen on those that judge it
    ],
)
def test_the_best_cell_is_chosen_on_other_seeds_than_those_that_judge_it(chosen, judged, verdict, best):
    ratio = Ratio(metric="time", method="ours", to="base", number=1.3)
    rule = UpTo(ratio, [{"threads": 1}, {"threads": 2}])
    found = judge(rule, cells(chosen, 0), cells(judged, 1))
    assert found.verdict == verdict
    assert f"best cell {best}" in found.note
    assert all(f"{value:.2g}" in found.note for value in chosen)  # the whole grid is shown


def test_up_to_without_a_cell_or_a_second_seed_is_refused_or_open():
    ratio = Ratio(metric="time", method="ours", to="base", number=1.3)
    assert "no cell" in judge(UpTo(ratio, [{"threads": 3}]), cells([2.0], 0)).note
    assert judge(UpTo(ratio, [{"threads": 1}]), cells([2.0], 0)).verdict == "undecided"
    with pytest.raises(UsageError, match="two different seeds"):
        UpTo(ratio, [{"threads": 1}], judged_on=0)


def test_ratio_refuses_shared_machines_and_few_repeats():
    rule = Ratio(metric="time", method="ours", to="base", number=2)
    with pytest.raises(UsageError, match="exclusive=True"):
        judge(rule, times("ours", BASE, exclusive=False), times("base", BASE))
    few = judge(rule, times("ours", BASE[:5]), times("base", 3 * BASE[:5]))
    assert (few.verdict, few.estimate) == ("undecided", pytest.approx(3))


YES = [1.0] * 8 + [0.0] * 2


@pytest.mark.parametrize(
    ("options", "ours", "theirs", "verdict", "p"),
    [
        ({"test": "sign", "to": "base"}, [2.0] * 6, [1.0] * 6, "holds", 2 / 64),
        ({"test": "sign", "to": "base"}, [2.0] * 5, [1.0] * 5, "undecided", 2 / 32),
        ({"test": "sign", "to": "base", "side": "below"}, [2.0] * 6, [1.0] * 6, "fails", 2 / 64),
        ({"test": "sign-flip", "to": "base"}, range(1, 8), [0.0] * 7, "holds", 2 / 128),
        ({"test": "sign-flip", "to": "base", "bound": 9}, range(1, 8), [0.0] * 7, "fails", 2 / 128),
        ({"test": "mcnemar", "to": "base"}, [1.0] * 6, [0.0] * 6, "holds", 2 / 64),
        ({"test": "mcnemar", "to": "base"}, [0.0] * 6, [1.0] * 6, "fails", 2 / 64),
        ({"test": "mcnemar", "to": "base"}, YES, YES[::-1], "undecided", None),
        ({"test": "rank-correlation", "to": "base"}, range(5), range(5), "holds", 2 / 120),
        ({"test": "rank-correlation", "to": "base"}, range(5), [-r for r in range(5)], "fails", 2 / 120),
        ({"test": "binomial", "bound": 0.25}, YES, None, "holds", None),
        ({"test": "binomial", "bound": 0.5}, YES, None, "undecided", 112 / 1024),
    ],
)
def test_exact_tests_by_hand(options, ours, theirs, verdict, p):
    rows = items("ours", ours) + (items("base", theirs) if theirs is not None else [])
    judged = judge(Exact(metric="share", method="ours", over="item", **options), rows)
    assert judged.verdict == verdict
    assert p is None or judged.p == pytest.approx(p)


# ----------------------------------------------------------------------------------- every record, full scale


@pytest.mark.parametrize(
    ("rule", "values", "verdict", "estimate"),
    [
        (Tolerance(metric="loss", limit=0.1), [0.05, -0.1], "holds", -0.1),
        (Tolerance(metric="loss", limit=0.1), [0.05, -0.2, 0.0], "fails", -0.2),
        (Tolerance(metric="loss", limit=0.3, around=10.5), [10.3, 10.7], "holds", None),
        (Tolerance(metric="loss", limit=0.3, around=10.5), [10.3, 0.0], "fails", 0.0),
        (Tolerance(metric="loss", limit=0.0), [0.0], "holds", 0.0),
        (Tolerance(metric="loss", limit=1, at_least=3), [0.0, 0.0], "undecided", 0.0),
        (Tolerance(metric="loss", limit=1, at_least=3), [0.0, 2.0], "fails", 2.0),
        (Tolerance(metric="loss", limit=1), [], "undecided", None),
        (Count(metric="loss", equals=38), [38.0, 38.0], "holds", 38),
        (Count(metric="loss", equals=38), [38.0, 37.0], "fails", 37),
        (Count(metric="loss", minimum=12), [12.0, 15.0], "holds", 12),
        (Count(metric="loss", minimum=12), [11.0], "fails", 11),
        (Count(metric="loss", maximum=16), [6.0, 16.0], "holds", 16),
        (Count(metric="loss", maximum=16), [6.0, 17.0], "fails", 17),
    ],
)
def test_every_record_is_checked(rule, values, verdict, estimate):
    judged = judge(rule, [record(value=v, seed=s) for s, v in enumerate(values)])
    assert judged.verdict == verdict
    assert estimate is None or judged.estimate == pytest.approx(estimate)


def test_nan_breaches_a_tolerance():
    table = frame(seeds("ours", 0))
    table.loc[1, "value"] = np.nan
    judged = Tolerance(metric="loss", limit=1).judge(table)
    assert (judged.verdict, judged.note) == ("fails", "1 of 5 records breach it")


def test_full_scale_is_always_open():
    judged = judge(FullScale("needs seven families"), seeds("ours", 1))
    assert (judged.verdict, judged.note) == ("undecided", "needs seven families")


# ------------------------------------------------------------------------------------------ compositions


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ([HOLDS, HOLDS], "holds"),
        ([HOLDS, OPEN], "undecided"),
        ([HOLDS, OPEN, FAILS], "fails"),
        ([HOLDS, HoldsOnly(FAILS)], "undecided"),
        ([HOLDS, HoldsOnly(HOLDS)], "holds"),
    ],
)
def test_all_of(rules, verdict):
    assert judge(AllOf(rules)).verdict == verdict


def test_all_of_names_its_parts():
    judged = judge(AllOf({"shape": HOLDS, "size": MISSING}))
    assert judged.note == "shape: holds; size: undecided (no record of it)"
    assert judged.n == 4


@pytest.mark.parametrize(
    ("k", "p", "verdict", "estimate"),
    [
        (3, [0.01, 0.02, 0.04], "holds", 3),  # 3 * .01 = .03, 2 * .02 = .04, .04
        (2, [0.001, 0.02, 0.9], "holds", 2),
        (1, [0.03, 0.04, 0.045], "undecided", 0),  # 3 * .03 = .09
    ],
)
def test_k_of_n_corrects_by_holm(k, p, verdict, estimate):
    judged = judge(KofN(k, [at_p(q) for q in p]))
    assert (judged.verdict, judged.estimate) == (verdict, estimate)
    assert judge(KofN(k, [at_p(q) for q in p], holm=False)).verdict == "holds"


@pytest.mark.parametrize(
    ("k", "rules", "options", "verdict"),
    [
        (2, [HOLDS, HOLDS, FAILS], {}, "holds"),
        (2, [HOLDS, FAILS, FAILS], {}, "fails"),
        (2, [HOLDS, OPEN, FAILS], {}, "undecided"),
        (2, [HOLDS, FAILS, FAILS], {"holm": False, "fails": "none holds"}, "undecided"),
        (2, [OPEN, FAILS, FAILS], {"holm": False, "fails": "none holds"}, "fails"),
        (2, [OPEN, OPEN, OPEN], {"holm": False, "fails": "none holds"}, "fails"),
        (2, [MISSING, FAILS, FAILS], {"holm": False, "fails": "none holds"}, "undecided"),
        (2, [MISSING, HOLDS, HOLDS], {"holm": False, "fails": "none holds"}, "holds"),
    ],
)
def test_k_of_n(k, rules, options, verdict):
    judged = judge(KofN(k, rules, **options))
    assert judged.verdict == verdict
    assert ("missing: no record of it" in judged.note) == (MISSING in rules)


def test_nothing_composed_is_refused():
    for make in (lambda: AllOf([]), lambda: KofN(1, [])):
        with pytest.raises(UsageError, match="at least one rule"):
            make()
    with pytest.raises(UsageError, match=r"1 <= k <= 1 .* got k=2"):
        KofN(2, [HOLDS])


# ------------------------------------------------------------------------------------- two rows with own rules


def correction(pair, mean):
    noise = np.random.default_rng(pair).normal(0, 0.02, 10)
    shared = {"metric": "cosine", "weight": 500, "tags": {"pair": pair}}
    null = {**shared, "metric": "null"}
    return items("model", mean + noise, **shared) + items("model", -0.01 + noise[::-1], **null)


def shares(mean):
    return items("model", mean + 0.01 * np.sin(np.arange(10)), metric="active", weight=500)


def tlcm_1(pairs):
    """At least 3 pairs below 0 and below their null, and the share of active tokens above .9."""

    def below(pair, **other):
        return Paired(metric="cosine", over="item", where={"pair": pair}, side="below", **other)

    return AllOf(
        {
            "pairs": KofN(
                3,
                {f"pair {i}": AllOf([below(i), below(i, to_metric="null")]) for i in pairs},
                holm=False,
                fails="none holds",
            ),
            "share": Paired(metric="active", over="item", side="above", bound=0.9),
        }
    )


@pytest.mark.parametrize(
    ("means", "share", "verdict"),
    [
        ([-0.2, -0.1, -0.15, 0.3], 0.97, "holds"),
        ([-0.2, -0.1, 0.1, 0.3], 0.97, "undecided"),  # two pairs qualify
        ([0.2, 0.1, 0.1, 0.3], 0.97, "fails"),  # none does
        ([-0.2, -0.1, -0.15, 0.3], 0.8, "fails"),
        ([-0.2, -0.1, -0.15, 0.3], 0.9, "undecided"),
    ],
)
def test_row_tlcm_1(means, share, verdict):
    judged = judge(tlcm_1(range(4)), *(correction(i, m) for i, m in enumerate(means)), shares(share))
    assert judged.verdict == verdict


def test_row_tlcm_1_names_the_pairs_and_is_open_without_them():
    means = [-0.2, -0.1, -0.15, 0.3]
    rows = [correction(i, m) for i, m in enumerate(means)]
    assert "holds: pair 0, pair 1, pair 2; fails: pair 3" in judge(tlcm_1(range(4)), *rows, shares(0.97)).note
    assert judge(tlcm_1(range(4)), shares(0.97)).verdict == "undecided"


TLCM_4 = AllOf(
    {
        "two modes": Dip(metric="eigenvalue", method="tlcm", otherwise="fails"),
        "one mode in control pairs": Dip(metric="eigenvalue", method="control", rejects=False),
        "more negative": HoldsOnly(
            Paired(
                metric="negative", method="tlcm", to="control", over="item", side="above", independent=True
            )
        ),
    }
)


def spectra(method, two_modes, pairs=10):
    draw = np.random.default_rng(len(method))
    centre = (-1, 0.5) if two_modes else (0, 0)
    return [
        record(
            method, "eigenvalue", centre[k % 2] + 0.15 * draw.normal(), item=f"{method} {pair}", tags={"k": k}
        )
        for pair in range(pairs)
        for k in range(20)
    ]


def negative(method, mean, pairs=10):
    return items(method, mean + 0.02 * np.cos(np.arange(pairs)), metric="negative", prefix=method)


@pytest.mark.parametrize(
    ("tlcm", "control", "share", "verdict"),
    [
        (True, False, 0.65, "holds"),
        (False, False, 0.65, "fails"),  # no split where there should be one
        (True, True, 0.65, "undecided"),  # ordinary layers split as well
        (True, False, 0.45, "undecided"),  # fewer negative directions
        (True, False, 0.55, "undecided"),
    ],
)
def test_row_tlcm_4(tlcm, control, share, verdict):
    rows = (
        spectra("tlcm", tlcm),
        spectra("control", control),
        negative("tlcm", share),
        negative("control", 0.55),
    )
    assert judge(TLCM_4, *rows).verdict == verdict


def test_row_tlcm_4_needs_ten_pairs():
    rows = (
        spectra("tlcm", False, pairs=9),
        spectra("control", False),
        negative("tlcm", 0.6),
        negative("control", 0.5),
    )
    judged = judge(TLCM_4, *rows)
    assert judged.verdict == "undecided"
    assert "9 items with 180 values; at least 10 items are needed" in judged.note


# -------------------------------------------------------------------------------------- describe, refusals


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            Paired(metric="loss", method="a", to="b", where={"keep": 0.6}),
            "loss of a (keep=0.6) minus loss of b (keep=0.6): the 95 % t interval over seeds lies wholly on the "
            "better side of 0.",
        ),
        (
            Paired(metric="share", over="item", side="above", bound=0.9),
            "share: the 95 % bootstrap interval over items lies wholly above 0.9.",
        ),
        (
            NonInferior(metric="loss", method="a", to="b", margin=ShareOfGap(0.25, "b", "c")),
            "loss of a is worse than loss of b by less than 25% of the gap between b and c: 95 % interval over seeds.",
        ),
        (
            Ratio(metric="time", method="a", to="b", number=19.7),
            "time of a is better than time of b by a median ratio above 19.7.",
        ),
        (Tolerance(metric="drift", limit=1e-5), "Every record of drift lies within 1e-05 of 0."),
        (Count(metric="items", equals=26529), "Every record of items equals 26,529."),
        (FullScale("needs 8B models."), "Full scale only: needs 8B models."),
        (KofN(1, [HOLDS] * 6), "At least 1 of 6 (Holm-adjusted): (1) It is told. "),
        (
            TLCM_4,
            "All of: (two modes) The dip test rejects one mode for eigenvalue of tlcm (at least 10 items)",
        ),
        (
            Exact(metric="share", test="sign", side="above"),
            "Exact sign test of share over seeds: more than half of the units lie above 0.",
        ),
    ],
)
def test_describe_is_plain_english(rule, text):
    assert rule.describe().startswith(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Paired(metric="x", over="document"), "over must be 'seed' or 'item'"),
        (lambda: Paired(metric="x", side="left"), "side must be"),
        (lambda: Paired(metric="x", bound=float("nan")), "bound must be finite"),
        (lambda: Paired(metric="x", equal=("token",)), "Unknown budget field 'token'.*tokens"),
        (lambda: Paired(metric="x", independent=True), "needs a second side"),
        (lambda: NonInferior(metric="x", margin=0.1), "needs to="),
        (lambda: NonInferior(metric="x", to="b", margin=-0.1), r">= 0, got -0\.1"),
        (lambda: NonInferior(metric="x", to="b", margin=ShareOf(float("nan"))), "got nan"),
        (lambda: Ratio(metric="x", to="b", number=0), "a number > 0, got 0"),
        (lambda: Ratio(metric="x", to="b", number=1.1, at_most=True, part="direction"), "a number only"),
        (lambda: Ratio(metric="x", to="b", number=2, side="above"), "takes no bound"),
        (lambda: Exact(metric="x", test="signs"), "Unknown test 'signs'"),
        (lambda: Exact(metric="x", test="binomial"), "chance level"),
        (lambda: Exact(metric="x", test="mcnemar"), "needs a second side"),
        (lambda: Count(metric="x"), "one of equals="),
        (lambda: Count(metric="x", equals=1, minimum=1), "one of equals="),
    ],
)
def test_impossible_rules_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# ------------------------------------------------------------------------------------------ what is inside


def test_a_composed_rule_shows_what_each_rule_found_and_against_what():
    frame_rule = Paired(metric="loss", method="ours", side="above", bound=0.4)
    judged = judge(AllOf({"level": frame_rule, "told": FAILS}), seeds("ours", 0.5))
    assert [(f.name, f.judgement.verdict, f.bound) for f in judged.within] == [
        ("level", "holds", 0.4),
        ("told", "fails", None),
    ]
    inner = judged.within[0].judgement
    assert inner.estimate == pytest.approx(0.5 + sum(NOISE) / 5) and inner.interval is not None


@pytest.mark.parametrize("inner", [HOLDS, FAILS, OPEN, MISSING])
def test_a_withheld_rule_never_decides_but_shows_its_numbers(inner):
    judged = judge(Withheld(inner, "random weights"), seeds("ours", 0.5))
    assert judged.verdict == "undecided" and not judged.measured
    assert judged.note.startswith(f"random weights; the rule alone says: {inner.judgement.verdict}")
    assert judged.n == inner.judgement.n
