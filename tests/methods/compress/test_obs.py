"""Sources of truth: the plain inverse, the inverse after fixing leading columns, a matrix that needs more damping."""

import pytest
import torch

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.obs import inverse_factor


def gram(n, tokens, seed=0):
    x = torch.randn(tokens, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.T @ x


@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
def test_the_factor_gives_the_damped_inverse(damping):
    h = gram(7, 40)
    before = h.clone()
    upper, used, dead = inverse_factor(h, damping=damping)
    torch.testing.assert_close(h, before, rtol=0, atol=0)
    assert used == damping and not dead.any()
    assert (upper.diagonal() > 0).all() and not upper.tril(-1).any()
    damped = h + damping * h.diagonal().mean() * torch.eye(7, dtype=h.dtype)
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(damped))


def test_diagonal_squared_is_the_inverse_once_leading_columns_are_fixed():
    h = gram(6, 30, seed=1)
    upper = inverse_factor(h, damping=0.0).upper
    for j in range(6):
        rest = torch.linalg.inv(h[j:, j:])
        torch.testing.assert_close(upper[j, j] ** 2, rest[0, 0])
        torch.testing.assert_close(upper[j, j:] / upper[j, j], rest[0] / rest[0, 0])


def test_a_column_that_no_token_reaches_is_told():
    h = gram(4, 20)
    h[2] = h[:, 2] = 0
    found = inverse_factor(h, damping=0.0)
    assert found.dead.tolist() == [False, False, True, False]
    assert found.upper[2, 2] == 1 and torch.isfinite(found.upper).all()


def test_damping_is_raised_until_it_suffices_and_said():
    h = torch.tensor([[1.0, 1.5], [1.5, 1.0]])  # eigenvalues 2.5 and -0.5
    found = inverse_factor(h, damping=0.01)
    assert found.damping == pytest.approx(1.0)  # the first tenfold above 0.5
    assert found.upper.dtype == torch.float64
    assert inverse_factor(gram(5, 2), damping=0.0).damping > 0  # singular


@pytest.mark.parametrize(
    ("h", "damping", "error", "words"),
    [
        (torch.ones(2, 3), 0.01, UsageError, "square"),
        (torch.eye(2), -0.1, UsageError, "damping=-0.1"),
        (torch.eye(2), float("nan"), UsageError, "damping=nan"),
        (torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), 0.01, NumericalFailure, "NaN"),
        (torch.diag(torch.tensor([1.0, -1.0])), 0.01, NumericalFailure, "negative"),
        (torch.tensor([[1.0, 1e9], [1e9, 1.0]]), 0.01, NumericalFailure, "indefinite"),
    ],
)
def test_refusals(h, damping, error, words):
    with pytest.raises(error, match=words):
        inverse_factor(h, damping=damping)
