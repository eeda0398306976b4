"""Low rank in Transformers: linear layers become two factors before the weights are loaded.

What Transformers calls a quantizer is the one place where a model may be changed between being built and being
filled. Once it is filled, a low-rank model is no quantized one: its factors are ordinary parameters, it trains, moves
and is cast as any other. Only saving stays Gnomon's, as plain Transformers would lose the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.manifest import Step, find_manifest
from gnomon.core.places import parameters
from gnomon.methods.compress.lowrank.linear import LowRankLinear, low_rank_layers, put, to_dense
from gnomon.methods.compress.lowrank.stored import (
    BIAS,
    NAME,
    VERSION,
    A,
    B,
    form_with,
    ranks_of,
    require_factors,
)

from .hf_forms import save


class LowRankConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a low-rank folder: the rank of each layer, by its name in the files."""

    def __init__(self, ranks: Any = None, **stated: Any) -> None:
        """
        Raises:
            GnomonError: another version than this Gnomon reads; no ranks.
        """
        self.quant_method, self.version = NAME, VERSION
        self.ranks = ranks_of({**stated, "ranks": ranks})


class LowRankQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts :class:`LowRankLinear` layers into a model that is being loaded."""

    def __init__(self, quantization_config: LowRankConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.steps: tuple[Step, ...] = ()
        """What `gnomon.json` of the loaded folder records."""
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        """Asked by Transformers' own `save_pretrained`, which would write what loads as random weights.

        A model's own `save_pretrained` is :func:`save_pretrained` below; only an unpickled copy comes here.
        """
        return False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, *, checkpoint_files: Sequence[str] | None, **_: Any
    ) -> None:
        if not checkpoint_files or not self.pre_quantized:
            raise UsageError(
                "A low-rank model is loaded from a folder that gnomon apply lowrank wrote, not from a state dict or "
                "an ordinary model."
            )
        manifest = find_manifest(Path(checkpoint_files[0]).parent)
        self.steps = manifest.steps if manifest else ()
        ranks, shapes = self.quantization_config.ranks, _shapes(checkpoint_files)
        require_factors(ranks, shapes)
        places = parameters(model, [f"{name}.weight" for name in ranks])
        present = set(parameters(model, shapes).values())
        made: dict[int, LowRankLinear] = {}
        for name in ranks:
            place = places.get(f"{name}.weight", "").removesuffix(".weight")
            layer = _linear(model, place, name)
            a, b = shapes[name + A], shapes[name + B]
            if (a[0], b[1]) != (layer.out_features, layer.in_features):
                raise GnomonError(
                    f"{name} is {a[0]} x {b[1]} in the files, but {layer.out_features} x {layer.in_features} in "
                    f"{type(model).__name__}. The folder is damaged; apply the method again."
                )
            if layer.bias is not None and f"{place}{BIAS}" not in present:
                raise GnomonError(f"{name}{BIAS} is missing from the files. Apply the method again.")
            if id(layer) not in made:
                made[id(layer)] = _blank(layer, a[1])
            put(model, place, made[id(layer)])
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        if getattr(model, "_tp_size", None) is not None:
            raise UsageError(
                "A low-rank layer can't be split over devices by tensor parallelism, whose plan knows whole matrices "
                "only. Load without tp_plan, or make it dense first: "
                "gnomon.methods.compress.lowrank.to_dense(model).save_pretrained(E)"
            )
        for name, parameter in model.named_parameters():
            if parameter.shape != self._shapes.get(name, parameter.shape):  # not looked at by the loader
                raise GnomonError(
                    f"{name} is {list(parameter.shape)} in the files, but {list(self._shapes[name])} in "
                    f"{type(model).__name__}. The folder is damaged; apply the method again."
                )
            wanted = self._dtypes.get(name, parameter.dtype)
            if (
                torch.promote_types(wanted, parameter.dtype) == wanted
            ):  # the loader leaves renamed ones narrow
                parameter.data = parameter.data.to(wanted)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # nothing in it is quantized
                vars(module).pop("quantization_method", None)
                module.is_quantized = False
                vars(module.config).pop("_is_quantized", None)
        vars(model)["save_pretrained"] = MethodType(save_pretrained, model)

    def remove_quantization_config(self, model: PreTrainedModel) -> None:
        super().remove_quantization_config(model)
        vars(model.config).pop("transformers_weights", None)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        return to_dense(model)


def save_lowrank(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a model with low-rank layers, compressed in memory or loaded, to a folder of type `gnomon_lowrank`.

    Args:
        options: `is_main_process`, `max_shard_size`, `state_dict` as in `PreTrainedModel.save_pretrained`.

    Raises:
        UsageError: no low-rank layers, weights on the meta device, options that have no meaning for this form.
    """
    layers = dict(low_rank_layers(model))
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no low-rank layers. Call compress_lowrank first, or convert its folder: "
            "gnomon apply lowrank --model M --out D"
        )
    state = dict(options.pop("state_dict", None) or model.state_dict())
    if meta := [name for name, tensor in state.items() if tensor.is_meta]:
        raise UsageError(f"{meta[0]} is on the meta device and has no values. Load the whole model first.")
    loader = getattr(model, "hf_quantizer", None)
    steps = loader.steps if isinstance(loader, LowRankQuantizer) else ()
    ranks = _stored_ranks(model, layers)
    save(model, folder, form_with(ranks), state, steps, settings={"made": "in memory"}, **options)


def save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder)` of a loaded low-rank model: the same form again (see :func:`save_lowrank`).

    An adapter on top of it is saved as Transformers saves adapters.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(model, save_directory, **options)
        return
    save_lowrank(model, save_directory, **options)


def _stored_ranks(model: PreTrainedModel, layers: Mapping[str, LowRankLinear]) -> dict[str, int]:
    """Ranks by the names that `save` gives the layers' factors in the files."""
    from transformers.core_model_loading import revert_weight_conversion

    marks = {
        name + part: torch.empty(layer.rank, device="meta")
        for name, layer in layers.items()
        for part in (A, B)
    }
    found = revert_weight_conversion(model, marks)
    return {name.removesuffix(A): len(mark) for name, mark in found.items() if name.endswith(A)}


def _shapes(files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of all stored tensors, from headers alone."""
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                found[name] = tuple(file.get_slice(name).get_shape())
    return found


def _linear(model: PreTrainedModel, place: str, name: str) -> nn.Linear:
    try:
        layer = model.get_submodule(place) if place else None
    except AttributeError:
        layer = None
    if type(layer) is not nn.Linear:
        kind = "no layer" if layer is None else f"a {type(layer).__name__}"
        raise GnomonError(
            f"The files hold {name} in low rank, but {type(model).__name__} has {kind} there. The folder is damaged, "
            "or its architecture has changed in this version of Transformers."
        )
    return layer


def _blank(layer: nn.Linear, rank: int) -> LowRankLinear:
    """A layer of the final shapes on the meta device, for the loader to fill."""
    made = LowRankLinear(
        layer.in_features,
        layer.out_features,
        rank,
        layer.bias is not None,
        device="meta",
        dtype=layer.weight.dtype,
    )
    return made.train(layer.training)
