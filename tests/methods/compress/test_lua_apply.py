"""`gnomon apply lua` on disk. Truth: zeros counted in the files, the input's bytes, the allocator in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import tiny_family
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import gnomon
from gnomon import cli
from gnomon.core import safe_files
from gnomon.core.applying import Source
from gnomon.core.checkpoints import open_checkpoint
from gnomon.core.errors import GnomonError
from gnomon.core.manifest import read_manifest
from gnomon.core.tiny import byte_tokenizer
from gnomon.methods.compress.lua import LuaAllocator, collect_importance
from gnomon.methods.compress.lua import apply as applying
from gnomon.methods.compress.lua.apply import LuaSettings, text_for
from gnomon.methods.compress.pruning import load_masks

torch.set_num_threads(1)

TEXT = {"samples": 8, "length": 16, "calib": "generated:30", "steps": 3, "batch": 4}
IDS = torch.arange(3, 11)[None]


def write(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A bfloat16 model with biases and a tokenizer."""
    return write(tmp_path / "plain", tiny_family("qwen2", dtype=torch.bfloat16, vocab_size=259))


def pruned(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: w for n, w in weights.items() if "layers" in n and n.endswith("proj.weight")}


def zeros(weights: dict[str, Tensor]) -> tuple[int, int]:
    """(zeros, numbers) of the matrices."""
    matrices = pruned(weights).values()
    return sum(int((w == 0).sum()) for w in matrices), sum(w.numel() for w in matrices)


def test_the_folder_is_what_the_allocator_gives_and_plain_transformers_loads_it(plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    gnomon.apply("lua", model=plain, out=out, sparsity=0.6, **TEXT)
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    count, total = zeros(after)
    assert count == round(0.6 * total) and zeros(before)[0] < 0.01 * total
    for name, tensor in before.items():
        if name in pruned(before):
            assert torch.equal(after[name], torch.where(after[name] == 0, 0, tensor))
        else:
            assert torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype
    assert json.loads((out / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(plain)
    settings = LuaSettings(sparsity=0.6, **TEXT)
    _, windows, batches = text_for(open_checkpoint(plain), settings)
    alloc = LuaAllocator(model, collect_importance(model, [windows]), 0.6)
    alloc.fit(batches, steps=3)
    alloc.apply()
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        ids = windows[:2]
        assert float(loaded(ids, labels=ids).loss) == float(model(ids, labels=ids).loss)
    step = read_manifest(out).steps[0]
    assert step.settings["sparsity"] == 0.6 and step.settings["calib_tokens"] == 8 * 16
    assert gnomon.check(out).tensors == len(before)


@pytest.mark.parametrize(
    ("pruner", "allocation"),
    [("lua", ""), ("sparsegpt", "lua"), ("magnitude", "alpha"), ("wanda", "owl"), ("wanda", "uniform")],
)
def test_pairs_meet_the_budget(pruner: str, allocation: str, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    gnomon.apply("lua", model=plain, out=out, sparsity=0.55, pruner=pruner, allocation=allocation, **TEXT)
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    count, total = zeros(after)
    assert abs(count - 0.55 * total) <= 1
    moved = [n for n, w in pruned(after).items() if not torch.equal(w, torch.where(w == 0, 0, before[n]))]
    assert bool(moved) == (pruner == "sparsegpt")
    assert all(torch.equal(after[n], w) for n, w in before.items() if n not in pruned(before))


@pytest.mark.parametrize("pruner", ["sparsegpt", "maskllm"])
def test_patterns_come_with_their_masks(pruner: str, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    extra = {**TEXT, "samples": 2}
    gnomon.apply("lua", model=plain, out=out, pattern="2:4", pruner=pruner, **extra)
    after, masks = load_file(out / "model.safetensors"), load_masks(out)
    for name, w in pruned(after).items():
        groups = (w != 0).view(len(w), -1, 4).sum(-1)
        assert int(groups.max()) <= 2 and torch.equal(w, w * masks[name.removesuffix(".weight")])
    assert torch.isfinite(AutoModelForCausalLM.from_pretrained(out)(IDS).logits).all()
    assert gnomon.check(out).tensors == len(after)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_transposed_and_renamed_weights_find_their_masks(family: str, tmp_path: Path):
    model = tiny_family(family, vocab_size=259)
    write(tmp_path / "m", model)
    out = tmp_path / "out"
    gnomon.apply("lua", model=tmp_path / "m", out=out, sparsity=0.7, granularity="column", **TEXT)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    before = dict(model.named_parameters())
    changed = {n for n, w in loaded.named_parameters() if not torch.equal(w, before[n])}
    count = sum(int((loaded.get_parameter(n) == 0).sum()) for n in changed)
    total = sum(loaded.get_parameter(n).numel() for n in changed)
    assert len(changed) == 3 * (4 if family == "gpt2" else 6) and abs(count - 0.7 * total) <= 1
    assert all(loaded.get_parameter(n).ndim == 2 for n in changed)


def test_shards_and_odd_dtypes_are_kept(tmp_path: Path):
    plain = write(tmp_path / "plain", tiny_family("llama", vocab_size=259, dtype=torch.bfloat16))
    weights = load_file(plain / "model.safetensors")
    odd = "model.layers.1.self_attn.q_proj.weight"
    weights[odd] = torch.randn(weights[odd].shape)  # float32 among bfloat16
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    gnomon.apply("lua", model=plain, out=tmp_path / "out", sparsity=0.5, **TEXT)
    after = load_file(tmp_path / "out/model.safetensors")
    kept = after[odd] != 0
    assert after[odd].dtype == torch.float32 and torch.equal(after[odd][kept], weights[odd][kept])
    cut = write(tmp_path / "cut", AutoModelForCausalLM.from_pretrained(plain), max_shard_size="6KB")
    gnomon.apply("lua", model=cut, out=tmp_path / "sharded", sparsity=0.5, **TEXT)
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())["weight_map"]
    assert index == json.loads((cut / "model.safetensors.index.json").read_text())["weight_map"]


def test_by_its_command_and_again_on_the_result(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = "--samples 4 --length 16 --steps 2 --calib generated:30".split()
    out = tmp_path / "D"
    assert (
        cli.main(["apply", "lua", "--model", str(plain), "--sparsity", "0.5", "--out", str(out), *words]) == 0
    )
    assert "sparsity='0.5'" in capsys.readouterr().err
    again = tmp_path / "E"  # zeros that are there count
    assert (
        cli.main(["apply", "lua", "--model", str(out), "--sparsity", "0.7", "--out", str(again), *words]) == 0
    )
    first, second = (load_file(folder / "model.safetensors") for folder in (out, again))
    count, total = zeros(second)
    assert count == round(0.7 * total)
    assert all(bool((second[n][w == 0] == 0).all()) for n, w in pruned(first).items())
    assert [step.method for step in read_manifest(again).steps] == ["lua", "lua"]
    refused(out, tmp_path, "zero already", read=True, sparsity=0.4, **TEXT)


def test_the_same_settings_give_the_same_folder(plain: Path, tmp_path: Path):
    made = {}
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        gnomon.apply("lua", model=plain, out=tmp_path / name, sparsity=0.5, seed=seed, **TEXT)
        made[name] = read_manifest(tmp_path / name).tensors
    assert made["one"] == made["two"] != made["other"]


# -- what is refused ------------------------------------------------------------------------------------


def refused(model: Path, tmp_path: Path, message: str, *, read: bool = False, **settings: Any) -> None:
    """Refused, before a weight is read unless `read`, and without a trace."""

    def fail(entry: Any) -> None:
        raise AssertionError("a weight was read")

    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(GnomonError, match=message):
        if not read:
            patch.setattr(safe_files.Entry, "read", fail)
        gnomon.apply("lua", model=model, out=tmp_path / "refused", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 0}, r"sparsity=0.0 must lie in \(0, 1\)"),
        ({"sparsity": "60"}, "not a percentage"),
        ({"sparsity": 0.5, "pruner": "wand"}, "Did you mean 'wanda'"),
        ({"sparsity": 0.5, "pruner": "wanda", "allocation": "owls"}, "Did you mean 'owl'"),
        ({"sparsity": 0.5, "allocation": "owl"}, "allocation=owl has no use"),
        ({"pattern": "2:4"}, "leaves the pruner lua nothing to choose"),
        ({"pattern": "2-4", "pruner": "wanda"}, "2-4"),
        ({"pattern": "2:4", "pruner": "wanda", "sparsity": 0.6}, "Leave one out"),
        ({"sparsity": 0.5, "pruner": "maskllm"}, "Give a pattern"),
        ({"sparsity": 0.5, "granularity": "rows"}, "Did you mean 'row'"),
        ({"sparsity": 0.5, "importance": "wandas"}, "Did you mean 'wanda'"),
        ({"sparsity": 0.5, "steps": 0}, "steps=0 must be at least 1"),
        ({"sparsity": 0.5, "lr": 0}, "lr=0.0 must be positive"),
        ({"sparsity": 0.5, "calib": ""}, "calib is empty"),
        ({"sparsity": 0.5, "calib": "topix"}, "Did you mean 'topics'"),
        ({"sparsity": 0.5, "sparsit": 1}, "Did you mean 'sparsity'"),
    ],
)
def test_settings_that_can_not_work(settings: dict[str, Any], message: str, plain: Path, tmp_path: Path):
    refused(plain, tmp_path, message, **settings)


def test_a_text_of_less_than_a_window_and_no_tokenizer(plain: Path, tmp_path: Path):
    (tmp_path / "short.txt").write_text("Too short.")
    short = str(tmp_path / "short.txt")
    refused(
        plain, tmp_path, r"short.txt has 11 tokens, fewer than one window of 64", sparsity=0.5, calib=short
    )
    tiny_family("llama").save_pretrained(tmp_path / "m")
    refused(tmp_path / "m", tmp_path, "lua reads calibration text, but the tokenizer", sparsity=0.5, **TEXT)
    gnomon.apply(
        "lua",
        model=tmp_path / "m",
        out=tmp_path / "o",
        sparsity=0.5,
        pruner="magnitude",
        allocation="uniform",
    )
    assert zeros(load_file(tmp_path / "o/model.safetensors"))[0] > 0


def test_other_models_are_refused(tmp_path: Path):
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=259)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    refused(tmp_path / "t5", tmp_path, "no decoder-only language model", sparsity=0.5)


def test_a_failure_half_way_leaves_nothing(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(source: Source, *_: Any) -> None:
        raise GnomonError("the disk is on fire")

    monkeypatch.setattr(applying, "write_config", broken)
    refused(plain, tmp_path, "on fire", read=True, sparsity=0.5, **TEXT)


def test_without_a_share_half_is_removed() -> None:
    assert LuaSettings().share == 0.5 and LuaSettings(pruner="wanda", pattern="1:4").share == 0.75
