"""Folders of ordinary models in a stored form: the configuration that unwraps them, and saving them again."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from gnomon import __version__
from gnomon.core.checkpoints import CONFIG, GNOMON_STEM, GNOMON_TYPE, MANIFEST, read_object
from gnomon.core.converting import BASE_TYPE, WEIGHTS, unwrapped, wrapped, write_json
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.files import fsync_dir, write_atomic
from gnomon.core.forms import Form, combined, digest
from gnomon.core.manifest import Digest, Manifest, Step
from gnomon.core.safe_files import header_room, writing

SINGLE = f"{GNOMON_STEM}.safetensors"
INDEX = f"{GNOMON_STEM}.safetensors.index.json"


def wrapped_config(form: Form) -> type[PretrainedConfig]:
    """The configuration class of `gnomon_<form>`: what it makes of a `config.json` is the inner configuration."""

    class WrappedConfig(PretrainedConfig):  # type: ignore[misc]
        model_type = GNOMON_TYPE + form.name

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            """The inner configuration, which knows where the weights are.

            Raises:
                GnomonError: no known inner type, or weights of another name than Gnomon's.
            """
            base, weights = config_dict.get(BASE_TYPE), config_dict.get(WEIGHTS)
            if not isinstance(base, str) or base not in CONFIG_MAPPING or base.startswith(GNOMON_TYPE):
                raise GnomonError(
                    f"{BASE_TYPE} is {base!r}, which this version of Transformers doesn't have. The config.json is "
                    "damaged, or its model is newer than the installed Transformers."
                )
            if weights not in (SINGLE, INDEX):
                raise GnomonError(
                    f"{WEIGHTS} is {weights!r}, but must be {SINGLE} or {INDEX}. The config.json is damaged."
                )
            # quantization_config stays: it is how Transformers finds the quantizer, which judges what it says
            plain = unwrapped(config_dict, form) | {
                key: _stated(config_dict.get(key, value), value, key) for key, value in form.config.items()
            }
            found = CONFIG_MAPPING[base].from_dict(plain, **kwargs)
            config = found[0] if isinstance(found, tuple) else found
            for part in {id(one): one for one in (config, config.get_text_config())}.values():
                part.transformers_weights = weights  # dropped by Transformers whenever it saves
            return found

    return WrappedConfig


def _stated(found: Any, expected: Mapping[str, Any], key: str) -> Any:
    """What a folder says under `key`, if it is for the quantizer of its form and no other."""
    method = "quant_method"
    if not isinstance(found, dict) or found.get(method) != expected[method]:
        said = found.get(method) if isinstance(found, dict) else found
        raise GnomonError(
            f"{key} says {method}={said!r}, but must say {expected[method]!r}. The config.json is damaged."
        )
    return {
        name: value for name, value in found.items() if not name.startswith("load_in_")
    }  # of bitsandbytes


def save(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    form: Form,
    state: Mapping[str, Tensor],
    steps: tuple[Step, ...],
    *,
    settings: Mapping[str, Any] | None = None,
    is_main_process: bool = True,
    max_shard_size: int | str = "50GB",
    push_to_hub: bool = False,
    variant: str | None = None,
    **_: Any,
) -> None:
    """What `save_pretrained` of a model in a stored form does: write the form that was loaded.

    Args:
        state: stored tensors by the model's names, one name for tied ones.
        steps: for `gnomon.json`.
        settings: of the one step that is recorded where `steps` is empty.
        is_main_process, max_shard_size: as in `PreTrainedModel.save_pretrained`.

    Raises:
        UsageError: `push_to_hub` or `variant`, which have no meaning for this form.
    """
    if push_to_hub or variant is not None:
        asked = "push_to_hub=True" if push_to_hub else f"variant={variant!r}"
        raise UsageError(
            f"A model in the form {form.name} can't be saved with {asked}. Save it to a folder first, then "
            "model.push_to_hub(…) or `hf upload`."
        )
    target = Path(folder)
    if target.is_file():
        raise UsageError(f"{target} is a file. Give a folder.")
    if not is_main_process:
        return
    target.mkdir(parents=True, exist_ok=True)
    state = remove_tied_weights_from_state_dict(dict(state), model)
    state = revert_weight_conversion(model, state)
    with TemporaryDirectory(dir=target, prefix=".saving-") as temporary:
        beside = Path(temporary)
        sharded = _write_weights(beside, form, state, max_shard_size)
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
        config.save_pretrained(beside)
        write_json(beside / CONFIG, wrapped(read_object(beside / CONFIG), form, sharded=sharded))
        if model.can_generate():
            model.generation_config.save_pretrained(beside)
        own = _digests(form, state)
        if not steps:  # compressed while it was loaded, or loaded from a hub, which hands out no gnomon.json
            name = Path(str(model.name_or_path or type(model).__name__)).name
            steps = (Step(form.name, settings or {}, name, combined(own), __version__),)
        manifest = Manifest(form.name, steps, own)
        write_atomic(beside / MANIFEST, manifest.dump())
        for stale in target.glob(f"{GNOMON_STEM}*.safetensors*"):
            stale.unlink()
        for file in sorted(beside.iterdir(), key=lambda path: path.name == CONFIG):  # config.json comes last
            file.replace(target / file.name)
    fsync_dir(target)


def _groups(form: Form, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Own name -> its stored tensors, which must lie in one file."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        groups.setdefault(form.own_name(name), {})[name] = tensor
    return groups


def _write_weights(folder: Path, form: Form, state: Mapping[str, Tensor], max_shard_size: int | str) -> bool:
    """Write the shards; True if there are several."""
    groups = _groups(form, state)
    plan = split_state_dict_into_shards_factory(
        groups,
        get_storage_size=lambda group: sum(tensor.nbytes for tensor in group.values()),
        filename_pattern=f"{GNOMON_STEM}{{suffix}}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file, names in plan.filename_to_tensors.items():
        room = header_room(dict.fromkeys(names, form.parts))
        with writing(folder / file, room, {"format": "pt", **form.metadata}) as writer:
            for name in names:
                for part, tensor in groups[name].items():
                    writer.add(part, tensor)
    if plan.is_sharded:
        places = {part: plan.tensor_to_filename[name] for name, group in groups.items() for part in group}
        total = sum(tensor.nbytes for tensor in state.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return bool(plan.is_sharded)


def _digests(form: Form, state: Mapping[str, Tensor]) -> dict[str, Digest]:
    return {name: digest(form.decode(name, group)) for name, group in _groups(form, state).items()}
