"""`gnomon.apply` and `gnomon.check` by name: tables, options, models as strings."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

import gnomon
from gnomon import cli
from gnomon.core import models
from gnomon.core.errors import GnomonError, UsageError
from gnomon.lab.apply import find_method, methods
from gnomon.systems import SYSTEMS

torch.set_num_threads(1)
TINY = "tiny:llama-10k"


@pytest.fixture(scope="module")
def nf12(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apply") / "nf12"
    gnomon.apply("nf12", model=TINY, out=folder, min_elements="256")
    return folder


def test_models_and_folders_may_be_paths(nf12: Path, tmp_path: Path) -> None:
    gnomon.apply("dense", model=nf12, out=tmp_path / "back")
    assert gnomon.check(nf12, against=tmp_path / "back").against == "back"
    with pytest.raises(UsageError, match=r"There is no folder .*nowhere\. gnomon check verifies"):
        gnomon.check(tmp_path / "nowhere")


@pytest.mark.parametrize("name", methods())
def test_every_name_in_the_table_has_its_method(name: str) -> None:
    found = find_method(name)
    assert found.name == name
    assert found is importlib.import_module(methods()[name]).METHOD
    assert find_method(name.replace("-", "_")) is found
    found.settings()  # every setting has a default


def test_names_are_unique() -> None:
    entries = [entry.partition("=")[0] for system in SYSTEMS for entry in system.apply]
    assert len(entries) == len(set(entries)) and "dense" not in entries


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nf21", {}, "Unknown method to apply 'nf21'. Did you mean 'nf12'"),
        ("nf12", {"min_element": 1}, "Unknown setting of nf12: 'min_element'. Did you mean 'min_elements'"),
        ("nf12", {"min_elements": "few"}, "min_elements='few' is not a valid int"),
        ("nf12", {"raw_share": "2"}, r"raw_share=2.0 must lie in \(0, 1\]"),
        ("dense", {"x": 1}, "Unknown setting of dense: 'x'"),
    ],
)
def test_misuse(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        gnomon.apply(name, model=TINY, out=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lama", "tiny:lama-10k", "./nowhere", ""])
def test_models_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        gnomon.apply("nf12", model=name, out=tmp_path / "out")


def test_a_tiny_model_is_the_same_each_time_and_loads(nf12: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    found = gnomon.check(nf12, against=TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.converted > 10 and 12 < found.bits_per_weight < 16
    assert found.steps[0].input_name == TINY and found.steps[0].version == gnomon.__version__
    loaded = models.load(str(nf12), device="cpu")
    assert loaded.tokenizer("ab")["input_ids"] == [97, 98]


def test_the_way_back(nf12: Path, tmp_path: Path) -> None:
    gnomon.apply("dense", model=str(nf12), out=str(tmp_path / "back"))
    with models.model_folder(TINY) as (_, plain):
        ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "back", plain))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "back" / name).read_bytes() == (plain / name).read_bytes()
    with pytest.raises(UsageError, match="is an ordinary checkpoint already"):
        gnomon.apply("dense", model=str(tmp_path / "back"), out=tmp_path / "again")
    with pytest.raises(UsageError, match="nf12 is of type gnomon_nf12 already"):
        gnomon.apply("nf12", model=str(nf12), out=tmp_path / "again")


def test_a_form_of_another_version(nf12: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    config = json.loads((nf12 / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "gnomon_nf13"}))
    (strange / "gnomon.safetensors").write_bytes((nf12 / "gnomon.safetensors").read_bytes())
    with pytest.raises(GnomonError, match=r"of type gnomon_nf13, which this version of Gnomon can't read"):
        gnomon.apply("dense", model=str(strange), out=tmp_path / "out")


def test_of_a_hub_id_only_data_is_asked_for(
    nf12: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **filters: Any) -> str:
        asked.update(filters, name=name)
        return str(nf12)

    monkeypatch.setattr(models, "snapshot_download", download)
    done = gnomon.apply("dense", model="owner/name", out=tmp_path / "out")
    assert done.steps[-1].input_name == asked["name"] == "owner/name"
    offered = ["model.safetensors", "config.json", "tokenizer.model", "pytorch_model.bin", "code.py"]
    offered += ["original/consolidated.safetensors", "onnx/config.json", "consolidated.safetensors"]
    filters = {"allow_patterns": asked["allow_patterns"], "ignore_patterns": asked["ignore_patterns"]}
    taken = huggingface_hub.utils.filter_repo_objects(offered, **filters)
    assert list(taken) == ["model.safetensors", "config.json", "tokenizer.model"]


def test_a_hub_that_can_not_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        GnomonError, match=r"gnomon-tests/absent could not be loaded: .*HF_HUB_OFFLINE is set"
    ):
        gnomon.apply("nf12", model="gnomon-tests/absent", out=tmp_path / "out")


# -- the commands -------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "D")
    assert cli.main(["apply", "nf12", "-m", TINY, "--out", out, "--min-elements", "256"]) == 0
    printed = capsys.readouterr()
    assert "bits per weight" in printed.out and printed.out.startswith(f"written\t{out}")
    assert f"gnomon.apply('nf12', model='{TINY}', out='{out}', min_elements='256')" in printed.err
    assert cli.main(["check", out, "--against", TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"] == TINY
    assert cli.main(["check", out]) == 0
    assert "nf12 exception groups" in capsys.readouterr().out
    again = ["apply", "nf12", "-m", TINY, "--out", out, "-o", "min_elements=256", "--json"]
    assert cli.main(again) == 2
    assert "pass --force" in capsys.readouterr().err
    assert cli.main([*again, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["settings"]["min_elements"] == 256
    assert cli.main(["apply", "dense", "--model", out, "--out", str(tmp_path / "E")]) == 0
    assert cli.main(["check", str(tmp_path / "E"), "--against", out]) == 0
    damaged = tmp_path / "D/gnomon.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert cli.main(["check", out]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("apply x --model m --out d", "apply x --model m --out d"),
        ("apply x --keep 0.5 --model m", "apply x -o keep=0.5 --model m"),
        ("apply x --min-elements=3 --force", "apply x -o min_elements=3 --force"),
        ("apply x --shift -1 --flag --out d", "apply x -o shift=-1 -o flag=true --out d"),
        ("apply x -o a=b --help", "apply x -o a=b --help"),
    ],
)
def test_fields_as_options(words: str, expected: str) -> None:
    assert cli._with_fields_as_options(words.split()) == expected.split()
