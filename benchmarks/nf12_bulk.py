"""Bulk decoding and encoding of a matrix, beside entropy-coded peers: Huffman, and ZipNN and zstd if installed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
from gnomon.studies import nf12_peers
from gnomon.studies.nf12_peers import Peer


def peers(report: Report, w: Tensor, threads: int) -> list[Peer]:
    """Those that are installed; the others are left out by name."""
    found, absent = nf12_peers.peers(w, threads)
    for package, reason in absent.items():
        report.leave_out(package, reason)
    return found


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
