"""The update direction: worked examples by hand, brute force in float64, what no feasible draw may beat."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.seeding import seeded
from gnomon.methods.optim.numuon import (
    BACK_ENDS,
    lmo_spectral_nuclear,
    newton_schulz,
    spectral_report,
    spectrum,
    top_k,
)
from gnomon.methods.optim.numuon import lmo as module

ABC = module.NS_COEFFICIENTS
SIX = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
POLAR = [[-0.551003, 0.727825], [0.136159, 0.561065], [0.823320, 0.394306]]
TOP_ONE = [[0.142420, 0.180406], [0.325147, 0.411869], [0.507874, 0.643332]]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def near(value: Tensor, expected: object, atol: float = 1.5e-6) -> None:
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=value.dtype), atol=atol, rtol=0)


def best_value(m: Tensor, rho: float, tau: float) -> float:
    """The knapsack, one direction after the other, from singular values by eigenvalues of MᵀM in float64."""
    gram = m.double().T @ m.double() if m.shape[0] >= m.shape[1] else m.double() @ m.double().T
    value, left = 0.0, tau
    for squared in reversed(torch.linalg.eigvalsh(gram).clamp(min=0).tolist()):
        taken = min(rho, left)
        value, left = value - taken * math.sqrt(squared), left - taken
    return value


# -------------------------------------------------------------------------------------- worked examples


def test_example_a() -> None:
    near(
        newton_schulz(torch.tensor([[3.0, 0, 0], [0, 4, 0]]), dtype=torch.float64)[:, :2].diag(),
        [0.722876, 1.119204],
    )
    near(torch.linalg.svdvals(newton_schulz(SIX, dtype=torch.float64)), [0.817573, 0.697974])
    near(top_k(SIX, 2, method="svd").direction, POLAR)
    for method in BACK_ENDS:
        near(top_k(SIX, 1, method=method, generator=generator()).direction, TOP_ONE)


@pytest.mark.parametrize(
    ("m", "tau", "value", "weights"),
    [(SIX, 1.5, -9.782668, [1, 0.5]), (torch.diag(torch.tensor([4.0, 2, 1])), 2.5, -6.5, [1, 1, 0.5])],
)
def test_example_b(m: Tensor, tau: float, value: float, weights: list[float]) -> None:
    delta = lmo_spectral_nuclear(m, 1.0, tau)
    assert float((m * delta).sum()) == pytest.approx(value, abs=2e-6)
    near(torch.linalg.svdvals(delta), weights)
    if m.shape == (3, 3):
        near(delta, torch.diag(torch.tensor([-1.0, -1, -0.5])))


def test_newton_schulz_is_torchs_bit_for_bit() -> None:
    for shape in ((24, 16), (16, 24), (1, 9), (9, 1), (7, 7)):
        for dtype in (torch.float32, torch.bfloat16):
            m = randn(*shape).to(dtype)
            before = m.clone()
            ours = newton_schulz(m)
            assert torch.equal(m, before)
            assert torch.equal(ours, torch_newton_schulz(m.clone(), ABC, 5, 1e-7))


# ------------------------------------------------------------------------------------------- invariants


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    rho=st.floats(0.1, 3),
    budget=st.floats(0.05, 9),
    seed=st.integers(0, 999),
)
def test_no_feasible_draw_beats_the_oracle(
    rows: int, columns: int, rho: float, budget: float, seed: int
) -> None:
    m = randn(rows, columns, seed=seed, dtype=torch.float64)
    tau = rho * budget
    delta = lmo_spectral_nuclear(m, rho, tau)
    sigma = torch.linalg.svdvals(delta)
    assert float(sigma.max()) <= rho * (1 + 1e-9)
    assert float(sigma.sum()) <= tau * (1 + 1e-9)
    value = float((m * delta).sum())
    assert value == pytest.approx(best_value(m, rho, tau), rel=1e-6, abs=1e-9)
    draws = randn(50, rows, columns, seed=seed + 1, dtype=torch.float64)
    draws[:25] = delta + 0.1 * draws[:25]  # also near the optimum
    norms = torch.linalg.svdvals(draws)
    shrink = torch.minimum(rho / norms[:, 0], tau / norms.sum(1))  # onto the edge of the feasible set
    assert float((draws * shrink[:, None, None] * m).sum((1, 2)).min()) >= value - 1e-9


@pytest.mark.parametrize("method", BACK_ENDS)
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (33, 33), (1, 9), (9, 1), (63, 129)])
def test_exactly_k_singular_values_are_one(method: str, shape: tuple[int, int]) -> None:
    m = randn(*shape)
    q = min(shape)
    for k in {1, math.ceil(q / 4), math.ceil(q / 2), max(1, q - 1), q}:
        f = top_k(m, k, method=method, generator=generator())
        sigma = torch.linalg.svdvals(f.direction.double())
        near(sigma[:k], torch.ones(k), atol=1e-5)
        assert sigma[k:].numel() == 0 or float(sigma[k:].max()) < 1e-6
        reached = float((m.double() * f.direction).sum())
        best = -best_value(m, 1.0, k)
        assert reached <= best * (1 + 1e-6)
        assert reached >= best * (1 - 1e-5 if method in ("svd", "gram") else 0.9)


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5])
def test_gram_meets_the_same_tolerance(condition: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectra with σ_1/σ_q up to 1e5; where squaring loses too much, the SVD is what runs."""
    fallbacks: list[int] = []
    by_svd = module._by_svd
    monkeypatch.setattr(module, "_by_svd", lambda a, k: (fallbacks.append(k), by_svd(a, k))[1])
    u, v = (torch.linalg.qr(randn(n, 48, seed=n, dtype=torch.float64)).Q for n in (80, 64))
    sigma = torch.logspace(0, -math.log10(condition), 48, dtype=torch.float64)
    m = ((u * sigma) @ v.T).float()
    for k in (4, 24, 36, 48):
        d = top_k(m, k, method="gram").direction.double()
        near(torch.linalg.svdvals(d), [1.0] * k + [0.0] * (64 - k), atol=1e-5)
        assert float((m.double() * d).sum()) == pytest.approx(float(sigma[:k].sum()), rel=1e-5)
        if condition < 1e2:
            near(d, u[:, :k] @ v[:, :k].T, atol=1e-5)
    assert bool(fallbacks) == (condition > 1e2)


def test_krylovs_share_of_the_best_value() -> None:
    """Invariant 8: what L iterations capture, cold start, on the card's matrix; nothing is left at L = 4."""
    shares = {}
    for iters in (1, 2, 3, 4):
        found = []
        for seed in range(3):
            m = randn(256, 192, seed=seed) * torch.linspace(1, 0.05, 192)
            f = top_k(m, 48, iters=iters, generator=generator(seed + 10))
            found.append(float((m * f.direction).sum()) / -best_value(m, 1.0, 48))
        shares[iters] = sum(found) / 3
    assert shares[1] == pytest.approx(0.939, abs=0.004)
    assert shares[2] == pytest.approx(0.9973, abs=0.001)
    assert shares[3] == pytest.approx(0.999999, abs=2e-6)
    assert shares[4] == pytest.approx(1, abs=1e-6)


def test_lowrank_is_torchs_with_the_same_draws() -> None:
    m = randn(60, 40)
    with seeded(5):
        u, s, v = torch.svd_lowrank(m, q=18, niter=2)
    ours = top_k(m, 10, method="lowrank", generator=generator(5))
    torch.testing.assert_close(ours.sigma, s[:10], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.direction, u[:, :10] @ v[:, :10].T, rtol=0, atol=2e-4)


@pytest.mark.parametrize("method", ["krylov", "lowrank"])
def test_a_warm_start_is_used(method: str) -> None:
    """Begun with the answer, one iteration keeps it; Gaussian columns fill up what is missing."""
    m = randn(64, 48)
    exact = top_k(m, 8, method="svd")
    cold, warm = (
        top_k(m, 8, method=method, iters=1, oversample=2, start=start, generator=generator(3))
        for start in (None, exact.v)
    )
    assert float(warm.sigma.sum()) == pytest.approx(float(exact.sigma.sum()), rel=1e-6)
    assert float(cold.sigma.sum()) < 0.99 * float(exact.sigma.sum())
    half = top_k(m, 8, method=method, iters=1, oversample=2, start=exact.v[:, :4], generator=generator(3))
    assert float(cold.sigma.sum()) < float(half.sigma.sum()) < float(exact.sigma.sum())
    wide = top_k(m.T, 8, method=method, iters=1, oversample=2, start=exact.v, generator=generator(3))
    torch.testing.assert_close(wide.direction.T, warm.direction, rtol=0, atol=1e-5)


def test_orthogonal_equivariance_and_scale_invariance() -> None:
    m = randn(12, 9, dtype=torch.float64)
    a, b = (torch.linalg.qr(randn(n, n, seed=n, dtype=torch.float64)).Q for n in (12, 9))
    for method in ("svd", "gram"):
        d = top_k(m, 4, method=method).direction
        torch.testing.assert_close(top_k(a @ m @ b, 4, method=method).direction, a @ d @ b)
        for c in (1e-30, 7.0, 1e30):
            torch.testing.assert_close(top_k(c * m, 4, method=method).direction, d)


@pytest.mark.parametrize("method", BACK_ENDS)
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_directions_that_rounding_made_get_no_step(method: str, scale: float) -> None:
    """Rank 2 seen through float32, at scales whose squares under- or overflow."""
    m = (randn(50, 2) @ randn(2, 40, seed=1)) * scale
    f = top_k(m, 12, method=method, generator=generator())
    assert f.sigma.shape == (2,)
    near(torch.linalg.svdvals(f.direction)[:3], [1, 1, 0], atol=1e-5)
    u, _, vh = torch.linalg.svd(m.double() / scale)
    near(f.direction.double(), u[:, :2] @ vh[:2], atol=1e-5)
    nothing = top_k(torch.zeros(5, 4), 3, method=method)
    assert nothing.sigma.shape == (0,)
    assert torch.equal(nothing.direction, torch.zeros(5, 4))


def test_sixteen_bits_are_factored_in_float32() -> None:
    m = randn(20, 12).bfloat16()
    for method in BACK_ENDS:
        f = top_k(m, 5, method=method, generator=generator())
        assert f.u.dtype == torch.float32
    torch.testing.assert_close(
        top_k(m, 5, method="svd").direction, top_k(m.float(), 5, method="svd").direction
    )


# ------------------------------------------------------------------------------------------------ spectra


def test_spectrum_by_hand() -> None:
    """σ = (4, 2, 2): Σσ² = 24; p = (2/3, 1/6, 1/6); two give 20/24 < .95."""
    found = spectrum(torch.diag(torch.tensor([2.0, 4, 2]))[:, [1, 0, 2]])
    assert found.stable_rank == pytest.approx(1.5)
    assert found.effective_rank == pytest.approx((2 / 3) ** (-2 / 3) * (1 / 6) ** (-1 / 3))
    assert found.rank_95 == 3
    assert spectrum(torch.eye(20)).rank_95 == 19  # exactly 95 % is enough
    assert spectrum(torch.eye(7, 5) * 1e-30).effective_rank == pytest.approx(5)
    one = spectrum(torch.ones(3, 8))
    assert (one.stable_rank, one.rank_95) == (pytest.approx(1), 1)
    zero = spectrum(torch.zeros(3, 8))
    assert (zero.shape, zero.stable_rank, zero.effective_rank, zero.rank_95) == ((3, 8), 0, 0, 0)


def test_spectral_report_names_hidden_matrices_frozen_or_not() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "map": torch.nn.Linear(4, 6)})
    model.requires_grad_(False)
    report = spectral_report(model)
    assert list(report) == ["map.weight"]
    assert report["map.weight"] == spectrum(model["map"].weight)
    assert not any(p.requires_grad for p in model.parameters())


# ----------------------------------------------------------------------------------------------- bad input


def test_bad_input() -> None:
    m = randn(4, 3)
    for rho, tau in ((0, 1), (1, -1), (1, math.nan), (math.inf, 1)):
        with pytest.raises(UsageError, match="must be positive and finite: it bounds the update's"):
            lmo_spectral_nuclear(m, rho, tau)
    for bad in (math.nan, math.inf):
        with pytest.raises(
            NumericalFailure, match=r"A 4 x 3 matrix holds (nan|inf), so it has no singular vectors"
        ):
            top_k(m.clone().index_fill_(0, torch.tensor([1]), bad), 1)
        with pytest.raises(NumericalFailure, match="so it has no singular values"):
            spectrum(torch.full((2, 2), bad))
    for k in (0, 4):
        with pytest.raises(UsageError, match=rf"k={k} must lie in \[1, 3\], the smaller side of \(4, 3\)"):
            top_k(m, k)
    with pytest.raises(
        UsageError, match=r"Unknown way to the top singular vectors 'krilov'\. Did you mean 'krylov'"
    ):
        top_k(m, 1, method="krilov")
    with pytest.raises(UsageError, match="krylov draws a random block: give a generator"):
        top_k(randn(40, 30), 2)
