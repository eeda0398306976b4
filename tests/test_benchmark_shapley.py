"""benchmarks/shapley.py: it runs on a tiny model, and times nothing where a score is wrong."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from gnomon.methods.compress.shapley import ModelShapley

FOLDER = Path(__file__).parents[1] / "benchmarks"


def run(monkeypatch: pytest.MonkeyPatch, rows: Path) -> tuple[int, list[dict[str, object]]]:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("common", "shapley"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("shapley")
    status = module.main(["--quick", "--repeats", "2", "--json", str(rows)])
    for name in ("common", "shapley"):
        sys.modules.pop(name, None)
    return status, [json.loads(line) for line in rows.read_text().splitlines()]


def test_quick_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl")
    assert status == 0
    assert [row["right"] for row in rows if row["kind"] == "check"] == [True, True]
    assert len([row for row in rows if row["kind"] == "time"]) == 9
    assert len([row for row in rows if row["kind"] == "target"]) == 5


def test_a_wrong_score_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ModelShapley._orders

    def wrong(self: ModelShapley, batch: object) -> object:
        order, counted = right(self, batch)
        for value in order.second.values():
            value.mul_(1.01)
        return order, counted

    monkeypatch.setattr(ModelShapley, "_orders", wrong)
    status, rows = run(monkeypatch, tmp_path / "rows.jsonl")
    assert status == 1 and not [row for row in rows if row["kind"] == "time"]
