"""Entropy-coded peers of NF12 from other packages: ZipNN and zstd, with as many threads as asked for.

Each decodes into memory that is there already, but for ZipNN, whose interface allocates it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FRAME = 1 << 22
"""Bytes that zstd codes at a time, so that threads have something to share."""


@dataclass(frozen=True)
class Peer:
    """A codec and the matrix in its code."""

    name: str
    encode: Callable[[], object]
    decode: Callable[[Any, Tensor], object]
    """(code, out): out holds the matrix afterwards, or the result does, as `decoded` sees to."""
    coded: list[bytes]

    def copies(self, count: int) -> list[list[bytes]]:
        """The code, `count` times in separate memory."""
        return [self.coded, *([bytes(bytearray(part)) for part in self.coded] for _ in range(count - 1))]

    def decoded(self, out: Tensor) -> Tensor:
        """The matrix, decoded once more."""
        from torch import Tensor

        result = self.decode(self.coded, out)
        return result if isinstance(result, Tensor) else out


def peers(w: Tensor, threads: int) -> tuple[list[Peer], dict[str, str]]:
    """Those that are installed, and why the others are left out, by package."""
    found, left_out = [], {}
    for package, make in (("zipnn", _zipnn), ("zstandard", _zstd)):
        try:
            found.append(make(w, threads))
        except ImportError:
            left_out[package] = f"not installed; pip install {package}"
    return found, left_out


def _bytes_of(w: Tensor) -> memoryview:
    import torch

    return w.view(torch.uint8).view(-1).numpy().data


def _zipnn(w: Tensor, threads: int) -> Peer:
    import torch
    import zipnn

    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=threads)

    def encode() -> Any:
        return codec.compress(bytearray(_bytes_of(w)))  # a copy: it reorders the bytes it is given in place

    def decode(code: list[bytes], out: Tensor) -> Tensor:
        return torch.frombuffer(codec.decompress(code[0]), dtype=torch.bfloat16).view(out.shape)

    return Peer("ZipNN", encode, decode, [bytes(encode())])


def _zstd(w: Tensor, threads: int) -> Peer:
    import zstandard

    source = _bytes_of(w)
    pool = ThreadPoolExecutor(threads)

    def one(at: int) -> bytes:
        packed: bytes = zstandard.ZstdCompressor(level=3).compress(source[at : at + FRAME])
        return packed

    def encode() -> list[bytes]:
        return list(pool.map(one, range(0, len(source), FRAME)))

    def decode(code: list[bytes], out: Tensor) -> None:
        to = _bytes_of(out)

        def into(k: int) -> None:
            zstandard.ZstdDecompressor().stream_reader(code[k]).readinto(to[k * FRAME : (k + 1) * FRAME])

        list(pool.map(into, range(len(code))))

    return Peer("zstd", encode, decode, encode())
