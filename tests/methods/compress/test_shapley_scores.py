"""Scores of models. Sources of truth: per-sequence gradients by autograd with indices written out by hand for every
family, explicit Fisher matrices, the card's numbers, padding that changes nothing."""

from __future__ import annotations

import doctest
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_models import tiny_family
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.shapley import (
    Group,
    ModelShapley,
    Part,
    gradient_scores,
    gram_scores,
    layout_of,
    random_scores,
    released_scores,
    trace_scores,
    wanda_scores,
)

WIDTH, HEADS = 4, 4


def ids(rows: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def sequence_gradients(model: nn.Module, batch: Tensor) -> list[dict[str, Tensor]]:
    """a = gθ of every parameter, one dictionary for each sequence, each run by itself."""
    found = []
    for row in batch:
        logits = model(row[None]).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, row[1:])
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        found.append(
            {n: g * p for (n, p), g in zip(model.named_parameters(), grads, strict=True) if g is not None}
        )
    return found


LLAMA, GPT2 = "model.layers.{}.", "transformer.h.{}."
Entry = tuple[str, Callable[[Tensor, int], Tensor]]
"""Parameter of a layer, and what of it belongs to unit u."""
NEURONS: dict[str, tuple[str, list[Entry]]] = {
    family: (
        LLAMA,
        [
            ("mlp.gate_proj.weight", lambda p, u: p[u]),
            ("mlp.up_proj.weight", lambda p, u: p[u]),
            ("mlp.down_proj.weight", lambda p, u: p[:, u]),
        ],
    )
    for family in ("llama", "qwen2", "gemma2", "olmo2")
} | {
    "phi3": (
        LLAMA,
        [
            ("mlp.gate_up_proj.weight", lambda p, u: p[[u, u + 24]]),
            ("mlp.down_proj.weight", lambda p, u: p[:, u]),
        ],
    ),
    "gpt2": (
        GPT2,
        [
            ("mlp.c_fc.weight", lambda p, u: p[:, u]),
            ("mlp.c_fc.bias", lambda p, u: p[u]),
            ("mlp.c_proj.weight", lambda p, u: p[u]),
        ],
    ),
    "opt": (
        "model.decoder.layers.{}.",
        [
            ("fc1.weight", lambda p, u: p[u]),
            ("fc1.bias", lambda p, u: p[u]),
            ("fc2.weight", lambda p, u: p[:, u]),
        ],
    ),
    "neox": (
        "gpt_neox.layers.{}.",
        [
            ("mlp.dense_h_to_4h.weight", lambda p, u: p[u]),
            ("mlp.dense_h_to_4h.bias", lambda p, u: p[u]),
            ("mlp.dense_4h_to_h.weight", lambda p, u: p[:, u]),
        ],
    ),
}
SPAN = slice(None)


def of_head(u: int) -> slice:
    return slice(u * WIDTH, (u + 1) * WIDTH)


HEAD_ENTRIES: dict[str, tuple[str, list[Entry]]] = {
    "llama": (  # two query heads share keys and values, which so belong to nobody
        LLAMA,
        [
            ("self_attn.q_proj.weight", lambda p, u: p[of_head(u)]),
            ("self_attn.o_proj.weight", lambda p, u: p[:, of_head(u)]),
        ],
    ),
    "qwen2": (
        LLAMA,
        [
            ("self_attn.q_proj.weight", lambda p, u: p[of_head(u)]),
            ("self_attn.q_proj.bias", lambda p, u: p[of_head(u)]),
            ("self_attn.o_proj.weight", lambda p, u: p[:, of_head(u)]),
        ],
    ),
    "gpt2": (
        GPT2,
        [
            *(
                ("attn.c_attn.weight", lambda p, u, k=k: p[:, 16 * k : 16 * k + 16][:, of_head(u)])
                for k in range(3)
            ),
            *(("attn.c_attn.bias", lambda p, u, k=k: p[16 * k : 16 * k + 16][of_head(u)]) for k in range(3)),
            ("attn.c_proj.weight", lambda p, u: p[of_head(u)]),
        ],
    ),
    "neox": (
        "gpt_neox.layers.{}.",
        [
            ("attention.query_key_value.weight", lambda p, u: p[12 * u : 12 * u + 12]),
            ("attention.query_key_value.bias", lambda p, u: p[12 * u : 12 * u + 12]),
            ("attention.dense.weight", lambda p, u: p[:, of_head(u)]),
        ],
    ),
}


def by_hand(model: nn.Module, batch: Tensor, prefix: str, entries: list[Entry], size: int) -> Tensor:
    """a_u^s, (B, layers, units)."""
    layers = model.config.num_hidden_layers
    rows = []
    for a in sequence_gradients(model, batch):
        rows.append(
            torch.stack(
                [
                    torch.stack(
                        [
                            sum(pick(a[prefix.format(k) + name], u).sum() for name, pick in entries)
                            for u in range(size)
                        ]
                    )
                    for k in range(layers)
                ]
            )
        )
    return torch.stack(rows).detach()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------------ families, by autograd (4, 5)


@pytest.mark.parametrize("family", NEURONS)
def test_neurons_equal_autograd_for_each_sequence(family):
    model = tiny_family(family, dtype=torch.float64)
    prefix, entries = NEURONS[family]
    inner = model.config.ffn_dim if family == "opt" else 64 if family == "gpt2" else 24
    a = by_hand(model, ids(), prefix, entries, inner)  # (B, L, U)
    scores = ModelShapley(model, "mlp_neuron").fit([ids()]).scores()
    close(torch.stack(list(scores.first.values())), -a.mean(0))
    within = a * a.sum(2, keepdim=True)  # with all neurons of the layer; 8 loss tokens a sequence
    close(torch.stack(list(scores.second.values())), 8 * within.mean(0) / 2)
    assert scores.n == 3 and not any(p.grad is not None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("family", HEAD_ENTRIES)
def test_heads_equal_autograd_for_each_sequence(family):
    model = tiny_family(family, dtype=torch.float64)
    a = by_hand(model, ids(), *HEAD_ENTRIES[family], HEADS)
    scores = ModelShapley(model, "head", block="unit", fisher_scale=None).fit([ids()]).scores()
    close(torch.stack(list(scores.first.values())), -a.mean(0))
    close(torch.stack(list(scores.second.values())), a.square().mean(0) / 2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_layers_and_parameters_equal_autograd(family, bias):
    model = tiny_family(family, dtype=torch.float64)
    grads = sequence_gradients(model, ids())
    row = ModelShapley(model, "row", block="matrix", bias=bias).fit([ids()]).scores()
    one = ModelShapley(model, "param", bias=bias).fit([ids()]).scores()
    whole = ModelShapley(model, "layer", bias=bias).fit([ids()]).scores()
    layers = torch.zeros(3, 3, dtype=torch.float64)
    for name, first in row.first.items():
        per = []
        for s, a in enumerate(grads):
            w = a[f"{name}.weight"].T if family == "gpt2" else a[f"{name}.weight"]
            per.append(w.sum(1) + (a.get(f"{name}.bias", 0.0) if bias else 0.0))
            layers[s, int(name.split(".")[2])] += per[-1].sum().detach()
        per = torch.stack(per).detach()
        close(first, -per.mean(0))
        close(row.second[name], 8 * (per * per.sum(1, keepdim=True)).mean(0) / 2)
        close(
            one.first[f"{name}.weight"],
            -torch.stack([a[f"{name}.weight"] for a in grads]).detach().mean(0),
        )
    close(whole.first[next(iter(whole.first))], -layers.mean(0))
    close(whole.second[next(iter(whole.second))], 8 * layers.square().mean(0) / 2)
    assert (f"{name}.bias" in one.phi) == (bias and family == "gpt2")


@pytest.mark.parametrize("block", ["unit", "matrix", "layer", "global"])
def test_parameters_with_an_explicit_fisher_matrix(block):
    model = tiny_family("gpt2", dtype=torch.float64, n_layer=2, n_embd=8, n_head=2)
    grads = sequence_gradients(model, ids())
    scores = ModelShapley(model, "param", block=block, fisher_scale=None).fit([ids()]).scores()
    names = list(scores.phi)
    flat = torch.stack([torch.cat([a[n].flatten() for n in names]) for a in grads]).detach()  # (B, M)
    owner = {
        "unit": torch.arange(flat.shape[1]),
        "matrix": torch.cat(
            [torch.full((grads[0][n].numel(),), hash(n.rpartition(".")[0]) % 10**9) for n in names]
        ),
        "layer": torch.cat([torch.full((grads[0][n].numel(),), int(n.split(".")[2])) for n in names]),
        "global": torch.zeros(flat.shape[1], dtype=torch.long),
    }[block]
    expected = torch.zeros(flat.shape[1], dtype=torch.float64)
    for b in owner.unique():
        inside = (owner == b).nonzero().flatten()
        f = flat[:, inside].T @ flat[:, inside] / len(flat)  # θ_i F_ij θ_j
        expected[inside] = f.sum(1) / 2
    close(torch.cat([scores.second[n].flatten() for n in names]), expected)
    if block == "unit":
        assert float(expected.min()) >= 0
    if block == "global":
        assert float(expected.sum()) == pytest.approx(float(flat.sum(1).square().mean()) / 2)


def test_rows_and_columns_of_a_matrix_sum_to_the_same():
    model = tiny_family("llama", dtype=torch.float64)
    name = "model.layers.1.mlp.up_proj"
    ways = [Part(name, "row", torch.arange(24)), Part(name, "column", torch.arange(16))]
    sums = [
        float(
            ModelShapley(model, lambda m, p=p: [Group("g", 24, (p,))]).fit([ids()]).scores().first["g"].sum()
        )
        for p in ways
    ]
    assert sums[0] == pytest.approx(sums[1], abs=1e-12) and sums[0] != 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_hvp_equals_autograd_of_each_unit(family):
    """θ ∘ Hθ by finite differences of the gradient along θ."""
    model = tiny_family(family, dtype=torch.float64)
    if family == "llama":  # whose norms round to float32, too coarse for differences
        for module in [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]:
            module.forward = functools.partial(
                nn.functional.rms_norm, normalized_shape=(16,), weight=module.weight
            )
    prefix, entries = NEURONS[family]
    scores = ModelShapley(model, "mlp_neuron", curvature="hvp").fit([ids()]).scores()
    layout = scores.layout
    players = {prefix.format(k) + name for k in range(3) for name, _ in entries}
    step, grads = 1e-5, {}
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n in players:
                    p.mul_(1 + sign * step)
        batch = ids()
        loss = nn.functional.cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        grads[sign] = {n: p.grad.clone() for n, p in model.named_parameters() if n in players}
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n in players:
                    p.div_(1 + sign * step)
    model.zero_grad(set_to_none=True)
    curved = {n: model.get_parameter(n).detach() * (grads[1][n] - grads[-1][n]) / (2 * step) for n in players}
    for k, group in enumerate(layout.groups):
        expected = torch.stack(
            [
                sum(pick(curved[prefix.format(k) + name], u).sum() for name, pick in entries) / 2
                for u in range(group.size)
            ]
        )
        torch.testing.assert_close(scores.second[group.name], expected, rtol=1e-5, atol=1e-7)
    fisher = ModelShapley(model, "mlp_neuron").fit([ids()]).scores()
    close(scores.first, fisher.first)


def test_double_backward_leaves_the_attention_as_it_was():
    model = tiny_family("llama", attn="eager")
    eager = ModelShapley(model, "head", curvature="hvp").fit([ids()]).scores().flat()
    sdpa = tiny_family("llama", attn="sdpa")
    found = ModelShapley(sdpa, "head", curvature="hvp").fit([ids()]).scores().flat()
    torch.testing.assert_close(found, eager, rtol=1e-3, atol=1e-5)
    assert sdpa.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------- the card's numbers (11 - 13)


def test_example_b():
    g = torch.tensor([[0.2, -0.1], [0.4, 0.3], [-0.1, 0.2]], dtype=torch.float64)
    model = linear(torch.tensor([[1.0, -2.0]]))
    scores = ModelShapley(model, "param", loss_fn=lambda m, x: m(x)[:, 0], block="matrix").fit([g]).scores()
    assert (2 * scores.second["only.weight"]).flatten().tolist() == pytest.approx(
        [0.0166666667, 0.1333333333]
    )
    gram = g.mean(0) * torch.tensor([1.0, -2.0]) * (g.mean(0) @ torch.tensor([1.0, -2.0]).double())
    assert gram.tolist() == pytest.approx([-0.0166666667, 0.0266666667])


def linear(w: Tensor) -> nn.Module:
    """One map, found under the name `map` (or as the whole model)."""
    module = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.float64)
    module.weight.data.copy_(w)

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("only", module)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x)

    return One().eval()


C_X = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 2.0], [9.0, 9.0]]], dtype=torch.float64)
C_DELTA = torch.tensor([[[0.1, -0.2], [0.3, 0.1]], [[-0.2, 0.4], [0.0, 0.0]]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("block", "second", "phi"),
    [
        ("matrix", (0.5325, 0.288125), (0.4325, 0.763125)),
        ("unit", (0.41, 0.165625), (0.31, 0.640625)),
    ],
)
def test_example_c(block, second, phi):
    model = linear(torch.tensor([[1.0, 2.0], [0.5, -1.0]]))
    found = ModelShapley(model, "row", block=block, loss_fn=lambda m, x: (m(x) * C_DELTA).sum((1, 2)))
    scores = found.fit([C_X]).scores()
    assert scores.first["only"].tolist() == pytest.approx([-0.1, 0.475])
    assert scores.second["only"].tolist() == pytest.approx(second)
    assert scores.phi["only"].tolist() == pytest.approx(phi)
    columns = [Group("c", 2, (Part("only", "column", torch.arange(2)),))]
    per = ModelShapley(model, lambda m: columns, loss_fn=lambda m, x: (m(x) * C_DELTA).sum((1, 2)))
    assert per.fit([C_X]).scores().first["c"].tolist() == pytest.approx([-(0.35 + 0) / 2, -(0.5 - 1.6) / 2])


def test_example_d_and_the_released_scores():
    g, w = torch.tensor([[0.1, 0.2], [0.3, -0.1]]).double(), torch.tensor([[1.0, 2.0], [-1.0, 0.5]]).double()
    individual, cooperative, score = gram_scores(g, w)
    assert individual.tolist() == pytest.approx([0.5, -0.35])
    assert cooperative.tolist() == pytest.approx([0.25, 0.125])
    assert score.tolist() == pytest.approx([0.625, -0.2875])
    x = torch.linalg.solve(
        w, w
    )  # δ = G for unit inputs, in two sequences of one token whose mean gradient is G
    model = linear(w)

    def loss(m: nn.Module, batch: Tensor) -> Tensor:
        return (m(batch) * (2 * g.T)).sum(1)

    paper = ModelShapley(model, "row", curvature="gram", curvature_sign="paper", loss_fn=loss).fit([x])
    assert paper.scores().phi["only"].tolist() == pytest.approx([-0.625, 0.2875])
    plus = ModelShapley(model, "row", curvature="gram", loss_fn=loss).fit([x]).scores()
    assert plus.phi["only"].tolist() == pytest.approx([-0.5 + 0.125, 0.35 + 0.0625])
    single = ModelShapley(model, "param", curvature="gram", loss_fn=loss).fit([x]).scores()
    close(single.phi["only.weight"].sum(1), plus.phi["only"])


def test_the_cached_path_is_the_gradient_trace(unchecked):
    model = tiny_family("llama")
    cached = released_scores(model, [ids()], path="deactivate", units="mlp_neuron")
    full = released_scores(model, [ids()], path="finetune", units="mlp_neuron")
    trace = trace_scores(model, [ids()], units="mlp_neuron")
    torch.testing.assert_close(cached.flat().abs(), trace.flat(), rtol=1e-4, atol=1e-7)
    assert not torch.equal(full.flat(), cached.flat())
    with pytest.raises(UsageError, match="Unknown path"):
        released_scores(model, [ids()], path="train", units="mlp_neuron")


# -------------------------------------------------------------------------------------- blocks, pools, batches


def test_blocks_see_more_and_more():
    model = tiny_family("llama", dtype=torch.float64)
    a = by_hand(model, ids(), *NEURONS["llama"], 24)  # (B, L, U)
    seen = {"unit": a, "matrix": a.sum(2, keepdim=True), "layer": a.sum(2, keepdim=True)}
    seen["global"] = a.sum((1, 2), keepdim=True)
    for block, other in seen.items():
        scores = ModelShapley(model, "mlp_neuron", block=block).fit([ids()]).scores()
        close(torch.stack(list(scores.second.values())), 4 * (a * other).mean(0))
    layout = layout_of(model, "row")
    assert len(layout.blocks("layer").unique()) == 3 and len(layout.blocks("matrix").unique()) == 21


def test_pools():
    model = tiny_family("llama", dtype=torch.float64)

    def second(pool: str, block: str, **options: Any) -> Tensor:
        found = ModelShapley(model, "mlp_neuron", block=block, pool=pool, **options).fit([ids()]).scores()
        return torch.stack(list(found.second.values()))

    for block in ("unit", "layer", "global"):  # these blocks hold whole units
        close(second("sum", block), second("game", block))
    assert not torch.allclose(second("sum", "matrix"), second("game", "matrix"))
    single = ModelShapley(model, "param", block="matrix").fit([ids()]).scores()
    for k in range(3):
        p = f"model.layers.{k}.mlp."
        parts = [single.second[f"{p}{n}_proj.weight"] for n in ("gate", "up", "down")]
        summed = parts[0].sum(1) + parts[1].sum(1) + parts[2].sum(0)
        # a parameter's matrix block holds the whole matrix here: all its rows, or columns, belong to neurons
        close(second("sum", "matrix")[k], summed)
    close(second("mean", "layer") * 48, second("sum", "layer"))
    close(second("sum", "layer", curvature="hvp"), second("game", "layer", curvature="hvp"))
    with pytest.raises(UsageError, match="Means over"):
        ModelShapley(model, "head", pool="mean").fit([ids()]).efficiency_gap([ids()])


def test_streaming_equals_one_batch_and_moving_average_is_unbiased():
    model = tiny_family("llama", dtype=torch.float64)
    batch = ids(5)
    whole = ModelShapley(model).fit([batch]).scores()
    parts = ModelShapley(model).update(batch[:2]).update(batch[2:]).scores()
    assert parts.n == 5
    close(parts.phi, whole.phi)
    same = ModelShapley(model, ewma=0.3).fit([batch] * 3).scores()
    close(same.phi, whole.phi)  # φ̂⁰ = 0 without correction would give 1 - 0.7³ of it
    two = ModelShapley(model, ewma=0.3).fit([batch[:2], batch[2:]]).scores()
    first, last = (ModelShapley(model).fit([b]).scores().flat() for b in (batch[:2], batch[2:]))
    close(two.flat(), (0.7 * 0.3 * first + 0.3 * last) / (1 - 0.7**2))


def test_processes_sum_what_they_saw(monkeypatch):
    """Every collective call adds what another process with other batches would bring."""
    model = tiny_family("llama", dtype=torch.float64)
    batches = [ids(3), ids(2, seed=1)]
    mine, other = (ModelShapley(model).fit([batch]) for batch in batches)
    theirs = [torch.tensor([2.0, 1.0]).double(), *other._first.values(), *other._second.values()]

    def added(value: Tensor, group: Any = None) -> None:
        value.add_(theirs.pop(0))

    monkeypatch.setattr("torch.distributed.all_reduce", added)
    mine.all_reduce()
    assert not theirs and mine.scores().n == 5
    close(mine.scores().phi, ModelShapley(model).fit(batches).scores().phi)
    with pytest.raises(UsageError, match="moving average"):
        ModelShapley(model, ewma=0.5).all_reduce()


def test_one_backward_pass_a_batch_and_no_weight_gradients():
    model = tiny_family("llama")
    passes = []
    original = torch.Tensor.backward

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> None:
        passes.append(1)
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", counted)
        ModelShapley(model, "head").fit([ids(), ids(seed=1)])
    assert len(passes) == 2
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family, side):
    model = tiny_family(family, dtype=torch.float64)
    short, long = ids(1, 6, seed=1), ids(1, 10, seed=2)
    pad, mask = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 6, dtype=torch.long)
    order = [pad, short] if side == "left" else [short, pad]
    marks = [0 * pad, mask] if side == "left" else [mask, 0 * pad]
    batch = {
        "input_ids": torch.cat([torch.cat(order, 1), long]),
        "attention_mask": torch.cat([torch.cat(marks, 1), torch.ones(1, 10, dtype=torch.long)]),
    }
    padded = ModelShapley(model).fit([batch]).scores()
    apart = ModelShapley(model).update(short).update(long).scores()
    torch.testing.assert_close(padded.phi, apart.phi, rtol=1e-7, atol=1e-9)


def test_prompt_tokens_stay_out_of_the_loss():
    model = tiny_family("llama", dtype=torch.float64)
    batch = ids(2, 8)
    labels = batch.clone()
    labels[:, :5] = -100
    found = ModelShapley(model).fit([{"input_ids": batch, "labels": labels}]).scores()

    def answer(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        logp = m(x).logits.log_softmax(-1)
        picked = logp[:, 4:7].gather(-1, x[:, 5:, None])[..., 0]
        return -picked.mean(1), torch.full((len(x),), 3.0, dtype=torch.float64)

    close(found.phi, ModelShapley(model, loss_fn=answer).fit([batch]).scores().phi)
    assert not torch.allclose(found.flat(), ModelShapley(model).fit([batch]).scores().flat())
    half = torch.cat([batch, batch])
    silent = torch.cat([labels, torch.full_like(batch, -100)])
    quiet = ModelShapley(model).fit([{"input_ids": half, "labels": silent}]).scores()
    close(quiet.phi, found.phi)  # a sequence without a loss token isn't counted
    assert quiet.n == 2


def test_bfloat16_sums_in_float32():
    exact = ModelShapley(tiny_family("llama")).fit([ids(6)]).scores().flat()
    rough = ModelShapley(tiny_family("llama", dtype=torch.bfloat16)).fit([ids(6)]).scores()
    assert rough.flat().dtype == torch.float64
    assert float(torch.corrcoef(torch.stack([exact, rough.flat()]))[0, 1]) > 0.97


def test_checkpointed_and_frozen_models_give_the_same():
    model = tiny_family("llama", dtype=torch.float64)
    plain = ModelShapley(model).fit([ids()]).scores().phi
    model.gradient_checkpointing_enable()
    close(ModelShapley(model).fit([ids()]).scores().phi, plain)
    model.gradient_checkpointing_disable()
    model.requires_grad_(False)
    with torch.no_grad():
        close(ModelShapley(model).fit([ids()]).scores().phi, plain)
    assert not any(p.requires_grad for p in model.parameters())


def test_rescaling_neighbours_leaves_first_order_scores(seed=0):
    """ReLU(cWx + cb)/c = ReLU(Wx + b)."""
    g = torch.Generator().manual_seed(seed)

    def built(c: float) -> nn.Module:
        gen = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        for p in model[0].parameters():
            p.data *= c
        model[2].weight.data /= c
        return model.eval()

    x, y = torch.randn(4, 5, generator=g, dtype=torch.float64), torch.tensor([0, 1, 2, 0])

    def loss(m: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(m(batch), y, reduction="none")

    def first(model: nn.Module) -> dict[str, Tensor]:
        return ModelShapley(model, "row", curvature="none", loss_fn=loss).fit([x]).scores().first

    close(first(built(3.7)), first(built(1.0)))
    assert float(first(built(1.0))["0"].abs().max()) > 0


# ---------------------------------------------------------------------------------------------------- rivals


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rival_scores_by_hand(family):
    model = tiny_family(family, dtype=torch.float64)
    prefix, entries = NEURONS[family]
    a = by_hand(model, ids(), prefix, entries, 24)[:, 1]
    trace = trace_scores(model, [ids()], units="mlp_neuron")
    name = list(trace.phi)[1]
    close(trace.phi[name][:24], a.mean(0).abs())
    batch = ids()
    loss = nn.functional.cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    grads = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )
    weights = [(n, pick) for n, pick in entries if n.endswith("weight")]
    by_gradient = gradient_scores(model, [ids()], units="mlp_neuron").phi[name]
    expected = [
        abs(sum(float(pick(grads[prefix.format(1) + n], u).sum()) for n, pick in weights)) for u in range(24)
    ]
    torch.testing.assert_close(by_gradient[:24], torch.tensor(expected).double(), rtol=1e-5, atol=1e-7)
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule((prefix.format(1) + n).removesuffix(".weight")).register_forward_pre_hook(
            lambda m, args, n=n: seen.__setitem__(n, args[0].flatten(0, -2).norm(dim=0))
        )
        for n, _ in weights
    ]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    wanda = wanda_scores(model, [ids()], units="mlp_neuron").phi[name]
    for u in (0, 5):
        total = 0.0
        for n, pick in weights:
            w = model.get_parameter(prefix.format(1) + n).detach().abs()
            scaled = w * (seen[n][:, None] if family == "gpt2" else seen[n][None, :])
            total += float(pick(scaled, u).sum())
        assert float(wanda[u]) == pytest.approx(total)


def test_random_scores_follow_the_generator():
    model = tiny_family("llama")
    one, same = (
        random_scores(model, units="head", generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    other = random_scores(model, units="head", generator=torch.Generator().manual_seed(4))
    assert torch.equal(one.flat(), same.flat()) and not torch.equal(one.flat(), other.flat())


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": "neuron"}, "Unknown units: 'neuron'. Did you mean 'mlp_neuron'"),
        ({"curvature": "hessian"}, "Unknown curvature"),
        ({"block": "row"}, "Unknown block"),
        ({"pool": "max"}, "Unknown pool"),
        ({"fisher_scale": "token"}, "Unknown fisher_scale"),
        ({"curvature_sign": -1}, r"curvature_sign=-1 must be \+1 or 'paper'"),
        ({"ewma": 0.0}, r"ewma=0.0 must lie in \(0, 1\]"),
        ({"curvature": "hvp", "block": "unit"}, "couples all players"),
        ({"units": lambda m: []}, "no unit of kind 'callable'"),
        (
            {"units": lambda m: [Group("g", 1, (Part("nowhere", "row", torch.zeros(1).long()),))]},
            "Unknown linear",
        ),
        (
            {
                "units": lambda m: [
                    Group("g", 1, (Part("model.layers.0.mlp.up_proj", "row", torch.zeros(3).long()),))
                ]
            },
            r"must be int64 of shape \(24,\)",
        ),
        (
            {
                "units": lambda m: [
                    Group("g", 2, (Part("model.layers.0.mlp.up_proj", "row", torch.arange(24)),))
                ]
            },
            "names unit 23, but group 'g' has 2",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        ModelShapley(tiny_family("llama"), **options)


def test_bad_models_are_refused():
    tied = tiny_family("llama")
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UsageError, match="share one weight"):
        ModelShapley(tied)
    with pytest.raises(UsageError, match="no unit of kind 'row'"):
        ModelShapley(nn.Sequential(nn.ReLU()), "row")
    quantised = tiny_family("llama")
    layer = quantised.model.layers[2].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(UsageError, match="quantised or fused"):
        ModelShapley(quantised)
    with pytest.raises(UsageError, match="Load the model first"):
        ModelShapley(tiny_family("llama").to("meta"))
    experts = tiny_family("llama")
    experts.model.layers[1].mlp.router = nn.Linear(16, 3)
    with pytest.raises(UsageError, match="Mixtures of experts"):
        ModelShapley(experts)
    odd = tiny_family("llama")
    odd.model.layers[0].self_attn.fused = nn.Linear(16, 16)
    with pytest.raises(UsageError, match="order that isn't known"):
        ModelShapley(odd, "head")


def test_bad_batches_are_refused():
    model = tiny_family("llama")
    with pytest.raises(UsageError, match="probe set is empty"):
        ModelShapley(model).fit([])
    with pytest.raises(UsageError, match="no scores before the first batch"):
        ModelShapley(model).scores()
    with pytest.raises(UsageError, match="token ids"):
        ModelShapley(model).update(torch.zeros(2, 3))
    with pytest.raises(UsageError, match="No sequence of the batch"):
        ModelShapley(model).update(ids(2, 1))
    with pytest.raises(UsageError, match="other tokens than input_ids"):
        ModelShapley(model).update({"input_ids": ids(), "labels": ids(seed=5)})
    with pytest.raises(UsageError, match=r"attention_mask is \[3, 4\]"):
        ModelShapley(model).update({"input_ids": ids(), "attention_mask": torch.ones(3, 4)})
    with pytest.raises(UsageError, match="one number for each sequence"):
        ModelShapley(model, loss_fn=lambda m, x: m(x).logits.sum()).update(ids())
    with pytest.raises(UsageError, match="has no gradient"):
        ModelShapley(model, loss_fn=lambda m, x: torch.zeros(3)).update(ids())
    found = ModelShapley(model).update(ids())
    before = found.scores()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericalFailure, match="NaN or infinity on batch 2"):
        found.update(ids())
    assert torch.equal(found.scores().flat(), before.flat())
    model.train()
    with pytest.raises(UsageError, match="training mode"):
        found.update(ids())


def test_an_output_changed_in_place_is_refused():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()).mul_(2.0)

    with pytest.raises(UsageError, match="changed in place"):
        ModelShapley(InPlace().eval(), "row", loss_fn=lambda m, x: m(x).square().sum(1)).update(
            torch.ones(2, 3)
        )


def test_the_example_in_the_docstring_runs():
    module = importlib.import_module("gnomon.methods.compress.shapley")
    assert doctest.testmod(module) == (0, 7)
