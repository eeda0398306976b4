"""Factors of one matrix. Sources of truth: the card's worked numbers (oracle D), the Eckart-Young error, values by
hand, random competitors, and the textbook form with an explicit inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.lowrank import (
    asvd_factors,
    asvd_scale,
    factor_asvd,
    factor_svd,
    factor_svd_llm,
    rank_for,
    svd_factors,
    svd_llm_factors,
    whitening,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(w: Tensor, x: Tensor, a: Tensor, b: Tensor) -> float:
    w, x, a, b = (one.double() for one in (w, x, a, b))
    return float(((w @ x - a @ (b @ x)) ** 2).sum())


W = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
X = torch.tensor([[0.1, -0.1, 0.1], [3.0, 2.0, -4.0]], dtype=torch.float64)


def test_oracle_d() -> None:
    """The card's item 13."""
    plain, scale = svd_factors(W, 1), asvd_scale(X.abs().mean(1))
    assert loss(W, X, *plain) == pytest.approx(29.0, abs=1e-10)
    assert loss(W, X, *asvd_factors(W, 1, scale)) == pytest.approx(0.12, abs=1e-10)
    assert loss(W, X, *svd_llm_factors(W, 1, X @ X.T)) == pytest.approx(0.107540, abs=1e-6)
    sigma = factor_svd_llm(W, X @ X.T).sigma
    assert sigma.tolist() == pytest.approx([5.386322, 0.327933], abs=1e-6)
    assert float(sigma[1]) ** 2 == pytest.approx(loss(W, X, *svd_llm_factors(W, 1, X @ X.T)), rel=1e-9)


def test_asvd_by_hand() -> None:
    """W D = diag(2·√.09, 1·√4) = diag(.6, 2): the second direction comes first, A = [0, √2], B = [0, √2 / 2]."""
    scale = asvd_scale(torch.tensor([0.09, 4.0], dtype=torch.float64), eps=1e-12)
    assert scale.tolist() == pytest.approx([0.3, 2.0])
    a, b = asvd_factors(W, 1, scale)
    assert (a * a[1].sign()).flatten().tolist() == pytest.approx([0, 2**0.5])
    assert (b * b[0, 1].sign()).flatten().tolist() == pytest.approx([0, 2**0.5 / 2])
    assert asvd_scale(torch.tensor([0.0, 9.0]), alpha=1.0).tolist() == pytest.approx([1e-6, 9.000001])
    assert asvd_scale(torch.tensor([0.0, 9.0]), alpha=0.0).tolist() == pytest.approx([1.000001, 1.000001])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 13), st.integers(1, 13), st.integers(1, 40), st.data())
def test_errors_are_the_tails_of_the_spectra(m: int, n: int, tokens: int, data: st.DataObject) -> None:
    """‖W − AB‖², ‖(W − AB) D‖² and ‖(W − AB) X‖² = Σ_{i>k} σ_i², at every rank, also with fewer tokens than inputs."""
    k = data.draw(st.integers(1, min(m, n)))
    w, x, scale = drawn(m, n), drawn(n, tokens, seed=1), drawn(n, seed=2).abs() + 0.1
    eye = torch.eye(n, dtype=torch.float64)
    for factored, inputs in (
        (factor_svd(w), eye),
        (factor_asvd(w, scale), torch.diag(scale)),
        (factor_svd_llm(w, x @ x.T), x),
    ):
        tail = float((factored.sigma[k:] ** 2).sum())
        shift = 1e-5 * float(w.square().sum()) if inputs is x and tokens < n else 1e-9  # H had to be shifted
        assert loss(w, inputs, *factored.cut(k)) == pytest.approx(tail, rel=1e-6, abs=shift)
    if tokens >= n:  # H is positive definite, and nothing was shifted
        sigma = torch.linalg.svdvals(w @ x)
        whole = factor_svd_llm(w, x @ x.T).sigma[: len(sigma)]
        torch.testing.assert_close(whole, sigma[: len(whole)], rtol=1e-6, atol=1e-7)
    a, b = factor_svd(w).cut(k)
    torch.testing.assert_close(a.square().sum(0), b.square().sum(1))  # both carry Σ^½


def test_svd_llm_equals_the_form_with_an_inverse() -> None:
    w, x = drawn(9, 6), drawn(6, 50, seed=1)
    s = torch.linalg.cholesky(x @ x.T)
    u, sigma, vt = torch.linalg.svd(w @ s, full_matrices=False)
    a, b = svd_llm_factors(w, 3, x @ x.T)
    expected = (u[:, :3] * sigma[:3]) @ vt[:3] @ torch.linalg.inv(s)
    torch.testing.assert_close(a @ b, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        a, u[:, :3] * sigma[:3].sqrt() * (a[0] * u[0, :3]).sign(), rtol=1e-9, atol=1e-9
    )


def test_no_competitor_beats_svd_llm() -> None:
    """Perturbed factors, the other methods, and factors of random subspaces with the best second factor."""
    w, x = drawn(8, 6), torch.diag(torch.logspace(0, 2, 6, dtype=torch.float64)) @ drawn(6, 40, seed=1)
    a, b = svd_llm_factors(w, 2, x @ x.T)
    best = loss(w, x, a, b)
    for seed in range(200):
        size = 10.0 ** -(seed % 5)
        da, db = drawn(8, 2, seed=seed), drawn(2, 6, seed=1000 + seed)
        assert loss(w, x, a + size * da, b + size * db) >= best - 1e-9
        q = torch.linalg.qr(da).Q
        assert loss(w, x, q, q.T @ w) >= best - 1e-9
    assert loss(w, x, *svd_factors(w, 2)) > 1.01 * best
    assert loss(w, x, *asvd_factors(w, 2, asvd_scale(x.abs().mean(1)))) > best
    cut = w.clone()
    cut[2:] = 0  # a compressor that keeps two rows and thinks nothing of it
    assert loss(w, x, cut, torch.eye(6, dtype=torch.float64)) > 1.01 * best


def test_with_uncorrelated_unit_inputs_all_three_agree() -> None:
    w, eye = drawn(7, 5), torch.eye(5, dtype=torch.float64)
    plain = torch.matmul(*svd_factors(w, 2))
    torch.testing.assert_close(torch.matmul(*svd_llm_factors(w, 2, 3 * eye)), plain)
    torch.testing.assert_close(torch.matmul(*asvd_factors(w, 2, torch.ones(5, dtype=torch.float64))), plain)


def test_calibration_without_tokens_is_the_plain_svd() -> None:
    w = drawn(7, 5)
    a, b = svd_llm_factors(w, 2, torch.zeros(5, 5, dtype=torch.float64))
    torch.testing.assert_close(a @ b, torch.matmul(*svd_factors(w, 2)))


def test_dead_inputs_cost_nothing_and_stay_finite() -> None:
    w, x = drawn(7, 5), drawn(5, 30, seed=1)
    x[[1, 3]] = 0
    a, b = svd_llm_factors(w, 3, x @ x.T)
    assert torch.isfinite(a).all() and torch.isfinite(b).all() and float(b.abs().max()) < 50
    assert loss(w, x, a, b) < 1e-4  # three inputs live, so rank 3 is enough
    scale = asvd_scale(x.abs().mean(1))
    assert loss(w, x, *asvd_factors(w, 3, scale)) < 1e-6


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_near_singular_calibration(size: float) -> None:
    """Three near-equal inputs, one linear combination: condition number about 1e24, whatever the scale."""
    x = drawn(6, 100, seed=1)
    x[1] = x[0] * (1 + 1e-12)
    x[5] = x[2] - 2 * x[3]
    x *= size
    w = drawn(9, 6)
    a, b = svd_llm_factors(w, 4, x @ x.T)
    if size >= 1:  # X has four directions
        assert loss(w, x, a, b) / float((w @ x).square().sum()) < 1e-6
    else:  # H is far below the card's shift of 1e-6, which makes it the plain SVD
        torch.testing.assert_close(a @ b, torch.matmul(*svd_factors(w, 4)), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(b).all() and float(b.abs().max()) < 1e3 * float(w.abs().max()) / min(size, 1) ** 0.5
    s = whitening(x @ x.T)
    assert torch.equal(s, s.tril())
    assert (s @ s.T - x @ x.T).norm() <= 1e-5 * max((x @ x.T).norm(), 1)


def test_zero_weights_and_rank_one() -> None:
    zero = torch.zeros(4, 3)
    for a, b in (svd_factors(zero, 2), svd_llm_factors(zero, 2, torch.eye(3, dtype=torch.float64))):
        assert torch.equal(a @ b, torch.zeros_like(a @ b)) and torch.isfinite(a).all()
    one = torch.ones(4, 3)
    torch.testing.assert_close(torch.matmul(*svd_factors(one, 1)), one)


def test_bf16_is_factored_in_float32() -> None:
    w = drawn(6, 5).bfloat16()
    a, b = svd_factors(w, 5)
    assert a.dtype == torch.float32
    torch.testing.assert_close(a @ b, w.float(), rtol=1e-5, atol=1e-5)
    assert svd_llm_factors(w, 5, torch.eye(5))[0].dtype == torch.float64


def test_ranks_of_smollm2() -> None:
    """192 × 576: ⌊κ·144⌋; 576 × 576: ⌊κ·288⌋; 1536 × 576: ⌊κ·418.9⌋; never 0."""
    for keep in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        assert rank_for(keep, 192, 576) == round(keep * 1440) // 10
        assert rank_for(keep, 576, 192) == rank_for(keep, 192, 576)
        assert rank_for(keep, 576, 576) == round(keep * 2880) // 10
    assert rank_for(0.5, 1536, 576) == 209
    assert rank_for(0.001, 8, 8) == 1
    assert rank_for(0.3, 20, 20) == 3  # .3 · 10 in binary is below 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(bad: float) -> None:
    w, gram = drawn(3, 3), torch.eye(3, dtype=torch.float64)
    w[1, 1] = bad
    for call in (lambda: svd_factors(w, 1), lambda: svd_llm_factors(w, 1, gram)):
        with pytest.raises(NumericalFailure, match="3 x 3 weight holds NaN"):
            call()
    gram[0, 0] = bad
    with pytest.raises(NumericalFailure, match="Gram"):
        svd_llm_factors(drawn(3, 3), 1, gram)
    with pytest.raises(NumericalFailure, match="finite"):
        asvd_scale(torch.tensor([1.0, bad]))


def test_bad_requests() -> None:
    with pytest.raises(UsageError, match=r"rank k=4 must lie in \[1, 3\]"):
        svd_factors(drawn(3, 5), 4)
    with pytest.raises(UsageError, match="k=0"):
        svd_factors(drawn(3, 5), 0)
    with pytest.raises(NumericalFailure, match="positive"):
        asvd_factors(W, 1, torch.tensor([1.0, 0.0]))
    with pytest.raises(UsageError, match="alpha=-1"):
        asvd_scale(torch.ones(2), alpha=-1)
    for keep in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="keep="):
            rank_for(keep, 3, 3)
    with pytest.raises(UsageError, match="nothing to factor"):
        svd_factors(torch.zeros(0, 3), 1)
