"""Sources of truth: the paper's examples by hand, linear programs, brute force over all allocations, and limits in
which one policy must be another, on thousands of random traces.
"""

from __future__ import annotations

import inspect
import itertools
import math

import numpy as np
import pytest

from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.kernels import cache_sim
from gnomon.methods.serve.tail_lru import (
    ARC,
    FIFO,
    LFU,
    LRU,
    SLRU,
    AdaptiveTailOptimizedLRU,
    Belady,
    EndAware,
    EvictionPolicy,
    ExpectedTailOptimizedLRU,
    LatencyModel,
    LengthAware,
    Policy,
    PolicySettings,
    TailOptimizedBelady,
    TailOptimizedLRU,
    ThresholdLRU,
    Trace,
    TraceOracle,
    Turn,
    lp_optimal_tel,
    settings_for_slo,
    simulate,
    synthetic,
    tel_safe_budget,
)

SHORT = [Turn(0, "A", 100, 0), Turn(1, "B", 100, 0), Turn(2, "A", 100, 0)]
LONG = [
    Turn(t, conv, q, a)
    for t, (conv, q, a) in enumerate(
        [("A", 6, 2), ("B", 3, 1), ("A", 4, 2), ("C", 5, 3), ("B", 4, 2), ("A", 4, 2), ("C", 4, 1)]
    )
]


def random_trace(
    rng: np.random.Generator, prompt: int | None = None, most: int = 24, answers: int = 6
) -> Trace:
    """Some turns of a few conversations, by arrays; `prompt` fixes every prompt's length."""
    n = int(rng.integers(2, most))
    drawn = rng.integers(0, int(rng.integers(1, 6)), n)
    _, first, code = np.unique(drawn, return_index=True, return_inverse=True)
    code = np.argsort(np.argsort(first))[code]
    prompts = rng.integers(1, 7, n) if prompt is None else np.full(n, prompt)
    return Trace(np.arange(n) * 0.5, code, prompts, rng.integers(0, answers, n), tuple(range(code.max() + 1)))


def fast(trace: Trace, policy: Policy, capacity: int) -> np.ndarray:
    """Uncached lengths by the compiled simulator, without the checks around it: for thousands of traces."""
    as_numbers = {k: v for k, v in vars(policy.compiled()).items() if k != "samples"}
    cached = cache_sim.run(
        time=trace.time, conversation=trace.conversation, prompt=trace.prompt, response=trace.response,
        following=trace.next_position, conversations=len(trace.names), capacity=capacity,
        samples=np.array(policy.compiled().samples, dtype=np.int64), **as_numbers,
    )  # fmt: skip
    return trace.history + trace.prompt - cached


def excess(uncached: np.ndarray, xi: int) -> int:
    return int(np.maximum(uncached - xi, 0).sum())


# ------------------------------------------------------------------------------------------ examples by hand


@pytest.mark.parametrize("impl", ["reference", "compiled"])
def test_the_short_example(impl: str) -> None:
    lru = simulate(SHORT, LRU(), 100, impl=impl)
    tail = simulate(SHORT, TailOptimizedLRU(150, 100), 100, impl=impl)
    assert (lru.uncached.tolist(), lru.tel(150)) == ([100, 100, 200], 50)
    assert (tail.uncached.tolist(), tail.tel(150)) == ([100, 100, 150], 0)
    assert (lru.hit_tokens, tail.hit_tokens) == (0, 50)


@pytest.mark.parametrize("impl", ["reference", "compiled"])
@pytest.mark.parametrize(
    ("policy", "uncached", "tel"),
    [
        (LRU(), [6, 3, 4, 5, 8, 18, 12], 14),
        (TailOptimizedLRU(8, 4), [6, 3, 4, 5, 8, 12, 12], 8),
        (Belady(LONG), [6, 3, 4, 5, 4, 6, 12], 4),
        (TailOptimizedBelady(LONG, threshold=8), [6, 3, 8, 5, 8, 8, 8], 0),
        (EndAware(LONG, threshold=8, next_prompt_estimate=4), [6, 3, 4, 5, 8, 8, 6], 0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_long_example(policy: EvictionPolicy, uncached: list[int], tel: int, impl: str) -> None:
    found = simulate(LONG, policy, 16, impl=impl)
    assert (found.uncached.tolist(), found.tel(8), found.impl) == (uncached, tel, impl)
    if policy.name == "belady":
        assert found.uncached.sum() == 40
    if policy.name == "tail-belady":
        assert found.uncached.sum() == 46


def test_safe_budget_by_hand() -> None:
    assert tel_safe_budget(10, 2, 5) == 7  # three safe blocks: 7, 8, 9
    assert tel_safe_budget(2, 1, 10) == 0  # both safe


def test_expected_form_by_hand() -> None:
    policy = ExpectedTailOptimizedLRU(4, (1, 2, 4, 4), turn_rate={"A": 1.0, "B": 0.8})
    policy.on_turn("A", 0.0, 10, 6)
    policy.on_turn("B", 0.0, 5, 5)
    assert policy.value("A", 0.0) == 1.0
    assert policy.value("B", 0.0) == pytest.approx(0.4)
    assert [round(policy.value("B", 0.0, has), 9) for has in (5, 4, 3, 2, 1)] == [0.4, 0.4, 0.6, 0.8, 0.8]
    ends = [dict(policy.victims(n)) for n in range(7)]
    assert ends[5] == {"B": 0} and ends[6] == {"B": 0, "A": 5}
    assert [set(later) - set(earlier) for earlier, later in itertools.pairwise(ends)] == [
        {"B"},
        *[set()] * 4,
        {"A"},
    ]
    assert policy.cached == {"A": 6, "B": 5}  # asking changes nothing


def test_belief_after_two_seconds() -> None:
    policy = ExpectedTailOptimizedLRU(4, (1,), death_rate=0.5)
    policy.on_turn("A", 3.0, 10)
    assert policy.belief("A", 5.0) == pytest.approx(0.367879, abs=1e-6)


def test_off_by_one_would_exceed_the_threshold() -> None:
    """Trimmed to its budget, the next turn of exactly Q̂ lands on ξ; one block fewer would exceed it."""
    trace = [(0, "A", 10, 0), (1, "B", 90, 0), (2, "A", 4, 0)]
    # A and B give four blocks each, down to 6 and 86; a block more has to come from A, the least recent.
    assert [int(simulate(trace, TailOptimizedLRU(8, 4), c).uncached[2]) for c in (100, 96, 92, 91)] == [
        4,
        8,
        8,
        9,
    ]


def test_references_by_hand() -> None:
    trace = [(t, conv, 4, 0) for t, conv in enumerate("ABACAB")]
    for policy in (LRU(), FIFO(), LFU()):
        assert simulate(trace, policy, 12).uncached.tolist()[:4] == [4, 4, 4, 4]
    # After A B A C with 12 blocks: A has 8, B 4, C 4, so 4 go. LRU and LFU cut B; FIFO cuts A, which came first.
    assert simulate(trace, LRU(), 12).uncached.tolist()[4:] == [4, 8]
    assert simulate(trace, LFU(), 12).uncached.tolist()[4:] == [4, 8]
    assert simulate(trace, FIFO(), 12).uncached.tolist()[4] == 8
    # SLRU protects A, which returned while cached; so does ARC.
    for policy in (SLRU(12), ARC(12)):
        assert simulate(trace, policy, 12).uncached.tolist()[4] == 4


def test_arc_learns_from_a_ghost() -> None:
    policy = ARC(8)
    policy.on_turn("A", 0, 8)
    policy.on_trim("A", 0)
    assert policy.target == 0 and "A" in policy.ghosts[0]
    policy.on_turn("A", 1, 10)
    assert policy.target == 8 and "A" in policy.again and not policy.ghosts[0]
    policy.reset()
    assert policy.target == 0 and not policy.again


# ------------------------------------------------------------------------------- limits and identities, at random


def test_a_threshold_of_at_most_the_estimate_is_lru() -> None:
    rng = np.random.default_rng(1)
    for _ in range(1200):
        trace, capacity, qhat = random_trace(rng), int(rng.integers(1, 40)), int(rng.integers(0, 9))
        tail = TailOptimizedLRU(int(rng.integers(0, qhat + 1)), qhat)
        assert (fast(trace, tail, capacity) == fast(trace, LRU(), capacity)).all()


def test_a_threshold_beyond_all_histories_is_lru() -> None:
    rng = np.random.default_rng(2)
    for _ in range(500):
        trace, capacity, qhat = random_trace(rng), int(rng.integers(1, 40)), int(rng.integers(0, 9))
        longest = int((trace.history + trace.prompt + trace.response).max())
        tail = TailOptimizedLRU(longest + qhat, qhat)
        assert (fast(trace, tail, capacity) == fast(trace, LRU(), capacity)).all()


def test_with_prompts_known_it_never_has_a_larger_tail_than_lru() -> None:
    rng = np.random.default_rng(3)
    better = 0
    for _ in range(1500):
        q, xi = int(rng.integers(1, 7)), int(rng.integers(0, 25))
        trace, capacity = random_trace(rng, prompt=q), int(rng.integers(1, 40))
        lru, tail = (excess(fast(trace, p, capacity), xi) for p in (LRU(), TailOptimizedLRU(xi, q)))
        assert tail <= lru
        better += tail < lru
    assert better > 150  # a policy that does nothing would be equal


def test_with_prompts_unknown_it_can_be_worse() -> None:
    rng = np.random.default_rng(4)
    worse = 0
    for _ in range(1000):
        trace, capacity, xi = random_trace(rng), int(rng.integers(1, 40)), int(rng.integers(0, 25))
        lru, tail = (excess(fast(trace, p, capacity), xi) for p in (LRU(), TailOptimizedLRU(xi, 3)))
        worse += tail > lru
    assert worse > 10


@pytest.mark.parametrize(("caching", "traces"), [("optional", 400), ("forced", 60)])
def test_tail_belady_is_the_linear_optimum(caching: str, traces: int) -> None:
    rng = np.random.default_rng(5)
    lru_above = 0
    for _ in range(traces):
        trace, capacity, xi = random_trace(rng, most=11), int(rng.integers(1, 30)), int(rng.integers(0, 15))
        if caching == "forced":
            capacity = max(capacity, int((trace.history + trace.prompt + trace.response).max()))
        best = lp_optimal_tel(trace, capacity, xi, caching=caching)
        policy = TailOptimizedBelady(trace, threshold=xi)
        assert simulate(trace, policy, capacity, caching).tel(xi) == pytest.approx(best, abs=1e-6)
        lru_above += simulate(trace, LRU(), capacity, caching).tel(xi) > best + 0.5
    assert lru_above > traces / 10  # the optimum is not what anything reaches


def test_belady_is_tail_belady_without_a_threshold() -> None:
    rng = np.random.default_rng(6)
    for _ in range(60):
        trace, capacity = random_trace(rng, most=11), int(rng.integers(1, 40))
        plain, tail = (
            simulate(trace, p, capacity) for p in (Belady(trace), TailOptimizedBelady(trace, threshold=0))
        )
        assert plain.uncached.sum() == tail.uncached.sum() == lp_optimal_tel(trace, capacity, 0)
        assert plain.uncached.sum() <= simulate(trace, LRU(), capacity).uncached.sum()


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_expected_form_is_lru_without_a_threshold_and_t_lru_for_known_prompts(mu: float) -> None:
    rng = np.random.default_rng(7)
    for _ in range(400):
        trace, capacity, xi, q = (
            random_trace(rng),
            int(rng.integers(1, 40)),
            int(rng.integers(0, 25)),
            int(rng.integers(0, 7)),
        )
        plain = ExpectedTailOptimizedLRU(0, rng.integers(1, 7, 5).tolist(), mu)
        assert (fast(trace, plain, capacity) == fast(trace, LRU(), capacity)).all()
        known, tail = ExpectedTailOptimizedLRU(xi, [q], mu), TailOptimizedLRU(xi, q)
        assert (fast(trace, known, capacity) == fast(trace, tail, capacity)).all()


def test_expected_form_is_the_best_of_all_allocations() -> None:
    """Brute force over everything that could be left after n evictions."""
    rng = np.random.default_rng(8)
    improved = 0
    for _ in range(100):
        lengths = rng.integers(1, 6, 3)
        samples, xi = rng.integers(0, 6, 4).tolist(), int(rng.integers(0, 6))
        rates = {k: float(rate) for k, rate in enumerate(rng.uniform(0.2, 2, 3))}
        policy = ExpectedTailOptimizedLRU(xi, samples, death_rate=0.4, turn_rate=rates)
        for k, length in enumerate(lengths.tolist()):
            policy.on_turn(k, float(k), int(length + rng.integers(0, 3)), int(length))
        n = int(rng.integers(1, lengths.sum() + 1))

        price = [
            [
                policy.belief(k, 5.0) * np.mean([max(0, policy.history[k] + q - x - xi) for q in samples])
                for x in range(8)
            ]
            for k in range(3)
        ]
        found = dict(policy.victims(n))
        mine = sum(price[k][found.get(k, int(x))] for k, x in enumerate(lengths))
        every = [
            sum(price[k][x] for k, x in enumerate(left))
            for left in itertools.product(*(range(x + 1) for x in lengths.tolist()))
            if sum(left) == lengths.sum() - n
        ]
        assert mine == pytest.approx(min(every), abs=1e-9)
        improved += min(every) < max(every) - 1e-9
    assert improved > 50


@pytest.mark.parametrize("caching", ["optional", "forced"])
def test_states_are_feasible_and_cuts_from_tails(caching: str) -> None:
    """Σ X ≤ C, 0 ≤ X ≤ L, growth at own turns only; a safe cut never raises the excess of a prompt of at most Q̂."""
    rng = np.random.default_rng(9)

    class Watched(TailOptimizedLRU):
        def on_trim(self, conv_id: object, cached_len: int) -> None:
            before, length = self.cached[conv_id], self.history[conv_id]
            assert 0 <= cached_len < before <= length
            if cached_len >= self.budget(conv_id):  # phase 1
                for q in range(self.next_prompt_estimate + 1):
                    excess = [max(0, length + q - x - self.threshold) for x in (before, cached_len)]
                    assert excess[0] == excess[1]
            super().on_trim(conv_id, cached_len)

        def on_turn(self, *args: object, **more: object) -> int:
            assert sum(self.cached.values()) <= capacity
            return super().on_turn(*args, **more)

    for _ in range(60):
        trace, capacity = random_trace(rng), int(rng.integers(1, 40))
        if caching == "forced":
            capacity = max(capacity, int((trace.history + trace.prompt + trace.response).max()))
        found = simulate(trace, Watched(int(rng.integers(0, 20)), 3), capacity, caching, impl="reference")
        assert (found.cached <= trace.history).all()
        if caching == "forced":  # the turn just before was cached whole
            last = np.flatnonzero(np.diff(trace.conversation) == 0) + 1
            np.testing.assert_array_equal(found.cached[last], trace.history[last])


def test_the_difference_to_lru_is_two_lines() -> None:
    lines = [
        [line.strip() for line in inspect.getsource(kind.victims).splitlines()[2:]]
        for kind in (LRU, TailOptimizedLRU)
    ]
    added = [line for line in lines[1] if lines[1].count(line) > lines[0].count(line)]
    assert "plan.cut(conv, down_to=self.budget(conv))" in added
    assert len(lines[1]) - len(lines[0]) == 2 and all(line in lines[1] for line in lines[0])


def test_lru_is_arbitrarily_bad() -> None:
    """A long conversation returns after a short one that needs no cache: LRU's excess grows with its length."""
    for n in (10, 100, 1000):
        trace = [(0, "long", n, 0), (1, "short", n, 0), (2, "long", 1, 0), (3, "short", 0, 0)]
        lru, best = (
            simulate(trace, LRU(), n).tel(n),
            simulate(trace, TailOptimizedBelady(trace, threshold=n), n).tel(n),
        )
        assert best <= 1 <= lru


# ------------------------------------------------------------------------------------------------- the protocol


ALL = [
    LRU(), ThresholdLRU(5), TailOptimizedLRU(8, 4), ExpectedTailOptimizedLRU(8, [4, 6]), FIFO(), LFU(), SLRU(16),
    ARC(16), AdaptiveTailOptimizedLRU(8, 4, window=3, every=1), Belady(LONG), TailOptimizedBelady(LONG, threshold=8),
    EndAware(LONG, threshold=8), LengthAware(LONG, threshold=8),
]  # fmt: skip


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_every_policy_keeps_the_protocol(policy: EvictionPolicy) -> None:
    assert isinstance(policy, EvictionPolicy)
    first = simulate(LONG, policy, 16, impl="reference").cached
    np.testing.assert_array_equal(
        simulate(LONG, policy, 16, impl="reference").cached, first
    )  # reset, deterministic
    asked = [policy.victims(3), policy.victims(3)]
    assert asked[0] == asked[1] and sum(policy.cached[c] - left for c, left in asked[0]) == min(
        3, sum(policy.cached.values())
    )
    assert policy.victims(0) == []
    everything = policy.victims(10**6)
    assert {conv for conv, _ in everything} == set(policy.cached) and not any(left for _, left in everything)
    protected = next(iter(policy.cached), None)
    assert protected not in dict(policy.victims(10**6, (protected,)))
    policy.on_end(protected)
    assert protected not in dict(policy.victims(10**6))
    big = simulate(LONG, policy, 10**6, impl="reference")
    if policy.name in ("lru", "t-lru", "et-lru", "belady", "fifo", "lfu", "arc", "slru", "adaptive t-lru"):
        np.testing.assert_array_equal(big.cached, big.trace.history)  # nothing is dropped for nothing


def test_a_policy_that_breaks_the_protocol_is_told() -> None:
    class Lazy(LRU):
        def victims(self, need_blocks: int, protected: object = ()) -> list[tuple[object, int]]:
            return []

    class Greedy(LRU):
        def victims(self, need_blocks: int, protected: object = ()) -> list[tuple[object, int]]:
            return [(conv, 10**6) for conv in self.cached]

    for broken in (Lazy, Greedy):
        broken.compiled = lambda self: None
        with pytest.raises(GnomonError, match=r"at turn \d"):
            simulate(LONG, broken(), 5)


def test_length_awareness_uses_the_length() -> None:
    trace = [(0, "A", 10, 0), (1, "B", 20, 0), (2, "A", 6, 0), (3, "B", 1, 0)]
    aware = simulate(trace, LengthAware(trace, threshold=10), 26)
    assert aware.uncached.tolist() == [10, 20, 10, 11] or aware.tel(10) == lp_optimal_tel(trace, 26, 10)


def test_the_adaptive_threshold_follows_what_is_served() -> None:
    policy = AdaptiveTailOptimizedLRU(1000, 5, percentile=50, share=0.5, window=4, every=2)
    for length in (10, 20, 30, 40):
        policy.on_served(length)
    assert policy.current == 10  # half of the second smallest
    for length in (4000, 4000):
        policy.on_served(length)
    assert policy.current == 20  # of 30, 40, 4000, 4000
    for length in (9000, 9000):
        policy.on_served(length)
    assert policy.current == 1000  # never above the largest
    policy.reset()
    assert policy.current == 1000


def test_the_adaptive_threshold_does_no_harm_where_a_fixed_one_does() -> None:
    trace = synthetic(2000, generator=np.random.default_rng(0))
    latency = LatencyModel(1e-4)
    lru, fixed, adaptive = (
        simulate(trace, policy, 4000, latency=latency).percentile(90)
        for policy in (LRU(), TailOptimizedLRU(5000, 200), AdaptiveTailOptimizedLRU(5000, 200, percentile=90))
    )
    assert fixed > 1.1 * lru
    assert adaptive < fixed


# ----------------------------------------------------------------------------------- latency, blocks, refusals


def test_the_latency_model() -> None:
    assert LatencyModel(1e-4).threshold_blocks(0.15) == 1500
    assert LatencyModel(1e-3, 0.05).threshold_blocks(0.2) == 150
    assert LatencyModel(0.3).threshold_blocks(1.0) == 3  # down
    rng = np.random.default_rng(0)
    b = rng.integers(1, 3000, 200)
    fitted = LatencyModel.fit(b.tolist(), (0.02 + 3e-4 * b + rng.normal(0, 1e-3, 200)).tolist())
    slope, offset = np.polyfit(b, 0.02 + 3e-4 * b, 1)
    assert fitted.alpha_s_per_block == pytest.approx(slope, rel=0.02) and fitted.beta_s == pytest.approx(
        offset, rel=0.1
    )
    through_zero = LatencyModel.fit([1, 2, 3], [0.9, 2.0, 3.1])
    assert through_zero.beta_s == 0 and through_zero.alpha_s_per_block == pytest.approx((0.9 + 4 + 9.3) / 14)


def test_settings_for_an_engine() -> None:
    found = settings_for_slo(0.2, seconds_per_token=1e-4, block_size=16)
    assert (found.xi_tokens, found.xi_blocks, found.qhat_blocks) == (1500, 93, 13)  # down, up
    for history in range(0, 4000, 7):  # in blocks it never calls safe what tokens need
        assert found.budget_blocks(history) * 16 >= tel_safe_budget(history, 200, 1500)
    assert settings_for_slo(0.2, seconds_per_token=5e-5, margin=1.0).xi_tokens == 4000


@pytest.mark.parametrize("impl", ["reference", "compiled"])
def test_blocks_of_several_tokens(impl: str) -> None:
    trace = [(0, "A", 33, 0), (1, "A", 10, 5), (2, "A", 1, 0)]
    found = simulate(trace, LRU(), 100, block_size=16, impl=impl)
    assert found.cached.tolist() == [0, 2, 3] and found.uncached.tolist() == [33, 11, 1]  # whole blocks only
    tight = simulate(trace, LRU(), 1, block_size=16, impl=impl)
    assert tight.cached.tolist() == [0, 1, 1]


def test_percentiles_and_violations_by_hand() -> None:
    found = simulate(SHORT, LRU(), 100, latency=LatencyModel(1e-3, 0.01))
    np.testing.assert_allclose(found.ttft, [0.11, 0.11, 0.21])
    assert found.percentile(50) == pytest.approx(0.11)
    assert found.percentile(90) == pytest.approx(0.19)  # linear between .11 and .21
    assert found.percentile(90, first_turns=False) == pytest.approx(0.21)
    assert found.violation_rate(0.2) == pytest.approx(1 / 3) and found.violation_rate(0.22) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: TailOptimizedLRU(0.2), r"threshold=0\.2 must be a whole number of blocks"),
        (lambda: TailOptimizedLRU(-1), "threshold=-1"),
        (lambda: TailOptimizedLRU(5, -2), "next_prompt_estimate=-2"),
        (lambda: ThresholdLRU(math.nan), "min_len=nan"),
        (lambda: ExpectedTailOptimizedLRU(5, []), "prompt_lengths is empty"),
        (lambda: ExpectedTailOptimizedLRU(5, [1], -1), "death_rate=-1"),
        (lambda: ExpectedTailOptimizedLRU(5, [1], 0, 0.0), r"turn_rate=0\.0"),
        (lambda: SLRU(10, 1.5), r"share=1\.5"),
        (lambda: AdaptiveTailOptimizedLRU(10, 1, percentile=100), "percentile=100"),
        (lambda: LatencyModel(0), "alpha_s_per_block=0"),
        (lambda: LatencyModel(math.nan), "alpha_s_per_block=nan"),
        (lambda: LatencyModel(1e-4, -1), "beta_s=-1"),
        (lambda: LatencyModel(1e-4).threshold_blocks(-1), "must be a number ≥ 0"),
        (lambda: LatencyModel(1e-4, 0.3).threshold_blocks(0.2), "no cache can reach it"),
        (lambda: LatencyModel(1e-4).threshold_blocks(1e300), "milliseconds"),
        (lambda: LatencyModel.fit([5, 5], [1, 2]), "1 different lengths"),
        (lambda: LatencyModel.fit([1, 2], [2, 1]), "don't grow"),
        (lambda: LatencyModel.fit([1, 2], [2, math.inf]), "finite"),
        (lambda: PolicySettings(xi_tokens=-1, qhat_tokens=2), "xi_tokens=-1"),
        (lambda: settings_for_slo(0.2, seconds_per_token=1e-4, margin=0), "margin=0"),
        (lambda: settings_for_slo(0, seconds_per_token=1e-4), "slo_s=0"),
        (lambda: simulate(SHORT, LRU(), -1), "capacity=-1"),
        (lambda: simulate(SHORT, LRU(), 100, oversize="raise", block_size=True), "block_size=True"),
        (lambda: simulate(SHORT, LRU(), 100, block_size=0), "block_size=0"),
        (lambda: simulate(SHORT, LRU(), 150, "forced"), "200 blocks, more than the whole cache"),
        (lambda: simulate(SHORT, LRU(), 50, oversize="raise"), "Turn 0 leaves a history of 100 blocks"),
        (lambda: simulate(SHORT, LRU(), 100, impl="cuda"), "Unknown implementation 'cuda'"),
        (lambda: simulate(SHORT, ARC(10), 100, impl="compiled"), "ARC runs in Python only"),
        (lambda: simulate([(1, "A", 1, 1), (0, "B", 1, 1)], LRU(), 9), "Turn 1 arrives at 0 s, before turn 0"),
        (lambda: simulate([(1, "A", 1, 1), (1, "A", 1, 1)], LRU(), 9), "an earlier turn of its conversation"),
        (lambda: simulate([(math.nan, "A", 1, 1)], LRU(), 9), "Turn 0 arrives at nan"),
        (lambda: simulate([(0, "A", -1, 1)], LRU(), 9), "a prompt of -1 tokens"),
        (lambda: simulate(SHORT, Belady(LONG[1:]), 100), "must be given the trace that it is run on"),
        (lambda: simulate([], LRU(), 9).percentile(50), "No turn to count"),
        (lambda: simulate(SHORT, LRU(), 9).percentile(101), "between 0 and 100"),
        (lambda: lp_optimal_tel(synthetic(2000, generator=np.random.default_rng(0)), 10, 5), "shorter trace"),
        (lambda: synthetic(0, generator=np.random.default_rng(0)), "turns=0"),
    ],
)  # fmt: skip
def test_refusals(call: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


def test_forced_caching_without_room_has_no_optimum() -> None:
    with pytest.raises(NumericalFailure):
        lp_optimal_tel(SHORT, 150, 10, caching="forced")


def test_the_synthetic_trace_is_as_described() -> None:
    trace = synthetic(20_000, generator=np.random.default_rng(0))
    assert len(trace) == 20_000 and (np.diff(trace.time) >= 0).all()
    assert trace.prompt.mean() == pytest.approx(200.5, rel=0.03)
    assert np.log(trace.response).mean() == pytest.approx(math.log(350) - 0.3, rel=0.01)
    assert np.bincount(trace.conversation)[:4000].mean() == pytest.approx(3.5, rel=0.08)
    starts = np.sort(trace.time[trace.first_turn])
    assert np.diff(starts).mean() == pytest.approx(1.0, rel=0.05)
    again = [synthetic(50, generator=np.random.default_rng(seed)).prompt.tolist() for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_history_and_next_turns_by_hand() -> None:
    trace = Trace.of(LONG)
    assert trace.history.tolist() == [0, 0, 8, 0, 4, 14, 8]
    assert trace.next_position.tolist() == [2, 4, 5, 6, -1, -1, -1]
    assert trace.first_turn.tolist() == [True, True, False, True, False, False, False]
    assert [turn.conversation for turn in trace] == list("ABACBAC")
    oracle = TraceOracle.of(trace)
    assert oracle.following("A", 1) == (2, 4) and oracle.following("C", 2) is None
    halves = trace.halves()
    assert [len(half) for half in halves] == [5, 2] and halves[1].names == ("B",)


def test_the_card_s_directions() -> None:
    """T-LRU(150 ms) better than LRU on P95 and violations at both capacities, T-LRU(500 ms) worse on P90."""
    latency = LatencyModel(1e-4)
    traces = [synthetic(2000, generator=np.random.default_rng(seed)) for seed in range(5)]

    def mean(policy: object, capacity: int, what: str) -> float:
        results = [simulate(trace, policy, capacity, latency=latency) for trace in traces]
        return float(
            np.mean([r.violation_rate(0.2) if what == "v" else r.percentile(float(what)) for r in results])
        )

    for capacity in (2000, 4000):
        for what in ("95", "v"):
            assert mean(TailOptimizedLRU(1500, 200), capacity, what) < mean(LRU(), capacity, what)
    assert mean(TailOptimizedLRU(5000, 200), 4000, "90") > mean(LRU(), 4000, "90")
    for trace in traces:
        best = simulate(trace, TailOptimizedBelady(trace, threshold=1500), 2000).tel(1500)
        others = (LRU(), TailOptimizedLRU(1500, 200), EndAware(trace, threshold=1500), FIFO(), Belady(trace))
        assert all(simulate(trace, other, 2000).tel(1500) >= best for other in others)
