"""Counters of the policies, from the engine's process to Prometheus.

They travel inside vLLM's scheduler statistics, as one more field: the engine sends what happened since its last
message, the front end adds it up. A front end without the plug-in leaves the field unread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

FIELD = "gnomon"
"""Name of the field in the statistics."""

COUNTERS = {
    "tail_lru_safe_evictions": "Cached blocks evicted that could not hurt the tail",
    "tail_lru_lru_evictions": "Cached blocks evicted by recency",
    "tail_lru_safe_hits": "Blocks taken back for a request from among those that could not hurt the tail",
    "tail_lru_lru_hits": "Blocks taken back for a request from among the others",
    "pace_admitted_rows": "Decoding requests that a step ran",
    "pace_deferred_rows": "Branches that a step left out",
    "pace_steps": "Decoding steps with a prediction",
    "pace_predicted_seconds": "Predicted time of these steps",
    "pace_measured_seconds": "Measured time of these steps",
}
"""What only grows; on `/metrics` with the prefix gnomon_ and the suffix _total."""

GAUGES = {
    "tail_lru_safe_blocks": "Free blocks that could not hurt the tail",
    "tail_lru_xi_tokens": "Threshold in tokens; 0 until prefill times are known",
}
"""What is so now."""

__all__ = ["COUNTERS", "FIELD", "GAUGES", "attach", "let_counters_travel", "read", "with_logger"]


@functools.cache
def stats_class() -> type:
    """vLLM's `SchedulerStats` with the field."""
    from vllm.v1.metrics.stats import SchedulerStats

    return make_dataclass(
        "SchedulerStatsWithGnomon", [(FIELD, dict[str, float] | None, None)], bases=(SchedulerStats,)
    )


def attach(stats: Any, values: dict[str, float]) -> Any:
    """Add counters to the statistics of a step; None (statistics are off) stays None."""
    if stats is not None:
        stats.__class__ = stats_class()
        setattr(stats, FIELD, values)
    return stats


def read(stats: Any) -> dict[str, float]:
    """The counters in some statistics, empty where there are none."""
    return getattr(stats, FIELD, None) or {}


def let_counters_travel() -> None:
    """Make the front end's decoder expect the field. It has to run before the first decoder is made."""
    from vllm.v1.engine import EngineCoreOutputs

    EngineCoreOutputs.__annotations__["scheduler_stats"] = stats_class() | None


@functools.cache
def _collectors() -> dict[str, Any]:
    """One set a process, since Prometheus refuses a name twice."""
    from prometheus_client import Counter, Gauge

    labels = ["model_name", "engine"]
    found: dict[str, Any] = {name: Counter(f"gnomon_{name}", text, labels) for name, text in COUNTERS.items()}
    for name, text in GAUGES.items():
        found[name] = Gauge(f"gnomon_{name}", text, labels, multiprocess_mode="mostrecent")
    return found


@functools.cache
def logger_class() -> type:
    """The stat logger, as vLLM wants one."""
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class GnomonStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
        """Adds the engine's counters to Prometheus' registry."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            served = vllm_config.model_config.served_model_name
            self.model = served[0] if isinstance(served, list) else str(served)
            for index in engine_indexes:
                self._add(dict.fromkeys((*COUNTERS, *GAUGES), 0.0), index)  # so that they are there at once

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            self._add(read(scheduler_stats), engine_idx)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

        def _add(self, values: dict[str, float], engine: int) -> None:
            collectors = _collectors()
            for name, value in values.items():
                if name in collectors:
                    child = collectors[name].labels(self.model, str(engine))
                    if name in GAUGES:
                        child.set(value)
                    else:
                        child.inc(value)

    return GnomonStatLogger


def with_logger(original: Callable[..., None]) -> Callable[..., None]:
    """`StatLoggerManager.__init__` that adds the logger above."""

    def __init__(self: Any, *args: Any, custom_stat_loggers: list[Any] | None = None, **kwargs: Any) -> None:
        original(self, *args, custom_stat_loggers=[*(custom_stat_loggers or []), logger_class()], **kwargs)

    return __init__
