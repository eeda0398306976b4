"""benchmarks/pace.py: it runs on tiny shapes, and times nothing where a form of Algorithm 1 is wrong."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from gnomon.methods.serve.pace import admit as forms

FOLDER = Path(__file__).parents[1] / "benchmarks"


def run(monkeypatch: pytest.MonkeyPatch, rows: Path) -> tuple[int, list[dict[str, object]]]:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("common", "pace"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("pace")
    status = module.main(["--quick", "--repeats", "2", "--json", str(rows)])
    for name in ("common", "pace"):
        sys.modules.pop(name, None)
    return status, [json.loads(line) for line in rows.read_text().splitlines()]


def test_quick_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl")
    assert status == 0
    assert [row["right"] for row in rows if row["kind"] == "check"] == [True, True]
    assert len([row for row in rows if row["kind"] == "time"]) == 2 * 4
    assert len([row for row in rows if row["kind"] == "target"]) == 2


def test_a_wrong_form_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = forms.admit_sorted
    monkeypatch.setattr(forms, "admit_sorted", lambda x, predictor, budget: right(x, predictor, budget)[::-1])
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl")
    assert status == 1 and not [row for row in rows if row["kind"] == "time"]
