"""What is written and read again. Sources of truth: plain `from_pretrained`, bits set by hand, the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import tiny_family
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gnomon.core.errors import GnomonError, UsageError
from gnomon.methods.compress.pruning import (
    Pattern,
    load_masks,
    matrix,
    prunable,
    prune,
    save_pruned,
    to_semi_structured,
)
from gnomon.methods.compress.pruning.export import MASKS, require_pattern, save_masks


def ids() -> Tensor:
    return torch.randint(3, 40, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folder_that_anything_loads(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    report = prune(model, "wanda", 0.6, calib=[ids()])
    save_pruned(model, tmp_path / "out", report)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids()).logits, model(ids()).logits, rtol=0, atol=0)
    zeros = sum(int((module.weight == 0).sum()) for module in prunable(again).values())
    assert zeros == report.removed and zeros / report.weights == report.sparsity
    masks = load_masks(tmp_path / "out")
    assert masks.keys() == report.masks.keys()
    for name, mask in masks.items():
        assert mask.dtype == torch.bool and torch.equal(mask, report.masks[name])
        assert not bool(matrix(prunable(again)[name])[~mask].any())
    with pytest.raises(GnomonError, match="exists and is not empty"):
        save_pruned(model, tmp_path / "out", report)
    save_pruned(model, tmp_path / "out", report, force=True)


def test_bits_by_hand(tmp_path: Path) -> None:
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [0, 3, 9]] = True
    save_masks({"a": mask}, tmp_path / MASKS, pattern=Pattern(2, 4))
    assert load_file(tmp_path / MASKS)["a"].tolist() == [[0b00001001, 0b00000010]]
    assert torch.equal(load_masks(tmp_path)["a"], mask)


def test_a_model_that_was_trained_since_is_refused(tmp_path: Path) -> None:
    model = tiny_family("llama")
    report = prune(model, "magnitude", 0.5)
    module = prunable(model)["model.layers.0.mlp.up_proj"]
    matrix(module).add_(0.1)
    with pytest.raises(UsageError, match="up_proj has weights where its mask has none"):
        save_pruned(model, tmp_path / "out", report)
    assert not (tmp_path / "out").exists() and not any(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_family("llama")
    report = prune(model, "magnitude", 0.5)

    def full(self: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(OSError, match="no space left"):
        save_pruned(model, tmp_path / "out", report)
    assert not any(tmp_path.iterdir())


def test_mask_files_from_anywhere(tmp_path: Path) -> None:
    with pytest.raises(GnomonError, match="no mask file"):
        load_masks(tmp_path)
    path = tmp_path / MASKS
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!")
    with pytest.raises(GnomonError, match="damaged"):
        load_masks(path)
    save_file({"a": torch.zeros(2, 1, dtype=torch.uint8)}, path)
    with pytest.raises(GnomonError, match="no mask file of version 1"):
        load_masks(path)
    right = {"format": "gnomon.masks", "version": "1", "pattern": ""}
    for inputs in ('{"a": 9}', '{"a": "8"}', "{}"):
        save_file({"a": torch.zeros(2, 1, dtype=torch.uint8)}, path, metadata=right | {"inputs": inputs})
        with pytest.raises(GnomonError, match="the mask of a doesn't fit"):
            load_masks(path)


def test_patterns_are_checked() -> None:
    model = tiny_family("llama")
    report = prune(model, "sparsegpt", pattern="2:4", calib=[ids()])
    require_pattern(report.masks, Pattern(2, 4))
    require_pattern(report.masks, Pattern(4, 8))  # follows from it
    with pytest.raises(UsageError, match="keeps 2 of some 4 neighbouring weights, but 1:4 allows 1"):
        require_pattern(report.masks, Pattern(1, 4))
    loose = prune(tiny_family("llama"), "wanda", 0.5, calib=[ids()])
    with pytest.raises(UsageError, match=r"of some 4 neighbouring weights, but 2:4 allows 2"):
        to_semi_structured(tiny_family("llama"), loose.masks)


def test_semi_structured_tensors_need_a_gpu() -> None:
    model = tiny_family("llama")
    with pytest.raises(UsageError, match="No matrix of the model has a 2:4 pattern"):
        to_semi_structured(model)
    report = prune(model, "wanda", pattern="2:4", calib=[ids()])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for masks in (report.masks, None):
        with pytest.raises(
            UsageError, match=r"q_proj is on cpu, but semi-structured tensors need an NVIDIA GPU"
        ):
            to_semi_structured(model, masks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.gpu
def test_semi_structured_products() -> None:
    model = tiny_family("llama", hidden_size=64, intermediate_size=128, dtype=torch.bfloat16).cuda()
    report = prune(model, "wanda", pattern="2:4", calib=[ids()])
    with torch.no_grad():
        dense = model(ids().cuda()).logits.float()
        changed = to_semi_structured(model, {n: m for n, m in report.masks.items() if len(m) % 32 == 0})
        sparse = model(ids().cuda()).logits.float()
    assert changed
    assert (
        float((sparse - dense).norm() / dense.norm()) < 2e-2
    )  # two sums of bfloat16 products in other orders
