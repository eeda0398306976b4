"""Real KV caches of conversations for Transformers models, under a policy; it measures the time to the first token.

One `DynamicCache` a conversation, in tokens. A turn feeds what isn't cached of history and prompt, then decodes
greedily; trimming crops the cache. What is kept are histories' fronts, so a later turn's tokens are those without a
cache, up to the rounding of a prefill in two parts.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gnomon.core.errors import UsageError

from .policies import EvictionPolicy, whole

__all__ = ["ConversationKVStore", "Served"]


@dataclass(frozen=True)
class Served:
    """One turn.

    Attributes:
        tokens: what was generated.
        cached, uncached: tokens of history and prompt that were found and that were computed.
        ttft_s: wall clock from the request to the first token.
    """

    tokens: list[int]
    cached: int
    uncached: int
    ttft_s: float


class ConversationKVStore:
    """Serves turns of conversations one after another from a store of at most `capacity_tokens` cached tokens.

    The store is full only between turns: while one is served, its own growing cache comes on top.

    Args:
        model: a Transformers decoder whose cache can be cropped: full attention in every layer.
        capacity_tokens: of all conversations together; `bytes_per_token` turns memory into tokens.
        policy: any :class:`EvictionPolicy`, in tokens; it is reset.

    Raises:
        UsageError: a model whose layers don't keep all tokens (sliding windows, linear attention).
    """

    def __init__(self, model: Any, capacity_tokens: int, policy: EvictionPolicy) -> None:
        whole("ConversationKVStore: capacity_tokens", capacity_tokens)
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        layers = DynamicCache(config=model.config).layers
        if kinds := {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}:
            raise UsageError(
                f"{type(model).__name__} keeps {', '.join(sorted(kinds))} in its cache, which don't hold every token, "
                "so the front of a history can't be reused. Take a model with full attention in all layers."
            )
        policy.reset()
        self.model, self.capacity, self.policy = model, capacity_tokens, policy
        self.histories: dict[Hashable, list[int]] = {}
        self._caches: dict[Hashable, Any] = {}
        self._clock = 0.0

    @property
    def cached(self) -> dict[Hashable, int]:
        """Cached tokens by conversation."""
        return {conv: cache.get_seq_length() for conv, cache in self._caches.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all kept keys and values."""
        return sum(
            tensor.untyped_storage().nbytes()
            for cache in self._caches.values()
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        )

    @torch.no_grad()
    def serve(
        self,
        conversation: Hashable,
        prompt: Sequence[int] | Int[Tensor, " n"],
        max_new_tokens: int = 1,
        *,
        now: float | None = None,
        stop: Sequence[int] = (),
    ) -> Served:
        """Answer a prompt in its conversation, greedily.

        Args:
            prompt: token ids of the new prompt alone; the store knows the history.
            max_new_tokens: at least 1; generation also ends after a token of `stop`.
            now: arrival in seconds for the policy, by default the number of the turn.
        """
        new = [int(token) for token in prompt]
        if not new or max_new_tokens < 1:
            raise UsageError(
                f"serve: {len(new)} prompt tokens and max_new_tokens={max_new_tokens}; at least one of each."
            )
        self._clock = self._clock + 1.0 if now is None else now
        history = self.histories.setdefault(conversation, [])
        whole_prompt = [*history, *new]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(whole_prompt) + max_new_tokens > limit:
            raise UsageError(
                f"Conversation {conversation!r} would be {len(whole_prompt) + max_new_tokens} tokens long, the model "
                f"has {limit} positions. End it, or ask for fewer tokens."
            )
        device = self.model.get_input_embeddings().weight.device
        begin = time.perf_counter()
        cache = self._caches.pop(conversation, None)
        if cache is None:
            from transformers import DynamicCache

            cache = DynamicCache(config=self.model.config)
        found = cache.get_seq_length()
        if (served := getattr(self.policy, "on_served", None)) is not None:
            served(len(whole_prompt) - found)
        feed = torch.tensor([whole_prompt[found:]], device=device)
        answer: list[int] = []
        ttft = 0.0
        while True:
            logits = self.model(
                input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            answer.append(int(logits[0, -1].argmax()))  # waits for the device
            if len(answer) == 1:
                ttft = time.perf_counter() - begin
            if len(answer) == max_new_tokens or answer[-1] in stop:
                break
            feed = torch.tensor([[answer[-1]]], device=device)
        self.histories[conversation] = [*whole_prompt, *answer]
        self._keep(conversation, cache, len(whole_prompt) + len(answer))
        return Served(answer, found, len(whole_prompt) - found, ttft)

    def end(self, conversation: Hashable) -> None:
        """The conversation is over: forget it."""
        self._caches.pop(conversation, None)
        self.histories.pop(conversation, None)
        self.policy.on_end(conversation)

    def _keep(self, conversation: Hashable, cache: Any, length: int) -> None:
        """After a turn: keep what the policy likes, then make room. The last token isn't in the cache yet."""
        keep = self.policy.on_turn(conversation, self._clock, length, cache.get_seq_length())
        self._caches[conversation] = cache
        self._crop(conversation, keep)
        over = sum(self.cached.values()) - self.capacity
        if over > 0:
            for conv, left in self.policy.victims(over):
                self._crop(conv, left)
                self.policy.on_trim(conv, left)

    def _crop(self, conversation: Hashable, length: int) -> None:
        """Cut a cache down, and give its memory back: a crop alone is a view of the whole."""
        cache = self._caches[conversation]
        if length <= 0:
            del self._caches[conversation]
            return
        if (surplus := cache.get_seq_length() - length) > 0:
            cache.crop(-surplus)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
