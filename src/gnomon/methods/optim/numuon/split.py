"""Which parameters Muon may take: the matrices between embedding and head."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter

from gnomon.core.errors import UsageError, nearest
from gnomon.core.layers import unwrap

logger = logging.getLogger(__name__)

Named = list[tuple[str, Parameter]]

VOCABULARY = "is an embedding or head, which has a row for each token"
FUSED = "is several matrices fused into one, which would have to share a rank"
ROUTER = "is a router, which has a row for each expert"
ADAPTER = "is a factor of an adapter, whose rank is limited already"

_TABLES = ("embed_tokens", "embed_positions", "embed_in", "word_embeddings", "wte", "wpe")
_QKV = (
    "qkv",
    "qkv_proj",
    "wqkv",
    "Wqkv",
    "c_attn",
    "query_key_value",
    "W_pack",
    "att_proj",
    "in_proj_weight",
)
_NAMES = {
    VOCABULARY: (*_TABLES, "lm_head", "embed_out"),
    FUSED: (*_QKV, "gate_up_proj", "in_proj"),
    ROUTER: ("gate", "router", "shared_expert_gate"),
    ADAPTER: ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"),
}
"""Parts of dotted names, by what they say against Muon."""


def why_not_muon(name: str) -> str | None:
    """What a parameter's name says against Muon, as the end of a sentence; None if nothing."""
    parts = set(name.split("."))
    return next((reason for reason, names in _NAMES.items() if parts & set(names)), None)


def split_muon_params(
    model: nn.Module, *, other: Sequence[str] = (), frozen: bool = False
) -> tuple[Named, Named]:
    """(hidden, other): the trainable parameters for Muon and those for AdamW, each as (name, parameter).

    To `other` go embeddings and the head (also tied), whatever isn't a matrix, routers, adapters' factors and
    fused matrices (QKV, and by the same reasoning gate and up: inferred), the last ones with a logged warning, since
    splitting them into logical matrices would let Muon have them. Kernels of four or more dimensions are hidden.

    Args:
        other: patterns of further names for `other`, such as "*.head.weight"; each must match.
        frozen: take parameters that don't require gradients, too.

    Raises:
        UsageError: a pattern matches nothing, or no hidden matrix is left.
    """
    vocabulary = _vocabulary(model)
    trainable = [(name, p) for name, p in model.named_parameters() if frozen or p.requires_grad]
    for pattern in other:
        if not any(fnmatchcase(name, pattern) for name, _ in trainable):
            raise UsageError(
                f"The pattern {pattern!r} matches no trainable parameter.{nearest(pattern, [n for n, _ in trainable])}"
            )
    hidden: Named = []
    rest: Named = []
    reasons: Counter[str] = Counter()
    for name, p in trainable:
        reason = _reason(name, p, vocabulary, other)
        (rest if reason else hidden).append((name, p))
        if reason:
            reasons[reason] += 1
            if reason in (FUSED, ADAPTER):
                logger.warning("%s goes to AdamW, not to Muon: it %s.", name, reason)
    if not hidden:
        told = "; ".join(f"{count} because each {reason}" for reason, count in reasons.items())
        raise UsageError(
            f"{type(model).__name__} has no matrix for Muon among {len(trainable)} trainable parameters"
            f"{f' ({told})' if told else ''}. Use AdamW for it."
        )
    logger.info("%d matrices for Muon, %d other parameters for AdamW", len(hidden), len(rest))
    return hidden, rest


def _reason(name: str, p: Parameter, vocabulary: set[int], other: Sequence[str]) -> str | None:
    if id(p) in vocabulary:
        return VOCABULARY
    if p.ndim < 2:
        return "is a vector or scalar"
    if p.ndim == 3:
        return "is a stack of matrices or a one-dimensional kernel"
    if any(fnmatchcase(name, pattern) for pattern in other):
        return "was named as other"
    return why_not_muon(name)


def _vocabulary(model: nn.Module) -> set[int]:
    """Ids of the weights of embeddings and of a Transformers model's head."""
    root = unwrap(model)
    modules = [module for module in root.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    found = {id(module.weight) for module in modules}
    for name in ("get_input_embeddings", "get_output_embeddings"):
        method = getattr(root, name, None)
        module = method() if callable(method) else None
        if isinstance(weight := getattr(module, "weight", None), Parameter):
            found.add(id(weight))
    return found
