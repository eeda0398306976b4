"""Where a result may be written: never over the input, never over what Gnomon can't have made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .checkpoints import CONFIG, MANIFEST
from .errors import UsageError
from .files import clear_leftovers, fsync_dir, fsync_file


def require_target(out: Path, source: Path, *, force: bool, file: bool = False) -> Path:
    """The resolved place of the result, if it may be written.

    Args:
        source: folder of the input.
        force: replace what stands there, if it is a model folder or holds `gnomon.json`.
        file: the result is a file, not a folder.

    Raises:
        UsageError: `out` is, holds or lies in the input, or lies in a file; something stands there that may not be
            replaced.
    """
    try:
        out, source = out.expanduser().resolve(), source.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself, `~` of nobody
        raise UsageError(f"{out} is no place to write to ({error}). Choose another one.") from None
    if out == source or out.is_relative_to(source) or source.is_relative_to(out):
        where = "is" if out == source else "lies inside" if out.is_relative_to(source) else "holds"
        raise UsageError(f"{out} {where} the folder of the model. Write the result elsewhere.")
    if (above := next(parent for parent in out.parents if parent.exists())).is_file():
        raise UsageError(f"{above} is a file, so {out} can't lie in it. Choose another place.")
    if not out.exists():
        return out
    if file and out.is_file():
        if not force:
            raise UsageError(f"{out} exists. Choose another name or pass --force to replace it.")
        return out
    if file or not out.is_dir():
        kind, wanted = ("folder", "file") if out.is_dir() else ("file", "folder")
        raise UsageError(f"{out} is a {kind}, but the result is a {wanted}. Choose another name.")
    if not any(out.iterdir()):
        return out
    if not force:
        raise UsageError(
            f"{out} exists and is not empty. Choose another folder or pass --force to replace it."
        )
    if not (out / MANIFEST).is_file() and not _is_model(out):
        raise UsageError(
            f"{out} is neither a model folder nor one that Gnomon wrote, so --force does not replace it. "
            "Choose another folder, or remove it yourself."
        )
    return out


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and any(folder.glob("*.safetensors"))


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that exists: its disk is where `path` will lie."""
    return next(parent for parent in path.parents if parent.is_dir())


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Be the only writer of `out`, and clear away what a killed one left half-written beside it.

    Raises:
        UsageError: if another process is writing it now.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out.parent / f".{out.name}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(f"Another process is writing {out}. Wait for it, or choose another name.") from None
    try:
        clear_leftovers(out)
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def written_file(final: Path) -> Iterator[Path]:
    """Yield a temporary name beside `final` that is renamed to it when the block ends without an error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp"))
    try:
        yield beside / final.name
        fsync_file(beside / final.name)
        (beside / final.name).replace(final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    with suppress(OSError):
        fsync_dir(final.parent)
