"""The C++ kernels, per instruction set, against the bits of the matrix, float64 sums and each other.

Sources of truth: the original bits (decoding), float64 products, and, for the claim of equal outputs, the plain
BF16 kernel. Sets that this processor lacks run on emulated intrinsics in the slow test at the end.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planes import encode, gaussian, patterns
from torch import Tensor

from gnomon.core.errors import UsageError
from gnomon.kernels import bf16, choosing, native, nf12

SHAPES = [(1, 8), (1, 1), (3, 100), (33, 576), (7, 1001), (130, 130), (0, 64)]


def runs(isa: str) -> pytest.param:
    reason = native.why_not(isa)
    return pytest.param(isa, marks=pytest.mark.skipif(bool(reason), reason=reason or "runs"))


isas = pytest.mark.parametrize("isa", [runs(isa) for isa in native.ISAS])


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)


def matrix(rows: int, columns: int, zeros: float) -> Tensor:
    """Gaussian weights, some of them exact zeros: none, some or most groups are exceptions."""
    w = gaussian(rows, columns)
    w[torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) < zeros] = 0
    return w


def check_decoding(isa: str) -> None:
    """Every pattern, order, base class and shape comes back bit for bit, in bfloat16 and widened."""
    for order in ("numeric", "permuted", "repeated"):
        w = patterns(order)
        for base in (1, 97, 112, 239):
            assert torch.equal(bits(nf12.decode(*encode(w, base), base, w.shape[1], impl=isa)), bits(w))
    for rows, columns in SHAPES:
        for zeros in (0.0, 0.002, 0.3):
            w = matrix(rows, columns, zeros)
            planes = encode(w, 108)
            assert torch.equal(bits(nf12.decode(*planes, 108, columns, impl=isa)), bits(w))
            wide = torch.full((rows, columns), 7.0)
            nf12.decode(*planes, 108, columns, out=wide, impl=isa)
            assert torch.equal(wide, w.float())
            if rows:
                some = torch.tensor([rows - 1, 0, rows // 2])
                assert torch.equal(
                    bits(nf12.decode_rows(some, *planes, 108, columns, impl=isa)), bits(w[some])
                )
    large = gaussian(1024, 8192)  # 16 MiB: written past the caches
    assert torch.equal(bits(nf12.decode(*encode(large, 108), 108, 8192, impl=isa)), bits(large))


def check_products(isa: str) -> None:
    """Sums are right, and those of the two formats are the same operations in the same order."""
    dtypes = [torch.bfloat16] if isa == "avx512_bf16" else [torch.bfloat16, torch.float32]
    for rows, columns in SHAPES:
        for zeros in (0.0, 0.002, 0.3):
            w = matrix(rows, columns, zeros)
            planes = encode(w, 108)
            for dtype in dtypes:
                for batch in (1, 2, 3, 4, 7):
                    x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(batch)).to(dtype)
                    fused = nf12.linear(x, *planes, 108, impl=isa)
                    assert torch.equal(bits(fused), bits(bf16.linear(x, w, impl=isa)))
                    exact = x.double() @ w.double().T
                    # rounding the result alone costs 1.7e-3 in bfloat16; a float32 sum of 1,000 terms 3e-7
                    bound = (5e-3 if dtype == torch.bfloat16 else 1e-6) * exact.norm() + 1e-12
                    assert (fused - exact).norm() <= bound
                    alone = nf12.linear(x[-1:], *planes, 108, impl=isa)
                    assert torch.equal(bits(alone), bits(fused[-1:]))  # neighbours in a batch change nothing


@isas
def test_decoding(isa: str) -> None:
    check_decoding(isa)


@isas
def test_products(isa: str) -> None:
    check_products(isa)


@isas
def test_wrong_planes_give_other_results(isa: str) -> None:
    w, x = gaussian(16, 128), torch.ones(1, 128, dtype=torch.bfloat16)
    sm, ex, esc = encode(w, 108)
    right = nf12.linear(x, sm, ex, esc, 108, impl=isa)
    assert not torch.equal(nf12.linear(x, sm ^ 0x80, ex, esc, 108, impl=isa), right)
    assert not torch.equal(nf12.linear(x, sm, ex, esc, 109, impl=isa), right)
    assert not torch.equal(nf12.linear(x, sm, ex.roll(1, 1), esc, 108, impl=isa), right)


@isas
def test_an_index_past_the_escapes_reads_the_last_one(isa: str) -> None:
    w = torch.zeros(4, 64, dtype=torch.bfloat16)
    sm, ex, esc = encode(w, 108)
    sm.view(4, 8, 8)[:, :, :4] = (
        255  # index 4,294,967,295 of 32: a validator refuses it, the kernel survives it
    )
    assert torch.equal(nf12.decode(sm, ex, esc, 108, 64, impl=isa), w)
    assert not nf12.linear(torch.ones(1, 64, dtype=torch.bfloat16), sm, ex, esc, 108, impl=isa).any()


@isas
def test_threads_change_nothing(isa: str) -> None:
    w, x = matrix(257, 640, 0.01), torch.randn(3, 640).bfloat16()
    planes, before = encode(w, 108), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((nf12.linear(x, *planes, 108, impl=isa), nf12.decode(*planes, 108, 640, impl=isa)))
    finally:
        torch.set_num_threads(before)
    for product, decoded in results[1:]:
        assert torch.equal(bits(product), bits(results[0][0]))
        assert torch.equal(bits(decoded), bits(results[0][1]))


def test_special_values_follow_the_plain_kernel() -> None:
    w = patterns("permuted")
    x = torch.ones(1, 256)
    fused, plain = nf12.linear(x, *encode(w, 112), 112), bf16.linear(x, w)
    assert torch.equal(fused.isnan(), plain.isnan())
    assert fused.isnan().any()  # NaN weights reach the sum


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"x": a["x"][:, :50]}, "50 columns"),
        (lambda a: a | {"sm": a["sm"].to(torch.int8)}, "uint8"),
        (lambda a: a | {"ex": a["ex"][:, :-1]}, "don't fit together"),
        (lambda a: a | {"esc": a["esc"].view(-1)}, "don't fit together"),
        (lambda a: a | {"sm": a["sm"].T.contiguous().T}, "contiguous"),
        (lambda a: a | {"base": 0}, "base=0"),
        (lambda a: a | {"impl": "avx3"}, "avx2"),
    ],
)
def test_refusals(change: object, message: str) -> None:
    sm, ex, esc = encode(gaussian(16, 100), 108)
    arguments = {"x": torch.ones(1, 100), "sm": sm, "ex": ex, "esc": esc, "base": 108, "impl": "auto"}
    arguments = change(arguments)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        nf12.linear(**arguments)


def test_row_numbers_are_checked() -> None:
    planes = encode(gaussian(4, 64), 108)
    with pytest.raises(UsageError, match=r"0 … 3"):
        nf12.decode_rows(torch.tensor([4]), *planes, 108, 64)
    for odd in (torch.tensor([1.5]), torch.tensor([True])):
        with pytest.raises(UsageError, match=r"have to be int64 or int32, not"):
            nf12.decode_rows(odd, *planes, 108, 64)
    with pytest.raises(UsageError, match=r"contiguous"):
        nf12.decode(*planes, 108, 64, out=torch.empty(4, 63, dtype=torch.bfloat16))


def test_meta_and_compiled_tensors_go_through_the_operator() -> None:
    sm, ex, esc = encode(gaussian(16, 100), 108)
    x = torch.randn(2, 3, 100)
    meta = nf12.linear(*(t.to("meta") for t in (x, sm, ex, esc)), 108)
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 3, 16), torch.float32, "meta")
    torch.library.opcheck(torch.ops.gnomon.nf12_linear, (x[0], sm, ex, esc, 108, "auto"))
    torch.library.opcheck(torch.ops.gnomon.bf16_linear, (x[0], gaussian(16, 100), "auto"))
    for rows in (None, torch.tensor([3, 0, 3])):
        torch.library.opcheck(torch.ops.gnomon.nf12_decode, (sm, ex, esc, 108, 100, rows, "auto"))


def test_no_columns_give_zeros() -> None:
    """A sum of nothing; the memory of the result is not left as it was found."""
    weight = torch.empty(5, 0, dtype=torch.bfloat16)
    for dtype in native.DTYPES:
        x = torch.empty(3, 0, dtype=dtype)
        torch.full((3, 5), 7.0, dtype=dtype)  # leaves its block to the next result of this size
        assert torch.equal(bf16.linear(x, weight), torch.zeros(3, 5, dtype=dtype))
        assert torch.equal(nf12.linear(x, *encode(weight, 108), 108), torch.zeros(3, 5, dtype=dtype))


def test_views_that_negate_when_they_are_read() -> None:
    """`imag` of a conjugate is such a view: its memory holds the other sign."""
    w, x = gaussian(16, 100), torch.randn(2, 100)
    planes = (*encode(w, 108), 108)
    assert torch.equal(nf12.linear(torch._neg_view(x), *planes), -nf12.linear(x, *planes))
    assert torch.equal(bf16.linear(torch._neg_view(x), w), -bf16.linear(x, w))
    out = torch._neg_view(torch.empty(16, 100))
    assert torch.equal(nf12.decode(*planes, 100, out=out), w.float())


def test_a_gradient_is_refused_rather_than_lost() -> None:
    x = torch.randn(1, 100, requires_grad=True)
    y = nf12.linear(x, *encode(gaussian(16, 100), 108), 108)
    with pytest.raises(RuntimeError, match=r"backward|autograd"):
        y.sum().backward()


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library, built so that AVX-512 intrinsics are emulated."""
    compiler = shutil.which("g++")
    if compiler is None or not Path("/usr/include/simde/x86/avx512.h").exists():
        pytest.skip("needs g++ and SIMDe (Debian: libsimde-dev)")
    folder = Path(native.__file__).parent
    sources = [folder / name for name in ("library.cpp", "nf12/nf12.cpp", "bf16/bf16.cpp")]
    target = tmp_path / "emulated.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-include",
        str(Path(__file__).parent / "emulate.hpp"),
    ]
    subprocess.run([compiler, *flags, "-o", str(target), *map(str, sources)], check=True)
    monkeypatch.setattr(native, "_opened", lambda: (ctypes.CDLL(str(target)), ""))
    native.why_not.cache_clear()
    choosing.forget()
    yield
    native.why_not.cache_clear()
    choosing.forget()


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_avx512_on_emulated_intrinsics() -> None:
    for isa in ("avx512", "avx512_bf16"):
        assert native.why_not(isa) is None
        check_decoding(isa)
        check_products(isa)
