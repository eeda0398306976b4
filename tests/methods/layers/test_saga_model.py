"""SAGA in whole models. Sources of truth: the ordinary model with the same weights, the full forward pass, the logits
before saving, a plain Transformers without Gnomon.
"""

from __future__ import annotations

import copy
import doctest
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import tiny_family
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import gnomon
import gnomon.hf
from gnomon import cli
from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.models import load
from gnomon.core.scoring import token_nll
from gnomon.core.seeding import seeded
from gnomon.core.tiny import byte_tokenizer
from gnomon.methods.layers import saga
from gnomon.methods.layers.saga import (
    SagaConfig,
    align_model,
    configure,
    default_key_heads,
    saga_config,
    selection_stats,
    to_saga,
)
from gnomon.methods.layers.saga.align import pairs, unpaired
from gnomon.methods.layers.saga.calibrate import key_moments
from gnomon.methods.layers.saga.hf import SagaStaticCache
from gnomon.methods.layers.saga.model import attentions

torch.set_num_threads(1)
IDS = torch.arange(3, 35).view(2, 16)
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ONE = SagaConfig(num_key_heads=1, num_value_heads=2, top_n=4)


@pytest.fixture(autouse=True)
def no_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


def scratch(n: int = 4, **more: Any) -> Any:
    """A SAGA Llama (4, 1, 2) from its configuration alone."""
    config = saga.SagaLlamaConfig(**SMALL, num_key_heads=1, saga={"top_n": n, **more})
    with seeded(0):
        return saga.SagaLlamaForCausalLM(config).eval()


def logits(model: nn.Module, ids: Tensor = IDS, **more: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **more).logits
    return found


# ------------------------------------------------------------------------------------------------- the model itself


def test_the_example_of_the_package() -> None:
    outcome = doctest.testmod(saga)
    assert outcome.failed == 0 and outcome.attempted >= 10


def test_from_a_configuration_alone() -> None:
    model = scratch()
    sizes = [(a.q_proj.out_features, a.k_proj.out_features, a.v_proj.out_features) for a in attentions(model)]
    assert sizes == [(16, 4, 8)] * 2 and saga_config(model) == ONE
    assert 0.2 < float(attentions(model)[0].k_proj.weight.detach().std()) < 0.4  # initializer_range
    model.train()(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    plain = saga.SagaLlamaForCausalLM(saga.SagaLlamaConfig(**SMALL))
    assert saga_config(plain) == SagaConfig(num_key_heads=2, num_value_heads=2)
    control = {"num_key_value_heads": 1, "num_key_heads": 2, "saga": {"allow_fewer_values": True}}
    assert logits(saga.SagaLlamaForCausalLM(saga.SagaLlamaConfig(**SMALL | control))).shape == (2, 16, 40)
    by_auto = AutoModelForCausalLM.from_config(saga.SagaLlamaConfig(**SMALL, num_key_heads=1))
    assert type(by_auto) is saga.SagaLlamaForCausalLM
    assert isinstance(saga.SagaLlamaModel(saga.SagaLlamaConfig(**SMALL)), transformers.LlamaModel)


def test_equal_heads_are_the_ordinary_model() -> None:
    plain = tiny_family("llama")
    same = to_saga(plain, SagaConfig(num_key_heads=2, num_value_heads=2, top_n=99, sparse_prefill=True))
    torch.testing.assert_close(logits(same), logits(plain))
    assert plain.config.model_type == "llama" and type(plain) is LlamaForCausalLM  # a copy was converted
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), plain.parameters(), strict=True))
    greedy = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(same.generate(IDS, **greedy), plain.generate(IDS, **greedy))
    configure(same, top_n=3)
    assert not torch.allclose(logits(same), logits(plain), atol=1e-2)


def test_eager_and_sdpa_agree_and_weights_come_out() -> None:
    for model in (scratch(), scratch(sparse_prefill=True)):
        mask = torch.ones_like(IDS)
        mask[0, :3] = 0
        fast = logits(model, attention_mask=mask)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(IDS, attention_mask=mask, output_attentions=True, output_hidden_states=True)
        torch.testing.assert_close(out.logits[:, 3:], fast[:, 3:], atol=1e-4, rtol=1e-4)
        assert len(out.hidden_states) == 3 and out.attentions[0].shape == (2, 4, 16, 16)
        assert int((out.attentions[0] > 0).sum(-1).max()) == (4 if saga_config(model).sparse_prefill else 16)
        assert not out.attentions[0][0, :, 3:, :3].any()  # padding
    again = saga.SagaLlamaForCausalLM._from_config(model.config, attn_implementation="eager")
    assert again.config._attn_implementation == "saga_eager"
    with pytest.raises(UsageError, match="flash_attention_2' can't attend"):
        model.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_hidden_states_come_out_of_a_converted_model(family: str) -> None:
    plain, same = tiny_family(family), SagaConfig(num_key_heads=2, num_value_heads=2, top_n=99)
    made = [to_saga(model, same) for model in (plain, plain.base_model)]
    made += [pickle.loads(pickle.dumps(model)) for model in made]  # never passed through __init__
    with torch.no_grad():
        truth = plain(input_ids=IDS, output_hidden_states=True).hidden_states
        for model in made:
            states = model(input_ids=IDS, output_hidden_states=True).hidden_states
            assert len(states) == 4
            torch.testing.assert_close(states, truth)


@pytest.mark.parametrize("selector", ["strided", "quest", "shared_max", "window"])
@pytest.mark.parametrize("static", [False, True])
def test_cached_decoding_equals_the_full_pass(selector: str, static: bool) -> None:
    model = scratch(selector=selector, sparse_prefill=True)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0  # padding on the left
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    full = logits(model, attention_mask=mask, position_ids=positions)
    cache: Any = SagaStaticCache(model.config, 20) if static else DynamicCache(config=model.config)
    steps = []
    for t in range(16):
        now = slice(t, t + 1)
        given = {"attention_mask": mask[:, : t + 1], "position_ids": positions[:, now]}
        steps.append(logits(model, IDS[:, now], past_key_values=cache, **given))
    found = torch.cat(steps, 1)
    torch.testing.assert_close(found[0], full[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1, 5:], full[1, 5:], atol=1e-4, rtol=1e-4)
    layer = cache.layers[0]
    assert (layer.keys.shape[1], layer.values.shape[1]) == (1, 2)
    dense = copy.deepcopy(model)
    configure(dense, selector="dense")
    assert not torch.allclose(logits(dense)[0], full[0], atol=1e-2)


def test_a_dense_prompt_then_sparse_steps() -> None:
    model = scratch()
    dense = copy.deepcopy(model)
    configure(dense, selector="dense")
    cache = DynamicCache(config=model.config)
    assert torch.equal(logits(model, past_key_values=cache), logits(dense))
    sparse = logits(model, IDS[:, :1], past_key_values=cache)
    full = torch.cat([IDS, IDS[:, :1]], 1)
    assert not torch.allclose(sparse[:, 0], logits(dense, full)[:, -1], atol=1e-2)
    configure(model, dense_layers=2)
    again = DynamicCache(config=model.config)
    logits(model, past_key_values=again)
    step = logits(model, IDS[:, :1], past_key_values=again)
    torch.testing.assert_close(step[:, 0], logits(dense, full)[:, -1], atol=1e-4, rtol=1e-4)


def test_generation_with_every_cache() -> None:
    model = scratch(sparse_prefill=True)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    greedy = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
    expected = model.generate(IDS, use_cache=False, **greedy)
    assert torch.equal(model.generate(IDS, **greedy), expected)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **greedy), expected)
    assert torch.equal(
        model.generate(IDS, past_key_values=SagaStaticCache(model.config, 30), **greedy), expected
    )
    beams = model.generate(IDS, num_beams=2, **greedy)
    assert beams.shape == (2, 24)
    with pytest.raises(UsageError, match="first forward pass"):
        SagaStaticCache(model.config, 8).early_initialization(1, 1, 4, torch.float32, torch.device("cpu"))


def test_statistics_of_the_choice() -> None:
    model = scratch(sparse_prefill=True)
    with selection_stats(model, skip=8) as found:
        logits(model)
    assert list(found) == [0, 1] and all(one.rows == 2 * 4 * 8 and one.kept == 4 for one in found.values())
    assert all(0 < one.mass < 1 and 0 < one.recall < 1 for one in found.values())
    configure(model, selector="exact")
    with selection_stats(model, skip=8) as best:
        logits(model)
    assert best[0].recall == 1 and best[0].mass > found[0].mass
    with selection_stats(model), pytest.raises(UsageError, match="already"), selection_stats(model):
        pass
    assert all(attn.saga_watch is None for attn in attentions(model))


def test_configure() -> None:
    model = scratch()
    after = configure(model, top_n=5, selector="quest", always_keep=(1, 1))
    assert saga_config(model) == after and model.config.layers_config == after
    for bad, said in (
        ({"num_key_heads": 2}, "matter of weights"),
        ({"topn": 3}, "no field 'topn'"),
        ({"top_n": 0}, "top_n=0"),
    ):
        with pytest.raises(UsageError, match=said):
            configure(model, **bad)
    assert saga_config(model) == after
    with pytest.raises(UsageError, match="is no SAGA model"):
        configure(tiny_family("llama"), top_n=3)


# -------------------------------------------------------------------------------------------------------- folders


def test_saving_and_loading(tmp_path: Path) -> None:
    model = scratch(oversample=2, always_keep=(1, 1), sparse_prefill=True)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert {p.name for p in tmp_path.glob("*.json")} >= {"gnomon.safetensors.index.json", "config.json"}
    assert not list(tmp_path.glob("model*"))
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and type(again) is saga.SagaLlamaForCausalLM
    assert torch.equal(logits(again), logits(model)) and saga_config(again) == saga_config(model)
    headless = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(headless(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (
        torch.nn.functional.cosine_similarity(logits(narrow).float().flatten(), logits(model).flatten(), 0)
        > 0.9
    )
    again.save_pretrained(tmp_path / "twice")
    byte_tokenizer().save_pretrained(tmp_path / "twice")
    loaded = load(str(tmp_path / "twice")).model
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))
    with pytest.raises(UsageError, match="push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)


FRESH = """
import sys, gnomon.methods.layers.saga
print("transformers" in sys.modules)
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
torch.set_num_threads(1)
folder = sys.argv[1]
for one in (AutoConfig, AutoModelForCausalLM, LlamaForCausalLM):
    try:
        print("LOADED", one.from_pretrained(folder))
    except (OSError, ValueError) as error:
        print(type(error).__name__, str(error)[:200].replace(chr(10), " "))
import gnomon.hf
model = AutoModelForCausalLM.from_pretrained(folder)
model.save_pretrained(folder + "/again")
found = model.generate(torch.arange(3, 19)[None], max_new_tokens=5, do_sample=False)
print(type(model).__name__, found[0].tolist())
"""


def test_in_a_fresh_process(tmp_path: Path) -> None:
    """Without Gnomon's import a folder fails loudly, with it the model is what it was."""
    model = to_saga(tiny_family("llama"), ONE, [IDS])
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "False"  # the package by itself loads no Transformers
    assert all("gnomon_saga` but Transformers does not recognize" in line for line in lines[1:3])
    assert lines[3].startswith("OSError Error no file named model.safetensors")
    expected = model.generate(IDS[:1], max_new_tokens=5, do_sample=False)[0].tolist()
    assert lines[4:] == [f"SagaLlamaForCausalLM {expected}"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"saga": {"nonsense": 1}}, "saga.nonsense"),
        ({"gnomon_weights": "model.safetensors"}, "must be gnomon.safetensors"),
        ({"base_model_type": "nonsense"}, "base_model_type is 'nonsense'"),
        ({"num_key_heads": 3}, "3 key heads don't divide"),
    ],
)
def test_damaged_folders_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    scratch().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(GnomonError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------------------------ conversion

PLAIN = {"mistral": {"sliding_window": None}, "gemma": {}, "llama": {}, "qwen2": {}, "olmo": {}}


def multiples(family: str, **settings: Any) -> Any:
    """A model whose second key head is, per frequency, a complex multiple of the first, biases included."""
    model = tiny_family(family, **settings)
    for depth, attn in enumerate(attentions(model)):
        k = attn.k_proj
        draw = torch.randn(2, 2, generator=torch.Generator().manual_seed(depth), dtype=torch.float64)
        factor = torch.view_as_complex(draw)  # (F,)
        for rows in (k.weight, k.bias):
            if rows is not None:
                z = pairs(rows.detach(), 4)
                factors = factor.view(-1, *[1] * (z.ndim - 2))
                rows.data.copy_(unpaired(torch.stack([z[0], factors * z[0]])))
    return model


@pytest.mark.parametrize("family", PLAIN)
def test_complex_multiples_convert_without_loss(family: str, tmp_path: Path) -> None:
    model = multiples(family, **PLAIN[family])
    config = SagaConfig(num_key_heads=1, num_value_heads=2, top_n=99)
    aligned = to_saga(model, config, [IDS])
    torch.testing.assert_close(logits(aligned), logits(model), atol=2e-4, rtol=1e-3)
    found = align_model(model, 1, [IDS])
    assert found.energy == pytest.approx([1] * 3) and found.tokens == 32
    assert torch.equal(logits(to_saga(model, config, found)), logits(aligned))
    for init in ("mean", "first"):
        assert not torch.allclose(logits(to_saga(model, config, init=init)), logits(model), atol=1e-2)
    aligned.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and torch.equal(logits(again), logits(aligned))
    assert [p.k_proj.bias is not None for p in attentions(again)] == [family == "qwen2"] * 3


def test_alignment_loses_less_than_the_mean() -> None:
    """Scores against the original's, on a model whose heads have nothing to do with each other."""
    model = tiny_family("qwen2", num_key_value_heads=4)
    found = {}
    for init in ("aligned", "mean", "first"):
        config = SagaConfig(num_key_heads=2, num_value_heads=4, top_n=99)
        merged = to_saga(model, config, [IDS], init)
        found[init] = float((logits(merged) - logits(model)).square().mean())
    assert found["aligned"] < min(found["mean"], found["first"])
    energy = align_model(model, 2, [IDS]).energy
    assert all(0.5 < one < 1 for one in energy)  # half is the least of two heads


def test_moments_are_those_of_real_tokens() -> None:
    model = tiny_family("qwen2")
    keys: list[Tensor] = []
    handle = attentions(model)[1].k_proj.register_forward_hook(lambda m, a, out: keys.append(out.detach()))
    mask = torch.ones_like(IDS)
    mask[0, 10:] = 0
    found, tokens = key_moments(model, 1, [{"input_ids": IDS, "attention_mask": mask}])
    handle.remove()
    z = pairs(keys[0][mask != 0].T, 4)  # (2, F, N)
    assert tokens == 26 and z.shape[-1] == 26
    for f in range(2):
        torch.testing.assert_close(found[1][0, f], z[:, f] @ z[:, f].mH / 26)
    again, _ = key_moments(model, 1, [IDS[1:], IDS[:1, :10]])
    torch.testing.assert_close(again[1], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "phi"])
def test_models_without_an_alignment_take_the_mean(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    said = "normalises its keys" if family == "qwen3" else "rotates"
    with pytest.raises(UsageError, match=f"{said}.*init='mean'"):
        to_saga(model, ONE, [IDS])
    merged = to_saga(model, ONE, init="mean")
    k, old = attentions(merged)[0].k_proj, attentions(model)[0].k_proj
    torch.testing.assert_close(k.weight, old.weight.view(2, 4, 16).mean(0))
    assert torch.equal(attentions(merged)[0].q_proj.weight, attentions(model)[0].q_proj.weight)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(merged))
    same = to_saga(model, SagaConfig(num_key_heads=2, num_value_heads=2), [IDS])  # nothing is merged
    torch.testing.assert_close(logits(same), logits(model))


REFUSED = {
    "mistral": "a window of 4 tokens",
    "gemma2": "sliding_attention",
    "olmo2": "normalises all its key heads together",
    "phi3": "not q_proj, k_proj and v_proj",
    "gpt2": "not q_proj, k_proj and v_proj",
    "neox": "not q_proj, k_proj and v_proj",
    "opt": "doesn't state num_key_value_heads",
}


@pytest.mark.parametrize("family", REFUSED)
def test_decoders_without_a_rule_are_refused(family: str) -> None:
    model = tiny_family(family)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(UsageError, match=REFUSED[family]):
        to_saga(model, ONE, [IDS], "mean")
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.usefixtures("unchecked")
def test_bad_conversions_are_refused_before_any_work() -> None:
    model = tiny_family("llama")
    four = SagaConfig(num_key_heads=1, num_value_heads=4)
    for config, calib, init, said in (
        (four, [IDS], "aligned", "num_value_heads=4, but the model has 2"),
        (ONE, [IDS], "alined", "Did you mean 'aligned'"),
        (ONE, IDS, "aligned", "must be a list of batches"),
        (ONE, [], "aligned", "must be a list of batches"),
        (ONE, None, "aligned", "init='aligned' needs text"),
        (ONE, align_model(tiny_family("llama", num_hidden_layers=2), 1, [IDS]), "aligned", "is for 2 layers"),
        (ONE, [IDS[0]], "aligned", "Batch 0 of calibration"),
        (ONE, [IDS + 20], "aligned", "Was it made with another tokenizer"),
        (ONE, [{"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}], "aligned", "holds no tokens"),
    ):
        with pytest.raises(UsageError, match=said):
            to_saga(model, config, calib, init)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="SAGA model already"):
        to_saga(scratch(), ONE, [IDS])
    with torch.device("meta"), pytest.raises(UsageError, match="meta device"):
        to_saga(LlamaForCausalLM(AutoConfig.for_model("llama", **SMALL)), ONE, init="mean")
    adapted = tiny_family("llama")
    attentions(adapted)[1].q_proj = type("LoraLinear", (nn.Linear,), {})(16, 16, bias=False)
    with pytest.raises(UsageError, match="is a LoraLinear, not a plain"):
        to_saga(adapted, ONE, [IDS])
    with torch.no_grad():
        attentions(model)[1].k_proj.weight[0, 0] = torch.nan
    with pytest.raises(NumericalFailure, match="keys of layer 1"):
        to_saga(model, ONE, [IDS])


def test_in_place_and_in_bfloat16() -> None:
    model = tiny_family("llama", dtype=torch.bfloat16)
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    same = to_saga(model, ONE, [IDS], inplace=True)
    assert same is model and type(model) is saga.SagaLlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (
        not attentions(model)[0].k_proj.weight.requires_grad
        and attentions(model)[1].k_proj.weight.requires_grad
    )
    assert bool(torch.isfinite(logits(model)).all())
    assert [default_key_heads(h) for h in (1, 2, 3, 4, 8, 12, 14, 32)] == [1, 1, 1, 1, 2, 3, 2, 8]


# ---------------------------------------------------------------------------------------------------- distillation


def examples() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 40, (n,), generator=draw).tolist()} for n in (12, 9, 12, 12)] * 2


def apart(model: nn.Module, teacher: nn.Module) -> float:
    """Mean KL from the teacher on fresh tokens."""
    ids = torch.randint(3, 40, (4, 16), generator=torch.Generator().manual_seed(9))
    p, q = (torch.log_softmax(logits(one, ids), -1) for one in (teacher, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("local_loss", ["kl", "hidden"])
def test_the_local_stage_trains_queries_and_keys_only(local_loss: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    teacher = tiny_family("llama", num_hidden_layers=2)
    before = {name: p.clone() for name, p in teacher.state_dict().items()}
    arguments = {
        "output_dir": str(tmp_path),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    more: dict[str, Any] = {"local_loss": local_loss}
    with seeded(0):
        student = saga.convert_and_finetune(teacher, ONE, examples(), ("align", "local"), arguments, **more)
    start = to_saga(teacher, ONE, [IDS])
    assert apart(student, teacher) < apart(start, teacher)
    assert all(torch.equal(p, before[name]) for name, p in teacher.state_dict().items())
    moved = {
        name.rpartition("self_attn.")[2]
        for name, p in student.named_parameters()
        if p.shape != before[name].shape or not torch.equal(p, before[name])
    }
    assert moved == {"q_proj.weight", "k_proj.weight"}
    assert all(p.requires_grad for p in student.parameters())


def test_the_last_stage_trains_everything(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    teacher = tiny_family("llama", num_hidden_layers=2)
    one = {"output_dir": str(tmp_path), "max_steps": 3, "use_cpu": True, "disable_tqdm": True}
    student = saga.convert_and_finetune(teacher, ONE, examples(), ("distill",), {"distill": one})
    old = teacher.state_dict()
    assert all(
        not torch.equal(p, old[name]) for name, p in student.named_parameters() if p.shape == old[name].shape
    )
    student.save_pretrained(tmp_path / "m")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")), logits(student))
    for stages, said in (
        (("distill", "local"), "in the order"),
        (("locl",), "Did you mean"),
        ((), "must be some"),
    ):
        with pytest.raises(UsageError, match=said):
            saga.convert_and_finetune(teacher, ONE, examples(), stages)
    with pytest.raises(UsageError, match="kl_share=2 must lie between"):
        saga.SagaTrainer(model=student, teacher=teacher, kl_share=2)
    with pytest.raises(UsageError, match="data set is empty"):
        saga.convert_and_finetune(teacher, ONE, [])


def test_training_with_atop_n() -> None:
    model = scratch(sparse_prefill=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert torch.isfinite(token_nll(model.eval(), IDS)).all()


# ------------------------------------------------------------------------------------------------------- apply


def write(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_apply_is_what_memory_gives(tmp_path: Path) -> None:
    plain = write(
        tmp_path / "plain", tiny_family("qwen2", dtype=torch.bfloat16, vocab_size=259), max_shard_size="12KB"
    )
    done = gnomon.apply("saga", model=plain, out=tmp_path / "out", init="mean", top_n=4)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = to_saga(AutoModelForCausalLM.from_pretrained(plain), ONE, init="mean")
    assert (
        torch.equal(logits(again), logits(model)) and type(again) is type(model) is saga.SagaQwen2ForCausalLM
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"], config["num_key_heads"]) == (
        "gnomon_saga",
        "qwen2",
        1,
    )
    assert config["architectures"] == ["SagaQwen2ForCausalLM"] and config["saga"]["top_n"] == 4
    before, after = ({}, {})
    for table, folder in ((before, plain), (after, tmp_path / "out")):
        for file in sorted(folder.glob("*.safetensors")):
            table.update(load_file(file))
    assert before.keys() == after.keys() and len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    changed = {
        name.rpartition(".self_attn.")[2]
        for name in before
        if before[name].shape != after[name].shape or not torch.equal(before[name], after[name])
    }
    assert changed == {"k_proj.weight", "k_proj.bias"}
    assert done.bytes_after < done.bytes_before and (tmp_path / "out" / "tokenizer_config.json").exists()
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "twice")), logits(model))


def test_apply_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m", tiny_family("llama", vocab_size=259, num_hidden_layers=1))
    text = tmp_path / "text.txt"
    text.write_text("The gnomon stands still; the shadow moves. " * 9)
    words = f"apply saga --model {tmp_path / 'm'} --out {tmp_path / 'D'} --top-n 8 --samples 6 --length 12"
    assert cli.main([*words.split(), "--calib", str(text)]) == 0
    assert cli.main(["check", str(tmp_path / "D")]) == 0
    manifest = json.loads((tmp_path / "D" / "gnomon.json").read_text())
    assert manifest["steps"][0]["settings"]["calib_tokens"] == 72
    assert saga_config(load(str(tmp_path / "D")).model) == SagaConfig(
        num_key_heads=1, num_value_heads=2, top_n=8
    )
    capsys.readouterr()
    assert cli.main(f"apply dense --model {tmp_path / 'D'} --out {tmp_path / 'E'}".split()) == 2
    assert "no ordinary form of attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("mistral", {"init": "mean"}, "a window of 4"),
        ("qwen3", {}, "init='mean'"),
        ("llama", {"key_heads": 3}, "3 key heads don't divide 2"),
        ("llama", {"top_n": 0}, "top_n=0"),
        ("llama", {"calib": "short.txt"}, "fewer than one window"),
    ],
)
def test_apply_refuses_beforehand(family: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tiny_family(family, vocab_size=259))
    if name := options.get("calib"):
        (tmp_path / name).write_text("The shadow moves.")
        options = options | {"calib": str(tmp_path / name)}
    with pytest.raises(UsageError, match=said):
        gnomon.apply("saga", model=folder, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
