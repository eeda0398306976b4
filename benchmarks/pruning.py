"""Pruning's hot paths: ranks by sorting, Wanda's masks, SparseGPT's sweep, and both pruners on a whole model.

    python benchmarks/pruning.py [--threads 1] [--repeats 5] [--model smollm2-135m] [--samples 4] [--length 128]
                                 [--json FILE] [--quick]

Ranks: Lua's scores of a row are #{k : S_ik <= S_ij}; by sorting that is O(n log n) a row, by comparing all pairs O(n²).
Matrices are those of SmolLM2-135M. The published forms of Wanda's mask (a full sort, then a scatter) and of SparseGPT's
sweep (row by row of memory, eight operations a column) stand beside ours. Beside llm-compressor: `pruning_peers.py`.

Exits 1, before anything is timed, where a result is wrong. JSON rows are those of `common.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from common import Report, Work, cores, parser_of, ratio, run
from torch import Tensor

from gnomon.core.timing import threads_set
from gnomon.methods.compress.obs import inverse_factor
from gnomon.methods.compress.pruning import prune, sparsegpt, uniform_ranks, wanda_mask, wanda_scores

try:  # the same ranks as shares, where Lua is there
    from gnomon.methods.compress.lua import uniform_scores
except ImportError:

    def uniform_scores(scores: Tensor) -> Tensor:
        """Ranks as shares of the row's width."""
        return uniform_ranks(scores) / scores.shape[1]


SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536))
QUICK_SHAPES = ((24, 40), (8, 132))
WIDTH, RANKED = 1536, 64
"""Inputs, and rows that are ranked: all pairs of one row are 2.4 million comparisons."""
QUADRATIC = 50.0
"""Aim: time of all pairs over that of sorting."""
BLOCK = 128


def problem(out: int, inputs: int) -> tuple[Tensor, Tensor]:
    """(W, H) with correlated inputs."""
    g = torch.Generator().manual_seed(out + inputs)
    x = torch.randn(2 * inputs, inputs, generator=g) @ (
        torch.eye(inputs) + 0.1 * torch.randn(inputs, inputs, generator=g)
    )
    return torch.randn(out, inputs, generator=g), x.T @ x


def pairwise(scores: Tensor) -> Tensor:
    """Ranks by comparing every pair of a row, a row at a time: all at once would take gigabytes."""
    return torch.stack([(row[None, :] <= row[:, None]).sum(1) for row in scores])


def published_wanda(w: Tensor, norms: Tensor, p: float) -> Tensor:
    """A stable sort of all scores, and a scatter."""
    order = (w.abs() * norms).sort(dim=-1, stable=True)[1]
    mask = torch.ones_like(w, dtype=torch.bool)
    return mask.scatter_(1, order[:, : int(p * w.shape[1])], False)


def published_sweep(w: Tensor, upper: Tensor, p: float) -> Tensor:
    """SparseGPT in the order of its text, weights as they lie in memory."""
    w = w.clone()
    for first in range(0, w.shape[1], BLOCK):
        last = min(first + BLOCK, w.shape[1])
        part, corner = w[:, first:last].clone(), upper[first:last, first:last]
        q, errors = torch.zeros_like(part), torch.zeros_like(part)
        saliency = part**2 / corner.diagonal()[None] ** 2
        threshold = saliency.flatten().sort()[0][int(saliency.numel() * p) - 1]
        gone = saliency <= threshold
        for j in range(last - first):
            column = part[:, j].clone()
            column[gone[:, j]] = 0
            q[:, j] = column
            error = (part[:, j] - column) / corner[j, j]
            part[:, j:] -= error[:, None] @ corner[j, j:][None]
            errors[:, j] = error
        w[:, first:last] = q
        w[:, last:] -= errors @ upper[first:last, last:]
    return w


def check(report: Report, shapes: Sequence[tuple[int, int]]) -> None:
    """Ours against the plain forms."""
    for out, inputs in shapes:
        w, h = problem(out, inputs)
        norms = h.diagonal().sqrt()
        scores = wanda_scores(w, norms)
        some = scores[:16].clone()
        some[0, : inputs // 2] = 1.0  # ties
        report.check(
            f"{out} x {inputs}: ranks by sorting = by pairs",
            torch.equal(uniform_scores(some), pairwise(some) / inputs),
        )
        right = torch.equal(wanda_mask(w, norms, 0.5, exact=False), published_wanda(w, norms, 0.5))
        report.check(f"{out} x {inputs}: Wanda's mask = sort and scatter", right)
        factor = inverse_factor(h)
        ours = sparsegpt(w, factor, 0.5, exact=False).weight
        theirs = published_sweep(w.double(), factor.upper, 0.5)
        same = float(((ours == 0) == (theirs == 0)).float().mean())
        far = float((ours - theirs).norm() / theirs.norm())
        # In float32 a saliency beside the threshold can fall on its other side, and the sweep goes on from there.
        report.check(
            f"{out} x {inputs}: SparseGPT = float64 form", same > 0.999, f"{same:.5f}, off by {far:.0e}"
        )


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    threads = [number for number in options.threads if number <= cores()]
    report.heading(threads, ["numpy", "transformers"])
    if options.quick:
        report.note("--quick: shapes so small that calls are timed, not work; the numbers below mean nothing")
    shapes = QUICK_SHAPES if options.quick else SHAPES
    check(report, shapes)
    report.stop_if_wrong()
    for number in threads:
        with threads_set(number):
            ranks(report, 64 if options.quick else WIDTH, number, options.repeats)
            for shape in shapes:
                matrices(report, shape, number, options.repeats)
            if options.model and not options.quick:
                whole(report, options, number)


def ranks(report: Report, width: int, threads: int, repeats: int) -> None:
    """Sorting beside all pairs."""
    scores = torch.rand(RANKED, width, generator=torch.Generator().manual_seed(0))
    size = 4 * scores.numel() + 8 * scores.numel()
    what = f"ranks of {RANKED} rows of {width}"
    seconds = report.time(
        what,
        [
            Work(name="sorting", calls=[partial(uniform_scores, scores)], bytes=size),
            Work(name="all pairs", calls=[partial(pairwise, scores)], bytes=size),
        ],
        threads=threads,
        repeats=repeats,
    )
    slower = ratio(seconds["all pairs"], seconds["sorting"])
    report.target(f"{what}: time of all pairs over sorting", slower.value or 0.0, QUADRATIC, slower.interval)


def matrices(report: Report, shape: tuple[int, int], threads: int, repeats: int) -> None:
    """One matrix: Wanda's mask and SparseGPT's sweep, the factor apart."""
    w, h = problem(*shape)
    norms, size = h.diagonal().sqrt(), 5 * w.numel()
    report.time(
        f"Wanda's mask, {shape[0]} x {shape[1]}",
        [
            Work(name="exact", calls=[partial(wanda_mask, w, norms, 0.55)], bytes=size),
            Work(name="floors", calls=[partial(wanda_mask, w, norms, 0.55, exact=False)], bytes=size),
            Work(name="sort and scatter", calls=[partial(published_wanda, w, norms, 0.55)], bytes=size),
        ],
        threads=threads,
        repeats=repeats,
    )
    factor = inverse_factor(h)
    upper = factor.upper.float()
    seconds = report.time(
        f"SparseGPT's sweep, {shape[0]} x {shape[1]}",
        [
            Work(name="transposed", calls=[partial(sparsegpt, w, factor, 0.5)], bytes=8 * w.numel()),
            Work(name="as published", calls=[partial(published_sweep, w, upper, 0.5)], bytes=8 * w.numel()),
            Work(name="its factor of H", calls=[partial(inverse_factor, h)], bytes=16 * h.numel()),
        ],
        threads=threads,
        repeats=min(repeats, 5),
    )
    faster = ratio(seconds["as published"], seconds["transposed"])
    report.target(
        f"{shape[0]} x {shape[1]}: published sweep over ours", faster.value or 0.0, 1.0, faster.interval
    )


def whole(report: Report, options: argparse.Namespace, threads: int) -> None:
    """Both pruners on a model, from first to last, layer by layer and in one pass."""
    from gnomon.core.models import load

    model = load(options.model, dtype="float32", device="cpu").model
    ids = torch.randint(
        0,
        model.config.vocab_size,
        (options.samples, options.length),
        generator=torch.Generator().manual_seed(0),
    )
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def once(method: str, sequential: bool) -> None:
        model.load_state_dict(kept)
        prune(model, method, 0.5, calib=[ids], sequential=sequential)

    work = [
        Work(
            name=f"{method}, {'layer by layer' if sequential else 'one pass'}",
            calls=[partial(once, method, sequential)],
            bytes=2 * sum(tensor.nbytes for tensor in kept.values()),
        )
        for method in ("magnitude", "wanda", "sparsegpt")
        for sequential in ((True, False) if method != "magnitude" else (False,))
    ]
    what = f"{options.model}, {options.samples} x {options.length} tokens"
    report.time(what, work, threads=threads, repeats=min(options.repeats, 3), warm_up=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = parser_of(__doc__, threads=[1], repeats=5)
    parser.add_argument("--model", default="smollm2-135m", help="'' leaves whole models out")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    return run(measure, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
