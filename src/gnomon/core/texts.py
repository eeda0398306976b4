"""Where text comes from: recipes that need no download, and local files. Each yields (name, text) pairs.

Not here: the corpus, its hash and its splits (`core.data`).
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import generated
from .errors import GnomonError, UsageError
from .refs import GENERATED

Texts = Iterator[tuple[str, str]]
"""(name, text) of each document."""

STDLIB_CHARACTERS = 3_000_000
MIXED_DOCUMENTS, MIXED_CHARACTERS = 50, 4_000
PIECE_CHARACTERS = 10_000
MAX_BYTES = 1 << 30
MAX_GENERATED = 100_000
SUFFIXES = (".jsonl", ".md", ".py", ".txt")

_NOT_TEXT = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def stdlib() -> Texts:
    """Files of 1 to 60 kB in the order of their names' hashes, until the cap, then sorted by name.

    By hash, so that the capped part spreads over the whole library and changes little between versions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = {path: path.relative_to(root).as_posix() for path in root.rglob("*.py") if _is_stdlib(path, root)}
    chosen, total = [], 0
    for path in sorted(names, key=lambda path: _order(names[path])):
        if total < STDLIB_CHARACTERS and 1_000 <= path.stat().st_size <= 60_000:
            chosen.append((names[path], _utf8(path)))
            total += len(chosen[-1][1])
    yield from sorted(chosen)


def _is_stdlib(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return not (_NOT_TEXT | _NOT_STDLIB).intersection(parts) and not path.name.startswith("_sysconfigdata")


def topics() -> Texts:
    """The help topics of Python's reference, as `pydoc` shows them."""
    from pydoc_data.topics import topics as pages

    yield from sorted(pages.items())


def generated_documents(count: str) -> Texts:
    """`core.generated`, with the number of documents as the user wrote it."""
    if not count.isdecimal() or not 1 <= int(count) <= MAX_GENERATED:
        raise UsageError(
            f"{GENERATED}{count} needs a count of documents from 1 to {MAX_GENERATED:,}: {GENERATED}200."
        )
    yield from generated.documents(int(count))


def mixed() -> Texts:
    """Stdlib, topic, generated, stdlib, …: every prefix is balanced."""
    parts = [
        _clipped("stdlib", stdlib()),
        _clipped("topics", topics()),
        _clipped("generated", generated_documents(str(MIXED_DOCUMENTS))),
    ]
    for turn in zip(*parts, strict=True):
        yield from turn


def _clipped(part: str, documents: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """`MIXED_DOCUMENTS` of at least 1,000 characters, by hash of name, each clipped at the end of a line."""
    long = {name: text[:MIXED_CHARACTERS] for name, text in documents if len(text) >= 1_000}
    names = sorted(long, key=_order)[:MIXED_DOCUMENTS]
    if len(names) < MIXED_DOCUMENTS:
        raise GnomonError(
            f"'mixed' needs {MIXED_DOCUMENTS} documents of 1,000 characters from {part}, but this Python has "
            f"{len(names)}. Use {GENERATED}150 instead."
        )
    return [(f"{part}/{name}", long[name][: long[name].rfind("\n") + 1] or long[name]) for name in names]


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


BUILT_IN: dict[str, Callable[[], Texts]] = {"stdlib": stdlib, "topics": topics, "mixed": mixed}


def folder(root: Path) -> Texts:
    """Every file of a known kind below `root`, hidden ones left out, in the order of their relative names."""
    inside = ((path, path.relative_to(root)) for path in sorted(root.rglob("*")))
    files = {
        path: relative.as_posix()
        for path, relative in inside
        if path.suffix in SUFFIXES and path.is_file() and not any(p.startswith(".") for p in relative.parts)
    }
    if not files:
        raise UsageError(f"{root} holds no text: no file ending in {', '.join(SUFFIXES)}.")
    _require_size(root, files)
    for path, name in files.items():
        if path.suffix == ".jsonl":
            yield from _lines(path, name)
        else:
            yield name, _utf8(path)


def file(path: Path) -> Texts:
    """A .jsonl file by lines; another one whole, or in pieces when it is long, so that it can be split."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is of no kind that can be read as text ({', '.join(SUFFIXES)}).")
    _require_size(path, [path])
    if path.suffix == ".jsonl":
        yield from _lines(path, path.name)
        return
    pieces = list(_pieces(_utf8(path)))
    for number, piece in enumerate(pieces):
        yield (path.name if len(pieces) == 1 else f"{path.name}#{number:04d}"), piece


def _require_size(path: Path, files: Iterable[Path]) -> None:
    total = sum(file.stat().st_size for file in files)
    if total > MAX_BYTES:
        raise UsageError(
            f"{path} holds {total:,} bytes of text; at most {MAX_BYTES:,} are read. Give a part of it."
        )


def _utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GnomonError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it: iconv -f OLD -t UTF-8"
        ) from None


def _lines(path: Path, name: str) -> Texts:
    for number, line in enumerate(_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise GnomonError(f"{path}, line {number}: not JSON ({error}).") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise GnomonError(f"{path}, line {number}: each line must be an object with a string in `text`.")
        yield f"{name}:{number}", row["text"]


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at blank lines, else at line ends, else at spaces; joined, the pieces give it back."""
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        near, far = start + PIECE_CHARACTERS, start + 2 * PIECE_CHARACTERS
        found = ((text.find(mark, near, far), mark) for mark in ("\n\n", "\n", " "))
        end = next((at + len(mark) for at, mark in found if at >= 0), far)
        yield text[start:end]
        start = end
    yield text[start:]
