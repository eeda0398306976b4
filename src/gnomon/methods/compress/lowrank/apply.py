"""`gnomon apply lowrank`: a model folder whose linear layers are two thin factors each.

The whole model is loaded and compressed; what is written is the input's own tensors, shard by shard and bit for
bit, with the factors in the place of each compressed matrix. So everything that low rank doesn't touch (embeddings,
head, norms, experts that Transformers merges when it loads them) stays what it was, whatever dtype it is in.

Here:  settings, what is refused beforehand, the folder.
Not here: the mathematics (`compress`), the form (`stored`), loading with Transformers (`gnomon.hf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnomon.core.applying import ModelMethod, Source
from gnomon.core.checkpoints import Checkpoint
from gnomon.core.converting import write_config, write_converted
from gnomon.core.errors import GnomonError, UsageError, unknown
from gnomon.core.forms import PLAIN, Weights
from gnomon.core.layers import linears
from gnomon.core.places import parameters, skeleton
from gnomon.core.refs import as_path

from ..applied import as_stored, draw_windows, in_batches, main_dtype, require_decoder, token_stream_of
from .compress import METHODS, compress_lowrank
from .config import ASVDConfig, LoraUpdate, SVDLLMConfig
from .factors import require_keep
from .linear import LowRankLinear, low_rank_layers, put
from .ranks import require_reachable
from .stored import FORM, A, B, form_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WITHOUT_TEXT = ("svd",)
"""Methods that look at the weights alone."""


@dataclass(frozen=True, kw_only=True)
class LowRankSettings:
    """How a model is compressed; the numbers of calibration text are those of SVD-LLM and Dobi-SVD."""

    method: str = "svd"
    """svd looks at the weights alone; asvd, svd_llm, svd_llm_lora and dobi also at text that runs through them."""
    keep: float = 0.8
    """Share of the numbers in the compressed matrices that stays."""
    calib: str = "mixed"
    """Calibration text: a recipe (`gnomon.core.data`), a file or a folder."""
    samples: int = 256
    """Windows of that text, drawn at random."""
    length: int = 2048
    """Tokens a window; the model's own limit where that is lower."""
    seed: int = 0
    """Of the windows, and of what the method draws."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("low-rank method", self.method, METHODS)
        require_keep(self.keep)
        if self.keep == 1:
            raise UsageError("keep=1 leaves the model as it is, so there is nothing to apply.")
        for name, least in (("samples", 1), ("length", 2), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name}={value} must be at least {least}.")
        if not self.calib:
            raise UsageError("calib is empty. Name a text: mixed, stdlib, a file or a folder.")

    @property
    def reads_text(self) -> bool:
        return self.method not in WITHOUT_TEXT


def prepare(checkpoint: Checkpoint, settings: LowRankSettings) -> Mapping[str, Any]:
    """Refuse what can't be compressed; for the record, which text the calibration reads.

    Raises:
        UsageError: no decoder-only language model; a text that is too short.
        GnomonError: a model that Transformers doesn't know; a linear layer made of several stored tensors; no
            tokenizer for the text.
    """
    model = skeleton(checkpoint.config)
    layers = _require_layers(model)
    main_dtype(checkpoint, "compress")
    places = parameters(model, checkpoint.entries)
    known = {place for name, place in places.items() if name.endswith(".weight")}
    for name in layers:
        if f"{name}.weight" not in known:
            raise GnomonError(
                f"The weight of {name} is no tensor of its own in this checkpoint: Transformers puts it together on "
                "loading. Low-rank factors have no place in such a folder; use compress_lowrank in memory."
            )
    if settings.method == "asvd":
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
        require_reachable(settings.keep, shapes, ASVDConfig().candidates)
    if not settings.reads_text:
        return {}
    text, windows = calibration(checkpoint, settings)
    return {"calib_sha256": text, "calib_tokens": windows.numel()}


def calibration(checkpoint: Checkpoint, settings: LowRankSettings) -> tuple[str, Tensor]:
    """(SHA-256 of the text, its windows (samples, length)): the same for the same settings.

    Raises:
        UsageError: a text shorter than one window.
        GnomonError: no such text, no tokenizer.
    """
    instead = "method=svd, which needs none"
    text, stream = token_stream_of(checkpoint, settings.calib, method=settings.method, instead=instead)
    windows = draw_windows(
        stream,
        checkpoint,
        name=as_path(settings.calib).name,
        samples=settings.samples,
        length=settings.length,
        seed=settings.seed,
    )
    return text, windows


def run(source: Source, folder: Path, settings: LowRankSettings) -> None:
    """Compress the model and write it."""
    from gnomon.core.models import load_model

    checkpoint = source.checkpoint
    model = load_model(source.folder, dtype=main_dtype(checkpoint, "compress"))
    places = parameters(model, checkpoint.entries)  # asked before the layers are replaced
    windows = calibration(checkpoint, settings)[1] if settings.reads_text else None
    calib = None if windows is None else in_batches(windows)
    config = (
        SVDLLMConfig(update=LoraUpdate(seed=settings.seed)) if settings.method == "svd_llm_lora" else None
    )
    model = compress_lowrank(model, settings.method, settings.keep, calib, config=config, inplace=True)
    layers = dict(low_rank_layers(model))
    state = model.state_dict()
    stems = {
        name: place.removesuffix(".weight") for name, place in places.items() if name.endswith(".weight")
    }
    ranks = {
        name.removesuffix(".weight"): layers[stem].rank for name, stem in stems.items() if stem in layers
    }
    _require_places(skeleton(checkpoint.config), layers, {name: stems[f"{name}.weight"] for name in ranks})

    def convert(name: str, tensor: Tensor) -> Mapping[str, Tensor] | None:
        stem = stems.get(name)
        if stem in layers:
            stored, layer = name.removesuffix(".weight"), layers[stem]
            return {stored + A: as_stored(layer.a, tensor), stored + B: as_stored(layer.b, tensor)}
        now = state.get(places.get(name, ""))
        if now is None or now.shape != tensor.shape:  # merged on loading: none of these is compressed
            return None
        now = as_stored(now, tensor)
        return None if torch.equal(now, as_stored(tensor.to(model.dtype), tensor)) else {name: now}

    weights = Weights(checkpoint, PLAIN, {})
    form = form_with(ranks)
    write_converted(checkpoint, weights, convert, form, folder, lambda line: None)
    write_config(checkpoint, PLAIN, form, folder)


def _require_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers of a decoder-only language model, by its classes alone; anything else is refused."""
    require_decoder(model, "low rank")
    found: dict[str, nn.Linear] = {}
    for layer, module in linears(model).items():
        if type(module) is not nn.Linear:
            raise UsageError(
                f"{layer} is a {type(module).__name__}, and low rank takes plain nn.Linear only. Use a model with "
                "such layers."
            )
        found[layer] = module
    return found


def _require_places(model: nn.Module, layers: Mapping[str, LowRankLinear], stems: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose names Transformers would not lead to the factors when it loads them."""
    for stem in stems.values():
        layer = layers[stem]
        empty = LowRankLinear(layer.in_features, layer.out_features, layer.rank, device="meta")
        put(model, stem, empty)
    wanted = {name + part: stem + part for name, stem in stems.items() for part in (A, B)}
    found = parameters(model, wanted)
    if wrong := [name for name, place in wanted.items() if found.get(name) != place]:
        raise GnomonError(
            f"Transformers would look for {wrong[0]} elsewhere than in {wanted[wrong[0]]}, so this architecture can't "
            "be stored in low rank. Use compress_lowrank in memory."
        )


METHOD = ModelMethod(
    name=FORM.name, settings=LowRankSettings, prepare=prepare, run=run, form=FORM, growth=1.0
)
