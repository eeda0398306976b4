"""Small games. Sources of truth: the definition over orders, hand numbers of the card, brute force, Aumann–Shapley."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.shapley import (
    Group,
    ModelShapley,
    Part,
    aumann_shapley,
    coalitions,
    exact_shapley,
    permutation_shapley,
    quadratic_shapley,
    second_order,
    shapley_gptq_hessian,
    shapley_of_table,
)

A = torch.tensor([[2.0, 0.5, -0.3], [0.5, 1.0, 0.2], [-0.3, 0.2, 0.5]], dtype=torch.float64)
STAR = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
THETA = torch.tensor([0.8, -1.2, 1.5], dtype=torch.float64)


class Vector(nn.Module):
    """Its weight (rows, columns) is all there is; losses are functions of it."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.map = nn.Linear(*theta.shape[::-1], bias=False, dtype=theta.dtype)
        self.map.weight.data.copy_(theta)
        self.eval()


def quadratic(theta: Tensor, hessian: Tensor, star: Tensor) -> Tensor:
    away = theta - star
    return away @ hessian @ away / 2


def drawn(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A Hessian that is neither diagonal nor definite, a centre, a point."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(n, n, generator=g, dtype=torch.float64)
    star, theta = torch.randn(2, n, generator=g, dtype=torch.float64)
    return root + root.T, star, theta


def by_orders(fn, n: int) -> list[float]:
    """The definition as a mean over all n! orders of arrival."""
    phi = [0.0] * n
    for order in itertools.permutations(range(n)):
        present = torch.zeros(n, dtype=torch.bool)
        for i in order:
            before = float(fn(present))
            present[i] = True
            phi[i] += float(fn(present)) - before
    return [x / math.factorial(n) for x in phi]


def scored(model: nn.Module, loss, **options) -> ModelShapley:
    return ModelShapley(model, loss_fn=lambda m, _: loss(m).view(1), **options).fit([None])


# ------------------------------------------------------------------------------------------------ the oracles


def test_exact_equals_the_mean_over_all_orders():
    table = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def fn(present: Tensor) -> float:
        return float(table[sum(1 << i for i in range(5) if present[i])])

    expected = by_orders(fn, 5)
    assert exact_shapley(fn, 5).tolist() == pytest.approx(expected, abs=1e-12)
    assert shapley_of_table(table).tolist() == pytest.approx(expected, abs=1e-12)
    batched = exact_shapley(
        lambda masks: torch.tensor([fn(m) for m in masks], dtype=torch.float64), 5, at_once=7
    )
    assert batched.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_glove_game_by_hand():
    """A left glove and two right ones: a pair is worth 1."""
    phi = exact_shapley(lambda s: bool(s[0]) and bool(s[1] or s[2]), 3)
    assert phi.tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])


def test_one_player_gets_all():
    assert exact_shapley(lambda s: 3.5 * float(s[0]), 1).tolist() == [3.5]


def test_orders_are_efficient_and_converge():
    h, star, theta = drawn(6, 3)

    def fn(present: Tensor) -> float:
        return -float(quadratic(theta * present, h, star).exp().clamp(max=50))

    exact = exact_shapley(fn, 6)
    few, many = (permutation_shapley(fn, 6, k, generator=torch.Generator().manual_seed(1)) for k in (3, 1500))
    whole = fn(torch.ones(6, dtype=torch.bool)) - fn(torch.zeros(6, dtype=torch.bool))
    assert float(few.sum()) == pytest.approx(whole, abs=1e-9)
    assert float((many - exact).abs().max()) < 0.1 * float(exact.abs().max())
    again = permutation_shapley(fn, 6, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(few, again)


def test_coalitions_are_the_binary_numbers():
    rows = coalitions(3).int().tolist()
    assert rows[5] == [1, 0, 1] and len(rows) == 8 and len({tuple(r) for r in rows}) == 8


@pytest.mark.parametrize("n", [0, 21])
def test_exact_refuses_too_many_players_before_any_call(n):
    with pytest.raises(UsageError, match=r"1 to 20 players"):
        exact_shapley(lambda s: pytest.fail("called"), n)


def test_bad_games_are_refused():
    with pytest.raises(NumericalFailure, match="NaN"):
        exact_shapley(lambda s: float("nan"), 2)
    with pytest.raises(UsageError, match="2 utilities for 1 coalitions"):
        exact_shapley(lambda s: torch.zeros(2), 2)
    with pytest.raises(UsageError, match="samples=0"):
        permutation_shapley(lambda s: 0.0, 2, 0)
    with pytest.raises(UsageError, match="aren't those of all"):
        shapley_of_table(torch.zeros(6))


# -------------------------------------------------------------------------------------- quadratic losses (1, 2)


def test_example_a_both_signs():
    g = A @ (THETA - STAR)
    assert g.tolist() == pytest.approx([-0.35, -0.4, -0.23])
    exact = exact_shapley(lambda s: -quadratic(THETA * s, A, STAR), 3)
    assert exact.tolist() == pytest.approx([0.5, -0.18, 0.5475])
    phi = quadratic_shapley(g, THETA, A @ THETA)
    assert phi.tolist() == pytest.approx(exact.tolist(), abs=1e-12)
    worth = float(quadratic(0 * THETA, A, STAR) - quadratic(THETA, A, STAR))
    assert float(phi.sum()) == pytest.approx(0.8675) == pytest.approx(worth)
    printed = quadratic_shapley(g, THETA, A @ THETA, sign=-1)
    assert printed.tolist() == pytest.approx([0.06, -0.78, 0.1425])
    assert float(printed.sum()) == pytest.approx(-0.5775)
    assert phi.abs().argsort(descending=True).tolist() == [2, 0, 1]
    assert printed.abs().argsort(descending=True).tolist() == [1, 2, 0]


def test_the_class_gives_example_a_by_a_double_backward_pass():
    model = Vector(THETA.view(1, 3))

    def loss(m):
        return quadratic(m.map.weight.view(3), A, STAR)

    plus = scored(model, loss, units="param", curvature="hvp").scores()
    assert plus.phi["map.weight"].flatten().tolist() == pytest.approx([0.5, -0.18, 0.5475], abs=1e-12)
    minus = scored(model, loss, units="param", curvature="hvp", curvature_sign="paper").scores()
    assert minus.phi["map.weight"].flatten().tolist() == pytest.approx([0.06, -0.78, 0.1425], abs=1e-12)
    gap = scored(model, loss, units="param", curvature="hvp").efficiency_gap([None])
    assert gap.actual == pytest.approx(0.8675) and abs(gap.gap) < 1e-12
    assert torch.equal(model.map.weight.data.view(3), THETA)


@pytest.mark.parametrize("n", [1, 4, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_hvp_equals_brute_force_and_aumann_shapley_on_quadratics(n, seed):
    h, star, theta = drawn(n, seed)
    found = scored(
        Vector(theta.view(1, n)),
        lambda m: quadratic(m.map.weight.view(n), h, star),
        units="param",
        curvature="hvp",
    )
    phi = found.scores().phi["map.weight"].view(n)
    exact = exact_shapley(lambda s: -quadratic(theta * s, h, star), n)
    torch.testing.assert_close(phi, exact, rtol=1e-10, atol=1e-10)
    path = aumann_shapley(lambda t: h @ (t - star), theta, steps=1)
    torch.testing.assert_close(phi, path, rtol=1e-10, atol=1e-10)
    assert abs(found.efficiency_gap([None]).gap) < 1e-9


def test_rows_as_players_equal_brute_force_over_rows():
    h, star, theta = drawn(12, 5)
    w = theta.view(4, 3)
    found = scored(
        Vector(w), lambda m: quadratic(m.map.weight.reshape(12), h, star), units="row", curvature="hvp"
    )
    exact = exact_shapley(lambda s: -quadratic((w * s[:, None]).reshape(12), h, star), 4)
    torch.testing.assert_close(found.scores().phi["map"], exact, rtol=1e-10, atol=1e-10)


def test_hvp_couples_players_only():
    """Columns 0 and 1 are players, column 2 isn't: its weights are there in every coalition."""
    h, star, theta = drawn(6, 7)
    w = theta.view(2, 3)
    units = [Group("columns", 2, (Part("map", "column", torch.tensor([0, 1, -1])),))]
    found = scored(
        Vector(w),
        lambda m: quadratic(m.map.weight.reshape(6), h, star),
        units=lambda m: units,
        curvature="hvp",
    )

    def fn(s: Tensor) -> float:
        return -float(quadratic((w * torch.tensor([s[0], s[1], True])).reshape(6), h, star))

    torch.testing.assert_close(found.scores().phi["columns"], exact_shapley(fn, 2), rtol=1e-10, atol=1e-10)
    assert abs(found.efficiency_gap([None]).gap) < 1e-9


def test_the_midpoint_rule_converges_where_the_loss_isnt_quadratic():
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theta = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)

    def loss(t: Tensor) -> Tensor:
        return nn.functional.softplus(-x @ t).mean()

    def gradient(t: Tensor) -> Tensor:
        return torch.func.grad(loss)(t)

    worth = float(loss(0 * theta) - loss(theta))
    errors = [abs(float(aumann_shapley(gradient, theta, steps=k).sum()) - worth) for k in (2, 8, 32)]
    assert errors[2] < 1e-3 and errors[0] > 10 * errors[1] > 100 * errors[2]  # second order in the step
    assert float(aumann_shapley(gradient, theta, steps=4)[4]) == 0
    with pytest.raises(UsageError, match="steps=0"):
        aumann_shapley(gradient, theta, steps=0)


# ------------------------------------------------------------------------------------------------- axioms (3)


def test_null_player_symmetry_and_linearity():
    h, star, theta = drawn(4, 9)
    theta[2] = 0.0
    theta[1], star[1] = theta[0], star[0]
    h[1], h[:, 1] = h[0].clone(), h[0].clone()  # players 0 and 1 are alike
    h[1, 1] = h[0, 0]
    h[0, 1] = h[1, 0] = h[0, 0]
    h = (h + h.T) / 2
    model = Vector(theta.view(1, 4))

    def phi(loss, **options):
        options = {"units": "param", "curvature": "hvp", **options}
        return scored(model, loss, **options).scores().phi["map.weight"].view(4)

    def first(m):
        return quadratic(m.map.weight.view(4), h, star)

    def second(m):
        return torch.sin(m.map.weight).sum() ** 3

    one, other = phi(first), phi(second)
    assert one[2] == 0 and other[2] == 0
    assert float(one[0]) == pytest.approx(float(one[1]), abs=1e-12) and float(one[0]) != 0
    torch.testing.assert_close(phi(lambda m: 2 * first(m) - 3 * second(m)), 2 * one - 3 * other)


# ------------------------------------------------------------------------------------------ the GPTQ Hessian (9, 14)

H = torch.tensor([[4.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
W = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64)


def test_example_e():
    joint, alone = second_order(W, H)
    assert joint.tolist() == pytest.approx([-3.25, -5.75]) and alone.tolist() == pytest.approx([-2.5, -5.0])
    found = shapley_gptq_hessian(W, H, 0.5, eps=0.0)
    assert found.tolist() == [pytest.approx([4.6, 1.0]), pytest.approx([1.0, 2.15])]
    assert H.diagonal().tolist() == [4.0, 2.0]


def test_the_second_order_scores_are_those_of_the_quadratic_error():
    """½ tr(W H Wᵀ) is the layer's error when all its weights are removed: φ sums to minus that."""
    g = torch.Generator().manual_seed(4)
    w, x = torch.randn(3, 5, generator=g, dtype=torch.float64), torch.randn(5, 40, generator=g).double()
    joint, _ = second_order(w, x @ x.T)
    assert float(joint.sum()) == pytest.approx(-float((w @ x).square().sum()) / 2)


def test_only_the_diagonal_changes_and_stays_positive():
    g = torch.Generator().manual_seed(5)
    w, x = torch.randn(6, 8, generator=g), torch.randn(8, 50, generator=g)
    w[:, 3] = 0.0
    h = x @ x.T
    h[:, 6] = h[6] = 0.0  # a dead input
    assert torch.equal(shapley_gptq_hessian(w, h, 0.0), h)
    for beta in (0.5, 1.0):
        found = shapley_gptq_hessian(w, h, beta)
        off = ~torch.eye(8, dtype=torch.bool)
        assert torch.equal(found[off], h[off]) and found.dtype == h.dtype
        alive = h.diagonal() > 0
        assert bool((found.diagonal()[alive] > 0).all()) and float(found[6, 6]) == 0
        assert not torch.equal(found.diagonal(), h.diagonal())


def test_bad_hessians_are_refused():
    with pytest.raises(UsageError, match=r"beta=1.5 must lie in \[0, 1\]"):
        shapley_gptq_hessian(W, H, 1.5)
    with pytest.raises(UsageError, match="needs H of"):
        shapley_gptq_hessian(W[:, :1], H, 0.5)
    with pytest.raises(NumericalFailure, match="NaN"):
        shapley_gptq_hessian(W * float("nan"), H, 0.5)
