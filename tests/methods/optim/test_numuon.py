"""The optimizers: worked numbers, a second form in NumPy's float64, torch's own Muon and AdamW as limits."""

from __future__ import annotations

import copy
import doctest
import io
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.optim import numuon
from gnomon.methods.optim.numuon import Muon, MuonWithAdamW, NuMuon, RankSchedule, newton_schulz, shape_scale

W = [[0.1, 0.2, -0.1], [0, 0.3, 0.2]]
G = [[[3.0, 0, 0], [0, 4, 0]], [[1.0, 1, 0], [0, -1, 2]]]
BOUND: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
"""Of an optimiser's trajectory in float32."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameter(values: object, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.as_tensor(values, dtype=dtype).clone())


def walk(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on step and parameter only."""
    for t in range(first, first + steps):
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = randn(*p.shape, seed=1000 * t + 10 * i + p.ndim).to(p.dtype)
        optimizer.step()


def exact(params: Any, **options: Any) -> NuMuon:
    return NuMuon(params, **{"topk": "svd", "full_rank": "svd", "lr_adjust": "original", **options})


# -------------------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize(
    ("r", "first", "second"),
    [
        (
            0.5,
            [[0.099, 0.198, -0.099], [0, 0.197, 0.198]],
            [[0.02483638, 0.14955757, -0.11762164], [-0.03775241, 0.17105868, 0.18590178]],
        ),
        (
            1.0,
            [[-0.001, 0.198, -0.099], [0, 0.197, 0.198]],
            [[-0.09926652, 0.17842330, -0.09234595], [0.01090330, 0.11510965, 0.13691116]],
        ),
    ],
)
@pytest.mark.parametrize("topk", numuon.BACK_ENDS)
def test_example_c(r: float, first: list[list[float]], second: list[list[float]], topk: str) -> None:
    w = parameter(W, torch.float64)
    optimizer = exact([w], lr=0.1, rank_fraction=r, topk=topk)
    for g, expected in zip(G, (first, second), strict=True):
        w.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(w.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-9)


def test_invariant_9() -> None:
    schedule = RankSchedule.cosine(1, 0.25, total_steps=100)
    # At t = 45 r is .625 exactly, so k = 360; a cosine that isn't quite zero must not make it 361.
    times = (0, 10, 27.5, 45, 62.5, 80, 100, 300)
    expected = [1, 1, 0.890165, 0.625, 0.359835, 0.25, 0.25, 0.25]
    assert [schedule.fraction(t) for t in times] == pytest.approx(expected, abs=5e-7)
    assert [schedule.rank(t, 576) for t in times] == [576, 576, 513, 360, 208, 144, 144, 144]


def test_schedules() -> None:
    pieces = RankSchedule.piecewise([(0, 1), (0.5, 0.5), (0.8, 0.1)], total_steps=10)
    assert [pieces.fraction(t) for t in range(11)] == [1] * 5 + [0.5] * 3 + [0.1] * 3
    assert [RankSchedule.fixed(0.3).rank(t, 1) for t in (0, 10**6)] == [1, 1]
    assert RankSchedule.fixed(0.07).rank(0, 100) == 7  # 0.07 · 100 is a little more than 7 in floating point
    assert RankSchedule.fixed(1e-12).rank(0, 100) == 1
    assert RankSchedule.cosine(1, 0.2, hold=0.5, end=0.5, total_steps=4).fraction(3) == 0.2
    for schedule in (pieces, RankSchedule.fixed(0.3), RankSchedule.cosine(total_steps=9)):
        assert RankSchedule.of(schedule.plain()) == RankSchedule.of(schedule) == schedule


# --------------------------------------------------------------------------------- second form, and limits


def in_numpy(w: Any, grads: list[Any], *, lr: float, decay: float, nesterov: bool, ranks: list[int]) -> Any:
    """The card's equations with NumPy's SVD, all float64; s = 0.2 √max(m, n)."""
    w, average = w.astype(np.float64), 0.0
    for g, k in zip(grads, ranks, strict=True):
        average = 0.95 * average + 0.05 * g.astype(np.float64)
        u, _, vh = np.linalg.svd(0.05 * g + 0.95 * average if nesterov else average, full_matrices=False)
        delta = -0.2 * np.sqrt(max(w.shape)) * sum(np.outer(u[:, i], vh[i]) for i in range(k))
        w = w - lr * decay * w + lr * delta
    return w


@pytest.mark.parametrize("shape", [(12, 8), (7, 13), (9, 9), (1, 6), (6, 1)])
@pytest.mark.parametrize(("topk", "nesterov"), [("svd", False), ("gram", True)])
def test_a_hundred_steps_equal_the_second_form(shape: tuple[int, int], topk: str, nesterov: bool) -> None:
    schedule = RankSchedule.cosine(1, 0.25, total_steps=100)
    w = parameter(randn(*shape))
    before = w.detach().numpy().copy()
    optimizer = exact(
        [w], lr=0.01, nesterov=nesterov, topk=topk, rank_fraction=schedule, lr_adjust="match_rms_adamw"
    )
    walk(optimizer, 100)
    grads = [randn(*shape, seed=1000 * t + 2).numpy() for t in range(100)]
    ranks = [schedule.rank(t, min(shape)) for t in range(100)]
    expected = in_numpy(before, grads, lr=0.01, decay=0.1, nesterov=nesterov, ranks=ranks)
    torch.testing.assert_close(w.detach(), torch.from_numpy(expected).float(), **BOUND)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (5, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_full_rank_is_torchs_muon_bit_for_bit(shape: tuple[int, int], nesterov: bool, adjust: str) -> None:
    ours, theirs = parameter(randn(*shape)), parameter(randn(*shape))
    walk(NuMuon([ours], lr=0.02, nesterov=nesterov, lr_adjust=adjust, ns_dtype=torch.bfloat16), 5)
    walk(torch.optim.Muon([theirs], lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust), 5)
    assert torch.equal(ours, theirs)


def test_on_a_cpu_newton_schulz_is_in_float32_and_near() -> None:
    """Invariant 1: within .05 of the bfloat16 one per unit step; the exact one is torch's SVD."""
    one, g = parameter(torch.zeros(24, 16)), randn(24, 16)
    one.grad = g.clone()
    Muon([one], lr=1.0, weight_decay=0, lr_adjust=None).step()
    torch.testing.assert_close(one.detach(), -newton_schulz(g, dtype=torch.float32), **BOUND)
    assert 1e-5 < float((one + newton_schulz(g).float()).detach().abs().max()) < 0.05
    two = parameter(torch.zeros(24, 16))
    two.grad = g.clone()
    exact([two], lr=1.0, weight_decay=0, lr_adjust=None).step()
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    torch.testing.assert_close(two.detach(), -(u @ vh), **BOUND)


def test_root_mean_square_of_an_update() -> None:
    """Invariant 7, by hand: 0.2 √(k/q) with the default scale, s √(k/(mn)) in general."""
    for k, expected in ((144, 0.1), (576, 0.2)):
        assert shape_scale(576, 1536, "match_rms_adamw") * math.sqrt(k / (576 * 1536)) == pytest.approx(
            expected
        )
    assert [shape_scale(8, 2, a) for a in numuon.optimizer.LR_ADJUSTS] == [pytest.approx(0.2 * 8**0.5), 2, 1]
    assert shape_scale(2, 8, "original") == 1
    w = parameter(torch.zeros(20, 10))
    walk(NuMuon([w], lr=1.0, weight_decay=0, rank_fraction=0.5), 1)
    assert float(w.detach().square().mean().sqrt()) == pytest.approx(0.2 * math.sqrt(0.5), rel=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_rank_of_the_whole_change(decay: float) -> None:
    """Invariant 5: rank(W_T − Π(1 − ηλ) W_0) ≤ Σ k_t, and here exactly that."""
    w = parameter(randn(30, 20), torch.float64)
    begin = w.detach().clone()
    schedule = RankSchedule.piecewise([(0, 0.2), (0.5, 0.05)], total_steps=4)  # k = 4, 4, 1, 1
    walk(exact([w], lr=0.1, weight_decay=decay, rank_fraction=schedule), 4)
    assert int(torch.linalg.matrix_rank(w.detach() - (1 - 0.1 * decay) ** 4 * begin)) == 10


def test_decay_keeps_weights_in_the_ball() -> None:
    """Invariant 6: ‖W‖₂ ≤ max(‖W_0‖₂, 1/λ), ‖W‖_* ≤ k/λ, approached from outside; the bound is reached."""
    w = parameter(3 * randn(10, 8), torch.float64)
    optimizer = exact([w], lr=0.1, weight_decay=2.0, rank_fraction=0.25, lr_adjust=None)
    u, _, vh = torch.linalg.svd(randn(10, 8), full_matrices=False)
    excess = []
    for _ in range(60):
        w.grad = -(u[:, :2] @ vh[:2]).double()
        optimizer.step()
        sigma = torch.linalg.svdvals(w.detach())
        excess.append(float(sigma.sum()) - 2 / 2.0)
    assert float(sigma[0]) == pytest.approx(1 / 2.0, abs=1e-3)
    assert all(b <= 0.8 * a + 1e-9 for a, b in pairwise(excess))  # 1 − ηλ = .8


def test_the_loss_falls_with_random_back_ends_and_warm_start() -> None:
    """The direction is one of descent: a flipped sign climbs, doing nothing stays."""
    target = randn(24, 3) @ randn(3, 18, seed=1)
    for topk in numuon.BACK_ENDS:
        w = parameter(torch.zeros(24, 18))
        optimizer = NuMuon([w], lr=0.4, weight_decay=0, topk=topk, rank_fraction=0.25, oversample=1)
        start = float(target.square().mean())
        for _ in range(40):
            optimizer.zero_grad()
            (w - target).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert float((w.detach() - target).square().mean()) < 0.3 * start
        assert ("basis" in optimizer.state[w]) == (topk in ("krylov", "lowrank"))


# ------------------------------------------------------------------------------------------------ precision


def test_bfloat16_weights() -> None:
    """Momentum isn't normalised in place (torch's is, without Nesterov), and a step rounds once."""
    g = randn(16, 12).bfloat16()
    ours, theirs = (parameter(randn(16, 12, seed=1), torch.bfloat16) for _ in range(2))
    begin = ours.detach().float()
    optimizers = (
        NuMuon([ours], lr=0.02, momentum=0, ns_dtype=torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.02, momentum=0, nesterov=False),
    )
    for p, optimizer in zip((ours, theirs), optimizers, strict=True):
        p.grad = g.clone()
        optimizer.step()
    assert torch.equal(optimizers[0].state[ours]["momentum_buffer"], g)
    trap = optimizers[1].state[theirs]["momentum_buffer"]
    assert not torch.equal(trap, g), (
        "torch no longer normalises its momentum in place: the card's trap is gone"
    )
    step = 0.02 * 0.2 * 4 * newton_schulz(g).float()
    assert torch.equal(ours.detach(), (begin * (1 - 0.02 * 0.1) - step).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "topk", "bound"),
    [
        *(
            (torch.bfloat16, topk, 0.03) for topk in numuon.BACK_ENDS
        ),  # 8 ε: three roundings of weight and momentum
        *((torch.float16, topk, 0.004) for topk in numuon.BACK_ENDS),
        *((torch.float64, topk, 2e-6) for topk in ("svd", "gram")),  # random draws differ by dtype
    ],
)
def test_other_precisions_follow_float32(dtype: torch.dtype, topk: str, bound: float) -> None:
    w, wide = parameter(randn(32, 24), dtype), parameter(randn(32, 24))
    for p in (w, wide):
        walk(NuMuon([p], lr=0.01, topk=topk, rank_fraction=0.25, oversample=2), 3)
    assert w.dtype == dtype
    assert 0 < float((w.double() - wide.double()).detach().norm() / wide.detach().norm()) < bound


# -------------------------------------------------------------------------------------------------- state


def options() -> dict[str, dict[str, Any]]:
    cosine = RankSchedule.cosine(1, 0.2, total_steps=12)
    return {
        "svd": {"topk": "svd", "rank_fraction": cosine},
        "krylov": {"topk": "krylov", "rank_fraction": cosine, "oversample": 1, "krylov_iters": 1},
        "lowrank, bfloat16": {"topk": "lowrank", "rank_fraction": cosine, "oversample": 1},
        "cold": {"rank_fraction": 0.2, "oversample": 1, "warm_start": False},
    }


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", options())
def test_resuming_equals_going_through(name: str) -> None:
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32

    def build() -> tuple[list[nn.Parameter], MuonWithAdamW]:
        params = [parameter(randn(*shape), dtype) for shape in ((20, 14), (9, 30), (5,), (4, 2, 3, 3))]
        matrices = [params[0], params[1], params[3]]
        return params, MuonWithAdamW(matrices, [params[2]], lr=0.01, **options()[name])

    straight, optimizer = build()
    walk(optimizer, 12)
    params, first = build()
    walk(first, 7)
    kept = through_a_file({"weights": [p.detach() for p in params], "optimizer": first.state_dict()})
    others, second = build()
    walk(second, 1)  # what it holds must be replaced
    second.load_state_dict(kept["optimizer"])
    for p, value in zip(others, kept["weights"], strict=True):
        p.detach().copy_(value)
    assert [group["step"] for group in second.param_groups] == [7, 7]
    walk(second, 5, first=7)
    assert all(torch.equal(a, b) for a, b in zip(straight, others, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(straight, params, strict=True))


def test_draws_depend_on_seed_step_and_parameter_only() -> None:
    """One gradient throughout, so only the random block can make two updates differ."""

    def updates(seed: int) -> list[Tensor]:
        twins = [parameter(torch.zeros(20, 16)) for _ in range(2)]
        random = {"topk": "lowrank", "rank_fraction": 0.25, "krylov_iters": 1, "oversample": 0}
        optimizer = NuMuon(twins, lr=1.0, weight_decay=0, warm_start=False, seed=seed, **random)
        found = []
        for _ in range(2):
            for p in twins:
                p.grad = randn(20, 16)
            before = [p.detach().clone() for p in twins]
            optimizer.step()
            found += [p.detach() - b for p, b in zip(twins, before, strict=True)]
        return found

    ambient = torch.random.get_rng_state()
    first = updates(0)
    assert torch.equal(torch.random.get_rng_state(), ambient)
    assert all(torch.equal(a, b) for a, b in zip(first, updates(0), strict=True))
    different = [*first, *updates(1)]
    assert not any(torch.allclose(a, b, atol=1e-3) for i, a in enumerate(different) for b in different[:i])


def test_the_state_is_as_small_as_promised() -> None:
    """mn of momentum and q · k of warm start, without the wider storage it was cut from."""
    w = parameter(randn(40, 100))
    optimizer = NuMuon([w], rank_fraction=0.25)
    walk(optimizer, 2)
    sizes = {key: (tuple(v.shape), v.untyped_storage().nbytes()) for key, v in optimizer.state[w].items()}
    assert sizes == {"momentum_buffer": ((40, 100), 16_000), "basis": ((40, 10), 1600)}


def test_resuming_with_another_schedule_is_refused() -> None:
    def build(total: int) -> NuMuon:
        return NuMuon([parameter(randn(8, 6))], rank_fraction=RankSchedule.cosine(total_steps=total))

    first = build(10)
    walk(first, 6)
    other = build(20)
    with pytest.raises(
        UsageError, match=r"over 10 steps, this optimizer has .* 20 steps: after step 6 .* from 0.3\d+ to 0.8"
    ):
        other.load_state_dict(first.state_dict())
    build(10).load_state_dict(first.state_dict())
    first.param_groups[0]["rank_fraction"] = RankSchedule.fixed(0.5)  # the way to change it on purpose
    walk(first, 1, first=6)
    muon = torch.optim.Muon([parameter(randn(8, 6))])
    with pytest.raises(
        UsageError, match=r"lacks full_rank, krylov_iters, .* saved by another optimizer than NuMuon"
    ):
        build(10).load_state_dict(muon.state_dict())


def test_a_copied_optimizer_goes_on() -> None:
    w = parameter(randn(6, 4))
    optimizer = MuonWithAdamW([w], [parameter(randn(3))])
    walk(optimizer, 2)
    twin = copy.deepcopy(optimizer)
    twin.add_param_group({"params": [parameter(randn(2))], "kind": "adamw"})
    walk(twin, 1, first=2)
    walk(optimizer, 1, first=2)
    assert torch.equal(twin.param_groups[0]["params"][0], w)


# --------------------------------------------------------------------------------- torch's ways of use


def test_the_adamw_part_is_torchs() -> None:
    shapes = [(7,), (5, 3), (2, 3, 4)]
    ours, theirs = ([parameter(randn(*s)) for s in shapes] for _ in range(2))
    mixed = MuonWithAdamW([parameter(randn(4, 4))], ours, lr=0.1, adamw_lr=0.01, adamw_weight_decay=0.3)
    plain = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.3, betas=(0.9, 0.95))
    scheduler = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (mixed, plain)]
    for t in range(20):
        walk(mixed, 1, first=t)
        walk(plain, 1, first=t)
        for one in scheduler:
            one.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert mixed.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**20)


def test_one_object_equals_two() -> None:
    one, two = ([parameter(randn(6, 5)), parameter(randn(5))] for _ in range(2))
    walk(MuonWithAdamW(one[:1], one[1:], lr=0.01), 3)
    walk(NuMuon(two[:1], lr=0.01), 3)
    walk(torch.optim.AdamW(two[1:], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)), 3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_closures_missing_gradients_and_groups() -> None:
    w, idle, slow = (parameter(randn(6, 5)) for _ in range(3))
    optimizer = NuMuon([{"params": [w, idle]}, {"params": [slow], "lr": 0.0, "rank_fraction": 0.4}], lr=0.1)
    before = idle.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum() + slow.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert torch.equal(idle, before) and idle not in optimizer.state
    assert torch.equal(slow, before)
    assert not torch.equal(w, before)


def test_kernels_are_outputs_by_rest() -> None:
    kernel, flat = parameter(randn(6, 2, 3, 3)), parameter(randn(6, 2, 3, 3).flatten(1))
    g = randn(6, 2, 3, 3, seed=4)
    kernel.grad, flat.grad = g, g.flatten(1)
    for p in (kernel, flat):
        NuMuon([p], rank_fraction=0.5, topk="svd").step()
    assert torch.equal(kernel.flatten(1), flat)


@pytest.mark.parametrize("topk", numuon.BACK_ENDS)
@pytest.mark.parametrize("r", [0.3, 1.0])
def test_a_zero_gradient_only_decays(topk: str, r: float) -> None:
    for full_rank in ("ns", "svd"):
        w = parameter(randn(6, 5))
        before = w.detach().clone()
        optimizer = NuMuon([w], lr=0.1, topk=topk, rank_fraction=r, full_rank=full_rank)
        w.grad = torch.zeros_like(w)
        optimizer.step()
        torch.testing.assert_close(w.detach(), before * (1 - 0.1 * 0.1))


@pytest.mark.parametrize("topk", numuon.BACK_ENDS)
def test_a_gradient_of_rank_one_takes_one_direction(topk: str) -> None:
    w = parameter(torch.zeros(9, 7))
    w.grad = torch.outer(randn(9), randn(7, seed=1))
    NuMuon([w], lr=1.0, weight_decay=0, rank_fraction=0.5, topk=topk, lr_adjust=None).step()
    torch.testing.assert_close(w.detach(), -w.grad / w.grad.norm(), **BOUND)


def test_scale_of_gradients_does_not_matter() -> None:
    ends = []
    for c in (1.0, 1e-3, 1e4):
        w = parameter(randn(9, 7))
        optimizer = exact([w], lr=0.1, rank_fraction=0.5)
        for t in range(3):
            w.grad = c * randn(9, 7, seed=t)
            optimizer.step()
        ends.append(w.detach())
    torch.testing.assert_close(ends[1], ends[0], **BOUND)
    torch.testing.assert_close(ends[2], ends[0], **BOUND)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number(bad: float) -> None:
    params = {"a": parameter(randn(6, 5)), "b": parameter(randn(5))}
    optimizer = MuonWithAdamW([("a", params["a"])], [("b", params["b"])], rank_fraction=0.5)
    walk(optimizer, 1)
    kept = copy.deepcopy((params, optimizer.state_dict()))
    for name in ("b", "a"):
        params[name].grad = params[name].grad.clone().index_fill_(0, torch.tensor([1]), bad)
        with pytest.raises(
            NumericalFailure, match=rf"of [12] of 2 .* first that {name}\. Weights and state are as before"
        ):
            optimizer.step()
    for name, p in params.items():
        assert torch.equal(p, kept[0][name])
    assert str(optimizer.state_dict()) == str(kept[1])


BAD: list[tuple[Callable[[], object], str]] = [
    (
        lambda: NuMuon([parameter(randn(3))]),
        r"shape \(3,\) has 1 dimension, but NuMuon needs matrices.* MuonWithAdamW",
    ),
    (lambda: NuMuon([("n.bias", parameter(3.0))]), r"'n.bias' of shape \(\) has 0 dimensions"),
    (lambda: NuMuon([parameter(randn(2, 3, 4))]), "may be a stack of experts"),
    (lambda: NuMuon([parameter(randn(2, 3), torch.complex64)]), "has dtype torch.complex64"),
    (
        lambda: NuMuon([("embed_tokens.weight", parameter(randn(9, 4)))]),
        "is an embedding or head.* pass it without",
    ),
    (lambda: NuMuon([("lm_head.weight", parameter(randn(9, 4)))]), "is an embedding or head"),
    (
        lambda: NuMuon([("h.0.attn.c_attn.weight", parameter(randn(4, 12)))]),
        "several matrices fused into one",
    ),
    (lambda: NuMuon([parameter(W)], rank_fraction=0.0), r"Rank fraction 0.0 must lie in \(0, 1\]"),
    (lambda: NuMuon([parameter(W)], rank_fraction=1.01), r"Rank fraction 1.01 must lie in \(0, 1\]"),
    (lambda: NuMuon([parameter(W)], rank_fraction=math.nan), r"Rank fraction nan must lie in \(0, 1\]"),
    (lambda: NuMuon([parameter(W)], lr=-1), "lr=-1 must be finite and not negative"),
    (lambda: NuMuon([parameter(W)], weight_decay=math.nan), "weight_decay=nan must be finite"),
    (lambda: NuMuon([parameter(W)], momentum=1.0), r"momentum=1.0 must lie in \[0, 1\)"),
    (lambda: NuMuon([parameter(W)], krylov_iters=0), "krylov_iters=0 must be a whole number, at least 1"),
    (lambda: NuMuon([parameter(W)], oversample=-1), "oversample=-1 must be a whole number, at least 0"),
    (lambda: NuMuon([parameter(W)], ns_coefficients=(1, 2)), "must be the three numbers"),  # type: ignore[arg-type]
    (lambda: NuMuon([parameter(W)], topk="svdd"), "Unknown topk 'svdd'. Did you mean 'svd'"),
    (lambda: NuMuon([parameter(W)], full_rank="nss"), "Unknown full_rank 'nss'. Did you mean 'ns'"),
    (lambda: NuMuon([parameter(W)], lr_adjust="orig"), "Unknown lr_adjust 'orig'. Did you mean 'original'"),
    (lambda: Muon([parameter(W)], rank_fraction=0.5), "Muon has full rank, so rank_fraction=0.5 must be 1"),
    (lambda: MuonWithAdamW(nn.Linear(3, 2), [parameter(W)]), "1 other parameters can't be given too"),
    (lambda: MuonWithAdamW([{"params": [parameter(W)], "kind": "sgd"}]), "Unknown kind of group 'sgd'"),
    (
        lambda: MuonWithAdamW([parameter(W)], [parameter(W)], betas=(0.9, 1)),
        r"betas=\(0.9, 1\) .* must lie in",
    ),
    (
        lambda: MuonWithAdamW([parameter(W)], [parameter(W)], adamw_lr=-1),
        "lr=-1 of an AdamW group must be finite",
    ),
    (lambda: RankSchedule.cosine(total_steps=0), "total_steps=0, but its points are shares of a whole run"),
    (
        lambda: RankSchedule.cosine(hold=0.9, end=0.8, total_steps=5),
        r"begin at \[0.9, 0.8\], which must be shares",
    ),
    (lambda: RankSchedule.piecewise([], total_steps=5), r"begin at \[\], which must be"),
    (lambda: RankSchedule.piecewise([(0.1, 1)], total_steps=5), "first piece begins at 0.1 of the run"),
    (lambda: RankSchedule(kind="cos", points=((0, 1),)), "Unknown rank schedule 'cos'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("act", "message"), BAD)
def test_bad_input(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()


def test_a_sparse_gradient_and_a_bad_group_change_nothing() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = NuMuon([parameter(randn(5, 3))])
    with pytest.raises(UsageError, match=r"shape \(3,\)"):
        optimizer.add_param_group({"params": [parameter(randn(3))]})
    assert len(optimizer.param_groups) == 1
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"\(5, 3\) has a sparse gradient.* Use sparse=False"):
        NuMuon([table.weight]).step()


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(numuon) == doctest.TestResults(failed=0, attempted=8)
