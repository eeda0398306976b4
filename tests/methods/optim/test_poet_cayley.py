"""The card's worked numbers and identities, brute force over powers, numerical gradients, dense rotations by loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gnomon.methods.optim.poet import (
    POETConfig,
    POETLinear,
    above,
    blocks_of,
    cayley,
    cayley_backward,
    cayley_neumann,
    cayley_neumann_backward,
    initial_weight,
    norm_bound,
    orthogonality_error,
    rotation,
    rotation_numbers,
    singular_values,
    skew,
    spectrum_drift,
    svd_entropy,
)
from gnomon.methods.optim.poet.primitives import (
    draw,
    multiply,
    multiply_ckpt,
    rotate,
    rotate_rows,
    transformed,
)

Q_A = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)
TERMS = [1, 2, 3, 4, 5, "exact"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_skew(b: int, norm: float, seed: int = 0) -> Tensor:
    q = skew(randn(b * (b - 1) // 2, seed=seed))
    return q * norm / torch.linalg.matrix_norm(q, 2)


# ----------------------------------------------------------------------------------------------- worked examples


def test_example_a() -> None:
    q = skew(Q_A)
    assert q.tolist() == [[0, 0.2, -0.1], [-0.2, 0, 0.3], [0.1, -0.3, 0]]
    exact = [
        [0.9122807, 0.4035088, -0.0701754],
        [-0.2982456, 0.7719298, 0.5614035],
        [0.2807018, -0.4912281, 0.8245614],
    ]
    torch.testing.assert_close(cayley(q), torch.tensor(exact, dtype=torch.float64), rtol=0, atol=5e-8)
    third = [[0.907, 0.3998, -0.0604], [-0.2882, 0.7582, 0.5532], [0.2836, -0.4788, 0.814]]
    torch.testing.assert_close(
        cayley_neumann(q, 3), torch.tensor(third, dtype=torch.float64), rtol=0, atol=1e-12
    )
    errors = [float(orthogonality_error(cayley_neumann(q, k))) for k in range(5)]
    assert errors == pytest.approx([0.114310, 0.244622, 0.00224047, 0.0316930, 0.0000439131], rel=5e-6)
    twice = cayley_neumann(q, 3) + torch.linalg.matrix_power(q, 4)  # 2Q⁴, as a published fall-back has it
    assert float((twice - cayley_neumann(q, 3)).abs().max()) == pytest.approx(0.018, abs=5e-4)


def layer_of(w: Tensor, p_out: list[int], p_in: list[int], **config: object) -> POETLinear:
    """A layer around W, in the frame of given permutations."""
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    linear.weight = nn.Parameter(w.clone())
    layer = POETLinear.from_linear(linear, POETConfig(init="keep", **config))  # type: ignore[arg-type]
    layer.reinit(torch.tensor(p_out), torch.tensor(p_in))
    return layer


@torch.no_grad()
def test_example_b() -> None:
    w = torch.arange(1, 17, dtype=torch.float64).view(4, 4) / 10
    layer = layer_of(w, [2, 0, 3, 1], [1, 3, 0, 2], block_size=2, neumann_terms="exact")
    layer.q_out.copy_(torch.tensor([[0.1], [-0.2]]))
    layer.q_in.copy_(torch.tensor([[0.3], [0.05]]))
    rows = [[-0.0874028, -0.0866745, 0.0678576, 0.1278590], [0.8347401, 0.1666902, 1.3128909, 1.7315455]]
    found = layer.effective_weight()
    torch.testing.assert_close(found[:2], torch.tensor(rows, dtype=torch.float64), rtol=0, atol=6e-8)
    sigma = singular_values(found)[:2]
    torch.testing.assert_close(
        sigma, torch.tensor([3.86226568, 0.207132307], dtype=torch.float64), rtol=0, atol=5e-9
    )


@torch.no_grad()
def test_example_c() -> None:
    layer = layer_of(
        torch.eye(4, dtype=torch.float64), [0, 3, 1, 2], [0, 1, 2, 3], variant="fs", neumann_terms="exact"
    )
    layer.q_out.fill_(0.1)
    expected = torch.eye(4, dtype=torch.float64)
    expected[0, 0] = expected[3, 3] = 0.9801980
    expected[0, 3], expected[3, 0] = 0.1980198, -0.1980198
    torch.testing.assert_close(layer.effective_weight(), expected, rtol=0, atol=5e-8)
    torch.testing.assert_close(layer.dense_rotations()[0], expected, rtol=0, atol=5e-8)


# ------------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("b", [2, 3, 5, 8])
@pytest.mark.parametrize("k", range(6))
def test_neumann_is_the_sum_of_powers_and_near_cayley(b: int, k: int) -> None:
    """Invariant 3, and the singular values |1 − (it)^{k+1}|."""
    q = small_skew(b, 0.7, seed=b)
    eye = torch.eye(b, dtype=torch.float64)
    powers = [torch.linalg.matrix_power(q, j) for j in range(k + 2)]
    g = cayley_neumann(q, k)
    torch.testing.assert_close(g, (eye + q) @ sum(powers[:-1], torch.zeros_like(q)))
    torch.testing.assert_close(g, (eye - powers[-1]) @ (eye + q) @ torch.linalg.inv(eye - q))
    assert float(orthogonality_error(g)) <= (1 + 0.7 ** (k + 1)) ** 2 - 1 + 1e-12
    t = torch.linalg.eigvals(q).imag
    expected = (1 - (1j * t) ** (k + 1)).abs().sort().values
    torch.testing.assert_close(torch.linalg.svdvals(g).sort().values, expected)


def test_singular_values_by_number_of_terms() -> None:
    t = 0.4
    q = skew(torch.tensor([t], dtype=torch.float64))
    found = [float(torch.linalg.svdvals(cayley_neumann(q, k))[0]) for k in (1, 2, 3, 4)]
    assert found == pytest.approx([1 + t**2, math.sqrt(1 + t**6), 1 - t**4, math.sqrt(1 + t**10)])


def test_two_terms_are_more_orthogonal_than_three_but_less_near() -> None:
    q = small_skew(8, 0.2)
    two, three = cayley_neumann(q, 2), cayley_neumann(q, 3)
    assert orthogonality_error(two) < 0.1 * orthogonality_error(three)
    assert (three - cayley(q)).norm() < 0.5 * (two - cayley(q)).norm()


def test_exact_cayley_is_a_rotation_in_float32() -> None:
    """Invariant 2."""
    q = (0.5 * randn(5, 28)).float()
    g = cayley(skew(q))
    assert float(orthogonality_error(g).max()) < 1e-6
    torch.testing.assert_close(torch.linalg.det(g), torch.ones(5), rtol=1e-5, atol=0)
    assert torch.equal(rotation(torch.zeros(3, 6), "exact"), torch.eye(4).expand(3, 4, 4))
    assert torch.equal(rotation(torch.zeros(3, 6), 3), torch.eye(4).expand(3, 4, 4))


def test_the_cheap_bound() -> None:
    q = randn(4, 15)
    norms = torch.linalg.matrix_norm(skew(q), 2)
    torch.testing.assert_close(norm_bound(q), torch.linalg.matrix_norm(skew(q)) / math.sqrt(2))
    assert bool((norms <= norm_bound(q)).all())
    torch.testing.assert_close(
        norm_bound(q[:, :1]), torch.linalg.matrix_norm(skew(q[:, :1]), 2)
    )  # reached at b = 2


# ------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("terms", TERMS)
def test_gradients_of_rotations(terms: int | str) -> None:
    """Numerical ones, and autograd's through the plain formula."""
    q = (0.2 * randn(2, 6)).requires_grad_()
    assert torch.autograd.gradcheck(lambda q: rotation(q, terms), (q,))
    dg = randn(2, 4, 4, seed=1)
    plain = skew(q.detach()).requires_grad_()
    g = cayley(plain) if isinstance(terms, str) else cayley_neumann(plain, terms)
    g.backward(dg)
    with torch.no_grad():
        dq = cayley_backward(g, dg) if isinstance(terms, str) else cayley_neumann_backward(plain, dg, terms)
    torch.testing.assert_close(dq, plain.grad)
    (by_hand,) = torch.autograd.grad(rotation(q, terms), q, dg)
    torch.testing.assert_close(by_hand, above(dq))


def test_the_backward_of_three_terms_in_the_cards_letters() -> None:
    q, dy = small_skew(5, 0.6), randn(5, 5, seed=2)
    qt, square_t = q.T, (q @ q).T
    a = qt @ dy + dy @ qt
    expected = 2 * (dy + a) + (2 * qt + square_t) @ a + (2 * dy + a) @ square_t
    torch.testing.assert_close(cayley_neumann_backward(q, dy, 3), expected)


def test_rotations_stay_in_float32_under_autocast() -> None:
    q = (0.2 * randn(2, 6)).float().requires_grad_()
    for terms in (3, "exact"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = rotation(q, terms)
            (grad,) = torch.autograd.grad(inside.sum(), q)
        outside = rotation(q, terms)
        assert torch.equal(inside, outside)
        assert torch.equal(grad, torch.autograd.grad(outside.sum(), q)[0])


SIDES = [((3, 2), (2, 2)), ((1, 3), (1, 2)), ((2, 3), (1, 4))]
"""(blocks, b) out and in, of a 6 × 4 matrix; the second leaves coordinates where they are."""


@pytest.mark.parametrize(("out", "inner"), SIDES)
@pytest.mark.parametrize("terms", [3, "exact"])
def test_gradcheck_of_a_small_layer(out: tuple[int, int], inner: tuple[int, int], terms: int | str) -> None:
    """Invariant 6: forward and all gradients, the hand-written backward included."""
    x, w = randn(2, 3, 4).requires_grad_(), randn(6, 4, seed=1)
    q_out, q_in = ((0.2 * randn(n, b * (b - 1) // 2, seed=2 + n)).requires_grad_() for n, b in (out, inner))

    def forward(x: Tensor, q_out: Tensor, q_in: Tensor) -> Tensor:
        return multiply_ckpt(x, w, rotation(q_out, terms), rotation(q_in, terms))

    assert torch.autograd.gradcheck(forward, (x, q_out, q_in))
    g = rotation(q_out, terms), rotation(q_in, terms)
    dense = x @ transformed(w, *g).T
    for y in (multiply(x, w, *g), forward(x, q_out, q_in), forward(x[0, 0], q_out, q_in)):
        torch.testing.assert_close(y, dense[0, 0] if y.ndim == 1 else dense, rtol=1e-9, atol=1e-12)
        want = torch.autograd.grad(dense.square().sum(), (x, q_out, q_in), retain_graph=True)
        if y.ndim == 3:
            got = torch.autograd.grad(y.square().sum(), (x, q_out, q_in), retain_graph=True)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_what_the_forwards_keep() -> None:
    """`input_ckpt` keeps the input and the small blocks; `input` two more activations."""
    x, w = randn(64, 4).requires_grad_(), randn(6, 4)
    g_out, g_in = rotation(randn(3, 1), 3), rotation(randn(2, 1), 3)
    sizes = []
    for product in (multiply, multiply_ckpt):
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            product(x, w, g_out.requires_grad_(), g_in.requires_grad_())
        sizes.append(sum(kept.values()))
    assert sizes[1] == 8 * (64 * 4 + 24 + 3 * 4 + 2 * 4)
    assert sizes[0] >= sizes[1] + 8 * 64 * 6


# ------------------------------------------------------------------------------------ sparse rotations, counts


def test_rotate_is_a_block_matrix() -> None:
    g = randn(2, 3, 3)
    dense = torch.eye(8, dtype=torch.float64)
    dense[:3, :3], dense[3:6, 3:6] = g[0], g[1]
    x = randn(5, 8, seed=1)
    torch.testing.assert_close(rotate(x, g), x @ dense.T)
    torch.testing.assert_close(rotate_rows(x.T.contiguous(), g), dense @ x.T)


def test_coverage() -> None:
    """Invariant 8: in 100 primitives, blocks touch each entry of a 64 × 64 weight 200 times, whatever b is."""
    for cfg in (POETConfig(block_size=8), POETConfig(block_size=32), POETConfig(variant="fs")):
        generator = torch.Generator().manual_seed(0)
        n, b = blocks_of(64, cfg)
        touched = torch.zeros(64, 64)
        for _ in range(100):
            for side in (touched, touched.T):
                side[draw(64, n, b, generator, ordered=cfg.variant == "fs")[: n * b]] += 1
        if cfg.variant == "bs":
            assert touched.unique().tolist() == [200]
        else:
            assert len(touched.unique()) > 10
            assert float(touched.mean()) == pytest.approx(100)  # half of each side, each time


def test_permutations_are_uniform() -> None:
    """Each coordinate is as often in the random set: 2,000 draws of 4 of 10, within 4.9 standard deviations."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(10)
    for _ in range(2000):
        p = draw(10, 1, 4, generator, ordered=True)
        assert p.sort().values.tolist() == list(range(10))
        assert p[:4].tolist() == sorted(p[:4].tolist())
        counts[p[:4]] += 1
    assert float((counts - 800).abs().max()) < 4.9 * math.sqrt(2000 * 0.4 * 0.6)


def llama(hidden: int, ff: int, layers: int, cfg: POETConfig) -> int:
    shapes = [(hidden, hidden)] * 4 + [(ff, hidden)] * 2 + [(hidden, ff)]
    return layers * sum(rotation_numbers(*shape, cfg) for shape in shapes)


def test_counts_of_the_paper() -> None:
    """Invariant 7 and the paper's table, in millions; its last entry of b = 256 is 118.26 there, but the formula
    that gives all others gives 118.29."""
    assert llama(512, 1280, 8, POETConfig(block_size=256)) == 9_661_440
    assert llama(512, 1376, 8, POETConfig(variant="fs")) == 8_544_192
    blocks = {
        64: (2.39, 5.52, 14.90, 29.22),
        128: (4.81, 11.12, 30.04, 58.91),
        256: (9.66, 22.33, 60.32, 118.29),
    }
    sizes = ((512, 1280, 8), (768, 2048, 12), (1024, 2816, 24), (2048, 5376, 24))
    for b, expected in blocks.items():
        found = [llama(*size, POETConfig(block_size=b)) / 1e6 for size in sizes]
        assert found == pytest.approx(expected, abs=0.0051)
    sets = {
        1 / 8: (0.53, 1.78, 6.34, 25.39),
        1 / 4: (2.13, 7.13, 25.44, 101.66),
        1 / 2: (8.54, 28.56, 101.86, 406.88),
    }
    sizes = ((512, 1376, 8), (768, 2048, 12), (1024, 2736, 24), (2048, 5464, 24))
    for fraction, expected in sets.items():
        found = [llama(*size, POETConfig(variant="fs", fraction=fraction)) / 1e6 for size in sizes]
        assert found == pytest.approx(expected, abs=0.0051)


# --------------------------------------------------------------------------------------------- initialisations


def test_initialisations() -> None:
    w = torch.empty(96, 64)
    made = {
        init: initial_weight(w, init, torch.Generator().manual_seed(3))
        for init in ("normalized", "standard", "xavier", "uniform_spectrum")
    }
    torch.testing.assert_close(made["normalized"].norm(dim=1), torch.ones(96))  # rows are the neurons
    assert float(made["standard"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(made["xavier"].std()) == pytest.approx(math.sqrt(2 / 160), rel=0.05)
    torch.testing.assert_close(torch.linalg.svdvals(made["uniform_spectrum"]), torch.ones(64))
    torch.testing.assert_close(made["normalized"], nn.functional.normalize(made["standard"], dim=1))
    assert initial_weight(w, "keep", None) is w
    assert initial_weight(w.bfloat16(), "normalized", None).dtype == torch.bfloat16


def test_the_spectrum_of_the_normalised_gaussian() -> None:
    """Example 12: |1 ± √(out/in)| in the limit."""
    w = initial_weight(torch.empty(512, 1376), "normalized", torch.Generator().manual_seed(0))
    sigma = singular_values(w)
    limit = math.sqrt(512 / 1376)
    assert (1 + limit, 1 - limit) == pytest.approx((1.610, 0.390), abs=5e-4)
    assert float(sigma[0]) == pytest.approx(1.606, abs=0.01)
    assert float(sigma[-1]) == pytest.approx(0.388, abs=0.01)
    assert svd_entropy(sigma) == pytest.approx(0.970, abs=0.002)


def test_measures_of_a_spectrum() -> None:
    sigma = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    assert spectrum_drift(torch.tensor([2.1, 1.0, 0.1], dtype=torch.float64), sigma) == pytest.approx(0.2)
    p = torch.tensor([4, 1, 0.25]) / 5.25
    assert svd_entropy(sigma) == pytest.approx(float(-(p * p.log()).sum()) / math.log(3))
    assert svd_entropy(torch.ones(7)) == pytest.approx(1)
    assert svd_entropy(torch.tensor([3.0, 0.0])) == 0
