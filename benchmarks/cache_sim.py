"""The cache simulator: turns per second by policy, beside plain Python and libCacheSim.

    python benchmarks/cache_sim.py [--turns 1000000] [--repeats 15] [--json FILE] [--quick]

One core, random conversations by the method card, 4000 tokens of cache. The compiled simulator has to decide as the
policies' plain Python does before anything is timed; the ratio to plain Python is taken on a shorter trace, since that
one is slow. libCacheSim's Python package (`pip install libcachesim`) knows objects of fixed sizes only: it is compared
on paging, one-block conversations that never grow, where its miss ratio must be equal; its time includes reading its
trace from a file that the system has in memory. Exits 1 where a decision differs.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, Work, parser_of, ratio, run

from gnomon.core.timing import threads_set
from gnomon.methods.serve.tail_lru import (
    LRU,
    Belady,
    ExpectedTailOptimizedLRU,
    Policy,
    TailOptimizedBelady,
    TailOptimizedLRU,
    ThresholdLRU,
    Trace,
    simulate,
    synthetic,
)

CAPACITY, XI, QHAT = 4000, 1500, 200
AIMS = {"lru": 1_000_000, "t-lru": 300_000}
"""Turns per second."""
TURN = 5 * 8 + 8
"""Bytes of a turn's columns and its answer."""
SHORT = 3000
"""Turns that plain Python is compared on."""


def policies(trace: Trace) -> list[Policy]:
    """Those that are timed, made for a trace."""
    lengths = trace.prompt[:200].tolist()
    return [
        LRU(), TailOptimizedLRU(XI, QHAT), ThresholdLRU(), ExpectedTailOptimizedLRU(XI, lengths, 0.8), Belady(trace),
        TailOptimizedBelady(trace, threshold=XI),
    ]  # fmt: skip


def paging(requests: int) -> Trace:
    """Conversations of one block that never grow: their first prompt is the block, later ones are empty."""
    ids = np.random.default_rng(0).zipf(1.2, requests) % 100_000
    _, first, code = np.unique(ids, return_index=True, return_inverse=True)
    code = np.argsort(np.argsort(first))[code]
    prompt = np.zeros(requests, dtype=np.int64)
    prompt[first] = 1
    names = tuple(range(len(first)))
    return Trace(np.arange(requests, dtype=np.float64), code, prompt, np.zeros_like(prompt), names)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    (threads,) = report.begin(options, ["numpy", "libcachesim"], small="traces")
    turns, short = (2000, 300) if options.quick else (options.turns, SHORT)
    few, many = (
        synthetic(short, generator=np.random.default_rng(0)),
        synthetic(turns, generator=np.random.default_rng(1)),
    )
    for policy in policies(few):
        slow, fast = (simulate(few, policy, CAPACITY, impl=impl).cached for impl in ("reference", "compiled"))
        report.check(f"{policy.name} decides as plain Python, {short:,} turns", bool((slow == fast).all()))
    page = paging(turns)
    peer = libcachesim(report, page)
    report.stop_if_wrong()

    def work(name: str, call: Callable[[], object], count: int) -> Work:
        return Work(name=name, calls=[call], bytes=TURN * count)

    timed = {"threads": threads, "repeats": options.repeats}
    with threads_set(threads):
        for policy in policies(few):
            contenders = [
                work(
                    f"{policy.name}, {impl}",
                    lambda p=policy, i=impl: simulate(few, p, CAPACITY, impl=i),
                    short,
                )
                for impl in ("compiled", "reference")
            ]
            seconds = report.time(
                f"{policy.name}, {short:,} turns", contenders, threads=threads, repeats=options.repeats
            )
            found = ratio(seconds[f"{policy.name}, reference"], seconds[f"{policy.name}, compiled"])
            report.note(f"{policy.name}: compiled is {found.value:.0f} times as fast as plain Python")
        contenders = [
            work(p.name, lambda p=p: simulate(many, p, CAPACITY, impl="compiled"), turns)
            for p in policies(many)
        ]
        seconds = report.time(f"{turns:,} turns", contenders, threads=threads, repeats=options.repeats)
        for name, aim in AIMS.items():
            report.target(
                f"{name}: million turns per second", turns / float(np.median(seconds[name])) / 1e6, aim / 1e6
            )
        if peer is not None:
            contenders = [
                work("paging, lru", lambda: simulate(page, LRU(), CAPACITY, impl="compiled"), turns)
            ]
            contenders.append(work("paging, libCacheSim", peer, turns))
            report.time(f"paging, {turns:,} requests", contenders, **timed)


def libcachesim(report: Report, trace: Trace) -> Callable[[], object] | None:
    """A call that runs the peer on paging, if it is installed and misses as often."""
    try:
        import libcachesim as peer
    except ImportError as error:
        report.leave_out("libCacheSim", f"{error}; pip install libcachesim")
        return None
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "trace.oracleGeneral.bin"
    rows = enumerate(trace.conversation.tolist())
    path.write_bytes(b"".join(struct.pack("<IQIq", at, code + 1, 1, -2) for at, code in rows))

    def call(folder: Any = folder) -> float:  # holds the folder
        reader = peer.TraceReader(str(path), peer.TraceType.ORACLE_GENERAL_TRACE)
        return float(peer.LRU(cache_size=CAPACITY).process_trace(reader)[0])

    misses = float((simulate(trace, LRU(), CAPACITY, impl="compiled").cached == 0).mean())
    report.check("paging misses as often as libCacheSim's LRU", abs(misses - call()) < 1e-9, f"{misses:.4f}")
    return call


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = parser_of(__doc__, threads=[1], repeats=15)
    parser.add_argument("--turns", type=int, default=1_000_000, help="default: 1000000")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.turns < 100 or options.threads != [1]:
        parser.error(
            f"--repeats {options.repeats} --turns {options.turns}: at least 1 and 100, and one thread"
        )
    from gnomon.kernels import native

    if native.problem():
        print(f"Nothing was timed: {native.problem()}")
        return 0
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
