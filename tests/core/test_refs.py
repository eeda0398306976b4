"""References: names and hub ids stay, paths become portable. Truth: hand-made files, `sha256sum` of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gnomon.core.refs import is_name, portable


@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m",
        "tiny:llama-0.5m",
        "stdlib",
        "mixed",
        "generated:20",
        "org/model",
        "",
        "muon",
        "a\0b",
        "x" * 5000,
    ],
)
def test_names_hub_ids_and_other_strings_stay(name: str) -> None:
    assert portable(name) == name


def test_an_existing_file_becomes_its_name_and_hash(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(b"text")
    assert portable(str(file)) == f"book.txt@sha256:{hashlib.sha256(b'text').hexdigest()[:16]}"


def test_equal_folders_in_two_places_are_one_reference_and_a_changed_one_another(tmp_path: Path) -> None:
    places = [tmp_path / "here" / "model", tmp_path / "there" / "model"]
    for place in places:
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    here, there = (portable(str(place)) for place in places)
    assert here == there and here.startswith("model@sha256:")
    (places[1] / "config.json").write_text("{ }")
    assert portable(str(places[1])) != here
    assert portable(f"{places[0]}/") == here


def test_a_name_wins_over_a_folder_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stdlib").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_name("stdlib") and portable("stdlib") == "stdlib"
    assert portable("./stdlib").startswith("stdlib@sha256:")
