"""BREAD's steps: the card's worked numbers, a plain loop over all gradients in float64, AdamW and BAdam as limits."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.methods.optim import bread
from gnomon.methods.optim.bread import BlockOptimizer, LoRAExpansion, SGDExpansion, preset

torch.set_num_threads(1)

TOKENS = torch.randint(0, 259, (6, 2, 12), generator=torch.Generator().manual_seed(1))


class Product(nn.Module):
    """H = ½(w₂w₁ − 1)² from (.5, .5)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.full((1, 1), 0.5, dtype=torch.float64)) for _ in range(2))

    def forward(self) -> Tensor:
        return (self.w2 * self.w1 - 1).square().sum() / 2


class Stack(nn.Module):
    """A ReLU network with a name for each matrix, and biases."""

    def __init__(self, depth: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with seeded(0):
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth)).to(dtype)
            for layer in self.layers:
                nn.init.normal_(layer.weight, std=0.6)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


BLOCKS = [[f"layers.{i}"] for i in range(4)]


def llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    with seeded(seed):
        return build("tiny:llama-10k").to(dtype)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def rms_ratio(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).detach().double().norm() / reference.detach().double().norm())


def walk(model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for t in range(first, first + steps):
        optimizer.zero_grad()
        x = TOKENS[t % len(TOKENS)]
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -------------------------------------------------------------------------------------- worked example A


@pytest.mark.parametrize(
    ("scope", "path", "last"),
    [
        (None, [(0.6, 0.5), (0.69976093, 0.5), (0.69976093, 0.6), (0.69976093, 0.69954257)], 0.130298713),
        (
            "all",
            [(0.6, 0.5375), (0.69991276, 0.57815), (0.73433266, 0.67815), (0.76837662, 0.77764502)],
            0.080993363,
        ),
        (
            "partial",
            [(0.6, 0.5375), (0.69991276, 0.57815), (0.69991276, 0.67815), (0.69991276, 0.77763058)],
            0.103843291,
        ),
    ],
)
def test_example_a(scope: Any, path: list[tuple[float, float]], last: float) -> None:
    model = Product()
    optimizer = BlockOptimizer(
        model,
        lr=0.1,
        blocks=[["w1"], ["w2"]],
        switch_every=2,
        order="ascending",
        expansion=None if scope is None else SGDExpansion(lr_scale=1.0),
        scope=scope,
    )
    for expected in path:
        optimizer.zero_grad()
        model().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert (model.w1.item(), model.w2.item()) == pytest.approx(expected, abs=6e-9)
    assert model().item() == pytest.approx(last, abs=6e-10)


# ------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_block_of_everything_is_adamw_bit_for_bit(decay: float) -> None:
    """Invariant 1; embeddings, head and norms included, K beyond the end. Vectors don't decay."""
    ours, theirs = llama(), llama()
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    walk(
        ours,
        BlockOptimizer(ours, blocks=[["*"]], switch_every=10**9, weight_decay=decay, **options),
        6,
    )
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    walk(theirs, torch.optim.AdamW(groups, **options), 6)
    assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_badam_is_a_fresh_base_optimizer_for_each_turn(base: Any) -> None:
    """BAdam by a plain loop: freeze all but one block, a new optimizer on it, K steps; three turns and a half."""
    ours, theirs = llama(), llama()
    optimizer = BlockOptimizer(ours, base, lr=3e-3, switch_every=2, order="descending")
    t = 0
    for layer in (2, 1, 0, 2):
        for p in theirs.parameters():
            p.requires_grad_(False)
        own = list(theirs.model.layers[layer].parameters())
        for p in own:
            p.requires_grad_(True)
        plain = base(own, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for _ in range(1 if t == 6 else 2):
            assert optimizer.active_block().name == f"model.layers.{layer}"
            before = weights(ours)
            walk(ours, optimizer, 1, first=t)
            walk(theirs, plain, 1, first=t)
            t += 1
            moved = {name for name, p in weights(ours).items() if not torch.equal(p, before[name])}
            # Invariant 2: everything else is bitwise unchanged and has no gradient.
            assert moved == {n for n in before if n.startswith(f"model.layers.{layer}.")}
            assert all(p.grad is None for n, p in ours.named_parameters() if n not in moved)
        assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize(
    "expansion", [LoRAExpansion(rank=0), SGDExpansion(lr_scale=0.0), SGDExpansion(lr_scale=0.0, sign=True)]
)
@pytest.mark.parametrize("scope", ["all", "partial"])
def test_without_rank_or_rate_it_is_badam(expansion: Any, scope: Any) -> None:
    """Invariant 5, bit for bit, random order included."""
    ours, theirs = llama(), llama()
    walk(ours, BlockOptimizer(ours, lr=3e-3, switch_every=2, expansion=expansion, scope=scope), 7)
    walk(theirs, BlockOptimizer(theirs, lr=3e-3, switch_every=2), 7)
    assert same(weights(ours), weights(theirs))


def test_an_always_active_head_keeps_its_state() -> None:
    """Two AdamW over the head: one through the optimizer's turns, one plain with the same gradients."""
    with seeded(0):
        model = Stack(3).double()
        head = nn.Linear(6, 2).double()
    whole = nn.Sequential(model, head)
    twin = nn.Parameter(head.weight.detach().clone())
    plain = torch.optim.AdamW([twin], lr=0.01, weight_decay=0.0)
    optimizer = BlockOptimizer(
        whole, lr=0.01, blocks=[["0.layers.0"], ["0.layers.1"]], always_active=["1"], switch_every=2
    )
    for t in range(7):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        whole(x).square().sum().backward()
        assert head.weight.grad is not None
        twin.grad = head.weight.grad.clone()
        plain.step()
        optimizer.step()
        assert torch.equal(head.weight, twin)
    assert float(optimizer.state[head.weight]["step"]) == 7


# ---------------------------------------------------------------------------------------------- expansions


def in_a_plain_loop(
    model: Any,
    order: list[int],
    *,
    lr: float,
    beta: float,
    steps: int,
    every: int,
    scope: str,
    sign: bool,
) -> None:
    """All gradients first, then plain steps for inactive matrices and Adam, written out, for the active layer."""
    m: dict[str, Any] = {}
    for t in range(steps):
        active = order[t // every]
        if t % every == 0:
            m = {}
        for p in model.parameters():
            p.requires_grad_(True)
            p.grad = None
        x = TOKENS[t % len(TOKENS)]
        model(x, labels=x).loss.backward()
        k = t % every + 1
        with torch.no_grad():
            for name, p in model.named_parameters():
                if not name.startswith("model.layers."):
                    continue
                layer = int(name.split(".")[2])
                g = p.grad
                if layer == active:
                    first, second = m.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
                    m[name] = first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
                    p.sub_(lr * (first / (1 - 0.9**k)) / ((second / (1 - 0.999**k)).sqrt() + 1e-8))
                elif p.ndim > 1 and (scope == "all" or layer > active):
                    p.sub_(beta * (g.sign() if sign else g))


@pytest.mark.parametrize(
    ("scope", "sign", "checkpointing"),
    [("all", False, True), ("partial", False, False), ("all", True, False), ("partial", True, True)],
)
def test_hooks_equal_all_gradients_first(scope: Any, sign: bool, checkpointing: bool) -> None:
    """Invariant 4 in float64, with and without activation checkpointing; partial leaves shallower matrices alone."""
    ours, theirs = llama(torch.float64), llama(torch.float64)
    if checkpointing:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours.train()
    begin = weights(ours)
    beta = 1e-3 if sign else 0.1
    expansion = SGDExpansion(lr_scale=beta / 3e-3, sign=sign)
    optimizer = BlockOptimizer(ours, lr=3e-3, switch_every=2, order="fixed", expansion=expansion, scope=scope)
    walk(ours, optimizer, 6)
    in_a_plain_loop(theirs, [0, 1, 2], lr=3e-3, beta=beta, steps=6, every=2, scope=scope, sign=sign)
    for name, p in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], p, rtol=1e-12, atol=1e-12)
    assert not torch.equal(
        weights(ours)["model.layers.2.mlp.up_proj.weight"], begin["model.layers.2.mlp.up_proj.weight"]
    )
    # One step with the last layer active: nothing before it moves in "partial", everything in "all".
    ours, optimizer = llama(torch.float64), None
    optimizer = BlockOptimizer(
        ours, lr=3e-3, switch_every=2, order="descending", expansion=expansion, scope=scope
    )
    walk(ours, optimizer, 1)
    moved = {n for n, p in weights(ours).items() if not torch.equal(p, begin[n])}
    assert any(name.startswith("model.layers.0.") for name in moved) == (scope == "all")


def test_one_inactive_gradient_lives_at_a_time() -> None:
    """Invariant 6, seen from inside the backward pass; Adam's state belongs to the active block alone."""
    model = llama()
    optimizer = BlockOptimizer(model, lr=1e-3, switch_every=2, order="fixed", expansion=SGDExpansion())
    inactive = [p for n, p in model.named_parameters() if n.startswith(("model.layers.1", "model.layers.2"))]
    most, seen = 0, 0

    def look(_: Tensor) -> None:
        nonlocal most, seen
        seen += 1
        most = max(most, sum(p.grad is not None for p in inactive))

    for p in inactive:
        if p.ndim > 1:
            p.register_hook(look)  # type: ignore[no-untyped-call]
            p.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    walk(model, optimizer, 1)
    assert most <= 1 and seen == 2 * 14
    active = set(model.model.layers[0].parameters())
    assert set(optimizer.state) == active
    walk(model, optimizer, 2, first=1)
    assert set(optimizer.state) == set(model.model.layers[1].parameters())


def test_lora_starts_as_the_same_function_and_moves_u_first() -> None:
    """Invariant 3: U = 0, so V's gradient is 0 and Adam leaves it; adapters of the active block rest."""
    model, plain = llama(), llama()
    optimizer = BlockOptimizer(model, lr=1e-2, switch_every=2, order="fixed", expansion=LoRAExpansion(rank=3))
    assert torch.equal(model(TOKENS[0]).logits, plain(TOKENS[0]).logits)
    begin = weights(model)
    walk(model, optimizer, 1)
    moved = {n for n, p in weights(model).items() if not torch.equal(p, begin[n])}
    us = {n for n in begin if n.endswith("bread_u") and ".layers.0." not in n}
    assert moved == us | {n for n in begin if ".layers.0." in n and "bread" not in n}
    assert len(us) == 14
    walk(model, optimizer, 1, first=1)
    later = {n for n, p in weights(model).items() if not torch.equal(p, begin[n])}
    assert later - moved == {n.replace("bread_u", "bread_v") for n in us}


def test_lora_by_a_plain_loop() -> None:
    """Against explicit products W + α/r UV in float64, states of adapters kept over switches, α_U = 16 α_V."""
    model = Stack()
    expansion = LoRAExpansion(rank=2, alpha=3.0, lr_ratio_u=16.0)
    optimizer = BlockOptimizer(
        model,
        lr=0.01,
        blocks=BLOCKS,
        switch_every=2,
        order="ascending",
        expansion=expansion,
        scope="partial",
        master_dtype=torch.float64,
    )
    assert optimizer.adapters is not None
    w = [layer.weight.detach().clone() for layer in model.layers]  # type: ignore[union-attr,operator]
    b = [layer.bias.detach().clone() for layer in model.layers]  # type: ignore[union-attr,operator]
    u = [optimizer.adapters.pair(f"layers.{i}")[0].detach().clone() for i in range(4)]
    v = [optimizer.adapters.pair(f"layers.{i}")[1].detach().clone() for i in range(4)]
    leaves = [t.requires_grad_() for t in (*w, *b, *u, *v)]
    kept = (
        [torch.optim.Adam([u[i]], lr=0.16) for i in range(4)],
        [torch.optim.Adam([v[i]], lr=0.01) for i in range(4)],
    )
    own: Any = None
    for t in range(8):
        active = t // 2
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x.flip(0)).square().sum().backward()
        optimizer.step()
        for leaf in leaves:
            leaf.grad = None
        h = x
        for i in range(4):
            h = torch.tanh(h @ (w[i] + 1.5 * u[i] @ v[i]).T + b[i])
        (h - x.flip(0)).square().sum().backward()
        if t % 2 == 0:
            own = torch.optim.Adam([w[active], b[active]], lr=0.01)
        own.step()
        for i in range(active + 1, 4):
            kept[0][i].step()
            kept[1][i].step()
        for i in range(4):
            torch.testing.assert_close(model.layers[i].weight, w[i], rtol=1e-11, atol=1e-11)
            for mine, expected in zip(optimizer.adapters.pair(f"layers.{i}"), (u[i], v[i]), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)
    assert float(optimizer.state[optimizer.adapters.pair("layers.3")[0]]["step"]) == 6  # never reset
    before = model(x)
    optimizer.close()
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model.layers[3].weight, (w[3] + 1.5 * u[3] @ v[3]).detach(), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("name", ["tiny:llama-10k", "tiny:gpt2-10k", "tiny:opt-10k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_keeps_the_function(name: str, dtype: torch.dtype) -> None:
    with seeded(0):
        model = build(name).to(dtype)
    plain = set(model.state_dict())
    optimizer = BlockOptimizer(model, lr=2e-2, switch_every=3, expansion=LoRAExpansion(rank=2))
    walk(model, optimizer, 4)
    adapted, without = model(TOKENS[0]).logits, copy.deepcopy(model)
    for module in without.modules():
        module._forward_hooks.clear()  # W alone
    bound = 1e-5 if dtype == torch.float32 else 0.02  # RMS ratio; in bfloat16 the sum of W and C is rounded
    assert rms_ratio(without(TOKENS[0]).logits, adapted) > 5 * bound
    optimizer.merge()
    assert rms_ratio(model(TOKENS[0]).logits, adapted) < bound
    walk(model, optimizer, 3, first=4)  # it goes on
    adapted = model(TOKENS[0]).logits
    optimizer.close()
    assert rms_ratio(model(TOKENS[0]).logits, adapted) < bound
    assert set(model.state_dict()) == plain and not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", bread.PRESETS)
def test_every_method_learns(name: str) -> None:
    """Ten batches of one text: a flipped sign climbs, doing nothing stays."""
    model = llama()
    x = TOKENS[0]
    optimizer = BlockOptimizer(
        model,
        lr=1e-2,
        switch_every=5,
        expansion=preset(name, rank=4, lr_scale=0.05 if "sign" in name else 5.0),
    )
    begin = model(x, labels=x).loss.item()
    losses = [walk_one(model, optimizer, x) for _ in range(20)]
    assert losses[0] == pytest.approx(begin) and losses[-1] < begin - 0.1
    optimizer.close()


def walk_one(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x, labels=x).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_expansion_beats_plain_block_descent() -> None:
    """The point of it, on a loss that one layer alone reduces slowly: BAdam > partial > all, at equal steps."""

    def end(expansion: Any, scope: Any = None) -> float:
        model = llama(seed=3)
        optimizer = BlockOptimizer(
            model, lr=5e-3, switch_every=4, order="ascending", expansion=expansion, scope=scope
        )
        for _ in range(12):
            last = walk_one(model, optimizer, TOKENS[1])
        return last

    lora = LoRAExpansion(rank=4)
    assert end(None) > end(lora, "partial") > end(lora, "all")


# ------------------------------------------------------------------------------------------------ precision


def test_stochastic_rounding() -> None:
    """Neighbours in bfloat16 only, right on average, exact numbers untouched, negative ones alike."""
    x = torch.tensor([1.0, 1 + 2**-9, -(1 + 2**-9), 3.0e-3, -0.0])
    draws = torch.stack(
        [bread.stochastic_round(x, torch.Generator().manual_seed(i)).float() for i in range(4000)]
    )
    assert draws.unique(dim=0).shape[0] > 3
    assert set(draws[:, 1].tolist()) == {1.0, 1 + 2**-7}
    assert set(draws[:, 0].tolist()) == {1.0} and set(draws[:, 4].tolist()) == {0.0}
    # A quarter of the way, 4,000 draws: standard deviation of the mean .0068 of an ulp; interval at 1e-4.
    assert draws[:, 1].mean().item() == pytest.approx(1 + 2**-9, abs=4 * 0.0069 * 2**-7)
    torch.testing.assert_close(draws[:, 2].mean(), -draws[:, 1].mean(), rtol=0, atol=8 * 0.0069 * 2**-7)
    assert draws[:, 3].mean().item() == pytest.approx(3.0e-3, abs=4 * 0.008 * 2**-16)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_bfloat16_updates_below_half_an_ulp(rounding: Any) -> None:
    """The trap: to the nearest they vanish; stochastically their mean arrives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)).bfloat16()
    nn.init.ones_(model[1].weight)
    optimizer = BlockOptimizer(
        model,
        lr=1e-5,
        blocks=[["0"], ["1"]],
        order="fixed",
        switch_every=10,
        expansion=SGDExpansion(lr_scale=1.0, sign=True, rounding=rounding),
    )
    assert optimizer.on_the_fly is not None and optimizer.on_the_fly.changed() is None
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    share = optimizer.on_the_fly.changed()
    if rounding == "nearest":
        assert share == 0 and bool((model[1].weight == 1).all())
    else:  # ulps below and above 1 are 2^-8 and 2^-7: each step moves .0013 to .0026 of the elements
        assert share is not None and 0.0003 < share < 0.005


def test_bfloat16_weights_follow_a_float32_copy() -> None:
    """BAdam on bfloat16: within a turn the copy is AdamW on float32 with the same gradients; then it is dropped."""
    model = llama(torch.bfloat16)
    optimizer = BlockOptimizer(model, lr=1e-4, switch_every=5, order="fixed")
    w = model.model.layers[0].mlp.up_proj.weight
    twin = nn.Parameter(w.detach().float())
    plain = torch.optim.AdamW([twin], lr=1e-4, weight_decay=0.0)
    for t in range(5):
        x = TOKENS[t]
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        twin.grad = w.grad.float()
        plain.step()
        if t == 4:
            master = optimizer.state[w]["master"]
        optimizer.step()
        assert w.grad is None
        assert torch.equal(w, twin.detach().bfloat16())
    assert torch.equal(master, twin)
    assert set(optimizer.memory_report()) == {"weights", "adapters", "masters", "moments", "gradients"}
    assert w not in optimizer.state and optimizer.active_block().name == "model.layers.1"
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(bread) == doctest.TestResults(failed=0, attempted=9)


KINDS: dict[str, Callable[[], Any]] = {
    "sublayer": lambda: BlockOptimizer(
        llama(), lr=1e-2, blocks="sublayer", switch_every=1, expansion=SGDExpansion()
    ),
    "matrix": lambda: BlockOptimizer(
        llama(), lr=1e-2, blocks="matrix", switch_every=1, include_embeddings=True, include_head=True
    ),
    "names": lambda: BlockOptimizer(
        llama(), lr=1e-2, blocks=[["model.layers.0", "model.layers.1"], ["model.layers.2"]], switch_every=1
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_blocks_train_everything_once_an_epoch(kind: str) -> None:
    optimizer = KINDS[kind]()
    model, begin = optimizer.model, weights(optimizer.model)
    count = len(optimizer.blocks)
    walk(model, optimizer, count)
    assert optimizer.turns.epoch == 1
    inside = {name for block in optimizer.blocks for name in block.parameters}
    assert {n for n, p in weights(model).items() if not torch.equal(p, begin[n])} == inside
