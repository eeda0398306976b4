"""README and docs are true: their `python` blocks are executed, their `console` blocks' commands are run.

All pages share one working folder, so a study that several pages speak of runs once. Blocks in other
languages (`sh`, `text`, `toml`, …) are only shown.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from gnomon import cli
from gnomon.core.refs import RECIPES
from gnomon.core.tiny import SIZES
from gnomon.core.train import SCHEDULES, TrainConfig
from gnomon.lab.records import BUDGET_FIELDS, FIELDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


def commands(block: str) -> list[list[str]]:
    """The words of each `$ …` line, with `*` expanded as a shell would; a trailing `\\` goes on."""
    lines = re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)
    return [[word for raw in shlex.split(line) for word in expanded(raw)] for line in lines]


def expanded(word: str) -> list[str]:
    if word == "RUN":  # on the pages: the run folder that `gnomon run` printed
        return [str(max(Path("runs").glob("*/*"), key=lambda path: path.stat().st_mtime))]
    return (sorted(str(path) for path in Path().glob(word)) if "*" in word else []) or [word]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        language, block = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        if language == "python":
            exec(compile("\n" * (line - 1) + block, str(page), "exec"), namespace)
            continue
        for program, *words in commands(block):
            assert program == "gnomon", f"{page.name}:{line}: only gnomon commands are run, not {program!r}"
            assert cli.main(words) == 0, f"{page.name}:{line}: gnomon {shlex.join(words)}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = LINK.findall(prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_commands_are_read_as_a_shell_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    block = "$ gnomon run x -o note='two words' \\\n    --again\nprinted output\n$ gnomon compare *\n"
    assert commands(block) == [
        ["gnomon", "run", "x", "-o", "note=two words", "--again"],
        ["gnomon", "compare", "a", "b"],
    ]


def test_the_results_page_names_every_field() -> None:
    schema = json.loads((ROOT / "src/gnomon/lab/result.schema.json").read_text())
    claim, metric = schema["$defs"]["claim"], schema["$defs"]["metric"]
    names = {*schema["properties"], *claim["properties"], *metric["properties"]}
    names |= {*claim["properties"]["parts"]["items"]["properties"], *FIELDS, *BUDGET_FIELDS}
    page = (ROOT / "docs/results-format.md").read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_study_page_names_every_recipe_size_and_training_setting() -> None:
    page = (ROOT / "docs/writing-a-study.md").read_text()
    named = {*RECIPES, *SIZES, *SCHEDULES, *(field.name for field in fields(TrainConfig))}
    assert {name for name in named if f"`{name}`" not in page} == set()
