"""Writing that survives a crash: nothing half-written ever stands under a final name.

Every durable file of Gnomon (done.json, config.yaml, converted models, accepted results) goes through
here, so that a test can fail each single step in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import GnomonError

# The three system calls below are every way bytes become durable; fault-injection tests replace them.
_fsync = os.fsync
_replace = os.replace


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


def fsync_dir(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        _fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Make what was appended to `path` durable."""
    with path.open("rb") as file:
        _fsync(file.fileno())


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write beside, fsync, rename over `path`, fsync the folder."""
    raw = data.encode() if isinstance(data, str) else data
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o666 & ~_umask())  # mkstemp's 0600 would hide results from others
            _write(file, raw)
            _fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append to a log whose owner is complete only when another file says so (no fsync per line)."""
    with path.open("ab") as file:
        _write(file, line.encode())


def _umask() -> int:
    """The process's file mode mask; the system tells it only by setting one."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def dump_json(value: Any) -> str:
    """Strict, readable, deterministic JSON (NaN and infinity are refused: no reader agrees on them)."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def canonical_json(value: Any) -> str:
    """The one-line form that keys and hashes are computed from."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def read_json(path: Path) -> Any:
    """Parse a JSON file, naming it in the error."""
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GnomonError(
            f"{path} is not valid JSON ({error}). The file is damaged; remove it or restore it."
        ) from None


@contextmanager
def written_folder(final: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling folder that is renamed to `final` when the block ends without an error.

    With `force` the folder that stands there is renamed aside first and removed last, so it is lost only once the
    new one stands. For the moment between the two renames neither does; a process killed there leaves the old one
    to be put back by the next writer.

    Raises:
        GnomonError: if `final` exists and is not empty, unless `force`.
    """
    clear_leftovers(final, temporary=False)
    if final.exists() and any(final.iterdir()) and not force:
        raise GnomonError(
            f"{final} exists and is not empty. Choose another folder or pass --force to replace it."
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp"))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        fsync_dir(temporary)
        if final.exists():
            _replace(final, _aside(final))
        _replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        clear_leftovers(final, temporary=False)
        raise
    fsync_dir(final.parent)
    clear_leftovers(final, temporary=False)


def _aside(final: Path) -> Path:
    """Where the old folder waits while it is being replaced."""
    return final.with_name(f".{final.name}.replaced")


def clear_leftovers(final: Path, *, temporary: bool = True) -> None:
    """Undo or finish what a killed writer of `final` left beside it. Only for its one present writer.

    Args:
        temporary: also remove half-written files and folders; without it only a replaced folder is seen to.
    """
    aside = _aside(final)
    if aside.is_dir() and not final.exists():
        _replace(aside, final)
    elif aside.is_dir():
        shutil.rmtree(aside)
    pattern = re.compile(re.escape(f".{final.name}.") + r"[a-z0-9_]{8}\.tmp")  # not those of `<final>.more`
    for leftover in final.parent.iterdir() if temporary else ():
        if pattern.fullmatch(leftover.name):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def require_space(folder: Path, needed: int) -> None:
    """Refuse work that would not fit on the disk that holds `folder`.

    Args:
        folder: an existing folder.
        needed: bytes about to be written.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise GnomonError(
            f"{folder} has {free / 1e6:,.0f} MB free, but {needed / 1e6:,.0f} MB are needed. "
            "Free some space or choose another folder."
        )


def content_hash(path: Path) -> str:
    """SHA-256 of a file, or of a folder's sorted relative names and file contents (hidden names left out)."""
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for child in sorted(path.rglob("*")):
        relative = child.relative_to(path)
        if child.is_file() and not any(part.startswith(".") for part in relative.parts):
            with child.open("rb") as file:
                inner = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{relative.as_posix()}\0{inner}\n".encode())
    return digest.hexdigest()
