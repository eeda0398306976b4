"""Lua-LLM's scores, masks and regulariser. Truth: the card's worked numbers, plain loops, derivatives in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.lua import (
    budget_loss,
    exact_masks,
    hard_mask,
    masked,
    ranks,
    soft_mask,
    uniform_scores,
)
from gnomon.methods.compress.lua import scores as scores_module

torch.set_num_threads(1)

WIDTHS = (7, 63, 96, 576, 1536, 4096, 11008)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def by_counting(scores: Tensor) -> Tensor:
    """#{k : S_ik <= S_ij} / n, as the formula stands."""
    return (scores[:, :, None] >= scores[:, None, :]).double().mean(-1)


def test_worked_example_a():
    w = torch.tensor([[1, -2, 0.5, 0.1], [0.3, 0.2, -0.1, 4]])
    importance = w.abs() * torch.tensor([1, 0.5, 4, 2])
    s = uniform_scores(importance)
    assert s.tolist() == [[0.75, 0.75, 1, 0.25], [0.5, 0.25, 0.75, 1]]
    t = torch.full((2, 1), 0.5)
    wanted = [[0.731059, 0.731059, 0.880797, 0.268941], [0.5, 0.268941, 0.731059, 0.880797]]
    torch.testing.assert_close(soft_mask(s, t), torch.tensor(wanted), rtol=0, atol=1e-6)
    assert hard_mask(s, t).tolist() == [[True, True, True, False], [False, False, True, True]]
    assert (s >= t).sum(1).tolist() == [3, 3]  # the paper's rule keeps one more of the second row


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 63), (4, 129)])
@pytest.mark.parametrize("levels", [0, 3])
def test_uniform_scores_are_what_counting_gives(shape, levels):
    scores = draw(*shape)
    scores = (scores * levels).floor() if levels else scores  # with many ties
    found = uniform_scores(scores)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), by_counting(scores), rtol=0, atol=1e-7)


def test_scores_sorted_in_pieces_are_the_same(monkeypatch):
    scores = draw(37, 20)
    whole = ranks(scores)
    monkeypatch.setattr(scores_module, "CHUNK", 50)
    assert torch.equal(ranks(scores), whole) and whole.dtype == torch.int16


def test_wide_rows_get_wide_ranks():
    assert ranks(draw(1, scores_module.NARROW + 1)).dtype == torch.int32
    assert int(ranks(draw(1, scores_module.NARROW)).max()) == scores_module.NARROW


def test_scores_ignore_the_scale_of_rows_and_of_everything():
    scores = draw(6, 40)
    wanted = uniform_scores(scores)
    scaled = scores * torch.tensor([1e-3, 1, 7, 1e3, 2, 0.5])[:, None]
    assert torch.equal(uniform_scores(scaled), wanted) and torch.equal(uniform_scores(scores * 0.01), wanted)
    assert not torch.equal(
        uniform_scores(scores * draw(40, seed=1)), wanted
    )  # another scale per input is felt


def test_bfloat16_scores_collapse_but_ranks_do_not():
    s = uniform_scores(torch.randperm(4096, generator=torch.Generator().manual_seed(0)).float()[None])
    assert len(s.unique()) == 4096 and len(s.bfloat16().unique()) < 4096 / 4


@pytest.mark.parametrize(
    ("n", "p", "soft", "strict"),
    [
        (576, 0.5, 288.5, 288),
        (576, 0.6, 230.9, 231),
        (576, 0.7, 173.3, 173),
        (1536, 0.5, 768.5, 768),
        (1536, 0.6, 614.9, 615),
        (1536, 0.7, 461.3, 461),
    ],
)
def test_worked_example_b(n, p, soft, strict):
    s, t = uniform_scores(draw(1, n)), torch.full((1, 1), p)
    assert float(soft_mask(s, t).sum()) == pytest.approx(soft, abs=0.02)
    assert int(hard_mask(s, t).sum()) == strict


@pytest.mark.parametrize("n", WIDTHS[2:])
def test_soft_sum_and_width_of_the_cut_at_any_width(n):
    s = uniform_scores(draw(1, n))
    for t in (0.2, 0.5, 0.61803, 0.8):
        soft = soft_mask(s, torch.full((1, 1), t)).double()
        assert abs(float(soft.sum()) - ((1 - t) * n + 0.5)) < 0.02
        each_side = int(((soft > 0.02) & (soft < 0.98)).sum()) / 2
        assert 3 <= each_side <= 4.5


def test_a_steep_soft_mask_is_the_hard_one():
    s, t = uniform_scores(draw(8, 50)), draw(8, 1, seed=1)
    assert torch.equal(soft_mask(s, t, slope=1e9) > 0.5, hard_mask(s, t))
    torch.testing.assert_close(soft_mask(s, t, slope=1e9), hard_mask(s, t).float())


def test_thresholds_at_p_are_wandas_rows():
    """Truth: remove the p n smallest of each row, by sorting."""
    for n, p in ((10, 0.7), (576, 0.75), (96, 0.5), (1000, 0.3)):
        scores = draw(5, n)
        wanted = torch.ones(5, n, dtype=torch.bool)
        wanted.scatter_(1, scores.argsort(1)[:, : round(p * n)], False)
        t = torch.full((5, 1), p)
        assert torch.equal(hard_mask(uniform_scores(scores), t), wanted)
        assert int((uniform_scores(scores) >= t).sum()) == int(wanted.sum()) + 5


@pytest.mark.parametrize("axis", ["row", "column", "layer"])
@pytest.mark.parametrize("min_kept", [0, 2])
def test_gradients_are_the_derivatives(axis, min_kept):
    """Truth: finite differences of plain torch operations, and the card's formula for dL/dt."""
    m, n = 4, 7
    rank = ranks(draw(m, n))
    shape = {"row": (m, 1), "column": (1, n), "layer": (1, 1)}[axis]
    w = (draw(m, n, seed=1).double() - 0.5).requires_grad_(True)
    t = (0.2 + 0.6 * draw(*shape, seed=2).double()).requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda w, t: masked(w, rank, t, min_kept=min_kept)[0], (w, t), atol=1e-7, rtol=1e-5
    )
    g = draw(m, n, seed=3).double()
    (found,) = torch.autograd.grad(masked(w, rank, t, min_kept=min_kept)[0], t, g)
    soft = soft_mask(rank.double() / n, t.detach())
    free = rank <= n - min_kept
    by_formula = (-n * g * w.detach() * soft * (1 - soft) * free).sum_to_size(shape)
    torch.testing.assert_close(found, by_formula, rtol=1e-5, atol=1e-7)
    assert float(by_formula.abs().sum()) > 0


def test_counts_are_hard_and_their_gradient_is_soft():
    rank, t = ranks(draw(6, 50)), (0.3 + 0.4 * draw(6, 1, seed=1)).requires_grad_(True)
    w = draw(6, 50, seed=2) + 0.1
    w[0, :20] = 0
    _, kept = masked(w, rank, t)
    s = rank.float() / 50
    assert int(kept) == int(((s > t) & (w != 0)).sum())  # zeros are removed already
    (found,) = torch.autograd.grad(kept, t)
    wanted = torch.autograd.grad((soft_mask(s, t) * (w != 0)).sum(), t)[0]
    torch.testing.assert_close(found, wanted)
    assert bool((found < 0).all()) and float(found[1:].mean()) == pytest.approx(-50, rel=0.01)


def test_worked_example_c_and_both_regularisers():
    total, p = 1000, 0.6
    for kept, wanted in ((500, 3.570297), (400, 0.0), (300, 4.602913)):
        count = torch.tensor(float(kept), dtype=torch.float64)
        assert 16 * float(budget_loss(count, total, p)) == pytest.approx(wanted, abs=1e-6)
    ten = torch.tensor(310.0, dtype=torch.float64)  # at p = .7, one per cent of all weights too many
    assert float(budget_loss(ten, total, 0.7, "kept")) == pytest.approx(0.033, abs=5e-4)
    assert float(budget_loss(ten, total, 0.7, "removed")) == pytest.approx(0.014, abs=5e-4)
    for form in ("kept", "removed"):
        up, down = (
            float(budget_loss(torch.tensor(x, dtype=torch.float64), total, 0.5, form))
            for x in (500 * 1.25, 500 / 1.25)
        )
        assert (up == pytest.approx(down)) == (form == "kept") and min(up, down) > 0
    with pytest.raises(UsageError, match="Did you mean 'kept'"):
        budget_loss(ten, total, p, "keep")


@pytest.mark.parametrize("form", ["kept", "removed"])
@pytest.mark.parametrize(("start", "sign"), [(0.3, -1), (0.9, 1)])
def test_too_dense_pushes_thresholds_up(form, start, sign):
    """A negative gradient raises t in a descent step."""
    rank, t = ranks(draw(3, 40)), torch.full((3, 1), start, requires_grad=True)
    budget_loss(masked(torch.ones(3, 40), rank, t)[1], 120, 0.6, form).backward()
    assert t.grad is not None and bool((sign * t.grad > 0).all())


@pytest.mark.parametrize(("form", "start"), [("kept", 2.0), ("removed", -1.0)])
def test_nothing_left_to_count_still_has_a_slope(form, start):
    rank, t = ranks(draw(3, 40)), torch.full((3, 1), start)
    soft = t + (0.5 - start)  # the count has a gradient, its value is 0
    kept = masked(torch.ones(3, 40), rank, soft.requires_grad_(True))[1]
    none = kept - kept.detach() + (0 if form == "kept" else 120)
    loss = budget_loss(none, 120, 0.5, form)
    loss.backward()
    assert math.isfinite(float(loss.detach())) and soft.grad is not None and float(soft.grad.abs().sum()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_keep_exact_masks(dtype):
    n = 4096
    rank, t = ranks(draw(2, n)), torch.full((2, 1), 0.6 + 0.3 / n, requires_grad=True)
    w = draw(2, n, seed=1).to(dtype) + 1
    out, kept = masked(w, rank, t)
    assert out.dtype == dtype and int(kept) == int(((rank.double() / n) > t.detach().double()).sum())
    out.backward(torch.ones_like(out))
    exact = masked(w.float(), rank, (again := t.detach().clone().requires_grad_(True)))[0]
    exact.backward(torch.ones_like(exact))
    assert t.grad is not None and t.grad.dtype == torch.float32
    torch.testing.assert_close(t.grad, again.grad)


def test_a_layer_keeps_one_matrix_more_for_backward():
    """Truth: what autograd itself saves, against a plain product with a mask."""

    def saved(function) -> int:
        size = [0]

        def count(x: Tensor) -> Tensor:
            if x.numel() == 32 * 64 and x.data_ptr() not in {w.data_ptr(), rank.data_ptr()}:
                size[0] += 1
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            torch.nn.functional.linear(x, function())
        return size[0]

    w, rank, t = draw(32, 64), ranks(draw(32, 64, seed=1)), torch.full((32, 1), 0.5, requires_grad=True)
    x = draw(5, 64, seed=2).requires_grad_(True)
    assert saved(lambda: masked(w, rank, t)[0]) == 1
    assert saved(lambda: w * soft_mask(rank.float() / 64, t)) > 1


# ------------------------------------------------------------------------------------------ exact budget


def exact(distances: list[Tensor], scores: list[Tensor], keep: int):
    names = [str(i) for i in range(len(distances))]
    return exact_masks(names, lambda n: distances[int(n)].clone(), lambda n: scores[int(n)], keep)


@pytest.mark.parametrize("keep", [1, 17, 100, 149, 150])
@pytest.mark.parametrize("levels", [0, 4, 1])
def test_exactly_as_many_stay_and_the_best_do(keep, levels):
    """Truth: a sort of all weights by distance, then by importance, then by place."""
    shapes = [(6, 10), (3, 30)]
    d = [draw(*s, seed=i) * 2 - 1 for i, s in enumerate(shapes)]
    d = [(x * levels).round() / 2 if levels else x for x in d]
    scores = [(draw(*s, seed=9 + i) * 5).floor() for i, s in enumerate(shapes)]
    found = exact(d, scores, keep)
    flat = [(-float(a), -float(b), i) for i, (a, b) in enumerate(
        (a, b) for x, y in zip(d, scores, strict=True) for a, b in zip(x.flatten(), y.flatten(), strict=True)
    )]  # fmt: skip
    wanted = torch.zeros(150, dtype=torch.bool)
    raw = int(sum((x > 0).sum() for x in d))
    best = sorted(flat)[:keep]
    wanted[[i for _, _, i in best]] = True
    assert torch.equal(torch.cat([m.flatten() for m in found.masks.values()]), wanted)
    assert (found.offset == 0) if keep == raw else (found.offset == pytest.approx(-best[-1][0]))


def test_zeros_never_stay_and_protected_weights_do():
    d = [torch.tensor([[0.9, -math.inf, -0.5, math.inf]])]
    found = exact(d, [torch.ones(1, 4)], 2)
    assert found.masks["0"].tolist() == [[True, False, False, True]]
    with pytest.raises(UsageError, match="only 3 are not zero"):
        exact(d, [torch.ones(1, 4)], 4)
    with pytest.raises(UsageError, match=r"min_kept keeps 1.*lower sparsity"):
        exact(d, [torch.ones(1, 4)], 0)
    assert not exact([d[0][:, :3]], [torch.ones(1, 3)], 0).masks["0"].any()


def test_scores_that_have_no_rank_are_refused():
    with pytest.raises(NumericalFailure, match="hold NaN"):
        uniform_scores(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(UsageError, match="must be a matrix"):
        uniform_scores(torch.ones(2, 0))
