"""The rule of loud failure, seen in fresh processes: with `gnomon.hf` a folder loads, without it nothing does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_models import tiny_family
from transformers import AutoModelForCausalLM

import gnomon
from gnomon.core.tiny import byte_tokenizer

AUTO = (
    "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline\n"
)
LOAD = "import torch; torch.set_num_threads(1)\n"
IDS = "torch.arange(3, 11)[None]"


def fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AUTO + LOAD + code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, `nf12` and `lowrank` made from it, and both loaded and saved by Transformers in another process."""
    base = tmp_path_factory.mktemp("models")
    model = tiny_family("llama", dtype=torch.bfloat16, vocab_size=259, tie_word_embeddings=True)
    model.save_pretrained(base / "plain")
    byte_tokenizer().save_pretrained(base / "plain")
    gnomon.apply("nf12", model=str(base / "plain"), out=base / "nf12", min_elements=1)
    gnomon.apply("lowrank", model=str(base / "plain"), out=base / "lowrank", keep=0.5)
    done = fresh(
        "import sys, gnomon.hf\n"
        "for source, out in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "  model = AutoModelForCausalLM.from_pretrained(source)\n"
        "  model.save_pretrained(out, max_shard_size='6KB')\n"
        "  AutoTokenizer.from_pretrained(source).save_pretrained(out)",
        *(str(base / name) for name in ("nf12", "saved", "lowrank", "lowrank-saved")),
    )
    assert done.returncode == 0, done.stderr
    return base


def test_without_the_import_nothing_loads(folders: Path) -> None:
    """`LlamaForCausalLM` reads the type off its own class, so only the missing weights can stop it."""
    code = "import sys\nfor path in sys.argv[1:]:\n" + "".join(
        f"  try: print('LOADED', {one}.from_pretrained(path))\n"
        f"  except (OSError, ValueError) as error: print('{one}', type(error).__name__, error)\n"
        for one in ("AutoConfig", "AutoModelForCausalLM", "LlamaForCausalLM")
    )
    done = fresh(code, *(str(folders / name) for name in ("nf12", "saved", "lowrank", "lowrank-saved")))
    assert done.returncode == 0, done.stderr
    assert "LOADED" not in done.stdout
    assert done.stdout.count("gnomon_nf12` but Transformers does not recognize") == 4
    assert done.stdout.count("gnomon_lowrank` but Transformers does not recognize") == 4
    assert done.stdout.count("LlamaForCausalLM OSError Error no file named model.safetensors") == 4


def test_with_the_import_everything_loads(folders: Path) -> None:
    code = (
        "import sys, gnomon.hf; from transformers import pipeline\n"
        f"ids = {IDS}\n"
        "models = [AutoModelForCausalLM.from_pretrained(path) for path in sys.argv[1:]]\n"
        "print([torch.equal(model(ids).logits, models[0](ids).logits) for model in models])\n"
        "print([type(AutoConfig.from_pretrained(path)).__name__ for path in sys.argv[1:]])\n"
        "print([AutoTokenizer.from_pretrained(path)('ab').input_ids for path in sys.argv[1:]])\n"
        "says = [pipeline('text-generation', model=path, max_new_tokens=4, do_sample=False)('abcdefgh')\n"
        "        for path in sys.argv[1:]]\n"
        "print(says.count(says[0]))\n"
    )
    done = fresh(code, *(str(folders / name) for name in ("plain", "nf12", "saved")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == [
        "[True, True, True]",
        "['LlamaConfig', 'LlamaConfig', 'LlamaConfig']",
        "[[97, 98], [97, 98], [97, 98]]",
        "3",
    ]


def test_gnomons_own_loader_imports_it_by_itself(folders: Path) -> None:
    (folders / "text.txt").write_text("The gnomon stands still; the shadow moves. " * 4)
    code = (
        "import sys; from gnomon.core.models import load; import gnomon\n"
        "print(type(load(sys.argv[1]).model.lm_head).__name__)\n"
        "found = gnomon.eval(sys.argv[1], against=sys.argv[2], text=sys.argv[3], window=32)\n"
        "print(found.kl, found.agreement, found.model.parameters == found.against.parameters)\n"
        "print(found.model.weight_bytes < found.against.weight_bytes)"
    )
    done = fresh(code, *(str(folders / name) for name in ("nf12", "plain", "text.txt")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["NF12Linear", "0.0 1.0 True", "True"]


def test_low_rank_loads_with_the_import(folders: Path) -> None:
    from gnomon.methods.compress.lowrank import compress_lowrank

    code = (
        "import sys, gnomon.hf; from gnomon.core.models import load\n"
        "models = [AutoModelForCausalLM.from_pretrained(path) for path in sys.argv[1:]]\n"
        f"print([model({IDS}).logits.double().sum().item() for model in models])\n"
        "print({type(model.model.layers[0].mlp.up_proj).__name__ for model in models})\n"
        "print([model.lm_head.weight is model.model.embed_tokens.weight for model in models])\n"
        "print(type(load(sys.argv[1]).model.model.layers[0].mlp.up_proj).__name__)"
    )
    done = fresh(code, *(str(folders / name) for name in ("lowrank", "lowrank-saved")))
    assert done.returncode == 0, done.stderr
    model = compress_lowrank(AutoModelForCausalLM.from_pretrained(folders / "plain"), keep=0.5)
    expected = model(torch.arange(3, 11)[None]).logits.double().sum().item()
    assert done.stdout.splitlines() == [
        str([expected, expected]),
        "{'LowRankLinear'}",
        "[True, True]",
        "LowRankLinear",
    ]
