"""The worked example in CONTRIBUTING.md works as it stands, in a copy of this tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^`([\w/.]+)`[^\n]*\n(?:[^\n]+\n)*\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the example's files in place."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    files = dict(FILE.findall((ROOT / "CONTRIBUTING.md").read_text()))
    assert len(files) == 5
    row = files.pop("src/gnomon/systems.py")
    for name, text in files.items():
        path = tree / name
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    systems = tree / "src/gnomon/systems.py"
    text = systems.read_text()
    assert text.count("\n)\n") == 1  # the end of the table
    systems.write_text(text.replace("\n)\n", f"\n{row})\n"))
    return tree


def python_files() -> list[str]:
    names = [name for name, _ in FILE.findall((ROOT / "CONTRIBUTING.md").read_text())]
    return [name for name in names if name.endswith(".py")]


def in_tree(tree: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_runs_reports_and_is_listed(tree: Path) -> None:
    in_tree(tree, "gnomon", "run", "normsgd", "--profile", "smoke")
    [run] = (tree / "runs/normsgd").iterdir()
    in_tree(tree, "gnomon", "report", str(run), "--check")
    result = json.loads((run / "result.json").read_text())
    [claim] = result["claims"]
    # Five seeds and equal budgets: nothing keeps it from a verdict.
    assert claim["verdict"] in ("holds", "fails")
    trials = {method["name"]: method["budget"]["trials"] for method in result["methods"]}
    assert trials == {"normsgd": 6, "sgd": 6}
    assert "Steps of fixed length" in (run / "report.html").read_text()
    assert "normsgd\toptim\tworks" in in_tree(tree, "gnomon", "ls")
    assert "Normalised gradient descent" in in_tree(tree, "gnomon", "show", "normsgd")


def test_its_test_passes_and_sees_a_flipped_sign(tree: Path) -> None:
    test = "tests/methods/test_normsgd.py"
    assert "6 passed" in in_tree(tree, "pytest", test, "-q", "-p", "no:cacheprovider", "-o", "addopts=")
    method = tree / "src/gnomon/methods/optim/normsgd.py"
    text = method.read_text()
    method.write_text(text.replace("parameter.sub_(", "parameter.add_("))
    with pytest.raises(AssertionError, match="failed"):
        in_tree(tree, "pytest", test, "-q", "-p", "no:cacheprovider", "-o", "addopts=")
    method.write_text(text)


def test_it_keeps_the_house_rules(tree: Path) -> None:
    in_tree(tree, "ruff", "check", *python_files())
    in_tree(tree, "ruff", "format", "--check", *python_files())


def test_its_card_keeps_the_rules_of_cards(tree: Path) -> None:
    shutil.copy(ROOT / "tests/lab/test_cards.py", tree)
    words = ("pytest", "test_cards.py", "-v", "-k", "shipped", "-p", "no:cacheprovider", "-o", "addopts=")
    assert "[normsgd] PASSED" in in_tree(tree, *words)


@pytest.mark.slow
def test_its_types_are_strict(tree: Path) -> None:
    in_tree(tree, "mypy", "--strict", *(name for name in python_files() if name.startswith("src")))
