"""Wanda and SparseGPT beside llm-compressor's: the same model, ids and threads, a process each, in turns.

    python benchmarks/pruning_peers.py --peer PYTHON [--model smollm2-135m] [--samples 8] [--length 256] [--repeats 3]
                                       [--sparsity 0.5] [--threads 2] [--json FILE]

PYTHON is the interpreter of an environment that has llm-compressor (`make bench-peers` makes one in `.venv-peers`),
since it wants another Transformers than Gnomon. Seconds are those of the pruning call alone. First the two are
compared: the same number of weights, sparsities within a percent, and held-out losses, which are printed, because a
faster pruner that prunes worse is no faster. llm-compressor accumulates H in float32.

Exits 1 where the two haven't done the same work, and 0 with one sentence where the peer can't be run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Report, parser_of, ratio, run, table, told

from gnomon.core.data import Batches, corpus, token_stream
from gnomon.core.models import model_folder

METHODS = ("wanda", "sparsegpt")
FOLDER = Path(__file__).parent / "peers"
SEED = 0


def measure(report: Report, options: Any) -> None:
    """Everything in turn.

    Raises:
        Wrong: the two did different work.
    """
    report.heading(options.threads[:1], ["transformers"])
    if not options.peer:
        report.leave_out(
            "llm-compressor", "no --peer was given; make bench-peers makes an environment for it"
        )
        return
    with model_folder(options.model) as (name, folder), tempfile.TemporaryDirectory() as temporary:
        ids = Path(temporary) / "ids.json"
        ids.write_text(json.dumps(_ids(folder, options)))
        for method in options.methods.split(","):
            arguments = [str(folder), str(ids), method, str(options.sparsity), str(options.threads[0])]
            commands = {
                "gnomon": [sys.executable, str(FOLDER / "pruning_gnomon.py"), *arguments],
                "llm-compressor": [options.peer, str(FOLDER / "pruning_llmcompressor.py"), *arguments],
            }
            found: dict[str, list[dict[str, Any]]] = {who: [] for who in commands}
            for repeat in range(options.repeats):
                for who in list(commands) if repeat % 2 == 0 else list(commands)[::-1]:
                    one = _run(commands[who], temporary)
                    if isinstance(one, str):
                        report.leave_out(f"{who}, {method}", one)
                        return
                    found[who].append(one)
                    print(f"  {method}, {who}: {one['seconds']:.1f} s", flush=True)
            _judge(report, f"{method} on {name}", found, options)


def _judge(report: Report, what: str, found: dict[str, list[dict[str, Any]]], options: Any) -> None:
    ours, theirs = found["gnomon"], found["llm-compressor"]
    report.check(
        f"{what}: the same weights", ours[0]["weights"] == theirs[0]["weights"], str(ours[0]["weights"])
    )
    shares = [one[0]["zeros"] / one[0]["weights"] for one in (ours, theirs)]
    report.check(
        f"{what}: the same sparsity", abs(shares[0] - shares[1]) < 0.01, f"{shares[0]:.5f}, {shares[1]:.5f}"
    )
    report.stop_if_wrong()
    lines = []
    for who, runs in found.items():
        seconds = sorted(one["seconds"] for one in runs)
        slower = ratio([one["seconds"] for one in runs], [one["seconds"] for one in ours])
        report.rows.append(
            {"kind": "time", "what": what, "contender": who, "threads": options.threads[0]}
            | {"seconds": seconds[len(seconds) // 2], "all_seconds": [one["seconds"] for one in runs]}
            | {"loss": runs[0]["loss"], "sparsity": runs[0]["zeros"] / runs[0]["weights"]}
            | {"versions": runs[0]["versions"], "ratio_to_first": slower.value, "repeats": len(runs)}
            | {"samples": options.samples, "length": options.length, "ratio_interval": slower.interval}
        )
        lines.append([who, f"{seconds[len(seconds) // 2]:.1f}", f"{runs[0]['loss']:.4f}", told(slower)])
    print(table([what, "s", "held-out loss", "time / gnomon"], lines), flush=True)
    times = [[one["seconds"] for one in runs] for runs in (theirs, ours)]
    best = ratio(*times)
    report.target(f"{what}: llm-compressor's time over ours", best.value or 0.0, 1.0, best.interval)


def _ids(folder: Path, options: Any) -> dict[str, Any]:
    """Windows of text, disjoint halves for calibration and for the loss."""
    from transformers import AutoTokenizer

    stream = token_stream(corpus("mixed"), AutoTokenizer.from_pretrained(folder, local_files_only=True))
    half, generator = len(stream) // 2, torch.Generator().manual_seed(SEED)
    calib = next(Batches(stream[:half], batch=options.samples, length=options.length, generator=generator))
    held = next(Batches(stream[half:], batch=4, length=options.length, generator=generator))
    return {"calib": calib.tolist(), "held": held.tolist(), "batch": options.batch}


def _run(command: list[str], folder: str) -> dict[str, Any] | str:
    """What a process printed, or why it printed nothing."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = parser_of(__doc__, threads=[2], repeats=3)
    parser.add_argument("--peer", default="", metavar="PYTHON", help="interpreter that has llm-compressor")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences that run through the model at once")
    parser.add_argument("--sparsity", type=float, default=0.5)
    return run(measure, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
