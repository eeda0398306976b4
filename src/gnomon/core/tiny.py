"""Tiny models of the common decoder families: Transformers classes, random weights, a byte-level tokenizer.

`tiny:<architecture>-<size>`, such as `tiny:llama-0.5m`. All families of one size have the same depth, width,
heads and feed-forward cost, so that they differ in layout only; dropout is off and embeddings are tied in
every one.

| size | layers | hidden | heads (key/value) | gated inner width | parameters (Llama) |
|---|---|---|---|---|---|
| 10k | 3 | 16 | 4 (2) | 24 | 10,016: unit tests |
| 0.5m | 4 | 96 | 6 (2) | 320 | 492,672: the default small model |
| 3m | 6 | 192 | 6 (2) | 640 | 2,853,888 |

Not here: loading by name, dtype and device (`core.models`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .errors import UsageError, unknown
from .refs import TINY

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Special tokens, ids 256, 257 and 258; the ids below are the bytes themselves."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape that all families of a size share."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Key/value heads, for the families with grouped queries."""
    inner: int
    """Width of a gated feed-forward layer; one without a gate gets 3/2 of it, hence equal parameters."""
    positions: int


SIZES = {
    "10k": Size(layers=3, hidden=16, heads=4, kv_heads=2, inner=24, positions=256),
    "0.5m": Size(layers=4, hidden=96, heads=6, kv_heads=2, inner=320, positions=1024),
    "3m": Size(layers=6, hidden=192, heads=6, kv_heads=2, inner=640, positions=2048),
}

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "olmo2", "phi3")
ARCHITECTURES = (*_LLAMA_LIKE, "gpt2", "gpt_neox", "opt")
NAMES = tuple(f"{TINY}{architecture}-{size}" for architecture in ARCHITECTURES for size in SIZES)


def parse(name: str) -> tuple[str, str]:
    """`tiny:gpt-neox-10k` or `tiny:gpt_neox_10k` -> `("gpt_neox", "10k")`.

    Raises:
        UsageError: not of the form, or an unknown architecture or size.
    """
    architecture, _, size = name.removeprefix(TINY).lower().replace("_", "-").rpartition("-")
    architecture = architecture.replace("-", "_")
    if not architecture:
        raise UsageError(f"{name!r} is not of the form tiny:<architecture>-<size>, such as tiny:llama-0.5m.")
    if architecture not in ARCHITECTURES:
        raise unknown("architecture of a tiny model", architecture, ARCHITECTURES)
    if size not in SIZES:
        raise unknown(f"size of {TINY}{architecture}", size, SIZES)
    return architecture, size


def config(architecture: str, size: Size) -> PretrainedConfig:
    """The Transformers configuration of a family at a size."""
    common: dict[str, Any] = {
        "vocab_size": 259,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "tie_word_embeddings": True,
        "max_position_embeddings": size.positions,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
    }
    own: dict[str, Any]
    if architecture in _LLAMA_LIKE:
        own = {"num_key_value_heads": size.kv_heads, "intermediate_size": size.inner}
    elif architecture == "gpt2":  # GPT2Config translates the common names into its own
        own = {"n_inner": size.inner * 3 // 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    elif architecture == "gpt_neox":  # the default quarter of a 4-wide head would rotate a single number
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        own = {"intermediate_size": size.inner * 3 // 2, "rope_parameters": rope}
    else:
        own = {"ffn_dim": size.inner * 3 // 2, "word_embed_proj_dim": size.hidden, "dropout": 0.0}
    if architecture in ("qwen3", "gemma", "gemma2"):  # their defaults don't follow from hidden size and heads
        own["head_dim"] = size.hidden // size.heads
    if architecture == "gemma2":
        own["query_pre_attn_scalar"] = size.hidden // size.heads
    return AutoConfig.for_model(architecture, **common, **own)


def build(name: str, *, attn: str = "sdpa") -> PreTrainedModel:
    """A float32 model on the CPU, initialised from the ambient random state (`core.seeding.seeded`)."""
    architecture, size = parse(name)
    model = AutoModelForCausalLM.from_config(config(architecture, SIZES[size]), attn_implementation=attn)
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token b < 256 is the byte b, so that every text round-trips; no BOS is added.

    Offsets count characters: the bytes of one character share its offsets.
    """
    letters = _byte_letters()
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    # There is nothing to merge, so nothing needs cutting into words first.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _byte_letters() -> list[str]:
    """The printable letter by which the ByteLevel pre-tokenizer stands for each byte.

    Printable Latin-1 stands for itself; the other bytes take the letters from U+0100 on, in order.
    """
    itself = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in itself else next(stand_ins)) for byte in range(256)]
