"""The compiled cache simulator decides as the policies' Python does, on random traces; what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon.core.errors import UsageError
from gnomon.kernels import cache_sim, chosen, native
from gnomon.methods.serve.tail_lru import (
    FIFO,
    LFU,
    LRU,
    Belady,
    EndAware,
    ExpectedTailOptimizedLRU,
    LengthAware,
    Policy,
    TailOptimizedBelady,
    TailOptimizedLRU,
    ThresholdLRU,
    Trace,
    simulate,
    synthetic,
)
from gnomon.methods.serve.tail_lru.policies import Compiled

needs_library = pytest.mark.skipif(bool(native.problem()), reason=native.problem() or "built")


def policies(trace: Trace, rng: np.random.Generator, unit: int = 1) -> list[Policy]:
    xi, qhat = int(rng.integers(0, 25)) * unit, int(rng.integers(0, 8)) * unit
    samples = (rng.integers(0, 8, 5) * unit).tolist()
    return [
        LRU(), ThresholdLRU(10 * unit), TailOptimizedLRU(xi, qhat), Belady(trace), FIFO(), LFU(),
        TailOptimizedBelady(trace, threshold=xi), EndAware(trace, threshold=xi, next_prompt_estimate=qhat),
        LengthAware(trace, threshold=xi), ExpectedTailOptimizedLRU(xi, samples, 0.3),
        ExpectedTailOptimizedLRU(xi, samples),
    ]  # fmt: skip


@needs_library
@pytest.mark.parametrize("caching", ["optional", "forced"])
def test_same_decisions_on_small_traces(caching: str) -> None:
    rng = np.random.default_rng(0)
    trimmed = 0
    for _ in range(100):
        n = int(rng.integers(2, 30))
        turns = [
            (float(t), int(rng.integers(0, 5)), int(rng.integers(0, 8)), int(rng.integers(0, 8)))
            for t in range(n)
        ]
        trace, capacity, block = Trace.of(turns), int(rng.integers(0, 40)), int(rng.integers(1, 4))
        if caching == "forced":
            capacity = max(capacity, int((trace.history + trace.prompt + trace.response).max()))
        for policy in policies(trace, rng):
            slow, fast = (
                simulate(trace, policy, capacity, caching, block_size=block, impl=impl).cached
                for impl in ("reference", "compiled")
            )
            np.testing.assert_array_equal(fast, slow, err_msg=policy.name)
            trimmed += int((fast < trace.history // block).any())
    assert trimmed > 100  # caches were too small for many


@needs_library
@pytest.mark.parametrize("capacity", [1500, 6000])
def test_same_decisions_on_a_long_trace(capacity: int) -> None:
    trace = synthetic(1200, generator=np.random.default_rng(1))
    for policy in policies(trace, np.random.default_rng(2), unit=80):
        slow, fast = (
            simulate(trace, policy, capacity, impl=impl).cached for impl in ("reference", "compiled")
        )
        np.testing.assert_array_equal(fast, slow, err_msg=policy.name)


@needs_library
def test_a_wrong_budget_shows() -> None:
    """The comparison above can fail: one block off, and decisions differ."""

    class Off(TailOptimizedLRU):
        def compiled(self) -> Compiled:
            return Compiled(budget="fixed", xi=self.threshold + 1, qhat=self.next_prompt_estimate)

    trace = synthetic(300, generator=np.random.default_rng(3))
    slow, fast = (
        simulate(trace, Off(1500, 200), 2000, impl=impl).cached for impl in ("reference", "compiled")
    )
    assert (slow != fast).any()


def test_the_chooser_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cache_sim" in chosen()
    assert cache_sim.choice(impl="reference").name == "reference"
    monkeypatch.setattr(native, "problem", lambda: "there is no compiler")
    assert cache_sim.choice() == cache_sim.choice().__class__("reference", "there is no compiler")
    with pytest.raises(UsageError, match="asked for, but there is no compiler"):
        cache_sim.choice(impl="compiled")
    assert simulate([(0, "A", 1, 1)], LRU(), 5).impl == "reference"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"order": "random"}, "Unknown order 'random'"),
        ({"conversation": [0, 5]}, r"must lie in \[0, 2\)"),
        ({"following": [7, -1]}, "indices below 2"),
        ({"prompt": [-1, 1]}, "must be ≥ 0"),
        ({"prompt": [1]}, "one length"),
        ({"capacity": -1}, "capacity=-1"),
        ({"order": "expected"}, "rising order"),
        ({"order": "expected", "samples": [3, 1]}, "rising order"),
    ],
)
def test_what_would_read_outside_is_refused(changes: dict[str, object], says: str) -> None:
    arguments: dict[str, object] = {
        "time": [0.0, 1.0], "conversation": [0, 1], "prompt": [1, 1], "response": [1, 1], "following": [-1, -1],
        "conversations": 2, "capacity": 3,
    }  # fmt: skip
    arguments |= changes
    for name in ("time", "conversation", "prompt", "response", "following", "samples"):
        if name in arguments:
            arguments[name] = np.array(arguments[name], dtype=np.float64 if name == "time" else np.int64)
    with pytest.raises(UsageError, match=says):
        cache_sim.run(**arguments)
