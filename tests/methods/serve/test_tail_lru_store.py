"""The store gives the tokens of a model without a cache, whatever the policy evicts, and keeps to its capacity."""

from __future__ import annotations

import pytest
import torch

from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.methods.serve.tail_lru import (
    LRU,
    AdaptiveTailOptimizedLRU,
    ConversationKVStore,
    TailOptimizedLRU,
    ThresholdLRU,
)


def tiny() -> torch.nn.Module:
    with seeded(0):
        return build("tiny:llama-10k")


def chat(seed: int, turns: int = 10) -> list[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [int(torch.randint(0, 3, (1,), generator=generator)) for _ in range(turns)]
    return [("ABC"[k], torch.randint(0, 200, (5 + k,), generator=generator).tolist()) for k in draw]


def plain(model: torch.nn.Module, history: list[int], n: int) -> list[int]:
    ids = torch.tensor([history])
    with torch.no_grad():
        for _ in range(n):
            logits = model(input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(history) :].tolist()


@pytest.mark.parametrize(
    "policy",
    [LRU(), TailOptimizedLRU(20, 6), ThresholdLRU(15), AdaptiveTailOptimizedLRU(20, 6, window=2, every=1)],
    ids=lambda policy: policy.name,
)
def test_same_tokens_as_without_a_cache(policy: LRU) -> None:
    model = tiny().double()
    store = ConversationKVStore(model, 40, policy)
    histories: dict[str, list[int]] = {}
    reused = 0
    for conv, prompt in chat(1):
        before = store.cached.get(conv, 0)
        served = store.serve(conv, prompt, 3)
        whole = histories.get(conv, []) + prompt
        assert served.tokens == plain(model, whole, 3)
        assert (served.cached, served.uncached) == (before, len(whole) - before) and served.ttft_s > 0
        histories[conv] = whole + served.tokens
        assert sum(store.cached.values()) <= 40 and store.cached == policy.cached
        reused += served.cached
    assert store.histories == histories and reused > 0


def test_memory_comes_back() -> None:
    model = tiny()
    store = ConversationKVStore(model, 1000, LRU())
    store.serve("A", list(range(50)), 2)
    config = model.config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert store.bytes == 51 * per_token  # the last token was never fed
    store._crop("A", 10)
    assert store.bytes == 10 * per_token
    store.end("A")
    assert store.bytes == 0 and not store.cached and not store.policy.cached


def test_a_stop_token_ends_a_turn() -> None:
    model = tiny()
    first = ConversationKVStore(model, 100, LRU()).serve("A", [1, 2, 3], 5).tokens
    assert (
        ConversationKVStore(model, 100, LRU()).serve("A", [1, 2, 3], 5, stop=[first[0]]).tokens == first[:1]
    )


def test_store_refusals() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sliding = MistralForCausalLM(
        MistralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=8,
        )
    )  # fmt: skip
    with pytest.raises(UsageError, match="don't hold every token"):
        ConversationKVStore(sliding, 10, LRU())
    model = tiny()
    with pytest.raises(UsageError, match="capacity_tokens=-1"):
        ConversationKVStore(model, -1, LRU())
    store = ConversationKVStore(model, 10, LRU())
    with pytest.raises(UsageError, match="at least one of each"):
        store.serve("A", [], 1)
    with pytest.raises(UsageError, match="positions"):
        store.serve("A", [1] * 100_000, 1)
