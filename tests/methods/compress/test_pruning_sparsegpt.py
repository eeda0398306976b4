"""SparseGPT on one matrix. Sources of truth: the card's numbers, and the optimal brain surgeon row by row, with an
explicit inverse of what is left in float64 and no Cholesky factor."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.obs import inverse_factor
from gnomon.methods.compress.pruning import Allocation, Pattern, Quota, budget, sparsegpt


def problem(out: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(W, X [tokens, in], H), inputs correlated."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    x = torch.randn(4 * inputs, inputs, generator=generator, dtype=torch.float64) @ mix
    w = torch.randn(out, inputs, generator=generator, dtype=torch.float64)
    return w, x, x.T @ x


def damped(h: Tensor, damping: float) -> Tensor:
    return h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)


def surgeon(
    w: Tensor, h: Tensor, block: int, counts: list[int], pattern: Pattern | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, removed): rows apart, each with its own inverse, from which fixed columns are eliminated one by one."""
    w, (out, inputs) = w.clone(), w.shape
    removed = torch.zeros_like(w, dtype=torch.bool)
    corner = [float(torch.linalg.inv(h[j:, j:])[0, 0]) for j in range(inputs)]
    inverse = torch.linalg.inv(h)
    for b, first in enumerate(range(0, inputs, block)):
        last = min(first + block, inputs)
        if pattern is None:
            scored = sorted(
                (float(w[i, j]) ** 2 / corner[j], i, j) for i in range(out) for j in range(first, last)
            )
            for _, i, j in scored[: counts[b]]:
                removed[i, j] = True
        for j in range(first, last):
            if pattern is not None and j % pattern.of == 0:
                for i in range(out):
                    group = sorted(
                        range(j, j + pattern.of), key=lambda k, i=i: float(w[i, k]) ** 2 / corner[k]
                    )
                    removed[i, group[: pattern.of - pattern.keep]] = True
            for i in range(out):
                if removed[i, j]:
                    w[i, j:] -= w[i, j] / inverse[0, 0] * inverse[0]
                    w[i, j] = 0
            inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    return w, removed


def error(w: Tensor, after: Tensor, x: Tensor) -> Tensor:
    """‖(W − Ŵ) X‖² of each row."""
    return ((w - after) @ x.T).square().sum(1)


def test_example_e() -> None:
    h = torch.tensor([[2, 0.5], [0.5, 1]], dtype=torch.float64)
    w = torch.tensor([[1.0, 0.8]], dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    saliency = w[0].square() / inverse.diagonal()
    torch.testing.assert_close(saliency, torch.tensor([1.75, 0.56], dtype=torch.float64))
    # Index 1 is the last column, after which nothing can make up for it: swap the two, so that it is the first.
    done = sparsegpt(w.flip(1), h.flip(0, 1), Quota.uniform(0.5, (1, 2)), damping=0.0)
    torch.testing.assert_close(done.weight, torch.tensor([[0, 1.2]], dtype=torch.float64))
    assert done.mask.tolist() == [[False, True]] and done.loss == pytest.approx(0.56)
    change = done.weight.flip(1) - w
    assert float(0.5 * change @ h @ change.T) == pytest.approx(0.28)  # half of what the sweep accounts for


@pytest.mark.parametrize(
    ("out", "inputs", "p", "block"), [(5, 12, 0.5, 4), (3, 13, 0.6, 5), (8, 9, 0.3, 128), (1, 7, 0.8, 1)]
)
@pytest.mark.parametrize("exact", [True, False])
def test_against_the_surgeon(out: int, inputs: int, p: float, block: int, exact: bool) -> None:
    w, _, h = problem(out, inputs)
    done = sparsegpt(w, h, p, block=block, exact=exact)
    sizes = [(min(first + block, inputs) - first) * out for first in range(0, inputs, block)]
    counts = [math.floor(p * size + 1e-9) for size in sizes]
    if exact:
        rest = budget(p, out * inputs) - sum(counts)
        for b in sorted(range(len(sizes)), key=lambda b: counts[b] - p * sizes[b])[:rest]:
            counts[b] += 1
    expected, removed = surgeon(w, damped(h, 0.01), block, counts)
    assert torch.equal(done.mask, ~removed)
    torch.testing.assert_close(done.weight, expected, rtol=1e-8, atol=1e-9)
    assert int((done.weight == 0).sum()) == (budget(p, out * inputs) if exact else sum(counts))
    quick = sparsegpt(w.float(), h, p, block=block, exact=exact)
    assert quick.weight.dtype == torch.float32
    torch.testing.assert_close(quick.weight.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", ["2:4", "1:4"])
def test_nm_against_the_surgeon(text: str) -> None:
    w, _, h = problem(4, 12)
    pattern = Pattern.parse(text)
    expected, removed = surgeon(w, damped(h, 0.01), 4, [], pattern)
    for block in (4, 6, 128):  # 6 is rounded up to whole groups
        done = sparsegpt(w, h, pattern, block=block)
        assert torch.equal(done.mask, ~removed)
        torch.testing.assert_close(done.weight, expected, rtol=1e-8, atol=1e-9)


def test_the_loss_is_the_error_of_the_outputs() -> None:
    w, x, h = problem(6, 16)
    done = sparsegpt(w, h, 0.5, damping=0.0, block=4)
    assert done.loss == pytest.approx(float(error(w, done.weight, x).sum()), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_removed_nothing_changed_and_updates_help(seed: int) -> None:
    """Invariant 8: p = 0 gives W back; summed over rows, the same mask without updates is worse."""
    w, x, h = problem(16, 24, seed)
    same = sparsegpt(w, h, 0.0)
    assert torch.equal(same.weight, w) and bool(same.mask.all()) and same.loss == 0
    done = sparsegpt(w, h, 0.5)
    updated, plain = error(w, done.weight, x), error(w, w * done.mask, x)
    assert float(updated.sum()) < 0.9 * float(plain.sum())  # a sweep without updates fails


def test_shares_of_column_groups() -> None:
    """The groups are the blocks; each loses its own share (Lua with SparseGPT)."""
    w, _, h = problem(6, 11)
    shares = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    quota = Quota.of(Allocation(ratios={"w": shares}, axis="column", group=4), "w", (6, 11), 12 + 6 + 18)
    done = sparsegpt(w, h, quota)
    expected, removed = surgeon(w, damped(h, 0.01), 4, [12, 6, 18])
    assert torch.equal(done.mask, ~removed)
    torch.testing.assert_close(done.weight, expected, rtol=1e-8, atol=1e-9)


def test_shares_of_rows() -> None:
    w, x, h = problem(7, 22)
    shares = torch.tensor([0, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0], dtype=torch.float64)
    found = Allocation(ratios={"w": shares}, axis="row")
    total = budget(found.of("w", (7, 22)), 154)
    done = sparsegpt(w, h, Quota.of(found, "w", (7, 22), total), block=5)
    assert int((done.weight == 0).sum()) == total
    assert float(((~done.mask).sum(1) - shares * 22).abs().max()) < 1
    assert float(error(w, done.weight, x).sum()) < float(error(w, w * done.mask, x).sum())
    assert torch.equal(done.weight[0], w[0])


@pytest.mark.parametrize("axis", ["matrix", "row", "column"])
@pytest.mark.parametrize("p", [0.2, 0.5])
def test_dead_inputs_and_zeros_are_part_of_the_budget(axis: str, p: float) -> None:
    """A fifth of the weights is zero or reads nothing; some rows are all zero, so no update makes them anything."""
    w, x, _ = problem(10, 16)
    w[:1] = 0
    x[:, 3] = 0
    w[4, 8:10] = 0
    found = Allocation(ratios={"w": p}, axis=axis, group=4)  # type: ignore[arg-type]
    done = sparsegpt(w, x.T @ x, Quota.of(found, "w", (10, 16), budget(p, 160)), block=5)
    assert int((done.weight == 0).sum()) == budget(p, 160) == int((~done.mask).sum())
    assert not bool(done.mask[:, 3].any())
    assert done.weight.isfinite().all()


def test_more_dead_inputs_than_the_budget() -> None:
    w, x, _ = problem(4, 10)
    x[:, :5] = 0
    exact = sparsegpt(w, x.T @ x, 0.2)
    assert int((exact.weight == 0).sum()) == 8 and bool(exact.mask[:, 5:].all())
    published = sparsegpt(w, x.T @ x, 0.2, exact=False)
    assert int((published.weight == 0).sum()) >= 20


def test_damping_is_raised_and_said(caplog: pytest.LogCaptureFixture) -> None:
    w, _, _ = problem(3, 4)
    h = torch.tensor([[1, 3, 0, 0], [3, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]], dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        done = sparsegpt(w, h, 0.5)
    assert done.damping > 0.01 and done.weight.isfinite().all()
    with pytest.raises(NumericalFailure, match="NaN or infinity"):
        sparsegpt(w, h * math.nan, 0.5)


def test_a_shared_factor_is_the_same() -> None:
    w, _, h = problem(3, 8)
    assert torch.equal(sparsegpt(w, inverse_factor(h), 0.5).weight, sparsegpt(w, h, 0.5).weight)


def test_refusals(unchecked: None) -> None:
    w, _, h = problem(3, 8)
    with pytest.raises(UsageError, match="about 7 inputs, but the matrix has 8"):
        sparsegpt(w, h[:7, :7], 0.5)
    with pytest.raises(UsageError, match="block=0"):
        sparsegpt(w, h, 0.5, block=0)
    with pytest.raises(UsageError, match="aren't groups of 4"):
        sparsegpt(w[:, :7], h[:7, :7], Pattern(2, 4))
    with pytest.raises(NumericalFailure, match="matrix holds NaN"):
        sparsegpt(w * math.nan, h, 0.5)
