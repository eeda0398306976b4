"""MGLU where users bend it: inference mode, odd arguments.

Source of truth: the same model in ordinary mode; what is documented to be refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import gnomon.hf  # noqa: F401
from gnomon.core import tiny
from gnomon.core.errors import UsageError
from gnomon.kernels.mglu import flash_mglu
from gnomon.kernels.mglu.planes import pack
from gnomon.methods.layers import mglu
from gnomon.methods.layers.mglu import (
    MGLUConfig,
    MGLULinear,
    SwiMGLUMLP,
    freeze_masks,
    mglu_layers,
    param_groups,
    replace_mlp,
)

torch.set_num_threads(1)


def test_inference_mode_leaves_a_layer_that_can_be_loaded_into() -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    mlp = SwiMGLUMLP(20, 12, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    mlp.freeze()
    other = copy.deepcopy(mlp)
    with torch.inference_mode():
        expected = mlp.eval()(x)
    assert not mlp.proj.mask_planes.is_inference()
    mlp.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(mlp(x), expected)


@pytest.mark.parametrize("cast_first", [True, False])
def test_logits_stay_wide_in_a_narrow_model(cast_first: bool) -> None:
    model = tiny.build("tiny:llama-10k")
    replace_mlp(model.bfloat16() if cast_first else model).bfloat16()
    proj: Any = next(iter(mglu_layers(model).values())).proj
    assert proj.weight.dtype == torch.bfloat16 and proj.mask_logits.dtype == torch.float32
    # A step of 2^-12 of a logit around 1 is below half an ulp of bfloat16.
    with torch.no_grad():
        proj.mask_logits.fill_(1.0)
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=0.0), lr=1.0)
    proj.mask_logits.grad = torch.full_like(proj.mask_logits, 2.0**-12)
    optimizer.step()
    assert bool((proj.mask_logits == 1 - 2.0**-12).all())
    assert proj.masks.dtype == torch.bfloat16
    ids = torch.arange(12).view(1, 12)
    model(ids, labels=ids).loss.backward()
    assert proj.mask_logits.grad.dtype == torch.float32
    assert model.double() is model and proj.mask_logits.dtype == torch.float64


def test_auto_classes_build_from_the_configuration_of_a_replaced_model() -> None:
    model = replace_mlp(tiny.build("tiny:qwen3-10k"), MGLUConfig(n_masks=2))
    again = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert type(again) is type(model)
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in again.named_parameters() if ".mlp.proj." in name}
    assert kinds == {"weight": torch.bfloat16, "mask_logits": torch.float32}
    config = mglu.MGLUMistralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    assert type(AutoModelForCausalLM.from_config(config)) is mglu.MGLUMistralForCausalLM


def groups(**options: Any) -> object:
    return param_groups(replace_mlp(tiny.build("tiny:llama-10k")), **options)


ODD: list[tuple[Callable[[], object], str]] = [
    (lambda: MGLUConfig(hidden_act=None), r"Unknown activation None"),  # type: ignore[arg-type]
    (lambda: MGLUConfig(mask_init_std="x"), r"mask_init_std='x' must"),  # type: ignore[arg-type]
    (lambda: MGLUConfig(top_k=2.0), r"top_k=2.0 routes can't"),  # type: ignore[arg-type]
    (lambda: MGLUConfig(top_k=True), r"top_k=True routes can't"),
    (lambda: MGLUConfig(top_k="2"), r"top_k='2' routes can't"),  # type: ignore[arg-type]
    (lambda: MGLUConfig(learned="no"), r"learned='no' must be True or False"),  # type: ignore[arg-type]
    (lambda: MGLUConfig(mask_weight_decay="0"), r"mask_weight_decay='0' must"),  # type: ignore[arg-type]
    (lambda: MGLULinear("4", 4), r"A matrix of 4 x '4' has no weights"),  # type: ignore[arg-type]
    (lambda: MGLULinear(4, 4.0), r"A matrix of 4.0 x 4 has no weights"),  # type: ignore[arg-type]
    (lambda: replace_mlp(tiny.build("tiny:llama-10k"), {"n_masks": 2}), r"config is dict"),  # type: ignore[arg-type]
    (
        lambda: freeze_masks(replace_mlp(tiny.build("tiny:llama-10k")), None),  # type: ignore[arg-type]
        r"layout of masks None",
    ),
    (lambda: groups(weight_decay=None), r"^weight_decay=None must be finite"),
    (lambda: groups(weight_decay=-1), r"^weight_decay=-1 must"),
    (lambda: groups(weight_decay=0.1, mask_lr="1e-3"), r"mask_lr='1e-3' must"),
    (lambda: groups(weight_decay=0.1, mask_weight_decay=-1), r"mask_weight_decay=-1 must"),
    (
        lambda: flash_mglu(torch.ones(1, 8), torch.ones(4, 8), pack(torch.ones(2, 4, 8).bool()), "2"),  # type: ignore[arg-type]
        r"n_masks='2' is outside",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("act", "message"), ODD)
def test_odd_arguments(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()
