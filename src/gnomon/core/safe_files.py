"""Safetensors files, one tensor at a time: checked headers, plain reads, a writer that holds nothing.

Layout of such a file: the length n of the header (u64, little-endian), n bytes of JSON
`{name: {"dtype", "shape", "data_offsets"}}` that may end in spaces, then the tensors' bytes without gaps.

Files are untrusted: everything the header says is checked against the file's size before memory is
allocated. The library's own writer takes all tensors of a file at once; :class:`Writer` keeps a place free
for the header instead, so that a file of any size is written with one tensor in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch
from torch import Tensor

from .errors import GnomonError
from .files import fsync_file

MAX_HEADER = 100_000_000
"""Bytes; the limit of the format's own library."""
MAX_RANK = 32

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file, and what it is."""

    name: str
    dtype: str
    """The format's own code, such as BF16."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Of the first byte, from the beginning of the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def read(self) -> Tensor:
        """The tensor, in memory of its own.

        Raises:
            GnomonError: if the file has become shorter since its header was read.
        """
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(raw.numpy().data) != self.nbytes:
                raise GnomonError(
                    f"{self.path} ends inside {self.name!r}. It was cut off while it was being read."
                )
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of its bytes."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Parse and check the header of a safetensors file; its tensors are not read.

    Raises:
        GnomonError: no such file, or anything about the header that the file doesn't bear out.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise GnomonError(
                    f"{path} is no whole safetensors file: it has {size:,} bytes and speaks of a header of "
                    f"{length:,} (limit {MAX_HEADER:,}). It is damaged, cut off or a Git LFS pointer; fetch it again."
                )
            text = file.read(length)
    except FileNotFoundError:
        raise GnomonError(f"{path} is missing. Fetch the checkpoint again.") from None
    raw = parse_object(text, path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "its __metadata__ is not a table of strings")
    found = [_entry(path, name, value, 8 + length) for name, value in raw.items()]
    found.sort(key=lambda pair: (pair[0].offset, pair[1]))
    position = 8 + length
    for entry, stop in found:
        if entry.offset != position:
            raise damaged(path, f"{entry.name!r} begins at byte {entry.offset:,}, not at {position:,}")
        position = stop
    if position != size:
        raise damaged(path, f"its tensors end at byte {position:,} of {size:,}")
    return Header({entry.name: entry for entry, _ in found}, metadata)


def _entry(path: Path, name: str, value: Any, start: int) -> tuple[Entry, int]:
    """An entry and the byte after its last one."""
    kind = value.get("dtype") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in DTYPES:
        raise damaged(path, f"{name!r} has the unknown dtype {kind!r}")
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise damaged(path, f"shape or offsets of {name!r} are no lists of sizes")
    entry = Entry(name, kind, tuple(shape), path, start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise damaged(path, f"{name!r} has shape {shape} in {entry.dtype} but offsets {offsets}")
    return entry, start + offsets[1]


def is_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether this is a short list of numbers that could be sizes (`True` is an int in Python)."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_RANK
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )


def damaged(path: Path, what: str) -> GnomonError:
    """The error for a file that contradicts itself."""
    return GnomonError(f"{path} is damaged: {what}. Fetch or make it again.")


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no key stands twice.

    Raises:
        GnomonError: anything else.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it holds no valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "its JSON is no object")
    return value


class Writer:
    """Tensors into one safetensors file, one after the other (see :func:`writing`)."""

    def __init__(self, file: IO[bytes], room: int, metadata: Mapping[str, str]) -> None:
        self._file, self._room = file, room
        self._table: dict[str, Any] = {"__metadata__": dict(metadata)}
        self.position = 0
        """Bytes of tensors so far; the next one begins here."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor.

        Raises:
            GnomonError: if the name has been used, or the dtype has no code in the format.
        """
        if name in self._table:
            raise GnomonError(f"Two tensors are called {name!r}; a checkpoint holds one of a name.")
        if tensor.dtype not in CODES:
            raise GnomonError(f"{name!r} has dtype {tensor.dtype}, which safetensors files can't hold.")
        data = as_bytes(tensor)
        stop = self.position + len(data)
        self._table[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.position, stop],
        }
        self._file.write(data)
        self.position = stop

    def _finish(self) -> None:
        text = json.dumps(self._table, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > self._room:
            raise RuntimeError(f"The header takes {len(text)} bytes; {self._room} were kept free for it.")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))


def header_room(names: Mapping[str, int]) -> int:
    """Enough bytes for the header of a file, a multiple of 8.

    Args:
        names: name of a tensor -> how many it may become (with up to 32 letters more in each name).
    """
    room = sum(parts * (len(json.dumps(name)) + 32 + 160) for name, parts in names.items())
    return -(-(room + 4096) // 8) * 8


@contextmanager
def writing(path: Path, room: int, metadata: Mapping[str, str]) -> Iterator[Writer]:
    """A writer of the new file `path`, which is durable and whole when the block has ended without an error.

    Args:
        room: bytes kept free for the header (:func:`header_room`).
    """
    with path.open("xb") as file:
        file.seek(8 + room)
        writer = Writer(file, room, metadata)
        yield writer
        writer._finish()
    fsync_file(path)


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy where it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
