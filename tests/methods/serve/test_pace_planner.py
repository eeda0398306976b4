"""Rows, predictor, Algorithm 1 and policies. Truth: numbers by hand, brute force, a plain loop, scipy's NNLS."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.optimize

from gnomon.core.errors import GnomonError, UsageError
from gnomon.methods.serve.pace import (
    H200_32B,
    POLICIES,
    AdmissionPolicy,
    BranchRow,
    Groups,
    LatencyPredictor,
    PaceConfig,
    build_groups,
    fit_latency,
    make_policy,
    register_policy,
)
from gnomon.methods.serve.pace.admit import EPS, admit_heap, admit_sorted, extras
from gnomon.methods.serve.pace.rows import packed_order

UNIT = LatencyPredictor(0, 1, 0)
MS = 1e-3


def select(rows, policy="pace", predictor=UNIT, now=0.0, priorities=None, **config):
    return make_policy(policy).select(build_groups(rows, priorities), predictor, PaceConfig(**config), now)


def drawn(seed, requests=3, widest=4, longest=2000):
    """Rows with every kind of tie."""
    rng = np.random.default_rng(seed)
    rows = []
    for request in range(requests):
        prefix = int(rng.integers(0, 50))
        for _ in range(int(rng.integers(1, widest + 1))):
            own = int(rng.integers(0, longest)) if seed % 2 else int(rng.integers(1, 4)) * 100
            rows.append(
                BranchRow(
                    len(rows),
                    f"r{request}",
                    prefix + own,
                    float(rng.integers(1, 4)) * 5 * MS,
                    int(rng.integers(0, 3)),
                    prefix,
                )
            )
    order = rng.permutation(len(rows))
    return [rows[k] for k in order]


def naive(rows, predictor, config, now, priorities=None, width=None, budget=None):
    """Algorithm 1 as the card writes it: lists, and every head tried anew for each admission."""
    queues: dict[str, list[BranchRow]] = {}
    for row in rows:
        queues.setdefault(row.group, []).append(row)
    for queue in queues.values():
        queue.sort(key=lambda row: (row.deadline, row.progress, row.index))
    admitted = [queue[0] for queue in queues.values()]
    n, total = len(admitted), sum(row.context_len for row in admitted)
    time = t0 = predictor.predict(n, total)
    if budget is None:
        budget = t0 + config.rho * max(0.0, min(row.deadline for row in rows) - now - t0)
    waiting = {name: queue[1:width] for name, queue in queues.items()}
    k = dict.fromkeys(queues, 0)

    def utility(name, count):
        weight = (priorities or {}).get(name, 1.0)
        return {"linear": count, "concave": math.log1p(count), "priority": count * weight}[config.utility]

    while True:
        best, found = 0.0, None
        for name in list(waiting):
            if not waiting[name]:
                del waiting[name]
                continue
            head = waiting[name][0]
            added = head.context_len - (head.prefix_len if config.context_mode == "dedup" else 0)
            after = predictor.predict(n + 1, total + added)
            if after > budget:
                del waiting[name]
                continue
            score = (utility(name, k[name] + 1) - utility(name, k[name])) / (EPS + max(0.0, after - time))
            if score > best * (1 + 1e-9):  # rounding of T' - T must not break a tie
                best, found = score, (name, head, added, after)
        if found is None:
            return [row.index for row in admitted]
        name, head, added, time = found
        n, total = n + 1, total + added
        k[name] += 1
        waiting[name].pop(0)
        admitted.append(head)


# ------------------------------------------------------------------------------------------ groups and rows


def test_groups_hold_rows_by_urgency():
    rows = [
        BranchRow(7, "b", 5, 2.0, 0),
        BranchRow(3, "a", 5, 1.0, 4),
        BranchRow(1, "b", 5, 1.0, 9),
        BranchRow(0, "b", 5, 1.0, 2),
        BranchRow(2, "b", 5, 1.0, 2),
    ]
    groups = build_groups(rows, {"a": 2.5})
    assert [group.name for group in groups] == ["b", "a"]  # in the order of appearance
    assert [row.index for row in groups[0].rows] == [0, 2, 1, 7]
    assert groups[-1].rows == (rows[1],) and groups[1].weight == 2.5 and groups[0].weight == 1
    assert len(groups) == 2 and groups.rows == 5 and groups.widths.tolist() == [4, 1]
    assert [group.name for group in groups[::-1]] == ["a", "b"]


def test_nothing_ready_is_an_empty_plan():
    for policy in ("off", "eager", "pace", "cap:2", "hold:1"):
        plan = select([], policy)
        assert plan.admitted == plan.deferred == () and plan.predicted == 0 and plan.externality == 0


@pytest.mark.parametrize("large", [False, True])
def test_packed_order_is_lexsort(large):
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, high, 500) for high in (4, 2**40 if large else 9, 2**30 if large else 5)]
    np.testing.assert_array_equal(packed_order(*keys), np.lexsort(keys[::-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_len": -1}, "context_len must be >= 0, got -1"),
        ({"prefix_len": 11}, "shares a prefix of 11 tokens, more than its context of 10"),
        ({"index": 0}, "Row 0 is there twice"),
        ({"index": -4}, "index must be >= 0"),
        ({"deadline": math.nan}, "NaN deadline"),
        ({"progress": -2}, "progress must be >= 0"),
    ],
)
def test_rows_that_make_no_sense_are_refused(change, message):
    fields = {"index": 1, "group": "r", "context_len": 10, "deadline": 1.0, "progress": 0, "prefix_len": 0}
    with pytest.raises(UsageError, match=message):
        build_groups([BranchRow(0, "r", 10, 1.0, 0), BranchRow(**(fields | change))])


def test_groups_without_rows_and_bad_priorities_are_refused():
    two = np.array([0, 2])
    with pytest.raises(UsageError, match="Group 1 has no ready row"):
        Groups.from_arrays(two, two, two.astype(float), two)
    with pytest.raises(UsageError, match="finite numbers >= 0"):
        build_groups([BranchRow(0, "r", 1, 1.0, 0)], {"r": -1})


# ---------------------------------------------------------------------------------------------- predictor


def test_least_squares_recovers_exact_coefficients():
    rng = np.random.default_rng(0)
    predictor = LatencyPredictor(window=500)
    n, per_row = rng.integers(1, 513, 500), rng.integers(128, 8193, 500)
    a, b, c = H200_32B
    for rows, context in zip(n.tolist(), (n * per_row).tolist(), strict=True):
        predictor.record(rows, context, a + b * rows + c * context, now=0.0)
    assert predictor.refit()
    np.testing.assert_allclose((predictor.a, predictor.b, predictor.c), H200_32B, rtol=1e-10)
    assert predictor.mape() < 1e-12


@pytest.mark.parametrize("seed", range(9))
def test_non_negative_fit_is_scipys(seed):
    rng = np.random.default_rng(seed)
    n = rng.integers(1, 40, 60).astype(float)
    total = n * rng.uniform(50, 60, 60)  # nearly collinear
    y = np.abs(rng.normal(size=3)) @ np.stack([np.ones(60), n, total / 50]) + rng.normal(size=60) * 3
    if seed % 3 == 0:
        y = 50 - n  # falls with n: plain least squares would say b < 0
    columns = np.stack([np.ones(60), n, total], axis=1)
    scale = np.abs(columns).max(0)
    wanted, error = scipy.optimize.nnls(columns / scale, y)
    found = np.array(fit_latency(n, total, y))
    assert (found >= 0).all()
    assert np.linalg.norm(columns @ found - y) == pytest.approx(error, rel=1e-9)
    np.testing.assert_allclose(found, wanted / scale, rtol=1e-4, atol=1e-9)


def test_collinear_steps_still_give_a_fit():
    n = np.arange(1, 40.0)
    assert fit_latency(n, 100 * n, 1 + 2 * n) == pytest.approx((1, 2, 0)) or fit_latency(
        n, 100 * n, 1 + 2 * n
    ) == pytest.approx((1, 0, 0.02))
    assert fit_latency([4, 4], [8, 8], [3.0, 5.0]) == pytest.approx((4, 0, 0))


def test_uncalibrated_until_enough_steps_then_refitted_by_time():
    predictor = LatencyPredictor(window=50, min_samples=4, refit_every_s=10)
    rows = [(1, 5, 6.0), (2, 9, 11.0), (3, 20, 23.0)]
    for step in rows:
        assert not predictor.record(*step, now=0.0) and not predictor.calibrated
    assert predictor.record(4, 21, 25.0, now=1.0) and predictor.calibrated
    assert (predictor.a, predictor.b, predictor.c) == pytest.approx((0, 1, 1), abs=1e-9)
    assert not predictor.record(5, 5, 100.0, now=10.9) and predictor.refits == 1
    assert predictor.record(5, 5, 100.0, now=11.0) and predictor.refits == 2


def test_useless_latencies_are_ignored_and_the_window_slides():
    predictor = LatencyPredictor(1.0, 1.0, 1.0, window=3, min_samples=1)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        assert not predictor.record(1, 1, seconds, now=0.0)
    assert math.isnan(predictor.mape()) and not predictor.refit()
    for seconds in (1e9, 6.0, 3.0, 1.5):
        predictor.record(1, 1, seconds, now=0.0)
    assert predictor.mape() == pytest.approx((3 / 6 + 0 + 1) / 3)  # T = 3; the first one left the window


def test_predictor_round_trip(tmp_path):
    one = LatencyPredictor(*H200_32B, window=10, min_samples=2)
    one.record(3, 4, 5.0, now=0.0)
    one.save(tmp_path / "p.json")
    two = LatencyPredictor.load(tmp_path / "p.json")
    assert (two.a, two.b, two.c, two.window, two.mape()) == (*H200_32B, 10, one.mape())
    LatencyPredictor().save(tmp_path / "p.json")
    assert not LatencyPredictor.load(tmp_path / "p.json").calibrated
    for text in (
        "{}",
        "no json",
        '{"coefficients": [1, 2, -3], "window": 9, "refit_every_s": 1, "min_samples": 1}',
    ):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(GnomonError, match="no latency predictor"):
            LatencyPredictor.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatencyPredictor(1, -1, 0), "b=-1"),
        (lambda: LatencyPredictor(1, math.nan, 0), "finite"),
        (lambda: LatencyPredictor(1), "all or none"),
        (lambda: LatencyPredictor(window=0), "window=0"),
        (lambda: LatencyPredictor(window=4, min_samples=5), "min_samples=5"),
        (lambda: LatencyPredictor(refit_every_s=-1), "refit_every_s=-1"),
        (lambda: PaceConfig(rho=0), r"rho=0 must lie in \(0, 1\]"),
        (lambda: PaceConfig(rho=math.nan), "rho=nan"),
        (lambda: PaceConfig(rho=1.1), "rho=1.1"),
        (lambda: PaceConfig(tpot_slo_s=0), "tpot_slo_s=0 must be > 0"),
        (lambda: PaceConfig(ttft_slo_s=-1), "ttft_slo_s=-1"),
        (lambda: PaceConfig(utility="linar"), "linear"),
        (lambda: PaceConfig(deadline_model="rows"), "row"),
        (lambda: make_policy("cap", width=0), "width=0"),
        (lambda: make_policy("cap:two"), "cap:2"),
        (lambda: make_policy("hold:0"), "every=0"),
        (lambda: make_policy("eagre"), "Known: cap, eager, hold, off, pace"),
        (lambda: make_policy("off", width=3), "takes no arguments"),
        (lambda: fit_latency([], [], []), "at least one"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# -------------------------------------------------------------------------------------- worked examples

EXAMPLE_A = [
    BranchRow(0, "serial", 1000, 20 * MS, 0),
    *(BranchRow(k, "p", 2000, (18 if k == 1 else 25) * MS, 0) for k in range(1, 5)),
    *(BranchRow(k, "w", 500, 25 * MS, 0) for k in range(5, 8)),
]
A = LatencyPredictor(5 * MS, 0.05 * MS, 1e-6)


@pytest.mark.parametrize(
    ("rho", "budget", "order", "time", "externality"),
    [
        (1.0, 18.0, "wwppp", 15.9, 7.25),
        (0.8, 16.13, "wwppp", 15.9, 7.25),
        (0.3, 11.455, "ww", 9.75, 1.10),
        (0.2, 10.52, "ww", 9.75, 1.10),
    ],
)
def test_example_a(rho, budget, order, time, externality):
    plan = select(EXAMPLE_A, predictor=A, rho=rho)
    names = {row.index: row.group for row in EXAMPLE_A}
    assert plan.t0 == pytest.approx(8.65 * MS) and plan.min_slack == pytest.approx(18 * MS)
    assert plan.budget == pytest.approx(budget * MS)
    assert "".join(names[k] for k in plan.admitted[3:]) == order
    assert plan.admitted[:3] == (0, 1, 5)
    assert plan.predicted == pytest.approx(time * MS) and plan.externality == pytest.approx(externality * MS)


def test_example_b():
    predictor = LatencyPredictor(*H200_32B)
    assert predictor.predict(8, 4800) == pytest.approx(7.374593 * MS, rel=1e-6)
    assert predictor.predict(32, 19200) == pytest.approx(8.525206 * MS, rel=1e-6)
    slo = 25 * MS
    fresh = [BranchRow(k, k // 4, 600, slo, 0) for k in range(32)]
    plan = select(fresh, predictor=predictor, tpot_slo_s=slo)
    assert plan.budget == pytest.approx(21.474919 * MS, rel=1e-6) and len(plan.admitted) == 32
    assert plan.externality == pytest.approx(1.150613 * MS, rel=1e-6)
    stale = [BranchRow(0, 0, 600, slo - 1.0, 0), *fresh[1:]]
    plan = select(stale, predictor=predictor, tpot_slo_s=slo)
    assert plan.min_slack < 0 and plan.budget == plan.t0 and len(plan.admitted) == 8 and 0 in plan.admitted


@pytest.mark.parametrize(
    ("policy", "deadline", "admitted", "externality"),
    [("pace", 4, 4, 2), ("pace", 2, 2, 0), ("pace", 0.5, 2, 0), ("cap:2", 4, 4, 2), ("eager", 0.5, 6, 4)],
)
def test_two_groups_of_three(policy, deadline, admitted, externality):
    rows = [BranchRow(k, k // 3, 7, float(deadline), 0) for k in range(6)]
    plan = select(rows, policy, rho=1.0)
    assert plan.t0 == 2 and len(plan.admitted) == admitted and plan.externality == externality
    if policy == "pace":
        assert plan.budget == max(2, deadline)
    if policy == "cap:2":
        assert plan.deferred == (2, 5)


# ---------------------------------------------------------------------------------------------- invariants


@pytest.mark.parametrize("policy", ["off", "cap:2", "cap:3", "eager", "pace", "hold:3"])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_partitions_the_rows(policy, seed):
    rows = drawn(seed, requests=5)
    plan = select(rows, policy, predictor=A)
    assert sorted(plan.admitted + plan.deferred) == sorted(row.index for row in rows)
    groups = {row.index: row.group for row in rows}
    assert {groups[k] for k in plan.admitted} == {row.group for row in rows}
    assert plan.externality >= 0
    assert plan.predicted <= plan.budget or len(plan.admitted) == 5


@pytest.mark.parametrize("utility", ["linear", "concave", "priority"])
@pytest.mark.parametrize("context_mode", ["raw", "dedup"])
@pytest.mark.parametrize("seed", range(9))
def test_three_forms_of_algorithm_1_agree(utility, context_mode, seed):
    rng = np.random.default_rng(100 + seed)
    rows = drawn(seed, requests=6, widest=9)
    priorities = {f"r{k}": float(rng.choice([0, 1, 1, 2.5])) for k in range(6)}
    predictor = [A, LatencyPredictor(1 * MS, 0.3 * MS, 0), LatencyPredictor(0, 0, 2e-6)][seed % 3]
    config = PaceConfig(utility=utility, context_mode=context_mode, rho=float(rng.uniform(0.2, 1)))
    groups = build_groups(rows, priorities)
    x = extras(groups, utility=utility, context_mode=context_mode)
    t0 = predictor.predict(x.n, x.tokens)
    for budget in (t0, t0 + 1 * MS, t0 + 3 * MS, t0 + 10 * MS, math.inf):
        wanted = naive(rows, predictor, config, 0.0, priorities, budget=budget)[6:]
        for form in (admit_heap, admit_sorted):
            found = groups.row_index[x.place[form(x, predictor, budget)]].tolist()
            assert found == wanted, (form, budget)
    plan = make_policy("pace").select(groups, predictor, config, 0.0)
    assert list(plan.admitted) == naive(rows, predictor, config, 0.0, priorities)


@pytest.mark.parametrize("seed", range(12))
def test_greedy_admits_as_many_rows_as_any_choice(seed):
    """Linear utility, heads sorted by context: brute force over all prefixes of the queues, 12 rows."""
    rows = sorted(drawn(seed, requests=3, widest=4), key=lambda row: row.context_len)
    rows = [BranchRow(k, row.group, row.context_len, 15 * MS, k) for k, row in enumerate(rows)]
    plan = select(rows, predictor=A, rho=0.9)
    queues = [group.rows for group in build_groups(rows)]
    most = 0
    for widths in itertools.product(*(range(1, len(queue) + 1) for queue in queues)):
        run = [row for queue, width in zip(queues, widths, strict=True) for row in queue[:width]]
        if A.predict(len(run), sum(row.context_len for row in run)) <= plan.budget:
            most = max(most, len(run))
    assert len(plan.admitted) == max(most, len(queues))


@pytest.mark.parametrize("seed", range(3))
def test_limits_are_the_baselines(seed):
    rows = drawn(seed, requests=4)
    off, eager = select(rows, "off", A), select(rows, "eager", A)
    late = [BranchRow(r.index, r.group, r.context_len, -1.0, r.progress, r.prefix_len) for r in rows]
    never = [BranchRow(r.index, r.group, r.context_len, math.inf, r.progress, r.prefix_len) for r in rows]
    assert select(late, "pace", A).admitted == select(late, "off", A).admitted
    assert set(select(never, "pace", A).admitted) == set(eager.admitted)
    assert select(rows, "cap:1", A).admitted == off.admitted
    assert set(select(rows, "cap:9", A).admitted) == set(eager.admitted)
    assert set(select(late, "eager", A).admitted) == set(eager.admitted)
    unbudgeted = make_policy("pace", budgeted=False).select(build_groups(rows), A, PaceConfig(), 0.0)
    assert set(unbudgeted.admitted) == set(eager.admitted) and not eager.deferred
    single = list({row.group: row for row in rows}.values())
    assert select(single, "pace", A).admitted == select(single, "off", A).admitted


@pytest.mark.parametrize("seed", range(4))
def test_width_grows_with_rho_and_with_all_deadlines(seed):
    rows = drawn(seed, requests=4, widest=6)
    widths = [len(select(rows, predictor=A, rho=rho).admitted) for rho in (0.1, 0.3, 0.5, 0.8, 1.0)]
    assert widths == sorted(widths)
    later = [len(select(rows, predictor=A, now=-shift * MS).admitted) for shift in range(0, 20, 2)]
    assert later == sorted(later) and later[-1] > later[0]


def test_a_budgeted_cap_keeps_to_both():
    rows = [BranchRow(k, k // 3, 7, 3.0, 0) for k in range(6)]
    plan = make_policy("cap", width=2, budgeted=True).select(
        build_groups(rows), UNIT, PaceConfig(rho=1.0), 0.0
    )
    assert plan.budget == 3 and len(plan.admitted) == 3


def test_planners_observe_while_uncalibrated():
    rows = drawn(1)
    unknown = LatencyPredictor()
    plan = select(rows, "pace", unknown)
    assert not plan.deferred and math.isnan(plan.t0) and math.isnan(plan.budget)
    budgeted = make_policy("cap", width=1, budgeted=True)
    assert not budgeted.select(build_groups(rows), unknown, PaceConfig(), 0.0).deferred
    assert len(select(rows, "cap:1", unknown).admitted) == 3


def test_held_widths_last_until_the_next_plan():
    policy, config = make_policy("hold:3"), PaceConfig(rho=1.0)

    def width(deadline, names=("a",)):
        rows = [BranchRow(k, names[k // 4], 1, float(deadline), 0) for k in range(4 * len(names))]
        return len(policy.select(build_groups(rows), UNIT, config, 0.0).admitted)

    assert [width(3), width(1), width(99), width(2)] == [3, 3, 3, 2]
    assert width(99, ("a", "b")) == 2 + 1  # b is new, so it gets one row until it is planned for


def test_dedup_counts_a_prefix_once():
    rows = [BranchRow(k, "r", 1000 + k, math.inf, k, 1000) for k in range(4)]
    groups = build_groups(rows)
    assert extras(groups, context_mode="raw").added.tolist() == [1001, 1002, 1003]
    x = extras(groups, context_mode="dedup")
    assert x.added.tolist() == [1, 2, 3] and x.tokens == 1000


def test_a_policy_of_ones_own():
    @register_policy("last-row")
    class LastRow(AdmissionPolicy):
        def select(self, groups, predictor, config, now):
            return make_policy("off").select(groups, predictor, config, now)

    try:
        assert len(select(drawn(0), "last-row").admitted) == 3
        with pytest.raises(UsageError, match="already"):
            register_policy("last-row")(POLICIES["off"])
        with pytest.raises(UsageError, match="colon"):
            register_policy("a:b")(LastRow)
    finally:
        del POLICIES["last-row"]
