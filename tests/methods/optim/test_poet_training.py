"""Merging on schedule in plain loops, Gnomon's loop, the Trainer and on two ranks: cut runs go on as uncut ones."""

from __future__ import annotations

import io
import logging
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core import tiny
from gnomon.core.errors import MissingExtra, NumericalFailure, UsageError
from gnomon.core.seeding import seeded
from gnomon.core.train import Step, TrainConfig, train
from gnomon.methods.optim import poet
from gnomon.methods.optim.numuon import MuonWithAdamW
from gnomon.methods.optim.poet import (
    MergeSchedule,
    POETConfig,
    apply_poet,
    clip_factor,
    merge_on_schedule,
    merge_poet,
    poet_layers,
    poet_param_groups,
    record_spectra,
    spectrum_report,
)

SCRIPT = Path(__file__).with_name("poet_ranks_script.py")


def build(**config: Any) -> nn.Module:
    """Two of seven layers in each of three decoder layers, to be quick."""
    with seeded(2):
        model = tiny.build("tiny:llama-10k")
    few = {"block_size": 8, "merge_interval": 4, "target_modules": ("q_proj", "down_proj")}
    apply_poet(model, POETConfig(**{**few, **config}))
    return model


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(poet_param_groups(model, base_lr=lr, poet_lr=2 * lr))


def batch(t: int) -> Tensor:
    return torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(t))


def walk(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float | None = None
) -> list[float]:
    """A plain loop, as a user writes it."""
    losses = []
    for t in steps:
        loss = model(batch(t), labels=batch(t)).loss
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------ the schedule


def test_merges_clear_the_rotations_state_and_only_theirs() -> None:
    model = build()
    optimizer = adamw(model)
    schedule = merge_on_schedule(model, optimizer)
    layer = next(iter(poet_layers(model).values()))
    rotations = [q for one in poet_layers(model).values() for q in (one.q_out, one.q_in)]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is q for q in rotations)]
    ids = [q.data_ptr() for q in rotations]
    for t in range(1, 10):
        before = layer.perm_in.clone()
        walk(model, optimizer, range(t, t + 1))
        merged = t % 4 == 0
        assert (schedule.merges, schedule.steps) == (t // 4, t % 4)
        assert torch.equal(layer.perm_in, before) != merged
        assert all((q in optimizer.state) != merged for q in rotations)
        assert all(bool(q.any()) != merged for q in rotations)
        if (
            not merged
        ):  # counted from the merge, so that the first step in a new frame has Adam's first bias correction
            assert {int(optimizer.state[q]["step"]) for q in rotations} == {t % 4}
        assert {int(optimizer.state[p]["step"]) for p in others} == {t}
    assert [q.data_ptr() for q in rotations] == ids


def test_a_merge_changes_no_loss_and_stale_moments_would() -> None:
    """The loss right after a merge is that before it; the next step follows a fresh Adam and no other."""
    model = build(merge_interval=100)
    optimizer = adamw(model)
    schedule = merge_on_schedule(model, optimizer)
    walk(model, optimizer, range(5))
    before = model(batch(9), labels=batch(9)).loss.item()
    state = weights(model)
    schedule.merge()
    assert model(batch(9), labels=batch(9)).loss.item() == pytest.approx(before, rel=1e-6)
    assert not same(weights(model), state)
    first = next(iter(poet_layers(model).values()))
    walk(model, optimizer, range(9, 10))
    step = 2 * 3e-3  # the first step of Adam has the size of the rate in each entry that has a gradient
    assert float(first.q_in.detach().abs().max()) == pytest.approx(step, rel=1e-3)


def test_training_learns_and_keeps_the_spectrum() -> None:
    """A flipped sign climbs and rotations that stand still learn less; the drift is bounded, not only the loss."""
    losses = {}
    for kind, rate in (("poet", 1e-2), ("still", 0.0), ("flipped", -1e-2)):
        model = build(neumann_terms="exact", merge_interval=5)
        start = record_spectra(model)
        begin = {name: layer.weight.detach().clone() for name, layer in poet_layers(model).items()}
        optimizer = torch.optim.AdamW(
            poet_param_groups(model, base_lr=0.0, poet_lr=abs(rate)), maximize=rate < 0
        )
        merge_on_schedule(model, optimizer)
        for _ in range(12):
            loss = model(batch(0), labels=batch(0)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[kind] = loss.item()
        report = spectrum_report(model, start)
        assert max(one.drift or 0 for one in report.values()) < 1e-5
        moved = min(
            float((layer.weight - begin[n]).norm().detach()) for n, layer in poet_layers(model).items()
        )
        assert (moved > 0.05) == (kind != "still")
    assert losses["poet"] < losses["still"] - 0.03
    assert losses["flipped"] > losses["still"] + 0.03


def test_the_clipping_ramp() -> None:
    """A tenth in the first step after a merge, whole after ten, and never before the first merge; then the ramp at
    work: the norm that the optimizer sees."""
    assert [clip_factor(0, s, 10) for s in (0, 5)] == [1, 1]
    assert [clip_factor(1, s, 10) for s in (0, 1, 5, 9, 10, 50)] == pytest.approx(
        [0.1, 0.19, 0.55, 0.91, 1, 1]
    )
    assert clip_factor(3, 0, 0) == 1
    for clip in (0.02, None):
        model = build(clip_ramp_steps=3)
        optimizer = adamw(model)
        merge_on_schedule(model, optimizer, clip=clip)
        seen: list[float] = []

        def look(optimizer: Any, *_: Any, seen: list[float] = seen) -> None:
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            seen.append(float(nn.utils.get_total_norm(grads)))

        optimizer.register_step_pre_hook(look)
        walk(model, optimizer, range(9), clip=0.02)
        ramp = [0.1, 0.4, 0.7, 1] if clip else [1.0] * 4
        assert seen == pytest.approx([0.02 * f for f in (1, 1, 1, 1, *ramp, ramp[0])], rel=1e-3)


@pytest.mark.parametrize(
    ("cut", "config"), [(6, {}), (8, {"variant": "fs", "neumann_terms": "exact", "forward": "input_ckpt"})]
)
def test_a_cut_run_goes_on(cut: int, config: dict[str, Any]) -> None:
    """In the middle of an interval (6) and right after a merge (8); the resumed process has drawn differently."""
    model = build(**config)
    optimizer = adamw(model)
    merge_on_schedule(model, optimizer, clip=1.0)
    straight = walk(model, optimizer, range(cut), clip=1.0)
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    straight += walk(model, optimizer, range(cut, 13), clip=1.0)
    again = build(**config)
    second = adamw(again)
    schedule = merge_on_schedule(again, second, clip=1.0)
    walk(again, second, range(20, 21))
    again.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    assert (schedule.merges, schedule.steps) == (cut // 4, cut % 4)
    assert walk(again, second, range(cut, 13), clip=1.0) == straight[cut:]
    assert same(weights(model), weights(again))


class Random:
    """Endless batches that know their position."""

    def __init__(self) -> None:
        self.t = 0

    def __next__(self) -> Tensor:
        self.t += 1
        return batch(self.t)

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]


class Owner:
    """Stands in for a stage's context."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder
        self.records: list[dict[str, Any]] = []

    def snapshot(self) -> list[dict[str, Any]]:
        return list(self.records)

    def restore(self, records: list[dict[str, Any]]) -> None:
        self.records = records


class KilledError(Exception):
    pass


def test_gnomons_loop_resumes_in_the_middle_of_an_interval(tmp_path: Path) -> None:
    """Killed in step 8 of 12 with a checkpoint of step 6, two steps after a merge; two batches a step, autocast."""
    config = TrainConfig(
        steps=12, warmup=2, checkpoint_every=6, clip=0.5, accumulate=2, autocast="bf16", lr=3e-3
    )

    def killed(step: Step) -> None:
        if step.step == 8:
            raise KilledError

    def run(folder: Path, on_step: Callable[[Step], None] | None = None) -> tuple[list[float], nn.Module]:
        model = build()
        optimizer = adamw(model)
        merge_on_schedule(model, optimizer, clip=0.5)
        done = train(model, Random(), optimizer, config, resume=Owner(folder), on_step=on_step)
        assert poet_layers(model)["model.layers.0.self_attn.q_proj"].merges == 3
        return done.losses, model

    losses, model = run(tmp_path / "straight")
    with pytest.raises(KilledError):
        run(tmp_path / "killed", killed)
    again, resumed = run(tmp_path / "killed")
    assert again == losses
    assert same(weights(model), weights(resumed))
    assert losses[-1] < losses[0]


def test_accumulation_and_checkpointing_follow_one_pass() -> None:
    """Two halves of a batch with gradient checkpointing against the whole one, across a merge."""
    found = []
    for halves, forward in ((False, "weight"), (True, "weight"), (True, "input_ckpt")):
        model = build(merge_interval=2, forward=forward)
        if halves:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.train()
        optimizer = adamw(model)
        merge_on_schedule(model, optimizer)
        for t in range(4):
            for part in batch(t).chunk(2) if halves else [batch(t)]:
                (model(part, labels=part).loss / (2 if halves else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model(batch(7)).logits.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-3, atol=1e-5)


def test_other_optimizers_and_wrappers() -> None:
    """Any torch optimizer, a schedule of rates on top, Accelerate's wrapper, a model in bfloat16."""
    accelerate = pytest.importorskip("accelerate")
    for name in ("sgd", "adamw in a wrapper", "rmsprop", "bfloat16"):
        with seeded(2):
            model = tiny.build("tiny:llama-10k").to(torch.bfloat16 if name == "bfloat16" else torch.float32)
        apply_poet(model, POETConfig(block_size=8, merge_interval=2, target_modules=("q_proj",)))
        groups = poet_param_groups(model, base_lr=1e-3, poet_lr=1e-2)
        optimizer: Any = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}.get(
            name, torch.optim.AdamW
        )(groups)
        if name == "adamw in a wrapper":
            optimizer = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
        schedule = merge_on_schedule(model, optimizer)
        rates = torch.optim.lr_scheduler.ExponentialLR(schedule.optimizer, 0.9)
        losses = []
        for _ in range(5):
            losses += walk(model, optimizer, range(1))
            rates.step()
        assert (schedule.merges, schedule.steps) == (2, 1)
        assert losses[-1] < losses[0]
        layer = next(iter(poet_layers(model).values()))
        assert layer.q_in.dtype == torch.float32


def test_the_newest_schedule_counts_and_detaches() -> None:
    model = build()
    first = adamw(model)
    old = merge_on_schedule(model, first)
    second = adamw(model)
    new = merge_on_schedule(model, second)
    assert new.active and not old.active
    walk(model, first, range(2))
    assert new.steps == 0
    walk(model, second, range(4))
    assert (new.merges, new.steps) == (1, 0)
    new.detach()
    walk(model, second, range(4))
    assert (new.merges, new.steps) == (1, 0) and not new.active


def test_a_closure_is_a_step_too() -> None:
    model = build(merge_interval=2)
    optimizer = adamw(model)
    schedule = merge_on_schedule(model, optimizer)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(batch(0), labels=batch(0)).loss
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(5)]
    assert (schedule.merges, schedule.steps) == (2, 1)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------------ refusals


def test_what_a_schedule_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with seeded(2):
        plain = tiny.build("tiny:llama-10k")
    early = torch.optim.AdamW(plain.parameters())
    with pytest.raises(UsageError, match="LlamaForCausalLM has no POET layer"):
        merge_on_schedule(plain, early)
    model = build()
    with pytest.raises(
        UsageError, match=r"12 of 12 rotations aren't in the optimizer, .* built before apply_poet"
    ):
        merge_on_schedule(model, early)
    with pytest.raises(UsageError, match=r"clip=0 must be a positive norm"):
        merge_on_schedule(model, adamw(model), clip=0)
    with pytest.raises(UsageError, match=r"object is no torch optimizer and holds none"):
        merge_on_schedule(model, object())
    assert not caplog.text
    merge_on_schedule(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    assert (
        "decays 12 rotations, first model.layers.0.self_attn.q_proj.q_out: weight decay pulls" in caplog.text
    )
    layer = next(iter(poet_layers(model).values()))
    layer.q_in.full_tensor = None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"q_proj.q_in is sharded, but a merge needs whole"):
        merge_on_schedule(model, adamw(model))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_no_numbers_change_nothing(bad: float) -> None:
    model = build()
    optimizer = adamw(model)
    schedule = merge_on_schedule(model, optimizer, clip=1.0)
    walk(model, optimizer, range(2))
    before = weights(model)
    loss = model(batch(0), labels=batch(0)).loss
    loss.backward()
    layer = poet_layers(model)["model.layers.1.mlp.down_proj"]
    assert layer.q_in.grad is not None
    layer.q_in.grad[1, 3] = bad
    with pytest.raises(
        NumericalFailure, match=r"gradients of 1 of 12 rotations .* first that of .*1.mlp.down_proj.q_in"
    ):
        optimizer.step()
    assert same(weights(model), before) and schedule.steps == 2
    layer.q_in.grad = None
    with pytest.raises(
        UsageError, match=r"1 of 12 rotations have no gradient, first .*1.mlp.down_proj.q_in.*exclude"
    ):
        optimizer.step()
    assert same(weights(model), before) and schedule.steps == 2


def test_rotations_that_are_no_numbers_stop_every_merge() -> None:
    model = build()
    schedule = merge_on_schedule(model, adamw(model))
    last = list(poet_layers(model).values())[-1]
    with torch.no_grad():
        last.q_in[0, 0] = math.nan
    before = weights(model)
    with pytest.raises(NumericalFailure, match=r"rotations of a 16 x 24 layer hold NaN"):
        schedule.merge()
    assert all(torch.equal(v, before[n]) or v.isnan().any() for n, v in weights(model).items())
    assert schedule.merges == 0


def test_an_optimizer_of_matrices_can_share_the_model() -> None:
    """NuMuon for what isn't wrapped, AdamW for the rotations: the schedule sits on the one that holds them."""
    model = build(merge_interval=2, target_modules=("q_proj",))
    base, rotations = poet_param_groups(model, base_lr=1e-3, poet_lr=1e-2)
    matrices = [m.weight for n, m in model.named_modules() if n.endswith("down_proj")]
    rest = [p for p in base["params"] if not any(p is m for m in matrices)]
    muon, adam = MuonWithAdamW(matrices, rest, lr=1e-3), torch.optim.AdamW([rotations])
    schedule = merge_on_schedule(model, adam)
    losses = []
    for _ in range(5):
        loss = model(batch(0), labels=batch(0)).loss
        loss.backward()
        for one in (muon, adam):
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    assert schedule.merges == 2 and losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------ ranks and the Trainer


def test_two_ranks_follow_one_process_and_resume_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal permutations on both gloo processes even where their seeds differ; a checkpoint of two ranks goes on in
    one process, which has the same merges."""
    env = os.environ | {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)],
            env=env | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for one in ranks:
            _, errors = one.communicate(timeout=240)
            assert one.returncode == 0, errors[-3000:]
    finally:
        for one in ranks:
            one.kill()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "0", "1"))
    for kind in ("state", "other"):
        assert first[f"{kind} merges"] == [2, 2]
        names = [name for name in first[kind] if not name.endswith("_extra_state")]
        assert len(names) == 12
        assert all(torch.equal(first[kind][name], second[kind][name]) for name in names)
    assert torch.equal(first["state"]["0.perm_in"], first["other"]["0.perm_in"])
    assert first["losses"] == second["losses"] == first["other losses"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert alone["resumed"] == pytest.approx(alone["losses"][5:], rel=1e-5)
    assert len(alone["resumed"]) == 3


def trainer_of(folder: Path, model: nn.Module, optimizer: Any, callbacks: list[Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.arange(192).view(16, 12) % 50]
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 4)
    return Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, rates), callbacks=callbacks)


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    """With the callback, with the optimizer's hooks, and resumed from step 3, one step after a merge at 2."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    def trained(hooks: bool = False, resume: bool = False) -> nn.Module:
        model = build(merge_interval=2)
        optimizer = adamw(model)
        callbacks = [] if hooks else [poet.POETCallback()]
        if hooks:
            merge_on_schedule(model, optimizer, clip=0.5)
        trainer = trainer_of(tmp_path / str(hooks), model, optimizer, callbacks)
        trainer.train(resume_from_checkpoint=str(tmp_path / "False" / "checkpoint-3") if resume else None)
        if hooks:
            assert {layer.merges for layer in poet_layers(model).values()} == {2}
            merge_poet(model)
        assert not poet_layers(model)
        trainer.save_model(str(tmp_path / "saved"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(loaded(batch(0)).logits, model(batch(0)).logits)
        return model

    straight, hooked, resumed = trained(), trained(hooks=True), trained(resume=True)
    assert same(weights(straight), weights(resumed))
    assert same(weights(straight), weights(hooked))


def test_the_callback_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gnomon.methods.optim.poet.callback", None)
    with pytest.raises(MissingExtra, match=r"POETCallback needs .* pip install 'gnomon\[train\]'"):
        _ = poet.POETCallback
    with pytest.raises(AttributeError, match="no attribute 'POETCallbak'"):
        _ = poet.POETCallbak


def test_a_schedule_is_made_by_name_too(caplog: pytest.LogCaptureFixture) -> None:
    model = build(merge_interval=1)
    optimizer = adamw(model)
    schedule = MergeSchedule(model, optimizer)
    with caplog.at_level(logging.INFO, "gnomon"):
        walk(model, optimizer, range(1))
    assert schedule.merges == 1 and "POET: merge 1 of 6 layers" in caplog.text
