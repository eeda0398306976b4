"""Transformers with `gnomon.hf`. Source of truth: the ordinary model that went in, bit for bit."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, tiny_family
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import gnomon
import gnomon.hf
from gnomon.core.errors import GnomonError, UsageError
from gnomon.methods.compress.nf12 import NF12Embedding, NF12Linear, NF12Weight
from gnomon.plugins.hf_nf12 import NF12QuantizationConfig

pytestmark = pytest.mark.usefixtures("torch_products")

torch.set_num_threads(1)

IDS = torch.arange(3, 11)[None]  # eight rows: beyond what a layer multiplies straight from the planes


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def stored(tmp_path: Path, family: str = "llama", **settings: Any) -> tuple[Any, Path, Path]:
    """(an ordinary model, its folder, the same as NF12)."""
    shards = {"max_shard_size": settings.pop("max_shard_size")} if "max_shard_size" in settings else {}
    model = tiny_family(family, dtype=torch.bfloat16, **settings)
    plain, folder = tmp_path / "plain", tmp_path / "nf12"
    model.save_pretrained(plain, **shards)
    gnomon.apply("nf12", model=str(plain), out=folder, min_elements=1)
    return AutoModelForCausalLM.from_pretrained(plain), plain, folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def planes(model: Any) -> dict[int, NF12Weight]:
    return {id(module): module for module in model.modules() if isinstance(module, NF12Weight)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_it_did(family: str, tmp_path: Path) -> None:
    original, plain, folder = stored(tmp_path, family)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert type(model) is type(original) and model.dtype == torch.bfloat16 and not model.training
    assert len(planes(model)) >= 12
    assert torch.equal(logits(model), logits(original))
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(logits(wide), logits(reference))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["50GB", "3KB"])
def test_saving_writes_the_same_form_again(tied: bool, size: str, tmp_path: Path) -> None:
    original, _, folder = stored(tmp_path, "qwen2", tie_word_embeddings=tied, max_shard_size="4KB")
    model = AutoModelForCausalLM.from_pretrained(folder)
    again = tmp_path / "again"
    model.save_pretrained(again, max_shard_size=size)
    config = json.loads((again / "config.json").read_text())
    assert config["model_type"] == "gnomon_nf12" and config["base_model_type"] == "qwen2"
    assert "transformers_weights" not in config
    assert not list(again.glob("model*"))
    assert (again / "gnomon.safetensors.index.json").exists() == (size == "3KB")
    reloaded, report = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(reloaded), logits(original))
    found = gnomon.check(again, against=str(folder))  # SHA-256 of every tensor, and the same ones as before
    assert [step.method for step in found.steps] == ["nf12"]
    model.save_pretrained(again)  # over itself: nothing of the former layout stays
    assert gnomon.check(again).tensors == found.tensors
    assert not list(again.glob("gnomon-*")) and not list(again.glob(".*"))


def test_tied_embeddings_are_one_matrix(tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path, "llama", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model.lm_head, NF12Linear) and isinstance(model.model.embed_tokens, NF12Embedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.tie_weights()  # accelerate and others call it at any time
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = load_file(folder / "gnomon.safetensors")
    assert not any(name.startswith("lm_head") for name in names)


def test_a_tied_matrix_under_its_other_name_is_found(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    original, plain, _ = stored(tmp_path, "llama", tie_word_embeddings=True)
    weights = load_file(plain / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    gnomon.apply("nf12", model=str(plain), out=tmp_path / "other", min_elements=1)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "other", output_loading_info=True)
    assert not any(report.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(original))


def test_a_tied_matrix_stored_twice_is_loaded_twice(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    original, plain, _ = stored(tmp_path, "llama", tie_word_embeddings=True)
    weights = load_file(plain / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    gnomon.apply("nf12", model=str(plain), out=tmp_path / "twice", min_elements=1)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "twice", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(model), logits(original))


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_maps(device_map: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    original, _, folder = stored(tmp_path, "gemma")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    if model.device.type == "cpu":
        assert torch.equal(logits(model), logits(original))


def test_layers_on_the_disk_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _, _, folder = stored(tmp_path)
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(UsageError, match="leaves layers on the disk"):
        AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "off")


def test_the_base_model_alone(tmp_path: Path) -> None:
    _, plain, folder = stored(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        ours, theirs = (AutoModel.from_pretrained(path, dtype=dtype) for path in (folder, plain))
        assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
        with torch.no_grad():
            assert torch.equal(ours(IDS).last_hidden_state, theirs(IDS).last_hidden_state)


def test_dequantize_gives_the_ordinary_model(tmp_path: Path) -> None:
    original, _, folder = stored(tmp_path, "gemma")
    model = AutoModelForCausalLM.from_pretrained(folder).dequantize()
    assert not planes(model) and not hasattr(model, "hf_quantizer")
    assert torch.equal(logits(model), logits(original))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense/config.json").read_text())
    assert config["model_type"] == "gemma" and "quantization_config" not in config
    plain = load_file(tmp_path / "plain/model.safetensors")
    dense = load_file(tmp_path / "dense/model.safetensors")
    assert plain.keys() == dense.keys()
    assert all(torch.equal(plain[name].view(torch.int16), dense[name].view(torch.int16)) for name in plain)


def test_an_ordinary_model_is_compressed_while_it_is_loaded(tmp_path: Path) -> None:
    model = tiny_family("llama", dtype=torch.bfloat16, vocab_size=4200, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=NF12QuantizationConfig()
    )
    assert len(planes(loaded)) == 1  # of the matrices only the embedding has 2^16 elements
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))
    [step] = gnomon.check(tmp_path / "again", against=str(tmp_path / "plain")).steps
    assert (step.method, step.input_name) == ("nf12", "plain")


def test_copies_save_themselves_or_refuse(tmp_path: Path) -> None:
    original, _, folder = stored(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    twin = copy.deepcopy(model)
    twin.model.norm.weight.data.zero_()
    twin.save_pretrained(tmp_path / "twin")
    assert not logits(AutoModelForCausalLM.from_pretrained(tmp_path / "twin")).any()
    assert torch.equal(logits(model), logits(original))
    thawed = pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="not serializable"):
        thawed.save_pretrained(tmp_path / "thawed")


@pytest.mark.parametrize("options", [{"push_to_hub": True}, {"variant": "fp8"}])
def test_saving_refuses_what_it_can_not_do(options: dict[str, Any], tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="can't be saved with"):
        model.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_type": "nope"}, "base_model_type is 'nope'"),
        ({"base_model_type": "gnomon_nf12"}, "base_model_type is 'gnomon_nf12'"),
        ({"base_model_type": None}, "base_model_type is None"),
        ({"gnomon_weights": "../other.safetensors"}, "gnomon_weights is '../other.safetensors', but must be"),
        ({"gnomon_weights": "model.safetensors"}, "gnomon_weights is 'model.safetensors', but must be"),
    ],
)
def test_hostile_configurations_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path)
    edit(folder, **changes)
    with pytest.raises(GnomonError, match=message):
        AutoConfig.from_pretrained(folder)


def test_another_layout_is_refused() -> None:
    with pytest.raises(GnomonError, match="version=2; this Gnomon reads NF12 with version=1"):
        NF12QuantizationConfig(quant_method="nf12", version=2)


def rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import save_file

    weights = load_file(folder / "gnomon.safetensors")
    change(weights)
    save_file(weights, folder / "gnomon.safetensors", {"format": "pt", "nf12": "planes-v1"})


NAME = "model.layers.1.mlp.up_proj.weight"


def _point_beyond(weights: dict[str, torch.Tensor]) -> None:
    weights[f"{NAME}.nf12_ex"][0, 0] = 0
    weights[f"{NAME}.nf12_sm"][0, :8] = torch.tensor([255, 255, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_point_beyond, rf"{NAME}: Exceptional group .* points to row 65535"),
        (lambda weights: weights.pop(f"{NAME}.nf12_ex"), f"{NAME}.nf12_ex is missing"),
        (lambda weights: weights.update({f"{NAME}.nf12_sm": torch.zeros(1, 8, dtype=torch.uint8)}), NAME),
        (lambda weights: weights.update({NAME: torch.zeros(24, 16)}), "both as it is and encoded"),
        (lambda weights: weights.pop("model.layers.1.self_attn.q_proj.bias"), "q_proj.bias is missing"),
    ],
)
def test_damaged_planes_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path, "qwen2")
    rewrite(folder, change)
    with pytest.raises(GnomonError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_registering_twice_changes_nothing() -> None:
    gnomon.hf.register()
    gnomon.hf.register()
