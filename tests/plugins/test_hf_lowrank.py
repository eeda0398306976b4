"""Low-rank folders in Transformers. Source of truth: the model compressed in memory, bit for bit."""

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
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import gnomon
import gnomon.hf
from gnomon.core.errors import GnomonError, UsageError
from gnomon.methods.compress.lowrank import LowRankLinear, compress_lowrank, ranks_of, to_dense
from gnomon.methods.compress.lowrank.stored import stated
from gnomon.plugins.hf_lowrank import LowRankConfig

torch.set_num_threads(1)

IDS = torch.arange(3, 11)[None]
LINEAR = [family for family in FAMILIES if family != "gpt2"]  # whose Conv1D is refused


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def stored(tmp_path: Path, family: str = "llama", **settings: Any) -> tuple[Any, Path, Path]:
    """(the model compressed in memory, the folder of the ordinary one, that of low rank)."""
    shards = {"max_shard_size": settings.pop("max_shard_size")} if "max_shard_size" in settings else {}
    model = tiny_family(family, **{"dtype": torch.bfloat16, "num_hidden_layers": 2, **settings})
    plain, folder = tmp_path / "plain", tmp_path / "low"
    model.save_pretrained(plain, **shards)
    gnomon.apply("lowrank", model=plain, out=folder, keep=0.5)
    return compress_lowrank(AutoModelForCausalLM.from_pretrained(plain), keep=0.5), plain, folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("family", LINEAR)
def test_every_family_computes_what_it_did_in_memory(family: str, tmp_path: Path) -> None:
    memory, _, folder = stored(tmp_path, family)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert type(model) is type(memory) and model.dtype == torch.bfloat16 and not model.training
    assert ranks_of(model) == ranks_of(memory) and len(ranks_of(model)) >= 8
    assert torch.equal(logits(model), logits(memory))
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert torch.equal(logits(wide), logits(memory.float()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["50GB", "3KB"])
def test_saving_writes_the_same_form_again(tied: bool, size: str, tmp_path: Path) -> None:
    memory, _, folder = stored(tmp_path, "qwen2", tie_word_embeddings=tied, max_shard_size="4KB")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    again = tmp_path / "again"
    model.save_pretrained(again, max_shard_size=size)
    config = json.loads((again / "config.json").read_text())
    assert config["model_type"] == "gnomon_lowrank" and config["base_model_type"] == "qwen2"
    assert "transformers_weights" not in config and not list(again.glob("model*"))
    assert stated(config) == stated(json.loads((folder / "config.json").read_text()))
    assert (again / "gnomon.safetensors.index.json").exists() == (size == "3KB")
    reloaded, report = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(reloaded), logits(memory))
    found = gnomon.check(again, against=str(folder))
    assert [step.method for step in found.steps] == ["lowrank"] and found.steps[0].settings["keep"] == 0.5
    model.save_pretrained(again)  # over itself: nothing of the former layout stays
    assert gnomon.check(again).tensors == found.tensors
    assert not list(again.glob("gnomon-*")) and not list(again.glob(".*"))


def test_a_loaded_model_trains_and_saves_what_it_learnt(tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    assert not model.is_quantized  # what trainers, `half` and others ask
    before = logits(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert model(IDS, labels=IDS).loss < loss
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(logits(again), logits(model.eval())) and not torch.equal(logits(again), before)
    gnomon.check(tmp_path / "trained")
    assert {parameter.dtype for parameter in model.bfloat16().parameters()} == {torch.bfloat16}


def test_the_trainer_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    _, _, folder = stored(tmp_path, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = copy.deepcopy(model.model.layers[0].mlp.up_proj.a.data)
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(logits(again), logits(model.eval()))
    assert not torch.equal(again.model.layers[0].mlp.up_proj.a, before)


@pytest.mark.parametrize("way", [to_dense, lambda model: model.dequantize()], ids=["to_dense", "dequantize"])
def test_dense_models_are_ordinary_ones(way: Any, tmp_path: Path) -> None:
    memory, plain, folder = stored(tmp_path, "qwen2", tie_word_embeddings=True)
    model = way(AutoModelForCausalLM.from_pretrained(folder))
    assert not any(isinstance(module, LowRankLinear) for module in model.modules())
    expected = to_dense(memory)
    assert torch.equal(logits(model), logits(expected))
    for one, name in ((model, "dense"), (expected, "from-memory")):
        one.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model_type"] == "qwen2" and "quantization_config" not in config
    shapes = [
        {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()}
        for path in (plain, tmp_path / "dense", tmp_path / "from-memory")
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(reloaded), logits(expected))
    with pytest.raises(ValueError, match="dequantize"):
        reloaded.dequantize()


def test_a_model_compressed_in_memory(tmp_path: Path) -> None:
    model = compress_lowrank(tiny_family("phi", dtype=torch.bfloat16), keep=0.5)
    with pytest.raises(UsageError, match=r"gnomon\.hf\.save_lowrank\(model, folder\), or to_dense first"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    gnomon.hf.save_lowrank(model, tmp_path / "out", max_shard_size="4KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    [step] = gnomon.check(tmp_path / "out").steps
    assert step.method == "lowrank" and "memory" in step.settings["made"]
    with pytest.raises(UsageError, match=r"no low-rank layers\. Call compress_lowrank first"):
        gnomon.hf.save_lowrank(tiny_family("llama"), tmp_path / "none")
    with pytest.raises(UsageError, match="on the meta device"):
        gnomon.hf.save_lowrank(model.to("meta"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_maps(device_map: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    memory, _, folder = stored(tmp_path, "gemma")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    if model.device.type == "cpu":
        assert torch.equal(logits(model), logits(memory))


def test_layers_on_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    memory, _, folder = stored(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "off")
    assert torch.equal(logits(model), logits(memory))


def test_the_base_model_alone(tmp_path: Path) -> None:
    memory, _, folder = stored(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        ours = AutoModel.from_pretrained(folder, dtype=dtype)
        assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
        with torch.no_grad():
            memory = (
                memory if dtype == torch.bfloat16 else memory.float()
            )  # which spares the rotary embedding
            expected = memory.model(IDS).last_hidden_state
            assert torch.equal(ours(IDS).last_hidden_state, expected)
        ours.save_pretrained(tmp_path / "base")
        again = AutoModel.from_pretrained(tmp_path / "base", dtype=dtype)
        with torch.no_grad():
            assert torch.equal(again(IDS).last_hidden_state, expected)


def test_copies_save_themselves_or_refuse(tmp_path: Path) -> None:
    memory, _, folder = stored(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    twin = copy.deepcopy(model)
    twin.model.norm.weight.data.zero_()
    twin.save_pretrained(tmp_path / "twin")
    assert not logits(AutoModelForCausalLM.from_pretrained(tmp_path / "twin")).any()
    assert torch.equal(logits(model), logits(memory))
    thawed = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(thawed), logits(memory))
    with pytest.raises(ValueError, match="not serializable"):
        thawed.save_pretrained(tmp_path / "thawed")


@pytest.mark.parametrize("options", [{"push_to_hub": True}, {"variant": "fp8"}])
def test_saving_refuses_what_it_can_not_do(options: dict[str, Any], tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="can't be saved with"):
        model.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_ordinary_model_is_not_compressed_while_it_is_loaded(tmp_path: Path) -> None:
    _, plain, _ = stored(tmp_path)
    with pytest.raises(UsageError, match="loaded from a folder that gnomon apply lowrank wrote"):
        AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=LowRankConfig(ranks={"x": 1}, quant_method="lowrank", version=1)
        )


Q = "model.layers.1.self_attn.q_proj"


def edit(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["quantization_config"]["ranks"].pop(Q), rf"{Q} has factors .* but no rank"),
        (lambda c: c["quantization_config"]["ranks"].update({"model.norm": 3}), "model.norm.a is missing"),
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "quant_method='fp8', but must say 'lowrank'"),
        (lambda c: c.update(quantization_config=5), "quant_method=5, but must say 'lowrank'"),
        (lambda c: c.update(hidden_size=32), r"proj is 16 x \d+ in the files, but \d+ x \d+ in LlamaFor"),
        (lambda c: c.update(vocab_size=44), r"embed_tokens.weight is \[40, 16\] in the files, but \[44, 16\]"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path)
    edit(folder, change)
    with pytest.raises(GnomonError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "gnomon.safetensors")
    change(weights)
    save_file(weights, folder / "gnomon.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(f"{Q}.a"), rf"{Q}.a is missing"),
        (lambda w: w.pop(f"{Q}.b"), rf"{Q}.b is missing"),
        (lambda w: w.pop(f"{Q}.bias"), rf"{Q}.bias is missing"),
        (lambda w: w.update({f"{Q}.a": torch.zeros(16, 3)}), rf"{Q} has factors \[16, 3\] and \[4, 16\]"),
        (lambda w: w.update({f"{Q}.a": torch.zeros(12, 4)}), rf"{Q} is 12 x 16 in the files, but 16 x 16"),
        (lambda w: w.update({f"{Q}.bias": torch.zeros(3)}), rf"{Q}.bias is \[3\] in the files, but \[16\]"),
    ],
)
def test_damaged_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path, "qwen2")
    rewrite(folder, change)
    with pytest.raises(GnomonError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_linear_layers_elsewhere_stay_plain(tmp_path: Path) -> None:
    _, _, folder = stored(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model.lm_head) is nn.Linear


def test_experts_that_are_merged_on_loading_stay_what_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=2, vocab_size=40, num_local_experts=4)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    gnomon.apply("lowrank", model=tmp_path / "plain", out=tmp_path / "low", keep=0.5)
    before, after = (
        load_file(path)
        for path in (tmp_path / "plain/model.safetensors", tmp_path / "low/gnomon.safetensors")
    )
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 24 and all(torch.equal(after[name], before[name]) for name in experts)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "low", output_loading_info=True)
    assert not any(report.values()) and len(ranks_of(model)) == 8
    memory = compress_lowrank(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), keep=0.5)
    assert torch.equal(logits(model), logits(memory))
    model.save_pretrained(tmp_path / "again")
    gnomon.check(tmp_path / "again", against=tmp_path / "low")
