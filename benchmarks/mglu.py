"""FlashMGLU on this CPU: one row of x and few, beside the GLU of the same loop, torch's GLU and the naive form.

    python benchmarks/mglu.py [--threads 1,2] [--repeats 15] [--shapes 8192x2048,14336x4096] [--json FILE] [--quick]

Exits 1, before anything is timed, where a kernel is wrong, and 0 with one sentence where there is no compiled library.
Ratios change nothing about the exit status: losses are printed like wins. Shapes are d x h, the paper's two by default.

A GLU reads 32 bits for each weight of one matrix, MGLU 16 + n, so bandwidth alone allows 32/(16 + n) = 1.88, 1.78, 1.60
and 1.33 at n = 1, 2, 4, 8 masks. Two limits are measured in the same run: what memory delivers to the fastest reader,
and what instructions do where the matrix stays in the level-2 cache.

Timing: contenders take turns; each reads as many separate copies of its operands as make four times the last-level
cache, the smallest format deciding the number. What the rows of the JSON lines are: `common.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from common import Copies, Report, Work, command, counted, ratio, second_level_cache
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.timing import Contender, interleaved, spread, threads_set
from gnomon.kernels import memory, native
from gnomon.kernels.mglu import cpu, flash_mglu, glu, reference
from gnomon.kernels.mglu.planes import by_rows, unpack

SHAPES = "8192x2048,14336x4096"
QUICK_SHAPES = "64x512,96x72"
MASKS = (1, 2, 4, 8)
BATCHES = (2, 4, 8, 16, 32)
FEW = 5
"""Repeats where only an order is wanted, or a ratio of ten."""
CALLS = 20
"""Of a kernel on a matrix in the cache, where one alone is too short for the clock."""
CHECKED = 256
"""Rows that are compared with float64 sums."""
MATCHED, READ = "GLU, same kernel", "reading"


def flash(n: int) -> str:
    """Name of the contender."""
    return f"MGLU, {counted(n, 'mask')}"


@dataclass(frozen=True)
class Operands:
    """A weight and its masks, and a GLU's second weight, in as many copies as a timing cycles through."""

    d: int
    h: int
    weights: list[Tensor]
    values: list[Tensor]
    planes: dict[int, list[Tensor]]

    @classmethod
    def of(cls, d: int, h: int, report: Report, *, copies: int | None) -> Operands:
        """Draw once, copy often enough."""
        g = torch.Generator().manual_seed(0)
        w, v = ((0.02 * torch.randn(d, h, generator=g)).bfloat16() for _ in range(2))
        planes = {
            n: by_rows(torch.randint(0, 256, (n, d, -(-h // 8)), generator=g, dtype=torch.uint8))
            for n in MASKS
        }
        if copies is None:
            plane = planes[1].nbytes
            decided = Copies.of(w.nbytes + plane, 2 * w.nbytes + sum(MASKS) * plane)
            report.note(f"{d} x {h}: {decided.told()}")
            copies = decided.count
        return cls(
            d,
            h,
            *([t, *(t.clone() for _ in range(copies - 1))] for t in (w, v)),
            {n: [t, *(t.clone() for _ in range(copies - 1))] for n, t in planes.items()},
        )

    def x(self, batch: int) -> Tensor:
        """Rows of x."""
        return torch.randn(batch, self.h, generator=torch.Generator().manual_seed(batch)).bfloat16()

    def __str__(self) -> str:
        return f"{self.d} x {self.h}"


def check(report: Report, of: Operands, threads: Sequence[int]) -> None:
    """Bits of what is stored, products against float64 sums, equal bits with any number of threads."""
    w, v, x, top = of.weights[0], of.values[0], of.x(3), min(CHECKED, of.d)
    for n in MASKS:
        planes = of.planes[n][0]
        bits = 8 * (w.nbytes + planes.nbytes) / w.numel()
        exactly = 16 + n if of.h % 8 == 0 else bits
        report.check(
            f"{of}, {counted(n, 'mask')}: {16 + n} bits a weight", bits == exactly, f"{bits:g} stored"
        )
        results = []
        for number in threads:
            with threads_set(number):
                results += [flash_mglu(x, w, planes, n), flash_mglu(x[:1], w, planes, n)]
        alike = all(torch.equal(y, results[0][: len(y)]) for y in results)
        report.check(f"{of}, {counted(n, 'mask')}: equal bits with {list(threads)} threads, any batch", alike)
        part = planes[:, :top].contiguous()
        exact = reference.mglu(x.double(), w[:top].double(), part, "silu")
        within(report, f"{of}, {counted(n, 'mask')}", results[0][:, :top], exact)
        within(
            report,
            f"{of}, {counted(n, 'mask')}, by blocks",
            cpu.blocked(x, w[:top], part, "silu", None),
            exact,
        )
    exact = reference.glu(x.double(), w[:top].double(), v[:top].double(), "silu")
    within(report, f"{of}, {MATCHED}", glu(x, w, v)[:, :top], exact)


def within(report: Report, what: str, found: Tensor, exact: Tensor) -> None:
    """Rounding the result to bfloat16 alone costs 1.7e-3."""
    error = float((found.double() - exact).norm() / exact.norm())
    report.check(f"{what}: error under 5e-3", error < 5e-3, f"{error:.1e}")


def torch_glu(x: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """Two of torch's products, then the activation."""
    return F.silu(F.linear(x, gate)) * F.linear(x, value)


def stored(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The naive form on weights that were masked beforehand."""
    total = torch.zeros(x.shape[0], parts[0].shape[0], dtype=x.dtype)
    for gate, value in zip(parts[::2], parts[1::2], strict=True):
        total += torch_glu(x, gate, value)
    return total


def one_row(report: Report, of: Operands, threads: int, repeats: int) -> None:
    """The kernel at each number of masks beside both GLUs, and what the two limits say."""
    x, w = of.x(1), of.weights[0]
    outer = x.nbytes + 2 * of.d
    pairs = list(zip(of.weights, of.values, strict=True))
    contenders = [
        Work(name=MATCHED, calls=[partial(glu, x, *pair) for pair in pairs], bytes=2 * w.nbytes + outer),
        *(
            Work(
                name=flash(n),
                calls=[
                    partial(flash_mglu, x, *pair, n) for pair in zip(of.weights, of.planes[n], strict=True)
                ],
                bytes=w.nbytes + of.planes[n][0].nbytes + outer,
            )
            for n in MASKS
        ),
        Work(
            name="GLU, torch",
            calls=[partial(torch_glu, x, *pair) for pair in pairs],
            bytes=2 * w.nbytes + outer,
        ),
        Work(name=READ, calls=[partial(memory.read, w) for w in of.weights], bytes=w.nbytes),
    ]
    seconds = report.time(f"{of}, 1 row of x", contenders, threads=threads, repeats=repeats)
    what = f"{of}, {counted(threads, 'thread')}"
    medians = {name: spread(times).median for name, times in seconds.items()}
    rates = {c.name: c.bytes / medians[c.name] for c in contenders}
    reader = max(rates, key=rates.__getitem__)
    best = min((MATCHED, "GLU, torch"), key=medians.__getitem__)
    for n in MASKS:
        found = ratio(seconds[MATCHED], seconds[flash(n)])
        aim = {1: 1.51, 4: 1.3}.get(n)
        told = f"{what}: matched GLU over MGLU, {counted(n, 'mask')} (bytes allow {32 / (16 + n):.2f})"
        if aim:
            report.target(told, found.value or 0.0, aim, found.interval)
        else:
            report.note(f"{told}: {found.value:.2f}")
        report.target(
            f"{what}: share of the byte bound, {counted(n, 'mask')}", rates[flash(n)] / rates[reader], 0.8
        )
    flat = ratio(seconds[flash(1)], seconds[flash(4)])
    report.target(
        f"{what}: 1 mask over 4 masks (bytes allow {17 / 20:.2f}, 1 is flat)",
        flat.value or 0.0,
        0.8,
        flat.interval,
    )
    against = ratio(seconds[best], seconds[flash(4)])
    word = "faster" if (against.value or 0) > 1 else "SLOWER"
    report.note(f"{what}: 4 masks are {word} than the better GLU, {best}: {against.value:.2f} x as fast")
    roofs(report, of, threads, repeats, rates[reader], reader, medians)


def roofs(
    report: Report,
    of: Operands,
    threads: int,
    repeats: int,
    bandwidth: float,
    reader: str,
    medians: dict[str, float],
) -> None:
    """Weights a second that memory and instructions allow, and those that were measured."""
    instructions = in_cache(of, threads, repeats)
    size = of.d * of.h
    for name, bits in [(MATCHED, 32), *((flash(n), 16 + n) for n in MASKS)]:
        by_memory, by_instructions = 8 * bandwidth / bits, instructions[name]
        binds = "memory" if by_memory < by_instructions else "instructions"
        report.rows.append(
            {"kind": "roof", "what": str(of), "threads": threads, "contender": name, "binds": binds}
            | {"bandwidth": bandwidth, "weights_per_s_by_memory": by_memory}
            | {"weights_per_s_by_instructions": by_instructions, "weights_per_s": size / medians[name]}
        )
        print(
            f"  {name}: memory ({bandwidth / 1e9:.1f} GB/s, {reader}) allows {by_memory / 1e9:.2f} G weights/s, "
            f"instructions {by_instructions / 1e9:.2f}; measured {size / medians[name] / 1e9:.2f}: {binds} bind"
        )


def in_cache(of: Operands, threads: int, repeats: int) -> dict[str, float]:
    """Weights a second where everything stays in the level-2 cache, by what doubling the matrix adds to a call.

    A limit is what the fastest repeats show, so least times are taken, not medians.
    """
    height = max(8, second_level_cache() // 8 // (4 * of.h) // 8 * 8) * threads
    x, turns = of.x(1), []
    for name, rows in (("half", height), ("whole", 2 * height)):
        w, v = (t[:1].expand(rows, -1).contiguous() for t in (of.weights[0], of.values[0]))
        turns.append(Contender(name=f"{name} {MATCHED}", calls=[partial(glu, x, w, v)] * CALLS))
        for n in MASKS:
            planes = by_rows(of.planes[n][0][:, :1].expand(-1, rows, -1))
            turns.append(
                Contender(name=f"{name} {flash(n)}", calls=[partial(flash_mglu, x, w, planes, n)] * CALLS)
            )
    seconds = interleaved(turns, repeats=2 * repeats)
    found = {}
    for name in (MATCHED, *map(flash, MASKS)):
        whole, half = (min(seconds[f"{size} {name}"]) for size in ("whole", "half"))
        found[name] = height * of.h / (whole - half) if whole > half else float("inf")
    return found


def naive(report: Report, of: Operands, threads: int, repeats: int) -> None:
    """2 n products in plain torch: its time grows with the number of masks."""
    x, w = of.x(1), of.weights[0]
    most = MASKS[-1]
    work = [
        Work(
            name=flash(most),
            calls=[
                partial(flash_mglu, x, *pair, most) for pair in zip(of.weights, of.planes[most], strict=True)
            ],
            bytes=w.nbytes + of.planes[most][0].nbytes,
        )
    ]
    masks = unpack(of.planes[most][0], of.h).bfloat16()
    for n in MASKS:
        size = (2 + 4 * n) * w.nbytes
        work.append(
            Work(
                name=f"naive, {counted(n, 'mask')}",
                calls=[partial(reference.naive, x, w, masks[:n], "silu")],
                bytes=size,
            )
        )
    parts = [part for mask in masks for part in (w * mask, w * (1 - mask))]
    work.append(
        Work(
            name=f"naive, {most} masks, stored", calls=[partial(stored, x, parts)], bytes=2 * most * w.nbytes
        )
    )
    seconds = report.time(f"{of}, 1 row of x, naive", work, threads=threads, repeats=min(repeats, FEW))
    what = f"{of}, {counted(threads, 'thread')}"
    for name in (f"naive, {most} masks", f"naive, {most} masks, stored"):
        slower = ratio(seconds[name], seconds[flash(most)])
        report.target(
            f"{what}: {name} over the kernel (paper: up to 19.7)", slower.value or 0.0, 10, slower.interval
        )
    grows = ratio(seconds[f"naive, {most} masks"], seconds["naive, 1 mask"])
    report.note(f"{what}: naive takes {grows.value:.1f} x as long with {most} masks as with 1")


def more_rows(report: Report, of: Operands, threads: int, repeats: int) -> None:
    """Where the matrix-vector kernel hands over to blocks."""
    for batch in BATCHES:
        x = of.x(batch)
        ways: dict[str, list[Callable[[], Tensor]]] = {
            "MGLU, 4 masks, fused": [
                partial(flash_mglu, x, *pair, 4, backend=best_isa())
                for pair in zip(of.weights, of.planes[4], strict=True)
            ],
            "MGLU, 4 masks, by blocks": [
                partial(cpu.blocked, x, *pair, "silu", None)
                for pair in zip(of.weights, of.planes[4], strict=True)
            ],
            MATCHED: [partial(glu, x, *pair) for pair in zip(of.weights, of.values, strict=True)],
            "GLU, torch": [partial(torch_glu, x, *pair) for pair in zip(of.weights, of.values, strict=True)],
        }
        size = of.weights[0].nbytes
        work = [
            Work(name=name, calls=calls, bytes=2 * size if "GLU" in name[:3] else size)
            for name, calls in ways.items()
        ]
        report.time(f"{of}, {batch} rows of x", work, threads=threads, repeats=min(repeats, FEW))


def best_isa() -> str:
    """The instruction set that `auto` takes for bfloat16."""
    return next(isa for isa in reversed(native.ISAS) if native.why_not(isa) is None)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    threads = report.begin(options, [])
    for position, (d, h) in enumerate(options.shapes):
        print()
        of = Operands.of(d, h, report, copies=1 if options.quick else None)
        check(report, of, threads)
        report.stop_if_wrong()
        for number in threads:
            with threads_set(number), torch.inference_mode():
                one_row(report, of, number, options.repeats)
                if number == threads[0]:
                    naive(report, of, number, options.repeats)
                if position == 0 and number == threads[-1]:
                    more_rows(report, of, number, options.repeats)
        del of


def shapes(text: str) -> list[tuple[int, int]]:
    """From a command line, with commas between them.

    Raises:
        ValueError: no such list.
    """
    found = []
    for part in text.split(","):
        d, h = (int(number) for number in part.split("x"))
        if min(d, h) < 1:
            raise ValueError(f"{part!r} has to be ROWSxCOLUMNS")
        found.append((d, h))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    return command(
        __doc__, measure, arguments,
        what="shapes", parse=shapes, metavar="DxH,…", default=SHAPES, quick=QUICK_SHAPES,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
