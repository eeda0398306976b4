"""The table of systems. Source of truth: the names the project has promised, and pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from gnomon.systems import SYSTEMS, find

PROMISED = (
    "poet bread numuon mglu saga mage set-llm nf12 lua shapley tlcm openunlearning ra2 tbrm mosa opct",
    "progress_advantage meta_preference tops minpath svdecode daca gap_correction lookahead tail_lru pace",
    "grid debate walle cgi orchestra probe pall supergpqa proofrank fle pcb memeeconomy",
)


def test_every_promised_system_has_one_row() -> None:
    normal = [system.slug.replace("-", "_") for system in SYSTEMS]
    assert len(normal) == len(set(normal))
    assert {slug.replace("-", "_") for line in PROMISED for slug in line.split()} <= set(normal)


@pytest.mark.parametrize(
    ("asked", "slug"),
    [("set_llm", "set-llm"), ("tail-lru", "tail_lru"), ("progress-advantage", "progress_advantage")],
)
def test_dash_and_underscore_are_equal(asked: str, slug: str) -> None:
    assert find(asked) is find(slug)
    assert find(asked).slug == slug


def test_an_unknown_slug_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="tclm"):
        find("tclm")


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.slug)
def test_rows_are_complete_and_say_only_what_exists(system) -> None:
    assert all([system.name, system.family, system.title, system.venue, system.paper])
    assert system.summary.endswith(".") and "\n" not in system.summary
    assert system.status in ("works", "planned")
    assert bool(system.study) == (system.status == "works")
    assert all(entry.count("=") == 1 for entry in system.apply)
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert set(system.extras) <= set(pyproject["project"]["optional-dependencies"])


def test_the_table_imports_nothing_of_gnomon() -> None:
    code = "import sys, gnomon.systems; print(*(m for m in sys.modules if m[:5] in ('gnomo', 'torch')))"
    seen = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(seen) == {"gnomon", "gnomon.systems"}
    assert find_spec("torch") is not None  # otherwise the absence of torch above would show nothing
