"""Thresholds of whole models. Truth: plain multiplication by masks, counts of stored zeros, the model's own bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import FAMILIES, tiny_family
from torch import Tensor, nn

from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.layers import is_conv1d, linears
from gnomon.core.places import skeleton
from gnomon.methods.compress.lua import (
    LuaAllocator,
    collect_importance,
    count_thresholds,
    soft_mask,
    uniform_scores,
)

torch.set_num_threads(1)


def ids(rows: int = 4, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def made(family: str = "llama", p: float = 0.6, *, metric: str = "wanda", **settings: Any) -> LuaAllocator:
    model = tiny_family(family, dtype=settings.pop("dtype", torch.float32))
    return LuaAllocator(model, collect_importance(model, [ids()], metric=metric), p, **settings)


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """[outputs, inputs] of every linear layer of the decoder."""
    return {
        name: layer.weight.T if is_conv1d(layer) else layer.weight for name, layer in linears(model).items()
    }


def jiggle(alloc: LuaAllocator, size: float = 0.1, seed: int = 0) -> None:
    """Thresholds as training may leave them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in alloc.parameters():
            t.add_(size * torch.randn(t.shape, generator=generator))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_soft_forward_is_the_product_with_the_mask(family):
    alloc = made(family)
    model = alloc.model
    scores = collect_importance(model, [ids()])
    jiggle(alloc)
    alloc.parametrize()
    with torch.no_grad():
        found = model(ids(seed=1)).logits
    thresholds = alloc.thresholds()
    alloc.unparametrize()
    with torch.no_grad():
        for name, w in matrices(model).items():
            s = uniform_scores(scores[name])
            mask = soft_mask(s, thresholds[name])
            mask[s > 1 - 0.5 / s.shape[1]] = 1  # min_kept=1
            w.data.mul_(mask)
        torch.testing.assert_close(model(ids(seed=1)).logits, found)


@pytest.mark.parametrize("granularity", ["row", "column", "layer"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_apply_meets_the_budget_to_the_weight_and_keeps_the_others_bit_for_bit(family, granularity):
    alloc = made(family, 0.7, granularity=granularity)
    model = alloc.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    jiggle(alloc)
    alloc.parametrize()
    total = sum(w.numel() for w in matrices(model).values())
    masks = alloc.harden()
    alloc.unparametrize()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    alloc.parametrize()
    report = alloc.apply()
    zeros = sum(int((w == 0).sum()) for w in matrices(model).values())
    assert zeros == report.removed == int(0.7 * total + 0.5) and report.converged
    for name, w in matrices(model).items():
        was = before[f"{name}.weight"]
        was = was.T if is_conv1d(linears(model)[name]) else was
        assert torch.equal(w, was * masks[name])
    inside = {f"{name}.weight" for name in masks}
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before if name not in inside)


def test_apply_twice_is_apply_once():
    alloc = made()
    jiggle(alloc)
    first = alloc.apply()
    after = {name: tensor.clone() for name, tensor in alloc.model.state_dict().items()}
    second = alloc.apply()
    assert (first.removed, first.sparsity) == (second.removed, second.sparsity)
    assert all(torch.equal(after[name], tensor) for name, tensor in alloc.model.state_dict().items())
    assert all(torch.equal(m, alloc.harden()[n]) for n, m in alloc.harden(exact=False).items())
    with pytest.raises(UsageError, match="was applied"):
        alloc.parametrize()


def test_only_thresholds_get_gradients_and_everything_comes_back():
    alloc = made()
    model = alloc.model
    model.get_input_embeddings().weight.requires_grad_(False)
    needed = {name: p.requires_grad for name, p in model.named_parameters()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    alloc.parametrize().parametrize()
    alloc(ids(), labels=ids()).loss.backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in alloc.parameters())
    ours = {id(t) for t in alloc.parameters()}
    assert all(p.grad is None and not p.requires_grad for p in model.parameters() if id(p) not in ours)
    alloc.unparametrize().unparametrize()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == needed
    assert {name: type(module) for name, module in model.named_modules()} == kinds


def test_the_gradient_of_the_loss_is_the_cards():
    """dL/dt_j = −λ Σ_i g_i w_i m_i (1 − m_i), with g from a model whose weights are the masked ones."""
    alloc = made(min_kept=0, reg_weight=0.0)
    model, x = alloc.model, ids(seed=3)
    scores = collect_importance(model, [ids()])
    jiggle(alloc)
    alloc.parametrize()
    alloc(x, labels=x).loss.backward()
    found = dict(zip(scores, (t.grad for t in alloc.parameters()), strict=True))
    thresholds = alloc.thresholds()
    alloc.unparametrize()
    dense = {name: w.detach().clone() for name, w in matrices(model).items()}
    masks = {name: soft_mask(uniform_scores(scores[name]), thresholds[name]) for name in dense}
    for name, w in matrices(model).items():
        w.data.mul_(masks[name])
    model(x, labels=x).loss.backward()
    for name, w in matrices(model).items():
        m = masks[name]
        wanted = -w.shape[1] * (w.grad * dense[name] * m * (1 - m)).sum(1, keepdim=True)
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


def test_the_penalty_is_in_the_loss_once_and_uses_what_the_forward_pass_counted():
    alloc = made(p=0.5)
    jiggle(alloc, 0.2)
    x = ids()
    with torch.no_grad():
        for t in alloc.parameters():
            t.sub_(0.1)  # too dense
    plain = made(p=0.5, reg_weight=0.0)
    plain.load_state_dict(alloc.state_dict())
    plain.parametrize()
    alloc.parametrize()
    penalty = float(alloc.penalty().detach())
    assert penalty > 1
    loss = alloc(x, labels=x).loss
    assert float(loss.detach()) == pytest.approx(float(plain(x, labels=x).loss.detach()) + penalty, rel=1e-5)
    loss.backward()
    (fresh := made(p=0.5)).load_state_dict(alloc.state_dict())
    fresh.parametrize()
    (fresh.model(x, labels=x).loss + fresh.penalty()).backward()  # as a Trainer of the model itself would
    for a, b in zip(alloc.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_count_follows_thresholds_that_moved():
    alloc = made(p=0.5)
    alloc.parametrize()
    alloc.model(ids())  # counts
    with torch.no_grad():
        for t in alloc.parameters():
            t.fill_(0.9)
    assert float(alloc.penalty().detach()) > 1


def test_grouped_heads_count_once_and_zeros_count_as_removed():
    model = tiny_family("llama")
    first = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        first[:, :8] = 0
    alloc = LuaAllocator(model, collect_importance(model, [ids()]), 0.5)
    real = sum(w.numel() for w in matrices(model).values())
    assert alloc.total == real and matrices(model)["model.layers.0.self_attn.k_proj"].shape == (8, 16)
    with torch.no_grad():
        for t in alloc.parameters():
            t.zero_()  # nothing is removed by masks
    assert alloc.sparsity_report().removed == first[:, :8].numel()
    assert alloc.apply().removed == sum(int((w == 0).sum()) for w in matrices(model).values()) == real // 2


def test_a_row_can_be_kept_alive_or_left_to_die():
    for min_kept, dead in ((0, True), (1, False), (3, False)):
        alloc = made(p=0.6, min_kept=min_kept)
        name = "model.layers.1.mlp.down_proj"
        index = list(alloc.thresholds()).index(name)
        with torch.no_grad():
            list(alloc.parameters())[index][2] = 5.0
        rows = alloc.harden()[name].sum(1)
        assert int(rows[2]) == min_kept and (int(rows[2]) == 0) == dead
        assert int((rows == 0).sum()) == dead


def test_what_has_not_converged_is_not_called_p():
    alloc = made(p=0.7)
    with torch.no_grad():
        for t in alloc.parameters():
            t.sub_(0.2)
    report = alloc.sparsity_report()
    assert not report.converged and report.sparsity < 0.55 and "not the 0.7000" in str(report)
    before = alloc.model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    with pytest.raises(GnomonError, match=r"have not converged.*0\.7 was asked for.*exact=True"):
        alloc.apply(exact=False)
    assert torch.equal(before, alloc.model.state_dict()["model.layers.0.mlp.up_proj.weight"])
    assert alloc.apply().converged  # the offset


def test_reports_agree_with_each_other_at_every_level():
    alloc = made(p=0.6)
    jiggle(alloc)
    report, masks = alloc.sparsity_report(exact=True), alloc.harden()
    assert report.trained == alloc.trained_numbers == sum(m.shape[0] for m in masks.values())
    for name, mask in masks.items():
        assert report.per_matrix[name] == pytest.approx(float((~mask).double().mean()))
        torch.testing.assert_close(report.rows[name], (~mask).double().mean(1))
    assert list(report.per_layer) == [0, 1, 2]
    of_first = [~m for n, m in masks.items() if ".layers.0." in n]
    wanted = sum(int(m.sum()) for m in of_first) / sum(m.numel() for m in of_first)
    assert report.per_layer[0] == pytest.approx(wanted)


def test_an_excluded_layer_keeps_its_place_in_the_report():
    model = tiny_family("llama")
    scores = collect_importance(model, [ids()])
    alloc = LuaAllocator(model, scores, 0.5, exclude=["model.layers.0.*"])
    assert list(alloc.sparsity_report().per_layer) == [1, 2]
    alloc.apply()
    assert not any(bool((w == 0).any()) for n, w in matrices(model).items() if ".layers.0." in n)


@pytest.mark.parametrize("granularity", ["row", "column", "layer"])
@pytest.mark.parametrize(("axis", "group"), [(None, 128), ("row", 1), ("matrix", 1), ("column", 5)])
def test_allocations_say_what_the_masks_remove(granularity, axis, group):
    alloc = made(p=0.6, granularity=granularity)
    jiggle(alloc)
    found, masks = alloc.allocation(axis, group=group), alloc.harden()
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    found.require(shapes)
    assert found.mean(shapes) == pytest.approx(alloc.removed / alloc.total, abs=1e-12)
    for name, mask in masks.items():
        assert found.of(name, shapes[name]) == pytest.approx(float((~mask).double().mean()), abs=1e-12)
    if axis is None and granularity == "column":
        assert (found.axis, found.group) == ("column", 1)


def test_thresholds_and_ranks_stay_what_they_are_when_the_model_is_converted():
    alloc = made(dtype=torch.bfloat16)
    jiggle(alloc)
    exact = alloc.thresholds()
    alloc.parametrize()
    alloc.to(torch.float16)
    alloc.model.to(torch.bfloat16)
    assert all(torch.equal(t, exact[name]) for name, t in alloc.thresholds().items())
    assert {t.dtype for t in alloc.parameters()} == {torch.float32}
    assert {one.rank.dtype for one in alloc.masks} == {torch.int16}
    loss = alloc(ids(), labels=ids()).loss
    assert loss.dtype in (torch.bfloat16, torch.float32)
    loss.backward()
    optimizer = torch.optim.AdamW(alloc.parameters(), lr=1e-4, weight_decay=0.0)
    optimizer.step()
    moved = [(t - exact[name]).abs().max() for name, t in alloc.thresholds().items()]
    assert min(moved) > 5e-5  # in bfloat16 nothing would have moved
    still = [(t - exact[n].bfloat16().add(-1e-4).float()).abs() for n, t in alloc.thresholds().items()]
    assert max(float(x.max()) for x in still) > 1e-3


def test_state_is_the_thresholds_alone():
    alloc = made()
    state = alloc.state_dict()
    assert (
        sum(t.numel() for t in state.values())
        == alloc.trained_numbers
        == 3 * (16 + 8 + 8 + 16 + 24 + 24 + 16)
    )
    other = made()
    jiggle(alloc)
    other.load_state_dict(alloc.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(alloc.parameters(), other.parameters(), strict=True))


def test_trained_numbers_of_the_paper_without_memory():
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    llama_7b = skeleton(config)
    assert count_thresholds(llama_7b) == 1_359_872  # "about 1.36 M"
    assert count_thresholds(llama_7b, "layer") == 32 * 7
    assert count_thresholds(llama_7b, "column") == 32 * (6 * 4096 + 11008)
    with pytest.raises(UsageError, match="on the meta device"):
        LuaAllocator(llama_7b, {}, 0.7)


def test_hard_evaluation_is_the_hardened_model():
    alloc = made()
    jiggle(alloc, 0.02)
    alloc.parametrize()
    x = ids(seed=5)
    with torch.no_grad():
        soft = alloc.model(x).logits
        with alloc.hard():
            hard = alloc.model(x).logits
        assert torch.equal(alloc.model(x).logits, soft) and not torch.allclose(soft, hard, atol=1e-3)
        masks = {name: one.raw_mask() for name, one in zip(alloc.thresholds(), alloc.masks, strict=True)}
        alloc.unparametrize()
        for name, w in matrices(alloc.model).items():
            w.data.mul_(masks[name])
        torch.testing.assert_close(alloc.model(x).logits, hard)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 0.0}, r"sparsity=0.0 must lie in \(0, 1\)"),
        ({"sparsity": 1.0}, r"must lie in \(0, 1\)"),
        ({"sparsity": float("nan")}, r"must lie in \(0, 1\)"),
        ({"sparsity": 60.0}, "not a percentage"),
        ({"granularity": "rows"}, "Did you mean 'row'"),
        ({"slope": "in_feature"}, "Did you mean 'in_features'"),
        ({"slope": -1.0}, "must be positive"),
        ({"reg_weight": -1.0}, "at least 0"),
        ({"reg": "keep"}, "Did you mean 'kept'"),
        ({"min_kept": -1}, "can't be negative"),
        ({"targets": ["up_prj"]}, "up_proj"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    model = tiny_family("llama")
    with pytest.raises(UsageError, match=message):
        LuaAllocator(model, {}, **settings)


def test_scores_that_do_not_fit_are_refused():
    model = tiny_family("llama")
    scores = collect_importance(model, [ids()], metric="magnitude")
    first = next(iter(scores))
    with pytest.raises(UsageError, match=rf"no scores for {first}.*1 of 21"):
        LuaAllocator(model, {n: s for n, s in scores.items() if n != first})
    with pytest.raises(UsageError, match=r"have the shape \[3, 4\]"):
        LuaAllocator(model, {**scores, first: torch.ones(3, 4)})
    with pytest.raises(UsageError, match="no such matrix"):
        LuaAllocator(model, {**scores, first + "s": torch.ones(3, 4)})
    with pytest.raises(NumericalFailure, match="NaN"):
        LuaAllocator(model, {**scores, first: scores[first] * float("nan")})
    with torch.no_grad():
        for w in matrices(model).values():
            w.data[:, : w.shape[1] // 2 + 1] = 0
    with pytest.raises(UsageError, match="are zero already"):
        LuaAllocator(model, scores, 0.5)


def test_what_can_not_be_masked_is_refused():
    model = tiny_family("llama")
    scores = collect_importance(model, [ids()], metric="magnitude")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(UsageError, match="shares its weight"):
        LuaAllocator(model, scores)
    model = tiny_family("llama")
    LuaAllocator(model, scores).parametrize()
    with pytest.raises(UsageError, match="parametri"):
        LuaAllocator(model, scores)
