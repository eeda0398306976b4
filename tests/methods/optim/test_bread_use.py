"""BREAD among its neighbours: schedulers, resume, gnomon's loop, the HF Trainer, ranks; everything that is refused."""

from __future__ import annotations

import copy
import io
import math
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.core.train import Step, TrainConfig, train
from gnomon.methods.optim import bread
from gnomon.methods.optim.bread import (
    BlockOptimizer,
    LoRAExpansion,
    SGDExpansion,
    estimate_memory,
    make_blocks,
    preset,
)

torch.set_num_threads(1)

SCRIPT = Path(__file__).with_name("bread_ranks_script.py")
TOKENS = torch.randint(0, 259, (8, 2, 12), generator=torch.Generator().manual_seed(1))


def llama(dtype: torch.dtype = torch.float32) -> Any:
    with seeded(0):
        return build("tiny:llama-10k").to(dtype)


def optimizer_of(model: Any, name: str = "bread-lora", **options: Any) -> BlockOptimizer:
    given = {
        "lr": 3e-3,
        "switch_every": 3,
        "expansion": preset(name, rank=2, lr_scale=0.1 if "sign" in name else 5.0),
    }
    return BlockOptimizer(model, **(given | options))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def one_step(model: Any, optimizer: torch.optim.Optimizer, t: int) -> float:
    optimizer.zero_grad()
    x = TOKENS[t % len(TOKENS)]
    loss = model(x, labels=x).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("badam", torch.float32), *((name, torch.bfloat16) for name in bread.PRESETS if name != "bread-lora")],
)
def test_resuming_in_the_middle_of_a_block(name: str, dtype: torch.dtype) -> None:
    """After 5 of 11 steps at K = 3: bit for bit, over two more switches and a new epoch, with an active head."""
    options: dict[str, Any] = {
        "always_active": ["model.norm"],
        "scope": None if name == "badam" else "partial",
    }
    straight = llama(dtype)
    optimizer = optimizer_of(straight, name, **options)
    losses = [one_step(straight, optimizer, t) for t in range(11)]
    cut = llama(dtype)
    first = optimizer_of(cut, name, **options)
    for t in range(5):
        one_step(cut, first, t)
    kept = through_a_file({"model": cut.state_dict(), "optimizer": first.state_dict()})
    again = llama(dtype)
    second = optimizer_of(again, name, **options)
    one_step(again, second, 7)  # what it holds must be replaced
    again.load_state_dict(kept["model"])
    second.load_state_dict(kept["optimizer"])
    assert (second.step_in_block, second.active_block()) == (2, first.active_block())
    assert [one_step(again, second, t) for t in range(5, 11)] == losses[5:]
    assert same(weights(again), weights(straight))
    assert optimizer.turns.epoch == second.turns.epoch == 1


class Owner:
    """Stands in for a stage's context."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder

    def snapshot(self) -> list[dict[str, Any]]:
        return []

    def restore(self, records: list[dict[str, Any]]) -> None:
        pass


class Batches:
    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> Tensor:
        self.at += 1
        return TOKENS[self.at % len(TOKENS)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("name", ["badam", "bread-lora+", "bread-sgd"])
def test_a_killed_run_of_the_training_loop_goes_on(tmp_path: Path, name: str) -> None:
    config = TrainConfig(steps=9, lr=3e-3, warmup=2, accumulate=2, checkpoint_every=4)
    model = llama()
    expected = train(model, Batches(), optimizer_of(model, name), config).losses

    def kill(step: Step) -> None:
        if step.step == 6:
            raise KeyboardInterrupt

    cut = llama()
    with pytest.raises(KeyboardInterrupt):
        train(cut, Batches(), optimizer_of(cut, name), config, resume=Owner(tmp_path), on_step=kill)
    resumed = llama()
    optimizer = optimizer_of(resumed, name)
    found = train(resumed, Batches(), optimizer, config, resume=Owner(tmp_path))
    assert found.losses == expected
    assert same(weights(resumed), weights(model))
    assert (
        optimizer.active_block().name == optimizer.blocks[optimizer.turns.queue[0]].name
    )  # of the second epoch


def test_a_saved_state_of_something_else() -> None:
    model = llama()
    state = optimizer_of(model).state_dict()

    def load(changed: Any, **options: Any) -> None:
        optimizer_of(llama(), **options).load_state_dict(changed)

    load(state)
    with pytest.raises(UsageError, match=r"another schedule of blocks: switch_every=3 there, 4 here"):
        load(state, switch_every=4)
    with pytest.raises(UsageError, match=r"3 blocks there, 6 here"):
        load(state, blocks="sublayer")
    with pytest.raises(UsageError, match=r"order='random' there, 'fixed' here"):
        load(state, order="fixed")
    with pytest.raises(UsageError, match=r"expansion=.*'rank': 2.* there, 'none' here"):
        load(state, expansion=None)
    other = copy.deepcopy(state)
    other["bread"]["world"] = 2
    with pytest.raises(UsageError, match=r"written by 2 processes, here are 1.*state\['bread'\]\['world'\]"):
        load(other)
    with pytest.raises(UsageError, match="isn't a BlockOptimizer's: it names no blocks"):
        load(torch.optim.AdamW(llama().parameters()).state_dict())


def test_a_state_in_another_dtype_is_refused() -> None:
    model = llama(torch.bfloat16)
    optimizer = optimizer_of(model, "badam")
    one_step(model, optimizer, 0)
    with pytest.raises(
        UsageError, match=r"a wide copy of a parameter that is torch.float32 here.* another dtype"
    ):
        optimizer_of(llama(), "badam").load_state_dict(optimizer.state_dict())


# ------------------------------------------------------------------------------------------------- ecosystem


@pytest.mark.parametrize("name", bread.PRESETS)
def test_schedulers_reach_every_inner_group(name: str) -> None:
    """The trap: a rate of 0 must stop everything, adapters and on-the-fly steps included, and a ratio is kept."""
    model = llama()
    optimizer = optimizer_of(model, name, always_active=["model.norm"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: float(t < 4))
    for t in range(4):
        one_step(model, optimizer, t)
        scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    begin = weights(model)
    for t in range(4):
        one_step(model, optimizer, t)
        scheduler.step()
    assert same(weights(model), begin)
    if name == "bread-lora+":
        twin = optimizer_of(llama(), name)
        rates = {group["kind"]: group["lr"] for group in twin.param_groups}
        assert rates["u"] == pytest.approx(16 * rates["v"]) and rates["block"] == rates["v"]


@pytest.mark.parametrize("name", ["badam", "bread-lora"])
def test_accumulated_batches_equal_one(name: str) -> None:
    ours, theirs = llama(torch.float64), llama(torch.float64)
    options = {"expansion": None if name == "badam" else LoRAExpansion(rank=2), "master_dtype": torch.float64}
    one, other = (BlockOptimizer(m, lr=3e-3, switch_every=2, **options) for m in (ours, theirs))
    for t in range(5):
        x = TOKENS[t]
        one.zero_grad()
        for row in x:
            (ours(row[None], labels=row[None]).loss / 2).backward()
        one.step()
        other.zero_grad()
        theirs(x, labels=x).loss.backward()
        other.step()
    for name_, p in weights(ours).items():
        torch.testing.assert_close(p, weights(theirs)[name_], rtol=1e-9, atol=1e-11)


def test_accumulated_batches_are_steps_of_their_own_on_the_fly() -> None:
    """Their losses carry the division, signs don't."""
    for sign, batches in ((False, 1), (True, 2)):
        net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
        w = net[1].weight.detach().clone()
        optimizer = BlockOptimizer(
            net,
            lr=0.1,
            blocks=[["0"], ["1"]],
            order="fixed",
            expansion=SGDExpansion(lr_scale=1.0, sign=sign, batches=batches),
        )
        x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for part in x:
            h = (part @ net[0].weight.T).detach()
            gradient = h.mean(0, keepdim=True) / 2  # of a loss that is linear in w
            (net(part).mean() / 2).backward()
            w = w - (0.1 * gradient.sign() / 2 if sign else 0.1 * gradient)
        torch.testing.assert_close(net[1].weight.detach(), w)
        optimizer.step()


def test_a_tied_weight_on_the_fly() -> None:
    """Autograd sums both uses before the hook, so a tied embedding is updated once, with the whole gradient."""
    ours, theirs = llama(torch.float64), llama(torch.float64)
    optimizer = BlockOptimizer(
        ours,
        lr=1e-3,
        order="descending",
        include_embeddings=True,
        expansion=SGDExpansion(lr_scale=100.0),
    )
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    one_step(ours, optimizer, 0)
    theirs(TOKENS[0], labels=TOKENS[0]).loss.backward()
    table = theirs.model.embed_tokens.weight
    torch.testing.assert_close(
        ours.lm_head.weight.detach(), (table - 0.1 * table.grad).detach(), rtol=1e-12, atol=1e-12
    )


def test_the_backward_pass_stops_at_the_active_block() -> None:
    """Non-reentrant checkpointing too: nothing below needs a derivative, which is block descent's saving."""
    for checkpointing in (False, True):
        model = llama()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        optimizer = optimizer_of(model, "badam", order="descending")
        seen: list[bool] = []
        handle = model.model.layers[2].register_forward_pre_hook(
            lambda _, args, kept=seen: kept.append(args[0].requires_grad)
        )
        one_step(model, optimizer, 0)
        handle.remove()
        assert seen and not any(seen)
        optimizer.close()
        assert bool(getattr(model, "_require_grads_hooks", None)) == checkpointing  # as it was found


def test_closures_autocast_and_clipping() -> None:
    model = llama()
    optimizer = optimizer_of(model)
    x = TOKENS[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(x, labels=x).loss
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert float(norm) > 0
        return loss

    begin = weights(model)
    assert optimizer.step(closure).requires_grad
    assert not same(weights(model), begin)


def test_a_copied_model_is_its_own() -> None:
    """A deep copy for evaluation computes the same and leaves the optimizer alone."""
    model = llama()
    optimizer = optimizer_of(model)
    one_step(model, optimizer, 0)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS[0]).logits, model(TOKENS[0]).logits)
    one_step(model, optimizer, 1)
    assert not torch.equal(twin(TOKENS[0]).logits, model(TOKENS[0]).logits)


def test_a_folder_from_a_closed_model(tmp_path: Path) -> None:
    """The example a user would write, for every method: save_pretrained and back, equal logits."""
    from transformers import AutoModelForCausalLM

    for name in bread.PRESETS:
        model = llama()
        begin = weights(model)
        optimizer = BlockOptimizer(model, lr=3e-3, switch_every=5, expansion=preset(name, rank=4))
        for t in range(10):
            one_step(model, optimizer, t)
        optimizer.close()
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(again(TOKENS[0]).logits, model(TOKENS[0]).logits)
        assert not same(weights(model), begin) and set(weights(again)) == set(begin)
        optimizer.close()  # twice is once


def test_importing_loads_torch_but_not_transformers() -> None:
    modules = ("bread", "baselines.lomo", "baselines.lisa")
    imports = ", ".join(f"gnomon.methods.optim.{name}" for name in modules)
    code = f"import sys, {imports}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_hugging_face_trainer(tmp_path: Path, name: str = "bread-lora") -> None:
    """Optimizer argument, scheduler, accumulation, checkpointing, and a resume in the middle of a block."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from gnomon.methods.optim.bread import BlockCallback

    rows = [{"input_ids": row, "labels": row} for row in torch.arange(192).view(16, 12) % 50]

    def trained(resume: bool = False) -> tuple[nn.Module, BlockOptimizer]:
        model = llama()
        optimizer = optimizer_of(model, name)
        settings = TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=5,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 8)
        trainer = Trainer(
            model,
            settings,
            train_dataset=rows,
            optimizers=(optimizer, scheduler),
            callbacks=[BlockCallback(optimizer)],
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2") if resume else None)
        return model, optimizer

    (straight, optimizer), (resumed, _) = trained(), trained(resume=True)
    assert same(weights(straight), weights(resumed))
    assert not any("bread" in key for key in straight.state_dict())  # closed by the callback
    assert (optimizer.turns.position, optimizer.step_in_block) == (1, 2)
    signs = optimizer_of(straight, "bread-signsgd")
    BlockCallback(signs).on_train_begin(SimpleNamespace(gradient_accumulation_steps=2), None, None)
    assert signs.on_the_fly is not None and signs.on_the_fly.batches == 2


def run_ranks(script: Path, folder: Path) -> Any:
    """Two gloo processes must agree, and follow one; returns what the first wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][-2000:] + said[1][-2000:]
    runpy.run_path(str(script))["main"](folder)
    alone, first, second = (torch.load(folder / f"{name}.pt") for name in ("alone", "0", "1"))
    for method, expected in alone.items():
        assert same(first[method], second[method])
        # Sums in another order; Adam's first steps divide small gradients by their size.
        torch.testing.assert_close(first[method], expected, rtol=1e-4, atol=1e-5)
    return first


def test_two_ranks_follow_one_process(tmp_path: Path) -> None:
    """Ranks begin with other weights and another order each."""
    first = run_ranks(SCRIPT, tmp_path)
    assert first["state's world"] == 2
    for said, part in zip(
        first["refusals"], ("bare one", "Leave it unwrapped", "runs inside Dist"), strict=True
    ):
        assert part in said


@pytest.mark.slow
def test_two_ranks_of_the_training_loop(tmp_path: Path) -> None:
    """gnomon.core.train under the launcher, through Accelerate, which must not wrap the model. Starting takes long."""
    pytest.importorskip("accelerate")
    run_ranks(SCRIPT.with_name("bread_train_ranks_script.py"), tmp_path)


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "bad"), [("badam", math.inf), ("bread-lora", math.nan), ("bread-sgd", math.nan)]
)
def test_a_gradient_that_is_no_number(name: str, bad: float) -> None:
    """Nothing moves where all is bad; state, turn and draws go on as before."""
    model = llama()
    optimizer = optimizer_of(model, name)
    one_step(model, optimizer, 0)
    begin, state = weights(model), str(optimizer.state_dict()["bread"]["block"])
    optimizer.zero_grad()
    (model(TOKENS[0], labels=TOKENS[0]).loss * bad).backward()
    with pytest.raises(NumericalFailure, match=r"of \d+ .* NaN or infinity, first that of .*model\.layers\."):
        optimizer.step()
    assert same(weights(model), begin) and str(optimizer.state_dict()["bread"]["block"]) == state
    assert optimizer.step_in_block == 1
    one_step(model, optimizer, 1)
    assert optimizer.step_in_block == 2


class Fused(nn.Module):
    """Reads the weight of a linear map without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.nn.functional.linear(x, self.a.weight), self.b.weight)


def test_steps_that_would_do_nothing() -> None:
    model = llama()
    optimizer = optimizer_of(model, "badam")
    with pytest.raises(UsageError, match=r"active block 'model.layers.\d' got no gradient"):
        optimizer.step()
    net = Fused()
    expanded = BlockOptimizer(net, blocks=[["a"], ["b"]], order="fixed", expansion=LoRAExpansion(rank=1))
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"None of 1 adapters got a gradient.* Use SGDExpansion"):
        expanded.step()
    optimizer.close()
    with pytest.raises(UsageError, match="This optimizer was closed"):
        optimizer.step()
    with pytest.raises(UsageError, match="This optimizer was closed"):
        optimizer.load_state_dict({})


def test_sparse_gradients() -> None:
    table = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(UsageError, match=r"0.weight has a sparse gradient.* Use sparse=False"):
        BlockOptimizer(table, blocks=[["1"]])
    dense = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = BlockOptimizer(dense, blocks=[["0"], ["1"]], order="fixed")
    dense[0].weight.grad = torch.eye(2, 3).to_sparse()
    with pytest.raises(UsageError, match=r"0.weight has a sparse gradient"):
        optimizer.step()


def test_checkpointing_that_gives_no_gradients() -> None:
    model = llama()
    optimizer = optimizer_of(model, "badam")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    with pytest.raises(UsageError, match="uses reentrant gradient checkpointing"):
        model(TOKENS[0])
    optimizer.close()
    with pytest.raises(UsageError, match="uses reentrant gradient checkpointing"):
        optimizer_of(model)


def test_float16() -> None:
    with pytest.raises(
        UsageError, match=r"embed_tokens.weight is float16, whose gradients need a loss scale"
    ):
        optimizer_of(llama(torch.float16))
    model = llama()
    optimizer = optimizer_of(model, "bread-sgd")
    with (
        pytest.raises(UsageError, match="under float16 autocast"),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        model(TOKENS[0])
    optimizer.close()
    optimizer_of(model, "bread-lora")
    with torch.autocast("cpu", dtype=torch.float16):
        model(TOKENS[0])


def test_a_refused_model_is_left_as_it_was() -> None:
    model = llama()
    for options in (
        {"expansion": LoRAExpansion(targets=("q_prj",))},
        {"blocks": [["nowhere"]]},
        {"betas": (1, 1)},
    ):
        with pytest.raises(UsageError):
            BlockOptimizer(model, **options)
    assert all(p.requires_grad for p in model.parameters())
    assert not any("bread" in name for name, _ in model.named_parameters())
    BlockOptimizer(model)


class Compiled(nn.Module):
    """What torch.compile wraps a model in, without loading the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = llama()


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    model: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    return model


def taken() -> nn.Module:
    model: nn.Module = llama()
    BlockOptimizer(model)
    return model


def frozen() -> nn.Module:
    model: nn.Module = llama()
    return model.requires_grad_(False)


L0, L1 = "model.layers.0", "model.layers.1"
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: BlockOptimizer(llama(), switch_every=0), "switch_every=0 must be a whole number, at least 1"),
    (lambda: BlockOptimizer(llama(), lr=-1), "lr=-1 must be finite and not negative"),
    (lambda: BlockOptimizer(llama(), lr=math.nan), "lr=nan must be finite"),
    (lambda: BlockOptimizer(llama(), weight_decay=math.inf), "weight_decay=inf must be finite"),
    (
        lambda: BlockOptimizer(llama(), betas=(0.9, 1.0)),
        r"betas=\(0.9, 1.0\) must be two numbers in \[0, 1\)",
    ),
    (
        lambda: BlockOptimizer(llama(), order="rondom"),
        "Unknown order of blocks 'rondom'. Did you mean 'random'",
    ),  # type: ignore[arg-type]
    (
        lambda: BlockOptimizer(llama(), blocks="layers"),
        "Unknown kind of block 'layers'. Did you mean 'layer'",
    ),  # type: ignore[arg-type]
    (lambda: BlockOptimizer(llama(), blocks=[]), "There is no block to train: blocks is an empty list"),
    (lambda: BlockOptimizer(llama(), blocks=[[L0], []]), "block 1 is empty, so its turn would train nothing"),
    (
        lambda: BlockOptimizer(llama(), blocks=[L0]),
        "block 0 is the text 'model.layers.0', but a list of names",
    ),
    (lambda: BlockOptimizer(llama(), blocks=[[L0], [L0]]), "would be trained twice"),
    (lambda: BlockOptimizer(llama(), blocks=[["*"], [L0]]), "would be trained twice"),
    (
        lambda: BlockOptimizer(llama(), blocks=[["model.layer.0"]]),
        "'model.layer.0' matches no .* Did you mean 'model.l",
    ),
    (lambda: BlockOptimizer(llama(), always_active=["score"]), "always_active: 'score' matches no parameter"),
    (lambda: BlockOptimizer(llama(), always_active=[L1]), "lies in 'always_active' and in 'model.layers.1'"),
    (lambda: BlockOptimizer(llama(), blocks=[[L0]], include_head=True), "belong to a granularity such as"),
    (lambda: BlockOptimizer(llama(), scope="all"), "scope='all' says which .* but there is none"),
    (lambda: BlockOptimizer(llama(), scope="some", expansion=SGDExpansion()), "Unknown scope 'some'"),  # type: ignore[arg-type]
    (
        lambda: BlockOptimizer(llama(), weight_decay=0.1, expansion=SGDExpansion(sign=True)),
        "sign=True with weight_decay=0.1",
    ),
    (
        lambda: BlockOptimizer(llama(), torch.optim.SGD),
        "base='SGD' takes no betas, eps. Give a class of Adam's",
    ),
    (
        lambda: BlockOptimizer(llama(), expansion=LoRAExpansion(targets=("q_prj",))),
        "'q_prj' matches no linear .* 'q_proj'",
    ),
    (
        lambda: BlockOptimizer(nn.DataParallel(llama())),
        "wrapped in DataParallel, but blocks and hooks belong to the bare",
    ),
    (lambda: BlockOptimizer(Compiled()), "wrapped in Compiled"),
    (lambda: BlockOptimizer(adapted()), "wrapped in PeftModel"),
    (lambda: BlockOptimizer(adapted().base_model.model), "carries an adapter of another library. Merge"),  # type: ignore[arg-type,union-attr]
    (lambda: BlockOptimizer(taken()), "already has a BlockOptimizer"),
    (lambda: BlockOptimizer(copy.deepcopy(taken())), "is a copy of one that has"),
    (lambda: BlockOptimizer(frozen()), "'model.layers.0' holds no trainable parameter .9 frozen"),
    (lambda: BlockOptimizer(nn.Linear(3, 3)), "no list of decoder layers"),
    (lambda: BlockOptimizer(nn.Linear(3, 3), blocks="matrix"), "no list of decoder layers"),
    (lambda: BlockOptimizer(llama()).add_param_group({"params": []}), "Groups can't be added"),
    (lambda: LoRAExpansion(rank=-1), "rank=-1 must be a whole number, at least 0"),
    (lambda: LoRAExpansion(alpha=0.0), "alpha=0.0 must be positive"),
    (lambda: LoRAExpansion(lr_ratio_u=math.nan), "lr_ratio_u=nan must be positive and finite"),
    (lambda: LoRAExpansion(targets=()), "must be a tuple of names"),
    (lambda: SGDExpansion(lr_scale=math.nan), "lr_scale=nan must be finite"),
    (lambda: SGDExpansion(rounding="up"), "Unknown rounding 'up'"),  # type: ignore[arg-type]
    (lambda: SGDExpansion(batches=0), "batches=0 must be at least 1"),
    (lambda: preset("bread"), "Unknown BREAD method 'bread'. Did you mean"),
    (lambda: estimate_memory(llama(), "adam"), "Unknown method 'adam'. Did you mean '(badam|adamw)' or"),
    (lambda: estimate_memory(llama(), rank=-1), "rank=-1 must not be negative"),
    (lambda: make_blocks(llama(), always_active="head"), "always_active is the text 'head'"),
    (lambda: bread.NoSuchName, "^module .* has no attribute 'NoSuchName'"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("act", "message"), BAD)
def test_bad_input(act: Callable[[], object], message: str) -> None:
    with pytest.raises((UsageError, AttributeError), match=message):
        act()
