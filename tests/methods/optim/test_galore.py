"""GaLore against a step by hand, torch's AdamW in the projected space, and the one limit in which it is AdamW."""

from __future__ import annotations

import copy
import doctest
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core import tiny
from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.optim.baselines import galore
from gnomon.methods.optim.baselines.galore import (
    GaLore,
    galore_param_groups,
    project,
    project_back,
    projector,
)

BOUND: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}
"""Of float64 trajectories."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that depend on step and parameter only."""
    for t in steps:
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = randn(*p.shape, seed=100 * t + 10 * p.ndim + i).to(p.dtype)
        optimizer.step()


def test_a_step_by_hand() -> None:
    """G = diag(3, 4) padded: the leading left vector is the second axis, so only the second row moves, by η α in
    the direction of the sign; the decay is η λ of the weight. Then a second gradient in the same space."""
    w = nn.Parameter(torch.tensor([[1.0, 1, 1], [1, 1, 1]]))
    optimizer = GaLore([w], lr=0.1, weight_decay=0.5, rank=1, scale=0.25, update_proj_gap=10)
    w.grad = torch.tensor([[3.0, 0, 0], [0, 4, 0]])
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([[0.95, 0.95, 0.95], [0.95, 0.925, 0.95]]))
    w.grad = torch.tensor([[9.0, 9, 9], [0, 1, 2]])
    optimizer.step()
    # Row 2: m = (0, .1·4·.9 + .1·1, .2), v = .001 (0, 16·.999 + 1, 4); corrected by .19 and .001999.
    m = [(0.9 * 0.4 + 0.1) / 0.19, 0.2 / 0.19]
    v = [(0.999 * 0.016 + 0.001) / 0.001999, 0.004 / 0.001999]
    move = [0.1 * 0.25 * a / math.sqrt(b) for a, b in zip(m, v, strict=True)]
    expected = torch.full((2, 3), 0.95 * 0.95)
    expected[1, 1] = 0.925 * 0.95 - move[0]
    expected[1, 2] = 0.95 * 0.95 - move[1]
    torch.testing.assert_close(w.detach(), expected)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
@pytest.mark.parametrize("proj_type", galore.PROJ_TYPES)
def test_it_is_adamw_in_the_projected_space(shape: tuple[int, int], proj_type: str) -> None:
    """W_t = W_0 + α P θ_t, where torch's AdamW moves θ with gradients PᵀG; P anew after three steps, moments kept."""
    w = nn.Parameter(randn(*shape, seed=7))
    start = w.detach().clone()
    walk(GaLore([w], lr=0.05, rank=3, scale=0.5, update_proj_gap=3, proj_type=proj_type), range(6))
    grads = [randn(*shape, seed=100 * t + 20) for t in range(6)]
    left = {"std": shape[0] < shape[1], "reverse_std": shape[0] >= shape[1]}.get(
        proj_type, proj_type == "left"
    )
    total, theta, optimizer = start.clone(), nn.Parameter(torch.zeros(0)), None
    for t, g in enumerate(grads):
        if t % 3 == 0:
            u, _, vh = torch.linalg.svd(g)
            p = u[:, :3] if left else vh[:3].T
        low = p.T @ g if left else g @ p
        if optimizer is None:
            theta = nn.Parameter(torch.zeros_like(low))
            optimizer = torch.optim.AdamW([theta], lr=0.05, weight_decay=0.0)
        before = theta.detach().clone()
        theta.grad = low
        optimizer.step()
        change = theta.detach() - before
        total += 0.5 * (p @ change if left else change @ p.T)
    torch.testing.assert_close(w.detach(), total, **BOUND)
    assert float((w - start).norm().detach()) > 0.1


def test_where_full_rank_is_adamw_and_where_not() -> None:
    """Adam works entry by entry: a signed permutation P (gradients with orthogonal rows, along the axes) leaves it
    as it is, a general one doesn't, whatever its rank."""
    ours, theirs, turned = (nn.Parameter(randn(4, 9, seed=3)) for _ in range(3))
    rotation = torch.linalg.qr(randn(4, 4, seed=4)).Q
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}
    full = GaLore([ours], rank=99, scale=1.0, update_proj_gap=1000, **settings)
    general = GaLore([turned], rank=4, scale=1.0, update_proj_gap=1000, **settings)
    plain = torch.optim.AdamW([theirs], **settings)
    for t in range(8):
        g = randn(4, 9, seed=t)
        if t == 0:  # of which P is made: rows along different columns, of different lengths
            g = torch.zeros(4, 9, dtype=torch.float64)
            g[torch.arange(4), torch.tensor([5, 0, 8, 2])] = torch.tensor(
                [1.0, -4, 3, 2], dtype=torch.float64
            )
        for p, one in ((ours, g), (theirs, g), (turned, rotation @ g)):
            p.grad = one.clone()
        for optimizer in (full, plain, general):
            optimizer.step()
        if t == 0:
            assert sorted(full.state[ours]["projector"].abs().argmax(0).tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
    back = turned.detach() - randn(4, 9, seed=3)
    assert float((back - (theirs.detach() - randn(4, 9, seed=3))).norm()) > 0.1


def test_groups_without_a_rank_are_torchs_adamw() -> None:
    ours, theirs = ([nn.Parameter(randn(*s, seed=9)) for s in ((5,), (4, 3), (2, 3, 4))] for _ in range(2))
    walk(GaLore([{"params": ours}], lr=0.01, weight_decay=0.1), range(10))
    walk(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), range(10))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_projection() -> None:
    g = randn(5, 8)
    for side, width in (("left", 5), ("right", 8)):
        p = projector(g, 2, side)
        assert p.shape == (width, 2)
        torch.testing.assert_close(p.T @ p, torch.eye(2, dtype=torch.float64))
        u, s, vh = torch.linalg.svd(g, full_matrices=False)
        torch.testing.assert_close(project_back(project(g, p, side), p, side), u[:, :2] * s[:2] @ vh[:2])


@pytest.mark.parametrize("shape", [(40, 100), (100, 40)])
def test_the_state_is_as_small_as_promised(shape: tuple[int, int]) -> None:
    """mr + 2nr numbers, m the smaller side, without the wider storage they were cut from; AdamW has 2mn."""
    w = nn.Parameter(randn(*shape).float())
    optimizer = GaLore([w], rank=8)
    walk(optimizer, range(2))
    held = [v.untyped_storage().nbytes() for k, v in optimizer.state[w].items() if k != "step"]
    assert sum(held) == 4 * (40 * 8 + 2 * 100 * 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [4, 6])
def test_a_cut_run_goes_on(dtype: torch.dtype, cut: int) -> None:
    """In the middle of a projector's time, and right before a new one."""

    def build() -> tuple[list[nn.Parameter], GaLore]:
        params = [nn.Parameter(randn(*s).to(dtype)) for s in ((6, 9), (5,))]
        return params, GaLore(
            [{"params": params[:1], "rank": 2, "update_proj_gap": 3}, {"params": params[1:]}]
        )

    params, optimizer = build()
    walk(optimizer, range(cut))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again, second = build()
    for p, q in zip(params, again, strict=True):
        q.data.copy_(p)
    walk(optimizer, range(cut, 10))
    second.load_state_dict(torch.load(file, weights_only=True))
    walk(second, range(cut, 10))
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))
    assert params[0].dtype == dtype


def test_bfloat16_weights_follow_float32() -> None:
    narrow, wide = nn.Parameter(randn(24, 16).bfloat16()), nn.Parameter(randn(24, 16).bfloat16().float())
    for p in (narrow, wide):
        walk(GaLore([p], lr=0.01, rank=4), range(3))
    assert 0 < float((narrow.float() - wide).norm().detach() / wide.norm().detach()) < 0.01


def test_a_language_model_learns() -> None:
    model = tiny.build("tiny:gpt2-10k")
    groups = galore_param_groups(model, rank=4, scale=1.0)
    assert len(groups[0]["params"]) == 12 and groups[0]["rank"] == 4
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(map(id, model.parameters()))
    optimizer = GaLore(groups, lr=3e-3, update_proj_gap=4)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    tokens, losses = torch.arange(24).view(2, 12), []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_no_numbers_change_nothing(bad: float) -> None:
    params = [nn.Parameter(randn(4, 6)), nn.Parameter(randn(4, 5))]
    optimizer = GaLore(params, rank=2, update_proj_gap=1)
    walk(optimizer, range(1))
    kept = copy.deepcopy((params, optimizer.state_dict()))
    for p in params:
        p.grad = randn(*p.shape)
    params[1].grad[2, 3] = bad  # type: ignore[index]
    with pytest.raises(NumericalFailure, match=r"gradients of 1 of 2 parameters hold NaN or infinity"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, kept[0], strict=True))
    assert str(optimizer.state_dict()) == str(kept[1])


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, 4))


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: GaLore([matrix()], lr=math.nan), "lr=nan must be finite and not negative"),
    (lambda: GaLore([matrix()], weight_decay=-1), "weight_decay=-1 must be"),
    (lambda: GaLore([matrix()], scale=math.inf), "scale=inf must be"),
    (lambda: GaLore([matrix()], betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\) must lie in \[0, 1\)"),
    (lambda: GaLore([matrix()], rank=0), "rank=0 must be a whole number, at least 1"),
    (lambda: GaLore([matrix()], rank=1, update_proj_gap=0), "update_proj_gap=0 must be"),
    (lambda: GaLore([matrix()], rank=1, proj_type="lft"), "Unknown proj_type 'lft'. Did you mean 'left'"),
    (
        lambda: GaLore([nn.Parameter(torch.zeros(3))], rank=1),
        r"shape \(3,\), .* whole matrices of real numbers",
    ),
    (lambda: GaLore([nn.Parameter(torch.zeros(3, 2, 2))], rank=1), r"shape \(3, 2, 2\)"),
    (lambda: galore_param_groups(nn.Linear(2, 2), 1), "no list of decoder layers"),
]


@pytest.mark.parametrize(("act", "message"), BAD)
def test_bad_input(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()


def test_sparse_gradients_bad_groups_and_closures() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"sparse gradient.* Use sparse=False"):
        GaLore([table.weight]).step()
    w, idle = matrix(), matrix()
    optimizer = GaLore([w, idle], rank=2)
    with pytest.raises(UsageError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1

    def closure() -> Tensor:
        loss = (w - 1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).requires_grad
    assert bool((w > 0).any()) and not idle.any() and idle not in optimizer.state


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(galore) == doctest.TestResults(failed=0, attempted=6)
