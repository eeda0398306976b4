"""The worked example in CONTRIBUTING.md works as it stands, in a copy of this tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^`([\w/.]+)`[^\n]*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    systems.write_text(text.replace("\n)\n", f"\n{textwrap.indent(row.rstrip(), '    ')},\n)\n"))
    return tree


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
    assert claim["verdict"] in (
        "holds",
        "fails",
    )  # five seeds and equal budgets: nothing keeps it from a verdict
    assert {method["name"]: method["budget"]["trials"] for method in result["methods"]} == {
        "normsgd": 6,
        "sgd": 6,
    }
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
    python = [
        name for name, _ in FILE.findall((ROOT / "CONTRIBUTING.md").read_text()) if name.endswith(".py")
    ]
    in_tree(tree, "ruff", "check", *python)
    in_tree(tree, "ruff", "format", "--check", *python)
