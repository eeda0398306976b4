"""The README's table of systems is what `make readme` writes from `systems.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gnomon.lab.cards import accepted_result
from gnomon.systems import SYSTEMS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tool", ROOT / "tools" / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date(tool: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == tool.filled(readme), "run `make readme`"


def test_a_changed_row_is_seen_and_mended(tool: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    changed = readme.replace("| planned |", "| works |", 1)
    assert changed != readme == tool.filled(changed)


def test_every_system_has_its_row_and_status(tool: ModuleType) -> None:
    rows = [line for line in tool.table().splitlines() if "`" in line]
    assert len(rows) == len(SYSTEMS)
    for system in SYSTEMS:
        [row] = [row for row in rows if f"`{system.slug}`" in row]
        status = row.split("|")[-2].strip()
        assert status.split(";")[0] == system.status
        assert ("claims:" in status) == (accepted_result(system.slug) is not None)
        assert ("](src/gnomon/studies/" in row) == (system.status == "works")


@pytest.mark.parametrize("readme", ["", "{start}\n{start}\n{end}", "{start}"])
def test_markers_must_be_there_once(tool: ModuleType, readme: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        tool.filled(readme.format(start=tool.START, end=tool.END))
