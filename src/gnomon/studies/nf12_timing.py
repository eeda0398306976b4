"""Stages of the NF12 study that time: products and bulk decoding. They are declared exclusive.

Timings are seconds per call with the repeat's number as item; contenders take turns within a repeat, and what
they read adds up to four times the last-level cache (`core.timing`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.lab import StageContext
from gnomon.studies.nf12_peers import peers

if TYPE_CHECKING:
    from torch import Tensor

    from gnomon.core.timing import Contender
    from gnomon.methods.compress.nf12 import NF12Tensor

SIGMA = 0.02  # of the Gaussian matrices that are timed, as in the card


def products(
    ctx: StageContext,
    *,
    rows: int,
    columns: int,
    zeros: float,
    threads: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """y = x W^T for one row of x: NF12, the matched BF16 kernel, torch, and decoding a Huffman code first.

    Args:
        zeros: share of exact zeros among the weights, as a vocabulary matrix has them.
        seed: repeats of seed 0 choose the best cell, those of seed 1 judge it.
    """
    import torch

    from gnomon.core.timing import Contender, copies_for, interleaved, threads_set
    from gnomon.kernels import bf16, memory, native
    from gnomon.methods.compress.nf12 import Patterns, encode

    one = matrix(rows, columns, zeros)
    planes = encode(one)
    count = copies_for(planes.nbytes)
    encoded = [planes, *(copy_of(planes) for _ in range(count - 1))]
    plain = [one, *(one.clone() for _ in range(count - 1))]
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    expected = bf16.linear(x, one)
    if not torch.equal(encoded[0].prepared.linear(x).view(torch.int16), expected.view(torch.int16)):
        raise AssertionError("NF12 and the matched kernel disagree; nothing was timed.")
    tags = {"shape": f"{rows} x {columns}", "threads": threads}
    with threads_set(threads):
        contenders = [
            Contender(name="NF12", calls=[partial(p.prepared.linear, x) for p in encoded]),
            Contender(name="BF16, matched", calls=[partial(bf16.linear, x, w) for w in plain]),
            Contender(name="BF16, torch", calls=[partial(torch.nn.functional.linear, x, w) for w in plain]),
            Contender(name="BF16, torch mv", calls=[partial(torch.mv, w, x[0]) for w in plain]),
            Contender(name="reading", calls=[partial(memory.read, w) for w in plain]),
        ]
        if not native.problem():
            contenders.append(huffman_product(one, x, count))
        times = interleaved(contenders, repeats=repeats)
        cached = interleaved(small_contenders(columns, zeros, x, threads), repeats=repeats)
    for name, seconds in times.items():
        for repeat, value in enumerate(seconds):
            ctx.record(
                method=name, metric="time", value=value, unit="s", better="lower", item=repeat, tags=tags
            )
    patterns_of = Patterns.of(one)
    optimum = rows * columns * patterns_of.joint.corrected / 8
    # The bandwidth of a repeat is the best of plain reading and of the BF16 product, which reads as much.
    for repeat, best in enumerate(map(min, times["reading"], times["BF16, matched"])):
        bandwidth = one.nbytes / best
        for name, size in {"entropy bound": optimum, "NF12 byte bound": planes.nbytes}.items():
            ctx.record(
                method=name,
                metric="time",
                value=size / bandwidth,
                unit="s",
                better="lower",
                item=repeat,
                tags=tags,
            )
    share = rows / cached_rows(columns, threads) / 100
    for name in ("NF12", "BF16, matched"):
        pairs = zip(cached[f"{name}, whole"], cached[f"{name}, half"], strict=True)
        for repeat, (whole, half) in enumerate(pairs):
            ctx.record(
                method=name,
                metric="time at the speed of a cached matrix",
                value=(whole - half) * share,
                unit="s",
                item=repeat,
                tags=tags,
            )
    return {"copies": count, "nf12 bytes": planes.nbytes, "bf16 bytes": one.nbytes}


CACHED = 1 << 16  # weights of the smaller matrix that stays in a level-2 cache


def small_contenders(columns: int, zeros: float, x: Tensor, threads: int) -> list[Contender]:
    """NF12 and BF16 on a matrix that fits a cache, and on one of twice the height, a hundred times a call.

    The difference is what arithmetic takes, without the cost of a call (preparing x, waking threads).
    """
    from gnomon.core.timing import Contender
    from gnomon.kernels import bf16
    from gnomon.methods.compress.nf12 import encode

    def often(call: Callable[[], object]) -> None:
        for _ in range(100):
            call()

    made = []
    for size, height in (("half", 1), ("whole", 2)):
        w = matrix(height * cached_rows(columns, threads), columns, zeros)
        linear = encode(w).prepared.linear
        made.append(Contender(name=f"NF12, {size}", calls=[partial(often, partial(linear, x))]))
        made.append(
            Contender(name=f"BF16, matched, {size}", calls=[partial(often, partial(bf16.linear, x, w))])
        )
    return made


def cached_rows(columns: int, threads: int) -> int:
    """Rows of the smaller of the two matrices; the larger one fits the level-2 caches of all threads."""
    return max(2, CACHED // columns) * threads


def huffman_product(w: Tensor, x: Tensor, count: int) -> Contender:
    """Decode the whole matrix from its Huffman code into a buffer, then multiply: the codec's way to a product."""
    import torch

    from gnomon.core.timing import Contender
    from gnomon.kernels import bf16
    from gnomon.kernels.huffman import cpu as huffman

    coded, buffer = huffman.encode(w), torch.empty_like(w)
    return Contender(
        name="Huffman, then BF16", calls=[lambda: bf16.linear(x, huffman.decode(coded, out=buffer))] * count
    )


def bulk(
    ctx: StageContext, *, rows: int, columns: int, threads: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Decoding one matrix to BF16 in memory, against entropy-coded peers and plain copies."""
    import torch

    from gnomon.core.timing import Contender, interleaved, threads_set
    from gnomon.kernels import memory, native
    from gnomon.kernels.huffman import cpu as huffman
    from gnomon.methods.compress.nf12 import encode

    w = matrix(rows, columns, 0.0)
    planes, out = encode(w), torch.empty_like(w)
    left_out: dict[str, str] = {}
    with threads_set(threads):
        contenders = [
            Contender(name="NF12", calls=[partial(planes.decode, out)]),
            Contender(name="copy", calls=[partial(memory.copy, w, out)]),
            Contender(name="copy, torch", calls=[partial(out.copy_, w)]),
        ]
        if native.problem():
            left_out["Huffman"] = native.problem()
        else:
            contenders.append(
                Contender(name="Huffman", calls=[partial(huffman.decode, huffman.encode(w), out)])
            )
        found, absent = peers(w, threads)
        left_out |= absent
        for peer in found:
            if not torch.equal(peer.decoded(out).view(torch.int16), w.view(torch.int16)):
                raise AssertionError(f"{peer.name} did not give back what it was given; nothing was timed.")
            contenders.append(Contender(name=peer.name, calls=[partial(peer.decode, peer.coded, out)]))
        planes.decode(out)
        if not torch.equal(out.view(torch.int16), w.view(torch.int16)):
            raise AssertionError("NF12 did not give back what it was given; nothing was timed.")
        times = interleaved(contenders, repeats=repeats)
    for name, seconds in times.items():
        for repeat, value in enumerate(seconds):
            ctx.record(
                method=name,
                metric="decoding time",
                value=value,
                unit="s",
                better="lower",
                item=repeat,
                tags={"threads": threads},
            )
    return {"left out": left_out, "bytes": w.nbytes, "nf12 bytes": planes.nbytes}


# ------------------------------------------------------------------------------------------------- helpers


def matrix(rows: int, columns: int, zeros: float) -> Tensor:
    """Gaussian BF16 weights, a share of them exactly 0."""
    import torch

    generator = torch.Generator().manual_seed(rows + columns)
    w = torch.empty(rows, columns, dtype=torch.bfloat16)
    height = max(1, (1 << 22) // columns)  # rows made at once: not all of it in float32
    for first in range(0, rows, height):
        part = w[first : first + height]
        values = torch.randn(part.shape, generator=generator) * SIGMA
        if zeros:
            values[torch.rand(part.shape, generator=generator) < zeros] = 0
        part.copy_(values)
    return w


def copy_of(t: NF12Tensor) -> NF12Tensor:
    """The same planes elsewhere in memory."""
    from gnomon.methods.compress.nf12 import NF12Tensor

    return NF12Tensor(t.sm.clone(), t.ex.clone(), t.esc.clone(), t.base, t.shape)
