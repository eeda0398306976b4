"""Requests that branch: what a simulator or an engine is given to decode.

A request is a prompt and stages one after another; a stage is the lengths of its branches, one number in a serial
stage. All branches of a stage are ready at once, and the next stage begins when all have ended.

Here:  `mixed_workload`, the card's generator; `read_trace`, JSON lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.core.errors import UsageError, nearest, number

__all__ = ["DecodeRequest", "Mix", "mixed_workload", "read_trace"]


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One request.

    Attributes:
        prompt: its tokens, prefilled.
        stages: lengths of the branches of each stage, in tokens.
        arrival: seconds, for traces.
        weight: priority w_r, for the utility `priority`.
    """

    prompt: int
    stages: tuple[tuple[int, ...], ...]
    arrival: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.prompt < 0 or not self.stages or not all(self.stages):
            raise UsageError(
                f"A request needs a prompt of 0 tokens or more and at least one stage with one branch; got "
                f"prompt={self.prompt}, stages={self.stages}."
            )
        if min(min(stage) for stage in self.stages) < 1:
            raise UsageError(f"Each branch must have at least one token, got stages={self.stages}.")
        if not 0 <= number(self.arrival) < math.inf or not 0 <= number(self.weight) < math.inf:
            raise UsageError(
                f"arrival={self.arrival} and weight={self.weight} must be finite and not negative."
            )

    @property
    def parallel(self) -> bool:
        """Whether any stage branches."""
        return max(map(len, self.stages)) > 1

    @property
    def tokens(self) -> int:
        """Of all branches of all stages."""
        return sum(map(sum, self.stages))


Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What requests are drawn from; ranges include both ends."""

    parallel: float = 0.8
    """Share of requests that branch."""
    prompt: Range = (200, 1500)
    rounds: Range = (1, 2)
    """Parallel stages of a branching request."""
    branches: Range = (5, 16)
    branch_tokens: Range = (60, 200)
    stage_tokens: Range = (30, 90)
    """Of the serial stages before, between and after."""
    serial_tokens: Range = (100, 400)
    """Of a request that doesn't branch."""

    def __post_init__(self) -> None:
        if not 0 <= number(self.parallel) <= 1:
            raise UsageError(f"Mix: parallel={self.parallel} must lie in [0, 1].")
        for name in ("prompt", "rounds", "branches", "branch_tokens", "stage_tokens", "serial_tokens"):
            low, high = getattr(self, name)
            if not (0 if name == "prompt" else 1) <= low <= high:
                raise UsageError(f"Mix: {name}=({low}, {high}) must be positive and in order.")


def mixed_workload(count: int, mix: Mix, rng: np.random.Generator) -> list[DecodeRequest]:
    """Draw requests.

    Raises:
        UsageError: none asked for.
    """
    if count < 1:
        raise UsageError(f"A workload needs at least one request, got {count}.")

    def draw(between: Range) -> int:
        return int(rng.integers(between[0], between[1] + 1))

    found = []
    for _ in range(count):
        prompt, branching = draw(mix.prompt), bool(rng.random() < mix.parallel)
        stages: list[tuple[int, ...]] = []
        if branching:
            for _ in range(draw(mix.rounds)):
                stages.append((draw(mix.stage_tokens),))
                stages.append(tuple(draw(mix.branch_tokens) for _ in range(draw(mix.branches))))
            stages.append((draw(mix.stage_tokens),))
        else:
            stages.append((draw(mix.serial_tokens),))
        found.append(DecodeRequest(prompt, tuple(stages)))
    return found


FIELDS = ("prompt", "stages", "arrival", "weight")


def read_trace(path: str | Path) -> list[DecodeRequest]:
    """Requests from JSON lines such as `{"arrival": 0.5, "prompt": 300, "stages": [[40], [80, 95, 60], [30]]}`.

    Raises:
        UsageError: with the line: no JSON, unknown or missing columns, values that make no request, arrivals that
            go back or occur twice.
    """
    found: list[DecodeRequest] = []
    for at, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{Path(path).name}, line {at}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: no JSON ({error}). Each line must hold one request.") from None
        if not isinstance(data, dict):
            raise UsageError(f"{where}: not an object with {', '.join(FIELDS)}.")
        for name in data:
            if name not in FIELDS:
                raise UsageError(f"{where}: unknown column {name!r}.{nearest(name, FIELDS)}")
        request = _request(data, where)
        if found and request.arrival <= found[-1].arrival:
            what = "the same as" if request.arrival == found[-1].arrival else "before"
            raise UsageError(
                f"{where}: arrival {request.arrival:g} is {what} that of the line before. Sort the trace by arrival, "
                "and spread requests that share one."
            )
        found.append(request)
    if not found:
        raise UsageError(f"{Path(path).name} holds no request.")
    return found


def _request(data: dict[str, Any], where: str) -> DecodeRequest:
    prompt: Any = data.get("prompt")
    stages: Any = data.get("stages")
    fine = isinstance(prompt, int) and isinstance(stages, list)
    fine = fine and all(isinstance(stage, list) and _whole(stage) for stage in stages)
    if not fine:
        raise UsageError(
            f"{where}: prompt must be a number of tokens and stages lists of lengths, such as [[40], [80, 95]]; got "
            f"prompt={prompt!r}, stages={stages!r}."
        )
    arrival, weight = number(data.get("arrival", 0.0)), number(data.get("weight", 1.0))
    try:
        return DecodeRequest(prompt, tuple(map(tuple, stages)), arrival, weight)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _whole(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
