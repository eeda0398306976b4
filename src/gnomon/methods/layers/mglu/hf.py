"""MGLU as Transformers models: for each class of a decoder one whose MLPs are MGLUs.

    MGLULlamaConfig, MGLULlamaModel, MGLULlamaForCausalLM, MGLUQwen2ForCausalLM, ...

made from the class of the same name without "MGLU", as attributes of this module. Their folders are of type
`gnomon_mglu`, say what they are made of (`base_model_type`), and hold `gnomon.safetensors`, so that Transformers
alone refuses them instead of drawing an MLP at random. `gnomon.plugins.hf_mglu` registers them.

Limit: the Trainer's resume_from_checkpoint looks for `model.safetensors` and so refuses such a folder.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from gnomon.core.checkpoints import GNOMON_TYPE
from gnomon.core.errors import GnomonError

from .. import own_types
from ..own_types import INDEX, SINGLE, OwnConfigMixin, OwnModelMixin
from .config import MGLUConfig
from .model import frozen_shells, replace_mlp
from .modules import LAYOUTS, FrozenMGLULinear, MGLULinear, SwiMGLUMLP, require_filled

TYPE = f"{GNOMON_TYPE}mglu"
PREFIX = "MGLU"


class MGLUConfigMixin(OwnConfigMixin):
    """What the configuration of an MGLU model adds to that of the ordinary one."""

    mglu: dict[str, Any] | None
    """The fields of `MGLUConfig`, and `frozen`: the layout of packed masks, or None."""

    @property
    def layers_config(self) -> MGLUConfig:
        """The setting of the layers.

        Raises:
            GnomonError: fields that `MGLUConfig` doesn't have.
        """
        stated = dict(self.mglu or {})
        stated.pop("frozen", None)
        known = {field.name for field in dataclasses.fields(MGLUConfig)}
        if odd := stated.keys() - known:
            raise GnomonError(
                f"config.json states mglu.{min(odd)}, which this version of Gnomon doesn't know."
            )
        return MGLUConfig(**stated)

    @property
    def frozen_layout(self) -> str | None:
        """The layout of packed masks.

        Raises:
            GnomonError: an unknown one.
        """
        layout = (self.mglu or {}).get("frozen")
        if layout is not None and layout not in LAYOUTS:
            raise GnomonError(f"config.json states mglu.frozen={layout!r}; known are {', '.join(LAYOUTS)}.")
        return layout


@functools.cache
def config_class(base: Any) -> type[PretrainedConfig]:
    """The configuration class of MGLU models made from this one."""
    return type(
        f"{PREFIX}{base.__name__}",
        (MGLUConfigMixin, base),
        {
            "__module__": __name__,
            "__annotations__": {"mglu": dict[str, Any] | None},
            "__doc__": f"{base.__name__} with the settings of MGLU.",
            "mglu": None,
            "model_type": TYPE,
            "base_model_tp_plan": {
                k: v for k, v in (base.base_model_tp_plan or {}).items() if ".mlp." not in k
            },
        },
    )


class MGLUModelMixin(OwnModelMixin):
    """What an MGLU model does otherwise than the ordinary one."""

    config: Any

    def __init__(self, config: PretrainedConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)  # type: ignore[call-arg]
        if not any(isinstance(module, SwiMGLUMLP) for module in self.modules()):  # type: ignore[attr-defined]
            replace_mlp(self, config.layers_config)  # type: ignore[arg-type]
        if config.frozen_layout is not None:
            frozen_shells(self, config.frozen_layout)  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        """For what a checkpoint lacks; Transformers' functions leave alone what it holds."""
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, MGLULinear):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.mask_logits is not None:
                init.normal_(module.mask_logits, std=module.mask_init_std)
        elif isinstance(module, FrozenMGLULinear):
            held = (module.weight, getattr(module, f"mask_{module.layout}"))
            if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in held):
                require_filled(module)


@functools.cache
def model_class(base: Any) -> type[PreTrainedModel]:
    """The class of MGLU models made from this one."""
    strict = {*(base._keep_in_fp32_modules_strict or ()), "mask_logits"}  # steps near 0 are lost in bfloat16
    made = type(
        f"{PREFIX}{base.__name__}",
        (MGLUModelMixin, base),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} whose MLPs are MGLUs.",
            "config_class": config_class(base.config_class),
            "_keep_in_fp32_modules_strict": strict,
        },
    )
    return own_types.recording(made)


_used = own_types.Used()
watch = _used.watch


def adopt(model: PreTrainedModel, config: MGLUConfig) -> None:
    """Make a Transformers model whose MLPs were replaced one of type `gnomon_mglu`, in place.

    Its configuration is copied first: others may share it.
    """
    if isinstance(model, MGLUModelMixin):
        _adopt_inner(model)
        return
    old = model.config
    new = copy.deepcopy(old)
    new.__class__ = config_class(old.__class__)
    new.mglu = {**dataclasses.asdict(config), "frozen": None}
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    model.__class__ = model_class(model.__class__)
    _used.announce(type(new))
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "mask_logits"}
    _adopt_inner(model)


def _adopt_inner(model: PreTrainedModel) -> None:
    """The headless model inside draws missing weights by its own class."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, MGLUModelMixin):
            module.__class__ = model_class(module.__class__)


def of_dict(config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """The configuration of a `config.json` of type `gnomon_mglu`; with unused arguments if asked for.

    Raises:
        GnomonError: no known base type.
    """
    return own_types.of_dict(config_dict, config_class, **kwargs)


def __getattr__(name: str) -> Any:
    """The MGLU class of a Transformers class, so that any of them can be imported and unpickled by its name."""
    return own_types.class_of_name(__name__, name, PREFIX, config_class, model_class, _used)


__all__ = ["INDEX", "SINGLE", "TYPE", "adopt", "config_class", "model_class", "of_dict", "watch"]
