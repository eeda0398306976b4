"""Checks of MGLU's Triton kernels, run by test_mglu_kernels.py in a process of their own: Triton reads
TRITON_INTERPRET once, when kernels are defined. On a machine with a GPU the same checks run compiled."""

from __future__ import annotations

import pytest
import torch

from gnomon.kernels import mglu
from gnomon.kernels.launch import interpreted
from gnomon.kernels.mglu import reference, triton
from gnomon.kernels.mglu.planes import pack

DEVICE = "cpu" if interpreted() else "cuda"


def operands(
    b: int, d: int, h: int, n: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(b + d + h + n)
    x, w = torch.randn(b, h, generator=g).to(dtype), torch.randn(d, h, generator=g).to(kind)
    return x, w, pack(torch.rand(n, d, h, generator=g) < 0.5)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    # the interpreter cuts bfloat16 results off instead of rounding them: twice the error
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[found.dtype]
    return bool((found.cpu().double() - exact).norm() <= bound * exact.norm() + 1e-12)


@pytest.mark.parametrize("act", list(reference.ACTIVATIONS))
def test_activations(act: str) -> None:
    x, w, planes = operands(1, 9, 70, 2, torch.float32, torch.bfloat16)
    found = triton.mglu(x.to(DEVICE), w.to(DEVICE), planes.to(DEVICE), act)
    assert close(found, reference.mglu(x.double(), w.double(), planes, act))
    found = triton.glu(x.to(DEVICE), w.to(DEVICE), w.flip(0).to(DEVICE), act)
    assert close(found, reference.glu(x.double(), w.double(), w.flip(0).double(), act))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("b", "d", "h", "n"), [(1, 1, 1, 1), (2, 17, 129, 4), (3, 3, 64, 8), (1, 2, 64, 16)])
def test_shapes(b: int, d: int, h: int, n: int, dtype: torch.dtype) -> None:
    x, w, planes = operands(b, d, h, n, dtype, dtype)
    routes = torch.rand(b, n, generator=torch.Generator().manual_seed(0))
    args = [t.to(DEVICE) for t in (x, w, planes)]
    for r in (None, routes):
        found = mglu.flash_mglu(*args, n, "silu", "triton", routes=None if r is None else r.to(DEVICE))
        assert found.dtype == dtype and found.shape == (b, d)
        assert close(found, reference.mglu(x.double(), w.double(), planes, "silu", r))
    again = mglu.flash_mglu(*args, n, "silu", "triton")
    assert torch.equal(again, mglu.flash_mglu(*args, n, "silu", "triton"))
    assert torch.equal(mglu.flash_mglu(args[0][-1:], *args[1:], n, "silu", "triton"), again[-1:])


@pytest.mark.parametrize("share", [64, 128])
def test_columns_shared_out(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, planes = operands(2, 3, 1300, 2, torch.float32, torch.bfloat16)
    monkeypatch.setattr(triton, "_shares", lambda *_: share)
    found = triton.mglu(x.to(DEVICE), w.to(DEVICE), planes.to(DEVICE), "silu")
    assert close(found, reference.mglu(x.double(), w.double(), planes, "silu"))


def test_masks_that_split_nothing_give_zero() -> None:
    x, w, planes = operands(1, 9, 130, 2, torch.float32, torch.bfloat16)
    for plane in (
        torch.zeros_like(planes),
        torch.full_like(planes, 255),
    ):  # pads of 1 contribute nothing, too
        assert not triton.mglu(x.to(DEVICE), w.to(DEVICE), plane.to(DEVICE), "silu").any()


def test_nothing_in_nothing_out() -> None:
    for b, d, h in ((0, 3, 8), (2, 0, 8), (2, 3, 0)):
        x, w, planes = operands(b, d, h, 2, torch.float32, torch.bfloat16)
        found = triton.mglu(x.to(DEVICE), w.to(DEVICE), planes.to(DEVICE), "silu")
        assert found.shape == (b, d) and not found.any()
