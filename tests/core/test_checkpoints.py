"""Model folders nobody vouches for: what is read, what is copied, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gnomon.core.checkpoints import companions, copy_companions, open_checkpoint
from gnomon.core.errors import GnomonError
from gnomon.core.manifest import find_manifest

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: a, b | c."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, model / "one.safetensors", {"format": "pt"})
    save_file({"c": torch.ones(1)}, model / "two.safetensors", {"format": "pt"})
    index(model, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return model


def index(model: Path, places: Any, **more: Any) -> None:
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": places, **more}))


def test_shards_in_order_with_what_the_index_says(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert [(shard.name, sorted(shard.entries)) for shard in found.shards] == [
        ("one.safetensors", ["a", "b"]),
        ("two.safetensors", ["c"]),
    ]
    assert (found.index, found.nbytes, found.kind) == ({"total_size": 24}, 24, "dense")
    save_file({"d": torch.ones(2)}, folder / "model.safetensors")
    assert open_checkpoint(folder).entries.keys() == {"d"}  # the single file wins, as in Transformers


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "gnomon_x"}, "gnomon"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"model_type": "llama", "quantization_config": None}, "dense"),
        ({}, "dense"),
    ],
)
def test_kinds(folder: Path, config: dict[str, Any], kind: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, folder / "gnomon.safetensors")
    assert open_checkpoint(folder).kind == kind


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "../one.safetensors"}, r"'../one.safetensors', but only plain file names"),
        ({"a": "/etc/passwd.safetensors"}, "only plain file names"),
        ({"a": "sub/one.safetensors"}, "only plain file names"),
        ({"a": ".one.safetensors"}, "only plain file names"),
        ({"a": "one.bin"}, "'one.bin', which is no safetensors file"),
        ({"a": "three.safetensors"}, "three.safetensors is missing"),
        ({"a": "two.safetensors"}, "'a' lies in two.safetensors, where it does not"),
        ({"x": "one.safetensors"}, "'x' lies in one.safetensors, where it does not"),
        ({"a": 5}, "not a table of file names"),
        (["a"], "not a table of file names"),
    ],
)
def test_an_index_that_points_elsewhere(folder: Path, places: Any, message: str) -> None:
    index(folder, places)
    with pytest.raises(GnomonError, match=message):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, folder / "two.safetensors")
    with pytest.raises(GnomonError, match=r"'a' lies in one.safetensors and again in two.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX, "one.safetensors", "tokenizer.json"])
def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    if (folder / name).exists():
        (folder / name).rename(outside)
    else:
        outside.write_text("{}")
    (folder / name).symlink_to(outside)
    with pytest.raises(GnomonError, match="is a link that leads out of the folder"):
        open_checkpoint(folder)
        companions(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX, "one.safetensors", "gnomon.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_refused(folder: Path, name: str, kind: str) -> None:
    """Reading a named pipe would wait forever."""
    place = folder / name
    place.unlink(missing_ok=True)
    {"pipe": lambda: os.mkfifo(place), "folder": place.mkdir, "loop": lambda: place.symlink_to(name)}[kind]()
    with pytest.raises(GnomonError, match=r"is no regular file|is a link that leads to itself|holds neither"):
        find_manifest(folder)
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**7}, r"10,000,000 layers \(num_hidden_layers; limit 3\).* holds 3 tensors"),
        ({"n_layer": 0}, "0 layers"),
        ({"text_config": {"num_hidden_layers": 4}}, "4 layers"),
        ({"vision_config": {"num_layers": 10**7}}, "10,000,000 layers"),
        ({"num_labels": 10**9}, r"1,000,000,000 parts \(num_labels; limit 1,000,000\)"),
        ({"num_local_experts": 10**9}, "num_local_experts"),
    ],
)
def test_more_parts_than_a_checkpoint_holds(folder: Path, config: dict[str, Any], message: str) -> None:
    """Transformers would build them for hours."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(GnomonError, match=message):
        open_checkpoint(folder)


def test_links_inside_and_of_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub/snapshots/abc", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert open_checkpoint(snapshot).entries.keys() == {"a", "b", "c"}
    (snapshot / "x.txt").symlink_to(Path("config.json"))
    assert Path("x.txt") in companions(snapshot)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "no valid JSON"),
        ("config.json", "[]", "JSON is no object"),
        ("config.json", '{"model_type": 5}', "its model_type is 5"),
        (INDEX, "nonsense", "no valid JSON"),
        (INDEX, '{"weight_map": {}, "metadata": 5}', "metadata is no table"),
    ],
)
def test_damaged_json(folder: Path, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(GnomonError, match=message):
        open_checkpoint(folder)


def test_what_is_missing_is_named(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(GnomonError, match=r"neither model.safetensors nor .* pickle are never opened"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(GnomonError, match=r"holds no config.json"):
        open_checkpoint(folder)


def test_huge_json_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(200_000_000)  # sparse
    with pytest.raises(GnomonError, match="at most 100,000,000 is read"):
        open_checkpoint(folder)


def test_companions_are_what_belongs_to_the_model(folder: Path, tmp_path: Path) -> None:
    kept = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE", "merges.txt"]
    left = [
        "gnomon.json",
        "optimizer.pt",
        "rng_state.pth",
        "model.gguf",
        "pytorch_model.bin.index.json",
        ".env",
    ]
    for name in kept + left:
        (folder / name).write_text(name)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("t")
    (folder / "runs").mkdir()
    (folder / "runs/log.txt").touch()
    out = tmp_path / "out"
    out.mkdir()
    (out / "LICENSE").write_text("already here")
    copy_companions(folder, out)
    copied = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    expected = {name: name for name in kept} | {"additional_chat_templates/tools.jinja": "t"}
    assert copied == expected | {"LICENSE": "already here"}
