"""NF12 in Transformers: a quantizer that puts layers on planes before the weights are loaded.

Transformers builds the model on the meta device, lets the quantizer replace modules, then reads every stored
tensor straight into the buffer or parameter of its name. So the layers' buffers bear the container's names and
have their final shapes, which the files' headers tell. Layers that are tied share one `NF12Weight`; as the
loader ties parameters only, the layer that the files don't name waits without a weight until the end.

Spread over several devices, tied layers each get a copy where they run.
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
from gnomon.methods.compress.nf12 import (
    Meta,
    NF12ScaledEmbedding,
    NF12Tensor,
    NF12Weight,
    compress_model,
    decompress_model,
    inspect,
    install,
)
from gnomon.methods.compress.nf12.apply import FORM, QUANTIZATION
from gnomon.methods.compress.nf12.model import replaceable

from .hf_forms import save

DTYPES = {"U8": torch.uint8, "I32": torch.int32, "BF16": torch.bfloat16}


class NF12QuantizationConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of NF12: says which layout the planes have. There is nothing to choose.

    Given to `from_pretrained` of an ordinary bfloat16 model, it has that model compressed once it is loaded.
    """

    def __init__(self, **stated: Any) -> None:
        """
        Raises:
            GnomonError: another version, layout or group size than this Gnomon reads.
        """
        for key, value in QUANTIZATION.items():
            if (said := stated.get(key, value)) != value:
                raise GnomonError(
                    f"quantization_config says {key}={said!r}; this Gnomon reads NF12 with {key}={value!r}. "
                    "Use the version of Gnomon that wrote it, or a newer one."
                )
            setattr(self, key, value)


class NF12Quantizer(HfQuantizer):  # type: ignore[misc]
    """Loads, saves and dequantizes NF12 models."""

    def __init__(self, quantization_config: NF12QuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.steps: tuple[Step, ...] = ()
        """What `gnomon.json` of the loaded folder records."""
        self._ties: dict[str, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._waiting: list[tuple[Any, NF12Weight]] = []

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        """Asked by Transformers' own `save_pretrained`, which would write what loads as random weights.

        A model's own `save_pretrained` is :func:`save_pretrained` below; only an unpickled copy comes here.
        """
        return False

    def validate_environment(self, device_map: str | Mapping[str, Any] | None = None, **_: Any) -> None:
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise UsageError(
                "The device map leaves layers on the disk, which NF12 weights can't be run from. Free memory, or "
                "give more devices."
            )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, *, checkpoint_files: Sequence[str] | None, **_: Any
    ) -> None:
        if not self.pre_quantized:
            return
        if not checkpoint_files:
            raise UsageError("An NF12 model is loaded from its folder, not from a state dict.")
        manifest = find_manifest(Path(checkpoint_files[0]).parent)
        self.steps = manifest.steps if manifest else ()
        self._ties = dict(model.all_tied_weights_keys)
        encoded, kept = _contents(checkpoint_files)
        places = {place: encoded[name] for name, place in parameters(model, encoded).items()}
        shared = [
            (source, target) if source in places else (target, source)
            for target, source in self._ties.items()
            if (source in places) != (target in places)
        ]
        for first, second in shared:
            _share(model, first, second)
        _require_layers(model, places)
        install(model, {place: _blank(meta) for place, meta in places.items()}, model.config.dtype)
        for _first, second in shared:
            layer = _layer(model, second)
            self._waiting.append((layer, layer.weight))
            layer.weight = nn.Module()
        _forget_ties(model)
        for module in model.modules():
            if isinstance(module, NF12Weight):  # some models initialise `layer.weight` of layers by name
                vars(module)["_is_hf_initialized"] = True
        _require_biases(model, kept)
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        if not self.pre_quantized:
            self._ties = dict(model.all_tied_weights_keys)
            compress_model(model)
            _forget_ties(model)
        for layer, weight in self._waiting:
            layer.weight = _near(layer, weight)
        self._waiting = []
        for name, parameter in model.named_parameters():
            wanted = self._dtypes.get(name, parameter.dtype)
            if (
                torch.promote_types(wanted, parameter.dtype) == wanted
            ):  # the loader leaves renamed ones narrow
                parameter.data = parameter.data.to(wanted)
        for name, module in model.named_modules():
            if isinstance(module, NF12ScaledEmbedding) and isinstance(module.embed_scale, torch.Tensor):
                module.embed_scale.fill_(
                    module.scalar
                )  # not stored, and Transformers can't know how to fill it
            if isinstance(module, NF12Weight):
                try:
                    module.tensor.validate()
                except GnomonError as error:
                    raise GnomonError(f"{name}: {error}") from None
        vars(model)["save_pretrained"] = MethodType(save_pretrained, model)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        decompress_model(model)
        for module in model.modules():
            vars(module).pop("_tied_weights_keys", None)
        model.all_tied_weights_keys = dict(self._ties)
        vars(model.config).pop("transformers_weights", None)
        for (
            parameter
        ) in model.parameters():  # model.to would also round what the rotary embedding keeps in float32
            if dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        return model


def save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder)` for an NF12 model: the same form again (see `hf_forms.save`).

    An adapter on top of it is saved as Transformers saves adapters.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(model, save_directory, **options)
        return
    state = dict(options.pop("state_dict", None) or model.state_dict())
    shared: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NF12Weight) and shared.setdefault(id(module), name) != name:
            state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.")}
    save(model, save_directory, FORM, state, model.hf_quantizer.steps, **options)


def _contents(files: Sequence[str]) -> tuple[dict[str, Meta], set[str]]:
    """Meta rows of the encoded matrices, and the names of the other tensors, from headers alone.

    Raises:
        GnomonError: as `container.inspect`; a matrix that lies in two files.
    """
    encoded, kept = dict[str, Meta](), set[str]()
    for path in files:
        with safe_open(path, "pt") as file:
            try:
                contents = inspect(file)
            except GnomonError as error:
                raise GnomonError(f"{path}: {error}") from None
        if twice := encoded.keys() & contents.encoded.keys():
            raise GnomonError(f"{path}: {min(twice)} lies in another file, too. Convert the model again.")
        encoded |= contents.encoded
        kept |= set(contents.raw)
    return encoded, kept


def _blank(meta: Meta) -> NF12Tensor:
    """Planes of the final shapes on the meta device, for the loader to fill."""
    planes = [
        torch.empty(shape, dtype=DTYPES[code], device="meta")
        for plane, (code, shape) in meta.forms.items()
        if plane != "nf12_meta"
    ]
    return NF12Tensor(planes[0], planes[1], planes[2], meta.base, (meta.rows, meta.columns))


def _require_layers(model: PreTrainedModel, places: Mapping[str, Meta]) -> None:
    if odd := places.keys() - replaceable(model):
        raise GnomonError(
            f"{min(odd)} is stored as NF12, but {type(model).__name__} uses it otherwise than as the weight of a "
            "linear layer or embedding. Load the ordinary model: gnomon apply dense --model D --out E"
        )


def _require_biases(model: PreTrainedModel, kept: set[str]) -> None:
    """The loader would fill a missing bias with whatever lies in memory: it knows no NF12 layer to initialise."""
    present = set(parameters(model, kept).values())
    for name, module in model.named_modules():
        on_planes = isinstance(getattr(module, "weight", None), NF12Weight)
        if on_planes and getattr(module, "bias", None) is not None and f"{name}.bias" not in present:
            raise GnomonError(f"{name}.bias is missing from the files. Convert the model again.")


def _layer(model: PreTrainedModel, weight: str) -> Any:
    """The layer whose weight has this dotted name."""
    return model.get_submodule(weight.removesuffix(".weight"))


def _share(model: PreTrainedModel, first: str, second: str) -> None:
    """Make the parameter `second` the same object as `first`, as tying will."""
    layer, _, name = second.rpartition(".")
    setattr(model.get_submodule(layer), name, model.get_parameter(first))


def _forget_ties(model: PreTrainedModel) -> None:
    """Leave Transformers only those ties that are between parameters: what shares an `NF12Weight` is tied by that."""
    ties = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if _is_parameter(model, target) and _is_parameter(model, source)
    }
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module)["_tied_weights_keys"] = {}
    vars(model)["_tied_weights_keys"] = ties
    model.all_tied_weights_keys = dict(ties)


def _is_parameter(model: nn.Module, name: str) -> bool:
    layer, _, attribute = name.rpartition(".")
    return isinstance(getattr(model.get_submodule(layer), attribute, None), nn.Parameter)


def _near(layer: nn.Module, weight: NF12Weight) -> NF12Weight:
    """The weight itself, or a copy on the device that accelerate runs the layer on."""
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if device is None or torch.device(device) == weight.device:
        return weight
    return NF12Weight(weight.tensor.to(device), weight.dtype)
