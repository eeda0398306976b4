"""`BF16Linear` against `nn.Linear` on the same parameters: odd inputs, transforms, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnomon.core.errors import UsageError
from gnomon.kernels.bf16.module import BF16Linear, fast_linears


@pytest.fixture
def layers() -> tuple[nn.Linear, BF16Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(100, 24, dtype=torch.bfloat16).requires_grad_(False)
    return plain, BF16Linear.of(plain)


def test_transforms_see_the_layer(layers: tuple[nn.Linear, BF16Linear]) -> None:
    plain, fast = layers
    x, dx = torch.randn(2, 4, 100).bfloat16()
    for transform in (
        lambda f: torch.func.jvp(f, (x,), (dx,)),
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.grad(lambda x: f(x).sum())(x),
    ):
        torch.testing.assert_close(transform(fast), transform(plain))
    with torch.autograd.forward_ad.dual_level():
        tangent = [torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, dx))).tangent
                   for f in (fast, plain)]  # fmt: skip
        torch.testing.assert_close(*tangent)


@pytest.mark.parametrize("shape", [(0, 100), (100,), (2, 0, 100), (2, 3, 100), (40, 100)])
def test_odd_shapes(layers: tuple[nn.Linear, BF16Linear], shape: tuple[int, ...]) -> None:
    plain, fast = layers
    x = torch.randn(*shape).bfloat16()
    torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(fast(torch.stack((x, x), -1)[..., 0]), fast(x))  # not contiguous


@pytest.mark.parametrize("rows", [0, 3, 40])
def test_no_inputs_leave_the_bias(rows: int) -> None:
    layer = BF16Linear.of(nn.Linear(0, 5, dtype=torch.bfloat16)).requires_grad_(False)
    layer.bias.fill_(3)
    assert torch.equal(layer(torch.empty(rows, 0)), torch.full((rows, 5), 3.0))


def test_what_nn_linear_refuses_is_refused(layers: tuple[nn.Linear, BF16Linear]) -> None:
    _, fast = layers
    for layer in layers:
        with pytest.raises(RuntimeError, match="same dtype"):
            layer(torch.ones(2, 100).half())
    with pytest.raises(UsageError, match=r"doesn't fit \(24, 100\)"):
        fast(torch.ones(2, 99).bfloat16())
    with pytest.raises(UsageError, match=r"no nn\.Linear with a bfloat16 weight"):
        fast_linears(nn.Sequential(nn.Linear(8, 8)))
