"""Which tensors of a checkpoint NF12 takes, and what it refuses. Sources of truth: the original bits; the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, tiny_family
from safetensors.torch import load_file, save_file

import gnomon
from gnomon.core import smollm2
from gnomon.core.checkpoints import open_checkpoint
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.forms import Weights
from gnomon.methods.compress.nf12.apply import FORM

torch.set_num_threads(1)


def plain(
    tmp_path: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Path:
    tiny_family(family, dtype=dtype, **settings).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def encoded(folder: Path) -> set[str]:
    return {name for name, parts in FORM.group(open_checkpoint(folder)).items() if parts != (name,)}


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_linear_layers_and_embeddings(family: str, tmp_path: Path) -> None:
    """Every tensor of two axes, but for OPT's positions (a layer of its own) and one that OLMo has to keep."""
    folder = plain(tmp_path, family)
    done = gnomon.apply("nf12", model=str(folder), out=tmp_path / "out", min_elements=1)
    weights = load_file(folder / "model.safetensors")
    matrices = {name for name, tensor in weights.items() if tensor.ndim == 2}
    kept = matrices - encoded(tmp_path / "out")
    assert len(kept) == (1 if family in ("olmo", "opt") else 0)
    assert family != "opt" or kept == {"model.decoder.embed_positions.weight"}
    assert done.converted == len(matrices) - len(kept)
    view = Weights(open_checkpoint(tmp_path / "out"), FORM, {})
    assert view.groups.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(view.read(name).view(torch.int16), tensor.view(torch.int16))


def test_thresholds_keep_matrices(tmp_path: Path) -> None:
    folder = plain(tmp_path)  # 16 x 16 attention, 16 x 24 feed-forward
    gnomon.apply("nf12", model=str(folder), out=tmp_path / "out", min_elements=300)
    assert all("mlp" in name or "embed" in name or "lm_head" in name for name in encoded(tmp_path / "out"))
    with pytest.raises(UsageError, match=r"matrix of 65,536 elements or more, so NF12 has nothing to do"):
        gnomon.apply("nf12", model=str(folder), out=tmp_path / "none")
    with pytest.raises(GnomonError, match="None of the 30 tensors would become smaller as nf12"):
        gnomon.apply("nf12", model=str(folder), out=tmp_path / "none", min_elements=1, raw_share=0.5)
    assert not (tmp_path / "none").exists()


def test_a_matrix_that_does_not_shrink_is_kept(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    weights = load_file(folder / "model.safetensors")
    zeros = "model.layers.0.mlp.up_proj.weight"
    weights[zeros].zero_()  # all exceptions: 28 bits a weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    gnomon.apply("nf12", model=str(folder), out=tmp_path / "out", min_elements=1)
    assert zeros not in encoded(tmp_path / "out")
    assert gnomon.check(tmp_path / "out", against=str(folder)).converted == len(encoded(tmp_path / "out"))


@pytest.mark.parametrize(("dtype", "code"), [(torch.float32, "F32"), (torch.float16, "F16")])
def test_other_dtypes_are_refused_with_the_way_out(dtype: torch.dtype, code: str, tmp_path: Path) -> None:
    folder = plain(tmp_path, dtype=dtype)
    with pytest.raises(
        UsageError, match=rf"is {code} with values that .* dtype='bfloat16'\).save_pretrained"
    ):
        gnomon.apply("nf12", model=str(folder), out=tmp_path / "out", min_elements=1)
    assert not (tmp_path / "out").exists()


def test_float32_with_bfloat16_values_comes_back_as_it_was(tmp_path: Path) -> None:
    tiny_family("llama", dtype=torch.bfloat16).float().save_pretrained(tmp_path / "plain")
    gnomon.apply("nf12", model=str(tmp_path / "plain"), out=tmp_path / "out", min_elements=1)
    gnomon.check(tmp_path / "out", against=str(tmp_path / "plain"))
    gnomon.apply("dense", model=str(tmp_path / "out"), out=tmp_path / "back")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "plain"))
    assert all(torch.equal(ours[name].view(torch.int32), theirs[name].view(torch.int32)) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nope"}, "can't build a model of type 'nope'"),
        ({"num_attention_heads": 0}, "can't build a model of type 'llama'"),
        ({"architectures": 5}, "can't build a model of type 'llama'"),
    ],
)
def test_models_that_transformers_can_not_build(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import json

    folder = plain(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(GnomonError, match=message):
        gnomon.apply("nf12", model=str(folder), out=tmp_path / "out", min_elements=1)


def test_figures_of_a_check(tmp_path: Path) -> None:
    gnomon.apply("nf12", model=str(plain(tmp_path)), out=tmp_path / "out", min_elements=1)
    found = gnomon.check(tmp_path / "out")
    figures = found.per_tensor["model.layers.0.mlp.up_proj.weight"]
    assert figures["bits_per_weight"] == pytest.approx(12 + 16 * figures["exception_groups"])
    assert 0 < figures["entropy_joint"] < 16 and figures["scale_exp"] == 112 - figures["base"]


@pytest.mark.slow
def test_smollm2_says_the_same(tmp_path: Path) -> None:
    """The real model: a quarter smaller, equal logits, equal greedy tokens."""
    if smollm2.cached() is None:
        pytest.skip(f"SmolLM2 is not in {smollm2.cache_folder()}: gnomon fetch smollm2-135m")
    from gnomon.core.models import load

    done = gnomon.apply("nf12", model="smollm2-135m", out=tmp_path / "out")
    assert 8 * done.bytes_after / done.weights < 12.3
    found = gnomon.check(tmp_path / "out", against="smollm2-135m")
    assert (found.tensors, found.converted) == (272, 211)
    pair = [load(name, dtype="bfloat16", device="cpu") for name in (str(tmp_path / "out"), "smollm2-135m")]
    ids = pair[0].tokenizer("The gnomon of a sundial casts", return_tensors="pt")
    with torch.no_grad():
        ours, theirs = (one.model(**ids).logits for one in pair)
        assert torch.equal(ours, theirs)  # eight tokens: decoded, then torch's own product
        texts = [one.model.generate(**ids, max_new_tokens=8, do_sample=False).tolist() for one in pair]
    assert texts[0] == texts[1]
