"""T-LRU in an engine: which blocks are safe when a request ends, and where the threshold comes from.

Paper: Tail-Optimized LRU, the budget max(0, L + Q̂ - ξ) in blocks, ξ rounded down and Q̂ up.
Here:  `TailLRU`, one for each scheduler. With an objective in milliseconds instead of ξ, the engine's own prefill steps
       give the latency model, and so ξ; before there are enough of them nothing is safe, which is LRU.
Inferred: a request that is preempted has not ended a turn, so its blocks stay where LRU puts them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gnomon.core.errors import UsageError
from gnomon.methods.serve.tail_lru import LatencyModel, PolicySettings, settings_for_slo

from .clock import Step
from .pool import adopt
from .settings import Settings

__all__ = ["PrefillTimes", "TailLRU"]

FEWEST, WINDOW = 8, 256
"""Prefill steps before the first fit, and steps kept."""
LEAST_TOKENS = 16
"""Shorter prefills say more about a step's fixed cost than about tokens."""


class PrefillTimes:
    """ξ in tokens from an objective in seconds and the prefill steps seen so far.

    A step counts when at least nine tenths of its tokens are prompt tokens, since the latency model is one of prefills
    that aren't batched with others' decoding.
    """

    def __init__(self, slo_s: float, margin: float) -> None:
        self.slo_s, self.margin = slo_s, margin
        self.xi_tokens = 0
        self._seen: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def record(self, prefill: int, rows: int, seconds: float) -> None:
        """Note a step, and fit anew after every eighth."""
        if prefill < LEAST_TOKENS or rows * 9 > prefill or seconds <= 0:
            return
        self._seen.append((prefill, seconds))
        self._count = getattr(self, "_count", 0) + 1
        if len(self._seen) >= FEWEST and self._count % FEWEST == 0:
            self._fit()

    def _fit(self) -> None:
        tokens, seconds = zip(*self._seen, strict=True)
        try:
            model = LatencyModel.fit(tokens, seconds)
            found = settings_for_slo(
                self.slo_s,
                seconds_per_token=model.alpha_s_per_block,
                beta_s=model.beta_s,
                margin=self.margin,
            )
        except (
            UsageError
        ):  # equal lengths so far, noise, or an objective that an empty prefill misses: keep what holds
            return
        self.xi_tokens = found.xi_tokens


class TailLRU:
    """The policy of one scheduler's block pool.

    Args:
        manager: vLLM's `KVCacheManager`.
    """

    def __init__(self, settings: Settings, manager: Any) -> None:
        self.settings = settings
        self.active = settings.cache_policy == "tail_lru"
        self.pool = manager.block_pool
        self.managers = manager.coordinator.single_type_managers
        self.queue = adopt(self.pool.free_block_queue, self.pool.num_gpu_blocks)
        self.times = PrefillTimes(settings.slo_ms / 1000, settings.margin)
        self._sent: dict[str, float] = {}

    @property
    def xi_tokens(self) -> int:
        """ξ now."""
        return self.times.xi_tokens if self.settings.xi_tokens is None else self.settings.xi_tokens

    def before_freeing(self, request: Any) -> None:
        """Tag the request's blocks; vLLM frees them next."""
        if not self.active:
            return
        over, xi = request.is_finished(), self.xi_tokens
        for manager in self.managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            own = [block for block in blocks if block.pool is None or block.pool is self.pool]
            if not over or xi == 0 or len(own) < len(blocks):
                self.queue.protect(own)
                continue
            settings = PolicySettings(
                xi_tokens=xi, qhat_tokens=self.settings.qhat_tokens, block_size=manager.block_size
            )
            self.queue.judge(own, request.num_tokens, settings)

    def after_reset(self) -> None:
        """vLLM dropped the cache's content."""
        self.queue.forget()

    def step(self, step: Step, seconds: float) -> None:
        """Learn from a step that ended."""
        self.times.record(step.prefill, step.rows, seconds)

    def counters(self) -> dict[str, float]:
        """What happened since the last call, and what is so now."""
        queue = self.queue
        total = {
            "tail_lru_safe_evictions": queue.safe_evictions,
            "tail_lru_lru_evictions": queue.kept_evictions,
            "tail_lru_safe_hits": queue.safe_hits,
            "tail_lru_lru_hits": queue.kept_hits,
        }
        news = {name: float(value - self._sent.get(name, 0)) for name, value in total.items()}
        self._sent = {name: float(value) for name, value in total.items()}
        xi = self.xi_tokens if self.active else 0
        return news | {"tail_lru_safe_blocks": float(queue.safe_blocks), "tail_lru_xi_tokens": float(xi)}
