"""`gnomon apply saga`: a model folder with fewer key heads and Atop-N at decoding.

The whole model is loaded for the calibration pass; what is written is the input's own tensors, shard by shard and bit
for bit, with new query and key projections. Quality is what the conversion leaves: train it afterwards
(`convert_and_finetune`), unless no head is merged.

Here:  settings, what is refused beforehand, the folder.
Not here: the mathematics (`align`, `convert`), loading with Transformers (`gnomon.hf`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.core.applying import ModelMethod, Source
from gnomon.core.checkpoints import Checkpoint
from gnomon.core.converting import write_config, write_converted
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.forms import PLAIN, Form, Weights
from gnomon.core.places import parameters, skeleton
from gnomon.core.safe_files import DTYPES

from .config import SagaConfig
from .convert import default_key_heads, require_convertible, to_saga
from .model import attentions, stated

BATCH = 4096
"""Tokens of calibration text that run through the model at once, or one window."""

CHANGED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
"""Parameters of an attention module that a conversion changes."""


@dataclass(frozen=True, kw_only=True)
class SagaSettings:
    """How a model is converted."""

    key_heads: int = 0
    """Key heads of the result, a divisor of the model's; 0: a quarter of them. As many as it has: only Atop-N."""
    top_n: int = 256
    """Positions that a query head keeps at decoding."""
    oversample: int = 1
    """Buckets per kept position."""
    selector: str = "strided"
    """How positions are chosen: strided is Atop-N, exact the true top-N, dense keeps all; see `SELECTORS`."""
    dense_layers: int = 0
    """The first layers, which keep all positions."""
    init: str = "aligned"
    """How key heads are merged: aligned, mean or first."""
    calib: str = "mixed"
    """Calibration text of the alignment: a recipe (`gnomon.core.data`), a file or a folder."""
    samples: int = 128
    """Windows of that text, drawn at random."""
    length: int = 1024
    """Tokens a window; the model's own limit where that is lower."""
    seed: int = 0
    """Of the windows."""

    def __post_init__(self) -> None:
        for name, least in (("key_heads", 0), ("samples", 1), ("length", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name}={value} must be at least {least}.")
        self.layers(1, 1)

    def layers(self, value_heads: int, key_heads: int) -> SagaConfig:
        """The setting of the layers."""
        return SagaConfig(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            top_n=self.top_n,
            oversample=self.oversample,
            selector=self.selector,
            dense_layers=self.dense_layers,
        )


FORM = Form(
    name="saga",
    group=lambda checkpoint: {name: (name,) for name in checkpoint.entries},
    decode=lambda name, stored: stored[name],
    config={"num_key_heads": None, "saga": None},
    instead="There is no ordinary form of attention with fewer key heads than value heads.",
)


def prepare(checkpoint: Checkpoint, settings: SagaSettings) -> Mapping[str, Any]:
    """Refuse what can't be converted; for the record, which text the calibration reads.

    Raises:
        UsageError: a model, head counts or an initialisation without a rule; a text that is too short.
        GnomonError: a model that Transformers doesn't know; projections that are no tensors of their own.
    """
    model: Any = skeleton(checkpoint.config)
    config = _config(model, settings)
    require_convertible(model, config, settings.init)
    places = set(parameters(model, checkpoint.entries).values())
    if missing := _changed(model) - places:
        raise GnomonError(
            f"{min(missing)} is no tensor of its own in this checkpoint: Transformers puts it together on loading. "
            "Use to_saga in memory."
        )
    if not _reads_text(config, settings):
        return {}
    text, windows = calibration(checkpoint, settings)
    return {"calib_sha256": text, "calib_tokens": windows.numel()}


def _changed(model: Any) -> set[str]:
    """Names of the parameters that a conversion changes."""
    own = {id(attn) for attn in attentions(model)}
    found = (f"{name}.{part}" for name, m in model.named_modules() if id(m) in own for part in CHANGED)
    return set(found) & set(model.state_dict())


def _config(model: Any, settings: SagaSettings) -> SagaConfig:
    held = getattr(model.config.get_text_config(decoder=True), "num_key_value_heads", None)
    if held is None:
        raise UsageError(
            f"{type(model).__name__} doesn't state num_key_value_heads. Use a decoder with grouped queries."
        )
    return settings.layers(held, settings.key_heads or default_key_heads(held))


def _reads_text(config: SagaConfig, settings: SagaSettings) -> bool:
    return settings.init == "aligned" and config.num_key_heads < config.num_value_heads


def calibration(checkpoint: Checkpoint, settings: SagaSettings) -> tuple[str, Tensor]:
    """(SHA-256 of the text, its windows (samples, length)): the same for the same settings.

    Raises:
        UsageError: a text shorter than one window.
        GnomonError: no such text, no tokenizer.
    """
    from transformers import AutoTokenizer

    from gnomon.core.data import Batches, corpus, token_stream

    text = corpus(settings.calib)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # files from anywhere raise anything
        raise GnomonError(
            f"init=aligned reads calibration text, but the tokenizer of {checkpoint.folder} can't be loaded "
            f"({type(error).__name__}). Put the tokenizer's files into the folder, or use init=mean."
        ) from None
    stream = token_stream(text, tokenizer)
    reach = checkpoint.config.get("max_position_embeddings")
    length = min(settings.length, reach) if type(reach) is int and reach > 0 else settings.length
    if len(stream) <= length:
        raise UsageError(
            f"The calibration text {text.name} has {len(stream):,} tokens, fewer than one window of {length:,}. Give "
            "a longer text, or a smaller length."
        )
    generator = torch.Generator().manual_seed(settings.seed)
    return text.sha256, next(Batches(stream, batch=settings.samples, length=length, generator=generator))


def run(source: Source, folder: Path, settings: SagaSettings) -> None:
    """Convert the model and write it."""
    from gnomon.core.models import load_model

    checkpoint = source.checkpoint
    model: Any = load_model(source.folder, dtype=_dtype(checkpoint))
    places = parameters(model, checkpoint.entries)  # asked before the layers are replaced
    name, changed = type(model).__name__, _changed(model)
    config = _config(model, settings)
    batches = None
    if _reads_text(config, settings):
        windows = calibration(checkpoint, settings)[1]
        rows = max(1, BATCH // windows.shape[1])
        batches = [windows[first : first + rows] for first in range(0, len(windows), rows)]
    model = to_saga(model, config, batches, settings.init, inplace=True)
    state = model.state_dict()

    def convert(stored: str, tensor: Tensor) -> Mapping[str, Tensor] | None:
        place = places.get(stored, "")
        if place not in changed:
            return None
        return {stored: state[place].detach().to("cpu", tensor.dtype).contiguous()}

    form = dataclasses.replace(
        FORM,
        config={
            "num_key_heads": config.num_key_heads,
            "saga": stated(config),
            "architectures": [f"Saga{name}"],
        },
    )
    write_converted(checkpoint, Weights(checkpoint, PLAIN, {}), convert, form, folder, lambda line: None)
    write_config(checkpoint, PLAIN, form, folder)


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What most of the weights are stored in: the model is computed in it."""
    counts: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        kind = DTYPES[entry.dtype]
        if kind.is_floating_point and kind.itemsize > 1:
            counts[kind] = counts.get(kind, 0) + entry.numel
    if not counts:
        raise GnomonError("This checkpoint holds no floating-point weights to convert.")
    return max(counts, key=lambda kind: counts[kind])


METHOD = ModelMethod(name=FORM.name, settings=SagaSettings, prepare=prepare, run=run, form=FORM, growth=1.0)
