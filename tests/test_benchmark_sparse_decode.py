"""benchmarks/sparse_decode.py: it runs on tiny caches, and ends with 1 where a kernel is wrong, before timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnomon.kernels import native

FOLDER = Path(__file__).parents[1] / "benchmarks"
built = pytest.mark.skipif(bool(native.problem()), reason=native.problem() or "built")


def run(code: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    rows = tmp_path / "rows.jsonl"
    options = ["--quick", "--threads", "1", "--repeats", "2", "--json", str(rows)]
    script = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import sparse_decode as it\n"
        f"{code}\nsys.exit(it.main({options}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=False
    )
    return done, [json.loads(line) for line in rows.read_text().splitlines()]


@built
def test_quick_run(tmp_path: Path) -> None:
    done, rows = run("", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [row for row in rows if row["kind"] == "check"]
    assert len(checks) == 12 and all(row["right"] for row in checks)
    times = {row["contender"] for row in rows if row["kind"] == "time"}
    assert len(times) == 11 and {"dense, matched kernel", "dense, torch SDPA", "reading"} < times
    assert {"exact pass, matched kernel", "exact pass, torch SDPA", "MAGE, block of 32 passes"} < times


@built
def test_a_wrong_kernel_is_not_timed(tmp_path: Path) -> None:
    code = "good = it.dense_decode; it.dense_decode = lambda *x, **y: 2 * good(*x, **y)"
    done, rows = run(code, tmp_path)
    assert done.returncode == 1 and "1 checks failed" in done.stderr
    assert not [row for row in rows if row["kind"] == "time"]


@built
def test_a_wrong_block_kernel_is_not_timed(tmp_path: Path) -> None:
    code = (
        "block = it.sparse_decode_block; good = block.block_decode\n"
        "block.block_decode = lambda *x, **y: 2 * good(*x, **y)"
    )
    done, rows = run(code, tmp_path)
    assert done.returncode == 1 and "2 checks failed" in done.stderr
    assert not [row for row in rows if row["kind"] == "time"]
