"""What the benchmarks of this folder share: checks that come first, tables, JSON lines, limits of the machine.

A benchmark checks its kernels (`Report.check`) and ends with exit status 1 where one is wrong, before anything is
timed. Then contenders take turns (`gnomon.core.timing`), every line is printed, whoever wins, and the same numbers
go to `Report.rows`, one dictionary each, whose `kind` is: machine, check, left out, time, roof, target, note.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import gnomon
from gnomon.core.files import write_atomic
from gnomon.core.stats import Estimate, median_ratio
from gnomon.core.timing import Contender, Spread, copies_for, interleaved, last_level_cache, spread
from gnomon.kernels import chosen, native
from gnomon.lab.provenance import processor

MEMORY_SHARE = 0.7
"""Of the available memory, for copies of operands."""


class Wrong(Exception):
    """A check failed: nothing after it is worth timing."""


@dataclass(frozen=True, kw_only=True)
class Work(Contender):
    """A contender, and the bytes that a call has to read and write."""

    bytes: int


@dataclass
class Report:
    """What was found so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def check(self, what: str, right: bool, note: str = "") -> None:
        """Record that something is as it should be, or not."""
        self.rows.append({"kind": "check", "what": what, "right": bool(right), "note": note})
        print(f"  {'right' if right else 'WRONG'}  {what}{f'  ({note})' if note else ''}", flush=True)

    def leave_out(self, what: str, reason: str) -> None:
        """Record what can't be done here."""
        self.rows.append({"kind": "left out", "what": what, "reason": reason})
        print(f"  left out: {what}: {reason}", flush=True)

    def note(self, text: str) -> None:
        """A sentence about the numbers above or below it."""
        self.rows.append({"kind": "note", "text": text})
        print(f"  {text}", flush=True)

    def target(
        self, what: str, value: float, target: float, interval: tuple[float, float] | None = None
    ) -> None:
        """A ratio beside the one that was aimed at. Never an error: machines differ and are shared."""
        met = "met" if value >= target else "not met"
        self.rows.append(
            {
                "kind": "target",
                "what": what,
                "value": value,
                "interval": interval,
                "target": target,
                "met": met,
            }
        )
        between = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
        print(f"  {what}: {value:.2f}{between}, aimed at {target:g}: {met}", flush=True)

    def heading(self, threads: Sequence[int], packages: Sequence[str]) -> None:
        """Machine, versions and what the chooser takes."""
        found = versions(["torch", *packages])
        choices, caches = chosen(), (second_level_cache(), last_level_cache())
        self.rows.append(
            {"kind": "machine", "processor": processor(), "cores": cores(), "load": load()}
            | {"level_2_cache": caches[0], "last_level_cache": caches[1], "threads": list(threads)}
            | {"python": platform.python_version(), "gnomon": gnomon.__version__}
            | {"versions": found, "kernels": choices}
        )
        print(
            f"{processor()}, {counted(cores(), 'core')}, caches {caches[0] >> 10} KiB and {caches[1] >> 20} MiB, "
            f"load {load():.2f}"
        )
        print(
            ", ".join(
                [f"gnomon {gnomon.__version__}", *(f"{name} {version}" for name, version in found.items())]
            )
        )
        for name, choice in choices.items():
            print(f"kernel {name}: {choice}")
        if load() > 0.3 * cores():
            self.note("the machine is busy with other things: times scatter, ratios less so")

    def begin(self, options: argparse.Namespace, packages: Sequence[str], small: str = "shapes") -> list[int]:
        """The heading, and which of the numbers of threads that were asked for this process may use.

        Args:
            small: what `--quick` makes small.
        """
        threads = [number for number in options.threads if number <= cores()]
        for number in sorted({*options.threads} - {*threads}):
            self.leave_out(f"{number} threads", f"this process may use {cores()} cores")
        self.heading(threads, packages)
        if options.quick:
            self.note(
                f"--quick: {small} so small that calls are timed, not work; the numbers below mean nothing"
            )
        return threads

    @property
    def wrong(self) -> list[str]:
        """Names of the checks that failed."""
        return [row["what"] for row in self.rows if row["kind"] == "check" and not row["right"]]

    def stop_if_wrong(self) -> None:
        """End the checking.

        Raises:
            Wrong: naming the checks that failed.
        """
        if self.wrong:
            raise Wrong(f"{len(self.wrong)} checks failed: {'; '.join(self.wrong)}")

    def lines(self) -> str:
        """All rows as JSON lines."""
        return "".join(f"{json.dumps(row)}\n" for row in self.rows)

    def write(self, path: Path | None) -> None:
        """The JSON lines into a file, if one was asked for."""
        if path is not None:
            write_atomic(path, self.lines())

    def time(
        self, what: str, contenders: Sequence[Work], *, threads: int, repeats: int, warm_up: int = 1
    ) -> dict[str, list[float]]:
        """Time contenders in turns and print a line for each; ratios are over the first one.

        Args:
            threads: how many are set, for the record.

        Returns:
            seconds of a call, by name and repeat.
        """
        seconds = interleaved(contenders, repeats=repeats, warm_up=warm_up)
        first = contenders[0].name
        lines = []
        for work in contenders:
            of, times = spread(seconds[work.name]), seconds[work.name]
            slower = ratio(times, seconds[first])
            self.rows.append(
                {
                    "kind": "time",
                    "what": what,
                    "contender": work.name,
                    "threads": threads,
                    "copies": len(work.calls),
                }
                | {"seconds": of.median, "seconds_20": of.low, "seconds_80": of.high, "repeats": repeats}
                | {"bytes": work.bytes, "gb_per_s": work.bytes / of.median / 1e9}
                | {"ratio_to_first": slower.value, "ratio_interval": slower.interval}
            )
            lines.append(
                [work.name, *cells(of), f"{work.bytes / 1e6:.4g}", f"{work.bytes / of.median / 1e9:.1f}"]
            )
            lines[-1].append("" if work.name == first else told(slower))
        head = ["", "ms", "20 % … 80 %", "MB", "GB/s", f"time / {first}"]
        print(f"\n{what}, {counted(threads, 'thread')}, {counted(repeats, 'repeat')} in turns")
        print(table(head, lines), flush=True)
        return seconds


def ratio(slower: Sequence[float], faster: Sequence[float]) -> Estimate:
    """Median of the ratios of two contenders' times, repeat by repeat, with its interval."""
    return median_ratio(slower, faster, rng=np.random.default_rng(0))


def told(estimate: Estimate) -> str:
    """A ratio with its interval, if it has one."""
    between = f" [{estimate.interval[0]:.2f}, {estimate.interval[1]:.2f}]" if estimate.interval else ""
    return f"{estimate.value:.2f}{between}"


def counted(number: int, thing: str) -> str:
    """1 thread, 2 threads."""
    return f"{number} {thing}{'s' * (number != 1)}"


def cells(of: Spread) -> list[str]:
    """Median and quantiles in milliseconds."""
    median, low, high = (
        f"{1e3 * t:.0f}" if t > 1 else f"{1e3 * t:.3g}" for t in (of.median, of.low, of.high)
    )
    return [median, f"{low} … {high}"]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[k]) for row in [head, *lines]) for k in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(
            c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *lines]
    )


# ------------------------------------------------------------------------------------- the command line


def parser_of(doc: str | None, *, threads: list[int], repeats: int) -> argparse.ArgumentParser:
    """What every benchmark takes; it adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join(map(str, threads))
    parser.add_argument(
        "--threads", type=threads_of, default=threads, metavar="N,N", help=f"default: {default}"
    )
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"default: {repeats}; 15 are the fewest with an interval"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON lines here")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: does it run? Its times mean nothing"
    )
    return parser


def run(measure: Callable[[Report, argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Measure and write what was found: the exit status, 1 where a check failed."""
    report = Report()
    try:
        measure(report, options)
    except Wrong as error:
        print(f"\nNothing more was timed: {error}", file=sys.stderr)
        return 1
    finally:
        report.write(options.json)
    return 0


def command(
    doc: str | None,
    measure: Callable[[Report, argparse.Namespace], None],
    arguments: Sequence[str] | None,
    *,
    what: str,
    parse: Callable[[str], list[Any]],
    metavar: str,
    default: str,
    quick: str,
) -> int:
    """A benchmark of compiled kernels over several shapes: its command line, and the exit status.

    Args:
        what: the option that names them, such as "shapes"; `parse` reads it, and `default` and `quick` are its values.
    """
    parser = parser_of(doc, threads=[1, 2], repeats=15)
    parser.add_argument(f"--{what}", type=parse, metavar=metavar, help=f"default: {default}")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    setattr(options, what, getattr(options, what) or parse(quick if options.quick else default))
    if native.problem():
        print(f"Nothing was timed: {native.problem()}")
        return 0
    return run(measure, options)


# ------------------------------------------------------------------------------------------- the machine


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated: what the system has left, or the control group's limit if that is nearer."""
    limits = [1 << 62]
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        limits.append(int(sizes["MemAvailable"].split()[0]) * 1024)
    group = root / "sys/fs/cgroup"
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()).isdigit():
        pairs = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(pairs["inactive_file"])  # those pages can go
        limits.append(int(most) - used)
    return max(0, min(limits))


def second_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of a core's own level-2 cache; half a mebibyte where the system doesn't say."""
    for path in folder.glob("index*"):
        if (path / "level").read_text().strip() == "2":
            return int((path / "size").read_text().strip().removesuffix("K")) << 10
    return 1 << 19


@dataclass(frozen=True)
class Copies:
    """How many copies of the operands are cycled through."""

    count: int
    wanted: int
    """As many as make four times the last-level cache in the smallest format."""

    @classmethod
    def of(cls, smallest: int, together: int) -> Copies:
        """As many as wanted, or as fit into memory.

        Args:
            smallest: bytes of a copy in the smallest format under test.
            together: bytes of a copy in all formats.
        """
        wanted = copies_for(smallest)
        return cls(max(1, min(wanted, int(MEMORY_SHARE * available_memory() / together))), wanted)

    def told(self) -> str:
        """The number; and where memory limits it, what that does to the numbers."""
        if self.count == self.wanted:
            return f"{self.count} {'copy' if self.count == 1 else 'copies'} in turn, four times the last-level cache"
        return (
            f"only {self.count} of the {self.wanted} copies that make four times the last-level cache fit into "
            "memory: what follows is partly read from the cache"
        )


def threads_of(text: str) -> list[int]:
    """Numbers of threads as a command line gives them: 1,2.

    Raises:
        ValueError: something else than positive numbers.
    """
    numbers = [int(part) for part in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{text!r} has to be numbers of threads such as 1,2")
    return numbers


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Processes that wanted a core, a mean over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def versions(packages: Sequence[str]) -> Mapping[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
