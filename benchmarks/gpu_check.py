"""Check every Triton kernel against its reference and time it, in one short run on any CUDA device.

    python benchmarks/gpu_check.py [--only nf12] [--json FILE]

Exits 0 where all kernels are right, 1 where one is wrong, and 0 with one sentence where none can run (no CUDA
device, no Triton). Under TRITON_INTERPRET=1 the checks run on tiny shapes, and nothing is timed.

A kernel joins by one entry in `KERNELS`: a function that calls `bench.check` and `bench.time_on_device`.

Timing: each contender reads as many separate copies of its operands as make four times the level-2 cache, the
smallest format deciding the number; one pass over the copies is one CUDA graph, so no launch is waited for; the
contenders take turns. Reported: median and the 20 % and 80 % quantiles of a pass over its number of copies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import Report, Work, Wrong

from gnomon.core.errors import unknown
from gnomon.core.timing import copies_for
from gnomon.kernels.launch import interpreted, why_not

REPEATS = 25


@dataclass(kw_only=True)
class Bench(Report):
    """Where kernels report to: checks and lines as in every benchmark, timing by the device's own clock."""

    device: torch.device
    tiny: bool
    """Shapes for an interpreter, and no timing."""

    def copies(self, smallest: int) -> int:
        """How many copies of operands of this many bytes make four times the level-2 cache."""
        return copies_for(smallest, cache=torch.cuda.get_device_properties(self.device).L2_cache_size)

    def fits(self, bytes_needed: int) -> bool:
        """Whether the device has this much memory free."""
        return bytes_needed < 0.9 * torch.cuda.mem_get_info(self.device)[0]

    def time_on_device(self, what: str, contenders: Sequence[Work]) -> None:
        """Time contenders in turns; the first is the one that the others are compared with."""
        graphs = [_graph(c.calls) for c in contenders]
        for graph in graphs:
            graph.replay()
        seconds: list[list[float]] = [[] for _ in contenders]
        for _ in range(REPEATS):
            for graph, of, contender in zip(graphs, seconds, contenders, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize(self.device)
                of.append(start.elapsed_time(end) / 1e3 / len(contender.calls))
        first = statistics.median(seconds[0])
        for contender, of in zip(contenders, seconds, strict=True):
            low, median, high = (float(torch.tensor(of).quantile(q)) for q in (0.2, 0.5, 0.8))
            row = {
                "kind": "time",
                "what": what,
                "contender": contender.name,
                "copies": len(contender.calls),
                "us": median * 1e6,
                "us_20": low * 1e6,
                "us_80": high * 1e6,
                "bytes": contender.bytes,
                "gb_per_s": contender.bytes / median / 1e9,
                "speed_of_first": median / first,
            }
            self.rows.append(row)
            print(
                f"  {what:<34} {contender.name:<22} {row['us']:>9.1f} us  [{row['us_20']:.1f}, {row['us_80']:.1f}]"
                f" {row['gb_per_s']:>8.0f} GB/s  the first is {row['speed_of_first']:.2f} x as fast",
                flush=True,
            )


def _graph(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls as one CUDA graph, compiled and warm."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


NF12_TIMED = [(16384, 8192), (25600, 5120), (5120, 25600), (1024, 5120)]  # the card's, then Qwen3-32B's


def nf12(bench: Bench) -> None:
    """NF12 in three quarters of the bytes: bulk decode, and the fused product beside the same one on plain BF16."""
    nf12_check(bench)
    if bench.tiny:
        return
    for n, k in NF12_TIMED:
        nf12_time(bench, n, k)


def nf12_check(bench: Bench) -> None:
    """Bits of the decode, bits of fused against matched, and both against float64."""
    from gnomon.kernels.bf16 import triton as bf16
    from gnomon.kernels.nf12 import triton
    from gnomon.methods.compress.nf12 import encode

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        integers = torch.int16 if a.element_size() == 2 else torch.int32
        return torch.equal(a.view(integers), b.to(a.device).view(integers))

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()

    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    for base in (112,) if bench.tiny else (1, 112, 239):
        t = encode(every, base=base).to(bench.device)
        bench.check(
            f"nf12 decode, every pattern, base {base}",
            same(triton.decode(t.sm, t.ex, t.esc, base, 1024), every),
        )
    sizes = (
        [(1, 8), (5, 63), (33, 129)]
        if bench.tiny
        else [(1, 8), (5, 63), (33, 129), (1000, 1000), (8192, 8192)]
    )
    for n, k in sizes:
        weight = draw(n, k, scale=0.02)
        t = encode(weight).to(bench.device)
        decoded = triton.decode(t.sm, t.ex, t.esc, t.base, k)
        bench.check(f"nf12 decode {n} x {k}", same(decoded, weight), f"{t.exceptions} exceptions")
        for rows, dtype, bound in (
            (1, torch.bfloat16, 5e-3),
            (3, torch.float32, 1e-6),
            (8, torch.bfloat16, 5e-3),
        ):
            x = draw(rows, k, scale=1.0).to(bench.device, dtype)
            fused, matched = triton.linear(x, t.sm, t.ex, t.esc, t.base), bf16.linear(x, decoded)
            exact = x.double() @ decoded.double().T
            error = float((fused - exact).norm() / exact.norm())
            what = f"nf12 linear {n} x {k}, {rows} rows, {dtype}".replace("torch.", "")
            bench.check(f"{what}: fused = matched", same(fused, matched))
            bench.check(f"{what}: error under {bound:g}", error < bound, f"{error:.1e}")


def nf12_time(bench: Bench, n: int, k: int) -> None:
    """Fused, matched and cuBLAS products of one shape; bulk decode beside a copy of as many bytes."""
    from gnomon.kernels.bf16 import triton as bf16
    from gnomon.kernels.nf12 import triton
    from gnomon.methods.compress.nf12 import encode

    copies = bench.copies(n * k * 3 // 2)
    if not bench.fits(copies * n * k * 6):
        bench.leave_out(f"nf12 timing {n} x {k}", "the device has too little memory free")
        return
    plain = (torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    t = encode(plain)
    coded = [t.to(bench.device) for _ in range(copies)]
    dense = [plain.to(bench.device) for _ in range(copies)]
    outs = [torch.empty_like(w) for w in dense]
    for rows in (1, 8):
        x = torch.randn(rows, k, device=bench.device).bfloat16()
        bench.time_on_device(
            f"nf12 linear {n} x {k}, {rows} row{'s'[: rows > 1]}",
            [
                Work(
                    name="nf12 fused",
                    calls=[partial(triton.linear, x, c.sm, c.ex, c.esc, c.base) for c in coded],
                    bytes=t.nbytes,
                ),
                Work(
                    name="bf16, the same kernel",
                    calls=[partial(bf16.linear, x, w) for w in dense],
                    bytes=plain.nbytes,
                ),
                Work(
                    name="torch (vendor)",
                    calls=[partial(torch.nn.functional.linear, x, w) for w in dense],
                    bytes=plain.nbytes,
                ),
            ],
        )
    bench.time_on_device(
        f"nf12 decode {n} x {k}",
        [
            Work(
                name="nf12 decode",
                calls=[
                    partial(triton.decode, c.sm, c.ex, c.esc, c.base, k, o)
                    for c, o in zip(coded, outs, strict=True)
                ],
                bytes=t.nbytes + plain.nbytes,
            ),
            Work(
                name="copy of BF16",
                calls=[partial(o.copy_, w) for w, o in zip(dense, outs, strict=True)],
                bytes=2 * plain.nbytes,
            ),
        ],
    )


def sparse_decode(bench: Bench) -> None:
    """A step of Atop-N decoding beside the matched dense one, with few key heads and with as many as value heads."""
    sparse_check(bench)
    if bench.tiny:
        return
    for length in (1024, 65536):
        for key_heads in (8, 2, 1):
            sparse_time(bench, length, key_heads)


def _caches(key_heads: int, length: int, width: int, heads: int = 32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, width, generator=g).bfloat16()
    return q, *(torch.randn(1, h, length, width, generator=g).bfloat16() for h in (key_heads, 8))


def sparse_check(bench: Bench) -> None:
    """Mass of what is kept, and values, against float64 of the same operands."""
    from gnomon.kernels.sparse_decode import reference, triton

    for length, width, key_heads, n, oversample in (
        ((40, 16, 1, 8, 1), (70, 24, 8, 16, 2))
        if bench.tiny
        else ((4096, 128, 1, 512, 1), (5000, 128, 8, 64, 4), (333, 80, 2, 64, 1))
    ):
        q, k, v = _caches(key_heads, length, width)
        visible = torch.arange(length)[None] % 7 != 3
        on_device = [t.to(bench.device) for t in (q, k, v, visible)]
        out, kept = triton.sparse_decode(*on_device[:3], n, oversample, width**-0.5, on_device[3])
        scores = reference.scores(q.double(), k.double(), width**-0.5, visible)
        exact = reference.attend(scores, kept.cpu(), v.double())  # of what it kept
        what = f"sparse decode {length} x {width}, {key_heads} key heads, n = {n}, c = {oversample}"
        error = float((out.cpu().double() - exact).norm() / exact.norm())
        bound = 1e-2 if bench.tiny else 5e-3  # the interpreter cuts bfloat16 off
        bench.check(f"{what}: error under {bound:g}", error < bound, f"{error:.1e}")
        best = reference.decode(q.double(), k.double(), v.double(), n, oversample, width**-0.5, visible)[1]
        mass, most = (scores.softmax(-1).gather(-1, at.clamp(min=0)).sum(-1) for at in (kept.cpu(), best))
        short = float((most - mass).max())
        bench.check(f"{what}: keeps the mass of the best", short < 1e-5, f"{short:.1e}")
        if key_heads == v.shape[1]:
            dense = triton.dense_decode(*on_device[:3], width**-0.5, on_device[3])
            exact = (scores.softmax(-1)[:, :, None] @ v.double().repeat_interleave(4, 1))[:, :, 0]
            error = float((dense.cpu().double() - exact).norm() / exact.norm())
            bench.check(f"{what}, dense: error under {bound:g}", error < bound, f"{error:.1e}")


def sparse_time(bench: Bench, length: int, key_heads: int, n: int = 512, width: int = 128) -> None:
    """Sparse decoding of one cache, the matched dense kernel on eight key heads, and torch's attention."""
    from gnomon.kernels.sparse_decode import triton

    size = length * width * 2
    copies = bench.copies(size * (key_heads + 8))
    if not bench.fits(copies * size * 24):
        bench.leave_out(
            f"sparse decode {length}, {key_heads} key heads", "the device has too little memory free"
        )
        return
    sets = [[t.to(bench.device) for t in _caches(key_heads, length, width)] for _ in range(copies)]
    whole = [[t.to(bench.device) for t in _caches(8, length, width)] for _ in range(copies)]
    scale = width**-0.5
    attention = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    bench.time_on_device(
        f"sparse decode, {length} positions, {key_heads} key heads",
        [
            Work(
                name="sparse",
                calls=[partial(triton.sparse_decode, *one, n, 1, scale, None) for one in sets],
                bytes=size * key_heads + 32 * n * width * 2,
            ),
            Work(
                name="dense, matched",
                calls=[partial(triton.dense_decode, *one, scale, None) for one in whole],
                bytes=size * 16,
            ),
            Work(
                name="torch's attention",
                calls=[partial(attention, q[:, :, None], k, v) for q, k, v in whole],
                bytes=size * 16,
            ),
        ],
    )


KERNELS: dict[str, Callable[[Bench], None]] = {"nf12": nf12, "sparse_decode": sparse_decode}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help=f"one of: {', '.join(KERNELS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON lines here")
    options = parser.parse_args(arguments)
    if options.only is not None and options.only not in KERNELS:
        print(unknown("kernel", options.only, KERNELS), file=sys.stderr)
        return 2
    if not torch.cuda.is_available() and not interpreted():
        print(f"Nothing was checked: there is no CUDA device that torch {torch.__version__} can use.")
        return 0
    device = torch.device("cpu" if interpreted() else "cuda")
    if reason := why_not(device):
        print(f"Nothing was checked: {reason}.")
        return 0
    bench = Bench(device=device, tiny=interpreted())
    name = "Triton's interpreter" if bench.tiny else torch.cuda.get_device_name(device)
    bench.rows.append({"kind": "device", "name": name, "torch": torch.__version__})
    print(name)
    for kernel in [options.only] if options.only else KERNELS:
        KERNELS[kernel](bench)
    bench.write(options.json)
    if options.json is None:
        print(bench.lines(), end="")
    try:
        bench.stop_if_wrong()
    except Wrong as error:
        print(error)
        return 1
    print("All checks passed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
