"""benchmarks/mglu.py: it runs on tiny shapes, and ends with 1 where a kernel is wrong, before anything is timed."""

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
    script = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import mglu\n{code}\nsys.exit(mglu.main({options}))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=False
    )
    return done, [json.loads(line) for line in rows.read_text().splitlines()]


@built
def test_quick_run(tmp_path: Path) -> None:
    done, rows = run("", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [row for row in rows if row["kind"] == "check"]
    assert len(checks) >= 30 and all(row["right"] for row in checks)
    times = {row["contender"] for row in rows if row["kind"] == "time"}
    assert times >= {
        "GLU, same kernel",
        "GLU, torch",
        "MGLU, 1 mask",
        "MGLU, 8 masks",
        "naive, 8 masks",
        "reading",
    }
    roofs = {row["contender"] for row in rows if row["kind"] == "roof"}
    assert roofs == {"GLU, same kernel", *(f"MGLU, {n} mask{'s' * (n > 1)}" for n in (1, 2, 4, 8))}
    assert {row["target"] for row in rows if row["kind"] == "target"} == {1.51, 1.3, 0.8, 10}


@built
def test_a_wrong_kernel_ends_it(tmp_path: Path) -> None:
    code = (
        "right = mglu.flash_mglu\n"
        "def wrong(x, w, planes, n, *rest, **more): return right(x, w, planes ^ 1, n, *rest, **more)\n"
        "mglu.flash_mglu = wrong"
    )
    done, rows = run(code, tmp_path)
    assert done.returncode == 1 and "Nothing more was timed" in done.stderr
    assert any(not row["right"] for row in rows if row["kind"] == "check")
    assert not [row for row in rows if row["kind"] == "time"]
