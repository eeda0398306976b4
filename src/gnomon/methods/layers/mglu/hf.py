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
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from gnomon.core.checkpoints import CONFIG, GNOMON_STEM, GNOMON_TYPE, read_object
from gnomon.core.converting import BASE_TYPE, WEIGHTS, write_json
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.files import fsync_dir

from .config import MGLUConfig
from .model import frozen_shells, replace_mlp
from .modules import LAYOUTS, FrozenMGLULinear, MGLULinear, SwiMGLUMLP, require_filled

TYPE = f"{GNOMON_TYPE}mglu"
SINGLE, INDEX = f"{GNOMON_STEM}.safetensors", f"{GNOMON_STEM}.safetensors.index.json"
PREFIX = "MGLU"


class MGLUConfigMixin:
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

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As Transformers', which learns where the weights are.

        Raises:
            GnomonError: weights of another name than Gnomon's.
        """
        plain = {key: value for key, value in config_dict.items() if key not in (BASE_TYPE, WEIGHTS)}
        weights = config_dict.get(WEIGHTS)
        if weights not in (None, SINGLE, INDEX):
            raise GnomonError(
                f"{WEIGHTS} is {weights!r}, but must be {SINGLE} or {INDEX}. The config.json is damaged."
            )
        found = super().from_dict(plain, **kwargs)  # type: ignore[misc]
        config = found[0] if isinstance(found, tuple) else found
        if weights is not None:
            config.transformers_weights = weights  # dropped by Transformers whenever it saves
        return found

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), BASE_TYPE: _base_type(type(self))}  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        return {**super().to_diff_dict(), BASE_TYPE: _base_type(type(self))}  # type: ignore[misc]


def _base_type(kind: type) -> str:
    base: str = kind.__mro__[2].model_type  # type: ignore[attr-defined]
    return base


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


class MGLUModelMixin:
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

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As Transformers', with the weights under Gnomon's name.

        Raises:
            UsageError: `push_to_hub` or `variant`; a file in the place of the folder.
        """
        if kwargs.get("push_to_hub") or kwargs.get("variant") is not None:
            raise UsageError(
                "An MGLU model can't be saved with push_to_hub or a variant. Save it to a folder first, then "
                "model.push_to_hub(…) is `hf upload`."
            )
        target = Path(save_directory)
        if target.is_file():
            raise UsageError(f"{target} is a file. Give a folder.")
        target.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target, prefix=".saving-") as temporary:
            super().save_pretrained(temporary, *args, **kwargs)  # type: ignore[misc]
            beside = Path(temporary)
            if not (beside / CONFIG).exists():  # another rank writes, or an adapter was saved
                for file in beside.iterdir():
                    file.replace(target / file.name)
                return
            _rename_weights(beside)
            for stale in target.glob(f"{GNOMON_STEM}*.safetensors*"):
                stale.unlink()
            for file in sorted(
                beside.iterdir(), key=lambda path: path.name == CONFIG
            ):  # config.json comes last
                file.replace(target / file.name)
        fsync_dir(target)


def _rename_weights(folder: Path) -> None:
    """model*.safetensors to gnomon*.safetensors, in the index and in config.json too."""
    for path in folder.glob("model*.safetensors"):
        path.rename(folder / path.name.replace("model", GNOMON_STEM, 1))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        stated = json.loads(index.read_text())
        stated["weight_map"] = {
            name: file.replace("model", GNOMON_STEM, 1) for name, file in stated["weight_map"].items()
        }
        write_json(folder / INDEX, stated)
        index.unlink()
    sharded = (folder / INDEX).exists()
    write_json(folder / CONFIG, {**read_object(folder / CONFIG), WEIGHTS: INDEX if sharded else SINGLE})


@functools.cache
def model_class(base: Any) -> type[PreTrainedModel]:
    """The class of MGLU models made from this one."""
    strict = {*(base._keep_in_fp32_modules_strict or ()), "mask_logits"}  # steps near 0 are lost in bfloat16
    return type(
        f"{PREFIX}{base.__name__}",
        (MGLUModelMixin, base),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} whose MLPs are MGLUs.",
            "config_class": config_class(base.config_class),
            "_keep_in_fp32_modules_strict": strict,
        },
    )


_watchers: list[Callable[[type[PretrainedConfig]], None]] = []
_used: dict[type[PretrainedConfig], None] = {}


def watch(told: Callable[[type[PretrainedConfig]], None]) -> None:
    """Call `told` once with each configuration class that models have or will have, so that it can be registered."""
    if told not in _watchers:
        _watchers.append(told)
        for kind in _used:
            told(kind)


def _announce(kind: type[PretrainedConfig]) -> None:
    if kind not in _used:
        _used[kind] = None
        for told in _watchers:
            told(kind)


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
    _announce(type(new))
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "mask_logits"}
    _adopt_inner(model)


def _adopt_inner(model: PreTrainedModel) -> None:
    """The headless model inside draws missing weights by its own class."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, MGLUModelMixin):
            module.__class__ = model_class(module.__class__)


def of_dict(config_dict: dict[str, Any], **kwargs: Any) -> tuple[Any, str]:
    """(configuration, base type) of a `config.json` of type `gnomon_mglu`; with unused arguments if asked for.

    Raises:
        GnomonError: no known base type.
    """
    base = config_dict.get(BASE_TYPE)
    if not isinstance(base, str) or base not in CONFIG_MAPPING or base.startswith(GNOMON_TYPE):
        raise GnomonError(
            f"{BASE_TYPE} is {base!r}, which this version of Transformers doesn't have. The config.json is damaged, "
            "or its model is newer than the installed Transformers."
        )
    return config_class(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs), base


def __getattr__(name: str) -> Any:
    """The MGLU class of a Transformers class, so that any of them can be imported and unpickled by its name."""
    if name.startswith(PREFIX):
        base = getattr(transformers, name.removeprefix(PREFIX), None)
        if isinstance(base, type) and issubclass(base, PretrainedConfig):
            _announce(config_class(base))
            return config_class(base)
        if isinstance(base, type) and issubclass(base, PreTrainedModel):
            return model_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["INDEX", "SINGLE", "TYPE", "adopt", "config_class", "model_class", "of_dict", "watch"]
