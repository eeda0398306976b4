"""The layer AB. Source of truth: the product of the factors in float64, and `nn.Linear`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from family_models import tiny_family
from torch import nn

from gnomon.core.errors import UsageError
from gnomon.methods.compress.lowrank import LowRankLinear, compress_lowrank, to_dense


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> LowRankLinear:
    torch.manual_seed(0)
    return LowRankLinear(7, 5, 3, bias, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_it_is_the_product(bias: bool, dtype: torch.dtype, bound: float) -> None:
    one, x = layer(bias, dtype), torch.randn(2, 4, 7, dtype=dtype)
    expected = torch.einsum("mk,kn,btn->btm", one.a.double(), one.b.double(), x.double())
    if bias:
        assert one.bias is not None
        expected = expected + one.bias.double()
    assert one(x).dtype == dtype and one(x).shape == (2, 4, 5)
    for y in (one(x), one.to_dense()(x)):
        assert ((y.double() - expected).norm() / expected.norm()) < bound
    assert one.to_dense().weight.shape == (5, 7) and (one.to_dense().bias is not None) == bias


def test_a_new_layer_draws_with_the_variance_of_a_linear_one() -> None:
    torch.manual_seed(0)
    for rank in (1, 8, 64):
        products = torch.stack([LowRankLinear(64, 64, rank).product().detach() for _ in range(40)])
        expected = nn.Linear(64, 64).weight.detach().var()
        assert products.var() / expected == pytest.approx(1, rel=0.25)  # 2,560 draws of b at rank 1


def test_factors_are_taken_over() -> None:
    a, b, bias = torch.randn(5, 2), torch.randn(2, 7), torch.randn(5)
    one = LowRankLinear.from_factors(a, b, bias)
    assert (one.in_features, one.out_features, one.rank) == (7, 5, 2)
    assert one.a.data_ptr() == a.data_ptr() and one.b.data_ptr() == b.data_ptr()
    assert torch.allclose(one(torch.eye(7)).T - bias[:, None], a @ b, atol=1e-5)
    assert LowRankLinear.from_factors(a, b).bias is None
    assert LowRankLinear.from_factors(a.T.contiguous().T, b).a.is_contiguous()
    assert repr(one) == "LowRankLinear(in_features=7, out_features=5, rank=2, bias=True)"


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused() -> None:
    for rank in (0, 6):
        with pytest.raises(UsageError, match=rf"rank={rank} must lie between 1 and 5"):
            LowRankLinear(7, 5, rank)
    for a, b, bias in [((5, 2), (3, 7), (5,)), ((5, 2), (2, 7), (4,)), ((2,), (2, 7), (5,))]:
        with pytest.raises(UsageError, match=r"must be \(m, k\), \(k, n\), \(m,\)"):
            LowRankLinear.from_factors(torch.ones(a), torch.ones(b), torch.ones(bias))


def test_it_lives_like_any_layer() -> None:
    one, x = layer(), torch.randn(3, 7)
    one(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in one.parameters())
    empty = LowRankLinear(7, 5, 3, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(one.state_dict(), assign=True)
    assert torch.equal(empty(x), one(x))
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(twin(x), one(x))
    half = copy.deepcopy(one).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert one(x).dtype == torch.bfloat16


def test_dense_again() -> None:
    model = compress_lowrank(tiny_family("qwen2"), keep=0.5)
    ids = torch.arange(8)[None]
    before = model(ids).logits
    mode, frozen = model.train().training, model.model.layers[0].mlp.up_proj
    frozen.requires_grad_(False)
    dense = to_dense(model)
    assert dense is model and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert model.model.layers[0].mlp.up_proj.training == mode
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad
    assert model.model.layers[1].mlp.up_proj.weight.requires_grad
    assert torch.allclose(model.eval()(ids).logits, before, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match=r"no low-rank layers\. compress_lowrank puts them in"):
        to_dense(model)
    with pytest.raises(UsageError, match=r"a low-rank layer itself; layer.to_dense\(\)"):
        to_dense(layer())


def test_a_shared_layer_stays_shared() -> None:
    one = layer(bias=False)
    model = to_dense(nn.ModuleDict({"x": one, "y": one}))
    assert model["x"] is model["y"] and type(model["x"]) is nn.Linear
