"""Optimizers on SmolLM2-shaped matrices: time of a step and bytes of state, NuMuon beside Muon and AdamW.

    python benchmarks/optim.py [--threads 1] [--repeats 5] [--layers 1] [--json FILE] [--quick]

One decoder layer of SmolLM2-135M by default (seven matrices; the model has 30 alike), float32 weights. NuMuon is
timed with each back end at rank fractions .25, .5, .9 and 1, and over the paper's cosine schedule, as the mean of ten
steps spread evenly over a run. Ratios are to `Muon`, the same code at full rank, because `torch.optim.Muon` multiplies
in bfloat16, for which many CPUs have no fast products; it is timed too.

Gradients: Gaussian, columns scaled geometrically from 1 down to .05; once more down to 1e-4, where the Gram
matrix's eigenvectors can become too inexact and the SVD is taken. Nothing else in a step's time depends on values.

Exits 1, before anything is timed, where a direction is wrong. JSON rows are those of `common.py`, and of kind `state`:
bytes of state, and per weight.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from common import Report, Work, parser_of, ratio, run, table
from torch import Tensor, nn

from gnomon.core.memory import state_bytes
from gnomon.core.timing import threads_set
from gnomon.methods.optim.numuon import BACK_ENDS, Muon, NuMuon, RankSchedule, newton_schulz, top_k

LAYER = ((576, 576), (576, 576), (192, 576), (192, 576), (1536, 576), (1536, 576), (576, 1536))
"""Query, output, key, value, gate, up and down projection of SmolLM2-135M."""
QUICK_LAYER = ((24, 24), (8, 24), (64, 24), (24, 64))
FRACTIONS = (0.25, 0.5, 0.9, 1.0)
RUN = 1000
"""Steps of the schedule whose ten are timed."""
FLAT, STEEP = 0.05, 1e-4
SLOWEST = 1.3
"""Aim: NuMuon's step over Muon's, at r = .25 and r = 1."""


def gradient(shape: tuple[int, int], least: float) -> Tensor:
    """Gaussian, with columns scaled geometrically from 1 to `least`."""
    g = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return g * torch.logspace(0, torch.tensor(least).log10().item(), shape[1])


def parameters(shapes: Sequence[tuple[int, int]], least: float) -> list[nn.Parameter]:
    """Weights of their own for an optimizer, with gradients that stay."""
    found = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in found:
        p.grad = gradient((p.shape[0], p.shape[1]), least)
    return found


def check(report: Report, shapes: Sequence[tuple[int, int]]) -> None:
    """Directions against the SVD, and Newton-Schulz against torch's."""
    theirs, ours = (parameters([(24, 16)], FLAT) for _ in range(2))
    torch.optim.Muon(theirs, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    NuMuon(ours, lr=0.1, ns_dtype=torch.bfloat16).step()
    report.check("full rank in bfloat16 = torch.optim.Muon, bit for bit", torch.equal(ours[0], theirs[0]))
    generator = torch.Generator().manual_seed(0)
    for shape in sorted(set(shapes)):
        for least in (FLAT, STEEP):
            m = gradient(shape, least)
            exact = torch.linalg.svdvals(m.double())
            for method in BACK_ENDS:
                far, shares = 0.0, []
                for r in FRACTIONS[:-1]:
                    k = RankSchedule.fixed(r).rank(0, min(shape))
                    d = top_k(m, k, method=method, generator=generator).direction
                    sigma = torch.linalg.svdvals(d.double())
                    far = max(far, float((sigma - (torch.arange(len(sigma)) < k).double()).abs().max()))
                    shares.append(float((m.double() * d).sum() / exact[:k].sum()))
                within = far < 1e-5 and (min(shares) > 1 - 1e-5 or method in ("krylov", "lowrank"))
                told = ", ".join(f"{share:.6f}" for share in shares)
                report.check(
                    f"{shape[0]} x {shape[1]} down to {least:g}, {method}: k unit singular values to 1e-5",
                    within,
                    f"{far:.0e}; share of the best value at r = .25, .5, .9: {told}",
                )
    report.check("Newton-Schulz of zero is zero", not bool(newton_schulz(torch.zeros(3, 2)).any()))


def at_step(optimizer: NuMuon, t: int) -> None:
    """The step that comes after `t` others."""
    optimizer.param_groups[0]["step"] = t
    optimizer.step()


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    threads = report.begin(options, ["numpy"])
    layer = QUICK_LAYER if options.quick else LAYER
    check(report, layer)
    report.stop_if_wrong()
    for number in threads:
        with threads_set(number):
            steps(report, layer * options.layers, number, options.repeats)


def steps(report: Report, shapes: Sequence[tuple[int, int]], threads: int, repeats: int) -> None:
    """Times and bytes at one number of threads."""
    weights = sum(m * n for m, n in shapes)
    traffic = 5 * 4 * weights  # read the gradient, read and write momentum and weight
    lines: list[list[str]] = []

    def work(name: str, optimizer: torch.optim.Optimizer, calls: Sequence[Callable[[], object]] = ()) -> Work:
        optimizer.step()
        size = state_bytes(optimizer)
        report.rows.append(
            {"kind": "state", "contender": name, "bytes": size, "bytes_per_weight": size / weights}
        )
        lines.append([name, f"{size / 1e6:.4g}", f"{size / weights:.2f}"])
        return Work(name=name, calls=calls or [optimizer.step], bytes=traffic)

    def muon() -> Work:
        found = parameters(shapes, FLAT)
        return work("Muon", Muon(found, nesterov=False))

    simple = [muon(), work("AdamW", torch.optim.AdamW(parameters(shapes, FLAT)))]
    simple.append(work("torch.optim.Muon", torch.optim.Muon(parameters(shapes, FLAT), nesterov=False)))
    report.time("full rank, and AdamW", simple, threads=threads, repeats=min(repeats, 2))
    for least in (FLAT, STEEP):
        for r in FRACTIONS if least == FLAT else FRACTIONS[:-1]:
            contenders = [muon()]
            for method in BACK_ENDS if r < 1 else BACK_ENDS[:1]:
                optimizer = NuMuon(parameters(shapes, least), rank_fraction=r, topk=method)
                contenders.append(work(f"NuMuon {r:g}, {method}", optimizer))
            judge(
                report,
                f"r = {r:g}, columns down to {least:g}",
                contenders,
                threads,
                repeats,
                aim=r in (0.25, 1),
            )
    cosine = RankSchedule.cosine(1.0, 0.25, total_steps=RUN)
    contenders = [muon()]
    for method in BACK_ENDS:
        optimizer = NuMuon(parameters(shapes, FLAT), rank_fraction=cosine, topk=method)
        ten = [partial(at_step, optimizer, RUN // 20 + RUN // 10 * i) for i in range(10)]
        contenders.append(work(f"NuMuon cosine, {method}", optimizer, ten))
    judge(report, "cosine 1 to .25, mean over a run", contenders, threads, max(1, repeats // 2), aim=False)
    unique = list({line[0]: line for line in lines}.values())
    print(
        f"\nstate of {weights / 1e6:.4g} M weights\n{table(['', 'MB', 'bytes a weight'], unique)}\n",
        flush=True,
    )


def judge(
    report: Report, what: str, contenders: Sequence[Work], threads: int, repeats: int, *, aim: bool
) -> None:
    """Time a group whose first is Muon; where there is an aim, say how near the fastest comes."""
    seconds = report.time(what, contenders, threads=threads, repeats=repeats)
    ratios = {c.name: ratio(seconds["Muon"], seconds[c.name]) for c in contenders[1:]}
    if aim:
        name = max(ratios, key=lambda name: ratios[name].value or 0.0)
        best = ratios[name]
        report.target(
            f"{what}: Muon's time over that of {name}", best.value or 0.0, 1 / SLOWEST, best.interval
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = parser_of(__doc__, threads=[1], repeats=5)
    parser.add_argument("--layers", type=int, default=1, help="decoder layers, default: 1")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.layers) < 1:
        parser.error(f"--repeats {options.repeats} --layers {options.layers}: each at least 1")
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
