"""Whole models. Sources of truth: plain loops over what every layer reads, the errors of the layers' outputs, the
method's own limits (full rank, keep=1), and that everything else of a model stays bit for bit."""

from __future__ import annotations

import copy
import doctest
import importlib
from typing import Any

import pytest
import torch
from family_models import tiny_family
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.calibration import mean_nll, require_calib
from gnomon.methods.compress.lowrank import (
    CONFIGS,
    METHODS,
    ASVDConfig,
    DobiConfig,
    LoraUpdate,
    LowRankLinear,
    SVDConfig,
    SVDLLMConfig,
    calibrate,
    compress_lowrank,
    compressible,
    kept_share,
    lora_update,
    rank_for,
    ranks_of,
    shapes,
    svd_factors,
    to_dense,
)


def ids(rows: int = 4, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


QUICK: dict[str, Any] = {
    "svd": SVDConfig(),
    "asvd": ASVDConfig(candidates=(0.5, 0.8)),
    "svd_llm": SVDLLMConfig(),
    "svd_llm_lora": SVDLLMConfig(update=LoraUpdate(epochs=1)),
    "dobi": DobiConfig.small(epochs=1),
}


def inputs_of(model: nn.Module, batch: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """What every linear layer reads, padding dropped, (N, n), by hooks of its own."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            real = torch.ones_like(batch).bool() if mask is None else mask.bool()
            seen[name] = args[0].detach().flatten(0, -2)[real.flatten()]

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in compressible(model).items()]
    with torch.no_grad():
        model(batch, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return seen


# ------------------------------------------------------------------------------------- what every method does


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_every_method(method: str, family: str) -> None:
    """The budget is met, the original and all other parameters stay, outputs move but stay near, modes come back."""
    model = tiny_family(family)
    model.model.train()
    model.eval().get_submodule("model").train()
    next(iter(compressible(model).values())).weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    small = compress_lowrank(model, method, 0.75, [ids()], config=QUICK[method])
    assert small is not model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    replaced = set(ranks_of(small))
    assert replaced <= set(compressible(model)) and replaced
    assert (replaced == set(compressible(model))) or method == "asvd"
    assert 0.5 < kept_share(small) <= 0.75
    left = {name: tensor for name, tensor in small.state_dict().items() if name in before}
    assert len(left) == len(before) - len(replaced)
    for name, tensor in left.items():
        assert torch.equal(tensor, before[name]), name
    assert {name: module.training for name, module in small.named_modules()} == modes
    first = next(iter(compressible(model)))
    for name, parameter in small.named_parameters():
        assert parameter.requires_grad == (name not in (f"{first}.weight", f"{first}.a", f"{first}.b")), name
        assert parameter.grad is None
    for hooked in (*model.modules(), *small.modules()):
        assert not hooked._forward_hooks and not hooked._forward_pre_hooks
    model.eval()
    small.eval()
    batches = require_calib([ids(seed=0)], model, "the test")
    with torch.no_grad():
        logits, theirs = small(ids()).logits, model(ids()).logits
        assert not torch.allclose(logits, theirs)  # a compressor that does nothing fails
        torch.testing.assert_close(to_dense(copy.deepcopy(small))(ids()).logits, logits, rtol=1e-3, atol=1e-3)
        blank = compress_lowrank(model, "svd", 0.75)
        for module in blank.modules():
            if isinstance(module, LowRankLinear):
                module.a.zero_()
        near, far = (float(mean_nll(one, batches)) for one in (small, blank))
    assert (
        near < 6
        and logits.isfinite().all()
        and (logits - theirs).norm() < (blank(ids()).logits - theirs).norm()
    )
    assert far > 0


@pytest.mark.parametrize(
    "family", ["mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3", "phi", "neox", "neox-parallel"]
)
def test_families(family: str) -> None:
    """SVD-LLM in place; biases, norms, embeddings and head are the same objects afterwards."""
    model = tiny_family(family)
    layers = compressible(model)
    kept = {id(p) for p in model.parameters()} - {id(layer.weight) for layer in layers.values()}
    biases = {name: layer.bias.clone() for name, layer in layers.items() if layer.bias is not None}
    assert compress_lowrank(model, "svd_llm", 0.7, [ids()], inplace=True) is model
    assert set(ranks_of(model)) == set(layers) and len(layers) >= 12
    for name, (m, n) in shapes(model).items():
        assert ranks_of(model)[name] == rank_for(0.7, m, n)
    for name, bias in biases.items():
        found = model.get_submodule(name).bias
        assert torch.equal(found, bias) and found.requires_grad
    missing = kept - {id(p) for p in model.parameters()}
    assert len(missing) <= len(biases)  # a layer may hold its bias as a parameter of its own
    assert model(ids()).logits.isfinite().all()
    model(ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith((".a", ".b")))


def test_tied_embeddings_stay_tied() -> None:
    model = tiny_family("llama", tie_word_embeddings=True)
    small = compress_lowrank(model, "svd", 0.7)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert torch.equal(small.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("method", METHODS)
def test_bf16(method: str) -> None:
    model = tiny_family("llama", dtype=torch.bfloat16)
    small = compress_lowrank(model, method, 0.75, [ids()], config=QUICK[method])
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert small(ids()).logits.isfinite().all()
    if method == "svd":
        name, w = next(iter(compressible(model).items()))
        a, b = svd_factors(w.weight.float(), ranks_of(small)[name])
        layer = small.get_submodule(name)
        assert torch.equal(layer.a, a.bfloat16()) and torch.equal(layer.b, b.bfloat16())


@pytest.mark.parametrize("method", METHODS)
def test_keep_one_is_the_dense_model(method: str) -> None:
    model = tiny_family("llama")
    same = compress_lowrank(model, method, 1, [ids()])
    assert same is not model and not ranks_of(same) and kept_share(same) == 1
    assert torch.equal(same(ids()).logits, model(ids()).logits)
    assert compress_lowrank(model, method, 1.0, [ids()], inplace=True) is model


# ---------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_statistics_equal_plain_sums(family: str) -> None:
    model, first, second = tiny_family(family), ids(), ids(3, 11, seed=1)
    mask = torch.ones_like(second)
    mask[0, 7:], mask[2, 2:] = 0, 0
    stats = calibrate(model, [first, {"input_ids": second, "attention_mask": mask}], device="cpu")
    seen, padded = inputs_of(model, first), inputs_of(model, second, mask)
    for name, one in stats.items():
        x = torch.cat([seen[name], padded[name]]).double()
        assert one.tokens == len(x) == 80 + 7 + 11 + 2
        torch.testing.assert_close(one.gram, x.T @ x)
        torch.testing.assert_close(one.mean_abs, x.abs().mean(0))
        torch.testing.assert_close(one.abs_max, x.abs().amax(0))
    light = calibrate(model, [first], gram=False)
    assert all(one.gram is None for one in light.values())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    """Padded rows give the factors of the rows alone."""
    model, short, blank = tiny_family("llama"), ids(2, 9), torch.zeros(2, 6, dtype=torch.long)
    padded = torch.cat([blank, short] if side == "left" else [short, blank], 1)
    ones = torch.ones_like(short)
    mask = torch.cat([blank, ones] if side == "left" else [ones, blank], 1)
    for method in ("svd_llm", "dobi"):
        one = compress_lowrank(model, method, 0.6, [short], config=QUICK[method])
        two = compress_lowrank(
            model, method, 0.6, [{"input_ids": padded, "attention_mask": mask}], config=QUICK[method]
        )
        assert ranks_of(one) == ranks_of(two)
        torch.testing.assert_close(one(short).logits, two(short).logits, rtol=2e-3, atol=2e-3)


def test_svd_llm_fits_the_first_layer_best() -> None:
    """Error of the first layer's output on the calibration text: whitened < scaled < plain, and Dobi between."""
    model = tiny_family("llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(torch.logspace(-1.5, 1, 16))
    name = "model.layers.0.self_attn.q_proj"
    x, w = inputs_of(model, ids())[name], compressible(model)[name].weight
    errors = {}
    for method in ("svd", "asvd", "svd_llm"):
        config = CONFIGS[method](ranks="floor")  # type: ignore[call-arg]
        layer = compress_lowrank(model, method, 0.5, [ids()], config=config).get_submodule(name)
        errors[method] = (x @ (w - layer.a @ layer.b).T).norm().item()
    assert errors["svd_llm"] < errors["asvd"] < errors["svd"]
    layer = compress_lowrank(model, "svd_llm", 0.5, [ids()]).get_submodule(name)
    tail = torch.linalg.svdvals(x.double() @ w.double().T)[layer.rank :]
    assert errors["svd_llm"] == pytest.approx(tail.norm().item(), rel=1e-4)


def test_all_zero_inputs() -> None:
    """A layer that only ever reads zeros is compressed as by the plain SVD."""
    model = tiny_family("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.zero_()
    name = "model.layers.1.self_attn.k_proj"
    plain, whitened = (compress_lowrank(model, method, 0.6, [ids()]) for method in ("svd", "svd_llm"))
    one, two = plain.get_submodule(name), whitened.get_submodule(name)
    torch.testing.assert_close(one.a @ one.b, two.a @ two.b, rtol=1e-4, atol=1e-5)
    for method in ("asvd", "dobi"):
        found = compress_lowrank(model, method, 0.75, [ids()], config=QUICK[method])
        assert all(p.isfinite().all() for p in found.parameters())


# ------------------------------------------------------------------------------------------ ASVD and LoRA


def test_sensitivity_is_the_loss_with_one_layer_compressed() -> None:
    """One entry of ASVD's table, made by hand, and the search leaves the weights as they were."""
    from gnomon.methods.compress.lowrank import asvd_factors, asvd_scale, sensitivities

    model, name = tiny_family("llama"), "model.layers.2.mlp.down_proj"
    layers, batches = compressible(model), require_calib([ids()], model, "the test")
    scales = {key: asvd_scale(one.mean_abs) for key, one in calibrate(model, [ids()], gram=False).items()}
    before = copy.deepcopy(model.state_dict())
    losses = sensitivities(model, {name: layers[name]}, scales, batches, (0.4, 0.9))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    m, n = layers[name].weight.shape
    a, b = asvd_factors(layers[name].weight, rank_for(0.4, m, n), scales[name])
    with torch.no_grad():
        layers[name].weight.copy_(a @ b)
        loss = model(ids(), labels=ids()).loss
    assert losses[name, 0.4] == pytest.approx(float(loss), rel=1e-5)
    assert set(losses) == {(name, 0.4), (name, 0.9)}


def test_the_update_lowers_the_loss() -> None:
    """SVD-LLM's second step changes both factors, keeps ranks and parameter objects, and repeats bit for bit."""
    model = tiny_family("llama")
    small = compress_lowrank(model, "svd_llm", 0.6, [ids()])
    batches = require_calib([ids()], model, "the test")
    start = copy.deepcopy(small)
    objects = {name: id(p) for name, p in small.named_parameters()}
    config = LoraUpdate(epochs=10, lr=1e-2)
    assert lora_update(small, [ids()], config) is small
    assert ranks_of(small) == ranks_of(start)
    assert {name: id(p) for name, p in small.named_parameters()} == objects
    assert not any(hasattr(module, "parametrizations") for module in small.modules())
    for (name, new), (_, old) in zip(small.named_parameters(), start.named_parameters(), strict=True):
        assert torch.equal(new, old) == (not name.endswith((".a", ".b"))), name
        assert new.requires_grad
    with torch.no_grad():
        assert mean_nll(small, batches) < mean_nll(start, batches) - 0.05
    again = lora_update(copy.deepcopy(start), [ids()], config)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), small.parameters(), strict=True))
    both = compress_lowrank(
        model, "svd_llm_lora", 0.6, [ids()], config=SVDLLMConfig(update=config), update=[ids()]
    )
    assert all(torch.equal(p, q) for p, q in zip(both.parameters(), small.parameters(), strict=True))
    with pytest.raises(UsageError, match="no LowRankLinear to update"):
        lora_update(model, [ids()])


def test_the_example_works() -> None:
    """The package's docstring."""
    from gnomon.methods.compress import lowrank

    assert doctest.testmod(lowrank) == doctest.TestResults(failed=0, attempted=7)
    pca = importlib.import_module("gnomon.methods.compress.lowrank.pca")
    assert doctest.testmod(pca) == doctest.TestResults(failed=0, attempted=3)


# ---------------------------------------------------------------------------------------------- bad input


def test_refused_before_any_work() -> None:
    model = tiny_family("llama")
    for call, message in (
        (lambda: compress_lowrank(model, "svdllm"), "Unknown method 'svdllm'. Did you mean 'svd_llm'"),
        (lambda: compress_lowrank(model, keep=0.0), "keep=0.0"),
        (lambda: compress_lowrank(model, keep=float("nan")), "keep=nan"),
        (lambda: compress_lowrank(model, "svd_llm"), "method='svd_llm' needs calibration text"),
        (lambda: compress_lowrank(model, "dobi", calib=[]), "needs calibration text"),
        (lambda: compress_lowrank(model, "asvd", 0.3, [ids()]), "Pass candidates= that go lower"),
        (lambda: compress_lowrank(model, "dobi", 0.01, [ids()]), "rank 1 in each of the 21 layers"),
        (lambda: compress_lowrank(model, "svd", config=ASVDConfig()), "takes a SVDConfig"),
        (lambda: compress_lowrank(model, "svd", update=[ids()]), "update= is text for method='svd_llm_lora'"),
        (lambda: compress_lowrank(compress_lowrank(model)), "compressed already: model.layers.0"),
        (lambda: compress_lowrank(tiny_family("gpt2")), "Conv1D"),
        (lambda: compress_lowrank(nn.Linear(3, 3)), "no list of decoder layers"),
        (lambda: compress_lowrank(model, "svd_llm", calib=[ids() + 30]), "the model knows 0 to 39"),
        (lambda: compress_lowrank(model, "svd_llm", calib=[ids()[0]]), r"shape \(B, T\)"),
        (lambda: compress_lowrank(model, "svd_llm", calib=[ids().float()]), "integers of shape"),
        (lambda: compress_lowrank(model, "svd_llm", calib=[ids()[:, :1]]), "no two real tokens"),
        (
            lambda: compress_lowrank(
                model, "svd_llm", calib=[{"input_ids": ids(), "attention_mask": 0 * ids()}]
            ),
            "no two real tokens",
        ),
        (
            lambda: compress_lowrank(
                model, "svd_llm", calib=[{"input_ids": ids(), "attention_mask": ids()[:1]}]
            ),
            "a mask of",
        ),
        (lambda: compress_lowrank(copy.deepcopy(model).to("meta")), "meta device"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_a_bare_tensor_is_no_list(unchecked: None) -> None:
    for calib in (ids(), {"input_ids": ids()}, "some text"):
        with pytest.raises(UsageError, match="must be a list of batches"):
            compress_lowrank(tiny_family("llama"), "svd_llm", calib=calib)  # type: ignore[arg-type]


def test_layers_that_cannot_be_replaced() -> None:
    model = tiny_family("llama")
    attention = model.model.layers[0].self_attn
    hook = attention.q_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(UsageError, match="q_proj has hooks"):
        compress_lowrank(model)
    hook.remove()
    own, attention.q_proj.weight = attention.q_proj.weight, attention.o_proj.weight
    with pytest.raises(UsageError, match="o_proj shares its weight with"):
        compress_lowrank(model)
    attention.q_proj.weight = own
    torch.nn.utils.parametrizations.weight_norm(attention.q_proj)
    with pytest.raises(UsageError, match=r"not a plain nn\.Linear"):
        compress_lowrank(model)


def test_numbers_that_are_none() -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] = float("nan")
    with pytest.raises(NumericalFailure, match=r"input of model.layers.1.self_attn.q_proj holds NaN"):
        compress_lowrank(model, "svd_llm", calib=[ids()])
    assert not any(layer._forward_pre_hooks for layer in compressible(model).values())
    with pytest.raises(NumericalFailure, match=r"output of model.layers.1.self_attn.q_proj holds NaN"):
        compress_lowrank(model, "dobi", calib=[ids()])
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(NumericalFailure, match=r"layers.2.mlp.up_proj.weight holds NaN"):
        compress_lowrank(model)


def test_configs_are_checked() -> None:
    for kind, settings, message in (
        (SVDConfig, {"ranks": "fitt"}, "Did you mean 'fit'"),
        (ASVDConfig, {"magnitude": "median"}, "magnitude"),
        (ASVDConfig, {"candidates": ()}, "candidates="),
        (ASVDConfig, {"candidates": (0.5, 1.0)}, "candidates="),
        (ASVDConfig, {"samples": 0}, "samples=0"),
        (ASVDConfig, {"alpha": float("nan")}, "alpha=nan"),
        (LoraUpdate, {"r": 0}, "r=0"),
        (LoraUpdate, {"lr": float("nan")}, "lr=nan"),
        (SVDLLMConfig, {"device": ""}, "device"),
    ):
        with pytest.raises(UsageError, match=message):
            kind(**settings)
