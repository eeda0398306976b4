"""The simulator. Truth: time lines by hand, limits of the policies, and the directions of the card's two tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gnomon.core.errors import UsageError
from gnomon.methods.serve.pace import (
    H200_32B,
    DeadlineBook,
    DecodeRequest,
    LatencyPredictor,
    Mix,
    PaceConfig,
    make_policy,
    mixed_workload,
    read_trace,
    row_deadlines,
    simulate_decode,
)

TRUTH = LatencyPredictor(*H200_32B)
ROWS = LatencyPredictor(0, 1, 0)  # a step takes a second a row
EASY = PaceConfig(tpot_slo_s=1e6, ttft_slo_s=1e6)
TWO = [DecodeRequest(10, ((2,), (3, 1), (1,))), DecodeRequest(20, ((4,),))]


def run(
    requests=TWO, policy="eager", truth=ROWS, *, concurrency=2, config=EASY, warm_up=0.0, drain=True, **more
):
    return simulate_decode(
        requests, policy, truth, concurrency=concurrency, config=config, warm_up=warm_up, drain=drain, **more
    )


# --------------------------------------------------------------------------------------------- by hand


def test_a_time_line_by_hand():
    """Steps of 2, 2, 3, 2 s (rows: main and serial twice, three rows, two), then the rest alone: 1, 1 s."""
    log = run().log
    assert log.seconds.tolist() == [2, 2, 3, 2, 1, 1]
    assert log.ready.tolist() == log.rows.tolist() == [2, 2, 3, 2, 1, 1]
    assert log.baseline.tolist() == [2, 2, 2, 2, 1, 1]
    assert log.branched.tolist() == [0, 0, 1, 0, 0, 0] and log.wide.tolist() == [0, 0, 2, 0, 0, 0]
    assert log.end.tolist() == [9, 11] and log.first.tolist() == [2, 2]  # the serial request ends first
    assert log.parallel.tolist() == [False, True]
    assert log.tokens.tolist() == [4, 7] and log.steps.tolist() == [4, 6]
    np.testing.assert_allclose(log.tpot("progress"), [7 / 3, 9 / 5])
    np.testing.assert_allclose(log.tpot("effective"), [7 / 3, 9 / 6])
    assert log.branching.tolist() == [1, 1]
    report = run()
    assert report.throughput == pytest.approx(11 / 11) and report.width == 2
    assert report.externality["seconds"] == pytest.approx(1 / 6)
    assert report.victims == {"count": 1, "mean": pytest.approx(7 / 3), "p95": pytest.approx(7 / 3)}


def test_off_takes_turns():
    log = run(policy="off").log
    assert log.rows.tolist() == [2, 2, 2, 2, 1, 1, 1] and log.ready.tolist() == [2, 2, 3, 3, 2, 1, 1]
    report = run(policy="off")
    assert report.deferral == pytest.approx(1 - 11 / 14) and report.externality["seconds"] == 0
    assert report.width == 1


def test_contexts_by_hand():
    """Two branches share a prefix of 10 + 2 tokens; after the join the context holds all of them."""
    log = run(TWO[:1], truth=LatencyPredictor(1, 0, 0)).log
    assert log.context.tolist() == [10, 11, 12 + 12, 13, 14, 16]
    config = PaceConfig(tpot_slo_s=1e6, context_mode="dedup")
    log = run(TWO[:1], truth=LatencyPredictor(1, 0, 0), config=config).log
    assert log.context.tolist() == [10, 11, 12 + 0, 13, 14, 16]


def test_arrivals_wait_for_a_slot_and_the_clock_for_arrivals():
    ones = [DecodeRequest(1, ((2,),)) for _ in range(3)]
    log = run(ones, concurrency=1, load=[0.0, 0.5, 100.0]).log
    assert log.first.tolist() == [1, 3, 101] and log.end.tolist() == [2, 4, 102]
    assert (log.first - log.arrival).tolist() == [1, 2.5, 1]
    by_trace = [DecodeRequest(1, ((2,),), arrival=at) for at in (0.0, 0.5, 100.0)]
    assert run(by_trace, concurrency=1, load="trace").log.end.tolist() == [2, 4, 102]


def test_measuring_leaves_warm_up_and_drain_out():
    ones = [DecodeRequest(1, ((2,),)) for _ in range(10)]
    report = run(ones, concurrency=1, warm_up=0.3, drain=False)
    assert report.log.measured == (6, 18) and report.requests["all"] == 6 and report.throughput == 1
    assert run(ones, concurrency=1, warm_up=0.3).log.measured == (6, 20)


def test_single_tokens_have_no_tpot():
    report = run([DecodeRequest(5, ((1,),)), DecodeRequest(5, ((3,),))])
    assert report.requests["all"] == 2 and report.attainment["progress"]["all"] == 1
    assert np.isnan(report.log.tpot("progress")).tolist() == [True, False]
    assert math.isnan(report.attainment["progress"]["parallel"])


def test_progress_and_effective_tokens_judge_differently():
    """Eight branches of a request: a step of 9 s gives it 8 tokens, so it passes by tokens and fails by steps."""
    requests = [DecodeRequest(1, (tuple([5] * 8),)), DecodeRequest(1, ((5,),))]
    report = run(requests, config=PaceConfig(tpot_slo_s=5.0))
    assert report.attainment["effective"] == {"all": 0.5, "serial": 0, "parallel": 1}
    assert report.attainment["progress"] == {"all": 0, "serial": 0, "parallel": 0}
    assert report.goodput["effective"] == pytest.approx(40 / 45) and report.goodput["progress"] == 0


# --------------------------------------------------------------------------------------------- deadlines


def test_row_deadlines_keep_order_and_a_floor():
    last = np.array([10.0, 9.0, 8.5, 5.0, -1e6, 0.0])
    found = row_deadlines(last, 10.0, 1.0)
    assert found[:2].tolist() == [11, 10] and found[2] == 9.5
    assert found[3] == pytest.approx(9 - math.log(4) / (1 + math.log(4)))  # F = 9, d = 6
    assert (np.argsort(found) == np.argsort(last)).all() and found.min() > 8


def book(model):
    return DeadlineBook(PaceConfig(tpot_slo_s=1.0, ttft_slo_s=5.0, deadline_model=model))


def test_a_book_of_requests():
    for model, wanted in (("request", 8.5 + 1), ("accumulated", 4.0 + 2)):
        b = book(model)
        b.arrive("r", 3.0)
        b.resident(["x", "y"], 3.5)
        assert b.deadline("r", "x", 3.5) == 8.0
        b.advanced({"x": "r"}, 3.5, 4.0)
        b.advanced({"y": "r", "x": "r"}, 8.0, 8.5)  # either row's progress is the request's
        assert b.deadline("r", "x", 9.0) == b.deadline("r", "y", 9.0) == wanted
        b.finish("r")
        with pytest.raises(UsageError, match="never arrived"):
            b.deadline("r", "x", 9.0)


def test_a_book_of_rows_stamps_those_that_were_away():
    b = book("row")
    b.arrive("r", 0.0)
    b.resident(["x", "y"], 1.0)
    b.advanced({"x": "r"}, 1.0, 1.5)
    b.resident(["x", "y"], 1.5)
    assert b.deadline("r", "x", 1.5) == 2 and b.deadline("r", "y", 1.5) == 2
    b.resident(["x"], 1.7)  # y sits in a join
    b.resident(["x", "y"], 1.9)
    assert b.deadline("r", "y", 1.9) == pytest.approx(2.9) and b.deadline("r", "x", 1.9) == 2
    with pytest.raises(UsageError, match="not resident"):
        b.deadline("r", "z", 1.9)
    with pytest.raises(UsageError, match="twice"):
        b.arrive("r", 2.0)


# -------------------------------------------------------------------------------------------- invariants


def small(seed=0, count=30, **mix):
    return mixed_workload(count, Mix(**mix), np.random.default_rng(seed))


def same(a, b):
    assert a.log.seconds.tolist() == b.log.seconds.tolist() and a.log.end.tolist() == b.log.end.tolist()


def test_limits_of_the_policies():
    requests, config = small(), PaceConfig(tpot_slo_s=0.018)
    off = run(requests, "off", TRUTH, concurrency=16, config=config)
    same(off, run(requests, "cap:1", TRUTH, concurrency=16, config=config))
    tight = PaceConfig(tpot_slo_s=1e-9, ttft_slo_s=1e-9)
    same(off, run(requests, "pace", TRUTH, concurrency=16, config=tight))
    eager = run(requests, "eager", TRUTH, concurrency=16, config=config)
    same(eager, run(requests, "pace", TRUTH, concurrency=16))
    same(eager, run(requests, "cap:16", TRUTH, concurrency=16, config=config))
    same(eager, run(requests, make_policy("pace", budgeted=False), TRUTH, concurrency=16, config=config))
    same(
        run(requests, "pace", TRUTH, concurrency=16, config=config),
        run(requests, "hold:1", TRUTH, concurrency=16, config=config),
    )
    serial = small(parallel=0.0)
    same(
        run(serial, "off", TRUTH, concurrency=16, config=config),
        run(serial, "eager", TRUTH, concurrency=16, config=config),
    )


def test_same_seed_same_run_and_noise_has_the_right_mean():
    requests = small(count=15)
    again = [run(requests, "eager", TRUTH, concurrency=8, noise=0.3, seed=4) for _ in range(2)]
    same(*again)
    assert again[0] == again[1]  # what isn't compared is the real time
    other = run(requests, "eager", TRUTH, concurrency=8, noise=0.3, seed=5)
    assert other.log.seconds.tolist() != again[0].log.seconds.tolist()
    log = again[0].log
    assert (log.seconds / TRUTH.predict(log.rows, log.context)).mean() == pytest.approx(1, abs=0.05)


def test_a_predictor_learns_from_the_steps():
    learning = LatencyPredictor(min_samples=50, refit_every_s=1.0)
    report = run(
        small(), "pace", TRUTH, concurrency=16, predictor=learning, config=PaceConfig(tpot_slo_s=0.018)
    )
    np.testing.assert_allclose((learning.a, learning.b, learning.c), H200_32B, rtol=1e-6)
    assert report.log.rows[10] == report.log.ready[10]  # uncalibrated: everything runs
    assert learning.refits > 1 and (report.log.rows < report.log.ready).any()


SHARED = {
    "count": 160,
    "seed": 1,
    "branch_tokens": (15, 50),
    "stage_tokens": (8, 22),
    "serial_tokens": (25, 100),
}
"""The card's requests with a quarter of the tokens; contexts, and so step times, are nearly the same."""


def tabled(policy, concurrency, slo=0.018, model="request", predictor=None, **mix):
    config = PaceConfig(tpot_slo_s=slo, deadline_model=model)
    return simulate_decode(
        small(**SHARED, **mix), policy, TRUTH, concurrency=concurrency, config=config, predictor=predictor
    )


def test_directions_of_the_first_table():
    found = {policy: tabled(policy, 64) for policy in ("off", "cap:2", "cap:5", "eager", "pace")}
    median = {policy: 1e3 * report.step_s[50] for policy, report in found.items()}
    for policy, wanted in (("off", 10.9), ("cap:2", 14.0), ("cap:5", 20.0), ("eager", 24.0), ("pace", 16.6)):
        assert median[policy] == pytest.approx(wanted, abs=0.7), policy
    for definition in ("effective", "progress"):
        good = {policy: report.goodput[definition] for policy, report in found.items()}
        assert good["pace"] > good["cap:2"] > good["off"]
    assert found["pace"].attainment["progress"]["all"] >= 0.95
    assert found["eager"].attainment["progress"]["serial"] < 0.5
    assert found["eager"].goodput["effective"] > found["pace"].goodput["effective"]  # the metric decides
    assert found["eager"].goodput["progress"] == 0
    assert found["eager"].victims["mean"] > 0.018 > found["pace"].victims["mean"]
    assert (
        found["eager"].latency["parallel"]
        < found["pace"].latency["parallel"]
        < found["off"].latency["parallel"]
    )


def test_deadline_models_on_the_first_table():
    """Accumulated slack wins a little; deadlines of rows collapse to width 1."""
    pace, accumulated, row = (tabled("pace", 64, model=m) for m in ("request", "accumulated", "row"))
    assert accumulated.goodput["progress"] > pace.goodput["progress"]
    assert accumulated.attainment["progress"]["all"] >= 0.95
    assert accumulated.step_s[50] == pytest.approx(0.018, rel=0.02)
    assert row.width == pytest.approx(1, abs=0.05)
    loose = tabled("pace", 64, slo=0.1, model="row")  # works where the full step is far below the SLO
    assert loose.width > 4


def test_ablations_on_the_second_table():
    mix = {"parallel": 0.5, "branches": (3, 8)}
    off, pace, hold = (tabled(p, 64, slo=0.0155, **mix) for p in ("off", "pace", "hold:50"))
    wrong = LatencyPredictor(H200_32B[0], 6 * H200_32B[1], 6 * H200_32B[2], refit_every_s=1e9)
    fearful = tabled("pace", 64, slo=0.0155, predictor=wrong, **mix)
    good = [report.goodput["progress"] for report in (off, fearful, hold, pace)]
    assert good[0] <= good[1] < good[3] and good[0] < good[2] < good[3]


def test_overload_is_no_place_to_compare():
    """The baseline alone misses the SLO, so pace is off."""
    config = PaceConfig(tpot_slo_s=0.008)
    requests = small(count=30)
    pace, off = (run(requests, p, TRUTH, concurrency=30, config=config) for p in ("pace", "off"))
    assert pace.attainment["progress"]["all"] < 0.5
    assert pace.width == pytest.approx(off.width, abs=0.6)


# --------------------------------------------------------------------------------------------- bad input


def test_traces_are_read_and_refused_with_the_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 0, "prompt": 3, "stages": [[2]]}\n\n{"arrival": 1.5, "prompt": 4, "stages": [[2], [3, 4]]}\n'
    )
    assert read_trace(path) == [DecodeRequest(3, ((2,),)), DecodeRequest(4, ((2,), (3, 4)), 1.5)]
    first = '{"arrival": 1, "prompt": 3, "stages": [[2]]}\n'
    for second, message in (
        ('{"arrival": 0.5, "prompt": 3, "stages": [[2]]}', "line 2: arrival 0.5 is before"),
        ('{"arrival": 1, "prompt": 3, "stages": [[2]]}', "line 2: arrival 1 is the same"),
        (
            '{"arival": 2, "prompt": 3, "stages": [[2]]}',
            "line 2: unknown column 'arival'. Did you mean 'arrival'",
        ),
        ('{"arrival": 2, "stages": [[2]]}', "prompt=None"),
        ('{"arrival": 2, "prompt": 3, "stages": [[0]]}', "line 2: Each branch must have at least one token"),
        ('{"arrival": 2, "prompt": 3, "stages": [2]}', "lists of lengths"),
        ('{"arrival": NaN, "prompt": 3, "stages": [[2]]}', "finite"),
        ("[1]", "not an object"),
        ("{", "no JSON"),
    ):
        path.write_text(first + second)
        with pytest.raises(UsageError, match=message):
            read_trace(path)
    path.write_text("\n")
    with pytest.raises(UsageError, match="holds no request"):
        read_trace(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests": []}, "no request"),
        ({"truth": LatencyPredictor()}, "must have coefficients"),
        ({"truth": LatencyPredictor(0, 0, 0)}, "takes no time"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"noise": -1}, "noise=-1"),
        ({"warm_up": 1.0}, "warm_up=1"),
        ({"load": "opened"}, "load='opened'"),
        ({"load": [1.0]}, "1 arrivals for 2 requests"),
        ({"load": [2.0, 1.0]}, "ascending"),
        ({"load": "open", "rate": 0}, "rate=0"),
        ({"policy": "spread"}, "Known: cap"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        run(**settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mix(parallel=1.5),
        lambda: Mix(branches=(0, 3)),
        lambda: Mix(branch_tokens=(5, 4)),
        lambda: mixed_workload(0, Mix(), np.random.default_rng(0)),
        lambda: DecodeRequest(1, ()),
        lambda: DecodeRequest(1, ((),)),
    ],
)
def test_workloads_that_make_no_sense_are_refused(make):
    with pytest.raises(UsageError):
        make()
