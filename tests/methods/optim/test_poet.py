"""Layers and models: nothing changes by wrapping or merging, spectra stay, everything that can't work is refused."""

from __future__ import annotations

import copy
import doctest
import io
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gnomon.core import tiny
from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import is_conv1d
from gnomon.core.seeding import seeded
from gnomon.methods.optim import poet
from gnomon.methods.optim.poet import (
    POETConfig,
    POETLinear,
    apply_poet,
    hyperspherical_energy,
    merge_poet,
    poet_layers,
    poet_param_groups,
    record_spectra,
    singular_values,
    spectrum_report,
)

EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}
"""Of float64, between forms of one sum."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear_of(rows: int, columns: int, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    with seeded(5):
        return nn.Linear(columns, rows, bias=bias, dtype=dtype)


def wrap(linear: nn.Module, *, turned: float = 0.0, **config: Any) -> POETLinear:
    layer = POETLinear.from_linear(linear, POETConfig(**{"init": "keep", "block_size": 2, **config}))
    return turn(layer, turned)


@torch.no_grad()
def turn(layer: POETLinear, by: float, seed: int = 1) -> POETLinear:
    for q in (layer.q_out, layer.q_in):
        q.copy_(by * randn(*q.shape, seed=seed))
    return layer


def by_loops(layer: POETLinear, w: Tensor) -> Tensor:
    """R_o W R_i with R = Ψᵀ Diag(G) Ψ written out from the definition."""
    sides = []
    for g, p in zip(layer.rotations(), (layer.perm_out, layer.perm_in), strict=True):
        psi = torch.eye(len(p), dtype=g.dtype)[p]
        sides.append(
            psi.T @ torch.block_diag(*g, torch.eye(len(p) - g.shape[0] * g.shape[1], dtype=g.dtype)) @ psi
        )
    return sides[0] @ w @ sides[1]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"block_size": 4, "neumann_terms": 2},
    {"variant": "fs", "fraction": 0.5, "neumann_terms": "exact"},
    {"variant": "fs", "fraction": 0.3},
]


# ---------------------------------------------------------------------------------------------------- one layer


@pytest.mark.parametrize("config", VARIANTS)
def test_wrapping_and_merging_change_nothing(config: dict[str, Any]) -> None:
    """Invariants 1 and 4, over several merges; q moves in between, so that the merges do something."""
    linear, x = linear_of(12, 8), randn(5, 8).double()
    layer = wrap(linear, **config)
    torch.testing.assert_close(layer(x), linear(x), **EXACT)
    assert layer.bias is linear.bias
    frames = []
    for i in range(3):
        turn(layer, 0.2, seed=i)
        before, old = layer(x).detach(), layer.perm_out.clone()
        assert float((before - linear(x)).abs().max().detach()) > 0.01
        before_weight = layer.effective_weight().detach()
        layer.q_in.grad = torch.ones_like(layer.q_in)
        layer.merge_and_reinit(torch.Generator().manual_seed(i))
        assert not layer.q_out.any() and not layer.q_in.any() and layer.q_in.grad is None
        torch.testing.assert_close(layer(x), before, **EXACT)
        torch.testing.assert_close(layer.to_linear()(x), before, **EXACT)
        torch.testing.assert_close(layer.weight, before_weight, **EXACT)
        assert layer.merges == i + 1
        frames.append((old, layer.perm_out.clone()))
    assert not all(torch.equal(a, b) for a, b in frames)


@pytest.mark.parametrize("config", VARIANTS)
def test_the_effective_weight_is_what_the_definition_says(config: dict[str, Any]) -> None:
    linear = linear_of(12, 8)
    layer = wrap(linear, turned=0.2, **config)
    torch.testing.assert_close(layer.effective_weight(), by_loops(layer, linear.weight), **EXACT)
    r_out, r_in = layer.dense_rotations()
    torch.testing.assert_close(r_out @ linear.weight @ r_in, layer.effective_weight(), **EXACT)


def test_one_whole_block_and_the_whole_set_are_one_dense_rotation() -> None:
    """Invariant 5."""
    linear = linear_of(6, 6)
    blocks = wrap(linear, turned=0.2, block_size=6)
    blocks.reinit(torch.arange(6), torch.arange(6))
    whole = wrap(blocks.to_linear(), variant="fs", fraction=1.0)
    assert whole.perm_out.tolist() == list(range(6))  # a set is sorted
    for layer in (blocks, whole):
        turn(layer, 0.3)
    torch.testing.assert_close(blocks.effective_weight(), whole.effective_weight(), **EXACT)
    r_out, _ = whole.dense_rotations()
    torch.testing.assert_close(r_out, poet.cayley_neumann(poet.skew(whole.q_out)[0], 3), **EXACT)


@pytest.mark.parametrize("config", VARIANTS)
def test_three_forwards_are_one(config: dict[str, Any]) -> None:
    """Invariant 6: outputs and the gradients of input, rotations and bias."""
    linear, x = linear_of(12, 8), randn(2, 5, 8).double().requires_grad_()
    found = []
    for forward in ("weight", "input", "input_ckpt"):
        layer = wrap(copy.deepcopy(linear), turned=0.2, forward=forward, **config)
        y = layer(x)
        assert layer.bias is not None
        grads = torch.autograd.grad(y.sin().sum(), (x, layer.q_out, layer.q_in, layer.bias))
        assert not layer.base_weight.requires_grad
        found.append((y, *grads))
    torch.testing.assert_close(found[1], found[0], **EXACT)
    torch.testing.assert_close(found[2], found[0], **EXACT)
    assert all(float(g.abs().max().detach()) > 1e-3 for g in found[0])


def test_gradcheck_of_a_layer() -> None:
    for forward in ("weight", "input", "input_ckpt"):
        layer = wrap(linear_of(6, 4), turned=0.2, forward=forward)
        x = randn(3, 4).double().requires_grad_()

        def run(x: Tensor, *_: Tensor, layer: POETLinear = layer) -> Tensor:
            y: Tensor = layer(x)
            return y

        assert torch.autograd.gradcheck(run, (x, layer.q_out, layer.q_in))


@pytest.mark.parametrize("config", [{"block_size": 8}, {"variant": "fs"}])
def test_exact_rotations_keep_the_spectrum_over_merges(config: dict[str, Any]) -> None:
    """Invariant 2 in float32. Three terms shrink it by 1 − t⁴, two by much less; a plain step would not keep it."""
    linear = linear_of(16, 24, dtype=torch.float32)
    start = singular_values(linear.weight)
    drifts = {}
    for terms in ("exact", 2, 3):
        layer = wrap(copy.deepcopy(linear), neumann_terms=terms, **config)
        for i in range(20):
            turn(layer, 0.07, seed=i)
            layer.merge_and_reinit()
        drifts[terms] = poet.spectrum_drift(singular_values(layer.weight), start)
        assert float((layer.weight - linear.weight).norm().detach()) > 0.5 * float(
            linear.weight.norm().detach()
        )
    assert drifts["exact"] < 1e-5
    assert drifts["exact"] < 0.1 * drifts[2] and drifts[2] < 0.2 * drifts[3]


def test_the_bias_stays_with_its_neuron() -> None:
    linear, x = linear_of(12, 8), randn(5, 8).double()
    for forward in ("weight", "input", "input_ckpt"):
        layer = wrap(copy.deepcopy(linear), turned=0.2, forward=forward)
        layer.merge_and_reinit()
        turn(layer, 0.2, seed=3)
        torch.testing.assert_close(
            layer(x) - x @ layer.effective_weight().T, linear.bias.expand(5, 12), **EXACT
        )


def test_only_rotations_and_bias_train() -> None:
    layer = wrap(linear_of(12, 8))
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"q_out", "q_in", "bias"}
    assert wrap(linear_of(12, 8, bias=False)).bias is None


def test_precisions() -> None:
    """bfloat16 layers hold float32 rotations; each forward is within bfloat16 of the float32 one; merging rounds
    once; autocast works in both directions."""
    linear, x = linear_of(32, 16, dtype=torch.float32), randn(7, 16)
    for forward in ("weight", "input", "input_ckpt"):
        wide = wrap(copy.deepcopy(linear), turned=0.1, block_size=8, forward=forward)
        expected = wide(x)
        (gradient,) = torch.autograd.grad(expected.square().sum(), wide.q_in)
        narrow = wrap(copy.deepcopy(linear).bfloat16(), turned=0.1, block_size=8, forward=forward)
        assert narrow.q_in.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = wide(x)
            inside = torch.autograd.grad(cast.float().square().sum(), wide.q_in, retain_graph=True)[0]
        outside = torch.autograd.grad(cast.float().square().sum(), wide.q_in)[0]
        low = narrow(x.bfloat16())
        assert low.dtype == cast.dtype == torch.bfloat16
        for y in (low, cast):
            assert float((y.float() - expected).norm().detach() / expected.norm().detach()) < 0.01
        for g in (inside, outside, torch.autograd.grad(low.float().square().sum(), narrow.q_in)[0]):
            assert g.dtype == torch.float32
            assert float((g - gradient).norm() / gradient.norm()) < 0.03
        once = narrow.effective_weight().detach()
        narrow.merge_and_reinit()
        assert torch.equal(narrow.weight, once.bfloat16())


# ---------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"block_size": 8}),
        ("qwen2", {"block_size": 4, "forward": "input"}),  # biases
        ("gpt2", {"block_size": 4}),  # transposed weights
        ("phi3", {"variant": "fs", "forward": "input_ckpt"}),
        ("gpt_neox", {"variant": "fs", "fraction": 0.25}),
        ("opt", {"block_size": 4, "neumann_terms": "exact"}),
        ("gemma2", {"block_size": 8}),
    ],
)
@torch.no_grad()
def test_families(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    """A pretrained model keeps its logits when wrapped, and a trained one through merging, saving and loading."""
    with seeded(1):
        model = tiny.build(f"tiny:{architecture}-10k")
    x = torch.arange(24).view(2, 12)
    before = model(x).logits
    kinds = {name: type(module) for name, module in model.named_modules()}
    weights = {name: tuple(p.shape) for name, p in model.named_parameters()}
    report = apply_poet(model, POETConfig(init="keep", **config))
    assert len(report.replaced) == len(poet_layers(model)) >= 12 and not report.skipped
    assert model.get_output_embeddings() is not None and "lm_head" not in report.replaced
    torch.testing.assert_close(model(x).logits, before, rtol=1e-5, atol=1e-6)
    for layer in poet_layers(model).values():
        turn(layer, 0.1)
    turned = model(x).logits
    assert float((turned - before).abs().max()) > 1e-3
    merge_poet(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == weights
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(x).logits, turned, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(x).logits, model(x).logits)


def test_counts_at_full_size_without_memory() -> None:
    """Invariant 7 on a model of the paper's size on the meta device."""
    for cfg, ff, expected in (
        (POETConfig(), 1280, 9_661_440),
        (POETConfig(variant="fs"), 1376, 8_544_192),
    ):
        shape = {
            "hidden_size": 512,
            "intermediate_size": ff,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        }
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape))
        report = apply_poet(model, cfg)
        assert report.trainable == expected
        assert report.frozen == (25_296_896 if ff == 1376 else 8 * (4 * 512**2 + 3 * 512 * 1280))
        assert report.other == 2 * 32000 * 512 + 17 * 512
        groups = poet_param_groups(model, base_lr=1e-2)
        assert [sum(p.numel() for p in g["params"]) for g in groups] == [report.other, expected]


def test_parameter_groups() -> None:
    model = tiny.build("tiny:llama-10k")
    apply_poet(model, POETConfig(block_size=8, lr_scale=0.5))
    base, rotations = poet_param_groups(model, base_lr=1e-2, poet_lr=2e-3, weight_decay=0.01)
    assert (base["lr"], base["weight_decay"]) == (1e-2, 0.01)
    assert (rotations["lr"], rotations["weight_decay"]) == (1e-3, 0)
    ids = [id(p) for group in (base, rotations) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(rotations["params"]) == 42
    # The paper's rates: 1e-3, 2e-3, 4e-3 for b = 256, 128, 64, and for 1/2, 1/4, 1/8.
    for config, rate in (({"block_size": 4}, 0.064), ({"variant": "fs", "fraction": 0.25}, 2e-3)):
        model = tiny.build("tiny:llama-10k")
        apply_poet(model, POETConfig(**config))
        assert poet_param_groups(model, base_lr=1e-2)[-1]["lr"] == pytest.approx(rate)
    model.requires_grad_(False)
    for layer in poet_layers(model).values():
        layer.q_out.requires_grad_()
    assert len(poet_param_groups(model, base_lr=1e-2)) == 1


class Mixed(nn.Module):
    """A model of one's own: two maps, one of odd width, a head tied to the embedding, a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 8)
        self.odd = nn.Linear(8, 7)
        self.twice = nn.Linear(8, 8)
        self.again = self.twice
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.tokens.weight


def test_targets_and_exclusions() -> None:
    model = Mixed()
    report = apply_poet(model, POETConfig(block_size=4, target_modules=("first", "sec*")))
    assert report.replaced == ("first", "second") and not report.skipped
    model = Mixed()
    targets = {"target_modules": ("*",), "exclude_modules": ("lm_head", "out", "twice", "again")}
    report = apply_poet(model, POETConfig(block_size=4, on_indivisible="skip", **targets))
    assert report.replaced == ("first", "second")
    assert "block_size=4 does not divide a side of 7" in report.skipped.pop("odd")
    assert dict(report.skipped) == dict.fromkeys(("twice", "lm_head", "out"), "excluded by exclude_modules")
    assert isinstance(model.odd, nn.Linear) and model.odd.weight.requires_grad
    model = Mixed()
    apply_poet(model, POETConfig(variant="fs", **targets))  # any width
    assert isinstance(model.odd, POETLinear)


def test_draws_depend_on_seed_merge_and_layer_only() -> None:
    def built(seed: int) -> list[Tensor]:
        model = tiny.build("tiny:llama-10k")
        apply_poet(model, POETConfig(block_size=8, seed=seed))
        layers = list(poet_layers(model).values())[:2]
        found = [layer.base_weight.detach().clone() for layer in layers]
        for i, layer in enumerate(layers):
            found.append(layer.perm_in.clone())
            for _ in range(2):
                layer.merge_and_reinit(layer.generator(i))
                found.append(layer.perm_in.clone())
        return found

    ambient = torch.random.get_rng_state()
    with seeded(3):
        first = built(0)
    second = built(0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    permutations = [*first[2:], *built(1)[2:]]
    assert not any(torch.equal(a, b) for i, a in enumerate(permutations) for b in permutations[:i])
    torch.random.set_rng_state(ambient)


def test_new_weights_in_a_loaded_model_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.build("tiny:llama-10k").save_pretrained(tmp_path)
    for init, told in (("keep", False), ("normalized", True)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        apply_poet(model, POETConfig(block_size=8, init=init))  # type: ignore[arg-type]
        assert ("draws new weights for 21 layers of a loaded model" in caplog.text) == told


# ----------------------------------------------------------------------------------------------------- reports


def test_reports() -> None:
    """Names are equal for plain and wrapped models; nothing has drifted at first, and a stretched weight has."""
    with seeded(1):
        model = tiny.build("tiny:gpt2-10k")
    plain = record_spectra(model)
    apply_poet(model, POETConfig(init="keep", variant="fs", neumann_terms=1))
    wrapped = record_spectra(model)
    assert wrapped.keys() == plain.keys()
    torch.testing.assert_close(wrapped, plain, rtol=1e-5, atol=1e-7)
    report = spectrum_report(model, plain, energy=True)
    assert max(one.drift or 0 for one in report.values()) < 1e-5
    assert all(one.orthogonality == 0 for one in report.values())
    for layer in poet_layers(model).values():
        turn(layer, 0.2)
    report = spectrum_report(model, plain)
    name, one = next(iter(report.items()))
    layer = poet_layers(model)[name]
    sigma = torch.linalg.svdvals(layer.effective_weight().detach()).double()
    assert one.drift == pytest.approx(float((sigma - plain[name]).abs().max() / plain[name][0]), rel=1e-5)
    assert one.drift > 0.01 and one.orthogonality is not None and one.orthogonality > 0.01
    assert one.sigma_max == pytest.approx(float(sigma[0])) and 0 < one.entropy < 1 and one.energy is None
    merge_poet(model)
    again = spectrum_report(model, plain)[name]
    assert again.drift == pytest.approx(one.drift, rel=1e-4) and again.orthogonality is None
    own = nn.Sequential(nn.Linear(4, 4))
    apply_poet(own, POETConfig(block_size=2, target_modules=("0",)))
    assert spectrum_report(own, record_spectra(own))["0"].drift == 0


def test_hyperspherical_energy_by_hand() -> None:
    """Rows along x, y and −x: distances √2, √2 and 2, each pair twice; lengths and rotations on the right don't
    matter."""
    w = torch.tensor([[2.0, 0], [0, 0.5], [-1, 0]])
    expected = 2 * (2 / math.sqrt(2) + 1 / 2)
    assert hyperspherical_energy(w) == pytest.approx(expected)
    turned = w @ poet.cayley(poet.skew(torch.tensor([0.7])))
    assert hyperspherical_energy(turned) == pytest.approx(expected)
    assert hyperspherical_energy(torch.ones(2, 3)) == math.inf


# --------------------------------------------------------------------------------------------------------- state


def test_a_layer_through_a_file() -> None:
    first = wrap(linear_of(12, 8), turned=0.2, seed=4)
    first.merge_and_reinit()
    turn(first, 0.1)
    first.steps = 7
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = wrap(linear_of(12, 8), turned=0.3, seed=4)
    second.load_state_dict(torch.load(file, weights_only=True))
    x = randn(3, 8).double()
    assert (second.merges, second.steps) == (1, 7)
    assert torch.equal(first(x), second(x))
    for layer in (first, second, copy.deepcopy(first)):
        layer.merge_and_reinit()
        assert torch.equal(layer.perm_out, first.perm_out)
    assert torch.equal(first(x), second(x))


def test_states_of_other_kinds_are_refused_before_anything_is_loaded() -> None:
    def build(**config: Any) -> nn.Module:
        with seeded(2):
            model = tiny.build("tiny:llama-10k")
        apply_poet(model, POETConfig(**{"block_size": 8, "init": "keep", **config}))
        return model

    model, plain = build(), tiny.build("tiny:llama-10k")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(
            UsageError, match=r"q_proj is that of a plain or merged layer, but the model is wrapped"
        ):
            model.load_state_dict(plain.state_dict(), strict=strict)
    for config, told in (
        ({"merge_interval": 7}, r"merge_interval=7 there, 400 here"),
        ({"neumann_terms": "exact", "seed": 3}, r"seed=3 there, 0 here; neumann_terms=exact there, 3 here"),
        ({"block_size": 4}, r"has rotations of shape \(4, 6\) on its out side, the model \(2, 28\)"),
        ({"variant": "fs", "fraction": 1.0}, r"rotations of shape \(1, 120\)"),
    ):
        with pytest.raises(UsageError, match=told):
            model.load_state_dict(build(**config).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_out"):
        plain.load_state_dict(model.state_dict())
    merge_poet(model)
    model.load_state_dict(plain.state_dict())


# ------------------------------------------------------------------------------------------------------ refusals


def llama(**config: Any) -> nn.Module:
    model = tiny.build("tiny:llama-10k")
    apply_poet(model, POETConfig(**{"block_size": 8, **config}))
    return model


def mixed(**config: Any) -> None:
    apply_poet(Mixed(), POETConfig(**{"block_size": 4, **config}))


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: POETConfig(block_size=1), "block_size=1 must be a whole number, at least 2"),
    (lambda: POETConfig(block_size=2.5), "block_size=2.5 must be a whole number"),  # type: ignore[arg-type]
    (lambda: POETConfig(fraction=0.0), r"fraction=0.0 must lie in \(0, 1\]"),
    (lambda: POETConfig(fraction=1.5), r"fraction=1.5 must lie in \(0, 1\]"),
    (lambda: POETConfig(fraction=math.nan), r"fraction=nan must lie in \(0, 1\]"),
    (lambda: POETConfig(merge_interval=0), "merge_interval=0 must be a whole number of steps, at least 1"),
    (lambda: POETConfig(neumann_terms=0), "neumann_terms=0 .* training diverges"),
    (lambda: POETConfig(neumann_terms="Exact"), "neumann_terms=Exact must be"),  # type: ignore[arg-type]
    (lambda: POETConfig(clip_ramp_steps=-1), "clip_ramp_steps=-1 must be"),
    (lambda: POETConfig(lr_scale=math.inf), "lr_scale=inf must be positive and finite"),
    (lambda: POETConfig(seed=-1), "seed=-1 must be"),
    (lambda: POETConfig(variant="block"), "Unknown variant 'block'"),  # type: ignore[arg-type]
    (lambda: POETConfig(init="normal"), "Unknown init 'normal'. Did you mean 'normalized'"),  # type: ignore[arg-type]
    (lambda: POETConfig(forward="inputs"), "Unknown forward 'inputs'. Did you mean 'input'"),  # type: ignore[arg-type]
    (lambda: POETConfig(on_indivisible="drop"), "Unknown on_indivisible 'drop'"),  # type: ignore[arg-type]
    (lambda: POETConfig(target_modules="q_proj"), r"must be a tuple of names, such as \('q_proj',\)"),  # type: ignore[arg-type]
    (
        lambda: wrap(linear_of(6, 4), block_size=4),
        "block_size=4 does not divide a side of 6. .* 2, 3, 6 divide it",
    ),
    (lambda: wrap(linear_of(6, 4), block_size=8), "block_size=8 exceeds a side of 6"),
    (
        lambda: wrap(linear_of(6, 4), variant="fs", fraction=0.3),
        "fraction=0.3 of a side of 6 is 1 .* at least 0.333",
    ),
    (lambda: wrap(nn.LayerNorm(4)), "LayerNorm is no plain linear layer"),
    (lambda: wrap(nn.Bilinear(2, 2, 2)), "Bilinear is no plain linear layer"),
    (lambda: wrap(wrap(linear_of(6, 4))), "POETLinear is wrapped already"),
    (
        lambda: apply_poet(llama(), POETConfig(block_size=8)),
        r"wrapped already \(21 layers, first model.layers.0",
    ),
    (
        lambda: llama(block_size=16),
        r"layers.0.self_attn.k_proj, \(8, 16\): block_size=16 exceeds a side of 8",
    ),
    (lambda: llama(exclude_modules=("*",)), r"POET matches no layer .* of 21 linear layers exclude_modules"),
    (
        lambda: llama(block_size=100, on_indivisible="skip"),
        r"No layer of LlamaForCausalLM was left to wrap: 21 were skipped \(first model",
    ),
    (lambda: llama(target_modules=("q_porj",)), "'q_porj' matches no linear layer. Did you mean 'q_proj'"),
    (mixed, r"no list of decoder layers.* target_modules, such as \('\*',\)"),
    (lambda: mixed(target_modules=("out",)), "out shares its weight with tokens.weight.*exclude_modules"),
    (lambda: mixed(target_modules=("twice",)), "twice shares its weight with again.weight"),
    (
        lambda: apply_poet(nn.DataParallel(tiny.build("tiny:llama-10k")), POETConfig()),
        "inside DataParallel, which has noted its parameters",
    ),
    (lambda: merge_poet(nn.Linear(2, 2)), r"Linear has no POET layer: call apply_poet"),
    (lambda: poet_param_groups(nn.Linear(2, 2), 1e-3), r"Linear has no POET layer"),
    (lambda: poet_param_groups(llama(), math.nan), "base_lr=nan must be finite and not negative"),
    (lambda: poet_param_groups(llama(), 1e-3, -1.0), "poet_lr=-1.0 must be finite"),
    (lambda: spectrum_report(llama(), {}), "The spectra of before lack model.layers.0"),
]


@pytest.mark.parametrize(("act", "message"), BAD)
def test_bad_input(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()


def test_a_refused_model_is_as_before() -> None:
    model = tiny.build("tiny:llama-10k")
    modules, before = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 4] = math.nan
    for cfg, error in (
        (POETConfig(block_size=8, init="keep"), NumericalFailure),
        (POETConfig(block_size=16), UsageError),
    ):
        with pytest.raises(error):
            apply_poet(model, cfg)
        assert dict(model.named_modules()) == modules
    with pytest.raises(NumericalFailure, match=r"16 x 24 weight of model.layers.2.mlp.down_proj holds NaN"):
        apply_poet(model, POETConfig(block_size=8, init="keep"))
    assert len(before) == len(model.state_dict())
    apply_poet(model, POETConfig(block_size=8))  # a drawn weight replaces the bad one
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@torch.no_grad()
def test_rotations_that_went_wrong(caplog: pytest.LogCaptureFixture) -> None:
    layer = wrap(linear_of(12, 8), block_size=4)
    layer.q_in[0, 0] = 0.99
    layer.merge_and_reinit()
    assert not caplog.text
    layer.q_in[0] = 0.6  # ‖q‖₂ = 1.47 but ‖Q‖₂ = 1.45 of six equal numbers
    layer.merge_and_reinit()
    assert "of a 12 x 8 layer is past 1" in caplog.text and "the spectrum moves" in caplog.text
    caplog.clear()
    exact = wrap(linear_of(12, 8), block_size=4, neumann_terms="exact")
    exact.q_in[0] = 5.0
    exact.merge_and_reinit()
    assert not caplog.text
    layer.q_out[1, 2] = math.nan
    before = layer.perm_out.clone()
    for act in (layer.merge_and_reinit, layer.to_linear):
        with pytest.raises(NumericalFailure, match=r"rotations of a 12 x 8 layer hold NaN or infinity"):
            act()
    assert torch.equal(layer.perm_out, before) and layer.merges == 2


def test_quantised_weights_are_no_weights_of_real_numbers() -> None:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UsageError, match=r"dtype torch.uint8, so it is quantised"):
        wrap(linear)
    linear.weight = nn.Parameter(torch.zeros(4, 2, 2))
    with pytest.raises(UsageError, match=r"shape \(4, 2, 2\), which is no matrix"):
        wrap(linear)


def test_what_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert "bs: 6 x 2 out, 4 x 2 in, terms=3, weight" in repr(wrap(linear_of(12, 8)))
    with caplog.at_level(logging.INFO, "gnomon"):
        llama()
    # Sides of 1, 2 or 3 blocks of 28: q, o 112, k, v 84, the three of the MLP 140, in each of three layers.
    assert "POET: 21 layers, 2436 numbers of rotations around" in caplog.text


def test_conv1d_is_told_from_linear() -> None:
    model = tiny.build("tiny:gpt2-10k")
    conv = model.transformer.h[0].attn.c_attn
    assert is_conv1d(conv)
    layer = wrap(conv, block_size=4)
    assert (layer.out_features, layer.in_features) == (48, 16)
    x = randn(3, 16)
    torch.testing.assert_close(layer(x), conv(x))
    assert torch.equal(layer.to_linear().weight, conv.weight)


def test_importing_loads_torch_but_not_transformers() -> None:
    code = (
        "import sys, gnomon.methods.optim.poet, gnomon.methods.optim.baselines.galore\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(poet) == doctest.TestResults(failed=0, attempted=13)
