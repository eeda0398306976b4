"""Tiny random models of each decoder family, built from configs: no download, thousands of parameters."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from gnomon.core.seeding import seeded

_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_GPT2 = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 40,
    "n_positions": 64,
    "initializer_range": 0.3,
}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_OPT = {
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
    "init_std": 0.3,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "mistral": ("Mistral", _LLAMA | {"sliding_window": 4}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", _LLAMA | {"head_dim": 4}),
    "gemma": ("Gemma", _LLAMA | {"head_dim": 4}),
    "gemma2": ("Gemma2", _LLAMA | {"head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 4}),
    "olmo": ("Olmo", _LLAMA),
    "olmo2": ("Olmo2", _LLAMA),
    "phi3": ("Phi3", _LLAMA),
    "phi": ("Phi", _LLAMA),
    "gpt2": ("GPT2", _GPT2),
    "neox": ("GPTNeoX", _NEOX | {"use_parallel_residual": False}),
    "neox-parallel": ("GPTNeoX", _NEOX | {"use_parallel_residual": True}),
    "opt": ("OPT", _OPT),
}
"""Name -> (prefix of the Transformers classes, settings). Every test over families runs over this table."""

PARALLEL = {"neox-parallel", "phi"}


def tiny_family(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **settings: Any
) -> Any:
    """A random model with a language-model head, in evaluation mode."""
    prefix, defaults = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(defaults | settings), attn_implementation=attn)
    head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    with seeded(seed):
        model: nn.Module = getattr(transformers, f"{prefix}{head}")(config)
        for (
            parameter
        ) in model.parameters():  # norms and biases away from 1 and 0, so that a wrong hook is seen
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()
