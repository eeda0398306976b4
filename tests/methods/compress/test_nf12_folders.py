"""Models on planes written to folders and read again: the same bits, one copy of what is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import tiny_family
from safetensors import safe_open

from gnomon.core.errors import UsageError
from gnomon.methods.compress.nf12 import (
    NF12Config,
    NF12Weight,
    compress_model,
    decompress_model,
    inspect,
    load_nf12,
    save_nf12,
)

EVERYTHING = NF12Config(min_elements=0, raw_share=1.0, fused_rows_cpu=0)
TOKENS = torch.arange(3, 12)[None]


def compressed(name: str = "llama", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    return compress_model(tiny_family(name, dtype=torch.bfloat16, **settings).to(dtype), config=EVERYTHING)


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Of the model without planes."""
    return dict(decompress_model(model).state_dict())


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value.dtype == theirs[key].dtype
        assert torch.equal(value, theirs[key])


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back_from_its_folder(tmp_path: Path, name: str, tied: bool) -> None:
    model = compressed(name, tie_word_embeddings=tied)
    logits = model(TOKENS).logits
    save_nf12(model, tmp_path / "D")
    assert [path.name for path in tmp_path.iterdir()] == ["D"]  # the ordinary checkpoint is gone
    assert torch.equal(model(TOKENS).logits, logits)  # saving changed nothing
    loaded: Any = load_nf12(tmp_path / "D")
    assert not loaded.training
    on_planes = [module for module in loaded.modules() if isinstance(module, NF12Weight)]
    assert len(on_planes) == len([module for module in model.modules() if isinstance(module, NF12Weight)])
    head, embedding = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    with safe_open(tmp_path / "D" / "gnomon.safetensors", "pt") as file:
        assert any("head" in key for key in inspect(file).encoded) != tied  # stored once
    assert_equal(parameters(loaded), parameters(model))
    assert torch.equal(loaded(TOKENS).logits, logits)


def test_a_loaded_model_is_saved_by_itself(tmp_path: Path) -> None:
    model = compressed()
    save_nf12(model, tmp_path / "one")
    loaded = load_nf12(tmp_path / "one")
    save_nf12(loaded, tmp_path / "two")
    assert_equal(parameters(load_nf12(tmp_path / "two")), parameters(model))
    with pytest.raises(UsageError, match=r"two exists and is not empty\. .* force=True"):
        save_nf12(loaded, tmp_path / "two")
    loaded.model.norm.weight.data.zero_()
    save_nf12(loaded, tmp_path / "one", force=True)  # over the very files that its planes may be mapped from
    assert_equal(parameters(load_nf12(tmp_path / "one")), parameters(loaded))


def test_a_float32_model_of_bfloat16_values_is_saved(tmp_path: Path) -> None:
    model = compressed(dtype=torch.float32)
    save_nf12(model, tmp_path / "D")
    assert_equal(parameters(load_nf12(tmp_path / "D", dtype=torch.float32)), parameters(model))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"LlamaForCausalLM has no NF12 layers\. Call compress_model"):
        save_nf12(tiny_family("llama"), tmp_path / "D")
    with pytest.raises(UsageError, match=r"is no folder with a config\.json"):
        load_nf12(tmp_path / "missing")
    with pytest.raises(UsageError, match="Unknown dtype 'fp8'"):
        load_nf12(tmp_path / "missing", dtype="fp8")
    with pytest.raises(UsageError, match="Unknown device 'gpu'"):
        load_nf12(tmp_path / "missing", device="gpu")
    model = compressed()
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="D"):
        save_nf12(model, tmp_path / "D")
    assert (tmp_path / "D" / "precious.txt").read_text() == "mine"
    decompress_model(model).save_pretrained(tmp_path / "plain")
    with pytest.raises(UsageError, match="is of type 'llama', not gnomon_nf12"):
        load_nf12(tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "llama"
