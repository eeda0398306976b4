"""What methods that calibrate share when they are applied to a model on disk: which model, which text, which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnomon.core.checkpoints import Checkpoint
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.safe_files import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 4096
"""Tokens of calibration text that run through the model at once, or one window."""


def require_decoder(model: PreTrainedModel, what: str) -> None:
    """Refuse anything but a decoder-only language model, by its classes alone.

    Args:
        what: the method is, such as "low rank".

    Raises:
        UsageError: another kind of model.
    """
    from transformers.models.auto import modeling_auto as auto

    name, config = type(model).__name__, model.config
    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    masked = masked and getattr(config, "is_decoder", True) is False
    encodes = getattr(config, "is_encoder_decoder", False) or masked
    if name not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or encodes:
        raise UsageError(
            f"{name} is no decoder-only language model, which {what} is for. Give one that AutoModelForCausalLM "
            "loads with all its weights."
        )


def token_stream_of(checkpoint: Checkpoint, calib: str, *, method: str, instead: str) -> tuple[str, Tensor]:
    """(SHA-256 of the text, its token ids in a line) by the checkpoint's own tokenizer.

    Args:
        calib: a recipe, file or folder, see `core.data.corpus`.
        instead: what needs no text, as the end of a sentence.

    Raises:
        UsageError, GnomonError: no such text, no tokenizer.
    """
    from transformers import AutoTokenizer

    from gnomon.core.data import corpus, token_stream

    text = corpus(calib)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # files from anywhere raise anything
        raise GnomonError(
            f"{method} reads calibration text, but the tokenizer of {checkpoint.folder} can't be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Put the tokenizer's "
            f"files into the folder, or use {instead}."
        ) from None
    return text.sha256, token_stream(text, tokenizer)


def draw_windows(
    stream: Tensor, checkpoint: Checkpoint, *, name: str, samples: int, length: int, seed: int
) -> Tensor:
    """Random windows (samples, length) of a stream, not longer than the model reads.

    Args:
        name: of the text, for the error.

    Raises:
        UsageError: a text shorter than one window.
    """
    from gnomon.core.data import Batches

    length = min(length, reach(checkpoint.config))
    if len(stream) < length:
        raise UsageError(
            f"The calibration text {name} has {len(stream):,} tokens, fewer than one window of {length:,}. Give "
            "a longer text, or a smaller length."
        )
    generator = torch.Generator().manual_seed(seed)
    return next(Batches(stream, batch=samples, length=length, generator=generator))


def reach(config: Mapping[str, Any]) -> int:
    """Most tokens that the model reads at once, as far as its configuration says."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if type(table.get(key)) is int and table[key] > 1:
                return int(table[key])
    return 2**31


def main_dtype(checkpoint: Checkpoint, what: str) -> torch.dtype:
    """What most of the weights are stored in: the model is computed in it.

    Args:
        what: is done to them, such as "compress".
    """
    counts: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        kind = DTYPES[entry.dtype]
        if kind.is_floating_point and kind.itemsize > 1:
            counts[kind] = counts.get(kind, 0) + entry.numel
    if not counts:
        raise GnomonError(f"This checkpoint holds no floating-point weights to {what}.")
    return max(counts, key=lambda kind: counts[kind])


def in_batches(windows: Tensor) -> list[Tensor]:
    """As many windows at once as make :data:`BATCH` tokens."""
    rows = max(1, BATCH // windows.shape[1])
    return [windows[first : first + rows] for first in range(0, len(windows), rows)]


def as_stored(value: Tensor, like: Tensor) -> Tensor:
    """As it is stored: on the CPU, in the dtype of the tensor that it stands for."""
    return value.detach().to("cpu", like.dtype).contiguous()
