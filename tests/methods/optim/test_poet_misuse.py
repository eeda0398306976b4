"""POET where users bend it: other dtypes after wrapping, damaged states, models built without memory, odd arguments.

Sources of truth: the layer before it was bent; torch's own pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.core import tiny
from gnomon.core.errors import UsageError
from gnomon.methods.optim.poet import (
    POETConfig,
    POETLinear,
    apply_poet,
    merge_on_schedule,
    merge_poet,
    poet_layers,
    poet_param_groups,
)

torch.set_num_threads(1)
TOKENS = torch.arange(64).view(2, 32)


def wrapped(**config: Any) -> Any:
    model = tiny.build("tiny:llama-10k")
    apply_poet(model, POETConfig(**{"block_size": 8, "merge_interval": 3, **config}))
    return model


def first(model: Any) -> POETLinear:
    return next(iter(poet_layers(model).values()))


@torch.no_grad()
def turn(model: Any, by: float = 1e-3) -> None:
    for layer in poet_layers(model).values():
        for q in (layer.q_out, layer.q_in):
            q.copy_(by * torch.randn(q.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_stay_wide_when_the_model_is_cast(dtype: torch.dtype) -> None:
    model = wrapped()
    turn(model)
    layer = first(model)
    q, w = layer.q_out.detach().clone(), layer.merged()
    layer.q_out.grad = torch.ones_like(layer.q_out)
    model.to(dtype)
    assert layer.base_weight.dtype == dtype and layer.q_out.dtype == layer.q_in.dtype == torch.float32
    assert layer.q_out.grad.dtype == torch.float32
    assert torch.equal(layer.q_out, q)
    # One rounding of W, none of the rotations: a step of 1e-3 around 1 would be lost in bfloat16.
    torch.testing.assert_close(layer.merged(), w, rtol=0, atol=2**-8 * float(w.abs().max()))
    optimizer = torch.optim.AdamW(poet_param_groups(model, 1e-3, 1e-4))
    merge_on_schedule(model, optimizer)
    if dtype == torch.bfloat16:
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        assert optimizer.state[layer.q_out]["exp_avg"].dtype == torch.float32
        assert layer.q_out.dtype == torch.float32 and not torch.equal(layer.q_out, q)
    assert model.double() is model and layer.q_in.dtype == torch.float64


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_for_a_model_without_memory(assign: bool) -> None:
    model = wrapped()
    turn(model)
    with torch.device("meta"):
        empty = tiny.build("tiny:llama-10k")
    apply_poet(empty, POETConfig(block_size=8, merge_interval=3))
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict(), assign=assign)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip(poet_layers(empty).values(), poet_layers(model).values(), strict=True):
        assert torch.equal(mine.back_out, theirs.back_out) and torch.equal(mine.back_in, theirs.back_in)
        if mine.in_features == 16:
            assert torch.equal(mine(x), theirs(x))


DAMAGE: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("perm_out", torch.zeros_like, r"perm_out in the state of .*q_proj is no permutation"),
    ("perm_in", lambda p: p + 1, r"perm_in in the state of .*q_proj is no permutation"),
    ("_extra_state", lambda e: e[:4], r"counts in the state of .*q_proj have the shape \(4,\), not \(6,\)"),
    ("_extra_state", lambda e: e[:0], r"shape \(0,\)"),
]


@pytest.mark.parametrize(("key", "damage", "message"), DAMAGE)
def test_damaged_states_are_refused(key: str, damage: Callable[[Tensor], Tensor], message: str) -> None:
    model = wrapped()
    state = dict(model.state_dict())
    name = next(name for name in state if name.endswith(key))
    state[name] = damage(state[name])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_merged_model_holds_nothing_of_poet() -> None:
    model = tiny.build("tiny:llama-10k")
    for _ in range(3):
        apply_poet(model, POETConfig(block_size=8, init="keep"))
        merge_poet(model)
    assert not model._load_state_dict_pre_hooks
    assert b"gnomon" not in pickle.dumps(model)


ODD: list[tuple[Callable[[], object], str]] = [
    (lambda: POETConfig(fraction="a"), r"fraction='a' must lie in \(0, 1\]"),  # type: ignore[arg-type]
    (lambda: POETConfig(lr_scale=None), r"lr_scale=None must be positive"),  # type: ignore[arg-type]
    (lambda: POETConfig(target_modules=(None,)), r"target_modules=\(None,\) must be a tuple"),  # type: ignore[arg-type]
    (lambda: POETConfig(target_modules=5), r"target_modules=5 must be a tuple"),  # type: ignore[arg-type]
    (lambda: POETConfig(exclude_modules=None), r"exclude_modules=None .*\(\) is none"),  # type: ignore[arg-type]
    (lambda: poet_param_groups(wrapped(), "1e-3"), r"base_lr='1e-3' must be finite"),  # type: ignore[arg-type]
    (lambda: poet_param_groups(wrapped(), 1e-3, weight_decay=None), r"weight_decay=None must"),  # type: ignore[arg-type]
    (lambda: apply_poet(tiny.build("tiny:llama-10k"), {"block_size": 8}), r"cfg is dict"),  # type: ignore[arg-type]
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("act", "message"), ODD)
def test_odd_arguments(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()


@pytest.mark.usefixtures("unchecked")
def test_a_clip_that_is_a_text() -> None:
    model = wrapped()
    optimizer = torch.optim.AdamW(poet_param_groups(model, 1e-3))
    with pytest.raises(UsageError, match=r"clip='1' must be a positive norm"):
        merge_on_schedule(model, optimizer, clip="1")  # type: ignore[arg-type]
