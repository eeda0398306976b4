"""MGLU in whole models: replacing, training, freezing, grouping; and as Transformers folders.

Sources of truth: the logits before saving; the modules counted by hand; a plain Transformers without Gnomon.
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gnomon.hf
from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.models import load
from gnomon.core.tiny import byte_tokenizer
from gnomon.methods.layers import mglu
from gnomon.methods.layers.mglu import (
    FrozenMGLULinear,
    MGLUConfig,
    MGLULinear,
    SwiMGLUMLP,
    freeze_masks,
    mask_stats,
    mglu_layers,
    param_groups,
    replace_mlp,
)

torch.set_num_threads(1)
IDS = torch.arange(3, 27).view(2, 12)
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def no_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(family: str = "llama", config: MGLUConfig | None = None, **settings: Any) -> Any:
    return replace_mlp(tiny_family(family, **settings), config or MGLUConfig(n_masks=2), generator=rng())


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def test_the_example_of_the_package() -> None:
    outcome = doctest.testmod(mglu)
    assert outcome.failed == 0 and outcome.attempted >= 10


def test_the_users_own_model_trains_saves_and_loads(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    own = LlamaForCausalLM(config)
    untouched = copy.deepcopy(config.to_dict())
    model = replace_mlp(own, MGLUConfig(n_masks=2), generator=rng())
    assert (
        model is own and config.to_dict() == untouched and config.model_type == "llama"
    )  # others may share it
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2)
    before, losses = mglu_layers(model)["model.layers.0.mlp"].proj.masks.detach().clone(), []
    for _ in range(10):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not torch.equal(mglu_layers(model)["model.layers.0.mlp"].proj.masks, before)  # bits flipped
    model.eval().save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(again) is type(model) is mglu.MGLULlamaForCausalLM
    assert torch.equal(logits(again), logits(model))
    optimizer = torch.optim.AdamW(param_groups(again.train(), 0.1), lr=1e-2)  # and goes on being trained
    again(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in again.parameters())


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "olmo2", "phi3")


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_come_out_of_a_converted_model(family: str) -> None:
    """The truth are hooks on the layers. No class of these families was ever made by `__init__` before."""
    whole = made(family)
    bodies = (whole, replace_mlp(tiny_family(family).base_model, MGLUConfig(n_masks=2), generator=rng()))
    for model in (*bodies, pickle.loads(pickle.dumps(whole))):
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
            for layer in model.base_model.layers
        ]
        with torch.no_grad():
            states = model(input_ids=IDS, output_hidden_states=True).hidden_states
        for hook in hooks:
            hook.remove()
        assert len(states) == 1 + len(seen) == 4
        assert all(torch.equal(a, b) for a, b in zip(states[1:-1], seen[:-1], strict=True))
        assert torch.equal(states[-1], model.base_model.norm(seen[-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gated_family(family: str, tmp_path: Path) -> None:
    plain = tiny_family(family)
    inner = plain.config.intermediate_size
    model = replace_mlp(copy.deepcopy(plain), MGLUConfig(n_masks=3), generator=rng())
    layers = mglu_layers(model)
    assert len(layers) == 3
    assert all((m.hidden_size, m.intermediate_size) == (16, inner) for m in layers.values())
    assert all(m.down_proj.weight.shape == (16, inner) for m in layers.values())
    gone = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters())
    assert gone == 3 * 16 * inner * (1 - 3)  # one of two matrices goes, three of logits come
    assert not torch.equal(logits(model), logits(plain))
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and torch.equal(logits(again), logits(model))
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False)[:, :12], IDS)


CONFIGS = [
    MGLUConfig(n_masks=1, hidden_act="gelu"),
    MGLUConfig(n_masks=3, top_k=2, hidden_act="relu"),
    MGLUConfig(n_masks=2, learned=False),
    MGLUConfig(n_masks=1, masked="value"),
    MGLUConfig(n_masks=1, masked="neither"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.n_masks}-{c.top_k}-{c.learned}-{c.masked}")
def test_every_variant_comes_back(config: MGLUConfig, tmp_path: Path) -> None:
    model = made("llama", config)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    layer = next(iter(mglu_layers(again).values()))
    assert layer.config == config
    trained = dict(layer.named_parameters())
    assert ("proj.mask_logits" in trained) == (config.learned and config.masked != "neither")
    other = made("llama", config)
    for p in other.parameters():
        p.data += 0.01
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("layout", ["planes", "code"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_models_save_and_load(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made("llama", MGLUConfig(n_masks=2, top_k=2)).save_pretrained(tmp_path / "trained")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=dtype)
    before = logits(model)
    frozen = freeze_masks(model, layout)
    packed = {name: t.clone() for name, t in frozen.state_dict().items()}
    assert frozen is model and not any("mask_logits" in name for name in model.state_dict())
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    assert (logits(model) - before).norm() < bound * before.norm()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "gnomon.safetensors")
    masks = {name: t for name, t in stored.items() if name.endswith(f"mask_{layout}")}
    assert len(masks) == 3 and all(t.dtype == torch.uint8 for t in masks.values())
    assert all(
        torch.equal(t, packed[name]) for name, t in masks.items()
    )  # whatever the order in memory is by now
    assert all(t.is_contiguous() for t in model.state_dict().values())
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert all(isinstance(mlp.proj, FrozenMGLULinear) for mlp in mglu_layers(again).values())
    assert torch.equal(logits(again), logits(model)) and again.dtype == dtype
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "twice")), logits(model))
    with pytest.raises(UsageError, match="masks are frozen"):
        again.train()(IDS)


def test_packed_files_take_sixteen_bits_and_one_a_mask(tmp_path: Path) -> None:
    """Claim mglu.1: bits of what lies in the file, 16 + n_m a weight against a GLU's 32."""
    for n, saved in ((1, 0.46875), (4, 0.375)):
        model = freeze_masks(made("llama", MGLUConfig(n_masks=n), dtype=torch.bfloat16))
        model.save_pretrained(tmp_path / str(n))
        stored = load_file(tmp_path / str(n) / "gnomon.safetensors")
        shared = [t for name, t in stored.items() if ".mlp.proj." in name]
        weights = sum(t.numel() for t in shared if t.dtype == torch.bfloat16)
        assert weights == 3 * 16 * 24
        assert 8 * sum(t.nbytes for t in shared) == (16 + n) * weights
        assert 1 - 8 * sum(t.nbytes for t in shared) / (32 * weights) == saved


def test_logits_stay_in_float32(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters() if ".mlp.proj." in name}
    assert kinds == {"weight": torch.bfloat16, "mask_logits": torch.float32}
    model(IDS, labels=IDS).loss.backward()
    assert next(iter(mglu_layers(model).values())).proj.mask_logits.grad.dtype == torch.float32


def test_shards_and_saving_over_itself(tmp_path: Path) -> None:
    model = made("llama")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    names = {path.name for path in tmp_path.iterdir()}
    assert "gnomon.safetensors.index.json" in names and not any(name.startswith("model") for name in names)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "gnomon.safetensors"}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_gnomons_own_loader_and_the_base_model(tmp_path: Path) -> None:
    model = made("llama", vocab_size=259)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert torch.equal(logits(load(str(tmp_path)).model), logits(model))
    headless = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(headless(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    by_class = mglu.MGLULlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(by_class), logits(model))


def test_from_a_configuration_alone() -> None:
    config = mglu.MGLULlamaConfig(**SMALL, initializer_range=0.3, mglu={"n_masks": 3, "hidden_act": "gelu"})
    model = mglu.MGLULlamaForCausalLM(config)
    assert [m.config for m in mglu_layers(model).values()] == [MGLUConfig(n_masks=3, hidden_act="gelu")] * 2
    proj = next(iter(mglu_layers(model).values())).proj
    assert float(proj.weight.detach().std()) == pytest.approx(0.3, rel=0.2)
    assert float(proj.mask_logits.detach().std()) == pytest.approx(0.01, rel=0.2)
    assert mglu.MGLULlamaForCausalLM(mglu.MGLULlamaConfig(**SMALL)).config.layers_config == MGLUConfig()


def test_copies_and_pickles() -> None:
    model = made("llama")
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))
    with pytest.raises(AttributeError, match="no attribute 'MGLUNonsense'"):
        _ = mglu.MGLUNonsense


FRESH = (
    "import sys, torch; torch.set_num_threads(1)\n"
    "from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM\n"
)


def fresh(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", FRESH + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_gnomon_a_folder_fails_loudly(tmp_path: Path) -> None:
    model = made("llama")
    model.save_pretrained(tmp_path / "trained")
    freeze_masks(model).save_pretrained(tmp_path / "frozen")
    code = "for path in sys.argv[1:]:\n" + "".join(
        f"  try: print('LOADED', {one}.from_pretrained(path))\n"
        f"  except (OSError, ValueError) as error: print('{one}', type(error).__name__, str(error)[:200])\n"
        for one in ("AutoConfig", "AutoModelForCausalLM", "LlamaForCausalLM")
    )
    printed = fresh(code, tmp_path / "trained", tmp_path / "frozen")
    assert "LOADED" not in printed
    assert printed.count("gnomon_mglu` but Transformers does not recognize") == 4
    assert printed.count("LlamaForCausalLM OSError Error no file named model.safetensors") == 2
    code = (
        "import gnomon.hf\n"
        "for path in sys.argv[1:]:\n"
        "  model = AutoModelForCausalLM.from_pretrained(path)\n"
        "  model.save_pretrained(path + '-again')\n"
        "  print(type(model).__name__, float(model(torch.arange(3, 27).view(2, 12)).logits.double().sum()))\n"
    )
    printed = fresh(code, tmp_path / "trained", tmp_path / "frozen")
    assert printed.count("MGLULlamaForCausalLM") == 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "frozen-again")), logits(model))


def test_the_package_loads_no_transformers() -> None:
    code = "import sys, gnomon.methods.layers.mglu as m; print('transformers' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# ------------------------------------------------------------------------------------- statistics and groups


def test_mask_stats_by_hand() -> None:
    model = made("llama")
    proj = mglu_layers(model)["model.layers.1.mlp"].proj
    with torch.no_grad():
        proj.mask_logits.fill_(-1)
        proj.mask_logits[0, :6] = 1  # a quarter of the first mask's rows: whole rows
        proj.mask_logits[1, :, :4] = 1  # a quarter of each row of the second
    for freeze in (False, True):
        stats = mask_stats(freeze_masks(model) if freeze else model)
        assert list(stats) == [f"model.layers.{i}.mlp" for i in range(3)]
        found = stats["model.layers.1.mlp"]
        assert found.per_mask == (0.25, 0.25) and found.gate_ratio == 0.25 and found.constant_rows == 0.5
        assert 0.4 < stats["model.layers.0.mlp"].gate_ratio < 0.6


def test_param_groups() -> None:
    model = made("llama")
    matrices, vectors, masks = param_groups(model, 0.1, mask_lr=5e-4)
    assert [g["weight_decay"] for g in (matrices, vectors, masks)] == [0.1, 0.0, 0.1]
    assert masks["lr"] == 5e-4 and "lr" not in matrices
    assert len(masks["params"]) == 3 and all(p.ndim == 3 for p in masks["params"])
    every = [id(p) for g in (matrices, vectors, masks) for p in g["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    assert param_groups(model, 0.1, mask_weight_decay=0.0)[2]["weight_decay"] == 0
    own = made("llama", MGLUConfig(mask_weight_decay=0.02))
    assert param_groups(own, 0.1)[2]["weight_decay"] == 0.02
    assert len(param_groups(freeze_masks(made("llama")), 0.1)) == 2
    next(iter(mglu_layers(own).values())).config = MGLUConfig()
    with pytest.raises(UsageError, match=r"mask_weight_decay \['0.02', 'None'\]"):
        param_groups(own, 0.1)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("family", ["gpt2", "neox", "opt", "phi"])
def test_mlps_without_a_gate_are_refused(family: str) -> None:
    model = tiny_family(family)
    before = logits(model)
    with pytest.raises(UsageError, match=r"is no gated MLP|has no MLP|it owns"):
        replace_mlp(model)
    assert torch.equal(logits(model), before)


def test_other_refusals(tmp_path: Path) -> None:
    model = made("llama")
    with pytest.raises(UsageError, match="MGLUs already"):
        replace_mlp(model)
    with pytest.raises(UsageError, match="LlamaMLP has biases"):
        replace_mlp(tiny_family("llama", mlp_bias=True))
    with pytest.raises(UsageError, match="has no MGLU layer"):
        freeze_masks(tiny_family("llama"))
    with pytest.raises(UsageError, match="no list of decoder layers"):
        replace_mlp(nn.Linear(3, 3))
    with pytest.raises(UsageError, match="Unknown layout"):
        freeze_masks(model, "bits")
    for options in ({"push_to_hub": True}, {"variant": "fp8"}):
        with pytest.raises(UsageError, match="can't be saved with"):
            model.save_pretrained(tmp_path / "out", **options)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    last = mglu_layers(model)["model.layers.2.mlp"].proj
    with torch.no_grad():
        last.mask_logits[0] = float("nan")
    with pytest.raises(NumericalFailure, match="mask logits are NaN"):
        freeze_masks(model)
    assert all(isinstance(mlp.proj, MGLULinear) for mlp in mglu_layers(model).values())  # nothing was changed
    with pytest.raises(UsageError, match="No layer has masks"):
        mask_stats(made("llama", MGLUConfig(n_masks=1, masked="neither")))
    with pytest.raises(UsageError, match="is an ablation"):
        freeze_masks(made("llama", MGLUConfig(n_masks=1, masked="gate")))
    frozen = freeze_masks(made("llama"))
    with pytest.raises(UsageError, match="frozen already"):
        freeze_masks(frozen)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_type": "nope"}, "base_model_type is 'nope'"),
        ({"base_model_type": "gnomon_mglu"}, "base_model_type is 'gnomon_mglu'"),
        ({"base_model_type": None}, "base_model_type is None"),
        ({"gnomon_weights": "../other.safetensors"}, "gnomon_weights is '../other.safetensors'"),
        ({"mglu": {"n_masks": 2, "depth": 3}}, "mglu.depth"),
        ({"mglu": {"n_masks": 2, "frozen": "pickle"}}, "mglu.frozen='pickle'"),
        ({"mglu": {"n_masks": 99}}, "n_masks=99"),
    ],
)
def test_damaged_configurations_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(GnomonError, match=message):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_missing_masks_are_never_drawn(tmp_path: Path) -> None:
    freeze_masks(made("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "gnomon.safetensors")
    weights.pop("model.layers.1.mlp.proj.mask_planes")
    save_file(weights, tmp_path / "gnomon.safetensors", {"format": "pt"})
    with pytest.raises(GnomonError, match="masks that the files lack"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_registering_twice_changes_nothing() -> None:
    gnomon.hf.register()
    gnomon.hf.register()


def test_a_model_of_plain_torch() -> None:
    """No Transformers class: the MLPs are replaced, and nothing else is expected."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(8, 8)
            self.mlp = nn.Module()
            for name, shape in {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}.items():
                setattr(self.mlp, name, nn.Linear(*shape, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.mlp(x + self.attn(x))
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = (
        replace_mlp(Model(), MGLUConfig(hidden_act="gelu"), generator=rng()),
        torch.randn(3, 8),
    )
    assert isinstance(model.layers[1].mlp, SwiMGLUMLP)
    before = model(x)
    torch.testing.assert_close(freeze_masks(model)(x), before, rtol=1e-4, atol=1e-5)
