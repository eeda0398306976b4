"""Dobi-SVD's parts. Sources of truth: limits of the gate, float64 autograd through torch's SVD, finite differences,
the exact PCA, and a model one of whose layers is known to need little."""

from __future__ import annotations

import copy

import pytest
import torch
from family_models import tiny_family
from torch import Tensor

from gnomon.core.errors import UsageError
from gnomon.methods.compress.calibration import mean_nll, require_calib
from gnomon.methods.compress.lowrank import (
    DobiConfig,
    IncrementalPCA,
    compressible,
    dobi_bases,
    dobi_ranks,
    fit_ranks,
    gate,
    kept_share,
    learn_positions,
    replace,
    right_vectors,
    shapes,
    truncate,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gate_limits() -> None:
    three = torch.tensor(3.0, dtype=torch.float64)
    assert gate(three, 6, beta=1e6).tolist() == [1, 1, 1, 0, 0, 0]
    assert gate(three, 6, beta=1e-12).tolist() == pytest.approx([0.5] * 6)
    assert gate(three * 100, 6).tolist() == pytest.approx([1] * 6)
    assert gate(-three * 100, 6).tolist() == pytest.approx([0] * 6)
    assert gate(three + 0.5, 6)[3] == 0.5
    for beta in (1.0, 10.0):  # γ reads as a rank
        assert float(gate(three * 10 + 0.3, 60, beta).sum()) == pytest.approx(30.3, abs=0.35)
    assert (gate(three, 6).diff() <= 0).all()
    beta, h = 2.0, 1e-6
    gamma = torch.tensor(2.2, dtype=torch.float64, requires_grad=True)
    gate(gamma, 6, beta).sum().backward()
    numeric = (gate(gamma.detach() + h, 6, beta) - gate(gamma.detach() - h, 6, beta)).sum() / (2 * h)
    assert float(gamma.grad) == pytest.approx(float(numeric), rel=1e-6)  # type: ignore[arg-type]


def svd_truncate(y: Tensor, t: Tensor) -> Tensor:
    u, sigma, vt = torch.linalg.svd(y, full_matrices=False)
    return (u * (t * sigma)) @ vt


@pytest.mark.parametrize("shape", [(12, 5), (5, 5), (4, 9), (1, 3), (3, 1)])
def test_truncation_and_its_gradients_equal_autograd(shape: tuple[int, int]) -> None:
    q = min(shape)
    u, _, vt = torch.linalg.svd(drawn(*shape), full_matrices=False)
    y = (u * torch.linspace(3, 1, q, dtype=torch.float64)) @ vt  # well separated
    t, weight = gate(torch.tensor(q / 2 + 0.2, dtype=torch.float64), q, 1.0), drawn(*shape, seed=1)
    results = []
    for function in (truncate, svd_truncate):
        yy, tt = y.clone().requires_grad_(), t.clone().requires_grad_()
        out = function(yy, tt)
        (out * weight).sum().backward()
        results.append((out.detach(), yy.grad, tt.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    assert torch.autograd.gradcheck(truncate, (y.requires_grad_(), t.requires_grad_()))


@pytest.mark.parametrize("shape", [(8, 4), (4, 8)])
@pytest.mark.parametrize("sigma", [[2.0, 2.0, 1.0, 1.0], [3.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4])
def test_gradients_are_finite_where_autograd_has_none(sigma: list[float], shape: tuple[int, int]) -> None:
    u, _, vt = torch.linalg.svd(drawn(*shape), full_matrices=False)
    y = ((u * torch.tensor(sigma, dtype=torch.float64)) @ vt).requires_grad_()
    t = gate(torch.tensor(1.2, dtype=torch.float64), 4, 1.0).requires_grad_()
    (truncate(y, t) * drawn(*shape, seed=1)).sum().backward()
    assert torch.isfinite(y.grad).all() and torch.isfinite(t.grad).all()  # type: ignore[arg-type]
    assert y.grad.norm() < 40 * drawn(*shape, seed=1).norm()  # type: ignore[union-attr]


def test_an_open_gate_is_the_identity() -> None:
    for matrix in (drawn(9, 4), drawn(4, 9), torch.zeros(3, 3)):
        y = matrix.clone().requires_grad_()
        out = truncate(y, torch.ones(min(y.shape), dtype=y.dtype))
        torch.testing.assert_close(out, y)
        out.backward(torch.ones_like(y))
        torch.testing.assert_close(y.grad, torch.ones_like(y), rtol=1e-6, atol=1e-6)
        assert float(truncate(y, torch.zeros(min(y.shape), dtype=y.dtype)).detach().abs().max()) < 1e-12


def test_right_vectors_equal_the_svd() -> None:
    for y in (drawn(30, 6), drawn(6, 30)):
        sigma, v = right_vectors(y)
        torch.testing.assert_close(sigma, torch.linalg.svdvals(y), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close((y @ v).norm(dim=0), sigma, rtol=1e-9, atol=1e-9)


def projector(basis: Tensor) -> Tensor:
    return basis @ basis.T


def test_incremental_pca_equals_the_exact_one() -> None:
    batches = [
        drawn(rows, 7, seed=rows) * torch.linspace(3, 0.5, 7, dtype=torch.float64) for rows in (3, 9, 1, 20)
    ]
    pca = IncrementalPCA(width=7)
    for rows in batches:
        pca.update(rows)
    everything = torch.cat(batches)
    vectors = torch.linalg.eigh(everything.T @ everything).eigenvectors
    for k in (1, 3, 7):
        torch.testing.assert_close(projector(pca.components(k)), projector(vectors.flip(1)[:, :k]))
    narrow = IncrementalPCA(width=4)
    for rows in batches:
        narrow.update(rows)
    exact = (everything @ projector(vectors.flip(1)[:, :2])).norm()
    assert 0.97 * exact <= (everything @ projector(narrow.components(2))).norm() <= exact * (1 + 1e-9)


def test_pca_of_fewer_rows_than_directions() -> None:
    pca = IncrementalPCA(width=3)
    pca.update(drawn(1, 5))
    basis = pca.components(3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"components\(4\) of a PCA that holds 3"):
        pca.components(4)
    with pytest.raises(UsageError, match="width=0"):
        IncrementalPCA(0)
    with pytest.raises(UsageError, match="holds 0"):
        IncrementalPCA(2).components(1)


def test_learned_ranks_beat_uniform_ones() -> None:
    """On text that the model wrote itself: lower loss at equal size, and the mirrored ranks, 2·uniform − learned, lose.

    Positions that never moved would equal the uniform ones; a gradient of the wrong sign would swap the outcome.
    """
    model = tiny_family("llama", tie_word_embeddings=False)
    layers, keep, sizes = compressible(model), 0.4, shapes(model)
    first = torch.randint(3, 40, (8, 1), generator=torch.Generator().manual_seed(0))
    text = model.generate(first, max_new_tokens=23, min_new_tokens=23, do_sample=False)
    batches = require_calib([text], model, "the test")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    positions = learn_positions(model, layers, batches, keep, DobiConfig.small(epochs=20, lr=(1.0, 0.1)))
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(layer._forward_hooks for layer in layers.values())

    def loss(ranks: dict[str, int]) -> float:
        assert 0.39 < kept_share(ranks, sizes) <= keep
        small, bases = copy.deepcopy(model), dobi_bases(model, layers, batches, ranks)
        for name, v in bases.items():
            replace(small, name, v, v.T @ layers[name].weight.detach().double())
        with torch.no_grad():
            return float(mean_nll(small, batches))

    uniform = loss(fit_ranks(keep, sizes))
    mirrored = {
        name: max(0.0, 2 * keep * m * n / (m + n) - positions[name]) for name, (m, n) in sizes.items()
    }
    learned = loss(dobi_ranks(positions, keep, sizes))
    assert learned < uniform - 0.1
    assert learned < loss(dobi_ranks(mirrored, keep, sizes)) - 0.1


def test_bases_are_orthonormal_and_follow_the_outputs() -> None:
    """With one batch of one layer's full rank, V spans the top directions of that layer's outputs."""
    model = tiny_family("qwen2")  # has biases, which are not truncated
    name = "model.layers.0.self_attn.q_proj"
    layer = compressible(model)[name]
    ids = torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    batches = require_calib([{"input_ids": ids, "attention_mask": mask}], model, "the test")
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, args, out: seen.append(out.detach()) or None)
    model(ids, attention_mask=mask)
    hook.remove()
    v = dobi_bases(model, {name: layer}, batches, {name: 5})[name]
    y = (seen[0] - layer.bias)[mask.bool()].double()
    expected = torch.linalg.svd(y, full_matrices=False).Vh[:5].T
    torch.testing.assert_close(projector(v), projector(expected), rtol=1e-4, atol=1e-4)


def test_config_is_checked() -> None:
    for settings in ({"beta": 0.0}, {"lr": (1.0, -1.0)}, {"epochs": 0}, {"share_weight": float("nan")}):
        with pytest.raises(UsageError):
            DobiConfig(**settings)  # type: ignore[arg-type]
    assert (DobiConfig().beta, DobiConfig().lr, DobiConfig().epochs, DobiConfig().samples) == (
        10,
        (5, 4),
        20,
        256,
    )
    assert DobiConfig.small(epochs=2).epochs == 2
