"""BREAD, GaLore, LOMO and LISA where users bend them: copies, other models' states, odd arguments.

Source of truth: what each documents to refuse.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gnomon.core.errors import UsageError, number
from gnomon.methods.optim.baselines.galore import GaLore
from gnomon.methods.optim.baselines.lisa import LISA
from gnomon.methods.optim.baselines.lomo import LOMO
from gnomon.methods.optim.bread import BlockOptimizer, LoRAExpansion, SGDExpansion, estimate_memory, preset

torch.set_num_threads(1)
TOKENS = torch.arange(64).view(2, 32)


def llama(inner: int = 24) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


MADE: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda model: BlockOptimizer(model, lr=1e-3, expansion=LoRAExpansion(rank=2)),
    lambda model: LISA(model, lr=1e-3),
    lambda model: LOMO(model, lr=1e-3),
]


@pytest.mark.parametrize("make", MADE)
def test_copies_without_hooks_are_refused(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = llama()
    optimizer = make(model)
    step(model, optimizer)
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"works through hooks on its model's parameters"):
            act(optimizer)
    step(model, optimizer)


def test_a_state_of_a_wider_model_is_refused_before_the_next_step() -> None:
    model, other = llama(), llama(32)
    optimizer = BlockOptimizer(model, lr=1e-3)
    step(model, optimizer)
    with pytest.raises(UsageError, match=r"exp_avg of parameter \d has the shape .*model of another size"):
        BlockOptimizer(other, lr=1e-3).load_state_dict(optimizer.state_dict())


def test_lomo_says_what_it_leaves() -> None:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    optimizer = LOMO(model.parameters(), lr=1e-3)
    step(model, optimizer)
    model.requires_grad_(True)
    with pytest.raises(UsageError, match=r"9 parameters have gradients that no update used"):
        step(model, optimizer)


def test_lomo_judges_the_rates_of_groups() -> None:
    layer, more = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"lr=-1 must be finite"):
        LOMO([{"params": layer.parameters(), "lr": -1}])
    optimizer = LOMO(list(layer.parameters()))
    with pytest.raises(UsageError, match=r"lr='x' must be finite"):
        optimizer.add_param_group({"params": list(more.parameters()), "lr": "x"})
    assert len(optimizer.param_groups) == 1


def test_a_number_is_no_text() -> None:
    assert number(1) == number(torch.tensor(1.0)) == 1.0
    for value in ("1e-3", b"1", None, [1], torch.ones(2), 1j):
        assert number(value) != number(value)


def block(**options: Any) -> BlockOptimizer:
    return BlockOptimizer(llama(), **options)


def weight(**options: Any) -> GaLore:
    return GaLore([nn.Parameter(torch.ones(2, 3))], **options)


ODD: list[tuple[Callable[[], object], str]] = [
    (lambda: block(expansion="bread-lora"), r"expansion='bread-lora' is no expansion"),
    (lambda: block(expansion=LoRAExpansion), r"is no expansion"),
    (lambda: block(master_dtype="float32"), r"master_dtype='float32' must be"),
    (lambda: block(master_dtype=torch.int64), r"master_dtype=torch.int64 must be"),
    (lambda: block(master_dtype=torch.float16), r"moments overflow in float16"),
    (lambda: block(generator=0), r"generator=0 must be a torch.Generator"),
    (lambda: block(lr="1e-3"), r"lr='1e-3' must be finite"),
    (lambda: block(lr=None), r"lr=None must be finite"),
    (lambda: block(betas=None), r"betas=None must be two numbers"),
    (lambda: block(betas="ab"), r"betas=ab must be two numbers"),
    (lambda: block(betas=("a", "b")), r"must be two numbers"),
    (lambda: block(blocks=None), r"blocks=None must be layer"),
    (lambda: block(blocks=[None]), r"block 0 is None, but a list"),
    (lambda: block(always_active=None), r"always_active is None"),
    (lambda: block(order=None), r"Unknown order of blocks None"),
    (lambda: BlockOptimizer(llama().parameters(), lr=1e-3), r"model is generator"),  # type: ignore[arg-type]
    (lambda: LoRAExpansion(alpha="x"), r"alpha='x' must"),  # type: ignore[arg-type]
    (lambda: LoRAExpansion(lr_ratio_u=None), r"lr_ratio_u=None must"),  # type: ignore[arg-type]
    (lambda: SGDExpansion(lr_scale="5"), r"lr_scale='5' must"),  # type: ignore[arg-type]
    (lambda: SGDExpansion(batches=1.5), r"batches=1.5 must be at least 1, and whole"),  # type: ignore[arg-type]
    (lambda: SGDExpansion(seed=None), r"seed=None must be a whole"),  # type: ignore[arg-type]
    (lambda: SGDExpansion(rounding=None), r"Unknown rounding None"),  # type: ignore[arg-type]
    (lambda: preset(None), r"Unknown BREAD method None"),  # type: ignore[arg-type]
    (lambda: estimate_memory(llama(), rank="8"), r"rank='8' must not be negative, and whole"),  # type: ignore[arg-type]
    (lambda: estimate_memory(llama(), dtype="bfloat16"), r"dtype='bfloat16' must be"),  # type: ignore[arg-type]
    (lambda: LISA(llama(), layers="2"), r"layers='2' must lie in 1..2"),  # type: ignore[arg-type]
    (lambda: weight(betas=(0.9,)), r"betas=\(0.9,\) must lie in \[0, 1\), two numbers"),
    (lambda: weight(betas=None), r"betas=None must lie in"),
    (lambda: weight(lr="1e-3"), r"lr='1e-3' must be finite"),
    (lambda: weight(scale=None), r"scale=None must be finite"),
    (lambda: LOMO(nn.Linear(2, 2), lr=None), r"lr=None must be finite"),  # type: ignore[arg-type]
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("act", "message"), ODD)
def test_odd_arguments(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()
