"""Selection, deactivation, targeted fine-tuning. Sources of truth: sorted lists, weights zeroed by hand, activations
masked by hooks, weights compared bit for bit, PyTorch's own AdamW, the Trainer."""

from __future__ import annotations

import copy

import pytest
import torch
from family_models import tiny_family
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.shapley import (
    Group,
    MaskedTraining,
    ModelShapley,
    Part,
    ShapleyScores,
    UnitMasks,
    deactivate,
    layout_of,
    random_scores,
    select_top,
)


def ids(rows: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def drawn(model: nn.Module, units: str, seed: int = 0, *, ratio: float = 0.5) -> UnitMasks:
    scores = random_scores(model, units=units, generator=torch.Generator().manual_seed(seed))
    return select_top(scores, ratio, per="global")


def given(values: dict[str, list[float]], layout) -> ShapleyScores:
    phi = {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}
    return ShapleyScores(phi, phi, {k: torch.zeros_like(v) for k, v in phi.items()}, 1, layout)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


# ------------------------------------------------------------------------------------------------- selection


def test_selection_by_hand():
    model = tiny_family("llama")
    layout = layout_of(model, "head")
    names = list(layout.sizes)
    values = {names[0]: [1, -9, 2, 3], names[1]: [0, 0, 0, 0], names[2]: [8, 7, 6, -5.5]}
    scores = given(values, layout)
    top = [mask.int().tolist() for mask in select_top(scores, 0.5).chosen.values()]
    assert top == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]  # by |φ|, of equal ones the first
    top = [mask.int().tolist() for mask in select_top(scores, 0.5, by="signed").chosen.values()]
    assert top == [[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    top = select_top(scores, 4 / 12, per="global")
    assert [m.int().tolist() for m in top.chosen.values()] == [[0, 1, 0, 0], [0] * 4, [1, 1, 1, 0]]
    assert top.share == pytest.approx(4 / 12) and (~top).share == pytest.approx(8 / 12)
    assert select_top(scores, 1.0).share == 1.0
    least = select_top(scores, 0.01)
    assert [int(m.sum()) for m in least.chosen.values()] == [1, 1, 1]


def test_rows_of_one_layer_are_ranked_together():
    model = tiny_family("llama")
    layout = layout_of(model, "row")
    scores = random_scores(model, units="row", generator=torch.Generator().manual_seed(1))
    masks = select_top(scores, 0.25, by="signed")
    for k in range(3):
        mine = [n for n in layout.sizes if f"layers.{k}." in n]
        values = torch.cat([scores.phi[n] for n in mine])
        chosen = torch.cat([masks.chosen[n] for n in mine])
        assert int(chosen.sum()) == round(len(values) / 4)
        assert float(values[chosen].min()) > float(values[~chosen].max())


def test_parameters_are_ranked_within_their_layer():
    model = tiny_family("gpt2")
    scores = ModelShapley(model, "param").fit([ids()]).scores()
    masks = select_top(scores, 0.1)
    for k in range(3):
        part = torch.cat([m.flatten() for n, m in masks.chosen.items() if f".h.{k}." in n])
        assert float(part.float().mean()) == pytest.approx(0.1, abs=1e-3)


def test_bad_selections_are_refused(unchecked):
    model = tiny_family("llama")
    layout = layout_of(model, "head")
    names = list(layout.sizes)
    scores = given({n: [1.0, 2.0, 3.0, 4.0] for n in names}, layout)
    for ratio in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(UsageError, match=r"must lie in \(0, 1\]"):
            select_top(scores, ratio)
    with pytest.raises(UsageError, match="Unknown per"):
        select_top(scores, 0.5, per="matrix")
    with pytest.raises(UsageError, match="Unknown by"):
        select_top(scores, 0.5, by="size")
    with pytest.raises(NumericalFailure, match="are NaN"):
        select_top(given({n: [1.0, float("nan"), 3.0, 4.0] for n in names}, layout), 0.5)
    with pytest.raises(UsageError, match="don't say where"):
        select_top(given({n: [1.0] * 4 for n in names}, None), 0.5)
    whole = ModelShapley(model, "layer").fit([ids()]).scores()
    with pytest.raises(UsageError, match="one unit, so there is nothing to rank"):
        select_top(whole, 0.5)
    assert select_top(whole, 0.5, per="global").share == pytest.approx(2 / 3)
    with pytest.raises(UsageError, match="Give one per group"):
        UnitMasks({names[0]: torch.ones(4, dtype=torch.bool)}, layout)
    with pytest.raises(UsageError, match=r"not bool \[4\]"):
        UnitMasks({n: torch.ones(3, dtype=torch.bool) for n in names}, layout)


# ---------------------------------------------------------------------------------------------- deactivation (7)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "neox", "phi3"])
def test_a_neuron_that_is_out_gives_nothing(family):
    model = tiny_family(family)
    masks = drawn(model, "mlp_neuron")
    before = copy.deepcopy(model.state_dict())
    with deactivate(model, masks):
        removed = logits(model)
        changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert changed and not [n for n, p in model.state_dict().items() if not torch.equal(p, before[n])]
    downs = [part.module for g in masks.layout.groups for part in g.parts if part.axis == "column"]
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, keep=keep: (args[0] * keep.to(args[0]),)
        )
        for name, keep in zip(downs, masks.chosen.values(), strict=True)
    ]
    torch.testing.assert_close(logits(model), removed, rtol=1e-4, atol=1e-5)
    for hook in hooks:
        hook.remove()
    assert not torch.allclose(logits(model), removed, atol=1e-3)


def test_gate_row_up_row_and_down_column_have_one_effect_but_not_one_score():
    model = tiny_family("llama", dtype=torch.float64)
    mlp = model.model.layers[1].mlp
    outs = []
    for weight, index in (
        (mlp.gate_proj.weight, 5),
        (mlp.up_proj.weight, 5),
        (mlp.down_proj.weight, (slice(None), 5)),
    ):
        kept = weight.detach().clone()
        weight.data[index] = 0
        outs.append(logits(model))
        weight.data.copy_(kept)
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])
    rows = ModelShapley(model, "row", curvature="none").fit([ids()]).scores().first
    gate, up = (float(rows[f"model.layers.1.mlp.{n}_proj"][5]) for n in ("gate", "up"))
    assert abs(gate - up) > 1e-6


def test_down_columns_tell_what_leaving_a_neuron_out_costs():
    """The model is linear in a down column, so the quadratic part is all there is but for the layers after it. In all
    three parts of a neuron it is nearly cubic: the first order counts the effect about three times."""
    model = tiny_family("llama", dtype=torch.float64, initializer_range=0.1)
    batch = ids(4)

    def loss() -> float:
        with torch.no_grad():
            out = model(batch).logits[:, :-1].flatten(0, 1)
        return float(nn.functional.cross_entropy(out, batch[:, 1:].flatten()))

    down = model.model.layers[1].mlp.down_proj.weight.data
    full, effect = loss(), []
    for i in range(24):
        kept = down[:, i].clone()
        down[:, i] = 0
        effect.append(loss() - full)
        down[:, i] = kept
    name = "model.layers.1.mlp.down_proj"
    columns = [Group("columns", 24, (Part(name, "column", torch.arange(24)),))]
    exact = ModelShapley(model, lambda _: columns, curvature="hvp").fit([batch]).scores()
    alone, wanted = exact.first["columns"], torch.tensor(effect, dtype=torch.float64)
    assert float((alone - wanted).norm() / wanted.norm()) < 0.2
    whole = ModelShapley(model, curvature="none").fit([batch]).scores().first["model.layers.1.mlp"]
    slope = float((whole @ alone) / (alone @ alone))
    assert 2.5 < slope < 3.5


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_a_head_that_is_out_gives_nothing(family):
    model = tiny_family(family)
    masks = drawn(model, "head")
    with deactivate(model, masks):
        removed = logits(model)
    outs = [g.parts[0].module for g in masks.layout.groups]
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, keep=keep: (args[0] * keep.repeat_interleave(4).to(args[0]),)
        )
        for name, keep in zip(outs, masks.chosen.values(), strict=True)
    ]
    torch.testing.assert_close(logits(model), removed, rtol=1e-4, atol=1e-5)
    for hook in hooks:
        hook.remove()


def test_rows_take_their_bias_along_or_not():
    model = tiny_family("gpt2")
    for bias in (True, False):
        layout = layout_of(model, "row", bias=bias)
        none = UnitMasks({n: torch.zeros(s, dtype=torch.bool) for n, s in layout.sizes.items()}, layout)
        with deactivate(model, none):
            c_fc = model.transformer.h[0].mlp.c_fc
            assert not bool(c_fc.weight.any()) and bool(c_fc.bias.any()) is not bias


def test_layers_parameters_and_nested_blocks():
    model = tiny_family("llama")
    before = copy.deepcopy(model.state_dict())
    layer = layout_of(model, "layer")
    without = UnitMasks({next(iter(layer.sizes)): torch.tensor([True, False, True])}, layer)
    single = ModelShapley(model, "param").fit([ids()]).scores()
    few = select_top(single, 0.3)
    with deactivate(model, without), deactivate(model, few):
        assert not bool(model.model.layers[1].self_attn.q_proj.weight.any())
        zeros = model.model.layers[0].mlp.up_proj.weight == 0
        assert torch.equal(zeros, ~few.chosen["model.layers.0.mlp.up_proj.weight"])
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def test_weights_come_back_after_an_error_and_other_models_are_refused():
    model = tiny_family("llama")
    masks = drawn(model, "mlp_neuron")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), deactivate(model, masks):
        raise KeyError
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    with pytest.raises(UsageError, match=r"has no model\.layers\.0"), deactivate(tiny_family("gpt2"), masks):
        pass
    wider = tiny_family("llama", intermediate_size=28)
    untouched = copy.deepcopy(wider.state_dict())
    with pytest.raises(UsageError, match=r"is \[28, 16\] here"), deactivate(wider, masks):
        pass
    assert all(torch.equal(p, untouched[n]) for n, p in wider.state_dict().items())


def test_the_gap_is_what_removing_everything_costs():
    model = tiny_family("llama", dtype=torch.float64)
    found = ModelShapley(model, "head").fit([ids()])
    gap = found.efficiency_gap([ids()[:1], ids()[1:]])
    batch = ids()

    def loss() -> float:
        with torch.no_grad():
            out = model(batch).logits[:, :-1].flatten(0, 1)
        return float(nn.functional.cross_entropy(out, batch[:, 1:].flatten()))

    full = loss()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    assert gap.actual == pytest.approx(loss() - full, rel=1e-5)
    assert (
        gap.total == pytest.approx(float(found.scores().flat().sum())) and gap.gap == gap.total - gap.actual
    )
    with pytest.raises(UsageError, match="probe set is empty"):
        found.efficiency_gap([])


# ------------------------------------------------------------------------------------------------ fine-tuning (8)

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, weight_decay=0.1),  # of no known form
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 10) -> None:
    for k in range(count):
        batch = ids(seed=k)
        out = model(batch).logits[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(out, batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_entries_stay_bit_for_bit(name, family):
    model = tiny_family(family)
    masks = drawn(model, "row", ratio=0.2)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS[name](model.parameters())
    with MaskedTraining(model, masks).watch(optimizer) as training:
        assert training.trained == sum(
            int(mask.sum()) * (model.get_submodule(n).weight.numel() // len(mask) + (family == "gpt2"))
            for n, mask in masks.chosen.items()
        )
        steps(model, optimizer)
    moved = 0
    for n, p in model.named_parameters():
        module, _, leaf = n.rpartition(".")
        mask = masks.chosen.get(module)
        if mask is None:
            assert torch.equal(p, before[n]), n
            continue
        turned = p.T if family == "gpt2" and leaf == "weight" else p
        was = before[n].T if family == "gpt2" and leaf == "weight" else before[n]
        assert torch.equal(turned[~mask], was[~mask]), n
        assert not bool((turned[mask] == was[mask]).all()) or not bool(mask.any()), n
        moved += int(mask.sum())
        state = optimizer.state.get(p, {})
        for value in state.values():
            if isinstance(value, Tensor) and value.shape == p.shape:
                turned_state = value.T if family == "gpt2" and leaf == "weight" else value
                assert not bool(turned_state[~mask].any())
    assert moved and all(p.requires_grad for p in model.parameters())
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    steps(model, optimizer, 1)  # the hooks are gone: all trains again
    assert not torch.equal(model.get_input_embeddings().weight, before[next(iter(before))])


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_all_chosen_is_plain_training_of_these_maps(name):
    """Also where half is chosen: trained rows take the steps, decay included, of an optimizer that had them alone."""
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(6, 5, generator=g), torch.randn(8, 5, generator=g)
    for ratio in (1.0, 0.5):
        masked, alone = (nn.Sequential(nn.Linear(5, 6, bias=False)).eval() for _ in range(2))
        masked[0].weight.data.copy_(w)
        layout = layout_of(masked, "row")
        keep = torch.arange(6) < 6 * ratio
        alone[0].weight = nn.Parameter(w[keep].clone())
        optimizers = [OPTIMIZERS[name](m.parameters()) for m in (masked, alone)]
        with MaskedTraining(masked, UnitMasks({"0": keep}, layout)).watch(optimizers[0]):
            for _ in range(5):
                for model, optimizer in zip((masked, alone), optimizers, strict=True):
                    optimizer.zero_grad()
                    model(x)[:, : int(keep.sum())].square().mean().backward()
                    optimizer.step()
        torch.testing.assert_close(masked[0].weight[keep], alone[0].weight, rtol=1e-6, atol=1e-7)
        assert torch.equal(masked[0].weight[~keep], w[~keep])


def test_the_callback_serves_a_plain_loop():
    pytest.importorskip("accelerate")
    from gnomon.methods.compress.shapley import MaskedFineTuning

    model = tiny_family("llama")
    masks = drawn(model, "head", ratio=0.25)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with MaskedFineTuning(masks).attach(model, optimizer):
        steps(model, optimizer, 3)
    name = "model.layers.0.self_attn.o_proj"
    kept = masks.chosen["model.layers.0.self_attn"].repeat_interleave(4)
    o_proj = model.get_submodule(name).weight
    assert torch.equal(o_proj[:, ~kept], before[f"{name}.weight"][:, ~kept])
    assert not bool((o_proj[:, kept] == before[f"{name}.weight"][:, kept]).any())
    untouched = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert {"model.norm.weight", "model.layers.0.self_attn.k_proj.weight"} <= set(untouched)


def test_what_the_released_code_freezes():
    model = tiny_family("llama")
    masks = drawn(model, "row", ratio=0.1)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with MaskedTraining(model, masks, freeze="released").watch(optimizer) as training:
        total = sum(p.numel() for p in model.parameters())
        assert training.trained > total / 2  # far from a tenth
        steps(model, optimizer, 2)
    after = model.state_dict()
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    name = "model.layers.0.mlp.gate_proj"
    frozen = ~masks.chosen[name]
    assert torch.equal(after[f"{name}.weight"][frozen], before[f"{name}.weight"][frozen])
    with pytest.raises(UsageError, match="of which no unit is made"):
        MaskedTraining(model, drawn(model, "head"), freeze="released")


def test_bad_masks_are_refused():
    model = tiny_family("llama")
    masks = drawn(model, "row")
    none = UnitMasks({n: torch.zeros_like(m) for n, m in masks.chosen.items()}, masks.layout)
    with pytest.raises(UsageError, match="No unit is chosen"):
        MaskedTraining(model, none)
    with pytest.raises(UsageError, match="missing here"):
        MaskedTraining(tiny_family("gpt2"), masks)
    with pytest.raises(UsageError, match=r"is \[28, 16\] here"):
        MaskedTraining(tiny_family("llama", intermediate_size=28), masks)


def test_the_trainer_trains_the_chosen_rows_only(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from gnomon.methods.compress.shapley import MaskedFineTuning

    model = tiny_family("llama")
    masks = drawn(model, "row", ratio=0.2)
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in ids(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        weight_decay=0.1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )

    def trainer(m: nn.Module) -> Trainer:
        return Trainer(model=m, args=arguments, train_dataset=data, callbacks=[MaskedFineTuning(masks)])

    run = trainer(model)
    optimized = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert optimized < sum(p.numel() for p in model.parameters())  # before the optimizer is made
    run.train()
    for n, p in model.named_parameters():
        mask = masks.chosen.get(n.rpartition(".")[0])
        frozen = slice(None) if mask is None else ~mask
        assert torch.equal(p[frozen], before[n][frozen]), n
        if mask is not None and bool(mask.any()):
            assert not torch.equal(p[mask], before[n][mask])
    assert all(p.requires_grad for p in model.parameters())
    again = tiny_family("llama")
    trainer(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for n, p in again.named_parameters():
        torch.testing.assert_close(p, model.get_parameter(n), rtol=1e-5, atol=1e-6)
