"""MGLU's mathematics and layers. Sources of truth: numbers worked by hand on the paper's formulas, plain loops in
float64, a GLU that it contains, and autograd of the masks as ordinary inputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.kernels.mglu.planes import code_of, pack, planes_of, unpack
from gnomon.kernels.mglu.reference import ACTIVATIONS
from gnomon.methods.layers.mglu import (
    FrozenMGLULinear,
    MGLUConfig,
    MGLULinear,
    SwiMGLUMLP,
    gate_value,
    mglu,
    straight_through,
    top_k_routes,
)

X = torch.tensor([2.0, -1.0, 0.5])
W = torch.tensor([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]])  # h x d, as the card has it
M = torch.tensor([[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 1], [0, 0]]]).float()
GATES = list(ACTIVATIONS)
ZERO_AT_ZERO = ["silu", "gelu", "gelu_tanh", "relu", "identity"]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64).to(dtype)


def bits(n: int, d: int, h: int, seed: int = 1) -> Tensor:
    return (torch.rand(n, d, h, generator=rng(seed)) < 0.5).float()


def loops(x: Tensor, weight: Tensor, masks: Tensor, act: str) -> Tensor:
    """The formula, number by number, in float64."""
    x, weight, masks = x.double(), weight.double(), masks.double()
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for b, j, i in itertools.product(range(x.shape[0]), range(weight.shape[0]), range(len(masks))):
        gate = sum(x[b, k] * masks[i, j, k] * weight[j, k] for k in range(x.shape[1]))
        value = sum(x[b, k] * (1 - masks[i, j, k]) * weight[j, k] for k in range(x.shape[1]))
        out[b, j] += ACTIVATIONS[act](torch.as_tensor(gate)) * value
    return out


def test_example_a() -> None:
    gate, value = gate_value(X, W.T, M.mT)
    torch.testing.assert_close(gate, torch.tensor([[1.5, 0.5], [-0.5, -5.0]]))
    torch.testing.assert_close(value, torch.tensor([[-0.5, -4.0], [1.5, 1.5]]))
    torch.testing.assert_close(gate + value, torch.tensor([1.0, -3.5]).expand(2, 2))
    out = mglu(X, W.T, M.mT)
    torch.testing.assert_close(out, torch.tensor([-0.896336, -1.295115]), rtol=0, atol=2e-6)


def layer_of_the_card(n: int = 2) -> MGLULinear:
    layer = MGLULinear(3, 2, n)
    with torch.no_grad():
        layer.weight.copy_(W.T)
        layer.mask_logits.copy_((M[:n].mT - 0.5) * 0.02)
    return layer


def test_example_b() -> None:
    layer = layer_of_the_card()
    layer.mix(X, "silu").sum().backward()
    expected = [[-3.494018, 13.084298], [0.873504, 3.271074], [0.873504, -4.906612]]
    torch.testing.assert_close(layer.mask_logits.grad[0].T, torch.tensor(expected), rtol=0, atol=5e-6)
    layer = layer_of_the_card(1)
    layer.mix(X, "silu").sum().backward()
    expected = [[-1.041294, 0.622459], [-1.226362, 2.959845], [-0.260324, -1.479922]]
    torch.testing.assert_close(layer.weight.grad.T, torch.tensor(expected), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("n", "saved"), [(1, 0.46875), (2, 0.4375), (4, 0.375), (8, 0.25), (16, 0.0)])
def test_example_c_bits_of_what_is_stored(n: int, saved: float) -> None:
    layer = FrozenMGLULinear.of(MGLULinear(64, 24, n, generator=rng(), dtype=torch.bfloat16))
    stored = sum(tensor.nbytes for tensor in layer.state_dict().values())
    per_weight = 8 * stored / (64 * 24)
    assert per_weight == 16 + n
    assert 1 - per_weight / 32 == saved


@pytest.mark.parametrize("act", GATES)
@pytest.mark.parametrize("n", [1, 3])
def test_the_formula(act: str, n: int) -> None:
    x, w, masks = draw(3, 7), draw(5, 7, seed=1), bits(n, 5, 7)
    torch.testing.assert_close(mglu(x, w, masks, act).double(), loops(x, w, masks, act), rtol=1e-5, atol=1e-6)
    wrong = mglu(x, w, 1 - masks, act)  # gate and value exchanged
    assert (act == "identity") == torch.allclose(wrong, mglu(x, w, masks, act), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)]
)
def test_gate_and_value_add_up(dtype: torch.dtype, bound: float) -> None:
    x, w, masks = draw(4, 64, dtype=dtype), draw(16, 64, seed=1, dtype=dtype), bits(4, 16, 64).to(dtype)
    gate, value = gate_value(x, w, masks)
    whole = (x.double() @ w.double().T)[:, None]
    assert (gate.double() + value.double() - whole).norm() / (2 * whole.norm()) < bound


def test_narrow_values_are_multiplied_out() -> None:
    """A mask of ones leaves no value: exactly 0, where xW - gate would leave the rounding of two sums."""
    x, w = draw(4, 513, dtype=torch.bfloat16), draw(16, 513, seed=1, dtype=torch.bfloat16)
    _, value = gate_value(x, w, torch.ones(1, 16, 513, dtype=torch.bfloat16))
    assert not value.any()
    masks = bits(1, 16, 513)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, value = gate_value(x.float(), w.float(), masks)
    exact = x.double() @ (w.double() * (1 - masks[0])).T
    assert (value[:, 0] - exact).norm() / exact.norm() < 5e-3


@pytest.mark.parametrize("act", ZERO_AT_ZERO)
def test_masks_that_split_nothing_give_zero(act: str) -> None:
    """Exactly, where both products are formed (narrow dtypes, packed masks); elsewhere to rounding."""
    x, w = draw(3, 9), draw(5, 9, seed=1)
    for masks in (torch.ones(2, 5, 9), torch.zeros(2, 5, 9)):
        assert mglu(x, w, masks, act).abs().max() < 1e-5
        assert not mglu(x.bfloat16(), w.bfloat16(), masks.bfloat16(), act).any()
        exact = SwiMGLUMLP(9, 5, MGLUConfig(n_masks=2, hidden_act=act))
        with torch.no_grad():
            exact.proj.mask_logits.copy_(masks - 0.5)
        exact.freeze()
        assert not exact.eval()(x).any()


@pytest.mark.usefixtures("unchecked")
def test_a_bit_an_output_channel_is_always_zero() -> None:
    """The trap of the card: such masks have the right number of rows, and the layer outputs nothing."""
    x, w = draw(3, 9), draw(5, 9, seed=1)
    rows = (torch.arange(5) % 2).float()
    assert mglu(x, w, rows[None, :, None].expand(1, 5, 9)).abs().max() < 1e-5
    with pytest.raises(UsageError, match=r"\(1, 5, 1\) don't fit a weight of \(5, 9\).*every output 0"):
        gate_value(x, w, rows[None, :, None])


@pytest.mark.parametrize("act", GATES)
def test_it_contains_the_glu(act: str) -> None:
    x, w_gate, w_value = draw(3, 8), draw(6, 8, seed=1), draw(6, 8, seed=2)
    stacked = torch.cat([w_gate, w_value], 1)
    masks = torch.cat([torch.ones(1, 6, 8), torch.zeros(1, 6, 8)], 2)
    glu = ACTIVATIONS[act](F.linear(x, w_gate)) * F.linear(x, w_value)
    torch.testing.assert_close(mglu(torch.cat([x, x], 1), stacked, masks, act), glu, rtol=1e-5, atol=1e-5)


def test_equal_and_permuted_masks() -> None:
    x, w, masks = draw(3, 8), draw(6, 8, seed=1), bits(4, 6, 8)
    torch.testing.assert_close(mglu(x, w, masks[:1].expand(4, -1, -1)), 4 * mglu(x, w, masks[:1]))
    torch.testing.assert_close(mglu(x, w, masks[[2, 0, 3, 1]]), mglu(x, w, masks), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        mglu(x, w, masks, "identity"), mglu(x, w, 1 - masks, "identity"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_estimator_passes_gradients_straight_through(scale: float) -> None:
    """dL/dS = W * x^T (G - U), by hand from the two pre-activations, whatever the logits' size."""
    layer = MGLULinear(7, 5, 3, generator=rng(), dtype=torch.float64)
    with torch.no_grad():
        layer.mask_logits *= scale
    x, above = draw(4, 7, dtype=torch.float64), draw(4, 5, seed=3, dtype=torch.float64)
    (layer.mix(x, "silu") * above).sum().backward()
    for i in range(3):
        mask = (layer.mask_logits[i] > 0).double()
        gate, value = x @ (mask * layer.weight).T, x @ ((1 - mask) * layer.weight).T
        sigma = gate.sigmoid()
        g = above * value * sigma * (1 + gate * (1 - sigma))
        u = above * gate * sigma
        torch.testing.assert_close(layer.mask_logits.grad[i], layer.weight * ((g - u).T @ x))
    masks = layer.masks.detach().requires_grad_()  # a second form: autograd of masks that are plain inputs
    (mglu(x, layer.weight.detach(), masks, "silu") * above).sum().backward()
    torch.testing.assert_close(layer.mask_logits.grad, masks.grad)


def test_forward_sees_signs_only() -> None:
    layer, x = MGLULinear(7, 5, 3, generator=rng()), draw(4, 7)
    before = layer.mix(x, "silu")
    with torch.no_grad():
        layer.mask_logits.copy_(layer.mask_logits.sign() * torch.rand(3, 5, 7, generator=rng(5)).add(1e-9))
    assert torch.equal(layer.mix(x, "silu"), before)
    with torch.no_grad():
        layer.mask_logits.neg_()
    assert not torch.equal(layer.mix(x, "silu"), before)


def test_masks_are_exact_and_of_the_weights_dtype() -> None:
    logits = (draw(2, 3, 4) * 0.013).requires_grad_()  # 1 - 0.013 + 0.013 isn't 1 in float32
    masks = straight_through(logits, torch.bfloat16)
    assert masks.dtype == torch.bfloat16 and set(masks.detach().flatten().tolist()) == {0.0, 1.0}
    masks.sum().backward()
    assert logits.grad.dtype == torch.float32 and bool((logits.grad == 1).all())


def test_transforms_see_through_the_estimator() -> None:
    layer, x = MGLULinear(7, 5, 2, generator=rng()), draw(4, 7)
    params = dict(layer.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        gate, value = torch.func.functional_call(layer, params, (x,))
        return (F.silu(gate) * value).sum()

    layer.forward = layer.gate_value  # type: ignore[method-assign]
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    together = torch.func.grad(loss)(params, x)
    torch.testing.assert_close({k: v.sum(0) for k, v in each.items()}, together)


def test_zero_logits_are_zero_bits_everywhere() -> None:
    layer, x = MGLULinear(8, 5, 2, generator=rng()), draw(4, 8)
    with torch.no_grad():
        layer.mask_logits[:, ::2] = 0
        layer.mask_logits[:, 1] = -0.0
    frozen = FrozenMGLULinear.of(layer)
    assert torch.equal(unpack(frozen.planes, 8).float(), layer.masks)
    torch.testing.assert_close(frozen.mix(x, "relu"), layer.mix(x, "relu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 31, 64])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_layouts_hold_the_same_bits(columns: int, n: int) -> None:
    masks = bits(n, 5, columns).bool()
    planes = pack(masks)
    assert planes.shape == (n, 5, -(-columns // 8)) and torch.equal(unpack(planes, columns), masks)
    code = code_of(planes, columns)
    for i, row, k in itertools.product(range(n), range(5), range(columns)):
        assert (
            bool(code[row, k] >> i & 1) == bool(planes[i, row, k // 8] >> k % 8 & 1) == bool(masks[i, row, k])
        )
    assert torch.equal(planes_of(code, n), planes)
    assert not (planes[..., -1].to(torch.int32) >> (columns - 1) % 8 + 1).any()  # pads are 0


# ------------------------------------------------------------------------------------------------- variants


def test_partial_masks() -> None:
    x, w, masks = draw(3, 8), draw(6, 8, seed=1), bits(1, 6, 8)
    whole, gate, value = F.linear(x, w), F.linear(x, w * masks[0]), F.linear(x, w * (1 - masks[0]))
    for masked, expected in (
        ("both", F.silu(gate) * value),
        ("value", F.silu(whole) * value),  # the paper's "no gate mask"
        ("gate", F.silu(gate) * whole),  # "no value mask"
        ("neither", F.silu(whole) * whole),
    ):
        torch.testing.assert_close(mglu(x, w, masks, masked=masked), expected, rtol=1e-4, atol=1e-5)
        mlp = SwiMGLUMLP(8, 6, MGLUConfig(n_masks=1, masked=masked), generator=rng())
        mlp(x).sum().backward()
        assert (mlp.proj.mask_logits is None) == (masked == "neither")
        assert all(p.grad is not None and p.grad.any() for p in mlp.parameters())


def test_routes_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -1.0]])
    first = 1 / (1 + torch.tensor(-1.0).exp())
    torch.testing.assert_close(top_k_routes(logits, 2), torch.tensor([[0, first, 1 - first], [0.5, 0.5, 0]]))
    torch.testing.assert_close(top_k_routes(logits, 3), logits.softmax(-1))
    assert top_k_routes(logits, 1)[0].tolist() == [0, 1, 0]
    tied = top_k_routes(torch.zeros(5, 4), 2)
    assert bool(((tied > 0).sum(-1) == 2).all())  # exactly k, even where logits are equal


@pytest.mark.parametrize("k", [1, 2, 3])
def test_routed_layer(k: int) -> None:
    mlp, x = SwiMGLUMLP(8, 6, MGLUConfig(n_masks=3, top_k=k), generator=rng()), draw(5, 8)
    gate, value = mlp.proj.gate_value(x)
    routes = top_k_routes(F.linear(x, mlp.router.weight), k)
    expected = mlp.down_proj((routes[..., None] * F.silu(gate) * value).sum(-2))
    torch.testing.assert_close(mlp(x), expected)
    mlp(x).square().sum().backward()
    assert bool(mlp.router.weight.grad.any()) == (k > 1)  # one route's softmax is 1 whatever its logit
    before = mlp(x).detach()
    mlp.freeze()
    torch.testing.assert_close(mlp.eval()(x), before, rtol=1e-4, atol=1e-5)


def test_fixed_masks_stay() -> None:
    mlp = SwiMGLUMLP(8, 6, MGLUConfig(learned=False), generator=rng())
    assert set(dict(mlp.named_parameters())) == {"proj.weight", "down_proj.weight"}
    assert "proj.mask_logits" in mlp.state_dict()
    before = mlp.proj.mask_logits.clone()
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.1)
    mlp(draw(3, 8)).square().sum().backward()
    optimizer.step()
    assert torch.equal(mlp.proj.mask_logits, before)


def test_draws() -> None:
    """A generator decides everything; half of the bits are ones; the weights are those of `nn.Linear` or Gaussian."""
    layer, twin = (MGLULinear(64, 96, 4, generator=rng(3)) for _ in range(2))
    assert torch.equal(layer.weight, twin.weight) and torch.equal(layer.mask_logits, twin.mask_logits)
    assert float(layer.mask_logits.detach().std()) == pytest.approx(0.01, rel=0.03)
    assert float((layer.mask_logits > 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(layer.weight.detach().abs().max()) <= 64**-0.5 and float(layer.weight.detach().std()) > 0.06
    assert float(MGLULinear(64, 96, weight_init_std=0.02).weight.detach().std()) == pytest.approx(
        0.02, rel=0.05
    )
    one, two = (SwiMGLUMLP(8, 6, MGLUConfig(top_k=2), generator=rng(), init_std=std) for std in (0.02, 0.02))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


# --------------------------------------------------------------------------------------------- frozen layers


@pytest.mark.parametrize("layout", ["planes", "code"])
@pytest.mark.parametrize("act", GATES)
def test_frozen_is_the_trained_layer(layout: str, act: str) -> None:
    mlp, x = SwiMGLUMLP(21, 10, MGLUConfig(n_masks=3, hidden_act=act), generator=rng()), draw(2, 3, 21)
    before = mlp(x).detach()
    mlp.freeze(layout)
    assert set(mlp.state_dict()) == {"proj.weight", f"proj.mask_{layout}", "down_proj.weight"}
    torch.testing.assert_close(mlp.eval()(x), before, rtol=1e-4, atol=1e-5)
    clone = SwiMGLUMLP(21, 10, MGLUConfig(n_masks=3, hidden_act=act), generator=rng(9))
    clone.freeze(layout)
    assert not torch.equal(clone.eval()(x), mlp(x))
    clone.load_state_dict(mlp.state_dict())
    assert torch.equal(clone(x), mlp(x))
    assert mlp.to(torch.bfloat16).proj.planes.dtype == torch.uint8  # bits are never cast


def test_meta_device_and_shapes() -> None:
    for config in (MGLUConfig(), MGLUConfig(top_k=2), MGLUConfig(n_masks=1, masked="gate")):
        mlp = SwiMGLUMLP(2048, 8192, config, device="meta", dtype=torch.bfloat16)
        out = mlp(torch.empty(2, 5, 2048, device="meta", dtype=torch.bfloat16))
        assert (out.shape, out.dtype) == ((2, 5, 2048), torch.bfloat16)
    assert SwiMGLUMLP(8, 6)(torch.zeros(0, 8)).shape == (0, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_masks": 0}, r"n_masks=0 must be a whole number from 1 to 16"),
        ({"n_masks": 17}, r"n_masks=17 must be"),
        ({"n_masks": 2.0}, r"n_masks=2.0 must be"),
        ({"hidden_act": "sliu"}, r"Unknown activation 'sliu'. Did you mean 'silu'"),
        ({"mask_init_std": 0.0}, r"mask_init_std=0.0 must be positive"),
        ({"mask_init_std": float("nan")}, r"mask_init_std=nan must be"),
        ({"top_k": 5}, r"top_k=5 routes can't be taken of n_masks=4"),
        ({"top_k": 0}, r"top_k=0 routes"),
        ({"mask_weight_decay": -1.0}, r"mask_weight_decay=-1.0 must be"),
        ({"masked": "gates"}, r"Unknown choice of what is masked 'gates'. Did you mean 'gate'"),
        ({"masked": "neither"}, r"masked='neither' with n_masks=4"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MGLUConfig(**settings)


def test_bad_layers_and_inputs() -> None:
    with pytest.raises(UsageError, match="from 1 to 16"):
        MGLULinear(8, 6, 0)
    with pytest.raises(UsageError, match="has no weights"):
        MGLULinear(0, 6)
    with pytest.raises(UsageError, match="x has 7 columns, but the layer takes 8"):
        SwiMGLUMLP(8, 6)(torch.zeros(1, 7))
    mlp = SwiMGLUMLP(8, 6, generator=rng())
    with torch.no_grad():
        mlp.proj.mask_logits[0, 0, 0] = float("nan")
    with pytest.raises(NumericalFailure, match="1 mask logits are NaN"):
        mlp.freeze()
    with torch.no_grad():
        mlp.proj.mask_logits[0, 0, 0] = 1
    with pytest.raises(UsageError, match="Unknown layout of masks 'plane'"):
        mlp.freeze("plane")
    mlp.freeze()
    with pytest.raises(UsageError, match="frozen already, as planes"):
        mlp.freeze()
    mlp.train()
    with pytest.raises(UsageError, match=r"masks are frozen.*model\.eval\(\)"):
        mlp(torch.zeros(1, 8))
    with pytest.raises(UsageError, match="is an ablation, which has no packed form"):
        SwiMGLUMLP(8, 6, MGLUConfig(n_masks=1, masked="gate")).freeze()
    with pytest.raises(UsageError, match="9 masks don't fit into a byte"):
        SwiMGLUMLP(8, 6, MGLUConfig(n_masks=9)).freeze("code")
    with pytest.raises(UsageError, match="bits of more than 1 masks"):
        planes_of(torch.full((2, 3), 2, dtype=torch.uint8), 1)
    weight = nn.Parameter(torch.zeros(6, 12))
    with pytest.raises(UsageError, match=r"\(2, 6, 1\); 2 of a weight of 6 x 12 as planes are .*\(2, 6, 2\)"):
        FrozenMGLULinear(weight, torch.zeros(2, 6, 1, dtype=torch.uint8), 2)


def test_nan_reaches_the_output() -> None:
    """It isn't hidden by a mask: the whole product has it."""
    mlp, x = SwiMGLUMLP(8, 6, generator=rng()), draw(2, 8)
    x[0, 3] = float("nan")
    assert bool(mlp(x)[0].isnan().all()) and not mlp(x)[1].isnan().any()
    mlp.freeze()
    assert bool(mlp.eval()(x)[0].isnan().all()) and not mlp(x)[1].isnan().any()


@pytest.mark.parametrize("sign", [1, -1])
def test_it_finds_the_masks_that_made_the_data(sign: int) -> None:
    """With W known, the estimator recovers a teacher's bits; with its sign flipped it doesn't."""
    agreement = []
    for seed in (1, 3):
        teacher, student = (MGLULinear(8, 6, 1, generator=rng(s)) for s in (seed, seed + 100))
        student.weight = teacher.weight
        x = 2 * draw(512, 8, seed=5)
        target = teacher.mix(x, "silu").detach()
        optimizer = torch.optim.AdamW([student.mask_logits], lr=1e-3, weight_decay=0)
        for _ in range(200):
            loss = F.mse_loss(student.mix(x, "silu"), target)
            optimizer.zero_grad()
            loss.backward()
            student.mask_logits.grad *= sign
            optimizer.step()
        agreement.append(float((teacher.masks == student.masks).float().mean()))
    assert (min(agreement) > 0.95) if sign > 0 else (max(agreement) < 0.75), agreement
