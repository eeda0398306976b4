"""Streaming a checkpoint into another folder: one tensor in memory at a time, the layout of shards kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoints import CONFIG, DENSE_STEM, GNOMON_STEM, GNOMON_TYPE, Checkpoint, model_type
from .errors import GnomonError
from .files import write_atomic
from .forms import PLAIN, Form, Weights, digest
from .manifest import Digest
from .safe_files import Writer, header_room, writing

Convert = Callable[[str, Tensor], Mapping[str, Tensor] | None]
"""One of the model's own tensors -> what is stored for it; None keeps it as it is."""

BASE_TYPE, WEIGHTS = "base_model_type", "gnomon_weights"
"""Keys of `config.json` in a folder that needs Gnomon."""

ALIGNMENT = 4
"""Bytes that tensors are kept aligned to where their sizes allow it (8 for 8-byte numbers)."""


@dataclass(frozen=True)
class Converted:
    """What a pass over the weights saw and wrote."""

    own: Mapping[str, Digest]
    """The input's own tensors."""
    result: Mapping[str, Digest]
    """Those of the result: for a lossless form the same."""
    nbytes: int
    """Bytes of stored tensors."""
    converted: int


def write_converted(
    checkpoint: Checkpoint,
    weights: Weights,
    convert: Convert,
    form: Form,
    folder: Path,
    progress: Callable[[str], None],
) -> Converted:
    """Convert every tensor and write the shards, with their index, into the existing `folder`.

    Each shard of the input becomes one of the result, with the same tensors in it.
    """
    names = _shard_names(checkpoint, form)
    own, result, places = dict[str, Digest](), dict[str, Digest](), dict[str, str]()
    nbytes = converted = 0

    def write_one(name: str, writer: Writer) -> int:
        """1 if the tensor was converted. A function, so that nothing of it outlives its turn."""
        tensor = weights.read(name)
        own[name] = digest(tensor)
        changed = convert(name, tensor)
        stored = {name: tensor} if changed is None else changed
        kept = form is not PLAIN and form.lossless
        result.update({name: own[name]} if kept else digests(stored))
        for part, value in stored.items():
            places[part] = file
            writer.add(part, value)
        return int(changed is not None or weights.entry(name) is None)

    for shard, file, tensors in zip(checkpoint.shards, names, weights.shards, strict=True):
        inherited = {key: text for key, text in shard.metadata.items() if key not in weights.form.metadata}
        room = header_room(dict.fromkeys(tensors, form.parts))
        with writing(folder / file, room, {**inherited, **form.metadata}) as writer:
            converted += sum(write_one(name, writer) for name in _ordered(weights, tensors))
        nbytes += writer.position
        progress(f"{file}: {len(tensors)} tensors, {writer.position / 1e6:,.1f} MB")
    if not converted and form is not PLAIN:
        raise GnomonError(
            f"None of the {len(own)} tensors would become smaller as {form.name}, so nothing was written. The model "
            "is best left as it is."
        )
    if checkpoint.index is not None:
        metadata = {**checkpoint.index, "total_size": nbytes}
        index = {"metadata": metadata, "weight_map": places}
        write_json(folder / f"{_stem(form)}.safetensors.index.json", index)
    return Converted(own, result, nbytes, converted)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def write_config(checkpoint: Checkpoint, before: Form, after: Form, folder: Path) -> None:
    """Write `config.json` of the result: the input's, in and out of the wrapping that a form needs."""
    plain = unwrapped(checkpoint.config, before)
    write_json(folder / CONFIG, wrapped(plain, after, sharded=checkpoint.index is not None))


def wrapped(config: Mapping[str, Any], form: Form, *, sharded: bool) -> dict[str, Any]:
    """The configuration of a folder in `form`, from the ordinary one.

    Transformers knows neither the type nor the names of the weight files, so it refuses the folder instead of
    filling a model with random numbers. `gnomon.hf` finds the inner type and the weights under two more keys.
    """
    if form is PLAIN:
        return dict(config)
    kind = {
        "model_type": GNOMON_TYPE + form.name,
        BASE_TYPE: model_type(config),
        WEIGHTS: f"{GNOMON_STEM}.safetensors" + ".index.json" * sharded,
    }
    return {**config, **kind, **form.config}


def unwrapped(config: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """The ordinary configuration, from that of a folder in `form`."""
    if form is PLAIN:
        return dict(config)
    ours = {BASE_TYPE, WEIGHTS, *form.config}
    plain = {key: value for key, value in config.items() if key not in ours}
    return {**plain, "model_type": config.get(BASE_TYPE, "")}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file in the layout that Transformers writes, so that what was not changed stays equal."""
    write_atomic(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _stem(form: Form) -> str:
    return DENSE_STEM if form is PLAIN else GNOMON_STEM


def _shard_names(checkpoint: Checkpoint, form: Form) -> list[str]:
    if checkpoint.index is None:
        return [f"{_stem(form)}.safetensors"]
    count = len(checkpoint.shards)
    return [f"{_stem(form)}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _ordered(weights: Weights, names: list[str]) -> list[str]:
    """The order of writing that keeps tensors aligned: wide numbers first, odd sizes last, else as they were.

    A reader maps tensors where they lie, and the format allows no gaps.
    """

    def place(name: str) -> tuple[bool, int]:
        entry = weights.entry(name)
        if entry is None or (entry.nbytes % ALIGNMENT == 0 and entry.itemsize <= ALIGNMENT):
            return False, 0
        return bool(entry.nbytes % ALIGNMENT), -entry.itemsize

    return sorted(names, key=place)
