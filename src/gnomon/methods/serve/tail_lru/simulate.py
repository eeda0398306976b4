"""The simulator: a trace, a policy, a capacity; what each turn had to compute.

Order of events at a turn: its history's cached prefix is counted as a hit; the rest of history and prompt is computed;
the turn is served whole; the policy keeps of it what it likes (all of it under forced caching); victims go until the
cache fits again. Time passes between turns only.

`impl="reference"` runs the policy's Python, the contract; `"compiled"` runs the same decisions in C++.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import GnomonError, UsageError, number

from .latency import LatencyModel
from .policies import EvictionPolicy, Policy, whole
from .trace import Floats, Ints, Trace, as_trace

__all__ = ["CacheSimResult", "Caching", "Measured", "choose", "simulate"]

Caching = Literal["optional", "forced"]
Impl = Literal["auto", "compiled", "reference"]


class Measured:
    """Times and tails of served requests, from their uncached lengths."""

    latency: LatencyModel

    @property
    def uncached(self) -> Ints:
        """b (n,) in the trace's unit: history plus prompt, less what was cached."""
        raise NotImplementedError

    @property
    def first_turn(self) -> NDArray[np.bool_]:
        """Which of them no cache could have served (n,)."""
        raise NotImplementedError

    @property
    def ttft(self) -> Floats:
        """Seconds to the first token (n,). The latency model is per unit of the trace."""
        return np.asarray(
            self.latency.beta_s + self.latency.alpha_s_per_block * self.uncached, dtype=np.float64
        )

    def tel(self, xi: int) -> int:
        r"""Tail excess :math:`\sum (b - \xi)^+` in the trace's unit; times α it is the paper's TEL in seconds."""
        return int(np.maximum(self.uncached - whole("xi", xi), 0).sum())

    def percentile(self, p: float, *, first_turns: bool = True) -> float:
        """The p-th percentile of TTFT in seconds, NumPy's linear interpolation.

        Args:
            first_turns: count those that open a conversation, which no cache can serve.
        """
        if not 0 <= number(p) <= 100:
            raise UsageError(f"percentile({p!r}): p lies between 0 and 100.")
        return float(np.percentile(self._times(first_turns), p))

    def violation_rate(self, slo_s: float, *, first_turns: bool = True) -> float:
        """Share of turns whose TTFT is above `slo_s` seconds."""
        if not number(slo_s) >= 0:
            raise UsageError(f"violation_rate({slo_s!r}): the SLO is a number of seconds ≥ 0.")
        return float((self._times(first_turns) > slo_s).mean())

    def _times(self, first_turns: bool) -> Floats:
        times = self.ttft if first_turns else self.ttft[~self.first_turn]
        if not len(times):
            raise UsageError("No turn to count: the trace is empty, or every conversation has one turn only.")
        return times


@dataclass(frozen=True, eq=False)
class CacheSimResult(Measured):
    """What each of n turns cost.

    Attributes:
        trace: the turns.
        cached: x (n,), blocks that were cached on arrival.
        latency: turns lengths into seconds.
        block_size: lengths in the trace per block; 1 where the trace is in blocks already.
        impl: what ran, `compiled` or `reference`.
    """

    trace: Trace
    cached: Ints
    latency: LatencyModel
    block_size: int = 1
    impl: str = "reference"

    @property
    def uncached(self) -> Ints:
        """See :class:`Measured`."""
        return self.trace.history + self.trace.prompt - self.cached * self.block_size

    @property
    def first_turn(self) -> NDArray[np.bool_]:
        """See :class:`Measured`."""
        return self.trace.first_turn

    @property
    def hit_tokens(self) -> int:
        """Cached lengths over all turns, in the trace's unit."""
        return int(self.cached.sum()) * self.block_size


def choose(policy: EvictionPolicy, impl: str = "auto") -> tuple[str, str]:
    """(`compiled` or `reference`, why) for a policy.

    Raises:
        UsageError: unknown name, or `compiled` was asked for and can't run.
    """
    from gnomon.kernels import cache_sim

    if impl == "reference":
        return impl, "asked for"
    has = policy.compiled() if isinstance(policy, Policy) else None
    if has is None:
        cache_sim.choice(impl=impl)  # refuses unknown names
        reason = f"{type(policy).__name__} runs in Python only"
        if impl == "compiled":
            raise UsageError(f"simulate: impl='compiled' was asked for, but {reason}. impl='auto' runs it.")
        return "reference", reason
    choice = cache_sim.choice(impl=impl)
    return choice.name, choice.reason


def simulate(
    trace: Trace | Iterable[Any],
    policy: EvictionPolicy,
    capacity: int,
    caching: Caching = "optional",
    latency: LatencyModel | None = None,
    *,
    block_size: int = 1,
    oversize: Literal["prefix", "raise"] = "prefix",
    impl: str = "auto",
) -> CacheSimResult:
    """Run a trace through a cache of `capacity` blocks.

    Args:
        trace: turns by arrival; lengths in tokens (or in blocks, with `block_size` 1).
        policy: is reset first. Its thresholds are in blocks.
        caching: `optional`: a served turn need not be kept. `forced`: it is kept whole, others make room.
        latency: per unit of the trace; by default 1 s each, so that `ttft` is `uncached`.
        block_size: units of the trace in a block; only whole blocks are kept, and histories count rounded up.
        oversize: of a turn longer than the whole cache keep a prefix, or refuse it before the run. Forced caching
            always refuses it.
        impl: `auto`, `compiled` or `reference`.

    Raises:
        UsageError: a bad argument, or a turn that doesn't fit.
        GnomonError: the policy broke the protocol.
    """
    turns = as_trace(trace)
    whole("simulate: capacity", capacity)
    whole("simulate: block_size", block_size, 1)
    for name, value, known in (
        ("caching", caching, ("optional", "forced")), ("oversize", oversize, ("prefix", "raise"))
    ):  # fmt: skip
        if value not in known:
            raise UsageError(f"simulate: {name}={value!r} must be one of {', '.join(known)}.")
    if caching == "forced" or oversize == "raise":
        _refuse_oversize(turns, capacity, block_size, caching)
    name, _ = choose(policy, impl)
    forced = caching == "forced"
    run = _compiled if name == "compiled" else _reference
    cached = run(turns, policy, capacity, block_size, forced)
    return CacheSimResult(turns, cached, latency or LatencyModel(1.0), block_size, name)


def _refuse_oversize(trace: Trace, capacity: int, block: int, caching: str) -> None:
    lengths = (trace.history + trace.prompt + trace.response) // block
    if len(lengths) and lengths.max() > capacity:
        at = int(np.argmax(lengths > capacity))
        raise UsageError(
            f"Turn {at} leaves a history of {lengths[at]} blocks, more than the whole cache ({capacity}); with "
            f"caching={caching!r} it can't be served. Take a capacity of at least {lengths.max()}, or optional "
            "caching with oversize='prefix'."
        )


def _reference(trace: Trace, policy: EvictionPolicy, capacity: int, block: int, forced: bool) -> Ints:
    """Blocks cached on arrival (n,), by the policy's own Python; its answers are checked as it goes."""
    policy.reset()
    served = getattr(policy, "on_served", None)
    cached: dict[Hashable, int] = {}
    found = np.zeros(len(trace), dtype=np.int64)
    used = 0
    for at, (turn, history) in enumerate(zip(trace, trace.history.tolist(), strict=True)):
        conv = turn.conversation
        has = cached.get(conv, 0)
        found[at] = has
        if served is not None:
            served(-(-(history + turn.prompt_len - has * block) // block))
        total = history + turn.prompt_len + turn.response_len
        keep = policy.on_turn(conv, turn.time, -(-total // block), total // block, forced)
        if not 0 <= keep <= total // block:
            raise GnomonError(
                f"{type(policy).__name__} keeps {keep} of {total // block} blocks at turn {at}."
            )
        used += keep - has
        cached[conv] = keep
        if used > capacity:
            before = used
            for victim, left in policy.victims(used - capacity, (conv,) if forced else ()):
                if not 0 <= left < cached.get(victim, 0):
                    raise GnomonError(
                        f"{type(policy).__name__} cuts {victim!r} from {cached.get(victim, 0)} to {left} blocks at "
                        f"turn {at}."
                    )
                used -= cached[victim] - left
                cached[victim] = left
                policy.on_trim(victim, left)
            if used != capacity:
                raise GnomonError(
                    f"{type(policy).__name__} freed {before - used} of {before - capacity} blocks at turn {at}."
                )
    return found


def _compiled(trace: Trace, policy: EvictionPolicy, capacity: int, block: int, forced: bool) -> Ints:
    from gnomon.kernels import cache_sim

    has = policy.compiled() if isinstance(policy, Policy) else None
    assert has is not None, "the chooser let it through"
    return cache_sim.run(
        time=trace.time, conversation=trace.conversation, prompt=trace.prompt, response=trace.response,
        following=trace.next_position, conversations=len(trace.names), capacity=capacity, block=block, forced=forced,
        order=has.order, budget=has.budget, admit=has.admit, min_len=has.min_len, xi=has.xi, qhat=has.qhat,
        samples=np.array(has.samples, dtype=np.int64), death_rate=has.death_rate, turn_rate=has.turn_rate,
    )  # fmt: skip
