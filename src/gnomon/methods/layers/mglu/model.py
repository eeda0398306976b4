"""MGLU in a whole model: put it in for pretraining, freeze it for use, look at it, group its parameters."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnomon.core.errors import UsageError, number, unknown
from gnomon.core.layers import decoder_stack, sublayers, unwrap
from gnomon.kernels.mglu.planes import unpack, width

from .config import MGLUConfig
from .modules import LAYOUTS, FrozenMGLULinear, MGLULinear, SwiMGLUMLP
from .moeg import hard_masks

__all__ = ["MaskStats", "freeze_masks", "mask_stats", "mglu_layers", "param_groups", "replace_mlp"]

_GATED = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Mistral, Qwen, Gemma, OLMo
    (("gate_up_proj",), "down_proj"),  # Phi-3
    (("w1", "w3"), "w2"),
)
"""Names of gate and value, and of the output projection, in MLPs that are gated."""


def replace_mlp(
    model: nn.Module, config: MGLUConfig | None = None, *, generator: torch.Generator | None = None
) -> nn.Module:
    """Put an MGLU in the place of every gated MLP of a decoder, for pretraining from scratch.

    The shared matrices are drawn anew, as wide as the gates were; output projections stay as they are. It converts
    nothing: a model that was trained has to be trained again. A Transformers model becomes one of type
    `gnomon_mglu`, whose `save_pretrained` writes what `import gnomon.hf` and `from_pretrained` read.

    Args:
        model: changed in place.
        config: None is the paper's default.
        generator: of the draws; None takes torch's own.

    Returns:
        the model.

    Raises:
        UsageError: an MLP that isn't gated, has biases or is replaced already; nothing is changed then.
    """
    config = config or MGLUConfig()
    if not isinstance(config, MGLUConfig):
        raise UsageError(f"config is {type(config).__name__}, not an MGLUConfig(n_masks=…, …).")
    root = unwrap(model)
    found = []
    for layer in decoder_stack(model).layers:
        mlp = sublayers(layer).mlp
        found.append(
            (layer, next(name for name, child in layer.named_children() if child is mlp), _Gated.of(mlp))
        )
    std = getattr(getattr(root, "config", None), "initializer_range", None)
    for layer, name, old in found:
        weight = old.down.weight
        new = SwiMGLUMLP(
            old.hidden,
            old.inner,
            config,
            down_proj=old.down,
            init_std=std,
            generator=generator,
            device=weight.device,
            dtype=weight.dtype,
        )
        setattr(layer, name, new.train(layer.training))
    if _is_transformers(root):
        importlib.import_module(f"{__package__}.hf").adopt(root, config)
    return model


@dataclass(frozen=True)
class _Gated:
    """A gated MLP's sizes and its output projection."""

    hidden: int
    inner: int
    down: nn.Linear

    @classmethod
    def of(cls, mlp: nn.Module) -> _Gated:
        """
        Raises:
            UsageError: it isn't gated, has biases or is an MGLU already.
        """
        if isinstance(mlp, SwiMGLUMLP):
            raise UsageError("The model's MLPs are MGLUs already. Start from the ordinary model.")
        for inputs, output in _GATED:
            parts = [getattr(mlp, name, None) for name in (*inputs, output)]
            if not all(isinstance(part, nn.Linear) for part in parts):
                continue
            if any(part.bias is not None for part in parts):  # type: ignore[union-attr]
                raise UsageError(
                    f"{type(mlp).__name__} has biases, which MGLU doesn't. Build the model without."
                )
            down: Any = parts[-1]
            return cls(down.out_features, down.in_features, down)
        names = ", ".join(name for name, _ in mlp.named_children()) or "nothing"
        raise UsageError(
            f"{type(mlp).__name__} is no gated MLP: it owns {names}, not gate_proj, up_proj and down_proj (or "
            "gate_up_proj) as linear layers. MGLU takes the place of a GLU, such as Llama's."
        )


def mglu_layers(model: nn.Module) -> dict[str, SwiMGLUMLP]:
    """The MGLU MLPs of a model by name.

    Raises:
        UsageError: there is none.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, SwiMGLUMLP)}
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no MGLU layer. Put them in with replace_mlp(model, config)."
        )
    return found


def freeze_masks(model: nn.Module, layout: str = "planes") -> nn.Module:
    """Drop the mask logits and keep the masks as bits, in place; the model is in evaluation mode afterwards.

    Args:
        layout: "planes" takes n_m bits a weight and runs fast; "code" takes 8 and is for tools that want one byte.

    Returns:
        the model.

    Raises:
        UsageError: an unknown layout; no MGLU layer, or one that can't be frozen or is already.
        NumericalFailure: logits that aren't numbers.
    """
    if layout not in LAYOUTS:
        raise unknown("layout of masks", layout, LAYOUTS)
    layers = mglu_layers(model)
    packed = {}
    for name, mlp in layers.items():  # all of them first, so that a refusal changes nothing
        if isinstance(mlp.proj, FrozenMGLULinear):
            raise UsageError(f"The masks of {name} are frozen already, as {mlp.proj.layout}.")
        packed[name] = FrozenMGLULinear.of(mlp.proj, layout)
    for name, mlp in layers.items():
        mlp.proj = packed[name]
    settings: Any = getattr(unwrap(model), "config", None)
    if isinstance(stated := getattr(settings, "mglu", None), dict):
        settings.mglu = {**stated, "frozen": layout}
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class MaskStats:
    """How the masks of one layer split its weight."""

    gate_ratio: float
    """Share of ones over all masks: the part of the weight that gates. The paper finds .45 to .55."""
    per_mask: tuple[float, ...]
    constant_rows: float
    """Share of (mask, output) pairs whose mask is all ones or all zeros: with g(0) = 0 they output 0 always."""


@torch.no_grad()
def mask_stats(model: nn.Module) -> dict[str, MaskStats]:
    """Gate ratios of each layer, by its name, in order of depth.

    Raises:
        UsageError: no MGLU layer with masks.
    """
    found = {}
    for name, mlp in mglu_layers(model).items():
        if isinstance(mlp.proj, FrozenMGLULinear):
            masks = unpack(mlp.proj.planes, mlp.proj.in_features)
        elif mlp.proj.mask_logits is not None:
            masks = hard_masks(mlp.proj.mask_logits)
        else:
            continue
        ones = masks.sum(-1)  # (n, d)
        per_mask = (ones.sum(-1).double() / masks[0].numel()).tolist()
        found[name] = MaskStats(
            gate_ratio=sum(per_mask) / len(per_mask),
            per_mask=tuple(per_mask),
            constant_rows=float(((ones == 0) | (ones == masks.shape[-1])).double().mean()),
        )
    if not found:
        raise UsageError("No layer has masks: all are of the ablation masked='neither'.")
    return found


def param_groups(
    model: nn.Module,
    weight_decay: float,
    mask_lr: float | None = None,
    mask_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices, vectors (norms and biases, without decay: inferred) and mask logits.

    Args:
        weight_decay: of the matrices. Decay pulls logits to 0, where small steps flip bits.
        mask_lr: of the logits; None leaves it to the optimizer's default.
        mask_weight_decay: of the logits; None takes the layers' own setting, else `weight_decay`, as in the paper.

    Raises:
        UsageError: no MGLU layer, layers that state different decays, or numbers out of range.
    """
    layers = mglu_layers(model)
    if mask_weight_decay is None:
        stated = {mlp.config.mask_weight_decay for mlp in layers.values()}
        if len(stated) > 1:
            raise UsageError(
                f"Layers state the mask_weight_decay {sorted(map(str, stated))}. Pass one for all."
            )
        [own] = stated
        mask_weight_decay = weight_decay if own is None else own
    for name, value in (
        ("weight_decay", weight_decay),
        ("mask_lr", mask_lr),
        ("mask_weight_decay", mask_weight_decay),
    ):
        if value is None and name == "mask_lr":
            continue
        if not 0 <= number(value) < math.inf:
            raise UsageError(f"{name}={value!r} must be finite and not negative.")
    masks = {id(p) for mlp in layers.values() if (p := _logits(mlp)) is not None}
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim > 1 and id(p) not in masks], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in trainable if id(p) in masks], "weight_decay": mask_weight_decay},
    ]
    if mask_lr is not None:
        groups[-1]["lr"] = mask_lr
    return [group for group in groups if group["params"]]


def _logits(mlp: SwiMGLUMLP) -> nn.Parameter | None:
    logits = mlp.proj.mask_logits if isinstance(mlp.proj, MGLULinear) else None
    return logits if isinstance(logits, nn.Parameter) else None


def _is_transformers(model: Any) -> bool:
    """Whether it is a Transformers model, without loading Transformers."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def frozen_shells(model: nn.Module, layout: str) -> None:
    """For loaders: layers of the frozen shapes, to be filled from files."""
    for mlp in mglu_layers(model).values():
        proj = mlp.proj
        if not isinstance(proj, MGLULinear):
            continue
        n, d, h = proj.n_masks, proj.out_features, proj.in_features
        shape = (n, d, width(h)) if layout == "planes" else (d, h)
        blank = torch.zeros(shape, dtype=torch.uint8, device=proj.weight.device)
        mlp.proj = FrozenMGLULinear(proj.weight, blank, n, layout)
