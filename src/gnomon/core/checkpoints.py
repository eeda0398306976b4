"""Model folders as Transformers writes them, read tensor by tensor without loading the model.

A folder holds `config.json`, weights and companions (tokenizer, chat template, generation config, licence).
The weights are one file `model.safetensors`, or shards listed in `model.safetensors.index.json`. In a folder
that only Gnomon can load they are called `gnomon…` instead, so that Transformers alone finds none.

Folders are untrusted: names in an index must be plain file names, and a link may lead nowhere but into the
folder itself or into the blobs of the Hugging Face cache that it belongs to.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import GnomonError
from .files import fsync_file
from .safe_files import Entry, damaged, parse_object, read_header

Kind = Literal["dense", "quantized", "gnomon"]

CONFIG, MANIFEST = "config.json", "gnomon.json"
DENSE_STEM, GNOMON_STEM = "model", "gnomon"
GNOMON_TYPE = "gnomon_"
"""Prefix of `model_type` in folders that Transformers alone must not load."""

MAX_JSON = 100_000_000
_DEPTHS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"}
_MOST = {
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "n_routed_experts": 100_000,
    "num_labels": 1_000_000,
}
"""Far above any model; Transformers makes an object for each."""
TEMPLATES = "additional_chat_templates"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"}


@dataclass(frozen=True)
class Shard:
    """One weight file."""

    name: str
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose headers have been read and checked."""

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    index: Mapping[str, Any] | None
    """`metadata` of the index; None where one file holds everything."""

    @property
    def entries(self) -> dict[str, Entry]:
        """All stored tensors by name."""
        return {name: entry for shard in self.shards for name, entry in shard.entries.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def kind(self) -> Kind:
        return kind_of(self.config)


def require_plausible(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a configuration of more parts than its checkpoint can hold, before Transformers builds any of them.

    Args:
        path: of the configuration, for messages.
        tensors: how many the checkpoint holds.

    Raises:
        GnomonError: without layers, with more layers than tensors, or with absurdly many experts or labels.
    """
    inner = {name: values for name, values in config.items() if isinstance(values, dict)}
    for part, values in {"": config, **inner}.items():
        for name in values.keys() & (_DEPTHS | _MOST.keys()):
            value, limit = values[name], _MOST.get(name, tensors)
            none_is_wrong = name in _DEPTHS and part in ("", "text_config")
            if type(value) is int and not none_is_wrong <= value <= limit:
                raise GnomonError(
                    f"{path} speaks of {value:,} {'layers' if name in _DEPTHS else 'parts'} ({name}; limit "
                    f"{limit:,}), but the folder holds {tensors:,} tensors. One of them is damaged."
                )


def kind_of(config: Mapping[str, Any]) -> Kind:
    """What sort of weights belong to a configuration."""
    if model_type(config).startswith(GNOMON_TYPE):
        return "gnomon"
    return "quantized" if config.get("quantization_config") else "dense"


def model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type") or "")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        GnomonError: missing, too large, or not a JSON object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise damaged(path, f"it has {size:,} bytes, and JSON of at most {MAX_JSON:,} is read")
        return parse_object(path.read_bytes(), path)
    except FileNotFoundError:
        raise GnomonError(f"{path.parent} holds no {path.name}, so it is not a whole model folder.") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configuration, the index and all headers of a model folder.

    Raises:
        GnomonError: a missing, damaged or escaping file, a tensor that stands twice or nowhere.
    """
    folder = folder.resolve()
    config = read_object(checked(folder, CONFIG))
    if not isinstance(config.get("model_type", ""), str):
        raise damaged(folder / CONFIG, f"its model_type is {config['model_type']!r}")
    checkpoint = _opened(folder, config)
    require_plausible(folder / CONFIG, config, len(checkpoint.entries))
    return checkpoint


def _opened(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    stem = GNOMON_STEM if kind_of(config) == "gnomon" else DENSE_STEM
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if (folder / single).exists() or (folder / single).is_symlink():  # Transformers prefers it, too
        header = read_header(checked(folder, single))
        return Checkpoint(folder, config, (Shard(single, header.entries, header.metadata),), None)
    if not (folder / index).exists():
        pickled = any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir())
        why = " (weights as pickle are never opened)" if pickled else ""
        raise GnomonError(
            f"{folder} holds neither {single} nor {index}{why}, so there are no weights to read."
        )
    content = read_object(checked(folder, index))
    shards = tuple(_indexed_shards(folder, content, folder / index))
    return Checkpoint(folder, config, shards, content.get("metadata") or {})


def _indexed_shards(folder: Path, content: Mapping[str, Any], index: Path) -> Iterator[Shard]:
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise damaged(index, "its weight_map is not a table of file names")
    if not isinstance(content.get("metadata") or {}, dict):
        raise damaged(index, "its metadata is no table")
    seen: dict[str, str] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).suffix != ".safetensors":
            raise damaged(index, f"it names {shard!r}, which is no safetensors file")
        header = read_header(checked(folder, shard))
        for name in header.entries:
            if name in seen:
                raise damaged(index, f"{name!r} lies in {seen[name]} and again in {shard}")
            seen[name] = shard
        yield Shard(shard, header.entries, header.metadata)
    for name, shard in places.items():
        if seen.get(name) != shard:
            raise damaged(index, f"it says that {name!r} lies in {shard}, where it does not")


def checked(folder: Path, name: str) -> Path:
    """The file `name` of `folder` (resolved), if it is a plain name that leads nowhere else.

    Raises:
        GnomonError: a path, a hidden file, or a link that leaves the folder.
    """
    if name != Path(name).name or name.startswith(".") or "\\" in name or "\0" in name:
        raise GnomonError(
            f"{folder} names the file {name!r}, but only plain file names are followed. The checkpoint is damaged "
            "or made to reach other files."
        )
    path = folder / name
    if path.is_symlink() and (target := _target(path)).parent not in _own_folders(folder):
        raise GnomonError(
            f"{path} is a link that leads out of the folder, to {target}. Put the file itself in its place."
        )
    if path.exists() and not path.is_file():  # reading a named pipe would wait forever
        raise GnomonError(f"{path} is no regular file. Put the file of this name in its place.")
    return path


def _target(link: Path) -> Path:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # what Python 3.11 says to a loop
        raise GnomonError(f"{link} is a link that leads to itself. Put the file in its place.") from None


def _own_folders(folder: Path) -> tuple[Path, ...]:
    """Where links may lead: the folder, and the blobs of a snapshot in the Hugging Face cache."""
    return (folder, folder.parent.parent / "blobs") if folder.parent.name == "snapshots" else (folder,)


def companions(folder: Path) -> list[Path]:
    """Relative names of the files beside the weights that belong to the model, `config.json` left out."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (CONFIG, MANIFEST) or path.suffix in _WEIGHTS:
            continue
        if path.is_file() and not path.name.endswith(".index.json"):
            found.append(checked(folder, path.name).relative_to(folder))
    templates = folder / TEMPLATES
    if templates.is_dir() and not templates.is_symlink():
        inside = sorted(path for path in templates.glob("*.jinja") if path.is_file())
        found += [path.relative_to(folder) for path in inside if not path.is_symlink()]
    return found


def copy_companions(folder: Path, out: Path) -> None:
    """Copy :func:`companions` into the new folder `out`, except what it already has."""
    for relative in companions(folder):
        target = out / relative
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / relative, target)
            fsync_file(target)
