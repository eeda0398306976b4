"""Applying a method to a model on disk: what a method declares, and the engine around it.

A method is one object called `METHOD` in a module that `systems.py` names:

- :class:`TensorMethod` converts tensor by tensor (formats, magnitude pruning): the engine streams shard by
  shard, with one tensor in memory, and keeps the layout of shards;
- :class:`ModelMethod` needs the whole model (calibration, another architecture) and writes the result itself.

The engine does the rest for both: refuses what can't work before a weight is read, copies tokenizer, chat
template and generation config, writes beside and renames, and records the step in `gnomon.json`.
Not here: the streaming itself (`core.converting`), methods by name and their options (`lab.apply`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gnomon import __version__

from .checkpoints import MANIFEST, Checkpoint, companions, copy_companions, model_type, open_checkpoint
from .converting import Convert, Converted, write_config, write_converted
from .errors import UsageError
from .files import require_space, write_atomic, written_folder
from .forms import PLAIN, Form, Weights, combined, digest
from .manifest import Digest, Manifest, Step, find_manifest
from .refs import portable
from .targets import alone, existing_parent, require_target, written_file

SLACK = 16_000_000
"""Bytes asked of the disk beyond the weights: headers, index, `gnomon.json`."""


@dataclass(frozen=True)
class NoSettings:
    """For a method without settings."""


@dataclass(frozen=True, kw_only=True)
class TensorMethod:
    """A method that looks at one tensor at a time."""

    name: str
    settings: type[Any] = NoSettings
    """A frozen dataclass; its fields are the options of the command line."""
    prepare: Callable[[Checkpoint, Any], Convert]
    """Refuses a checkpoint or settings that won't do, before any weight is read."""
    takes: Literal["dense", "gnomon"] = "dense"
    form: Form = PLAIN
    """How the result is stored. Any but `PLAIN` makes a folder that Transformers alone refuses to load."""


@dataclass(frozen=True, kw_only=True)
class ModelMethod:
    """A method that sees the whole model."""

    name: str
    settings: type[Any] = NoSettings
    prepare: Callable[[Checkpoint, Any], Mapping[str, Any]] = lambda checkpoint, settings: {}
    """Refuses a checkpoint or settings that won't do, before any weight is read. What it returns is recorded beside
    the settings, such as the hash of a text."""
    run: Callable[[Source, Path, Any], None]
    """Writes config and weights into the given empty folder, or the file of the given name."""
    takes: Literal["dense", "any"] = "dense"
    gives: Literal["folder", "file"] = "folder"
    form: Form = PLAIN
    """How `run` stores the result, as for a :class:`TensorMethod`."""
    growth: float = 1.0
    """Most bytes of the result per byte of the input's weights: asked of the disk beforehand."""


Method = TensorMethod | ModelMethod
Digests = Mapping[str, Digest]


@dataclass(frozen=True)
class Source:
    """The model that a method is applied to."""

    name: str
    """For records: a model's name, or a folder's last component."""
    checkpoint: Checkpoint
    form: Form | None = PLAIN
    """How its own tensors are stored; None where that isn't known, so there is no way back."""

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What an application did."""

    out: Path
    steps: tuple[Step, ...]
    """All that was ever done to this model."""
    weights: int
    """Numbers in the input's own tensors."""
    bytes_before: int
    bytes_after: int
    """Of stored tensors, headers left out."""
    tensors: int
    converted: int
    """Tensors that are not stored as they were; the others were kept."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """JSON values; the folder as it was given."""
        steps = [step.as_json() for step in self.steps]
        return {**dataclasses.asdict(self), "out": str(self.out), "steps": steps}

    def rows(self) -> list[tuple[str, str]]:
        """A table of two columns: what was written, then what it is."""
        before, after, count = self.bytes_before, self.bytes_after, max(self.weights, 1)
        kept = self.tensors - self.converted
        return [
            ("written", str(self.out)),
            ("weights", f"{self.weights:,}"),
            ("bytes before", f"{before:,} ({8 * before / count:.2f} bits per weight)"),
            ("bytes after", f"{after:,} ({8 * after / count:.2f} bits per weight)"),
            ("tensors", f"{self.tensors:,} ({self.converted:,} converted, {kept:,} kept)"),
            ("seconds", f"{self.seconds:.1f}"),
        ]


DENSE = TensorMethod(name="dense", takes="gnomon", prepare=lambda checkpoint, settings: _keep)
"""The way back: an ordinary checkpoint from one in a lossless form, by keeping the model's own tensors."""


def _keep(name: str, tensor: Any) -> None:
    """Every tensor stays what it is, whatever form it came in."""


def apply_method(
    method: Method,
    source: Source,
    out: Path,
    settings: Any,
    *,
    force: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Applied:
    """Apply a method and write the result to `out`, or leave `out` as it was.

    Args:
        settings: an instance of `method.settings`.
        force: replace what stands at `out`, if that is a model or Gnomon's own.
        progress: takes a line per shard.

    Raises:
        UsageError: the method doesn't take this kind of model, or `out` may not be written.
        GnomonError: the model is damaged, or the disk is full.
    """
    began = time.perf_counter()
    require_chain(method, source)
    to_file = isinstance(method, ModelMethod) and method.gives == "file"
    out = require_target(out, source.folder, force=force, file=to_file)
    manifest = find_manifest(source.folder)
    weights = Weights(source.checkpoint, source.form or PLAIN, manifest.tensors if manifest else {})
    before = manifest.steps if manifest else ()

    more = dict[str, Any]()

    def steps(own: Digests) -> tuple[Step, ...]:
        step = Step(method.name, {**recorded(settings), **more}, source.name, combined(own), __version__)
        return (*before, step)

    if isinstance(method, TensorMethod):
        convert = method.prepare(source.checkpoint, settings)
        _require_space(out, weights.nbytes, source)
        with alone(out), written_folder(out, force=force) as folder:
            done = write_converted(source.checkpoint, weights, convert, method.form, folder, progress)
            write_config(source.checkpoint, weights.form, method.form, folder)
            _finish(folder, source, Manifest(method.form.name, steps(done.own), done.result))
    else:
        more |= method.prepare(source.checkpoint, settings)
        _require_space(out, int(weights.nbytes * method.growth), source)
        with alone(out), written_file(out) if to_file else written_folder(out, force=force) as place:
            own = {name: digest(weights.read(name)) for name in weights.groups}
            done = (_run_to_file if to_file else _run_to_folder)(
                method, source, place, settings, own, steps(own)
            )
    return Applied(
        out=out,
        steps=steps(done.own),
        weights=sum(one.numel for one in done.own.values()),
        bytes_before=source.checkpoint.nbytes,
        bytes_after=done.nbytes,
        tensors=len(done.own),
        converted=done.converted,
        seconds=time.perf_counter() - began,
    )


def recorded(settings: Any) -> dict[str, Any]:
    """Settings as JSON values; a file or folder by its name and content, never by its path."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [plain(one) for one in value]
        if isinstance(value, Path) or (isinstance(value, str) and ("/" in value or os.sep in value)):
            return portable(str(value))
        return value

    return {field.name: plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def _run_to_file(
    method: ModelMethod, source: Source, file: Path, settings: Any, own: Digests, steps: tuple[Step, ...]
) -> Converted:
    method.run(source, file, settings)
    return Converted(own, {}, file.stat().st_size, 0)


def _run_to_folder(
    method: ModelMethod, source: Source, folder: Path, settings: Any, own: Digests, steps: tuple[Step, ...]
) -> Converted:
    method.run(source, folder, settings)
    written = open_checkpoint(folder)
    stored = Weights(written, method.form, {})
    new = {name: digest(stored.read(name)) for name in stored.groups}
    _finish(folder, source, Manifest(method.form.name, steps, new))
    return Converted(own, new, written.nbytes, sum(new.get(name) != one for name, one in own.items()))


def require_chain(method: Method, source: Source) -> None:
    """Refuse a method that can't take this kind of model.

    Raises:
        UsageError: with the way out.
    """
    kind, config = source.checkpoint.kind, source.checkpoint.config
    if method.takes == "any":
        return
    if method.takes == "gnomon":
        if kind != "gnomon":
            raise UsageError(
                f"{source.name} is an ordinary checkpoint already (model_type {model_type(config)!r}), so "
                f"{method.name} has nothing to turn back."
            )
        if source.form is None or not source.form.lossless:
            instead = f" {source.form.instead}" if source.form else ""
            raise UsageError(
                f"{source.name} is of type {model_type(config)}: the model itself was changed, so there are no "
                f"ordinary weights to go back to. Use the model that the method was applied to.{instead}"
            )
    elif kind == "gnomon":
        way_out = "Use the model that it was made from."
        if source.form is not None and source.form.lossless:
            way_out = f"Turn it back first: gnomon apply dense --model {source.name} --out E"
        raise UsageError(
            f"{source.name} is of type {model_type(config)} already, and {method.name} takes ordinary "
            f"checkpoints only. {way_out}"
        )
    elif kind == "quantized":
        how = config["quantization_config"]
        name = how.get("quant_method", "?") if isinstance(how, dict) else "?"
        raise UsageError(
            f"{source.name} is quantized ({name}), and {method.name} takes ordinary checkpoints only. Use the "
            "model that was quantized."
        )


def _require_space(out: Path, weights: int, source: Source) -> None:
    beside = sum((source.folder / relative).stat().st_size for relative in companions(source.folder))
    require_space(existing_parent(out), weights + beside + SLACK)


def _finish(folder: Path, source: Source, manifest: Manifest) -> None:
    """Companions and `gnomon.json`, which comes last."""
    copy_companions(source.folder, folder)
    write_atomic(folder / MANIFEST, manifest.dump())
