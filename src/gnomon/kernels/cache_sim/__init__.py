"""A prompt cache simulated turn by turn, in C++: the same decisions as the policies' Python, on one thread.

The contract is the plain Python of `methods.serve.tail_lru`, run by `simulate(..., impl="reference")`; here are only
numbers. A policy is an order of victims, a budget, and what is kept after a turn:

=========  ==================================================================================================
order      recency (τ), furthest (next turn), arrival (into the cache), frequency (turns so far), expected (v)
budget     none, fixed (L + Q̂ − ξ), exact (L + next prompt − ξ; 0 if there is none): cut to it first
admit      all, long (≥ min_len, else nothing), returning (nothing after the last turn), budget (the exact one)
=========  ==================================================================================================

Foresight counts as the trace does: `exact`, `returning` and `furthest` look at the conversation's next turn.
Two linked lists for recency, heaps with stale entries for the other orders: O(1) and O(log n) a turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import GnomonError, UsageError, unknown
from .. import native
from ..choosing import Choice

__all__ = ["ADMITS", "BUDGETS", "ORDERS", "choice", "run"]

ORDERS = ("recency", "furthest", "arrival", "frequency", "expected")
BUDGETS = ("none", "fixed", "exact")
ADMITS = ("all", "long", "returning", "budget")


def choice(device: str = "cpu", *, impl: str = "auto") -> Choice:
    """What runs, `compiled` or `reference`, and why.

    Raises:
        UsageError: unknown name, or `compiled` was asked for and can't run.
    """
    if impl not in ("auto", "compiled", "reference"):
        raise unknown("implementation", impl, ["auto", "compiled", "reference"])
    reason = native.problem()
    if impl == "compiled" and reason:
        raise UsageError(f"cache_sim: impl='compiled' was asked for, but {reason}. impl='auto' runs here.")
    if impl == "reference" or reason:
        return Choice("reference", reason or "asked for")
    return Choice("compiled", "fastest" if impl == "auto" else "asked for")


def run(
    *,
    time: NDArray[np.float64],
    conversation: NDArray[np.int64],
    prompt: NDArray[np.int64],
    response: NDArray[np.int64],
    following: NDArray[np.int64],
    conversations: int,
    capacity: int,
    block: int = 1,
    forced: bool = False,
    order: str = "recency",
    budget: str = "none",
    admit: str = "all",
    min_len: int = 0,
    xi: int = 0,
    qhat: int = 0,
    samples: NDArray[np.int64] | None = None,
    death_rate: float = 0.0,
    turn_rate: float = 1.0,
) -> NDArray[np.int64]:
    """Blocks cached at each turn's arrival (n,).

    Args:
        time: seconds (n,), of `expected` alone.
        conversation: codes (n,) in [0, conversations).
        prompt, response: lengths (n,) ≥ 0.
        following: index of the same conversation's next turn (n,), −1 for none.
        capacity: blocks; `block` units of length make one.
        forced: every turn is kept whole; the caller has made sure that none is larger than the capacity.
        samples: lengths of prompts in rising order, of `expected` alone.

    Raises:
        UsageError: unknown mode; arrays that don't belong together.
        GnomonError: no compiled library, or no memory.
    """
    for kind, value, known in (
        ("order", order, ORDERS),
        ("budget", budget, BUDGETS),
        ("admit", admit, ADMITS),
    ):
        if value not in known:
            raise unknown(kind, value, known)
    columns: list[NDArray[Any]] = [np.ascontiguousarray(time, dtype=np.float64)]
    columns += [np.ascontiguousarray(c, dtype=np.int64) for c in (conversation, prompt, response, following)]
    drawn = np.ascontiguousarray([] if samples is None else samples, dtype=np.int64)
    _check(columns, conversations, capacity, block, order, drawn)
    if reason := native.problem():
        raise GnomonError(
            f"The compiled cache simulator can't run here: {reason}. The reference runs anywhere."
        )
    out = np.empty(len(columns[0]), dtype=np.int64)
    numbers = np.array(
        [
            *(len(out), conversations, capacity, block, forced),
            *(ORDERS.index(order), BUDGETS.index(budget), ADMITS.index(admit)),
            *(min_len, xi, qhat, len(drawn)),
        ],
        dtype=np.int64,
    )
    rates = np.array([death_rate, turn_rate], dtype=np.float64)
    status = native.library().gnomon_cache_sim(
        numbers.ctypes.data,
        rates.ctypes.data,
        *(c.ctypes.data for c in columns),
        drawn.ctypes.data,
        out.ctypes.data,
    )
    if status:
        raise GnomonError("The compiled cache simulator ran out of memory.")
    return out


def _check(
    columns: list[NDArray[Any]],
    conversations: int,
    capacity: int,
    block: int,
    order: str,
    samples: NDArray[np.int64],
) -> None:
    """Refuse what would read or write outside the arrays, or overflow."""
    time, conversation, prompt, response, following = columns
    n = len(time)
    if any(c.ndim != 1 or len(c) != n for c in columns):
        raise UsageError(f"cache_sim: columns of shapes {[c.shape for c in columns]} must have one length.")
    if capacity < 0 or block < 1:
        raise UsageError(f"cache_sim: capacity={capacity} must be ≥ 0 and block={block} ≥ 1.")
    if conversations > 2**31 - 2 or (
        n and not 0 <= int(conversation.min()) <= int(conversation.max()) < conversations
    ):
        raise UsageError(f"cache_sim: codes of conversations must lie in [0, {conversations}), below 2^31.")
    if n and (int(following.max()) >= n or int(following.min()) < -1):
        raise UsageError(f"cache_sim: following must be indices below {n}, or −1.")
    if n and (min(int(prompt.min()), int(response.min())) < 0 or int(prompt.sum() + response.sum()) > 2**53):
        raise UsageError("cache_sim: lengths must be ≥ 0 and sum to at most 2^53.")
    if order == "expected" and (not len(samples) or np.any(np.diff(samples) < 0)):
        raise UsageError("cache_sim: samples must be given in rising order.")
