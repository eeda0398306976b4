"""Masks of one matrix. Sources of truth: the card's numbers, plain loops over Python's sort, properties of budgets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.pruning import (
    Allocation,
    Pattern,
    Quota,
    budget,
    fit_counts,
    lowest,
    magnitude_mask,
    mask_from,
    nm_mask,
    uniform_ranks,
    wanda_mask,
    wanda_scores,
)

W = torch.tensor([[1, -2, 0.5, 0.1], [0.3, 0.2, -0.1, 4]])
NORMS = torch.tensor([1, 0.5, 4, 2])


def matrix_of(
    out: int, inputs: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(out, inputs, generator=generator)
    return w.to(dtype), torch.rand(inputs, generator=generator) + 0.1


def loops(scores: Tensor, counts: list[int]) -> Tensor:
    """Row by row, with Python's stable sort."""
    mask = torch.ones_like(scores, dtype=torch.bool)
    for i, row in enumerate(scores.tolist()):
        for j in sorted(range(len(row)), key=row.__getitem__)[: counts[i]]:
            mask[i, j] = False
    return mask


# ---------------------------------------------------------------------------------------- the card's example A


def test_example_a() -> None:
    scores = wanda_scores(W, NORMS)
    torch.testing.assert_close(scores, torch.tensor([[1, 1, 2, 0.2], [0.3, 0.1, 0.4, 8]]))
    s = uniform_ranks(scores) / 4
    assert s.tolist() == [[0.75, 0.75, 1, 0.25], [0.5, 0.25, 0.75, 1]]
    # Two of four go in each row; Lua's thresholds keep the tie of row 1, where Wanda's order decides it.
    assert wanda_mask(W, NORMS, 0.5).tolist() == [[False, True, True, False], [False, False, True, True]]


# ------------------------------------------------------------------------------------------------ whole numbers


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
    st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_counts_add_up_between_their_limits(units: list[tuple[int, float, float]], p: float) -> None:
    capacity = torch.tensor([size for size, _, _ in units])
    wanted = torch.tensor([size * share for size, share, _ in units], dtype=torch.float64)
    least = torch.tensor([math.floor(size * zero) for size, _, zero in units])
    total = budget(p, int(capacity.sum()))
    if total < int(least.sum()):
        with pytest.raises(UsageError, match=f"of which {int(least.sum())} are zero"):
            fit_counts(wanted, capacity, total, least=least)
        return
    counts = fit_counts(wanted, capacity, total, least=least)
    assert int(counts.sum()) == total
    assert bool((counts >= least).all() and (counts <= capacity).all())
    if abs(float(wanted.sum()) - total) < 1 and bool((wanted >= least).all()):
        assert bool(((counts - wanted).abs() < 1 + 1e-6).all())  # floor or ceiling: nothing is moved


def test_remainders_go_where_they_are_said_to() -> None:
    wanted, size = torch.tensor([1.5, 1.5, 1.9, 2.0]), torch.full((4,), 4)
    assert fit_counts(wanted, size, 7).tolist() == [2, 1, 2, 2]  # largest remainder, then the first
    priority = torch.tensor([3.0, 1.0, 2.0, 0.0])  # the last has no remainder to give
    assert fit_counts(wanted, size, 7, priority=priority).tolist() == [1, 2, 2, 2]
    assert fit_counts(torch.tensor([0.6 * 5, 0.7 * 10]), torch.tensor([5, 10]), 10).tolist() == [3, 7]


def test_zeros_beyond_a_share_make_the_others_give_way() -> None:
    counts = fit_counts(torch.full((3,), 2.0), torch.full((3,), 4), 6, least=torch.tensor([4, 0, 0]))
    assert counts.tolist() == [4, 1, 1]
    assert budget(0.5, 5) == 3 and budget(0.3, 10) == 3


# --------------------------------------------------------------------------------------------------- magnitude


@pytest.mark.parametrize(("out", "inputs", "p"), [(7, 5, 0.5), (1, 1, 0.4), (63, 33, 0.71), (3, 129, 0.02)])
def test_magnitude_against_a_sort(out: int, inputs: int, p: float) -> None:
    w, _ = matrix_of(out, inputs)
    flat = sorted(w.abs().flatten().tolist())
    for exact, count in ((True, budget(p, w.numel())), (False, math.floor(p * w.numel()))):
        mask = magnitude_mask(w, p, exact=exact)
        assert int((~mask).sum()) == count
        assert mask.tolist() == [
            [value > (flat[count - 1] if count else -1) for value in row] for row in w.abs().tolist()
        ]


def test_the_published_threshold_takes_ties_along_and_the_exact_one_does_not() -> None:
    w = torch.tensor([[1.0, -1.0, 1.0, 2.0]])
    assert magnitude_mask(w, 0.25, exact=False).tolist() == [[False, False, False, True]]
    assert magnitude_mask(w, 0.25).tolist() == [[False, True, True, True]]


# ------------------------------------------------------------------------------------------------------- Wanda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("out", "inputs", "p"), [(6, 10, 0.5), (63, 96, 0.6), (5, 129, 0.33), (1, 3, 0.9)])
def test_wanda_against_loops(out: int, inputs: int, p: float, dtype: torch.dtype) -> None:
    w, norms = matrix_of(out, inputs, dtype=dtype)
    scores = w.double().abs().to(torch.float32 if dtype != torch.float64 else dtype) * norms.to(
        torch.float32 if dtype != torch.float64 else dtype
    )
    each = math.floor(p * inputs + 1e-9)
    assert torch.equal(wanda_mask(w, norms, p, exact=False), loops(scores, [each] * out))
    rest = budget(p, out * inputs) - each * out
    following = scores.sort(1).values[:, min(each, inputs - 1)]
    counts = [each] * out
    for row in following.argsort(stable=True)[:rest].tolist():  # the rows whose next weight scores lowest
        counts[row] += 1
    assert torch.equal(wanda_mask(w, norms, p), loops(scores, counts))


def test_masks_do_not_change_when_activations_are_rescaled() -> None:
    """Invariant 2, and its negative: other norms give another mask."""
    w, norms = matrix_of(16, 24)
    for p in (0.5, 0.55):
        assert torch.equal(wanda_mask(w, norms, p), wanda_mask(w, 64 * norms, p))
        assert not torch.equal(wanda_mask(w, norms, p), wanda_mask(w, norms.flip(0), p))
        assert not torch.equal(wanda_mask(w, norms, p), magnitude_mask(w, p))
    scores = wanda_scores(w, norms)
    factors = torch.rand(16, 1) + 0.5
    assert torch.equal(uniform_ranks(scores), uniform_ranks(scores.double() * factors))


def test_thresholds_on_ranks_are_wanda() -> None:
    """Invariant 1: keep s > t with t = p equals Wanda where p · in is whole; with s >= t one more stays in each row."""
    w, norms = matrix_of(9, 20)
    s = uniform_ranks(wanda_scores(w, norms)) / 20
    mask = wanda_mask(w, norms, 0.6)
    assert torch.equal(mask, s > 0.6)
    assert torch.equal((s >= 0.6).sum(1), mask.sum(1) + 1)


def test_shares_of_rows_remove_what_learned_thresholds_remove() -> None:
    w, norms = matrix_of(9, 20)
    s, t = uniform_ranks(wanda_scores(w, norms)) / 20, torch.rand(9, 1)
    shares = (s <= t).sum(1).double() / 20
    found = Allocation(ratios={"w": shares}, axis="row")
    total = int((s <= t).sum())
    assert torch.equal(wanda_mask(w, norms, Quota.of(found, "w", (9, 20), total)), s > t)
    assert torch.equal(wanda_mask(w, norms, Quota.of(found, "w", (9, 20))), s > t)


def test_shares_of_columns_compare_ranks_of_rows() -> None:
    w, norms = matrix_of(32, 6)
    w = (
        w * torch.logspace(0, 3, 32)[:, None]
    )  # rows of very different size: scores alone would empty the small ones
    s = uniform_ranks(wanda_scores(w, norms)) / 6
    t = torch.rand(6)
    shares = (s <= t).sum(0).double() / 32
    quota = Quota.of(Allocation(ratios={"w": shares}, axis="column", group=1), "w", (32, 6))
    assert torch.equal(wanda_mask(w, norms, quota), s > t)
    assert not torch.equal(magnitude_mask(w, quota), s > t)
    assert torch.equal((~magnitude_mask(w, quota)).sum(0), (s <= t).sum(0))


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("prune", [magnitude_mask, lambda w, q: wanda_mask(w, torch.ones(w.shape[1]), q)])
def test_groups_of_odd_width(axis: str, prune: Callable[[Tensor, Quota], Tensor]) -> None:
    w, _ = matrix_of(5, 11)
    kind = Allocation(ratios={}, axis=axis, group=4)  # type: ignore[arg-type]
    shares = torch.rand(len(kind.units((5, 11))), dtype=torch.float64)
    found = Allocation(ratios={"w": shares}, axis=axis, group=4)  # type: ignore[arg-type]
    total = budget(found.of("w", (5, 11)), 55)
    mask = prune(w, Quota.of(found, "w", (5, 11), total))
    assert int((~mask).sum()) == total
    parts = [~mask[i] for i in range(5)] if axis == "row" else [~mask[:, i : i + 4] for i in (0, 4, 8)]
    for part, share in zip(parts, shares.tolist(), strict=True):
        assert abs(int(part.sum()) - share * part.numel()) < 1


def test_zeros_go_first_and_count() -> None:
    w, norms = matrix_of(6, 20)
    w[0, :15] = 0
    w[:, 3] = 0
    norms[7] = 0  # a dead input scores 0 as well, but its weights are not zero
    for mask in (magnitude_mask(w, 0.4), wanda_mask(w, norms, 0.4)):
        assert not bool((mask & (w == 0)).any())
        assert int((~mask).sum()) == 48 == int((w * mask == 0).sum())
    with pytest.raises(
        UsageError, match=r"12 weights are to be removed of 120, of which 20 are zero already"
    ):
        magnitude_mask(torch.where(torch.arange(120).view(6, 20) < 20, 0.0, 1.0), Quota.uniform(0.1, (6, 20)))


def test_the_cumulative_variant() -> None:
    """Rows lose as many as stay within one share of their sum: by loops over α; flat rows lose more weights."""
    w, norms = matrix_of(12, 30)
    w[:6] = w[:6].sign() * (1 + 0.01 * w[:6].abs())  # rows of nearly equal weights
    scores = wanda_scores(w, norms.fill_(1.0)).double()
    mask = wanda_mask(w, norms, 0.5, variant=True)
    counts = (~mask).sum(1)
    assert int(counts.sum()) == 180
    assert torch.equal(mask, loops(scores.float(), counts.tolist()))
    share = scores.sort(1).values.cumsum(1) / scores.sum(1, keepdim=True)
    reached = share.gather(1, (counts - 1)[:, None])
    beyond = share.gather(1, counts[:, None])
    assert float(reached.max()) <= float(beyond.min()) + 1e-12  # one α lies between all of them
    assert int(counts[:6].min()) != 15 and not torch.equal(mask, wanda_mask(w, norms, 0.5))
    assert int((~wanda_mask(w, norms, 0.5, exact=False, variant=True)).sum()) <= 180


# --------------------------------------------------------------------------------------------------------- N:M


@pytest.mark.parametrize("text", ["2:4", "1:4", "4:8", "3:5"])
def test_nm_against_all_subsets(text: str) -> None:
    """Of all subsets of N the kept one has the largest sum of scores."""
    pattern = Pattern.parse(text)
    w, norms = matrix_of(3, 2 * pattern.of)
    scores = wanda_scores(w, norms)
    mask = nm_mask(scores, w, pattern)
    for row in range(3):
        for first in range(0, scores.shape[1], pattern.of):
            part = scores[row, first : first + pattern.of].tolist()
            best = max(
                itertools.combinations(range(pattern.of), pattern.keep), key=lambda c: sum(part[i] for i in c)
            )
            assert tuple(mask[row, first : first + pattern.of].nonzero()[:, 0].tolist()) == best


@pytest.mark.parametrize("text", ["4:2", "4:4", "0:4", "2/4", "", "2:4:8", "-1:4"])
def test_patterns_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="N:M"):
        Pattern.parse(text)


def test_a_pattern_has_to_divide() -> None:
    with pytest.raises(UsageError, match="5 inputs, which aren't groups of 4"):
        nm_mask(torch.ones(2, 5), torch.ones(2, 5), Pattern(2, 4))


# ----------------------------------------------------------------------------------------------------- selection


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_lowest_is_a_stable_sort(units: int, size: int, seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (units, size), generator=generator).float()  # many ties
    counts = torch.randint(0, size + 1, (units,), generator=generator)
    assert torch.equal(~lowest(scores, counts), loops(scores, counts.tolist()))


# -------------------------------------------------------------------------------------------------- what is refused


def test_refusals(unchecked: None) -> None:
    w, norms = matrix_of(3, 4)
    with pytest.raises(NumericalFailure, match="NaN or infinity"):
        wanda_mask(w, norms * math.nan, 0.5)
    with pytest.raises(UsageError, match=r"\[3, 4\] was given norms of \[5\]"):
        wanda_scores(w, torch.ones(5))
    with pytest.raises(UsageError, match="Conv1D stores its weight transposed"):
        mask_from(w.T, w, Quota.uniform(0.5, (3, 4)), rows=True)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(UsageError, match="share of weights to remove"):
            magnitude_mask(w, p)
    assert bool(wanda_mask(w, norms, 0.0).all()) and not bool(wanda_mask(w, norms, 1.0).any())
    rows = Quota.of(Allocation(ratios={"w": torch.full((3,), 0.5)}, axis="row"), "w", (3, 4))
    with pytest.raises(UsageError, match="finds the shares of rows itself"):
        wanda_mask(w, norms, rows, variant=True)
