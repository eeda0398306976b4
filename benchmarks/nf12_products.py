"""Products with an NF12 matrix: one and more rows of x, beside other ways to them and the limits of the machine.

Two limits are measured in the same run: what memory delivers to the fastest reader, and what the instructions do
where the matrix stays in the level-2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from common import Report, Work, counted, ratio, second_level_cache, told
from nf12_matrices import Operands, Shape
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.timing import Contender, interleaved, spread
from gnomon.kernels import bf16, memory
from gnomon.kernels.huffman import cpu as huffman
from gnomon.kernels.huffman.reference import Coded
from gnomon.methods.compress.nf12 import Patterns, encode, linear
from gnomon.studies.nf12_timing import matrix

CROSSING_REPEATS = 5
"""For more than one row only an order is wanted, no interval."""
CALLS = 30
"""Of a kernel on a matrix in the cache, where one alone is too short for the clock."""
READ = "reading BF16"
FUSED, MATCHED, HUFFMAN = "NF12, fused", "BF16, same kernel", "Huffman, then BF16"


def products(report: Report, of: Operands, threads: int, batches: Sequence[int], repeats: int) -> None:
    """y = x W^T for each number of rows of x, then what the two limits say about one row."""
    fastest = {}
    for batch in batches:
        x = torch.randn(batch, of.shape.columns, generator=torch.Generator().manual_seed(batch)).bfloat16()
        seconds = report.time(
            f"{of.shape}, {counted(batch, 'row')} of x",
            contenders(of, x),
            repeats=repeats if batch == 1 else min(repeats, CROSSING_REPEATS),
            threads=threads,
        )
        medians = {name: spread(times).median for name, times in seconds.items() if name != READ}
        ours = [name for name in medians if name.startswith("NF12")]
        fastest[batch] = tuple(min(names, key=medians.__getitem__) for names in (medians, ours))
        if batch == 1:
            judge(report, of, threads, seconds, repeats)
    if len(batches) > 1:
        for position, among in enumerate(("of all", "of NF12's ways")):
            winners = "; ".join(
                f"{names[position]} for {counted(batch, 'row')}" for batch, names in fastest.items()
            )
            report.note(f"fastest {among}: {winners}")


def contenders(of: Operands, x: Tensor) -> list[Work]:
    """Ways to the same product, NF12's first."""
    bf, t, batch = of.plain, of.coded[0], x.shape[0]
    outer, plain = x.nbytes + 2 * batch * of.shape.rows, of.plain[0].nbytes
    fp, wide = [w.float() for w in bf], x.float()
    found = [
        Work(
            name=FUSED, calls=[partial(linear, x, c, mode="fused") for c in of.coded], bytes=t.nbytes + outer
        ),
        Work(name=MATCHED, calls=[partial(bf16.linear, x, w) for w in bf], bytes=plain + outer),
        Work(name="BF16, torch linear", calls=[partial(F.linear, x, w) for w in bf], bytes=plain + outer),
        Work(
            name="FP32, torch linear",
            calls=[partial(F.linear, wide, w) for w in fp],
            bytes=2 * (plain + outer),
        ),
    ]
    if batch > 1:
        for mode in ("blocked", "buffered"):
            calls = [partial(linear, x, c, mode=mode) for c in of.coded]
            found.insert(2, Work(name=f"NF12, {mode}", calls=calls, bytes=t.nbytes + outer))
        return found
    buffer = torch.empty_like(bf[0])

    def decode_and_multiply(h: Coded) -> Tensor:
        return bf16.linear(x, huffman.decode(h, buffer))

    return [
        *found[:3],
        Work(name="BF16, torch mv", calls=[partial(torch.mv, w, x[0]) for w in bf], bytes=plain + outer),
        *found[3:],
        Work(
            name=HUFFMAN,
            calls=[partial(decode_and_multiply, h) for h in of.huffman],
            bytes=of.huffman[0].nbytes + 2 * plain + outer,
        ),
        Work(name=READ, calls=[partial(memory.read, w) for w in bf], bytes=plain),
    ]


def judge(report: Report, of: Operands, threads: int, seconds: dict[str, list[float]], repeats: int) -> None:
    """One row of x: the ratios that were aimed at, and the roofline."""
    w, t = of.plain[0], of.coded[0]
    medians = {name: spread(times).median for name, times in seconds.items()}
    others = [name for name in medians if name not in (FUSED, MATCHED, READ)]
    best = min(others, key=medians.__getitem__)
    what = f"{of.shape}, {counted(threads, 'thread')}"
    against = ratio(seconds[best], seconds[FUSED])
    word = "faster than" if medians[best] > medians[FUSED] else "SLOWER than"
    report.note(f"NF12 is {word} the best of the others, {best}: {told(against)} x as fast")
    matched = ratio(seconds[MATCHED], seconds[FUSED])
    report.target(f"{what}: NF12 over the matched BF16 kernel", matched.value or 0.0, 1.2, matched.interval)
    sizes = {
        FUSED: t.nbytes,
        MATCHED: w.nbytes,
        READ: w.nbytes,
        "BF16, torch linear": w.nbytes,
        "BF16, torch mv": w.nbytes,
    }
    rates = {name: size / medians[name] for name, size in sizes.items()}
    rates["FP32, torch linear"] = 2 * w.nbytes / medians["FP32, torch linear"]
    reader = max(rates, key=rates.__getitem__)
    bandwidth = rates[reader]
    report.target(f"{what}: share of NF12's byte bound", rates[FUSED] / bandwidth, 0.8)
    entropy = Patterns.of(w).joint.corrected
    share = w.numel() * entropy / 8 / bandwidth / medians[FUSED]
    report.target(f"{what}: share of the entropy bound ({entropy:.2f} bits)", share, 0.71)
    instructions = in_cache(report, of.shape, threads, repeats)
    roofs = {}
    for name, size in ((FUSED, t.nbytes), (MATCHED, w.nbytes)):
        by_memory, by_instructions = bandwidth / size * w.numel(), instructions[name]
        roofs[name] = min(by_memory, by_instructions)
        binds = "memory binds" if by_memory < by_instructions else "instructions bind"
        report.rows.append(
            {
                "kind": "roof",
                "what": str(of.shape),
                "threads": threads,
                "contender": name,
                "binds": binds.split(maxsplit=1)[0],
            }
            | {"bandwidth": bandwidth, "weights_per_s_by_memory": by_memory}
            | {"weights_per_s_by_instructions": by_instructions, "weights_per_s": w.numel() / medians[name]}
        )
        print(
            f"  {name}: memory ({bandwidth / 1e9:.1f} GB/s, {reader}) allows {by_memory / 1e9:.1f} G weights/s, "
            f"instructions {by_instructions / 1e9:.1f}; measured {w.numel() / medians[name] / 1e9:.1f}: {binds}"
        )
    report.note(f"the two roofs allow NF12 to be {roofs[FUSED] / roofs[MATCHED]:.2f} x as fast as BF16 here")


def in_cache(report: Report, shape: Shape, threads: int, repeats: int) -> dict[str, float]:
    """Weights a second where the matrix stays in the level-2 cache, by what doubling it adds to a call.

    The difference leaves out what a call costs whatever the rows: preparing x, starting threads, Python. A limit
    is what the fastest repeats show, so least times are taken, not medians.
    """
    height = max(8, second_level_cache() // 4 // (2 * shape.columns) // 8 * 8) * threads
    x = torch.randn(1, shape.columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    turns = []
    for name, rows in (("half", height), ("whole", 2 * height)):
        w = matrix(rows, shape.columns, shape.zeros)
        t = encode(w)
        turns.append(Contender(name=f"{name} {FUSED}", calls=[partial(t.prepared.linear, x)] * CALLS))
        turns.append(Contender(name=f"{name} {MATCHED}", calls=[partial(bf16.linear, x, w)] * CALLS))
    seconds = interleaved(turns, repeats=2 * repeats)
    found = {}
    for name in (FUSED, MATCHED):
        whole, half = (min(seconds[f"{size} {name}"]) for size in ("whole", "half"))
        found[name] = height * shape.columns / (whole - half) if whole > half else float("inf")
        report.rows.append(
            {"kind": "time", "what": f"{2 * height} x {shape.columns}, one copy in the level-2 cache"}
            | {"contender": name, "threads": threads, "copies": 1, "repeats": 2 * repeats}
            | {"seconds_least": whole, "seconds_of_half_least": half}
        )
        print(
            f"  one copy of {2 * height} x {shape.columns}, in the level-2 cache: {name} {whole * 1e6:.1f} us a call, "
            f"{half * 1e6:.1f} with half of the rows"
        )
    return found
