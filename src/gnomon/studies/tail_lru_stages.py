"""Stages of the Tail-LRU study on synthetic traces: what is proved, and what the simulator shows.

Lengths are tokens, times seconds. Percentiles are NumPy's linear ones over all turns, first turns included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext
from gnomon.studies.tail_lru_policies import LRU, METHOD, THRESHOLDED, make

if TYPE_CHECKING:
    import numpy as np

    from gnomon.methods.serve.tail_lru import Trace
    from gnomon.methods.serve.tail_lru.simulate import Measured

LOWER = {"P90": "P90 below LRU's", "P95": "P95 below LRU's", "violations": "violations below LRU's"}
"""Per cent by which a tail is below LRU's, by what is compared."""
UNBOUNDED = "LRU's excess grows while the optimum stays"
GAP, EXPECTED = "distance to the linear program", "distance to the best allocation"
AS_LRU, AS_TAIL, LINES = "differs from LRU", "differs from T-LRU", "logical lines beyond LRU"
EXCESS, ABOVE_BEST = "tail excess", "excess beyond the optimum"
TAILS = ("P50", "P90", "P95", "P99")


def blocks(ms: float, alpha_ms: float) -> int:
    """A threshold in milliseconds as tokens."""
    from gnomon.methods.serve.tail_lru import LatencyModel

    return LatencyModel(alpha_ms / 1e3).threshold_blocks(ms / 1e3)


def drawn(turns: int, seed: int) -> Trace:
    """The card's random trace."""
    import numpy as np

    from gnomon.methods.serve.tail_lru import synthetic

    return synthetic(turns, generator=np.random.default_rng(seed))


def tails(found: Measured, slo_ms: float) -> dict[str, float]:
    """Percentiles in milliseconds, and the share of turns above the SLO in per cent."""
    out = {name: 1e3 * found.percentile(float(name[1:])) for name in TAILS}
    return {**out, "violations": 100 * found.violation_rate(slo_ms / 1e3)}


def lowered(mine: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """By how many per cent each tail is below another's; 0 where the other has none."""
    return {name: 100 * (1 - mine[name] / other[name]) if other[name] else 0.0 for name in LOWER}


# ------------------------------------------------------------------------------------------------ what is proved


def lru_is_bad(ctx: StageContext, *, sizes: list[int]) -> None:
    """A family of traces: a long conversation returns after two short ones that need no cache.

    With C = n and ξ = n/2 every first turn is at most ξ long. LRU throws the long history away for prompts that never
    return, so its excess is n/2 and more; hindsight keeps what the return needs and has none.
    """
    from gnomon.methods.serve.tail_lru import LRU as Plain
    from gnomon.methods.serve.tail_lru import TailOptimizedBelady, Trace, simulate

    before = -1
    for n in sizes:
        half = n // 2
        turns = [("long", half), ("long", half), ("one", half), ("two", half), ("long", 1)]
        trace = Trace.of((t, name, q, 0) for t, (name, q) in enumerate(turns))
        lru = simulate(trace, Plain(), n).tel(half)
        best = simulate(trace, TailOptimizedBelady(trace, threshold=half), n).tel(half)
        ctx.record(
            method=LRU, metric=EXCESS, value=lru, unit="tokens", item=str(n), tags={"family": "growing"}
        )
        ctx.record(
            method="tail-belady",
            metric=EXCESS,
            value=best,
            unit="tokens",
            item=str(n),
            tags={"family": "growing"},
        )
        ctx.record(method=LRU, metric=UNBOUNDED, value=int(lru > before and best == 0), item=str(n))
        before = lru


def _small(rng: np.random.Generator, most: int = 14) -> Trace:
    """A random trace of a few turns, in blocks."""
    import numpy as np

    from gnomon.methods.serve.tail_lru import Trace

    n = int(rng.integers(3, most))
    names = rng.integers(0, int(rng.integers(1, 6)), n).tolist()
    lengths = rng.integers(1, 7, (n, 2))
    return Trace.of((float(t), names[t], int(q), int(a)) for t, (q, a) in enumerate(np.asarray(lengths)))


def optimum(ctx: StageContext, *, count: int, seed: int) -> None:
    """Tail-Optimized Belady against the linear program, trace by trace, half of them under forced caching."""
    import numpy as np

    from gnomon.methods.serve.tail_lru import TailOptimizedBelady, lp_optimal_tel, simulate

    rng = np.random.default_rng(seed)
    for k in range(count):
        trace, capacity, xi = _small(rng, 11), int(rng.integers(1, 30)), int(rng.integers(0, 15))
        caching = ("optional", "forced")[k % 4 == 3]
        if caching == "forced":
            capacity = max(capacity, int((trace.history + trace.prompt + trace.response).max()))
        best = lp_optimal_tel(trace, capacity, xi, caching=caching)
        found = simulate(trace, TailOptimizedBelady(trace, threshold=xi), capacity, caching).tel(xi)  # type: ignore[arg-type]
        ctx.record(method="tail-belady", metric=GAP, value=found - best, unit="blocks", item=f"{seed}:{k}")


def expected(ctx: StageContext, *, count: int, seed: int) -> None:
    """Expected-T-LRU against the best of all allocations of the blocks that stay."""
    import itertools
    import math

    import numpy as np

    from gnomon.methods.serve.tail_lru import ExpectedTailOptimizedLRU

    rng = np.random.default_rng(seed)
    for k in range(count):
        held = rng.integers(1, 6, 3).tolist()
        samples, xi = rng.integers(0, 6, 4).tolist(), int(rng.integers(0, 6))
        rates = {i: float(rate) for i, rate in enumerate(rng.uniform(0.2, 2, 3))}
        policy = ExpectedTailOptimizedLRU(xi, samples, death_rate=0.4, turn_rate=rates)
        length = {i: x + int(rng.integers(0, 3)) for i, x in enumerate(held)}
        for i, x in enumerate(held):
            policy.on_turn(i, float(i), length[i], x)
        gone = int(rng.integers(1, sum(held) + 1))
        alive = [rates[i] * math.exp(-0.4 * (5.0 - i)) for i in range(3)]
        cost = [
            [alive[i] * sum(max(0, length[i] + q - y - xi) for q in samples) / 4 for y in range(x + 1)]
            for i, x in enumerate(held)
        ]
        left = dict(policy.victims(gone))
        mine = sum(cost[i][left.get(i, x)] for i, x in enumerate(held))
        best = min(
            sum(cost[i][y] for i, y in enumerate(kept))
            for kept in itertools.product(*(range(x + 1) for x in held))
            if sum(kept) == sum(held) - gone
        )
        ctx.record(method="et-lru", metric=EXPECTED, value=mine - best, unit="blocks/s", item=f"{seed}:{k}")


def special_cases(ctx: StageContext, *, count: int, seed: int) -> None:
    """Expected-T-LRU without a threshold is LRU, with one known prompt length T-LRU: turns that differ, over traces."""
    import numpy as np

    from gnomon.methods.serve import tail_lru as t

    rng = np.random.default_rng(seed)
    differ = {AS_LRU: 0, AS_TAIL: 0}
    for _ in range(count):
        trace, capacity, xi = _small(rng, 24), int(rng.integers(1, 40)), int(rng.integers(0, 25))
        q, mu = int(rng.integers(0, 7)), float(rng.choice([0.0, 0.3]))
        pairs = {
            AS_LRU: (t.ExpectedTailOptimizedLRU(0, rng.integers(1, 7, 5).tolist(), mu), t.LRU()),
            AS_TAIL: (t.ExpectedTailOptimizedLRU(xi, [q], mu), t.TailOptimizedLRU(xi, q)),
        }
        for metric, (one, other) in pairs.items():
            same = t.simulate(trace, one, capacity).cached == t.simulate(trace, other, capacity).cached
            differ[metric] += int((~same).sum())
    for metric, number in differ.items():
        ctx.record(method="et-lru", metric=metric, value=number, unit="turns", tags={"traces": count})


def lines(ctx: StageContext) -> None:
    """Logical lines that `TailOptimizedLRU.victims` has beyond `LRU.victims`; a changed one counts too.

    Statements and headers of loops, without docstrings. What a policy is built with, and the history's length that the
    budget needs, are not counted, as in the paper.
    """
    import ast
    import difflib
    import inspect
    import textwrap

    from gnomon.methods.serve.tail_lru import LRU as Plain
    from gnomon.methods.serve.tail_lru import TailOptimizedLRU

    def logical(function: Any) -> list[str]:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(body, ast.FunctionDef)
        body.body = body.body[1:]  # the docstring
        return [line.strip() for line in ast.unparse(body).splitlines()]

    diff = list(difflib.ndiff(logical(Plain.victims), logical(TailOptimizedLRU.victims)))
    changed = sum(line.startswith(("+ ", "- ")) for line in diff)
    ctx.record(method=METHOD, metric=LINES, value=changed, unit="lines")


# --------------------------------------------------------------------------------------------- what is simulated


def sweep(
    ctx: StageContext,
    *,
    policy: str,
    capacity: int,
    xi_ms: float,
    reference_ms: float,
    slo_ms: float,
    alpha_ms: float,
    qhat: int,
    turns: int,
    seed: int,
) -> dict[str, float]:
    """One policy, capacity, threshold and random trace: tails, violations, and the excess beyond the optimum.

    Args:
        xi_ms: its threshold, of policies that take one.
        reference_ms: threshold at which the excess of every policy is counted.
    """
    from gnomon.methods.serve.tail_lru import LatencyModel, TailOptimizedBelady, simulate

    trace, latency = drawn(turns, seed), LatencyModel(alpha_ms / 1e3)
    found = simulate(
        trace, make(policy, trace, capacity, blocks(xi_ms, alpha_ms), qhat, seed), capacity, latency=latency
    )
    counted = blocks(reference_ms, alpha_ms)
    best = simulate(trace, TailOptimizedBelady(trace, threshold=counted), capacity).tel(counted)
    shown = tails(found, slo_ms)
    tags = {"capacity": capacity, "threshold": xi_ms if policy in THRESHOLDED else 0.0}
    budget = {"tokens": int(trace.prompt.sum() + trace.response.sum()), "calls": turns}
    for metric, value in shown.items():
        unit = "%" if metric == "violations" else "ms"
        ctx.record(
            method=policy, metric=metric, value=value, unit=unit, better="lower", tags=tags, budget=budget
        )
    for metric, value in ((EXCESS, found.tel(counted)), (ABOVE_BEST, found.tel(counted) - best)):
        ctx.record(
            method=policy, metric=metric, value=value, unit="tokens", better="lower", tags=tags, budget=budget
        )
    ctx.record(
        method=policy, metric="hits", value=100 * found.hit_tokens / max(1, int((trace.history + trace.prompt).sum())),
        unit="%", better="higher", tags=tags, budget=budget,
    )  # fmt: skip
    return shown


def gain(
    ctx: StageContext,
    *,
    capacity: int,
    xi_ms: float,
    slo_ms: float,
    alpha_ms: float,
    qhat: int,
    turns: int,
    seed: int,
) -> dict[str, float]:
    """By how many per cent T-LRU's tails are below LRU's, on one random trace."""
    from gnomon.methods.serve.tail_lru import LatencyModel, simulate

    trace, latency = drawn(turns, seed), LatencyModel(alpha_ms / 1e3)
    xi = blocks(xi_ms, alpha_ms)
    mine, other = (
        tails(simulate(trace, make(name, trace, capacity, xi, qhat, seed), capacity, latency=latency), slo_ms)
        for name in (METHOD, LRU)
    )
    return lowered(mine, other)


def judged(ctx: StageContext, *, of: Done, what: str, trials: int) -> None:
    """Record the gain of the chosen cell on a trace that didn't choose it."""
    tags = {"capacity": of.args["capacity"], "threshold": of.args["xi_ms"]}
    ctx.record(
        method=METHOD, metric=LOWER[what], value=of.value[what], unit="%", better="higher",
        tags=tags, budget={"trials": trials},
    )  # fmt: skip
