"""Loading by name. Truth: the weights that were saved; poisoned files that must stay unopened; no network at all."""

from __future__ import annotations

import importlib
import json
import pickle
import socket
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gnomon.core import models, smollm2
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.seeding import seeded

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any look-up of a host fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"network was asked for {args[0]}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny model in a folder, as Transformers writes it."""
    folder = tmp_path / "my-model"
    with seeded(3):
        loaded = models.load("tiny:llama-10k", device="cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_tiny_model_by_default_and_with_dtype() -> None:
    default = models.load("tiny:gpt-neox_10k", device="cpu")
    assert (default.name, default.dtype, default.device.type, default.attn) == (
        "tiny:gpt_neox-10k",
        torch.float32,
        "cpu",
        "sdpa",
    )
    assert not default.model.training and default.model.config._attn_implementation == "sdpa"
    other = models.load("tiny:llama-10k", dtype="bfloat16", device="cpu", attn="eager")
    assert other.model.dtype == other.dtype == torch.bfloat16
    assert other.model.config._attn_implementation == "eager"


def test_half_precision_is_the_default_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.as_dtype(None, torch.device("cuda")) == torch.bfloat16
    assert models.as_dtype(None, torch.device("cpu")) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert models.as_device(None).type == "cuda"


def test_a_folder_gives_back_its_weights_in_the_asked_dtype(saved: Path) -> None:
    loaded = models.load(str(saved), device="cpu", dtype=torch.float64)
    assert loaded.name == "my-model" and not loaded.model.training
    for name, weight in load_file(saved / "model.safetensors").items():
        assert torch.equal(loaded.model.state_dict()[name], weight.double())
    assert loaded.tokenizer("aé")["input_ids"] == [97, 195, 169]


def test_a_missing_pad_token_is_filled(saved: Path) -> None:
    path = saved / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "pad_token"}))
    assert models.load(str(saved)).tokenizer.pad_token == "<|eos|>"


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickle_only_is_refused_unopened(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(GnomonError, match=r"as pickle only \(pytorch_model.bin\).*convert it once"):
        models.load(str(saved))
    assert not (tmp_path / "exploded").exists()


def test_code_in_a_checkpoint_is_never_run_nor_asked_for(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(
        saved, model_type="evil", auto_map=dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at a prompt"))
    with pytest.raises(GnomonError, match=r"my-model could not be loaded: .*custom code"):
        models.load(str(saved))


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "holds no config.json"), ("model.safetensors", r"holds no \*")]
)
def test_incomplete_folders_are_refused(saved: Path, missing: str, message: str) -> None:
    (saved / missing).unlink()
    with pytest.raises(GnomonError, match=message):
        models.load(str(saved))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "1,000,000 layers"),
        ({"num_hidden_layers": 2}, "no place for"),
        ({"num_hidden_layers": -1}, "-1 layers"),
        ({"num_attention_heads": 0}, "could not be loaded"),
        ({"vocab_size": "many"}, "could not be loaded"),
        ({"vocab_size": 100}, "could not be loaded"),
        ({"dtype": "nope"}, "could not be loaded"),
        ({"model_type": 5}, "no model's configuration"),
    ],
)
def test_a_wrong_config_is_an_error(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(saved, **changes)
    with pytest.raises(GnomonError, match=message):
        models.load(str(saved))


def test_weights_without_a_place_are_refused_beside_the_models_own_only(saved: Path) -> None:
    path = saved / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "vision.0.weight": torch.ones(2)}, path, {"format": "pt"})
    models.load(str(saved))
    # The scales of a quantizer that Transformers doesn't know: the packed weights alone would be garbage.
    scale = {"model.layers.0.mlp.down_proj.weight_scale": torch.ones(1)}
    save_file({**weights, **scale}, path, {"format": "pt"})
    with pytest.raises(GnomonError, match="weight_scale"):
        models.load(str(saved))


def test_missing_weights_are_an_error_not_random_numbers(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        GnomonError, match=r"lacks 1 of the model's weights \(such as model.layers.1.mlp.up_proj.weight"
    ):
        models.load(str(saved))


def test_a_truncated_file_and_an_encoder_are_one_clear_error(saved: Path) -> None:
    edit_config(saved, model_type="t5")
    with pytest.raises(GnomonError, match="my-model could not be loaded: "):
        models.load(str(saved))
    edit_config(saved, model_type="llama")
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(GnomonError, match=r"my-model could not be loaded: .*incomplete"):
        models.load(str(saved))


def test_gnomon_types_import_the_plugin_first(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(saved, model_type="gnomon_test")
    asked = []

    def absent(name: str) -> types.ModuleType:
        asked.append(name)
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(GnomonError, match="of type gnomon_test, which this version of Gnomon can't load"):
        models._check_folder(saved)
    assert asked == ["gnomon.hf"]
    monkeypatch.setattr(importlib, "import_module", asked.append)
    models._check_folder(saved)
    assert asked == ["gnomon.hf"] * 2
    edit_config(saved, model_type="llama")
    models._check_folder(saved)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "Did you mean 'smollm2-135m'"),
        ("tiny_llama-10k", "Did you mean 'tiny:llama-10k'"),
        ("gpt2", "a hub id has the form owner/name"),
        ("", "Unknown model ''"),
        ("~no-such-user/x", "There is no folder"),
        ("./nowhere", "There is no folder ./nowhere"),
        ("/no/where", "There is no folder /no/where"),
        ("some/where/else", "There is no folder"),
        ("tiny:lama-10k", "Did you mean 'llama'"),
    ],
)
def test_what_is_no_model_is_refused_before_any_network(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        models.load(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match=r"is a file. A model is a folder"):
        models.load(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bf16"}, "dtype 'bf16'. Did you mean 'bfloat16'"),
        ({"device": "gpu"}, "Unknown device 'gpu'"),
        ({"attn": "spda"}, "tiny:llama-10k could not be loaded: .*spda"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(GnomonError, match=message):
        models.load("tiny:llama-10k", **settings)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_an_absent_gpu_is_named() -> None:
    with pytest.raises(UsageError, match=r"sees no CUDA device. Use device='cpu'"):
        models.load("tiny:llama-10k", device="cuda")


def test_offline_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        GnomonError, match=r"gnomon-tests/absent could not be loaded: .*HF_HUB_OFFLINE is set: unset it"
    ):
        models.load("gnomon-tests/absent")


def test_a_failing_hub_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def fail(source: str, **settings: Any) -> None:
        asked.update(settings, source=source)
        raise OSError("We couldn't connect to the hub.\nmore")

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(GnomonError, match=r"couldn't connect to the hub. Check the spelling.*smollm2-135m"):
        models.load("gnomon-tests/absent")
    assert asked == {"source": "gnomon-tests/absent", "local_files_only": False, "trust_remote_code": False}


def test_embedded_model_is_not_fetched_by_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()  # half of something, or a folder of that name: the embedded name wins
    with pytest.raises(GnomonError, match="Run: gnomon fetch smollm2-135m"):
        models.load("smollm2-135m")


def test_progress_bars_come_back(saved: Path) -> None:
    models.load(str(saved))
    assert transformers.utils.logging.is_progress_bar_enabled()


@pytest.fixture(scope="module")
def smol() -> models.Loaded:
    if smollm2.cached() is None:
        pytest.skip(f"SmolLM2 is not in {smollm2.cache_folder()}: gnomon fetch smollm2-135m")
    return models.load("smollm2-135m", device="cpu")


def test_smollm2_answers_in_english(smol: models.Loaded) -> None:
    assert (smol.model.num_parameters(), smol.dtype) == (134_515_008, torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smol.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smol.tokenizer(prompt, return_tensors="pt")
    answer = smol.model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert smol.tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("x =  2024\n\n3.", ["x", "Ġ=", "ĠĠ", "2", "0", "2", "4", "ĊĊ", "3", "."]),
        ("<|im_end|>a", ["<|im_end|>", "a"]),
        ("", []),
    ],
)
def test_smollm2_tokenizer_cuts_as_published(smol: models.Loaded, text: str, tokens: list[str]) -> None:
    assert smol.tokenizer.convert_ids_to_tokens(smol.tokenizer(text)["input_ids"]) == tokens


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # 12345\r\n", "Größe 日本 🙂 ça", "a , b . c 's"])
def test_smollm2_tokenizer_round_trips(smol: models.Loaded, text: str) -> None:
    assert smol.tokenizer.decode(smol.tokenizer(text)["input_ids"]) == text
