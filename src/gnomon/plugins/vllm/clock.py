"""How long the engine's steps take, also when the next one is scheduled before the last one's output is there."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

__all__ = ["Step", "StepClock"]

IN_FLIGHT = 16
"""Steps remembered while their output is awaited; pipelines are shorter, so older ones were dropped by the engine."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step ran.

    Attributes:
        rows: requests that decode one token.
        context: their context tokens in all.
        prefill: prompt tokens computed.
        started: when it was scheduled, on the monotonic clock.
        predicted: seconds expected; NaN without a prediction.
    """

    rows: int
    context: int
    prefill: int
    started: float
    predicted: float


class StepClock:
    """A step takes from the later of its scheduling and the last output, to its own output."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, Step] = OrderedDict()
        self._ended = 0.0

    def scheduled(self, output: Any, step: Step) -> None:
        """Note a step under the scheduler's output, which comes back with the model's."""
        self._steps[id(output)] = step
        while len(self._steps) > IN_FLIGHT:
            self._steps.popitem(last=False)

    def ended(self, output: Any, now: float) -> tuple[Step, float, float] | None:
        """The step, when it began to run and its seconds; None for a step that wasn't noted."""
        step = self._steps.pop(id(output), None)
        if step is None:
            return None
        began = max(step.started, self._ended)
        self._ended = now
        return step, began, now - began
