"""Whole models. Sources of truth: hooks and loops of the test's own over the running model, the budget counted on
stored weights, and that everything else of a model stays bit for bit."""

from __future__ import annotations

import copy
import doctest
import gc
import importlib
import math
from typing import Any

import pytest
import torch
from family_models import FAMILIES, tiny_family
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.calibration import require_calib
from gnomon.methods.compress.pruning import (
    METHODS,
    Allocation,
    MaskLLMConfig,
    PruneConfig,
    Quota,
    Request,
    allocate,
    blocks,
    budget,
    collect_importance,
    matrix,
    prunable,
    prune,
    shapes_of,
    sparsegpt,
    wanda_mask,
)

CHEAP = PruneConfig(maskllm=MaskLLMConfig(steps=2))


def ids(rows: int = 4, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(
    model: nn.Module, batches: list[Tensor], masks: list[Tensor] | None = None
) -> dict[str, Tensor]:
    """What every linear layer reads, padding dropped, (N, n), by hooks of its own."""
    seen: dict[str, list[Tensor]] = {}
    real = torch.empty(0)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, []).append(args[0].detach().flatten(0, -2)[real.flatten()])

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in prunable(model).items()]
    for i, batch in enumerate(batches):
        mask = torch.ones_like(batch) if masks is None else masks[i]
        real = mask.bool()
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            model(batch, attention_mask=mask, position_ids=positions)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def norms_of(x: Tensor) -> Tensor:
    return x.double().square().mean(0).sqrt().float()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_untouched(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in module.__dict__


# ------------------------------------------------------------------------------------------- which matrices


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_every_family(family: str) -> None:
    model = tiny_family(family)
    found = prunable(model)
    assert not any("embed" in name or "lm_head" in name for name in found)
    assert [len(names) for names in blocks(model, list(found))] == [len(found) // 3] * 3
    name, module = list(found.items())[-1]
    w = matrix(module)
    x = torch.randn(2, w.shape[1])
    bias = 0 if module.bias is None else module.bias
    torch.testing.assert_close(module(x), x @ w.T + bias)  # [outputs, inputs], whatever is stored
    w[0, 0] = 7.0
    assert 7.0 in module.weight  # a view, not a copy
    assert shapes_of(found)[name] == tuple(w.shape)


def test_choosing() -> None:
    model = tiny_family("llama")
    names = list(prunable(model))
    assert list(prunable(model, targets=["up_proj"])) == [n for n in names if n.endswith(".up_proj")]
    assert list(prunable(model, targets=["model.layers.1.*"], exclude=["mlp.up_proj"])) == [
        n for n in names if ".1." in n and "up_proj" not in n
    ]
    with pytest.raises(UsageError, match=r"'up_porj', which fits no matrix. Did you mean 'up_proj'"):
        prunable(model, targets=["up_porj"])
    with pytest.raises(UsageError, match=r"Pass a list: exclude=\['up_proj'\]"):
        prunable(model, exclude="up_proj")
    with pytest.raises(UsageError, match="leave no matrix"):
        prunable(model, targets=["up_proj"], exclude=["*"])


def test_weights_that_can_not_be_pruned() -> None:
    def broken(change: Any) -> nn.Module:
        model = tiny_family("llama")
        change(model.model.layers[1].mlp)
        return model

    def quantised(mlp: Any) -> None:
        mlp.up_proj.weight = nn.Parameter(torch.zeros(24, 16, dtype=torch.int8), requires_grad=False)

    def tied(mlp: Any) -> None:
        mlp.up_proj.weight = mlp.gate_proj.weight

    def meta(mlp: Any) -> None:
        mlp.up_proj.to("meta")

    def shard(mlp: Any) -> None:
        mlp.up_proj.weight = nn.Parameter(torch.zeros(12, 16))

    def subclass(mlp: Any) -> None:
        mlp.up_proj = type("Linear4bit", (nn.Linear,), {})(16, 24)

    def adapted(mlp: Any) -> None:
        inner, mlp.up_proj = mlp.up_proj, nn.Module()
        mlp.up_proj.base_layer = inner

    def parametrised(mlp: Any) -> None:
        nn.utils.parametrize.register_parametrization(mlp.up_proj, "weight", nn.Identity())

    def nan(mlp: Any) -> None:
        mlp.up_proj.weight.data[0, 0] = math.nan

    cases: list[tuple[Any, type[Exception], str]] = [
        (quantised, UsageError, "Linear of torch.int8, not a plain"),
        (tied, UsageError, r"mlp.gate_proj shares its weight with model\.layers\.1\.mlp\.up_proj"),
        (meta, UsageError, "on the meta device"),
        (shard, UsageError, "holds a shard"),
        (subclass, UsageError, "Linear4bit"),
        (adapted, UsageError, "has an adapter"),
        (parametrised, UsageError, "ParametrizedLinear"),
        (nan, NumericalFailure, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
    ]
    for change, kind, message in cases:
        with pytest.raises(kind, match=message):
            prune(broken(change), "magnitude", 0.5)
        if change is not tied and change is not adapted:
            assert "model.layers.1.mlp.up_proj" not in prunable(
                broken(change), exclude=["layers.1.mlp.up_proj"]
            )


# ------------------------------------------------------------------------------------------------ importance


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_importance_against_hooks(family: str, sequential: bool) -> None:
    model = tiny_family(family)
    before, batches = state(model), [ids(), ids(3, 11, 1)]
    scores = collect_importance(model, batches, sequential=sequential)
    expected = inputs_of(model, batches)
    assert list(scores) == list(prunable(model))
    for name, module in prunable(model).items():
        assert scores[name].dtype == torch.float32 and scores[name].device.type == "cpu"
        s = matrix(module).abs() * norms_of(expected[name])
        torch.testing.assert_close(scores[name], s, rtol=1e-5, atol=1e-7)
    require_untouched(model, before)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_padding_has_no_part_in_it(family: str, side: str, sequential: bool) -> None:
    model, short = tiny_family(family), ids(2, 7)
    pad = torch.zeros(2, 5, dtype=torch.long)
    order = (lambda a, b: torch.cat([a, b], 1)) if side == "right" else (lambda a, b: torch.cat([b, a], 1))
    padded = {"input_ids": order(short, pad), "attention_mask": order(torch.ones_like(short), pad)}
    plain = collect_importance(model, [short], sequential=sequential)
    for name, scores in collect_importance(model, [padded], sequential=sequential).items():
        torch.testing.assert_close(scores, plain[name], rtol=1e-4, atol=1e-6)
    blind = collect_importance(model, [padded["input_ids"]], sequential=sequential)
    assert any(not torch.allclose(blind[name], plain[name], rtol=0.01) for name in plain)


def test_other_metrics() -> None:
    model = tiny_family("llama")
    magnitude = collect_importance(model, metric="magnitude")  # needs no text
    assert all(torch.equal(magnitude[n], matrix(m).abs()) for n, m in prunable(model).items())
    wanda = collect_importance(model, [ids()])
    own = collect_importance(model, [ids()], lambda w, norms: w.square() * norms.square())
    for name, scores in own.items():
        torch.testing.assert_close(scores, wanda[name].square(), rtol=1e-4, atol=1e-9)
    with pytest.raises(UsageError, match="can't rank a matrix"):
        collect_importance(model, [ids()], lambda w, norms: norms)
    with pytest.raises(NumericalFailure, match=r"model\.layers\.0\.self_attn\.q_proj: The scores hold NaN"):
        collect_importance(model, [ids()], lambda w, norms: w * math.nan)
    with pytest.raises(UsageError, match="Unknown metric 'wnda'"):
        collect_importance(model, [ids()], "wnda")


def test_each_layer_reads_what_the_pruned_ones_before_it_give() -> None:
    """And only one layer's inputs are held."""
    model = tiny_family("llama")
    batches = [ids(seed=s) for s in range(6)]
    held = []

    def visit(names: list[str], scores: dict[str, Tensor]) -> None:
        expected = inputs_of(model, batches)
        for name in names:
            s = matrix(prunable(model)[name]).abs() * norms_of(expected[name])
            torch.testing.assert_close(scores[name], s, rtol=1e-4, atol=1e-6)
        del expected
        for name in names:
            matrix(prunable(model)[name]).mul_(scores[name] > scores[name].median())
        gc.collect(0)
        held.append(sum(type(t) is Tensor and t.shape == (4, 20, 16) for t in gc.get_objects()))

    dense = collect_importance(model, batches)
    pruned = collect_importance(model, batches, sequential=True, visit=visit)
    assert len(held) == 3 and max(held) <= 6 + 2, held
    same = [torch.equal(dense[name], pruned[name]) for name in dense]
    first = next(iter(dense))
    assert not all(same) and torch.allclose(dense[first], pruned[first], rtol=1e-5)
    with pytest.raises(UsageError, match="pass sequential=True"):
        collect_importance(model, batches, visit=visit)


@pytest.mark.parametrize("sequential", [False, True])
def test_activations_that_are_no_numbers_name_their_layer(sequential: bool) -> None:
    model = tiny_family("llama")
    model.model.layers[1].input_layernorm.weight.data[3] = math.nan
    before = state(model)
    with pytest.raises(NumericalFailure, match=r"input of model\.layers\.1\.self_attn\.q_proj holds NaN"):
        collect_importance(model, [ids()], sequential=sequential)
    for method in ("wanda", "sparsegpt"):  # layer 0 is pruned by then, and put back
        with pytest.raises(NumericalFailure, match=r"model\.layers\.1\.self_attn\.q_proj"):
            prune(model, method, 0.5, calib=[ids()], sequential=sequential)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(9), before[name].nan_to_num(9)), name


def test_models_whose_layers_do_not_follow_each_other() -> None:
    model = tiny_family("llama")
    handle = model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    with pytest.raises(UsageError, match=r"changes the hidden state between two layers.*sequential=False"):
        prune(model, "wanda", 0.5, calib=[ids()])
    assert prune(model, "wanda", 0.5, calib=[ids()], sequential=False).off == 0
    handle.remove()


# ------------------------------------------------------------------------------------------- pruners, whole models


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_against_a_loop_over_layers(method: str, sequential: bool) -> None:
    batches, dense, model = [ids(), ids(seed=1)], tiny_family("llama"), tiny_family("llama")
    report = prune(model, method, 0.5, calib=batches, sequential=sequential)
    for names in blocks(dense, list(prunable(dense))):
        inputs = inputs_of(dense if sequential else tiny_family("llama"), batches)
        for name in names:
            w, x = matrix(prunable(dense)[name]), inputs[name]
            if method == "wanda":
                mask = wanda_mask(w, norms_of(x), 0.5)
                w.mul_(mask)
            else:
                done = sparsegpt(w, x.double().T @ x.double(), 0.5)
                mask = done.mask
                w.copy_(done.weight)
            assert torch.equal(report.masks[name], mask), name
            torch.testing.assert_close(matrix(prunable(model)[name]), w, rtol=1e-3, atol=1e-4)
    assert report.off == 0 and report.sparsity == 0.5


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "neox-parallel", "gemma2"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt", "maskllm"])
def test_only_the_matrices_change(method: str, family: str) -> None:
    model = tiny_family(family, dtype=torch.bfloat16)
    model.get_submodule(
        "transformer" if family == "gpt2" else "model" if family != "neox-parallel" else "gpt_neox"
    ).train()
    next(iter(prunable(model).values())).weight.requires_grad_(False)
    before, modes = state(model), {n: m.training for n, m in model.named_modules()}
    parameters = {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    how: dict[str, Any] = {"pattern": "2:4"} if method == "maskllm" else {"sparsity": 0.57}
    report = prune(model, method, calib=[ids()], config=CHEAP, **how)
    matrices = prunable(model)
    assert report.off == 0 == sum(int((m.weight == 0).sum()) for m in matrices.values()) - report.removed
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem not in matrices:
            assert torch.equal(tensor, before[name]), name
            continue
        old = before[name].T if family == "gpt2" else before[name]
        w, mask = matrix(matrices[stem]), report.masks[stem]
        assert not bool(w[~mask].any()) and report.per_layer[stem] == pytest.approx(
            float((w == 0).float().mean())
        )
        assert torch.equal(w[mask], old[mask]) == (method != "sparsegpt")  # only SparseGPT updates
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert {n: (id(p), p.requires_grad) for n, p in model.named_parameters()} == parameters
    require_untouched(model, state(model))
    assert all(p.grad is None for p in model.parameters())
    assert set(report.losses) == (set(matrices) if method == "sparsegpt" else set())


@pytest.mark.parametrize(
    "allocation", ["uniform", "owl", "alpha", "atp", "dict", "callable", "rows", "columns"]
)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt", "maskllm"])
def test_every_pruner_takes_every_allocation(method: str, allocation: str) -> None:
    model = tiny_family("llama", num_hidden_layers=2)
    shapes = shapes_of(prunable(model))
    given: Any = {
        "dict": {name: 0.25 if ".0." in name else 0.75 for name in shapes},
        "callable": lambda request: {name: 0.75 if ".0." in name else 0.25 for name in request.matrices},
        "rows": Allocation(
            ratios={n: torch.linspace(0.3, 0.7, o) for n, (o, _) in shapes.items()}, axis="row"
        ),
        "columns": Allocation(
            ratios={n: torch.linspace(0.3, 0.7, -(-i // 4)) for n, (_, i) in shapes.items()},
            axis="column",
            group=4,
        ),
    }.get(allocation, allocation)
    how: dict[str, Any] = {"pattern": "2:4"} if method == "maskllm" else {"sparsity": 0.5}
    config = PruneConfig(
        maskllm=MaskLLMConfig(steps=1), options={"points": 3} if allocation == "atp" else None
    )
    report = prune(model, method, calib=[ids(2, 12)], allocation=given, config=config, **how)
    assert report.removed == budget(0.5, report.weights) and report.off == 0
    if allocation in ("dict", "callable"):
        first = 0.25 if allocation == "dict" else 0.75
        for name, share in report.per_layer.items():
            assert share == pytest.approx(first if ".0." in name else 1 - first, abs=1e-6)
    if allocation == "rows" and method in ("magnitude", "wanda", "sparsegpt"):
        for mask in report.masks.values():
            gone = (~mask).double()
            assert (
                float((gone.sum(1) - torch.linspace(0.3, 0.7, len(mask)) * mask.shape[1]).abs().max())
                < 1 + 1e-5
            )
    if allocation == "columns" and method in ("magnitude", "wanda", "sparsegpt"):
        for mask in report.masks.values():
            first, last = (float((~mask)[:, part].double().mean()) for part in (slice(4), slice(-4, None)))
            assert first < 0.4 and last > 0.6


@pytest.mark.parametrize("p", [0.01, 0.333, 0.5, 0.61, 0.99])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_the_budget_is_met_to_the_weight(method: str, p: float) -> None:
    """Real parameters are counted, key and value heads once; zeros that were there are part of the budget."""
    model = tiny_family("qwen2")
    for module in prunable(model).values():
        w = matrix(module)
        w[w.abs() < 0.0025] = 0
    w = matrix(prunable(model)["model.layers.0.mlp.down_proj"])
    if p > 0.3:
        w[:3] = 0  # rows that have nothing left to give
    there = sum(int((matrix(m) == 0).sum()) for m in prunable(model).values())
    report = prune(model, method, p, calib=[ids()], config=PruneConfig(variant=False))
    zeros = sum(int((m.weight == 0).sum()) for m in prunable(model).values())
    assert report.weights == sum(m.weight.numel() for m in prunable(model).values())
    assert zeros == report.removed == budget(p, report.weights) and there == report.zeros_before > 0
    masks = sum(int((~mask).sum()) for mask in report.masks.values())
    assert masks == zeros


def test_published_floors() -> None:
    model = tiny_family("llama")
    report = prune(model, "wanda", 0.6, calib=[ids()], exact=False)
    for mask in report.masks.values():
        assert (~mask).sum(1).tolist() == [math.floor(0.6 * mask.shape[1])] * len(mask)
    assert report.off < 0 and report.requested == 0.6  # the truncation is seen, not hidden
    report = prune(tiny_family("llama"), "magnitude", 0.6, exact=False)
    for mask in report.masks.values():
        assert int((~mask).sum()) == math.floor(0.6 * mask.numel())


def test_more_zeros_than_asked_for() -> None:
    model = tiny_family("llama")
    for module in prunable(model).values():
        matrix(module)[:, ::2] = 0
    with pytest.raises(UsageError, match=r"a share of 0\.5000, more than sparsity=0\.4"):
        prune(model, "magnitude", 0.4)
    report = prune(model, "magnitude", 0.6)
    assert report.zeros_before == report.weights // 2 and report.off == 0


def test_a_model_can_be_pruned_further() -> None:
    model = tiny_family("llama")
    first = prune(model, "wanda", 0.3, calib=[ids()])
    second = prune(model, "wanda", 0.6, calib=[ids()])
    assert second.zeros_before == first.removed and second.off == 0
    for name, mask in second.masks.items():
        assert not bool((mask & ~first.masks[name]).any())


@pytest.mark.parametrize("method", METHODS)
def test_every_name_of_a_method(method: str) -> None:
    if method == "lua":
        pytest.importorskip("gnomon.methods.compress.lua")
    model = tiny_family("llama", num_hidden_layers=2)
    how: dict[str, Any] = {"pattern": "2:4"} if method == "maskllm" else {"sparsity": 0.5}
    options: dict[str, Any] = {"lua": {"steps": 40, "lr": 0.02}, "atp": {"points": 2}}
    config = PruneConfig(maskllm=MaskLLMConfig(steps=1), options=options.get(method))
    report = prune(model, method, calib=[ids(2, 12)], config=config, **how)
    assert report.off == 0
    assert report.allocation.source.startswith(
        method if method in ("owl", "alpha", "atp", "lua") else "uniform"
    )


def test_wrapped_models() -> None:
    model, same = tiny_family("llama"), tiny_family("llama")
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)
    report = prune(wrapped, "wanda", 0.5, calib=[ids()])
    assert report.masks.keys() == prune(same, "wanda", 0.5, calib=[ids()]).masks.keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_owl_on_a_model_counts_its_outliers() -> None:
    model = tiny_family("llama")
    matrix(prunable(model)["model.layers.2.mlp.up_proj"])[0] *= 100  # one row of giants
    request = Request(model=model, matrices=prunable(model), sparsity=0.6, calib=[ids()])
    found = allocate("owl", request)
    shares = [found.of(names[0], (1, 1)) for names in blocks(model, list(prunable(model)))]
    assert found.mean(request.shapes) == pytest.approx(0.6, abs=1e-12)
    assert min(shares) == shares[2] and max(shares) - min(shares) == pytest.approx(0.16)


# ----------------------------------------------------------------------------------------------------- refusals


def test_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_family("llama")
    before = state(model)
    monkeypatch.setattr(type(model.model), "forward", lambda *a, **k: pytest.fail("the model was run"))
    half = dict.fromkeys(prunable(model), 0.5)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": "wand", "sparsity": 0.5}, "Did you mean 'wanda'"),
        ({"method": "wanda"}, "Nothing says how much"),
        ({"method": "wanda", "sparsity": 0.0}, "between 0 and 1"),
        ({"method": "wanda", "sparsity": 1.0}, "between 0 and 1"),
        ({"method": "wanda", "sparsity": math.nan}, "between 0 and 1"),
        ({"method": "wanda", "sparsity": 60.0}, "between 0 and 1; 0.6 keeps 40 %"),
        ({"method": "wanda", "sparsity": 0.5}, "needs calibration text"),
        (
            {"method": "magnitude", "sparsity": 0.5, "allocation": "owl"},
            "allocation='owl' needs calibration text",
        ),
        ({"method": "magnitude", "sparsity": 0.5, "allocation": "owls"}, "Did you mean 'owl'"),
        (
            {"method": "magnitude", "sparsity": 0.6, "allocation": half},
            r"removes 0\.5000.*but 0\.6000 are asked for",
        ),
        ({"method": "magnitude", "allocation": half | {"nose": 0.5}}, "names 'nose'"),
        (
            {"method": "magnitude", "pattern": "2:4", "sparsity": 0.6},
            "pattern=2:4 removes 0.5, but sparsity=0.6",
        ),
        ({"method": "magnitude", "pattern": "3:7"}, "16 inputs, which aren't groups of 7"),
        ({"method": "maskllm", "sparsity": 0.5}, "N:M masks only"),
        ({"method": "maskllm", "pattern": "8:16", "calib": [ids()]}, "12,870 masks"),
        ({"method": "owl", "sparsity": 0.5, "allocation": "alpha"}, "say method='wanda'"),
        (
            {"method": "sparsegpt", "sparsity": 0.5, "config": PruneConfig(variant=True), "calib": [ids()]},
            "variant=True is a form",
        ),
        (
            {
                "method": "alpha",
                "sparsity": 0.5,
                "config": PruneConfig(options={"tial": 1}),
                "calib": [ids()],
            },
            "Did you mean 'tail'",
        ),
        (
            {"method": "magnitude", "allocation": half, "config": PruneConfig(options={"tail": 1})},
            "are of named allocations",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(UsageError, match=message):
            prune(model, **arguments)
    require_untouched(model, before)


def test_a_number_is_no_allocation(unchecked: None) -> None:
    with pytest.raises(UsageError, match="allocation is a int, but must be a name"):
        prune(tiny_family("llama"), "magnitude", 0.5, allocation=3)  # type: ignore[arg-type]


def test_settings_that_are_none() -> None:
    for wrong, message in (
        ({"metric": "wnda"}, "Unknown metric"),
        ({"prior": "sparsegtp"}, "Unknown prior"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"block": 0}, "block=0"),
    ):
        with pytest.raises(UsageError, match=message):
            PruneConfig(**wrong)


def test_a_run_that_is_interrupted_leaves_the_model_as_it_was() -> None:
    model, calls = tiny_family("llama"), []
    before = state(model)

    def metric(w: Tensor, norms: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 15:  # in the third layer
            raise KeyboardInterrupt
        return w.abs()

    for sequential in (True, False):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            prune(
                model, "wanda", 0.5, calib=[ids()], config=PruneConfig(metric=metric), sequential=sequential
            )
        require_untouched(model, before)
        assert torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())


def test_an_allocator_that_misses_its_target_is_refused() -> None:
    model = tiny_family("llama")
    before = state(model)
    with pytest.raises(UsageError, match=r"removes 0\.3000.*Train it until it reaches"):
        prune(model, "magnitude", 0.5, allocation=lambda request: dict.fromkeys(request.matrices, 0.3))
    require_untouched(model, before)


def test_atp_leaves_the_model_dense_until_it_has_chosen() -> None:
    model = tiny_family("llama")
    before = copy.deepcopy(state(model))
    request = Request(
        model=model, matrices=prunable(model), sparsity=0.5, calib=[ids()], options={"points": 3}
    )
    found = allocate("atp", request)
    require_untouched(model, before)
    assert found.mean(request.shapes) == pytest.approx(0.5, abs=1e-12)
    shares = [found.of(names[0], (1, 1)) for names in blocks(model, list(prunable(model)))]
    steps = torch.tensor(shares).diff()
    assert float(steps.min()) >= 0 and float(steps[0]) == pytest.approx(float(steps[1]), abs=1e-6)


def test_the_example_of_the_docstring() -> None:
    module = importlib.import_module("gnomon.methods.compress.pruning")
    assert doctest.testmod(module).failed == 0 and module.__doc__ is not None and ">>>" in module.__doc__


def test_quota_by_name() -> None:
    found = Allocation(ratios={"a": 0.25})
    assert Quota.of(found, "a", (4, 4)).wanted.tolist() == [4.0]
    assert require_calib([ids()], tiny_family("llama"), "the test")[0].targets == 76
