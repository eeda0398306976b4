"""Checks of the Triton kernels, run by test_triton.py in a process of their own: Triton reads TRITON_INTERPRET
once, when kernels are defined. On a machine with a GPU the same checks run compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planes import encode, gaussian, patterns

from gnomon.core.errors import UsageError
from gnomon.kernels.bf16 import triton as bf16
from gnomon.kernels.launch import interpreted
from gnomon.kernels.nf12 import reference
from gnomon.kernels.nf12 import triton as nf12

DEVICE = "cpu" if interpreted() else "cuda"


def planes(weight: torch.Tensor, base: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(plane.to(DEVICE) for plane in encode(weight, base))  # type: ignore[return-value]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().view(torch.int16 if t.element_size() == 2 else torch.int32)


def test_can_run_here() -> None:
    assert nf12.why_not(torch.device(DEVICE)) is None


@pytest.mark.parametrize(
    ("order", "base"),
    [
        ("numeric", 1),
        ("numeric", 112),
        ("permuted", 239),
        pytest.param("repeated", 108, marks=pytest.mark.slow),
    ],
)
def test_decode_of_every_pattern(order: str, base: int) -> None:
    weight = patterns(order)
    assert torch.equal(bits(nf12.decode(*planes(weight, base), base, weight.shape[1])), bits(weight))


@pytest.mark.parametrize(
    "base", [pytest.param(b, marks=[] if b % 34 == 1 else pytest.mark.slow) for b in range(1, 240)]
)
def test_every_base(base: int) -> None:
    """Every code of a window."""
    window = torch.arange(base << 7, base + 16 << 7, dtype=torch.int32).to(torch.int16)
    weight = torch.stack([window, window | -0x8000]).view(torch.bfloat16)
    assert torch.equal(bits(nf12.decode(*planes(weight, base), base, weight.shape[1])), bits(weight))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1), (1, 8), (5, 63), (33, 129), (2, 1000), (129, 40)])
@pytest.mark.parametrize("sigma", [0.02, 3.0])  # next to no exceptions, many
def test_odd_shapes(shape: tuple[int, int], sigma: float) -> None:
    weight = gaussian(*shape, sigma=sigma)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    result = nf12.decode(*planes(weight, 108), 108, shape[1], out=out)
    assert result is out
    assert torch.equal(bits(out), bits(weight))


def test_without_exceptions() -> None:
    weight = torch.full((4, 16), 0.125, dtype=torch.bfloat16)
    sm, ex, esc = planes(weight, 109)
    assert len(esc) == 0
    assert torch.equal(bits(nf12.decode(sm, ex, esc, 109, 16)), bits(weight))


def test_planes_that_start_off_a_word() -> None:
    weight = gaussian(3, 16)
    sm, ex, esc = planes(weight, 108)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8, device=DEVICE), sm.flatten()])[1:].view(sm.shape)
    assert torch.equal(bits(nf12.decode(shifted, ex, esc, 108, 16)), bits(weight))


def test_out_of_another_shape_is_refused() -> None:
    sm, ex, esc = planes(gaussian(3, 16), 108)
    wrong = torch.empty(3, 17, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(UsageError, match=r"out is torch.bfloat16 \(3, 17\).*\(3, 16\)"):
        nf12.decode(sm, ex, esc, 108, 16, out=wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("b", "n", "k"), [(1, 1, 8), (1, 5, 264), (2, 7, 129), (3, 5, 300), (8, 4, 256), (9, 3, 40), (1, 18, 24)]
)
def test_linear(b: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Fused = matched, bit for bit; both = float64 of the same inputs within the rounding of float32 sums."""
    weight = gaussian(n, k)
    x = torch.randn(b, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    fused = nf12.linear(x.to(DEVICE), *planes(weight, 108), 108).cpu()
    matched = bf16.linear(x.to(DEVICE), weight.to(DEVICE)).cpu()
    assert fused.dtype == dtype
    assert fused.shape == (b, n)
    assert torch.equal(bits(fused), bits(matched))
    exact = reference.linear(x.double(), *encode(weight, 108), 108)
    assert torch.equal(exact, x.double() @ weight.double().T)
    error = (fused.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_linear_with_many_exceptions_is_still_the_matched_one() -> None:
    """Verbatim groups next to coded ones, subnormals, infinities and NaN among them."""
    weight = patterns("permuted")[:8]
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    fused, matched = nf12.linear(x, *planes(weight, 120), 120), bf16.linear(x, weight.to(DEVICE))
    assert torch.equal(bits(fused), bits(matched))
    weight = torch.where(weight.float().abs() < 1e3, weight, 0.0)  # finite, most groups verbatim
    fused, matched = nf12.linear(x, *planes(weight, 120), 120), bf16.linear(x, weight.to(DEVICE))
    assert torch.isfinite(fused).all()
    assert torch.equal(bits(fused), bits(matched))


@pytest.mark.parametrize("share", [32, 96])
def test_columns_shared_out(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small N gives its columns to several programs: the same for both formats, and still right."""
    from gnomon.kernels.gemv import triton as gemv

    monkeypatch.setattr(gemv, "_groups_per_share", lambda n, groups, device: share)
    weight, x = gaussian(3, 1000), torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    matched = bf16.linear(x.to(DEVICE), weight.to(DEVICE))
    assert torch.equal(bits(nf12.linear(x.to(DEVICE), *planes(weight, 108), 108)), bits(matched))
    exact = x.double() @ weight.double().T
    assert ((matched.cpu().double() - exact).norm() / exact.norm()).item() < 1e-6


def test_shares_are_whole_steps_that_cover_the_columns() -> None:
    from gnomon.kernels.gemv.triton import _groups_per_share

    for n, groups in [(1, 1), (1, 31), (4, 1024), (4096, 1024), (1, 100_000)]:
        share = _groups_per_share(n, groups, torch.device(DEVICE))
        assert share % 32 == 0
        assert share >= min(groups, 128)


def test_empty_products() -> None:
    sm, ex, esc = planes(gaussian(0, 16), 108)
    assert nf12.linear(torch.ones(2, 16, device=DEVICE), sm, ex, esc, 108).shape == (2, 0)
    sm, ex, esc = planes(gaussian(3, 0), 108)
    assert nf12.linear(torch.ones(2, 0, device=DEVICE), sm, ex, esc, 108).tolist() == [[0.0] * 3] * 2


def asm(code: str, *inputs: np.ndarray) -> np.ndarray:
    """What a line of inline PTX computes: the four instructions that the decode uses, as the PTX manual has them."""
    values = {f"${i + 1}": x for i, x in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        return values[name] if name in values else np.array(int(name, 0), dtype=np.uint64)

    for statement in filter(None, (part.strip(" {}") for part in code.split(";"))):
        opcode, rest = statement.split(maxsplit=1)
        if opcode == ".reg":
            continue
        to, *names = (name.strip() for name in rest.split(","))
        x = [value(name) for name in names]
        if opcode == "and.b32":
            values[to] = x[0] & x[1]
        elif opcode in ("mad.lo.u32", "mad.hi.u32"):
            product = x[0] * x[1]
            values[to] = (product >> np.uint64(32) if "hi" in opcode else product) + x[2] & np.uint64(
                0xFFFFFFFF
            )
        else:
            assert opcode == "prmt.b32"
            eight = x[0] | x[1] << np.uint64(32)
            picks = [int(x[2]) >> 4 * i & 15 for i in range(4)]
            assert max(picks) < 8  # the sign-copying mode isn't used
            values[to] = sum(
                (eight >> np.uint64(8 * p) & np.uint64(255)) << np.uint64(8 * i) for i, p in enumerate(picks)
            )
    return values["$0"]


@pytest.mark.parametrize("base", [1, 108, 239])
def test_inline_ptx_is_the_decode(base: int) -> None:
    """The form for NVIDIA devices, run by the evaluator above, on random groups."""
    from gnomon.kernels.nf12 import triton_kernels as kernels

    rng = np.random.default_rng(0)
    sm, ex = rng.integers(0, 256, (1000, 8), np.uint8), rng.integers(1, 2**32, (1000, 1), np.uint32)
    low, high = (sm[:, i : i + 4].copy().view(np.uint32).flatten().astype(np.uint64) for i in (0, 4))
    bases, word = np.uint64(base * 0x00800080), ex.flatten().astype(np.uint64)
    spreads = [kernels.SPREAD_LOW, kernels.SPREAD_HIGH] * 2
    exponents = [kernels.EXPONENTS_0, kernels.EXPONENTS_1, kernels.EXPONENTS_2, kernels.EXPONENTS_3]
    packed = [
        asm(spread.value, half) & np.uint64(kernels.FIELDS.value & 0xFFFFFFFF) | asm(e.value, word, bases)
        for spread, half, e in zip(spreads, (low, low, high, high), exponents, strict=True)
    ]
    decoded = np.stack(packed, axis=1).astype(np.uint32).view(np.uint16).astype(np.int64)
    empty = torch.empty(0, 8, dtype=torch.bfloat16)
    expected = reference.decode(torch.from_numpy(sm), torch.from_numpy(ex.view(np.int32)), empty, base, 8)
    assert np.array_equal(decoded & 0xFFFF, expected.view(torch.int16).numpy().view(np.uint16))
