"""Which parameters go where, in Transformers' families and plain modules; imports, ranks, the HF Trainer."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gnomon.core import tiny
from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded
from gnomon.methods.optim.numuon import MuonWithAdamW, NuMuon, RankSchedule, split_muon_params

SCRIPT = Path(__file__).with_name("numuon_ranks_script.py")


@pytest.mark.parametrize(
    ("architecture", "leaves"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt2", {"c_proj", "c_fc"}),
        ("phi3", {"o_proj", "down_proj"}),
        ("gpt_neox", {"dense", "dense_h_to_4h", "dense_4h_to_h"}),
    ],
)
def test_families(architecture: str, leaves: set[str], caplog: pytest.LogCaptureFixture) -> None:
    """The matrices that stay, read off Transformers' model code; the rest, each once, to AdamW."""
    model = tiny.build(f"tiny:{architecture}-10k")
    with caplog.at_level(logging.WARNING, "gnomon"):
        hidden, other = split_muon_params(model)
    assert {name.split(".")[-2] for name, _ in hidden} == leaves
    assert len(hidden) == 3 * (len(leaves) + (architecture == "gpt2"))  # GPT-2 has two c_proj in each layer
    assert dict(hidden) | dict(other) == dict(model.named_parameters())
    assert model.get_output_embeddings().weight in [p for _, p in other]  # type: ignore[comparison-overlap]
    fused = {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value"}.get(architecture)
    assert (
        f"{fused}.weight goes to AdamW, not to Muon: it is several matrices fused" in caplog.text
    ) == bool(fused)


class Mixed(nn.Module):
    """One of everything that has to be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.map = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gate = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 6))
        self.image = nn.Conv2d(3, 6, 3)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.tokens.weight


def test_what_looks_like_a_matrix_and_is_none(caplog: pytest.LogCaptureFixture) -> None:
    model = Mixed()
    hidden, other = split_muon_params(model)
    assert [name for name, _ in hidden] == ["map.weight", "image.weight"]
    assert {"tokens.weight", "experts", "gate.weight", "lora_A.default.weight", "map.bias"} <= {
        n for n, _ in other
    }
    assert "lora_A.default.weight goes to AdamW, not to Muon: it is a factor of an adapter" in caplog.text
    assert not any("frozen" in name for name, _ in (*hidden, *other))
    assert [n for n, _ in split_muon_params(model, frozen=True)[0]] == [
        "map.weight",
        "frozen.weight",
        "image.weight",
    ]
    assert [name for name, _ in split_muon_params(model, other=["image.*"])[0]] == ["map.weight"]
    wrapped = nn.DataParallel(model)
    assert [name for name, _ in split_muon_params(wrapped)[0]] == ["module.map.weight", "module.image.weight"]


def test_nothing_to_split() -> None:
    with pytest.raises(UsageError, match=r"The pattern 'map.wieght' matches no .* Did you mean 'map.weight'"):
        split_muon_params(Mixed(), other=["map.wieght"])
    with pytest.raises(
        UsageError, match=r"LayerNorm has no matrix .* among 2 .* \(2 because each is a vector"
    ):
        MuonWithAdamW(nn.LayerNorm(3))


def test_a_model_alone_says_what_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.build("tiny:llama-10k")
    optimizer = NuMuon(model, rank_fraction=0.5)
    assert "takes 21 matrices of the model and leaves 8 other parameters as they are" in caplog.text
    assert optimizer.param_groups[0]["param_names"][0] == "model.layers.0.self_attn.q_proj.weight"
    both = MuonWithAdamW(model, lr=3e-3)
    assert [(g["kind"], len(g["params"])) for g in both.param_groups] == [("numuon", 21), ("adamw", 8)]
    assert not {"topk", "momentum"} & both.param_groups[1].keys()


def test_importing_loads_torch_but_not_transformers() -> None:
    code = "import sys, gnomon.methods.optim.numuon; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_two_ranks_follow_one_process(tmp_path: Path) -> None:
    """Data parallel and sharded by rows (DTensor), each over two gloo processes, with a random back end."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "0", "1"))
    for kind in ("parallel", "sharded"):
        for name, value in first[kind].items():
            assert torch.equal(value, second[kind][name])
        torch.testing.assert_close(first[kind], alone["parallel"], rtol=1e-5, atol=1e-6)
    assert not torch.equal(alone["parallel"]["0.weight"], alone["begin"]["0.weight"])
    assert first["local rows"] == [5, 4]  # of 9 rows, two ranks hold unequal shares
    assert "first that 0.weight" in first["refusal"] == second["refusal"]


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    """Its optimizer argument, its schedulers, and a resume from its checkpoint."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12) % 50]

    def trained(until: int, resume: bool = False) -> nn.Module:
        with seeded(0):
            model = tiny.build("tiny:llama-10k")
        ranks = RankSchedule.cosine(1.0, 0.25, total_steps=4)
        optimizer = MuonWithAdamW(model, lr=3e-3, rank_fraction=ranks)
        settings = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 4)
        trainer = Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, scheduler))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        assert optimizer.param_groups[0]["step"] == until
        return model

    straight, resumed = trained(4), trained(4, resume=True)
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
