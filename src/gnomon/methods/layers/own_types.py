"""Transformers models of a type of Gnomon's own, made from the classes of an ordinary decoder.

For a class such as `LlamaForCausalLM` a method makes one with its prefix, by two mixins that build on those here. The
folders say `model_type: gnomon_<name>`, what they are made of (`base_model_type`), and hold `gnomon.safetensors`, so
that Transformers alone refuses them instead of drawing weights at random.

Here:  reading and writing such folders, finding the classes by name.
Not here: what a method changes (`mglu.hf`, `saga.hf`), registration (`gnomon.plugins`).
Limit: the Trainer's resume_from_checkpoint looks for `model.safetensors` and so refuses such a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from gnomon.core.checkpoints import CONFIG, GNOMON_STEM, GNOMON_TYPE, read_object
from gnomon.core.converting import BASE_TYPE, WEIGHTS, write_json
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.files import fsync_dir

__all__ = [
    "INDEX",
    "SINGLE",
    "OwnConfigMixin",
    "OwnModelMixin",
    "Used",
    "base_config",
    "class_of_name",
    "of_dict",
    "recording",
]

SINGLE, INDEX = f"{GNOMON_STEM}.safetensors", f"{GNOMON_STEM}.safetensors.index.json"


class OwnConfigMixin:
    """What the configuration of a model of an own type adds to that of the ordinary one."""

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
        return {**super().to_dict(), BASE_TYPE: base_config(type(self)).model_type}  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        return {**super().to_diff_dict(), BASE_TYPE: base_config(type(self)).model_type}  # type: ignore[misc]


def base_config(kind: Any) -> type[PretrainedConfig]:
    """The configuration class that one of an own type is made from."""
    found: type[PretrainedConfig] = next(
        one
        for one in kind.__mro__
        if issubclass(one, PretrainedConfig) and not issubclass(one, OwnConfigMixin)
    )
    return found


class OwnModelMixin:
    """What a model of an own type does otherwise than the ordinary one when it is saved."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As Transformers', with the weights under Gnomon's name.

        Raises:
            UsageError: `push_to_hub` or `variant`; a file in the place of the folder.
        """
        if kwargs.get("push_to_hub") or kwargs.get("variant") is not None:
            raise UsageError(
                f"A {type(self).__name__} can't be saved with push_to_hub or a variant. Save it to a folder first, "
                "then model.push_to_hub(…) is `hf upload`."
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


def of_dict(
    config_dict: dict[str, Any], config_class: Callable[[Any], type[PretrainedConfig]], **kwargs: Any
) -> Any:
    """The configuration of a `config.json` of an own type; with unused arguments if asked for.

    Args:
        config_class: makes the own class from the ordinary one.

    Raises:
        GnomonError: no known base type.
    """
    base = config_dict.get(BASE_TYPE)
    if not isinstance(base, str) or base not in CONFIG_MAPPING or base.startswith(GNOMON_TYPE):
        raise GnomonError(
            f"{BASE_TYPE} is {base!r}, which this version of Transformers doesn't have. The config.json is damaged, "
            "or its model is newer than the installed Transformers."
        )
    return config_class(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs)


def recording(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class, entered where Transformers looks up which outputs (`output_hidden_states`, …) it can record.

    Transformers enters a class when one of its models is made by `__init__`; a model that becomes one in place, or
    comes out of a pickle, never passes there, and would return None for all of them.
    """
    _CAN_RECORD_REGISTRY[str(kind)] = kind._can_record_outputs
    return kind


class Used:
    """The configuration classes of one type that models have or will have, so that they can be registered."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[type[PretrainedConfig]], None]] = []
        self._kinds: dict[type[PretrainedConfig], None] = {}

    def watch(self, told: Callable[[type[PretrainedConfig]], None]) -> None:
        """Call `told` once with each class, those of before and those to come."""
        if told not in self._watchers:
            self._watchers.append(told)
            for kind in self._kinds:
                told(kind)

    def announce(self, kind: type[PretrainedConfig]) -> None:
        """There is such a class now."""
        if kind not in self._kinds:
            self._kinds[kind] = None
            for told in self._watchers:
                told(kind)


def class_of_name(
    module: str,
    name: str,
    prefix: str,
    config_class: Callable[[Any], type[PretrainedConfig]],
    model_class: Callable[[Any], type[PreTrainedModel]],
    used: Used,
) -> Any:
    """The own class of a Transformers class, so that any of them can be imported and unpickled by its name.

    Raises:
        AttributeError: there is no such class.
    """
    if name.startswith(prefix):
        base = getattr(transformers, name.removeprefix(prefix), None)
        if isinstance(base, type) and issubclass(base, PretrainedConfig):
            used.announce(config_class(base))
            return config_class(base)
        if isinstance(base, type) and issubclass(base, PreTrainedModel):
            return model_class(base)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
