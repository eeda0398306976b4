r"""The least tail excess that any policy can reach, as a linear program: an oracle for small traces.

.. math:: \min \sum_t u_t,\quad u_t \ge H_t + q_t - x_t - \xi,\; u_t \ge 0

over feasible states: :math:`\sum_i x_{i,t} \le C`, :math:`0 \le x_{i,t} \le L_i`, and x_i grows at i's own turns only.
The integral optimum equals it (Theorem 1). Size grows with turns × conversations: tens of turns, not thousands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gnomon.core.errors import NumericalFailure, UsageError

from .policies import whole
from .trace import Trace, as_trace

__all__ = ["lp_optimal_tel"]

MOST = 200_000
"""Variables of a program, beyond which it is refused."""


def lp_optimal_tel(
    trace: Trace | Iterable[Any], C: int, xi: int, *, caching: str = "optional"
) -> float:  # C and xi as the paper writes them
    """Least tail excess in blocks of any policy with a cache of `C` blocks.

    Args:
        trace: turns by arrival, lengths in blocks.
        xi: ξ in blocks.
        caching: `optional`, or `forced`: after a turn its whole history is cached.

    Raises:
        UsageError: a trace that is too long for a linear program.
        NumericalFailure: no solution; under forced caching a history that is longer than the cache.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    turns = as_trace(trace)
    whole("lp_optimal_tel: C", C)
    whole("lp_optimal_tel: xi", xi)
    steps, people = len(turns), len(turns.names)
    if steps * (people + 1) > MOST:
        raise UsageError(
            f"{steps} turns of {people} conversations make a program of {steps * (people + 1):,} variables; at most "
            f"{MOST:,}. Take a shorter trace: TailOptimizedBelady reaches the same optimum at any length."
        )
    if not steps:
        return 0.0
    # Variables: x[t, i], cached after turn t, then u[t].
    length = turns.history + turns.prompt + turns.response
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def at_most(terms: list[tuple[int, float]], limit: float) -> None:
        rows.extend([len(limits)] * len(terms))
        columns.extend(column for column, _ in terms)
        values.extend(value for _, value in terms)
        limits.append(limit)

    bounds: list[tuple[float, float | None]] = []
    for t in range(steps):
        served = int(turns.conversation[t])
        at_most([(t * people + i, 1.0) for i in range(people)], C)
        for i in range(people):
            if i == served:
                bounds.append((length[t] if caching == "forced" else 0, length[t]))
            else:
                bounds.append((0, 0 if t == 0 else None))
                if t:
                    at_most([(t * people + i, 1.0), ((t - 1) * people + i, -1.0)], 0.0)
        found = [] if t == 0 else [((t - 1) * people + served, -1.0)]
        at_most([*found, (steps * people + t, -1.0)], float(xi - turns.history[t] - turns.prompt[t]))
    bounds += [(0, None)] * steps
    cost = np.zeros(steps * (people + 1))
    cost[steps * people :] = 1.0
    matrix = csr_matrix((values, (rows, columns)), shape=(len(limits), len(cost)))
    solved = linprog(cost, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    if solved.status != 0:
        raise NumericalFailure(f"The linear program has no solution: {solved.message}")
    return float(solved.fun)
