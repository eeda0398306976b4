"""Tiny Transformers models and tokenizers, built from configs: thousands of parameters, no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gnomon.core.seeding import seeded

torch.set_num_threads(1)

SIZES = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "gpt_neox": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "opt": {
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    },
    "gemma2": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "final_logit_softcapping": 0.5,
    },
}


def build(
    layout: str = "llama", *, seed: int = 0, vocabulary: int = 40, spread: float = 0.3, **changes: Any
) -> Any:
    """A random causal LM in evaluation mode; a wide `spread` keeps its distributions far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = {"vocab_size": vocabulary, "initializer_range": spread, "init_std": spread}
    settings |= {"max_position_embeddings": 128} if layout != "gpt2" else {}
    config = AutoConfig.for_model(layout, **(settings | special | SIZES[layout] | changes))
    with seeded(seed):
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def tiny_lm() -> Callable[..., Any]:
    """The builder itself: `tiny_lm("gpt2", seed=1)`."""
    return build


@pytest.fixture
def tiny_llama() -> Any:
    return build("llama")


def letters(merges: tuple[tuple[str, str], ...] = (), *, bos: bool = False) -> Any:
    """A tokenizer over single characters with BPE merges; `bos` makes it prepend its bos by itself."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    symbols = special + list("abcdefgh .:é") + [x + y for x, y in merges]
    core = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, list(merges)))
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


@pytest.fixture
def letter_tokenizer() -> Callable[..., Any]:
    return letters
