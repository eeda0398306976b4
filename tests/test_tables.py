"""Generated tables in README and docs are what `make readme` writes."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gnomon.lab.cards import accepted_result
from gnomon.systems import SYSTEMS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables_tool", ROOT / "tools" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date(tool: ModuleType) -> None:
    for table in tool.TABLES:
        page = (ROOT / table.page).read_text()
        assert page == table.filled(page), "run `make readme`"


def test_a_changed_row_is_seen_and_mended(tool: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    changed = readme.replace("| planned |", "| works |", 1)
    assert changed != readme == tool.TABLES[0].filled(changed)


def test_every_system_has_its_row_and_status(tool: ModuleType) -> None:
    rows = [line for line in tool.systems().splitlines() if "`" in line]
    assert len(rows) == len(SYSTEMS)
    for system in SYSTEMS:
        [row] = [row for row in rows if f"`{system.slug}`" in row]
        status = row.split("|")[-2].strip()
        assert status.split(";")[0] == system.status
        assert ("claims:" in status) == (accepted_result(system.slug) is not None)
        assert ("](src/gnomon/studies/" in row) == (system.status == "works")


@pytest.mark.parametrize("page", ["", "{start}\n{start}\n{end}", "{start}"])
def test_markers_must_be_there_once(tool: ModuleType, page: str) -> None:
    for table in tool.TABLES:
        with pytest.raises(ValueError, match="once each"):
            table.filled(page.format(start=table.start, end=table.end))


def loss(name: str, mean: float, sparsity: float, n: int = 3) -> dict[str, Any]:
    row = {"metric": "loss", "mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": n, "over": "seed"}
    if n == 1:
        row |= {"low": None, "high": None}
    return {"name": name, "metrics": [row | {"tags": {"on": "small", "sparsity": sparsity}}]}


def test_pruning_table_shows_every_pair_and_marks_the_lowest_loss(tool: ModuleType) -> None:
    result = {
        "methods": [
            loss("dense", 1.0, 0.0),
            loss("magnitude", 3.0, 0.5),
            loss("wanda + owl", 2.5, 0.5),
            loss("lua", 2.0, 0.5, n=1),
            loss("sparsegpt + lua", 4.0, 0.7),
            loss("lua column", 0.5, 0.7),  # a variant, not a pair
        ]
    }
    text = tool.pruning_of(result)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert rows[0] == ["pruner", "allocation", "50% removed", "70% removed"]
    assert rows[2:] == [
        ["magnitude", "uniform", "3.000 [2.900, 3.100]", ""],
        ["wanda", "owl", "2.500 [2.400, 2.600]", ""],
        ["sparsegpt", "lua", "", "4.000 [3.900, 4.100]"],
        ["Lua-LLM's own masks", "a threshold per row", "**2.000**", ""],
    ]
    assert "dense: 1.000" in text
    worse = copy.deepcopy(result)
    worse["methods"][3]["metrics"][0]["mean"] = 9.0
    assert "**2.500** [2.400, 2.600]" in tool.pruning_of(worse)
