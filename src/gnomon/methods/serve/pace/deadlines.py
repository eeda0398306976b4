"""By when a row has to advance: three models, and a book that keeps what they need.

Paper: the minimum over requests of the time left (`request`); the authors' repository has deadlines of rows (`row`).
Inferred: `accumulated`, from "accumulated slack" in the abstract: time won by fast steps may be spent later.

=============  ================================================================================================
model          deadline
=============  ================================================================================================
`request`      last progress of any row of the request + SLO
`row`          start of the last step that advanced the row + SLO; a row first seen, or absent from the step
               before (it sat in a fork or a merge), counts as advanced now. Far in the past they are compressed
`accumulated`  first token + SLO * (steps so far in which the request advanced), the mean a TPOT asks for
=============  ================================================================================================

Before a request's first token, `request` and `accumulated` take its arrival + the SLO of the first token.

`row` deadlines collapse to width 1 under sustained contention: a deferred sibling soon is late, the slack is gone, and
so it stays. Use `request` unless the full step is far below the SLO.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from gnomon.core.errors import UsageError

from .config import PaceConfig

__all__ = ["DeadlineBook", "row_deadlines"]


def row_deadlines(last: Float[np.ndarray, " R"], now: float, slo: float) -> Float[np.ndarray, " R"]:
    """Deadlines of rows that last advanced in steps begun at `last`.

    d = last + SLO; where d lies before F = now - SLO it is F - SLO * u / (1 + u) with u = ln(1 + (F - d) / SLO):
    the order is kept and nothing lies before now - 2 * SLO.
    """
    deadline = last + slo
    floor = now - slo
    u = np.log1p(np.maximum(floor - deadline, 0.0) / slo)
    found: Float[np.ndarray, " R"] = np.where(deadline < floor, floor - slo * u / (1 + u), deadline)
    return found


@dataclass(slots=True)
class _Request:
    arrival: float
    first: float | None = None
    last: float = 0.0
    steps: int = 0


class DeadlineBook:
    """Deadlines of live requests and rows, for an engine.

    In each step: `resident` with all rows that are ready, `deadline` for each, then `advanced` with those that ran.
    Requests are entered by `arrive` and leave by `finish`.
    """

    def __init__(self, config: PaceConfig) -> None:
        self.config = config
        self._requests: dict[Hashable, _Request] = {}
        self._last: dict[Hashable, float] = {}

    def arrive(self, request: Hashable, now: float) -> None:
        """Enter a request that came at `now`.

        Raises:
            UsageError: it is there already.
        """
        if request in self._requests:
            raise UsageError(f"Request {request!r} arrived twice. Requests need names of their own.")
        self._requests[request] = _Request(now)

    def resident(self, rows: Iterable[Hashable], now: float) -> None:
        """Say which rows are ready, run or deferred: new ones are stamped `now`, absent ones forgotten."""
        self._last = {row: self._last.get(row, now) for row in rows}

    def deadline(self, request: Hashable, row: Hashable, now: float) -> float:
        """By when the row has to advance.

        Raises:
            UsageError: an unknown request, or, in the model `row`, a row that is not resident.
        """
        found = self._requests.get(request)
        if found is None:
            raise UsageError(f"Request {request!r} never arrived, or is finished. Call arrive first.")
        slo = self.config.tpot_slo_s
        if self.config.deadline_model == "row":
            if row not in self._last:
                raise UsageError(f"Row {row!r} is not resident. Call resident with all ready rows first.")
            return float(row_deadlines(np.array([self._last[row]]), now, slo)[0])
        if found.first is None:
            return found.arrival + self.config.ttft_slo_s
        return (
            found.first + slo * found.steps
            if self.config.deadline_model == "accumulated"
            else found.last + slo
        )

    def advanced(self, rows: Mapping[Hashable, Hashable], started: float, ended: float) -> None:
        """Note the rows that ran in a step.

        Args:
            rows: request of each row that ran.
        """
        for row in rows:
            self._last[row] = started
        for request in dict.fromkeys(rows.values()):
            found = self._requests[request]
            found.first = ended if found.first is None else found.first
            found.last = ended
            found.steps += 1

    def finish(self, request: Hashable) -> None:
        """Forget a request; rows are forgotten when they are resident no more."""
        self._requests.pop(request, None)
