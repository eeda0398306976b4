"""Training thresholds. Truth: an uncut run, a plain loop of torch, uniform allocation at the same sparsity."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import tiny_family
from torch import Tensor
from torch.utils.data import DataLoader

from gnomon.core.data import Batches, corpus, token_stream
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build, byte_tokenizer
from gnomon.lab import StageContext
from gnomon.methods.compress.lua import LuaAllocator, LuaTrainer, allocate, collect_importance

torch.set_num_threads(1)


def ids(rows: int = 4, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def made(p: float = 0.6, **settings: Any) -> LuaAllocator:
    model = tiny_family("llama")
    return LuaAllocator(model, collect_importance(model, [ids()]), p, **settings)


def test_fit_is_adamw_on_loss_plus_penalty():
    """Truth: the same three steps by hand."""
    text = [ids(seed=i) for i in range(2)]
    alloc, by_hand = made(), made()
    done = alloc.fit(text, steps=3, lr=0.01, weight_decay=0.05)
    by_hand.parametrize()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01, weight_decay=0.05)
    losses = []
    for i in (0, 1, 0):
        loss = by_hand.model(text[i], labels=text[i]).loss + by_hand.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert done.losses == pytest.approx(losses, rel=1e-5) and done.tokens == 3 * 48
    for a, b in zip(alloc.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert done.sparsity == alloc.sparsity_report().sparsity


def test_padding_has_no_part_in_it():
    short = ids(2, 8)
    padded = {
        "input_ids": torch.cat([short, torch.zeros(2, 4, dtype=torch.long)], 1),
        "attention_mask": torch.cat([torch.ones(2, 8), torch.zeros(2, 4)], 1).long(),
    }
    plain, with_padding = made(), made()
    plain.fit([short], steps=2)
    with_padding.fit([padded], steps=2)
    for a, b in zip(plain.parameters(), with_padding.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, list[Tensor]]:
    """A model that has learnt a little, and text of the same kind."""
    with seeded(0):
        model = build("tiny:llama-10k")
    stream = token_stream(corpus("generated:60"), byte_tokenizer())
    source = Batches(stream, batch=8, length=48, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(100):
        x = next(source)
        model(x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [next(source) for _ in range(4)]


def test_learnt_thresholds_beat_uniform_ones_and_are_no_accident(trained: Any):
    """A do-nothing allocator (no step) and one with the sign flipped lose."""
    text = trained[1]
    scores = collect_importance(trained[0], text)

    def loss(steps: int, sign: int = 1) -> float:
        model = copy.deepcopy(trained[0])
        alloc = LuaAllocator(model, scores, 0.6)
        if steps:
            alloc.fit(text, steps=steps, lr=0.01)
        with torch.no_grad():
            for t in alloc.parameters():
                t.copy_(0.6 + sign * (t - 0.6))
        assert alloc.apply().converged
        with torch.no_grad():
            return float(sum(model(x, labels=x).loss for x in text) / 4)

    learnt, uniform, flipped = loss(25), loss(0), loss(25, sign=-1)
    assert learnt < uniform - 0.015 and uniform < flipped - 0.015


def test_training_that_was_killed_goes_on_as_if_uncut(tmp_path: Path):
    stream = torch.randint(3, 40, (400,), generator=torch.Generator().manual_seed(0))

    def source() -> Batches:
        return Batches(stream, batch=2, length=12, generator=torch.Generator().manual_seed(1))

    def run(folder: Path, die_after: int | None = None, batches: Any = None) -> LuaAllocator:
        def on_step(step: Any) -> None:
            if step.step == die_after:
                raise KeyboardInterrupt

        alloc = made()
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        settings = {"steps": 8, "checkpoint_every": 2, "resume": StageContext(folder, seed=0)}
        alloc.fit(batches or source(), on_step=on_step, **settings)
        return alloc

    listed = [ids(2, seed=i) for i in range(3)]
    for name, batches in (("stream", None), ("list", listed)):
        whole = run(tmp_path / name / "whole", batches=batches)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / name / "cut", die_after=5, batches=batches)
        again = run(tmp_path / name / "cut", batches=batches)
        for a, b in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b)
        (file,) = [f for f in (tmp_path / name / "cut" / "checkpoint").rglob("*") if f.is_file()][:1]
        assert file.stat().st_size < 60_000  # thresholds and moments, not the model


def test_mode_comes_back_and_dropout_does_not_matter_to_bits():
    alloc = made()
    alloc.model.train()
    alloc.model.model.layers[1].eval()
    before = {name: module.training for name, module in alloc.model.named_modules()}
    alloc.fit([ids()], steps=1)
    alloc.unparametrize()
    assert {name: module.training for name, module in alloc.model.named_modules()} == before


def test_batches_that_run_out_are_refused():
    with pytest.raises(UsageError, match="can be read only once"):
        made().fit(iter([ids()]), steps=1)
    with pytest.raises(UsageError, match="ran out in step 1"):
        made().fit([], steps=1)
    with pytest.raises(UsageError, match=r"lr=0\.0 must be positive"):
        made().fit([ids()], steps=1, lr=0.0)


def test_a_dataloader_is_read_over_and_over():
    rows = [{"input_ids": row, "labels": row} for row in ids(6)]
    done = made().fit(DataLoader(rows, batch_size=4), steps=5)  # type: ignore[arg-type]
    assert done.steps == 5 and done.tokens == 12 * (4 + 2 + 4 + 2 + 4)


def test_allocate_gives_shares_and_leaves_the_model_alone():
    model = tiny_family("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    needed = [p.requires_grad for p in model.parameters()]
    found = allocate(model, [ids()], sparsity=0.6, steps=3, exclude=["o_proj"])
    state = model.state_dict()
    assert state.keys() == before.keys() and all(torch.equal(before[n], t) for n, t in state.items())
    assert [p.requires_grad for p in model.parameters()] == needed
    shapes = {name: (len(r), 16 if "down" not in name else 24) for name, r in found.ratios.items()}
    assert found.axis == "row" and not any("o_proj" in name for name in shapes)
    assert found.mean(shapes) == pytest.approx(0.6, abs=1e-3)
    with pytest.raises(GnomonError):
        allocate(model, [ids() + 100], sparsity=0.6, steps=3)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("through", ["plain", "ours"])
def test_transformers_trainer_trains_thresholds(tmp_path: Path, through: str):
    """Truth: three steps by hand on the same rows; two accumulated batches count the penalty once."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "attention_mask": torch.ones(12).long(), "labels": row} for row in ids(12)]
    arguments = TrainingArguments(
        str(tmp_path),
        learning_rate=0.01,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
        data_seed=0,
    )
    alloc = made()
    order: list[Tensor] = []
    if through == "ours":
        trainer = LuaTrainer(alloc, arguments, train_dataset=rows)
    else:
        trainer = Trainer(alloc.parametrize(), arguments, train_dataset=rows)
    alloc.register_forward_pre_hook(lambda m, a, kw: order.append(kw["input_ids"].clone()), with_kwargs=True)
    trainer.train()
    by_hand = made().parametrize()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01, weight_decay=0.0)
    assert len(order) == 6
    for step in range(3):
        for x in order[2 * step : 2 * step + 2]:
            (by_hand(x, labels=x).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(alloc.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    if through == "ours":
        logs = [entry for entry in trainer.state.log_history if "sparsity" in entry]
        assert len(logs) >= 3 and logs[-1]["sparsity"] == pytest.approx(alloc.sparsity_report().sparsity)
    assert alloc.apply().converged


def test_the_trainer_wants_an_allocator_and_is_imported_late():
    with pytest.raises(UsageError, match="got a LlamaForCausalLM"):
        LuaTrainer(tiny_family("llama"))
    code = "import sys, gnomon.methods.compress.lua; assert 'transformers.trainer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    module = importlib.import_module("gnomon.methods.compress.lua")
    with pytest.raises(AttributeError, match="LuaTrainr"):
        _ = module.LuaTrainr
