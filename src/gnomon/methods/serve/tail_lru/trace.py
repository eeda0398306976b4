"""Traces: turns of conversations in the order of their arrival, as columns; what the future holds for each of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnomon.core.errors import UsageError, number

__all__ = ["Trace", "TraceOracle", "Turn", "as_trace", "synthetic"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Turn(NamedTuple):
    """One request: its arrival in seconds, its conversation, lengths of prompt (new part only) and response."""

    time: float
    conversation: Hashable
    prompt_len: int
    response_len: int


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace as columns of n turns, ordered by arrival.

    Attributes:
        time: seconds, never falling; strictly rising inside a conversation.
        conversation: codes 0, 1, … by first arrival.
        prompt: new tokens (or blocks) of the turn's prompt, ≥ 0; the history is not in it.
        response: tokens of the answer, ≥ 0.
        names: what the codes stand for.
    """

    time: Floats
    conversation: Ints
    prompt: Ints
    response: Ints
    names: tuple[Hashable, ...]

    def __post_init__(self) -> None:
        sizes = {len(column) for column in (self.time, self.conversation, self.prompt, self.response)}
        if len(sizes) != 1:
            raise UsageError(f"The columns of a trace have different lengths: {sorted(sizes)}.")
        for name in ("prompt", "response"):
            column = getattr(self, name)
            if len(column) and column.min() < 0:
                at = int(column.argmin())
                raise UsageError(
                    f"Turn {at}: a {name} of {column[at]} tokens; lengths are whole numbers ≥ 0."
                )
        if len(self.time) and self.prompt.sum() + self.response.sum() > 2**53:
            raise UsageError("The lengths of this trace sum to more than 2^53: are they tokens?")
        _check_times(self.time, self.conversation)

    @classmethod
    def of(cls, turns: Iterable[Turn | tuple[float, Hashable, int, int]]) -> Trace:
        """From turns in the order of their arrival.

        Raises:
            UsageError: a time that is no finite number or before the one above it, a length that is no whole
                number ≥ 0, or two turns of one conversation at one time.
        """
        rows = [Turn(*turn) for turn in turns]
        codes: dict[Hashable, int] = {}
        for at, row in enumerate(rows):
            codes.setdefault(row.conversation, len(codes))
            for name, value in (("prompt_len", row.prompt_len), ("response_len", row.response_len)):
                if isinstance(value, bool) or not isinstance(value, int | np.integer):
                    raise UsageError(
                        f"Turn {at}: {name}={value!r} must be a whole number of tokens or blocks."
                    )
        return cls(
            np.array([number(row.time) for row in rows], dtype=np.float64),
            np.array([codes[row.conversation] for row in rows], dtype=np.int64),
            np.array([row.prompt_len for row in rows], dtype=np.int64),
            np.array([row.response_len for row in rows], dtype=np.int64),
            tuple(codes),
        )

    def __len__(self) -> int:
        return len(self.time)

    def __iter__(self) -> Iterator[Turn]:
        columns = (self.time, self.conversation, self.prompt, self.response)
        for time, code, prompt, response in zip(*(c.tolist() for c in columns), strict=True):
            yield Turn(time, self.names[code], prompt, response)

    @cached_property
    def history(self) -> Ints:
        """H (n,): length of each turn's history before it."""
        total = self.prompt + self.response
        order = np.argsort(self.conversation, kind="stable")
        running = np.cumsum(total[order]) - total[order]
        first = np.flatnonzero(np.diff(self.conversation[order], prepend=-1))
        running -= np.repeat(running[first], np.diff(np.append(first, len(order)))) if len(order) else 0
        history = np.empty_like(total)
        history[order] = running
        return history

    @cached_property
    def next_position(self) -> Ints:
        """Index of the same conversation's next turn (n,), −1 where there is none."""
        order = np.argsort(self.conversation, kind="stable")
        following = np.full(len(self), -1, dtype=np.int64)
        same = self.conversation[order][1:] == self.conversation[order][:-1]
        following[order[:-1][same]] = order[1:][same]
        return following

    @cached_property
    def first_turn(self) -> NDArray[np.bool_]:
        """Which turns open their conversation (n,): no cache can serve them."""
        first = np.zeros(len(self), dtype=bool)
        first[np.unique(self.conversation, return_index=True)[1]] = True
        return first

    def scaled(self, factor: float) -> Trace:
        """The same turns with arrival times multiplied by `factor` > 0."""
        if not 0 < number(factor) < math.inf:
            raise UsageError(f"Times can only be scaled by a positive number, got {factor!r}.")
        return Trace(self.time * factor, self.conversation, self.prompt, self.response, self.names)

    def head(self, turns: int) -> Trace:
        """The first `turns` turns."""
        return self.select(np.arange(len(self)) < turns)

    def halves(self) -> tuple[Trace, Trace]:
        """Conversations by turns into two halves of their own, in the order of their first arrival."""
        return self.select(self.conversation % 2 == 0), self.select(self.conversation % 2 == 1)

    def select(self, keep: NDArray[np.bool_]) -> Trace:
        """The turns at which `keep` (n,) is true."""
        old = self.conversation[keep]
        kept, first = np.unique(old, return_index=True)
        kept = kept[np.argsort(first)]
        code = np.full(len(self.names), -1, dtype=np.int64)
        code[kept] = np.arange(len(kept))
        names = tuple(self.names[k] for k in kept)
        return Trace(self.time[keep], code[old], self.prompt[keep], self.response[keep], names)


def as_trace(trace: Trace | Sequence[Turn] | Iterable[Any]) -> Trace:
    """A :class:`Trace` of whatever turns were given."""
    return trace if isinstance(trace, Trace) else Trace.of(trace)


def _check_times(time: Floats, conversation: Ints) -> None:
    if not np.isfinite(time).all():
        at = int(np.argmin(np.isfinite(time)))
        raise UsageError(f"Turn {at} arrives at {time[at]}: times are finite numbers of seconds.")
    if (falls := np.flatnonzero(np.diff(time) < 0)).size:
        at = int(falls[0]) + 1
        raise UsageError(
            f"Turn {at} arrives at {time[at]:g} s, before turn {at - 1} at {time[at - 1]:g} s. Sort the trace by "
            "arrival; a policy may not see the future."
        )
    order = np.argsort(conversation, kind="stable")
    same = (np.diff(conversation[order]) == 0) & (np.diff(time[order]) == 0)
    if same.any():
        at = int(order[1:][same][0])
        raise UsageError(
            f"Turn {at} arrives at {time[at]:g} s, as an earlier turn of its conversation does: a turn can't begin "
            "before the one above it was answered. Give times of a finer unit."
        )


@dataclass(frozen=True, eq=False)
class TraceOracle:
    """What hindsight knows: by conversation and number of its turn, when it comes next and how long its prompt is."""

    trace: Trace

    @classmethod
    def of(cls, trace: Trace | Iterable[Any] | TraceOracle) -> TraceOracle:
        """Of a trace, or the oracle that was given."""
        return trace if isinstance(trace, TraceOracle) else cls(as_trace(trace))

    @cached_property
    def _following(self) -> dict[tuple[Hashable, int], tuple[int, int] | None]:
        seen: dict[int, int] = {}
        known: dict[tuple[Hashable, int], tuple[int, int] | None] = {}
        columns = self.trace.conversation.tolist(), self.trace.next_position.tolist()
        for code, after in zip(*columns, strict=True):
            seen[code] = seen.get(code, 0) + 1
            after_it = None if after < 0 else (after, int(self.trace.prompt[after]))
            known[self.trace.names[code], seen[code]] = after_it
        return known

    def following(self, conversation: Hashable, turn: int) -> tuple[int, int] | None:
        """(index in the trace, prompt length) of the turn after this conversation's turn 1, 2, …; None: it ends.

        Raises:
            UsageError: the trace has no such turn, so the oracle belongs to another one.
        """
        try:
            return self._following[conversation, turn]
        except KeyError:
            raise UsageError(
                f"The oracle's trace has no turn {turn} of conversation {conversation!r}: a policy with foresight "
                "must be given the trace that it is run on."
            ) from None


def synthetic(
    turns: int,
    *,
    generator: np.random.Generator,
    conversation_rate: float = 1.0,
    turn_rate: float = 3.0,
    mean_turns: float = 3.5,
    prompt_mean: float = 200.0,
    prompt_sigma: float = 0.7,
    response_mu: float = math.log(350) - 0.3,
    response_sigma: float = 0.8,
) -> Trace:
    r"""Random conversations as the method card describes them.

    Conversations are born with Exp(`conversation_rate`) gaps; each has a geometric number of turns with mean
    `mean_turns` and Exp(`turn_rate`) gaps (rates per second). Prompts are lognormal with the given *mean*, responses
    :math:`e^{N(\mu,\sigma)}`; both are rounded up to whole tokens. The first `turns` turns in time order are kept.
    """
    for name, value, low in (
        ("turns", turns, 1), ("mean_turns", mean_turns, 1), ("conversation_rate", conversation_rate, 0),
        ("turn_rate", turn_rate, 0), ("prompt_mean", prompt_mean, 0), ("prompt_sigma", prompt_sigma, 0),
        ("response_sigma", response_sigma, 0),
    ):  # fmt: skip
        if not low <= number(value) < math.inf or (name.endswith("rate") and not value > 0):
            raise UsageError(f"synthetic: {name}={value!r} is below {low} or not finite.")
    births = turns  # at least one turn each, so the first `turns` turns are among theirs
    start = np.cumsum(generator.exponential(1 / conversation_rate, births))
    counts = generator.geometric(1 / mean_turns, births)
    code = np.repeat(np.arange(births), counts)
    gaps = generator.exponential(1 / turn_rate, len(code))
    first = np.cumsum(counts) - counts
    gaps[first] = 0.0
    elapsed = np.cumsum(gaps)
    time = start[code] + elapsed - elapsed[first][code]
    mu = math.log(prompt_mean) - prompt_sigma**2 / 2
    prompt = np.ceil(np.exp(generator.normal(mu, prompt_sigma, len(code)))).astype(np.int64)
    response = np.ceil(np.exp(generator.normal(response_mu, response_sigma, len(code)))).astype(np.int64)
    order = np.lexsort((code, time))[:turns]
    whole = Trace(time[order], code[order], prompt[order], response[order], tuple(range(births)))
    return whole.select(np.ones(len(whole), dtype=bool))
