"""`gnomon apply lua`: a model folder with learnt zeros, or with those of any other pruner and allocation.

The whole model is loaded and pruned; what is written is the input's own tensors, shard by shard and bit for bit, with
zeros in the pruned matrices. Transformers alone loads the folder. N:M patterns come with a file of masks beside it.

Here:  settings, what is refused beforehand, the folder.
Not here: learning (`allocator`, `fitting`), pruners and the other allocators (`..pruning`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gnomon.core.applying import ModelMethod, Source
from gnomon.core.checkpoints import Checkpoint
from gnomon.core.converting import write_config, write_converted
from gnomon.core.errors import GnomonError, NumericalFailure, UsageError, unknown
from gnomon.core.forms import PLAIN, Weights
from gnomon.core.layers import is_conv1d, linears
from gnomon.core.places import parameters, skeleton
from gnomon.core.refs import as_path

from ..applied import (
    as_stored,
    draw_windows,
    in_batches,
    main_dtype,
    reach,
    require_decoder,
    token_stream_of,
)
from ..pruning import (
    ALLOCATIONS,
    PRUNERS,
    Allocation,
    MaskLLMConfig,
    Pattern,
    PruneConfig,
    budget,
    collect_importance,
    prune,
)
from ..pruning.export import MASKS, save_masks
from .allocator import LuaAllocator, require_settings

if TYPE_CHECKING:
    from gnomon.core.data import Batches

log = logging.getLogger(__name__)

LUA = "lua"
NAMES = (LUA, *PRUNERS)
IMPORTANCE = ("wanda", "magnitude")
HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class LuaSettings:
    """How a model is pruned. The defaults of Lua are the paper's, but for its text."""

    sparsity: float | None = None
    """Share of the weights in the decoder's linear layers that ends up as zero; None: a pattern's own, else half."""
    pruner: str = LUA
    """lua takes the learnt masks; magnitude, wanda, sparsegpt and maskllm prune to the shares of an allocation."""
    allocation: str = ""
    """What each part loses: lua, uniform, owl, alpha or atp; empty: lua, or uniform with a pattern."""
    pattern: str = ""
    """N:M such as 2:4, which keeps 2 of 4 neighbouring inputs; not with the pruner lua."""
    importance: str = "wanda"
    """What Lua ranks weights by: wanda or magnitude."""
    granularity: str = "row"
    """Of Lua's thresholds: row, column or layer."""
    reg: str = "kept"
    """Lua's regulariser counts kept or removed weights."""
    reg_weight: float = 16.0
    """λ_reg."""
    min_kept: int = 1
    """Weights of each row that always stay; 0 lets rows die."""
    steps: int = 500
    """Of the training of Lua, and of MaskLLM (whose paper takes 2,000)."""
    batch: int = 2
    """Windows a step; the paper's 500 steps read 1,000."""
    lr: float = 5e-3
    weight_decay: float = 0.0
    """Of the thresholds; the paper's is 0.05."""
    calib: str = "mixed"
    """Text for importance and training: a recipe (`gnomon.core.data`), a file or a folder."""
    samples: int = 128
    """Windows of that text, drawn at random, for importance and Hessians."""
    length: int = 2048
    """Tokens a window; the model's own limit where that is lower."""
    seed: int = 0
    """Of the windows, and of what the method draws."""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("pruner", self.pruner, NAMES),
            ("allocation", self.learns_or, ALLOCATIONS),
            ("importance", self.importance, IMPORTANCE),
        ):
            if value not in known:
                raise unknown(what, value, known)
        if self.pattern:
            share = Pattern.parse(self.pattern).sparsity
            if self.pruner == LUA:
                raise UsageError(
                    f"pattern={self.pattern} fixes what each group loses, which leaves the pruner lua nothing to "
                    "choose. Name another: pruner=wanda, sparsegpt, magnitude or maskllm."
                )
            if self.sparsity is not None and abs(self.sparsity - share) > 1e-9:
                raise UsageError(
                    f"pattern={self.pattern} removes {share:g}, but sparsity={self.sparsity}. Leave one out."
                )
        if self.pruner == "maskllm" and not self.pattern:
            raise UsageError("pruner=maskllm learns N:M masks. Give a pattern, such as 2:4.")
        if self.pruner == LUA and self.learns_or != LUA:
            raise UsageError(
                f"pruner=lua takes its own masks, so allocation={self.allocation} has no use. Name another pruner, "
                "such as wanda."
            )
        require_settings(
            self.share, self.granularity, "in_features", self.reg_weight, self.reg, self.min_kept
        )
        least = {"steps": 1, "batch": 1, "samples": 1, "length": 2, "seed": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {minimum}.")
        if not self.lr > 0 or not self.weight_decay >= 0:
            raise UsageError(
                f"lr={self.lr} must be positive and weight_decay={self.weight_decay} at least 0."
            )
        if not self.calib:
            raise UsageError("calib is empty. Name a text: mixed, stdlib, a file or a folder.")

    @property
    def learns_or(self) -> str:
        """The allocation, spelt out."""
        return self.allocation or ("uniform" if self.pattern else LUA)

    @property
    def share(self) -> float:
        """p."""
        if self.pattern:
            return Pattern.parse(self.pattern).sparsity
        return HALF if self.sparsity is None else self.sparsity

    @property
    def reads_text(self) -> bool:
        return self.pruner != "magnitude" or self.learns_or in (LUA, "owl", "atp")


def prepare(checkpoint: Checkpoint, settings: LuaSettings) -> Mapping[str, Any]:
    """Refuse what can't be pruned; for the record, which text is read.

    Raises:
        UsageError: no decoder-only language model; a text that is too short.
        GnomonError: a model that Transformers doesn't know; a linear layer made of several stored tensors; no
            tokenizer for the text.
    """
    model = skeleton(checkpoint.config)
    require_decoder(model, "pruning")
    main_dtype(checkpoint, "prune")
    places = parameters(model, checkpoint.entries)
    known = set(places.values())
    found = linears(model)
    if not found:
        raise UsageError(f"{type(model).__name__} has no linear layer in its decoder layers to prune.")
    for name in found:
        if f"{name}.weight" not in known:
            raise GnomonError(
                f"The weight of {name} is no tensor of its own in this checkpoint: Transformers puts it together on "
                "loading, and zeros can't be put back. Use prune or LuaAllocator in memory."
            )
    if not settings.reads_text:
        return {}
    text, windows, _ = text_for(checkpoint, settings)
    return {"calib_sha256": text, "calib_tokens": windows.numel()}


def text_for(checkpoint: Checkpoint, settings: LuaSettings) -> tuple[str, Tensor, Batches]:
    """(SHA-256 of the text, windows for statistics (samples, length), batches to train on): drawn from the seed."""
    from gnomon.core.data import Batches

    instead = "pruner=magnitude with allocation=uniform, which needs none"
    text, stream = token_stream_of(checkpoint, settings.calib, method=settings.pruner, instead=instead)
    windows = draw_windows(
        stream,
        checkpoint,
        name=as_path(settings.calib).name,
        samples=settings.samples,
        length=settings.length,
        seed=settings.seed,
    )
    length = min(settings.length, reach(checkpoint.config))
    generator = torch.Generator().manual_seed(settings.seed + 1)
    return text, windows, Batches(stream, batch=settings.batch, length=length, generator=generator)


def run(source: Source, folder: Path, settings: LuaSettings) -> None:
    """Prune the model and write it."""
    from gnomon.core.models import load_model

    checkpoint = source.checkpoint
    model = load_model(source.folder, dtype=main_dtype(checkpoint, "prune"))
    places = parameters(model, checkpoint.entries)
    masks = _pruned(model, checkpoint, settings)
    layers = linears(model)
    stems = {name: place.removesuffix(".weight") for name, place in places.items()}
    counted = {name: stem for name, stem in stems.items() if stem in masks and name.endswith(".weight")}
    zeros = 0

    def convert(name: str, tensor: Tensor) -> Mapping[str, Tensor] | None:
        nonlocal zeros
        if name not in counted:
            return None
        layer = layers[counted[name]]
        stays = masks[counted[name]].T if is_conv1d(layer) else masks[counted[name]]
        if settings.pruner == "sparsegpt":  # it moves the weights that stay
            tensor = as_stored(cast(Tensor, layer.weight), tensor)
        new = tensor.masked_fill(~stays.to(tensor.device), 0).contiguous()
        zeros += int((new == 0).sum())
        return {name: new}

    weights = Weights(checkpoint, PLAIN, {})
    write_converted(checkpoint, weights, convert, PLAIN, folder, lambda line: None)
    write_config(checkpoint, PLAIN, PLAIN, folder)
    total = sum(mask.numel() for mask in masks.values())
    wanted = budget(settings.share, total)
    log.info("%s of %s weights are zero", f"{zeros:,}", f"{total:,}")
    if not settings.pattern and abs(zeros - wanted) > 1:
        raise NumericalFailure(
            f"{zeros:,} of {total:,} weights are zero as they are stored, but {wanted:,} were asked for: kept weights "
            "vanish in the dtype of this checkpoint. Convert it to float32 first."
        )
    if settings.pattern:
        whole = {name: mask.contiguous() for name, mask in masks.items()}
        save_masks(whole, folder / MASKS, pattern=Pattern.parse(settings.pattern))


def _pruned(model: nn.Module, checkpoint: Checkpoint, settings: LuaSettings) -> dict[str, Tensor]:
    """Prune in memory; the masks, on the CPU."""
    calib: list[Tensor] | None = None
    training: Batches | None = None
    if settings.reads_text:
        _, windows, training = text_for(checkpoint, settings)
        calib = in_batches(windows)
    allocation: str | Allocation = settings.learns_or
    if allocation == LUA:
        scores = collect_importance(model, calib, metric=settings.importance)
        alloc = LuaAllocator(
            model,
            scores,
            settings.share,
            granularity=settings.granularity,
            reg=settings.reg,
            reg_weight=settings.reg_weight,
            min_kept=settings.min_kept,
        )
        assert training is not None
        done = alloc.fit(training, steps=settings.steps, lr=settings.lr, weight_decay=settings.weight_decay)
        log.info("%s thresholds, sparsity %.4f before the offset", alloc.trained_numbers, done.sparsity)
        if settings.pruner == LUA:
            alloc.apply()
            return {name: mask.cpu() for name, mask in alloc.harden().items()}
        # SparseGPT chooses inside blocks of columns, so it takes shares of these
        axis = "column" if settings.pruner == "sparsegpt" and not settings.pattern else None
        allocation = alloc.allocation("matrix" if settings.pattern else axis)
        alloc.unparametrize()
    sparsity = None if settings.pattern else settings.share
    report = prune(
        model,
        settings.pruner,
        sparsity,
        pattern=settings.pattern or None,
        allocation=allocation,
        calib=calib,
        config=PruneConfig(maskllm=MaskLLMConfig(steps=settings.steps, seed=settings.seed)),
    )
    for note in report.notes:
        log.info("%s", note)
    return dict(report.masks)


METHOD = ModelMethod(name=LUA, settings=LuaSettings, prepare=prepare, run=run, form=PLAIN, growth=1.1)
