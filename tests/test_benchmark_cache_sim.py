"""benchmarks/cache_sim.py: it runs on short traces, and times nothing where a decision differs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gnomon.kernels import cache_sim, native

FOLDER = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(bool(native.problem()), reason=native.problem() or "built")


def run(monkeypatch: pytest.MonkeyPatch, rows: Path) -> tuple[int, list[dict[str, object]]]:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("common", "cache_sim"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("cache_sim")
    status = module.main(["--quick", "--repeats", "2", "--json", str(rows)])
    for name in ("common", "cache_sim"):
        sys.modules.pop(name, None)
    return status, [json.loads(line) for line in rows.read_text().splitlines()]


def test_quick_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl")
    assert status == 0
    assert all(row["right"] for row in rows if row["kind"] == "check")
    assert len([row for row in rows if row["kind"] == "check"]) >= 6
    assert [row["target"] for row in rows if row["kind"] == "target"] == [1.0, 0.3]
    assert len([row for row in rows if row["kind"] == "time"]) >= 18


def test_a_wrong_decision_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = cache_sim.run

    def wrong(**arguments: object) -> np.ndarray:
        found = right(**arguments)
        found[-1] += 1
        return found

    monkeypatch.setattr(cache_sim, "run", wrong)
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl")
    assert status == 1 and not [row for row in rows if row["kind"] == "time"]
