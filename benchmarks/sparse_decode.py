"""One decoding step over long caches on this CPU: attention that reads keys alone, beside dense attention.

    python benchmarks/sparse_decode.py [--threads 1,2] [--repeats 15] [--lengths 1024,8192,65536] [--json F] [--quick]

Exits 1, before anything is timed, where a kernel is wrong, and 0 with one sentence where there is no compiled library.
Ratios change nothing about the exit status: losses are printed like wins.

Dense attention reads keys and values of all heads, 2 H L d numbers. With sparsity alone keys are left, H L d, and the
values of the kept positions, H_q N d: at most twice as fast. Fewer key heads take the rest: 2 H L / (H_k L + H_q N) is
what reading allows (the SAGA card's cost model), and is printed beside each ratio. The matched dense kernel scores keys
by the same loop.

Blocks of a diffusion model, whose queries share one set of keys, come last: `sparse_decode_block` says how.

Timing: contenders take turns; each cycles through as many caches as make four times the last-level cache, the smallest
format deciding the number.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial

import sparse_decode_block
import torch
from common import Copies, Report, Work, command, ratio
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.timing import threads_set
from gnomon.kernels import memory
from gnomon.kernels.sparse_decode import dense_decode, reference, sparse_decode

LENGTHS = "1024,8192,65536"
QUICK_LENGTHS = "64,200"
QUERY_HEADS, HEADS, WIDTH, KEPT = 32, 8, 128, 512
KEY_HEADS = (8, 2, 1)
CHECKED = 5000
"""Positions of the cache that is compared with float64 sums."""
MATCHED, TORCH, READ = "dense, matched kernel", "dense, torch SDPA", "reading"
AIM = {65536: 3.0, 1024: 1.0}
"""Speed over the matched dense kernel that one or two key heads aim at, by length."""


def sparse(key_heads: int) -> str:
    """Name of the contender."""
    return f"Atop-{KEPT}, {key_heads} key heads" if key_heads > 1 else f"Atop-{KEPT}, 1 key head"


def cost_model(key_heads: int, length: int) -> float:
    """Numbers that dense attention reads over those that this one reads."""
    return 2 * HEADS * length / (key_heads * length + QUERY_HEADS * min(KEPT, length))


def drawn(length: int, heads: int, seed: int) -> Tensor:
    """A cache (1, heads, length, d)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, length, WIDTH, generator=generator).bfloat16()


def torch_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a Transformers model runs."""
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def check(report: Report, length: int, threads: Sequence[int]) -> None:
    """Against float64 sums and torch; equal bits with any number of threads."""
    q, k, v = drawn(1, QUERY_HEADS, 0)[:, :, 0], drawn(length, HEADS, 1), drawn(length, HEADS, 2)
    n, scale = min(KEPT, length), 1 / math.sqrt(WIDTH)
    exact = torch_dense(q.double(), k.double(), v.double())
    within(report, f"dense, {length} positions", dense_decode(q, k, v), exact)
    for heads in KEY_HEADS:
        exact, _ = reference.decode(q.double(), k[:, :heads].double(), v.double(), n, 1, scale)
        results = []
        for number in threads:
            with threads_set(number):
                results.append(sparse_decode(q, k[:, :heads], v, n=n)[0])
        within(report, f"{sparse(heads)}, {length} positions", results[0], exact)
        alike = all(torch.equal(one, results[0]) for one in results)
        report.check(f"{sparse(heads)}: equal bits with {list(threads)} threads", alike)


def within(report: Report, what: str, found: Tensor, exact: Tensor) -> None:
    """Rounding queries' weights and the result to bfloat16 costs about 3e-3."""
    error = float((found.double() - exact).norm() / exact.norm())
    report.check(f"{what}: error under 1e-2", error < 1e-2, f"{error:.1e}")


def one_length(report: Report, length: int, threads: int, repeats: int, copies: int | None) -> None:
    """All contenders at one length of the cache."""
    one_head = length * WIDTH * 2
    kept = QUERY_HEADS * min(KEPT, length) * WIDTH * 2
    if copies is None:
        decided = Copies.of(min(KEY_HEADS) * one_head + kept, 2 * HEADS * one_head)
        report.note(f"{length} positions: {decided.told()}")
        copies = decided.count
    q = drawn(1, QUERY_HEADS, 0)[:, :, 0]
    keys, values = ([drawn(length, HEADS, s + 2 * i) for i in range(copies)] for s in (1, 2))
    fewer = {heads: [k[:, :heads].contiguous() for k in keys] for heads in KEY_HEADS if heads < HEADS}
    fewer[HEADS] = keys
    n = min(KEPT, length)
    dense_bytes = 2 * HEADS * one_head
    contenders = [
        Work(
            name=MATCHED,
            calls=[partial(dense_decode, q, k, v) for k, v in zip(keys, values, strict=True)],
            bytes=dense_bytes,
        ),
        *(
            Work(
                name=sparse(heads),
                calls=[
                    partial(sparse_decode, q, k, v, n=n) for k, v in zip(fewer[heads], values, strict=True)
                ],
                bytes=heads * one_head + kept,
            )
            for heads in KEY_HEADS
        ),
        Work(
            name=TORCH,
            calls=[partial(torch_dense, q, k, v) for k, v in zip(keys, values, strict=True)],
            bytes=dense_bytes,
        ),
        Work(name=READ, calls=[partial(memory.read, k) for k in keys], bytes=HEADS * one_head),
    ]
    what = f"{length} positions"
    seconds = report.time(what, contenders, threads=threads, repeats=repeats)
    for heads in KEY_HEADS:
        found = ratio(seconds[MATCHED], seconds[sparse(heads)])
        told = f"{what}: matched dense over {sparse(heads)} (reading allows {cost_model(heads, length):.2f})"
        if heads < HEADS and length in AIM:
            report.target(told, found.value or 0.0, AIM[length], found.interval)
        else:
            report.note(f"{told}: {found.value:.2f}")
        torch_ratio = ratio(seconds[TORCH], seconds[sparse(heads)])
        report.note(f"{what}: torch's SDPA over {sparse(heads)}: {torch_ratio.value:.2f}")
        bandwidth = ratio(seconds[READ], seconds[sparse(heads)])
        share = (bandwidth.value or 0.0) * (heads * one_head + kept) / (HEADS * one_head)
        report.note(f"{what}: {sparse(heads)} reads at {share:.0%} of what memory delivers to a plain reader")


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    threads = report.begin(options, [], small="caches")
    check(report, min(CHECKED, max(options.lengths)), threads)
    blocks = sparse_decode_block.QUICK_LENGTHS if options.quick else sparse_decode_block.LENGTHS
    sparse_decode_block.check(report, min(sparse_decode_block.CHECKED, max(blocks)), threads)
    report.stop_if_wrong()
    for length in options.lengths:
        for number in threads:
            with threads_set(number), torch.inference_mode():
                one_length(report, length, number, options.repeats, 1 if options.quick else None)
    sparse_decode_block.measure(report, threads, options.repeats, quick=options.quick)


def lengths(text: str) -> list[int]:
    """From a command line, with commas between them.

    Raises:
        ValueError: no such list.
    """
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"{text!r} has to be numbers of positions such as 1024,8192")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    return command(
        __doc__, measure, arguments,
        what="lengths", parse=lengths, metavar="L,…", default=LENGTHS, quick=QUICK_LENGTHS,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
