"""Stages: functions with JSON arguments, a key, and a folder that is complete or absent.

A stage's folder `stages/<key>/` holds its artefacts, its `records.jsonl` and, written last, `done.json`.
Without `done.json` the stage runs again with everything wiped except `checkpoint/`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock, Timeout

from gnomon.core.errors import GnomonError, NumericalFailure
from gnomon.core.files import (
    append_line,
    canonical_json,
    dump_json,
    fsync_dir,
    fsync_file,
    read_json,
    write_atomic,
)
from gnomon.core.seeding import seeded

from .records import Record, make_record

StageFunction = Callable[..., Any]
DONE_FIELDS = {"function", "key", "args", "value", "failed", "seconds", "records"}
LOCK_SECONDS = 60.0  # how long a killed run's worker may take to die before its stage is given up


@dataclass(frozen=True)
class Done:
    """A finished stage as other stages and figures see it."""

    dir: Path
    value: Any
    args: dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A declared stage. `arguments` has handles replaced by `{"$stage": key}`; so it is JSON."""

    function: StageFunction
    arguments: dict[str, Any]
    shown: dict[str, Any]
    """The arguments in portable form: what keys, `done.json` and results hold."""
    key: str
    inputs: tuple[str, ...]
    seed: int
    exclusive: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def as_json(self) -> dict[str, Any]:
        """What a worker process needs to run this stage."""
        return {
            "module": self.function.__module__,
            "name": self.name,
            "arguments": self.arguments,
            "shown": self.shown,
            "key": self.key,
            "inputs": list(self.inputs),
            "seed": self.seed,
            "exclusive": self.exclusive,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stage:
        function = getattr(importlib.import_module(data["module"]), data["name"])
        rest = {k: data[k] for k in ("arguments", "shown", "key", "seed", "exclusive")}
        return cls(function=function, inputs=tuple(data["inputs"]), **rest)


def stage_key(name: str, shown: Mapping[str, Any]) -> str:
    """Key of a stage: function name without module, canonical arguments, keys of its inputs."""
    return hashlib.sha256(canonical_json({"function": name, "args": shown}).encode()).hexdigest()[:16]


def load_study_module(reference: str) -> ModuleType:
    """Import a study by module name or by the path of its `.py` file (the same in every process)."""
    if not reference.endswith(".py"):
        return importlib.import_module(reference)
    path = Path(reference).resolve()
    name = f"gnomon_study_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does, for helpers beside the study
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GnomonError(f"{path} can't be imported as a study.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class StageContext:
    """What a running stage has: its folder, its seed, its records, its checkpoint folder."""

    def __init__(self, folder: Path, seed: int, *, scratch: Path | None = None) -> None:
        self.dir = scratch or folder
        """The stage's own folder; a scratch folder on all ranks of a launcher but the first."""
        self.seed = seed
        self.checkpoint = folder / "checkpoint"
        """Survives a crash of this stage and is removed when it is done. Every rank reads it, the first writes."""
        self.first = scratch is None
        """False on all ranks of a launcher but the first; only the first may write to `checkpoint`."""
        self._records: list[Record] = []

    def record(self, **fields: Any) -> None:
        """Append one record (see :func:`gnomon.lab.records.make_record`); its seed defaults to the stage's."""
        record = make_record(**{"seed": self.seed, **fields})
        line = _line(record)  # before anything is kept: what can't be written must not be counted
        self._records.append(record)
        if self.first:
            append_line(self.dir / "records.jsonl", line)

    def snapshot(self) -> list[Record]:
        """The records so far, for a training checkpoint."""
        return list(self._records)

    def restore(self, records: list[Record]) -> None:
        """Go on from a checkpoint: the stage's records become exactly `records`."""
        self._records = list(records)
        if self.first:
            write_atomic(self.dir / "records.jsonl", "".join(map(_line, records)))


def _line(record: Record) -> str:
    return canonical_json(record) + "\n"


@dataclass
class StageStore:
    """The `stages/` folder of one run."""

    root: Path
    threads: int = 1
    _done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def folder(self, key: str) -> Path:
        return self.root / key

    def done(self, key: str) -> dict[str, Any] | None:
        """Content of `done.json`, or None while the stage has not finished."""
        if key not in self._done:
            path = self.folder(key) / "done.json"
            if not path.exists():
                return None
            data = read_json(path)
            if not isinstance(data, dict) or not data.keys() >= DONE_FIELDS:
                raise GnomonError(
                    f"{path} is damaged. Remove the folder {path.parent} and give the command again."
                )
            self._done[key] = data
        return self._done[key]

    def result(self, key: str) -> Done:
        """The finished stage.

        Raises:
            NumericalFailure: if it failed numerically.
            GnomonError: if it has not run.
        """
        data = self.done(key)
        if data is None:
            raise GnomonError(f"Stage {key} has not run in {self.root.parent}.")
        if data["failed"]:
            raise NumericalFailure(f"Stage {data['function']} failed: {data['failed']}")
        return Done(self.folder(key), data["value"], data["args"])

    def execute(self, stage: Stage, *, writes: bool = True) -> None:
        """Run one stage unless it is done.

        A numerical failure is written to `done.json` as the stage's outcome; any other error leaves the
        stage unfinished and is raised.
        """
        folder = self.folder(stage.key)
        if not writes:
            # Artefacts of other ranks are thrown away; a numerical failure is written down by the first.
            with tempfile.TemporaryDirectory() as scratch, suppress(*numerical_failures()):
                self._call(stage, StageContext(folder, stage.seed, scratch=Path(scratch)))
            return
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / f"{stage.key}.lock")
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise GnomonError(
                f"Another process has been writing stage {stage.name} ({folder}) for {LOCK_SECONDS:.0f} s. "
                "End it, then give the same command again."
            ) from None
        try:
            if self.done(stage.key) is None:
                _wipe(folder)
                self._finish(stage, folder)
        finally:
            lock.release()

    def _finish(self, stage: Stage, folder: Path) -> None:
        context = StageContext(folder, stage.seed)
        started = time.monotonic()
        failed: str | None = None
        value = None
        try:
            value = _as_json(self._call(stage, context), stage.name)
        except numerical_failures() as error:
            failed = str(error)
            for path in (folder.resolve(), folder.absolute(), folder):  # results hold no path of this machine
                failed = failed.replace(str(path), stage.key)
        if failed is not None:
            context.restore([])  # records of a diverged stage must not reach a verdict
        if (folder / "records.jsonl").exists():
            fsync_file(folder / "records.jsonl")
        fsync_dir(folder)
        done = {
            "function": stage.name,
            "key": stage.key,
            "args": stage.shown,
            "inputs": list(stage.inputs),
            "seed": stage.seed,
            "exclusive": stage.exclusive,
            "value": value,
            "failed": failed,
            "seconds": round(time.monotonic() - started, 3),
            "records": len(context.snapshot()),
        }
        write_atomic(folder / "done.json", dump_json(done))
        shutil.rmtree(context.checkpoint, ignore_errors=True)
        self._done[stage.key] = done

    def _call(self, stage: Stage, context: StageContext) -> Any:
        for key in stage.inputs:
            data = self.done(key)
            if data and data["failed"]:
                raise NumericalFailure(f"its input {data['function']} failed: {data['failed']}")
        arguments = {name: self._resolve(value) for name, value in stage.arguments.items()}
        with seeded(stage.seed), limited_threads(self.threads):
            return stage.function(context, **arguments)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"$stage"}:
                return self.result(value["$stage"])
            return {k: self._resolve(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._resolve(v) for v in value]
        return value


def _as_json(value: Any, name: str) -> Any:
    """The value as others will read it back, whether or not the run was interrupted in between."""
    try:
        return json.loads(canonical_json(value))
    except ValueError:
        raise NumericalFailure(f"stage {name} returned a NaN or an infinity") from None
    except TypeError as error:
        raise GnomonError(f"Stage {name} must return a JSON value: {error}.") from None


def _wipe(folder: Path) -> None:
    for child in folder.iterdir():
        if child.name == "checkpoint":
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def numerical_failures() -> tuple[type[Exception], ...]:
    """Errors that are a stage's outcome: our own, and a singular matrix as NumPy and torch report it."""
    import numpy as np
    import torch

    singular: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # not in its __all__
    return NumericalFailure, FloatingPointError, np.linalg.LinAlgError, singular


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Run a block with `threads` threads in torch and in every BLAS and OpenMP pool, then restore."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(limits=threads):
            yield
    finally:
        torch.set_num_threads(before)
