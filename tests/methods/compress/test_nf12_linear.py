"""Products on planes: bit for bit torch's own when buffered, float64 within rounding when fused; gradients."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from nf12_oracle import gaussian
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from gnomon.core.errors import UsageError
from gnomon.methods.compress.nf12 import NF12Config, encode, linear, linear_transposed, release_scratch

LINEAR = sys.modules["gnomon.methods.compress.nf12.linear"]


def weight(rows: int = 24, columns: int = 45) -> Tensor:
    w = gaussian(rows, columns, sigma=0.2)
    w[::3, 2] = 0  # exceptional groups take part
    return w


def inputs(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(45,), (1, 45), (7, 45), (2, 3, 45), (0, 45)])
@pytest.mark.parametrize("biased", [True, False])
def test_buffered_is_torch_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    w, x = weight(), inputs(*shape, dtype=dtype)
    bias = inputs(24, dtype=dtype, seed=2) if biased else None
    y = linear(x, encode(w), bias, mode="buffered")
    assert y.dtype == dtype
    assert torch.equal(y, F.linear(x, w.to(dtype), bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(45,), (3, 45), (2, 2, 45)])
def test_fused_is_the_product(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    w, x, bias = weight(), inputs(*shape, dtype=dtype), inputs(24, dtype=dtype, seed=2)
    y = linear(x, encode(w), bias, mode="fused")
    expected = F.linear(x.double(), w.double(), bias.double())
    assert y.dtype == dtype
    error = (y - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_float16_is_multiplied_in_float32() -> None:
    """Weights of 2^20 would be infinite in float16."""
    w, x = weight() * 2.0**20, inputs(5, 45, dtype=torch.float16) * 2.0**-20
    for mode in ("fused", "buffered"):
        y = linear(x, encode(w), mode=mode)
        assert y.dtype == torch.float16
        assert torch.equal(y, F.linear(x.float(), w.float()).half())


@pytest.mark.parametrize(("products", "many"), [(True, "buffered"), (False, "blocked")])
def test_auto_chooses_by_rows(monkeypatch: pytest.MonkeyPatch, products: bool, many: str) -> None:
    """Few rows straight from the planes; more of them in blocks where the processor has no bfloat16 product."""
    calls: list[str] = []
    real = LINEAR._product
    monkeypatch.setattr(LINEAR, "_product", lambda *a: calls.append(a[-1]) or real(*a))
    monkeypatch.setattr(LINEAR, "has_bfloat16_products", lambda: products)
    monkeypatch.setattr(LINEAR, "fused_rows", lambda: 4)
    t = encode(weight())
    for shape in ((1,), (4,), (2, 2), (5,)):
        linear(inputs(*shape, 45, dtype=torch.bfloat16), t)
    assert calls == ["fused", "fused", "fused", many]
    linear(inputs(5, 45, dtype=torch.bfloat16), t, config=NF12Config(fused_rows_cpu=5))
    assert calls[-1] == "fused"
    linear(inputs(5, 45, dtype=torch.float32), t)  # widening the whole matrix would not pay
    assert calls[-1] == "blocked"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_equal_bits_to_the_plain_layer(rows: int, dtype: torch.dtype) -> None:
    """NF12 changes where weights come from, not what is computed: `BF16Linear` is the same sums."""
    from gnomon.kernels.bf16.module import BF16Linear

    w = weight(300, 1001)
    plain = torch.nn.Linear(1001, 300, bias=False, dtype=torch.bfloat16)
    plain.weight = torch.nn.Parameter(w, requires_grad=False)
    x = inputs(rows, 1001, dtype=dtype)
    assert torch.equal(linear(x, encode(w)), BF16Linear.of(plain)(x))


@pytest.mark.parametrize("mode", ["fused", "buffered"])
@pytest.mark.parametrize("shape", [(11,), (2, 3, 11)])
def test_gradients_of_input_and_bias(mode: str, shape: tuple[int, ...]) -> None:
    w = weight(5, 11)
    t, x, bias = encode(w), inputs(*shape, dtype=torch.float64), inputs(5, dtype=torch.float64, seed=2)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, bias: linear(x, t, bias, mode=mode), (x, bias))
    assert torch.autograd.gradgradcheck(lambda x, bias: linear(x, t, bias, mode=mode).square(), (x, bias))
    dy = inputs(*shape[:-1], 5, dtype=torch.float64, seed=3)
    mine = torch.autograd.grad(linear(x, t, bias, mode=mode), (x, bias), dy)
    theirs = torch.autograd.grad(F.linear(x, w.double(), bias), (x, bias), dy)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_is_conv1d(dtype: torch.dtype) -> None:
    from transformers.pytorch_utils import Conv1D

    w, x = weight(5, 11), inputs(2, 3, 5, dtype=dtype)
    layer = Conv1D(11, 5)
    layer.weight.data, layer.bias.data = w.to(dtype), inputs(11, dtype=dtype, seed=2)
    assert torch.equal(linear_transposed(x, encode(w), layer.bias), layer(x))
    assert torch.equal(linear_transposed(x[0], encode(w)), x[0] @ w.to(dtype))
    wide, bias = x[0].double().requires_grad_(), layer.bias.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: linear_transposed(x, encode(w), b), (wide, bias))


def test_autocast_is_followed() -> None:
    w, x = weight(), inputs(6, 45, dtype=torch.float32)
    bias = inputs(24, dtype=torch.float32, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, encode(w), bias, mode="buffered"), F.linear(x, w.float(), bias))
        assert linear(x, encode(w), bias, mode="fused").dtype == torch.bfloat16


def test_the_scratch_buffer_is_reused_grows_and_is_given_back() -> None:
    release_scratch()
    small, large = encode(weight()), encode(weight(50, 60))
    x = inputs(9, 45, dtype=torch.bfloat16)
    with torch.inference_mode():
        first = linear(x, small, mode="buffered")  # a buffer made here must serve outside as well
    kept = LINEAR._scratch.buffer
    assert not LINEAR._scratch.buffer.is_inference()
    assert torch.equal(linear(x, small, mode="buffered"), first)
    assert LINEAR._scratch.buffer is kept
    y = linear(inputs(9, 60, dtype=torch.bfloat16), large, mode="buffered")
    assert len(LINEAR._scratch.buffer) == 50 * 60 * 2
    before = y.clone()
    linear(x, small, mode="buffered")
    assert torch.equal(y, before)  # results never live in the buffer
    release_scratch()
    assert LINEAR._scratch.buffer is None


def test_a_second_derivative_keeps_the_matrix_it_needs() -> None:
    """Other products decode in between, into the same buffer; also in float32, which is multiplied from there."""
    w, t = weight(5, 11), encode(weight(5, 11))
    x = inputs(3, 11, dtype=torch.float32).requires_grad_()
    second = []
    for product in (lambda: linear(x, t, mode="buffered"), lambda: F.linear(x, w.float())):
        (first,) = torch.autograd.grad(product().pow(3).sum(), x, create_graph=True)
        linear(inputs(3, 11, dtype=torch.float32), encode(-w), mode="buffered")
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*second)


def test_refusals() -> None:
    t = encode(weight())
    with pytest.raises(UsageError, match=r"x has shape \(3, 44\), .* 24 x 45 takes 45 inputs"):
        linear(torch.zeros(3, 44), t)
    with pytest.raises(UsageError, match=r"takes 24 inputs"):
        linear_transposed(torch.zeros(3, 45), t)
    with pytest.raises(UsageError, match=r"Unknown mode 'fuse'. Did you mean 'fused'"):
        linear(torch.zeros(3, 45), t, mode="fuse")
    with pytest.raises(UsageError, match=r"fused_rows_cpu=-1"):
        NF12Config(fused_rows_cpu=-1)
    with pytest.raises(UsageError, match=r"raw_share=1\.5 must lie in \(0, 1\]"):
        NF12Config(raw_share=1.5)


MODES_AND_DTYPES = [("fused", torch.float32), ("buffered", torch.float64), ("blocked", torch.float32)]


@pytest.mark.parametrize(("mode", "dtype"), MODES_AND_DTYPES)
def test_torch_func_and_forward_mode_see_the_layer(mode: str, dtype: torch.dtype) -> None:
    """Truth: the plain linear layer under the same transforms. A kernel that computes past them loses tangents."""
    w, t = weight(5, 11).to(dtype), encode(weight(5, 11))
    x, dx = inputs(4, 3, 11, dtype=dtype), inputs(4, 3, 11, dtype=dtype, seed=2)
    bias, dbias = inputs(4, 5, dtype=dtype, seed=3), inputs(4, 5, dtype=dtype, seed=4)

    def mine(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, t, bias, mode=mode)

    def plain(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, w, bias)

    def forward_mode(f: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx), bias[0]))

    func = torch.func
    for transform in (
        lambda f: func.jvp(f, (x, bias[0]), (dx, dbias[0])),
        lambda f: func.jvp(lambda b: f(x, b), (bias[0],), (dbias[0],)),
        lambda f: func.vmap(f)(x, bias),
        lambda f: func.vmap(f, in_dims=(None, 0))(x, bias),
        lambda f: func.vmap(f, in_dims=(2, None), out_dims=1)(x.movedim(0, 2), bias[0]),
        lambda f: func.jacrev(f)(x[0, 0], bias[0]),
        lambda f: func.jacfwd(f)(x[0, 0], bias[0]),
        lambda f: func.hessian(lambda x: f(x).square().sum())(x[0, 0]),
        forward_mode,
    ):
        torch.testing.assert_close(transform(mine), transform(plain))


def test_torch_func_sees_gpt2s_layer() -> None:
    w, t = weight(5, 11).double(), encode(weight(5, 11))
    x, dx = inputs(3, 5, dtype=torch.float64), inputs(3, 5, dtype=torch.float64, seed=2)
    bias = inputs(11, dtype=torch.float64, seed=3)
    for transform in (
        lambda f: torch.func.jvp(f, (x,), (dx,)),
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.hessian(lambda x: f(x).square().sum())(x),
    ):
        expected = transform(lambda x: x @ w + bias)
        torch.testing.assert_close(transform(lambda x: linear_transposed(x, t, bias)), expected)


@pytest.mark.parametrize("mode", ["auto", "fused", "buffered", "blocked"])
def test_tracing_records_the_product(mode: str) -> None:
    """Truth: the same call without tracing, for another input than the traced one."""
    t, first, other = encode(weight()), inputs(3, 45, dtype=torch.float32), inputs(3, 45, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: linear(x, t, mode=mode), (first,), check_trace=False)
        rows = torch.jit.trace(t.rows, (torch.tensor([1, 2]),), check_trace=False)
    torch.testing.assert_close(traced(other * 2), linear(other * 2, t, mode=mode))
    assert torch.equal(rows(torch.tensor([7, 3])), t.rows(torch.tensor([7, 3])))


@pytest.mark.parametrize("mode", ["auto", "fused", "buffered", "blocked"])
def test_views_that_negate_when_they_are_read(mode: str) -> None:
    """`imag` of a conjugate is such a view: its memory holds the other sign."""
    t, x = encode(weight()), inputs(3, 45, dtype=torch.float32)
    assert torch.equal(linear(torch._neg_view(x), t, mode=mode), -linear(x, t, mode=mode))


@pytest.mark.parametrize("mode", ["auto", "fused", "buffered", "blocked"])
def test_no_columns_give_zeros(mode: str) -> None:
    t = encode(torch.empty(5, 0, dtype=torch.bfloat16))
    assert torch.equal(linear(torch.empty(3, 0), t, mode=mode), torch.zeros(3, 5))


@pytest.mark.parametrize("mode", ["fused", "buffered", "blocked"])
def test_the_result_has_the_dtype_of_x_whatever_the_bias(mode: str) -> None:
    x = inputs(3, 45, dtype=torch.bfloat16)
    assert linear(x, encode(weight()), torch.zeros(24), mode=mode).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (torch.ones(3, 45, dtype=torch.int64), "int64"),  # would be multiplied by weights rounded to 0
        (torch.ones(3, 45, dtype=torch.complex64), "complex64"),
        (torch.ones(3, 45).to_sparse(), "sparse_coo"),
    ],
)
def test_an_x_that_has_no_dense_floats_is_refused(x: Tensor, kind: str) -> None:
    with pytest.raises(UsageError, match=f"x is {kind}.*Convert x first"):
        LINEAR._check_inputs(x, 45, encode(weight()))  # past the type annotations, which tests enforce


def test_a_layer_on_the_meta_device_tells_shapes() -> None:
    t = encode(weight()).to("meta")
    assert linear(torch.empty(2, 3, 45, device="meta"), t).shape == (2, 3, 24)
    assert t.rows(torch.empty(2, 3, device="meta", dtype=torch.int64)).shape == (2, 3, 45)
