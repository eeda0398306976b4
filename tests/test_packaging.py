"""Every file of the package that is not Python is named in pyproject.toml, so wheels carry it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gnomon"


def test_package_data_names_every_data_file() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = config["tool"]["setuptools"]["package-data"]["gnomon"]
    carried = {path for pattern in globs for path in PACKAGE.glob(pattern) if path.is_file()}
    there = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".so") and "__pycache__" not in path.parts
    }
    assert {path.relative_to(PACKAGE) for path in there - carried} == set()
    assert PACKAGE / "py.typed" in carried


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_declared_requirement_is_pinned() -> None:
    """The constraints cover what pyproject.toml asks for, so set-up never depends on the day it runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [
        r for e in ("train", "agents", "dev") for r in project["optional-dependencies"][e]
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_name(line.split("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    assert {_name(requirement) for requirement in asked} <= pinned


def _name(requirement: str) -> str:
    for separator in (">", "<", "=", ";", "[", " "):
        requirement = requirement.partition(separator)[0]
    return requirement.lower().replace("_", "-")
