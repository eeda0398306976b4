"""NF12 on this CPU: products with one and more rows, bulk decoding, encoding, and generation with a real model.

    python benchmarks/nf12.py [--threads 1,2] [--repeats 15] [--shapes 16384x8192,49152x576:0.01]
                              [--json FILE] [--quick]

Exits 1, before anything is timed, where a kernel is wrong, and 0 with one sentence where there is no compiled
library. Ratios change nothing about the exit status: losses are printed like wins.

Timing: contenders take turns; each reads as many separate copies of its operands as make four times the last-level
cache, the smallest format deciding the number. What the rows of the JSON lines are: `common.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from common import Report, command
from nf12_bulk import bulk
from nf12_matrices import Operands, Shape, check
from nf12_products import products

from gnomon.core.timing import threads_set

SHAPES = "16384x8192,49152x576:0.01"
"""The card's matrix, and SmolLM2's vocabulary with the share of exact zeros that its embedding has."""
QUICK_SHAPES = "64x512,512x72:0.01"
BATCHES = (1, 4, 16)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    threads = report.begin(options, ["transformers", "zipnn", "zstandard"])
    for position, shape in enumerate(options.shapes):
        print()
        of = Operands.of(shape, report, copies=1 if options.quick else None)
        check(report, of, threads)
        report.stop_if_wrong()
        for number in threads:
            with threads_set(number), torch.inference_mode():
                products(report, of, number, BATCHES, options.repeats)
                if position == 0:
                    print()
                    bulk(report, of, number, options.repeats)
        del of
    print()
    if options.quick:
        report.leave_out("generation", "--quick")
    else:
        from nf12_generation import generation  # it loads Transformers

        generation(report, threads)


def shapes(text: str) -> list[Shape]:
    """From a command line, with commas between them."""
    return [Shape.of(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    return command(
        __doc__, measure, arguments,
        what="shapes", parse=shapes, metavar="NxK:ZEROS,…", default=SHAPES, quick=QUICK_SHAPES,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
