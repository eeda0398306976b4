"""The scheduler: whichever one vLLM chose, with the two policies on top.

All of it goes through overridden methods that pass their arguments on as they come (`*args`), so a vLLM that adds one
is no problem. `lru` and `eager` use the same class: what differs between two servers is the policy alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .cache import TailLRU
from .clock import Step, StepClock
from .metrics import attach
from .pacing import Pacer
from .settings import Settings

__all__ = ["Policies", "chosen", "named_scheduler", "with_policies"]

if TYPE_CHECKING:

    class _Scheduler:
        running: list[Any]
        requests: dict[str, Any]
        current_step: int
        kv_cache_manager: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any: ...
        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any: ...
        def make_stats(self, *args: Any, **kwargs: Any) -> Any: ...
        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any: ...
        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any: ...
        def _free_request_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Scheduler = object


class Policies(_Scheduler):
    """Mixin over a scheduler of vLLM v1."""

    gnomon_settings: Settings | None = None
    """Instead of the environment's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.gnomon_settings or Settings.from_environment()
        self.gnomon_clock = StepClock()
        self.gnomon_cache = TailLRU(settings, self.kv_cache_manager)
        self.gnomon_pacer = Pacer(settings)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the branches, then schedule as ever."""
        self.gnomon_pacer.hold(self.running, self.current_step)
        decoding = {request.request_id for request in self.running if not request.is_prefill_chunk}
        started = time.monotonic()
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        if scheduled:
            rows = [name for name in scheduled if name in decoding]
            context = sum(self.requests[name].num_computed_tokens for name in rows)
            prefill = sum(tokens for name, tokens in scheduled.items() if name not in decoding)
            step = Step(len(rows), context, prefill, started, float("nan"))
            if not prefill:
                step = replace(step, predicted=self.gnomon_pacer.predict(step.rows, step.context))
            self.gnomon_clock.scheduled(output, step)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn from the step's time, then go on as ever."""
        ended = self.gnomon_clock.ended(scheduler_output, time.monotonic())
        if ended is not None:
            step, began, seconds = ended
            ran = [self.requests.get(name) for name in scheduler_output.num_scheduled_tokens]
            past = [request for request in ran if request is not None and not request.is_prefill_chunk]
            self.gnomon_cache.step(step, seconds)
            self.gnomon_pacer.ended(step, began, seconds, past)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Enter the request."""
        if request.request_id not in self.requests:  # else the next piece of one whose input is streamed
            self.gnomon_pacer.arrive(request)
        return super().add_request(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics and the policies' counters."""
        stats = super().make_stats(*args, **kwargs)
        return None if stats is None else attach(stats, self._gnomon_counters())

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """After a reset nothing is safe, since nothing is there."""
        done = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.gnomon_cache.after_reset()
        return done

    def _gnomon_counters(self) -> dict[str, float]:
        return self.gnomon_cache.counters() | self.gnomon_pacer.counters()

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.gnomon_pacer.finish(request)
        return super()._free_request(request, *args, **kwargs)

    def _free_request_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.gnomon_cache.before_freeing(request)
        return super()._free_request_blocks(request, *args, **kwargs)


@functools.cache
def with_policies(base: type) -> type:
    """Subclass of a scheduler class that has the policies; itself if it has them."""
    if issubclass(base, Policies):
        return base
    return type(f"Gnomon{base.__name__}", (Policies, base), {})


def chosen(original: Callable[[Any], type]) -> Callable[[Any], type]:
    """`SchedulerConfig.get_scheduler_cls` that subclasses what it would have returned."""

    def get_scheduler_cls(self: Any) -> type:
        return with_policies(original(self))

    return get_scheduler_cls


@functools.cache
def named_scheduler(name: str) -> type:
    """`PaceScheduler` over vLLM's `Scheduler`, `PaceAsyncScheduler` over its `AsyncScheduler`, for `--scheduler-cls`.

    Without `GNOMON_VLLM` they run Pace with its defaults, and their counters stay in the engine's process.
    """
    import vllm

    from .install import require_hooks, require_version

    require_version(vllm.__version__)
    require_hooks()
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    settings = Settings.from_environment({"GNOMON_VLLM": "pace"}) if not _asked() else None
    base = with_policies(AsyncScheduler if name == "PaceAsyncScheduler" else Scheduler)
    return type(name, (base,), {"gnomon_settings": settings})


def _asked() -> bool:
    import os

    from . import POLICIES

    return bool(os.environ.get(POLICIES, "").strip())
