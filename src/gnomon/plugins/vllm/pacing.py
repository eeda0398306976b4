"""Pace in vLLM: which branches the next step leaves out.

Paper: Pace, Algorithm 1 (`gnomon.methods.serve.pace`). A deferred branch keeps its KV and skips the step: the scheduler
       is told that it isn't eligible yet, so it stays among the running requests and holds its place ("by omission").
Here:  `Pacer`, one for each scheduler, and :func:`group_of`, which says what belongs together.

Branches by request id, with what vLLM puts around the ids of its clients:

=============================================  =====================================================================
id in the engine                               group
=============================================  =====================================================================
`3_chatcmpl-X-1a2b3c4d`                        `chatcmpl-X-1a2b3c4d`: sample 3 of one request with n > 1
`chatcmpl-job7::b3-1a2b3c4d`                   `chatcmpl-job7`: the client sent `X-Request-Id: job7::b3`
anything else                                  itself, a group of one, which is never deferred
=============================================  =====================================================================

Limits: prefill is not regulated, only decoding; the predictor knows steps that only decode, and learns from them.
       The utility `priority` has nothing to read priorities from. Penalties, logprobs and sampling don't depend on when
       a row runs, but rows that share one random stream would: give each branch its own seed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

from gnomon.methods.serve.pace import (
    BranchRow,
    DeadlineBook,
    LatencyPredictor,
    PaceConfig,
    build_groups,
    make_policy,
)

from .clock import Step
from .settings import Settings

__all__ = ["SEPARATOR", "Pacer", "group_of"]

SEPARATOR = "::"
"""In a request id: what comes before it names the group, what follows the branch."""
_CHILD = re.compile(r"\d+_(?=.)")
WARM_UP = 4
"""First decoding steps that aren't recorded: they compile and allocate."""


def group_of(request_id: str) -> str:
    """The group of a request by its id.

    >>> group_of("1_cmpl-a-0-12345678"), group_of("chatcmpl-job7::b3-12345678"), group_of("cmpl-a-0-12345678")
    ('cmpl-a-0-12345678', 'chatcmpl-job7', 'cmpl-a-0-12345678')
    """
    rest = _CHILD.sub("", request_id, count=1) if _CHILD.match(request_id) else request_id
    head, separator, _ = rest.partition(SEPARATOR)
    return head if separator and head else rest


class Pacer:
    """Plans each step of one scheduler.

    Args:
        clock, wall: the monotonic clock, and the one of arrival times.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config = PaceConfig(
            rho=settings.rho,
            tpot_slo_s=settings.tpot_ms / 1000,
            ttft_slo_s=settings.slo_ms / 1000,
            deadline_model=settings.deadline_model,  # type: ignore[arg-type]
        )
        self.policy = make_policy(settings.branch_policy)
        self.eager = settings.branch_policy == "eager"
        self.predictor = LatencyPredictor(
            window=max(200, settings.min_samples),
            refit_every_s=settings.refit_every_s,
            min_samples=settings.min_samples,
        )
        self.clock, self.wall = clock, wall
        self.deadlines = DeadlineBook(self.config)
        self._members: dict[str, set[str]] = {}
        self._seen_steps = 0
        self._counts: dict[str, float] = {}

    # -- requests come and go -------------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """A request was added; the first of a group starts its deadlines."""
        group = group_of(request.request_id)
        members = self._members.setdefault(group, set())
        if not members:
            waited = max(0.0, self.wall() - request.arrival_time)
            self.deadlines.arrive(group, self.clock() - waited)
        members.add(request.request_id)

    def finish(self, request: Any) -> None:
        """A request ended, by itself or by its client."""
        group = group_of(request.request_id)
        members = self._members.get(group)
        if members is None:
            return
        members.discard(request.request_id)
        if not members:
            del self._members[group]
            self.deadlines.finish(group)

    # -- steps ----------------------------------------------------------------------------------------

    def hold(self, running: list[Any], step: int) -> int:
        """Make the deferred among the running requests ineligible for the next step.

        Args:
            running: the scheduler's running requests.
            step: its counter, which it raises by one before it looks at them.

        Returns:
            how many are held.
        """
        ready = [request for request in running if decodes(request, step)]
        if not ready:
            return 0
        groups = [group_of(request.request_id) for request in ready]
        if self.eager or len(set(groups)) == len(groups):
            self._count("pace_admitted_rows", len(ready))
            return 0
        now = self.clock()
        names = [request.request_id for request in ready]
        self.deadlines.resident(names, now)
        rows = [
            BranchRow(
                index=index,
                group=group,
                context_len=request.num_tokens,
                deadline=self.deadlines.deadline(group, request.request_id, now),
                progress=request.num_output_tokens + request.num_output_placeholders,
                prefix_len=min(request.num_prompt_tokens, request.num_tokens),
            )
            for index, (group, request) in enumerate(zip(groups, ready, strict=True))
        ]
        plan = self.policy.select(build_groups(rows), self.predictor, self.config, now)
        for index in plan.deferred:
            request = ready[index]
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 2)
        self._count("pace_admitted_rows", len(plan.admitted))
        self._count("pace_deferred_rows", len(plan.deferred))
        return len(plan.deferred)

    def predict(self, rows: int, context: int) -> float:
        """Expected seconds of a step that only decodes; NaN before there is a fit."""
        return self.predictor.predict(rows, context) if self.predictor.calibrated else math.nan

    def ended(self, step: Step, began: float, seconds: float, requests: list[Any]) -> None:
        """Learn from a step that ended.

        Args:
            requests: those that ran and are past their prompt.
        """
        if requests:
            rows = {request.request_id: group_of(request.request_id) for request in requests}
            rows = {name: group for name, group in rows.items() if group in self._members}
            self.deadlines.advanced(rows, began, began + seconds)
        if step.prefill or not step.rows:
            return
        if not math.isnan(step.predicted):
            self._count("pace_steps", 1)
            self._count("pace_predicted_seconds", step.predicted)
            self._count("pace_measured_seconds", seconds)
        self._seen_steps += 1
        if self._seen_steps > WARM_UP:
            self.predictor.record(step.rows, step.context, seconds, now=began + seconds)

    def counters(self) -> dict[str, float]:
        """What happened since the last call."""
        found, self._counts = self._counts, {}
        return found

    def _count(self, name: str, value: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + value


def decodes(request: Any, step: int) -> bool:
    """Whether the scheduler would run one decoding step of a running request in the step after `step`.

    Not while its prompt is being computed, nor when its last token is already under way (asynchronous scheduling), nor
    when the scheduler itself holds it.
    """
    if request.is_prefill_chunk or request.num_computed_tokens < request.num_prompt_tokens:
        return False
    if request.next_decode_eligible_step > step + 1:
        return False
    under_way = request.num_output_placeholders
    last = under_way > 0 and (
        request.num_computed_tokens + 2 - under_way >= request.num_prompt_tokens + request.max_tokens
    )
    return not last
