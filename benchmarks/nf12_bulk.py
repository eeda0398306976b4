"""Bulk decoding and encoding of a matrix, beside entropy-coded peers: Huffman, and ZipNN and zstd if installed.

Each decodes the same bytes into memory that is there already, but for ZipNN, whose interface allocates it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import Report, Work, counted, ratio
from nf12_matrices import Operands, same
from torch import Tensor

from gnomon.core.timing import spread
from gnomon.kernels import memory
from gnomon.kernels.huffman import cpu as huffman
from gnomon.methods.compress.nf12 import NF12Tensor, encode

FRAME = 1 << 22
"""Bytes that zstd codes at a time, so that threads have something to share."""


@dataclass(frozen=True)
class Peer:
    """A codec and the matrix in its code."""

    name: str
    encode: Callable[[], object]
    decode: Callable[[Any, Tensor], object]
    """(code, out): out holds the matrix afterwards, or the result does and is copied by `check`."""
    coded: list[bytes]

    def copies(self, count: int) -> list[list[bytes]]:
        """The code, `count` times in separate memory."""
        return [self.coded, *([bytes(bytearray(part)) for part in self.coded] for _ in range(count - 1))]


def peers(report: Report, w: Tensor, threads: int) -> list[Peer]:
    """Those that are installed; the others are left out by name."""
    found = []
    for package, make in (("zipnn", _zipnn), ("zstandard", _zstd)):
        try:
            found.append(make(w, threads))
        except ImportError:
            report.leave_out(package, f"not installed; pip install {package}")
    return found


def _bytes_of(w: Tensor) -> memoryview:
    return w.view(torch.uint8).view(-1).numpy().data


def _zipnn(w: Tensor, threads: int) -> Peer:
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
        return zstandard.ZstdCompressor(level=3).compress(source[at : at + FRAME])

    def encode() -> list[bytes]:
        return list(pool.map(one, range(0, len(source), FRAME)))

    def decode(code: list[bytes], out: Tensor) -> None:
        to = _bytes_of(out)

        def into(k: int) -> None:
            zstandard.ZstdDecompressor().stream_reader(code[k]).readinto(to[k * FRAME : (k + 1) * FRAME])

        list(pool.map(into, range(len(code))))

    return Peer("zstd", encode, decode, encode())


def bulk(report: Report, of: Operands, threads: int, repeats: int) -> None:
    """Decode one matrix to BF16 in memory: GB/s of BF16 written, beside entropy-coded peers and copies."""
    w, t = of.plain[0], of.coded[0]
    outs = [torch.empty_like(w) for w in of.plain]
    found = peers(report, w, threads)

    def work(name: str, call: Callable[..., object], sources: Sequence[Any]) -> Work:
        return Work(
            name=name, calls=[partial(call, s, o) for s, o in zip(sources, outs, strict=True)], bytes=w.nbytes
        )

    ours = [
        work("NF12", NF12Tensor.decode, of.coded),
        work("Huffman", huffman.decode, of.huffman),
        *(work(peer.name, peer.decode, peer.copies(len(outs))) for peer in found),
        work("copy, streamed", memory.copy, of.plain),
        work("copy, memcpy", lambda w, out: ctypes.memmove(out.data_ptr(), w.data_ptr(), w.nbytes), of.plain),
        work("copy, torch", lambda source, out: out.copy_(source), of.plain),
    ]
    for one in ours:
        outs[0].zero_()
        result = one.calls[0]()
        report.check(
            f"{one.name} gives the same bits", same(result if isinstance(result, Tensor) else outs[0], w)
        )
    report.stop_if_wrong()
    seconds = report.time(f"decode {of.shape} (GB/s of BF16 written)", ours, repeats=repeats, threads=threads)
    medians = {name: spread(times).median for name, times in seconds.items()}
    best = min(("Huffman", *(p.name for p in found)), key=medians.__getitem__)
    faster = ratio(seconds[best], seconds["NF12"])
    what = f"decoding, {counted(threads, 'thread')}"
    report.target(
        f"{what}: NF12 over the best entropy-coded peer, {best}", faster.value or 0.0, 5, faster.interval
    )
    copied = min(medians[name] for name in medians if name.startswith("copy"))
    share = (t.nbytes + w.nbytes) / medians["NF12"] / (2 * w.nbytes / copied)
    report.target(
        f"{what}: share of the copy bandwidth ({2 * w.nbytes / copied / 1e9:.1f} GB/s moved)", share, 0.6
    )
    encoders: list[tuple[str, Callable[[], object]]] = [
        ("NF12", partial(encode, w)),
        ("Huffman", partial(huffman.encode, w)),
        *((p.name, p.encode) for p in found),
    ]
    report.time(
        f"encode {of.shape} (GB/s of BF16 read)",
        [Work(name=name, calls=[call], bytes=w.nbytes) for name, call in encoders],
        repeats=min(repeats, 3),
        threads=threads,
    )
