"""Blocks and their turns in Transformers' families; memory by formula and measured; work of a backward pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from family_models import FAMILIES, PARALLEL, tiny_family
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from gnomon.core.errors import UsageError
from gnomon.core.layers import decoder_stack
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.methods.optim import bread
from gnomon.methods.optim.bread import (
    BlockOptimizer,
    LoRAExpansion,
    SGDExpansion,
    Turns,
    backward_work,
    estimate_memory,
    frozen_optimum,
    landscape,
    make_blocks,
    measure_peak,
    preset,
    rank_one_expansion,
    state_bytes,
)

torch.set_num_threads(1)

TOKENS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))


def llama(name: str = "tiny:llama-10k", dtype: torch.dtype = torch.float32) -> Any:
    with seeded(0):
        return build(name).to(dtype)


# ------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["layer", "sublayer", "matrix"])
def test_blocks_of_every_family(family: str, kind: Any) -> None:
    """Together they are the layers' parameters, each once; whole models too, with embeddings and head."""
    model = tiny_family(family)
    stack = decoder_stack(model)
    partition = make_blocks(model, kind)
    inside = [name for block in partition.blocks for name in block.parameters]
    assert sorted(inside) == sorted(n for n, _ in model.named_parameters() if n.startswith(f"{stack.name}."))
    per_layer = {"layer": 1, "sublayer": 2, "matrix": len(partition.blocks) // 3}[kind]
    assert len(partition.blocks) == 3 * per_layer
    depths = [block.depth for block in partition.blocks]
    assert depths == sorted(depths)
    whole = make_blocks(model, kind, include_embeddings=True, include_head=True)
    assert sorted(n for b in whole.blocks for n in b.parameters) == sorted(
        n for n, _ in model.named_parameters()
    )
    assert (whole.blocks[0].name, whole.blocks[0].depth) == ("embeddings", -1)
    assert (whole.blocks[-1].name, whole.blocks[-1].depth) == ("head", 3)
    if kind == "sublayer":
        first, second = partition.blocks[:2]
        assert second.depth - first.depth == (0 if family in PARALLEL else 0.5)
        assert all("attn" in n or "attention" in n or "norm" in n or "ln" in n for n in first.parameters)
        assert not any(
            f".{part}." in n for n in second.parameters for part in ("attn", "self_attn", "attention")
        )
    if kind == "matrix":
        sizes = {n: p.ndim for n, p in model.named_parameters()}
        assert all(sum(sizes[n] > 1 for n in block.parameters) == 1 for block in partition.blocks)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "opt", "neox-parallel"])
@pytest.mark.parametrize("name", ["bread-lora", "bread-sgd"])
def test_every_method_on_every_layout(family: str, name: str) -> None:
    model = tiny_family(family)
    plain = model(TOKENS).logits
    optimizer = BlockOptimizer(model, lr=1e-3, switch_every=1, expansion=preset(name, rank=2, lr_scale=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    assert optimizer.turns.epoch == 1
    optimizer.close()
    assert torch.isfinite(model(TOKENS).logits).all() and not torch.equal(model(TOKENS).logits, plain)


def test_a_prefix_is_a_whole_name() -> None:
    """The trap: "model.layers.1" is not the beginning of "model.layers.10"."""
    model = tiny_family("llama", num_hidden_layers=12)
    partition = make_blocks(model, [["model.layers.1"], ["model.layers.10.", "model.layers.11"]])
    assert {name.split(".")[2] for name in partition.blocks[0].parameters} == {"1"}
    assert {name.split(".")[2] for name in partition.blocks[1].parameters} == {"10", "11"}
    assert [block.depth for block in partition.blocks] == [1, 11]


def test_partial_goes_by_layer() -> None:
    model = tiny_family("llama", num_hidden_layers=12)
    optimizer = BlockOptimizer(
        model, order="fixed", blocks="layer", switch_every=1, expansion=SGDExpansion(), scope="partial"
    )
    optimizer.turns.position = 9
    assert {int(name.split(".")[2]) for name in optimizer.expanded()} == {10, 11}
    optimizer.turns.position = 11
    assert optimizer.expanded() == []
    optimizer.close()
    halves = BlockOptimizer(
        model, blocks="sublayer", order="fixed", expansion=SGDExpansion(), scope="partial"
    )
    halves.turns.position = 20  # attention of layer 10: its MLP comes later in the forward pass
    assert {".".join(n.split(".")[2:4]) for n in halves.expanded()} == {"10.mlp", "11.self_attn", "11.mlp"}


def test_only_matrices_are_expanded_unless_asked() -> None:
    model = llama()
    few = BlockOptimizer(model, order="fixed", expansion=SGDExpansion())
    assert all(model.get_parameter(name).ndim > 1 for name in few.expanded()) and len(few.expanded()) == 14
    few.close()
    assert len(BlockOptimizer(model, order="fixed", expansion=SGDExpansion(vectors=True)).expanded()) == 18


# -------------------------------------------------------------------------------------------------- turns


def test_each_block_has_k_steps_in_every_epoch() -> None:
    """Invariant 7, and the trap of the first block, which gets K steps and not K - 1."""
    for order in ("random", "ascending", "descending", "fixed"):
        turns = Turns([2.0, 0.0, 1.0, 3.0, 4.0], order, torch.Generator().manual_seed(3))
        seen = []
        for _ in range(15):
            seen += turns.active
            turns.advance()
        epochs = [seen[i : i + 5] for i in (0, 5, 10)]
        assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
        if order == "random":
            assert len({tuple(epoch) for epoch in epochs}) > 1
        else:
            expected = {"ascending": [1, 2, 0, 3, 4], "descending": [4, 3, 0, 2, 1], "fixed": [0, 1, 2, 3, 4]}
            assert epochs == [expected[order]] * 3


def test_orders_are_fair_and_follow_the_seed() -> None:
    counts = dict.fromkeys(itertools.permutations(range(3)), 0)
    for seed in range(1200):
        counts[tuple(Turns([0, 1, 2], "random", torch.Generator().manual_seed(seed)).queue)] += 1
    # Six orders, 1,200 draws: 200 each, standard deviation 12.9; interval at 1e-4 over six.
    assert all(abs(count - 200) < 55 for count in counts.values())
    twice = [
        BlockOptimizer(llama(), generator=torch.Generator().manual_seed(5)).turns.queue for _ in range(2)
    ]
    assert twice[0] == twice[1]
    # An expansion's random start doesn't change the order, so that runs can be paired.
    other = BlockOptimizer(llama(), generator=torch.Generator().manual_seed(5), expansion=LoRAExpansion())
    assert other.turns.queue == twice[0]


# ------------------------------------------------------------------------------------------------- memory


def big(size: str) -> LlamaConfig:
    width, inner, layers, heads = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}[size]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
    )


@pytest.mark.parametrize(
    ("size", "numbers", "layer", "gigabytes", "adapters", "matrix"),
    [
        ("8B", 8_030_261_248, 218_112_000, 19.55, 0.336, 0.117),
        ("70B", 70_553_706_496, 855_654_400, 154.8, 1.66, 0.47),
    ],
)
def test_memory_of_llama(
    size: str, numbers: int, layer: int, gigabytes: float, adapters: float, matrix: float
) -> None:
    """The card's figures, and its formula in whole bytes; claim bread.4."""
    config = big(size)
    badam, lora, sgd = (estimate_memory(config, m) for m in ("badam", "bread-lora", "bread-sgd"))
    assert badam["total"] == 2 * numbers + 16 * layer
    assert badam["total"] / 1e9 == pytest.approx(gigabytes, abs=0.05 if size == "70B" else 0.005)
    assert (lora["total"] - badam["total"]) / 1e9 == pytest.approx(adapters, abs=0.005)
    assert (sgd["total"] - badam["total"]) / 1e9 == pytest.approx(
        matrix, abs=0.0005 if size == "8B" else 0.005
    )
    if size == "8B":
        assert lora["total"] - badam["total"] == 16 * 20_971_520
        assert estimate_memory(config, "lora", rank=80)["moments"] == 0
    assert estimate_memory(config, "adamw")["total"] == 18 * numbers
    assert estimate_memory(config, "lomo")["total"] < badam["total"]


class Square(nn.Module):
    """A decoder of the theory: D layers of one m × m matrix each."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(m, m, bias=False)}) for _ in range(d))
        for layer in self.layers:
            layer.attn = layer["attn"]  # type: ignore[index]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer.attn(x)
        return x


def test_memory_of_the_theory_model() -> None:
    """Invariant 8: 2Dm² + 16m², + 32Dmr for LoRA, + 2m² for SGD: 1.25 and 2.5 % at m = 4096, r = 4."""
    d, m, r = 32, 4096, 4
    with torch.device("meta"):
        model = Square(d, m)
    badam, lora, sgd = (
        estimate_memory(model, n, rank=r)["total"] for n in ("badam", "bread-lora", "bread-sgd")
    )
    assert badam == 2 * d * m**2 + 16 * m**2
    assert (lora - badam, sgd - badam) == (32 * d * m * r, 2 * m**2)
    assert ((lora - badam) / badam, (sgd - badam) / badam) == (0.0125, 0.025)
    assert [18 * 8, 18 * 70, 2 * 8 + 16 * 8 / 32, 2 * 70 + 16 * 70 / 80] == [144, 1260, 20, 154]


MEASURED = [("layer", method) for method in bread.PRESETS]
MEASURED += [("sublayer", "badam"), ("sublayer", "bread-lora"), ("matrix", "badam"), ("matrix", "bread-sgd")]


@pytest.mark.parametrize(("kind", "method"), MEASURED)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_measured_state_is_the_estimate(kind: Any, method: str, dtype: torch.dtype) -> None:
    """Within 5 %, for several numbers of blocks; Adam's step counts are the difference. Claim bread.4."""
    model = llama("tiny:llama-0.5m", dtype)
    expected = estimate_memory(model.config, method, rank=4, dtype=dtype, blocks=kind)
    optimizer = BlockOptimizer(
        model, blocks=kind, order="fixed", switch_every=1, expansion=preset(method, rank=4)
    )
    report: dict[str, int] = {}
    with measure_peak(model, optimizer) as peak:
        for _ in range(2 if kind != "matrix" else 7):
            optimizer.zero_grad()
            model(TOKENS, labels=TOKENS).loss.backward()
            report = {k: max(v, report.get(k, 0)) for k, v in optimizer.memory_report().items()}
            optimizer.step()
    states = expected["masters"] + expected["moments"] + expected["adapter_moments"]
    assert peak.state == pytest.approx(states, rel=0.05) and peak.device is None
    gradients = expected["gradients"] * dtype.itemsize // 4 + expected["adapter_gradients"]
    assert peak.gradients <= (gradients + expected["stray_gradient"]) * 1.01
    assert peak.gradients >= 0.7 * gradients  # adapters of the active block have none
    assert report["weights"] == expected["weights"] and report["adapters"] == expected["adapters"]


def test_block_descent_needs_less_than_adam() -> None:
    model = llama("tiny:llama-0.5m")
    adam = torch.optim.AdamW(model.parameters())
    model(TOKENS, labels=TOKENS).loss.backward()
    adam.step()
    expected = estimate_memory(model.config, "adamw", dtype=torch.float32)
    assert state_bytes(adam) == pytest.approx(expected["moments"], rel=0.01)
    assert expected["moments"] > 3.5 * estimate_memory(model.config, "badam", dtype=torch.float32)["moments"]


# --------------------------------------------------------------------------------------- work, landscape


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_idle_work_of_plain_block_descent(family: str) -> None:
    """Claim bread.1(a): closed form for equal layers; with an expansion nothing is idle, at one backward pass."""
    model = tiny_family(family)
    optimizer = BlockOptimizer(model, order="fixed")
    turns, begin = optimizer.turns.state_dict(), model.state_dict()
    work = backward_work(optimizer, lambda: model(TOKENS, labels=TOKENS))
    layer = sum(p.numel() for n, p in model.named_parameters() if ".0." in n and p.ndim > 1)
    rows = TOKENS.numel()
    for i, one in enumerate(work):
        deeper = (2 - i) * 2 * rows * layer
        assert one.idle == deeper and one.weight_gradients == 2 * rows * layer
        assert (
            one.input_gradients == deeper + 2 * rows * layer
        )  # the first norm is trained, so it needs them too
    assert [one.idle_share for one in work] == [2 / 3, 1 / 2, 0]
    assert str(optimizer.turns.state_dict()) == str(turns)
    assert all(torch.equal(value, begin[name]) for name, value in model.state_dict().items())
    optimizer.close()
    for expansion in (SGDExpansion(), LoRAExpansion(rank=2)):
        for scope in ("all", "partial"):
            expanded = BlockOptimizer(model, order="fixed", expansion=expansion, scope=scope)  # type: ignore[arg-type]
            found = backward_work(expanded, lambda: model(TOKENS, labels=TOKENS))
            assert all(one.idle == 0 for one in found)
            if scope == "partial":  # Not more input gradients than block descent pays anyway.
                assert [one.input_gradients for one in found] == [one.input_gradients for one in work]
            expanded.close()


def test_the_counter_is_torchs_counter() -> None:
    """Operations of a real backward pass, by torch's own counter, of linear maps without attention."""
    model = tiny_family("llama")
    optimizer = BlockOptimizer(model, order="fixed")
    for i, one in enumerate(backward_work(optimizer, lambda: model(TOKENS, labels=TOKENS))):
        optimizer.turns.position = i
        optimizer._activate()
        loss = model(TOKENS, labels=TOKENS).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        products = counter.get_flop_counts()["Global"]
        linear = sum(n for op, n in products.items() if str(op) in ("aten.mm", "aten.addmm"))
        head = 2 * TOKENS.numel() * 40 * 16
        assert linear - head == one.input_gradients + one.weight_gradients


def test_one_backward_pass_a_step() -> None:
    """Claim bread.1: the expansion's gradients come from the same pass, which visits each layer once."""
    model = tiny_family("llama")
    optimizer = BlockOptimizer(
        model, lr=1e-3, order="fixed", switch_every=1, expansion=SGDExpansion(lr_scale=0.1)
    )
    passes = []
    head = model.lm_head
    handle = head.register_full_backward_hook(lambda *_: passes.append(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    handle.remove()
    assert len(passes) == 3


def test_example_b() -> None:
    """Invariant 10 and claim bread.1(b)."""
    w3 = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([3.0, -1.0], dtype=torch.float64)
    assert torch.linalg.lstsq(w3, y[:, None]).solution[:, 0].tolist() == pytest.approx([5, -1])
    z, loss = frozen_optimum(w3, y)
    assert z.tolist() == pytest.approx([3, 0]) and loss == pytest.approx(1)
    c, e1 = rank_one_expansion(w3, y)
    assert c.tolist() == [[2, 0], [-1, 0]] and int(torch.linalg.matrix_rank(c)) == 1
    assert landscape.loss(w3 + c, e1, y) == 0
    with pytest.raises(UsageError, match="must hold finite numbers"):
        frozen_optimum(w3 * float("nan"), y)


def test_gradient_descent_sees_the_narrow_landscape() -> None:
    """The same case found by training: frozen it stops at 1, with an expansion of the frozen matrix at 0."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
            self.w3 = nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64))

        def forward(self) -> Any:
            return (self.w3 @ torch.relu(self.z) - torch.tensor([3.0, -1.0])).square().sum()

    ends = []
    for expansion in (None, SGDExpansion(lr_scale=1.0)):
        net = Net()
        # Only z has turns; the expansion takes the matrix along.
        optimizer = BlockOptimizer(
            net, lr=0.1, blocks=[["z"], ["w3"]], order="fixed", switch_every=10**9, expansion=expansion
        )
        for _ in range(250):
            optimizer.zero_grad()
            net().backward()
            optimizer.step()
        ends.append(net().item())
    assert ends[0] == pytest.approx(1, abs=1e-3) and ends[1] < 1e-8
