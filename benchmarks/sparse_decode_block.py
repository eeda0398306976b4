"""The part of benchmarks/sparse_decode.py about blocks of a diffusion model: MAGE's sets beside exact attention.

A block of 32 queries is denoised in 32 passes of attention behind a long cache. Exact decoding reads the cache in
each; MAGE reads it in the first, weighs its keys in a second look at them, sorts the weights, and reads 512 keys and
values of each head in the 31 others. One exact pass is timed and counted 32 times, for all are alike; MAGE's block is
timed whole. Commits are left out on both sides, as in the cost model. Arithmetic, not memory, limits a block on a CPU:
128 query rows share each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from common import Copies, Report, Work, ratio
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.timing import threads_set
from gnomon.kernels import memory
from gnomon.kernels.sparse_decode import block_decode, block_reference, exact_with_importance
from gnomon.kernels.sparse_decode.block_reference import top_sets
from gnomon.methods.layers.mage import attention_speedup

QUERY_HEADS, HEADS, WIDTH, BLOCK, PASSES, KEPT = 32, 8, 128, 32, 32, 512
SCALE = WIDTH**-0.5
LENGTHS, QUICK_LENGTHS = (8192, 131_072), (64, 200)
CHECKED = 3000
AIM = {131_072: 6.0}
"""Times as fast as exact decoding of the matched kernel that a block aims at, by length."""
MAGE, FIRST, SPARSE = f"MAGE, block of {PASSES} passes", "MAGE, first pass with sets", "MAGE, a later pass"
EXACT, TORCH, READ = "exact pass, matched kernel", "exact pass, torch SDPA", "reading"


@dataclass(frozen=True)
class Operands:
    """A block's queries, and a cache that ends in the block's own keys and values."""

    q: Tensor
    keys: Tensor
    values: Tensor

    def split(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, prefix and own part."""
        n = self.keys.shape[2] - BLOCK
        return self.q, self.keys[:, :, :n], self.values[:, :, :n], self.keys[:, :, n:], self.values[:, :, n:]


def drawn(length: int, seed: int) -> Operands:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, QUERY_HEADS, BLOCK, WIDTH, generator=g).bfloat16()
    keys, values = (torch.randn(1, HEADS, length + BLOCK, WIDTH, generator=g).bfloat16() for _ in range(2))
    return Operands(q, keys, values)


def exact(of: Operands) -> Tensor:
    """One pass over everything."""
    return block_decode(*of.split(), None, scaling=SCALE)


def torch_exact(of: Operands) -> Tensor:
    """What a Transformers model runs."""
    return F.scaled_dot_product_attention(of.q, of.keys, of.values, enable_gqa=True)


def first(of: Operands) -> Tensor:
    """The sets, out of an exact pass."""
    _, weights = exact_with_importance(*of.split(), scaling=SCALE)
    return top_sets(weights, KEPT)


def later(of: Operands, idx: Tensor, passes: int) -> None:
    """Passes that read the sets."""
    for _ in range(passes):
        block_decode(*of.split(), idx, scaling=SCALE)


def block(of: Operands) -> None:
    """All passes of MAGE."""
    later(of, first(of), PASSES - 1)


def check(report: Report, length: int, threads: Sequence[int]) -> None:
    """Against float64 and torch; equal bits with any number of threads."""
    of = drawn(length, 1)
    wide = tuple(t.double() for t in of.split())
    idx = first(of)
    for name, sets in (("exact pass", None), ("pass over sets", idx)):
        found = []
        for number in threads:
            with threads_set(number):
                found.append(block_decode(*of.split(), sets, scaling=SCALE))
        ideal = block_reference.block_decode(*wide, sets, scaling=SCALE)
        error = float((found[0].double() - ideal).norm() / ideal.norm())
        report.check(f"block, {name}, {length} positions: error under 1e-2", error < 1e-2, f"{error:.1e}")
        alike = all(torch.equal(one, found[0]) for one in found)
        report.check(f"block, {name}: equal bits with {list(threads)} threads", alike)
    _, weights = exact_with_importance(*of.split(), scaling=SCALE)
    ideal = block_reference.importance(wide[0], wide[1], wide[3], scaling=SCALE)
    error = float((weights.double() - ideal).norm() / ideal.norm())
    report.check(
        f"block, weights of keys, {length} positions: error under 1e-2", error < 1e-2, f"{error:.1e}"
    )
    best = top_sets(ideal, KEPT)
    shared = torch.isin(idx[0, 0], best[0, 0]).float().mean()
    report.note(f"block: {float(shared):.1%} of a set is that of float64; ties by rounding make the rest")


def one_length(report: Report, length: int, threads: int, repeats: int, copies: int | None) -> None:
    """All contenders behind a cache of one length."""
    size = 2 * HEADS * (length + BLOCK) * WIDTH * 2
    if copies is None:
        decided = Copies.of(size, size)
        report.note(f"block behind {length} positions: {decided.told()}")
        copies = decided.count
    given = [drawn(length, 3 * i) for i in range(copies)]
    sets = [first(one) for one in given]
    some = 2 * HEADS * (min(KEPT, length) + BLOCK) * WIDTH * 2
    contenders = [
        Work(name=EXACT, calls=[partial(exact, one) for one in given], bytes=size),
        Work(name=FIRST, calls=[partial(first, one) for one in given], bytes=3 * size // 2),
        Work(
            name=SPARSE,
            calls=[partial(later, one, idx, 1) for one, idx in zip(given, sets, strict=True)],
            bytes=some,
        ),
        Work(
            name=MAGE,
            calls=[partial(block, one) for one in given],
            bytes=3 * size // 2 + (PASSES - 1) * some,
        ),
        Work(name=TORCH, calls=[partial(torch_exact, one) for one in given], bytes=size),
        Work(name=READ, calls=[partial(memory.read, one.keys) for one in given], bytes=size // 2),
    ]
    what = f"block behind {length} positions"
    seconds = report.time(what, contenders, threads=threads, repeats=repeats)
    whole = {name: [PASSES * s for s in seconds[name]] for name in (EXACT, TORCH)}
    found = ratio(whole[EXACT], seconds[MAGE])
    told = (
        f"{what}: matched exact over MAGE (cost model {attention_speedup(length, BLOCK, PASSES, KEPT):.2f})"
    )
    if length in AIM:
        report.target(told, found.value or 0.0, AIM[length], found.interval)
    else:
        report.note(f"{told}: {found.value:.2f}")
    report.note(f"{what}: torch's SDPA over MAGE: {ratio(whole[TORCH], seconds[MAGE]).value:.2f}")
    falls = ratio(seconds[FIRST], seconds[EXACT]).value or 0.0
    report.note(
        f"{what}: the first pass takes {falls:.2f} exact ones, since weights need a second look at the keys and sets "
        "a sort; the model counts it as one"
    )
    bound = ratio(seconds[EXACT], seconds[READ]).value or 0.0
    report.note(
        f"{what}: an exact pass takes {bound / 2:.1f} times as long as reading its bytes: arithmetic limits it"
    )


def measure(report: Report, threads: Sequence[int], repeats: int, *, quick: bool) -> None:
    """Everything about blocks, after their checks."""
    for length in QUICK_LENGTHS if quick else LENGTHS:
        for number in threads:
            with threads_set(number), torch.inference_mode():
                one_length(report, length, number, repeats, 1 if quick else None)
