"""GPTQ. Sources of truth: the textbook sweep with the inverse recomputed for every column, exhaustive search, hand
numbers, round-to-nearest as the limit, errors measured on the layers' own outputs."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from family_models import tiny_family
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import linears
from gnomon.methods.compress.gptq import (
    GPTQConfig,
    quantise_matrix,
    quantise_model,
    round_to_nearest,
)
from gnomon.methods.compress.shapley import shapley_gptq_hessian


def ids(rows: int = 4, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def drawn(m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix and the Hessian of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(m, n, generator=g, dtype=torch.float64)
    x = torch.randn(n, n, generator=g, dtype=torch.float64) @ torch.randn(n, 5 * n, generator=g).double()
    return w, x @ x.T


def textbook(w: Tensor, h: Tensor, config: GPTQConfig) -> Tensor:
    """One column at a time, with the inverse of what is left of H: no Cholesky factor, no blocks."""
    w, n = w.clone(), w.shape[1]
    size = config.group or n
    h = h + config.damping * h.diagonal().mean() * torch.eye(n, dtype=h.dtype)
    low, high = config.codes
    out = torch.zeros_like(w)
    for j in range(n):
        if j % size == 0:
            part = w[:, j : j + size]
            if config.symmetric:
                scale = part.abs().max(1).values / high
                zero = torch.zeros_like(scale)
            else:
                least, most = part.min(1).values.clamp(max=0), part.max(1).values.clamp(min=0)
                scale = (most - least) / high
                zero = torch.round(-least / scale)
        code = (torch.round(w[:, j] / scale) + zero).clamp(low, high)
        out[:, j] = scale * (code - zero)
        inverse = torch.linalg.inv(h[j:, j:])
        error = (w[:, j] - out[:, j]) / inverse[0, 0]
        w[:, j:] -= error[:, None] * inverse[0]
    return out


def loss(w: Tensor, new: Tensor, h: Tensor) -> float:
    d = new - w
    return float(((d @ h) * d).sum())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [None, 5, 7])
@pytest.mark.parametrize("symmetric", [True, False])
def test_equals_the_textbook_sweep(bits, group, symmetric):
    w, h = drawn(6, 17)
    config = GPTQConfig(bits=bits, group=group, symmetric=symmetric)
    made = quantise_matrix(w, h, config)
    torch.testing.assert_close(made.weight(), textbook(w, h, config), rtol=1e-8, atol=1e-8)
    low, high = config.codes
    assert int(made.codes.min()) >= low and int(made.codes.max()) <= high
    assert made.scale.shape == (6, -(-17 // (group or 17)))


@pytest.mark.parametrize("group", [None, 100, 48])
def test_blocks_change_nothing(group):
    """More columns than a block, groups that begin inside one and end in the next."""
    w, h = drawn(3, 300, seed=1)
    config = GPTQConfig(group=group)
    torch.testing.assert_close(
        quantise_matrix(w, h, config).weight(), textbook(w, h, config), rtol=1e-6, atol=1e-6
    )


def test_rounding_by_hand():
    w = torch.tensor([[0.7, -0.2, 0.04, -0.36]], dtype=torch.float64)
    made = round_to_nearest(w, GPTQConfig(bits=4))
    assert made.codes.tolist() == [[7, -2, 0, -4]]
    assert made.scale.tolist() == [[pytest.approx(0.1)]]
    made = round_to_nearest(torch.tensor([[0.0, 1.5, 3.0]]), GPTQConfig(bits=2, symmetric=False))
    assert made.weight().tolist() == [[0.0, 2.0, 3.0]] and made.zero.tolist() == [[0.0]]
    made = round_to_nearest(torch.tensor([[-1.0, 2.0]]), GPTQConfig(bits=2, symmetric=False))
    assert made.weight().tolist() == [[-1.0, 2.0]] and made.codes.tolist() == [[0, 3]]
    assert round_to_nearest(torch.zeros(2, 3), GPTQConfig()).weight().tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("hessian", ["diagonal", "none"])
def test_without_correlations_it_rounds_to_nearest(hessian):
    w, h = drawn(5, 12, seed=2)
    for group in (None, 4):
        nearest = round_to_nearest(w, GPTQConfig(group=group))
        made = quantise_matrix(w, h, GPTQConfig(group=group, hessian=hessian))
        assert torch.equal(made.codes, nearest.codes)
        assert torch.equal(
            quantise_matrix(w, torch.eye(12).double(), GPTQConfig(group=group)).codes, nearest.codes
        )
    assert not torch.equal(quantise_matrix(w, h, GPTQConfig()).codes, round_to_nearest(w, GPTQConfig()).codes)


def test_between_rounding_and_the_best_of_all_codes():
    """On the given grid no choice of codes beats the search over all; GPTQ lies between it and rounding."""
    better = 0
    for seed in range(6):
        w, h = drawn(1, 5, seed=10 + seed)
        config = GPTQConfig(bits=2, damping=0.0)
        nearest = round_to_nearest(w, config)
        every = torch.tensor(list(itertools.product(range(-1, 2), repeat=5)), dtype=torch.float64)
        best = min(loss(w, nearest.scale * c[None], h) for c in every)
        ours, plain = loss(w, quantise_matrix(w, h, config).weight(), h), loss(w, nearest.weight(), h)
        assert ours >= best - 1e-9
        better += ours <= plain
    assert better >= 5
    w, h = drawn(20, 40, seed=3)
    assert loss(w, quantise_matrix(w, h, GPTQConfig()).weight(), h) < 0.7 * loss(
        w, round_to_nearest(w, GPTQConfig()).weight(), h
    )


def test_eight_bits_are_nearly_nothing_and_dtypes_are_kept():
    w, h = drawn(4, 9)
    assert float((quantise_matrix(w, h, GPTQConfig(bits=8)).weight() - w).abs().max()) < 0.05
    assert quantise_matrix(w.float(), h, GPTQConfig()).weight().dtype == torch.float32
    assert quantise_matrix(w.bfloat16(), h, GPTQConfig()).weight().dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_models_are_quantised_layer_by_layer(family):
    model, plain = tiny_family(family), tiny_family(family)
    calib = [ids(), ids(seed=1)]
    config = GPTQConfig(bits=4, group=8)
    report = quantise_model(model, calib, config)
    rounding = quantise_model(plain, calib, GPTQConfig(bits=4, group=8, hessian="none"))
    assert set(report) == set(linears(model)) and all(0 < r.error < 0.1 for r in report.values())
    assert sum(r.error for r in report.values()) < sum(r.error for r in rounding.values())
    fresh = tiny_family(family)
    first = next(iter(linears(fresh)))  # sees what it saw before anything was quantised
    seen = []
    hook = linears(fresh)[first].register_forward_pre_hook(
        lambda m, args: seen.append(args[0].flatten(0, -2))
    )
    with torch.no_grad():
        for batch in calib:
            fresh(batch)
    hook.remove()
    x = torch.cat(seen).double()
    w = linears(fresh)[first].weight.detach()
    w = w.T if family == "gpt2" else w
    expected = quantise_matrix(w, x.T @ x, config).weight()
    found = linears(model)[first].weight
    torch.testing.assert_close(found.T if family == "gpt2" else found, expected, rtol=1e-5, atol=1e-6)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, fresh.get_parameter(n))}
    assert changed == {f"{n}.weight" for n in report}


def test_padding_is_not_calibrated_on():
    short, long = ids(2, 6), ids(2, 10, seed=3)
    mask = torch.cat([torch.ones(2, 6), torch.zeros(2, 4)], 1).long()
    padded = {"input_ids": torch.cat([torch.cat([short, torch.zeros(2, 4).long()], 1), long])}
    padded["attention_mask"] = torch.cat([mask, torch.ones(2, 10).long()])
    one, other = tiny_family("llama"), tiny_family("llama")
    quantise_model(one, [padded], GPTQConfig(bits=4))
    quantise_model(other, [short, long], GPTQConfig(bits=4))
    for n, p in one.named_parameters():
        torch.testing.assert_close(p, other.get_parameter(n), rtol=1e-3, atol=1e-3)


def test_a_reweighed_hessian_changes_the_codes_and_beta_zero_doesnt():
    calib = [ids()]
    plain, same, other = (tiny_family("llama") for _ in range(3))
    quantise_model(plain, calib, GPTQConfig())
    quantise_model(same, calib, GPTQConfig(), reweigh=functools.partial(shapley_gptq_hessian, beta=0.0))
    quantise_model(other, calib, GPTQConfig(), reweigh=functools.partial(shapley_gptq_hessian, beta=0.7))
    assert all(torch.equal(p, same.get_parameter(n)) for n, p in plain.named_parameters())
    assert not all(torch.equal(p, other.get_parameter(n)) for n, p in plain.named_parameters())


def test_bad_requests_are_refused_and_nothing_is_left_half_done():
    w, h = drawn(2, 3)
    for options, message in (
        ({"bits": 1}, "bits=1 must be 2 to 8"),
        ({"group": 0}, "group=0"),
        ({"damping": -1.0}, "damping"),
    ):
        with pytest.raises(UsageError, match=message):
            GPTQConfig(**options)
    with pytest.raises(UsageError, match=r"H must be \[3, 3\], got None"):
        quantise_matrix(w, None, GPTQConfig())
    with pytest.raises(UsageError, match=r"got \[2, 2\]"):
        quantise_matrix(w, h[:2, :2], GPTQConfig())
    with pytest.raises(NumericalFailure, match="no grid"):
        quantise_matrix(w * float("nan"), h, GPTQConfig())
    model = tiny_family("llama")
    with pytest.raises(UsageError, match="GPTQ needs calibration text"):
        quantise_model(model, [], GPTQConfig())
    before = copy.deepcopy(model.state_dict())
    model.model.layers[2].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericalFailure):
        quantise_model(model, [ids()], GPTQConfig())
    after = model.state_dict()
    assert sum(not torch.equal(p, before[n]) for n, p in after.items()) == 1  # the one that was broken above
