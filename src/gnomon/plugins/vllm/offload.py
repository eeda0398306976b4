"""T-LRU for vLLM's CPU tier, where evicted KV of the GPU goes; a `CachePolicy` loaded by its module path:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"cpu_bytes_to_use": 8e9, "eviction_policy": "TailLRUCachePolicy",
       "cache_policy_module_path": "gnomon.plugins.vllm.offload"}}'

with `GNOMON_VLLM_SETTINGS='{"xi_tokens": 1500}'`, since this tier sees no prefill times to derive ξ from.

Here:  safe chunks first, oldest first, tail first; then the others in the same order.
Inferred: a request's history is the furthest position among its chunks plus one chunk, as this tier knows no lengths;
       the longest one counts where several requests share a chunk. A chunk that is used again loses its tag.
Limits: vLLM has no such tier on CPU, so this was run with its manager alone, not in an engine.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from gnomon.core.errors import UsageError
from gnomon.methods.serve.tail_lru import PolicySettings

from .settings import SETTINGS, Settings

__all__ = ["SafeFirstChunks"]


class SafeFirstChunks:
    """The policy itself, without vLLM's base class. Keys are opaque; chunks have `ref_cnt`, and 0 means idle.

    Args:
        cache_capacity: chunks of the tier.
        settings: the environment's by default; needs `xi_tokens`.

    Raises:
        UsageError: no `xi_tokens`.
    """

    def __init__(self, cache_capacity: int, settings: Settings | None = None) -> None:
        found = settings or Settings.from_environment()
        if found.xi_tokens is None:
            raise UsageError(
                "TailLRUCachePolicy needs its threshold in tokens, since the CPU tier measures no prefills. Set "
                f'{SETTINGS} to, for example, {{"xi_tokens": 1500}}.'
            )
        self.cache_capacity = cache_capacity
        self.xi_tokens, self.qhat_tokens = found.xi_tokens, found.qhat_tokens
        self.clear()

    def get(self, key: Any) -> Any | None:
        """The chunk of a key, None if it isn't here."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any) -> None:
        """Add a chunk as the most recent."""
        self._chunks[key] = chunk
        self._kept[key] = None

    def remove(self, key: Any) -> None:
        """Drop a chunk whose store failed."""
        del self._chunks[key]
        self._forget(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """Keys were used, head to tail: the tail becomes the next victim among them. Their tags go."""
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._safe.pop(key, None)
                self._kept[key] = None
                self._kept.move_to_end(key)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        """Nothing to learn from what isn't here."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """A turn ended: its chunks become the most recent, and those beyond the budget safe."""
        for keys in key_groups:
            self.touch(keys, req_context)
            self._judge([(key, req_context.get_offload_key_position(key)) for key in keys])

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """Exactly n idle chunks that aren't protected, or None and no change."""
        victims: list[Any] = []
        for queue in (self._safe, self._kept):
            for key in queue:
                if len(victims) == n:
                    break
                if self._chunks[key].ref_cnt == 0 and key not in protected:
                    victims.append(key)
        if len(victims) < n:
            return None
        found = [(key, self._chunks.pop(key)) for key in victims]
        for key in victims:
            self._forget(key)
        return found

    def clear(self) -> None:
        """Drop everything."""
        self._chunks: dict[Any, Any] = {}
        self._safe: OrderedDict[Any, None] = OrderedDict()
        self._kept: OrderedDict[Any, None] = OrderedDict()
        self._history: dict[Any, int] = {}

    def mark_evictable(self, key: Any) -> None:
        """Nothing to do: `evict` looks at the chunk itself."""

    def mark_non_evictable(self, key: Any) -> None:
        """As above."""

    def _judge(self, placed: Sequence[tuple[Any, int | None]]) -> None:
        ends = sorted((end, key) for key, end in placed if end is not None and key in self._chunks)
        if not ends or len(ends) < sum(key in self._chunks for key, _ in placed):
            return  # positions unknown: nothing is safe
        steps = [after[0] - before[0] for before, after in pairwise(ends)]
        size = min(filter(None, [*steps, ends[0][0]]))
        settings = PolicySettings(xi_tokens=self.xi_tokens, qhat_tokens=self.qhat_tokens, block_size=size)
        for end, key in reversed(ends):
            longest = self._history[key] = max(self._history.get(key, 0), ends[-1][0] + size)
            if self.xi_tokens and (end - size) // size >= settings.budget_blocks(longest):
                del self._kept[key]
                self._safe[key] = None

    def _forget(self, key: Any) -> None:
        self._safe.pop(key, None)
        self._kept.pop(key, None)
        self._history.pop(key, None)


@functools.cache
def _policy_class() -> type:
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    return type("TailLRUCachePolicy", (SafeFirstChunks, CachePolicy), {"__doc__": SafeFirstChunks.__doc__})


def __getattr__(name: str) -> type:
    if name == "TailLRUCachePolicy":
        return _policy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
