"""benchmarks/pruning.py runs on tiny shapes and ends with 1 where a mask is wrong; without a peer the other says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "benchmarks"


def run(
    script: str, code: str, options: list[str], tmp_path: Path
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    rows = tmp_path / "rows.jsonl"
    whole = [*options, "--threads", "1", "--repeats", "2", "--json", str(rows)]
    start = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {script}\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{start}{code}\nsys.exit({script}.main({whole}))"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, [json.loads(line) for line in rows.read_text().splitlines()]


def test_quick_run(tmp_path: Path) -> None:
    done, rows = run("pruning", "", ["--quick"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [row for row in rows if row["kind"] == "check"]
    assert len(checks) == 6 and all(row["right"] for row in checks)
    times = {row["contender"] for row in rows if row["kind"] == "time"}
    assert times >= {
        "sorting",
        "all pairs",
        "exact",
        "floors",
        "sort and scatter",
        "transposed",
        "as published",
    }
    assert {row["target"] for row in rows if row["kind"] == "target"} == {50, 1}


def test_a_wrong_mask_ends_it(tmp_path: Path) -> None:
    code = "right = pruning.wanda_mask\npruning.wanda_mask = lambda *a, **k: ~right(*a, **k)"
    done, rows = run("pruning", code, ["--quick"], tmp_path)
    assert done.returncode == 1 and "Nothing more was timed" in done.stderr
    assert not [row for row in rows if row["kind"] == "time"]


def test_without_a_peer(tmp_path: Path) -> None:
    done, rows = run("pruning_peers", "", [], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["what"] for row in rows if row["kind"] == "left out"] == ["llm-compressor"]
