"""The training loop against a plain loop, hand values, and itself in other forms (accumulated, interrupted)."""

from __future__ import annotations

import random
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnomon.core import checkpoint, files
from gnomon.core.errors import GnomonError, MissingExtra, NumericalFailure, UsageError
from gnomon.core.seeding import seeded
from gnomon.core.train import Step, TrainConfig, TrainResult, next_token_loss, schedule_factor, train


class Random:
    """Batches (rows, 8) of random tokens; the generator is the position."""

    def __init__(self, rows: int = 2, seed: int = 5) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        return torch.randint(3, 40, (self.rows, 8), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Given:
    """A fixed list of batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at = batches, 0

    def __next__(self) -> Any:
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Owner:
    """Stands in for a stage's context."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder
        self.records: list[dict[str, Any]] = []

    def snapshot(self) -> list[dict[str, Any]]:
        return list(self.records)

    def restore(self, records: list[dict[str, Any]]) -> None:
        self.records = records


class Vector(nn.Module):
    """Two weights, so that a step can be written down by hand."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


def linear_loss(gradient: tuple[float, ...]) -> Any:
    """A loss whose gradient is the given vector everywhere."""
    return lambda model, _: (model.w * torch.tensor(gradient)).sum()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --------------------------------------------------------------------------------- against a plain loop


def test_equals_a_plain_loop_bit_for_bit(tiny_lm: Any) -> None:
    config = TrainConfig(steps=5, lr=1e-2, warmup=2, schedule="linear", clip=0.5)
    model = tiny_lm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Step] = []
    result = train(model, Random(), optimizer, config, on_step=seen.append)

    plain, batches, losses = tiny_lm(), Random(), []
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    for lr in (0.5e-2, 1e-2, 1e-2, 1e-2 * (1 - 1 / 3), 1e-2 * (1 - 2 / 3)):
        x = next(batches)
        loss = plain(input_ids=x, labels=x).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.param_groups[0]["lr"] = lr
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        losses.append(loss.item())
    assert result.losses == losses
    assert same(weights(model), weights(plain))
    assert (result.steps, result.tokens) == (5, 5 * 2 * 8)
    assert [(s.step, s.tokens) for s in seen] == [(i, 16 * i) for i in range(1, 6)]
    assert [s.loss for s in seen] == losses
    assert not model.training  # as it was found
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_accumulation_follows_one_large_batch(tiny_lm: Any) -> None:
    """1 x 8 rows and 8 x 1 row, rows of unequal length: each target counts once, whatever its batch."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(4):
        x = torch.randint(3, 40, (8, 9), generator=generator)
        mask = (torch.arange(9) < torch.randint(2, 10, (8, 1), generator=generator)).long()
        steps.append({"input_ids": x, "attention_mask": mask})
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for batch in steps for i in range(8)]
    results, models = [], []
    for batches, accumulate in ((steps, 1), (rows, 8)):
        model = tiny_lm()
        config = TrainConfig(steps=4, schedule="constant", accumulate=accumulate)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        results.append(train(model, Given(batches), optimizer, config))
        models.append(model)
    assert results[0].tokens == results[1].tokens == sum(int(b["attention_mask"].sum()) for b in steps)
    assert results[0].losses == pytest.approx(results[1].losses, rel=1e-5)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_same_seed_same_weights(tiny_lm: Any) -> None:
    def run(seed: int) -> tuple[TrainResult, dict[str, Tensor]]:
        model = tiny_lm("gpt2", resid_pdrop=0.2)
        with seeded(seed):
            result = train(model, Random(), torch.optim.AdamW(model.parameters()), TrainConfig(steps=3))
        return result, weights(model)

    (a, wa), (b, wb), (_, wc) = run(1), run(1), run(2)
    assert a.losses == b.losses
    assert same(wa, wb)
    assert not same(wa, wc)  # another seed drops other units


def test_gradients_are_freed_before_the_next_step(tiny_llama: Any) -> None:
    alive: list[bool] = []
    kept: list[Any] = []

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        alive.extend(ref() is not None for ref in kept)
        return next_token_loss(model, batch)

    weight = tiny_llama.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda p: kept.append(weakref.ref(p.grad)))
    optimizer = torch.optim.AdamW(tiny_llama.parameters())
    train(tiny_llama, Random(), optimizer, TrainConfig(steps=3), loss_fn=loss_fn)
    assert alive == [False] * 3  # of one step before the second, of two before the third


def test_autocast_computes_in_bfloat16_and_keeps_weights(tiny_llama: Any) -> None:
    kinds = set()
    tiny_llama.lm_head.register_forward_hook(lambda _m, _a, out: kinds.add(out.dtype))
    config = TrainConfig(steps=1, autocast="bf16")
    train(tiny_llama, Random(), torch.optim.SGD(tiny_llama.parameters(), lr=0.1), config)
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in tiny_llama.parameters()} == {torch.float32}


# ----------------------------------------------------------------------------------------- hand values


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"schedule": "constant", "warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ({"schedule": "linear", "warmup": 4, "min_lr_ratio": 0.2}, [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4]),
        ({"schedule": "cosine", "warmup": 4, "min_lr_ratio": 0.5}, [0.25, 0.5, 0.75, 1, 1, 0.9267767, 0.75, 0.5732233]),
        ({"schedule": "wsd", "decay": 0.5}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ({"schedule": "wsd", "decay": 0.25, "warmup": 2, "min_lr_ratio": 0.5}, [0.5, 1, 1, 1, 1, 1, 1, 0.75]),
    ],
)  # fmt: skip
def test_schedule_by_hand(settings: dict[str, Any], factors: list[float]) -> None:
    config = TrainConfig(steps=8, **settings)
    assert [schedule_factor(config, step) for step in range(8)] == pytest.approx(factors)


def test_groups_keep_their_ratio_by_hand() -> None:
    """Peaks 0.4 and 0.04 (lr=0.4 on groups 1.0 and 0.1), warm-up 1/2, 1: moves 0.2 + 0.4 and 0.02 + 0.04."""
    model = nn.ModuleList([Vector(0.0), Vector(0.0)])
    optimizer = torch.optim.SGD([{"params": [model[0].w], "lr": 1.0}, {"params": [model[1].w], "lr": 0.1}])
    config = TrainConfig(steps=2, lr=0.4, warmup=2, schedule="constant", clip=None)
    train(model, Random(), optimizer, config, loss_fn=lambda m, _: (m[0].w + m[1].w).sum())
    assert model[0].w.item() == pytest.approx(-0.6)
    assert model[1].w.item() == pytest.approx(-0.06)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]


@pytest.mark.parametrize(
    ("clip", "expected"), [(2.5, (-1.5, -2.0)), (10.0, (-3.0, -4.0)), (None, (-3.0, -4.0))]
)
def test_clip_by_hand(clip: float | None, expected: tuple[float, float]) -> None:
    """Gradient (3, 4) has norm 5; SGD with rate 1 moves by its clipped negative."""
    model, seen = Vector(0.0, 0.0), []
    config = TrainConfig(steps=1, schedule="constant", clip=clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, Random(), optimizer, config, loss_fn=linear_loss((3.0, 4.0)), on_step=seen.append)
    assert model.w.tolist() == pytest.approx(expected, rel=1e-5)
    assert seen[0].grad_norm == pytest.approx(5)


# ------------------------------------------------------------------------------------------- resuming


class Cut(Exception):
    pass


def run(folder: Path, tiny_lm: Any, *, cut: int | None = None, every: int | None = 2) -> Any:
    """Train from nothing but what `folder` holds; records and draws from every global generator on the way."""
    owner = Owner(folder)
    model = tiny_lm("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = TrainConfig(steps=7, warmup=3, accumulate=2, checkpoint_every=every)

    def on_step(step: Step) -> None:
        # Python's own generator is tested below: beartype, where switched on, draws from it at every call.
        draws = [float(np.random.rand()), float(torch.rand(())), float(np.random.randn())]
        owner.records.append({"step": step.step, "loss": step.loss, "tokens": step.tokens, "draws": draws})
        if step.step == cut:
            raise Cut

    with seeded(3):
        owner.records.append({"begun": True})  # what the stage wrote before training
        result = train(model, Random(), optimizer, config, resume=owner, on_step=on_step)
    return weights(model), result.losses, result.tokens, owner.records


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (6,), (7,), (3, 3, 5, 6)])
def test_resumed_equals_straight_bit_for_bit(tiny_lm: Any, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    straight = run(tmp_path / "straight", tiny_lm, every=None)
    assert not (tmp_path / "straight").exists()
    for cut in cuts:
        with pytest.raises(Cut):
            run(tmp_path / "cut", tiny_lm, cut=cut)
    resumed = run(tmp_path / "cut", tiny_lm)
    assert same(resumed[0], straight[0])
    assert resumed[1:] == straight[1:]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["train-00000006"]


def test_random_states_come_back() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]

    with seeded(8):
        draw()  # leaves half a pair of normal numbers in Python's and NumPy's generators
        states = checkpoint.random_states()
        first = draw()
        assert draw() != first
        checkpoint.set_random_states(states)
        assert draw() == first


def test_a_finished_loop_is_not_repeated(tiny_lm: Any, tmp_path: Path) -> None:
    first = run(tmp_path, tiny_lm, every=7)
    again = run(tmp_path, tiny_lm, every=7, cut=1)  # a step would raise
    assert same(first[0], again[0])
    assert first[1:] == again[1:]


@pytest.mark.parametrize("fault", ["_replace", "_fsync", "save"])
def test_a_failed_write_leaves_the_checkpoint_before(
    tiny_lm: Any, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(tmp_path / "straight", tiny_lm, every=None)
    owner, name = (torch, fault) if fault == "save" else (files, fault)
    genuine, calls = getattr(owner, name), 0

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (3 if fault == "_fsync" else 2):  # a file and a folder are synced per checkpoint
            raise OSError("no space left")
        return genuine(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, second_fails)
        with pytest.raises(OSError, match="no space"):
            run(tmp_path / "cut", tiny_lm)
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["train-00000002"]
    (tmp_path / "cut" / ".train-00000004.x.tmp").mkdir()  # what SIGKILL would have left
    resumed = run(tmp_path / "cut", tiny_lm)
    assert same(resumed[0], straight[0])
    assert resumed[1:] == straight[1:]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["train-00000006"]


def test_two_loops_of_one_owner_keep_apart(tmp_path: Path) -> None:
    def phase(name: str, steps: int) -> TrainResult:
        model = Vector(0.0, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        config = TrainConfig(steps=steps, checkpoint_every=1)
        return train(
            model,
            Random(),
            optimizer,
            config,
            resume=Owner(tmp_path),
            loss_fn=linear_loss((1.0, 1.0)),
            name=name,
        )

    assert phase("first", 2).steps == 2
    assert phase("second", 3).steps == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-00000002", "second-00000003"]


def test_checkpoint_of_other_settings_is_refused(tiny_lm: Any, tmp_path: Path) -> None:
    with pytest.raises(Cut):
        run(tmp_path, tiny_lm, cut=3)
    model = tiny_lm("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = TrainConfig(steps=9, warmup=3, accumulate=2, checkpoint_every=2)
    with pytest.raises(GnomonError, match=r"other settings \(steps=7 there, 9 here\)"):
        train(model, Random(), optimizer, config, resume=Owner(tmp_path))


def test_checkpoints_hold_plain_values_only(tmp_path: Path) -> None:
    state = {
        "a": torch.ones(2),
        "b": {"c": [1, 2.0, "x", None, (True,)]},
        "random": checkpoint.random_states(),
    }
    checkpoint.save(tmp_path, "t", 3, state)
    assert torch.load(tmp_path / "t-00000003" / "state.pt", weights_only=True)["b"] == state["b"]
    for bad in (np.float64(1), np.ones(2), Path("x"), {1, 2}):
        with pytest.raises(GnomonError, match=r"state\['b'\]\[1\] is a .* which a checkpoint can't hold"):
            checkpoint.save(tmp_path, "t", 4, {"b": [0, bad]})
    assert [path.name for path in tmp_path.iterdir()] == ["t-00000003"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, "t", 3, {"a": 1})
    path = tmp_path / "t-00000003" / "state.pt"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(GnomonError, match=r"state\.pt can't be read .* damaged; remove .*t-00000003"):
        checkpoint.load(tmp_path, "t")


def test_checkpoint_needs_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2_000_000}))
    checkpoint.save(tmp_path, "t", 1, {"a": torch.zeros(1000)})
    with pytest.raises(GnomonError, match="2 MB free, but 5 MB are needed"):
        checkpoint.save(tmp_path, "t", 2, {"a": torch.zeros(1_000_000)})


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("loss_fn", "start", "what"),
    [
        (lambda m, _: m.w.sum() * torch.nan, 1.0, r"loss nan"),
        (lambda m, _: m.w.sqrt().sum(), 0.0, r"gradient norm inf \(loss 0\)"),
    ],
)
def test_numbers_that_leave_stop_before_the_step(loss_fn: Any, start: float, what: str) -> None:
    model = Vector(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = TrainConfig(steps=4, warmup=2, clip=None)
    with pytest.raises(
        NumericalFailure, match=rf"step 1 of 4: {what} at learning rate 0.25.*lower lr.*clip=1.0"
    ):
        train(model, Random(), optimizer, config, loss_fn=loss_fn)
    assert model.w.item() == start
    assert model.w.grad is None


def test_bad_input_is_refused(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(tiny_llama.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="Batches ran out in step 2 of 3"):
        train(tiny_llama, Given([next(Random())]), optimizer, TrainConfig(steps=3))
    with pytest.raises(UsageError, match="holds no target token"):
        train(tiny_llama, Given([torch.ones(2, 1).long()]), optimizer, TrainConfig(steps=1))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match="No parameter of the optimizer received a gradient"):
        train(tiny_llama, Random(), stranger, TrainConfig(steps=1))
    resting = torch.optim.SGD(tiny_llama.parameters(), lr=0.0)
    with pytest.raises(UsageError, match=r"first group's learning rate is 0\.0.*lr=0\.1"):
        train(tiny_llama, Random(), resting, TrainConfig(steps=1, lr=0.1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match=r"needs accelerate.*gnomon\[train\]"):
        train(tiny_llama, Random(), optimizer, TrainConfig(steps=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"warmup": 9}, r"warmup=9 must lie in \[0, steps=8\]"),
        ({"schedule": "step"}, r"Unknown schedule 'step'. Known: constant, cosine, linear, wsd"),
        ({"autocast": "fp16"}, r"Unknown autocast 'fp16'. Did you mean 'bf16'"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
        ({"decay": 0.0}, "decay=0.0"),
        ({"clip": 0.0}, "clip=0.0 would stop training.*None"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{"steps": 8, **change})
