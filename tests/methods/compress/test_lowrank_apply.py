"""`gnomon apply lowrank` on disk. Source of truth: `compress_lowrank` of the same model in memory, and the input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import tiny_family
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import gnomon
import gnomon.hf
from gnomon import cli
from gnomon.core import safe_files
from gnomon.core.data import corpus
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.manifest import read_manifest
from gnomon.core.tiny import byte_tokenizer
from gnomon.methods.compress.lowrank import METHODS, compress_lowrank, kept_share, ranks_of

torch.set_num_threads(1)

IDS = torch.arange(3, 11)[None]
TEXT = {"samples": 8, "length": 16, "calib": "generated:30"}


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A bfloat16 model with biases and a tokenizer."""
    return write(tmp_path / "plain", tiny_family("qwen2", dtype=torch.bfloat16, vocab_size=259))


def write(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    return found


def test_svd_is_what_memory_gives(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = gnomon.apply("lowrank", model=plain, out=out, keep=0.5)
    model = compress_lowrank(AutoModelForCausalLM.from_pretrained(plain), "svd", 0.5)
    with torch.no_grad():
        assert torch.equal(logits(out), model(IDS).logits)
        assert not torch.allclose(logits(out), AutoModelForCausalLM.from_pretrained(plain)(IDS).logits)
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"]) == ("gnomon_lowrank", "qwen2")
    assert config["gnomon_weights"] == "gnomon.safetensors"
    assert config["quantization_config"]["ranks"] == ranks_of(model)
    state = model.state_dict()
    stored = load_file(out / "gnomon.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    assert done.bytes_after == sum(tensor.nbytes for tensor in stored.values()) < done.bytes_before
    assert done.converted == len(ranks_of(model))
    [step] = done.steps
    assert step.settings == {
        "method": "svd",
        "keep": 0.5,
        "calib": "mixed",
        "samples": 256,
        "length": 2048,
        "seed": 0,
    }
    assert not (out / "model.safetensors").exists() and (out / "tokenizer_config.json").exists()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_by_its_command(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m", tiny_family("llama", vocab_size=259, num_hidden_layers=1))
    (tmp_path / "text.txt").write_text("The gnomon stands still; the shadow moves. " * 9)
    out = tmp_path / "D"
    words = (
        f"apply lowrank --model {tmp_path / 'm'} --method {method} --keep 0.6 --out {out} --samples 6".split()
    )
    assert cli.main([*words, "--length", "12", "--calib", str(tmp_path / "text.txt")]) == 0
    assert f"method='{method}', keep='0.6'" in capsys.readouterr().err
    assert cli.main(["check", str(out)]) == 0
    assert "lowrank rank\t" in capsys.readouterr().out
    settings = read_manifest(out).steps[0].settings
    assert settings["method"] == method and "text.txt@sha256:" in settings["calib"]
    assert str(tmp_path) not in (out / "gnomon.json").read_text()
    if method != "svd":
        assert settings["calib_sha256"] == corpus(str(tmp_path / "text.txt")).sha256
        assert settings["calib_tokens"] == 6 * 12
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(ranks_of(model)) >= 6 and 0.4 < kept_share(model) <= 0.6
    assert torch.isfinite(model(IDS).logits).all()


def test_matrices_of_low_rank_lose_nothing(tmp_path: Path) -> None:
    """Each W is a product of rank 2 already, and .5 keeps at least 2: the function must not change."""
    model = tiny_family("llama", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            m, n = parameter.shape
            parameter.data = torch.randn(m, 2) @ torch.randn(2, n) / n**0.5
    write(tmp_path / "m", model)
    gnomon.apply("lowrank", model=tmp_path / "m", out=tmp_path / "out", keep=0.5)
    with torch.no_grad():
        assert torch.allclose(logits(tmp_path / "out"), model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_what_is_not_compressed_keeps_its_bits_and_dtype(plain: Path, tmp_path: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    weights["model.norm.weight"] = torch.randn(16)  # float32 among bfloat16, with bits that bfloat16 hasn't
    weights["model.layers.1.self_attn.q_proj.weight"] = weights[
        "model.layers.1.self_attn.q_proj.weight"
    ].float()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    gnomon.apply("lowrank", model=plain, out=tmp_path / "out", method="svd_llm_lora", keep=0.5, **TEXT)
    stored = load_file(tmp_path / "out/gnomon.safetensors")
    for name, tensor in weights.items():
        if "_proj.weight" not in name:
            assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor)
    assert stored["model.layers.1.self_attn.q_proj.a"].dtype == torch.float32
    assert stored["model.layers.1.self_attn.k_proj.b"].dtype == torch.bfloat16


def test_shards_are_kept(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", tiny_family("llama", dtype=torch.bfloat16), max_shard_size="4KB")
    gnomon.apply("lowrank", model=plain, out=tmp_path / "out", keep=0.5)
    index = json.loads((tmp_path / "out/gnomon.safetensors.index.json").read_text())["weight_map"]
    before = json.loads((plain / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == len(set(before.values())) > 1
    for name, file in before.items():
        for part in [name] if name in index else [name.replace(".weight", f".{one}") for one in "ab"]:
            assert index[part] == file.replace("model", "gnomon")
    assert gnomon.check(tmp_path / "out").converted == 2 * 21
    model = compress_lowrank(AutoModelForCausalLM.from_pretrained(plain), "svd", 0.5)
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), model(IDS).logits)


def test_the_same_settings_give_the_same_folder(plain: Path, tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        gnomon.apply("lowrank", model=plain, out=tmp_path / name, method="svd_llm", seed=seed, **TEXT)
        made[name] = read_manifest(tmp_path / name).tensors
    assert made["one"] == made["two"] != made["other"]


def test_windows_are_never_longer_than_the_model_reads(plain: Path, tmp_path: Path) -> None:
    gnomon.apply(
        "lowrank", model=plain, out=tmp_path / "out", method="svd_llm", samples=2, calib=TEXT["calib"]
    )
    assert read_manifest(tmp_path / "out").steps[0].settings["calib_tokens"] == 2 * 64


# -- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"keep=0.0 is the share .* must lie in \(0, 1\]"),
        ({"keep": "1.2"}, r"keep=1.2 .* must lie in \(0, 1\]"),
        ({"keep": float("nan")}, "keep=nan"),
        ({"keep": 1}, "keep=1 leaves the model as it is"),
        ({"method": "svdllm"}, "Unknown low-rank method 'svdllm'. Did you mean 'svd_llm'"),
        ({"kep": 0.5}, "Unknown setting of lowrank: 'kep'. Did you mean 'keep'"),
        ({"method": "asvd", "keep": 0.2}, "keep=0.2"),
        ({"method": "svd_llm", "calib": "topix"}, "Unknown text recipe 'topix'. Did you mean 'topics'"),
        ({"method": "svd_llm", "calib": "./none.txt"}, "There is no file or folder ./none.txt"),
        ({"calib": ""}, "calib is empty"),
        ({"samples": 0}, "samples=0 must be at least 1"),
        ({"length": 1}, "length=1 must be at least 2"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_settings_that_can_not_work(
    settings: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    refused(plain, tmp_path, message, **settings)


def refused(model: Path, tmp_path: Path, message: str, **settings: Any) -> None:
    """Refused, before a weight is read."""

    def read(entry: Any) -> None:
        raise AssertionError("a weight was read")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(GnomonError, match=message):
        patch.setattr(safe_files.Entry, "read", read)
        gnomon.apply("lowrank", model=model, out=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_text_of_less_than_a_window(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    short = str(tmp_path / "short.txt")
    refused(
        plain, tmp_path, r"short.txt has 11 tokens, fewer than one window of 64\.", method="dobi", calib=short
    )


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_family("llama").save_pretrained(tmp_path / "m")
    why = "svd_llm reads calibration text, but the tokenizer of"
    refused(tmp_path / "m", tmp_path, why, method="svd_llm", **TEXT)
    gnomon.apply("lowrank", model=tmp_path / "m", out=tmp_path / "out")  # svd needs none


SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: BertForMaskedLM(BertConfig(**SMALL, intermediate_size=16)),
            "BertForMaskedLM is no decoder-only",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=40, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
            ),
            "T5ForConditionalGeneration is no decoder-only",
        ),
        (lambda: tiny_family("llama").model, "LlamaModel is no decoder-only"),
        (lambda: tiny_family("gpt2"), "c_attn is a Conv1D, and low rank takes plain nn.Linear only"),
    ],
    ids=["encoder", "encoder-decoder", "headless", "conv1d"],
)
def test_models_that_low_rank_is_not_for(model: Any, message: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "m", model()), tmp_path, message)


def test_quantized_and_converted_models(plain: Path, tmp_path: Path) -> None:
    gnomon.apply("nf12", model=plain, out=tmp_path / "nf12", min_elements=1)
    refused(tmp_path / "nf12", tmp_path, "gnomon_nf12 already, .* Turn it back first: gnomon apply dense")
    gnomon.apply("lowrank", model=plain, out=tmp_path / "low")
    refused(tmp_path / "low", tmp_path, "gnomon_lowrank already, .* Use the model that it was made from")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (plain / "config.json").write_text(json.dumps(config))
    refused(plain, tmp_path, r"plain is quantized \(fp8\)")


def test_there_is_no_way_back(plain: Path, tmp_path: Path) -> None:
    gnomon.apply("lowrank", model=plain, out=tmp_path / "low")
    with pytest.raises(UsageError, match=r"the model itself was changed, .*lowrank\.to_dense\(AutoModel"):
        gnomon.apply("dense", model=tmp_path / "low", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_numbers(plain: Path, tmp_path: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    with pytest.raises(GnomonError, match=r"up_proj\.weight holds NaN"):
        gnomon.apply("lowrank", model=plain, out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]


# -- gnomon check ---------------------------------------------------------------------------------------


@pytest.fixture
def low(plain: Path, tmp_path: Path) -> Path:
    gnomon.apply("lowrank", model=plain, out=tmp_path / "low", keep=0.5)
    return tmp_path / "low"


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table["ranks"].update({Q: 3}),
            rf"{Q} has factors \[16, 4\] and \[4, 16\], .* of rank 3",
        ),
        (lambda table: table["ranks"].pop(Q), rf"{Q} has factors .* but no rank in config.json"),
        (lambda table: table["ranks"].update({"model.layers.9.x": 3}), r"model.layers.9.x.a is missing"),
        (lambda table: table["ranks"].update({Q: True}), rf"says that '{Q}' has rank True"),
        (lambda table: table["ranks"].update({Q: 0}), rf"says that '{Q}' has rank 0"),
        (lambda table: table.update(ranks=None), "has no table of ranks"),
        (lambda table: table.update(version=2), r"version=2; this Gnomon reads 'lowrank' and 1"),
        (lambda table: table.update(quant_method="fp8"), "quant_method='fp8'"),
    ],
)
def test_a_configuration_that_was_changed(change: Any, message: str, low: Path) -> None:
    config = json.loads((low / "config.json").read_text())
    change(config["quantization_config"])
    (low / "config.json").write_text(json.dumps(config))
    with pytest.raises(GnomonError, match=message):
        gnomon.check(low)
    with pytest.raises(GnomonError):
        AutoModelForCausalLM.from_pretrained(low)


def test_one_flipped_bit(low: Path) -> None:
    data = bytearray((low / "gnomon.safetensors").read_bytes())
    data[-1] ^= 1
    (low / "gnomon.safetensors").write_bytes(data)
    with pytest.raises(GnomonError, match=r"SHA-256 .* in gnomon.json"):
        gnomon.check(low)
