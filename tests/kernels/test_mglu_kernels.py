"""FlashMGLU's kernels. Sources of truth: float64 sums of the reference's two products, themselves checked against plain
loops over bits; equal bits over threads, batches and calls. Instruction sets that this processor lacks run on emulated
intrinsics, Triton's kernels in a process of their own."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnomon.core.errors import GnomonError, UsageError
from gnomon.kernels import choosing, chosen, mglu, native
from gnomon.kernels.mglu import cpu, flash_mglu, reference, triton
from gnomon.kernels.mglu.planes import by_rows, code_of, pack, planes_of, unpack

HERE = Path(__file__).parent
SHAPES = [(1, 1), (3, 100), (1, 64), (33, 96), (70, 129), (129, 8), (5, 1001), (0, 64), (4, 0)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Rounding the result alone costs 1.7e-3 in bfloat16. In float32 a value is the difference of two larger sums."""


def runs(isa: str) -> pytest.param:
    reason = native.why_not(isa)
    return pytest.param(isa, marks=pytest.mark.skipif(bool(reason), reason=reason or "runs"))


isas = pytest.mark.parametrize("isa", [runs(isa) for isa in native.ISAS])
built = pytest.mark.skipif(bool(native.problem()), reason=native.problem() or "built")


def operands(
    b: int, d: int, h: int, n: int, dtype: torch.dtype = torch.bfloat16, weight: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and planes."""
    g = torch.Generator().manual_seed(1000 * b + 100 * d + 10 * h + n)
    x, w = torch.randn(b, h, generator=g).to(dtype), torch.randn(d, h, generator=g).to(weight)
    return x, w, pack(torch.rand(n, d, h, generator=g) < 0.5)


def close(found: Tensor, exact: Tensor) -> bool:
    error = (found.double() - exact).norm()
    return found.shape == exact.shape and bool(error <= BOUNDS[found.dtype] * exact.norm() + 1e-12)


def check(isa: str, shapes: list[tuple[int, int]], masks: tuple[int, ...]) -> None:
    """Sums and activations on every shape class, with and without routes; neighbours in a batch change nothing."""
    dtypes = [torch.bfloat16] if isa == "avx512_bf16" else [torch.bfloat16, torch.float32]
    for dtype in dtypes:
        for d, h in shapes:
            for n in masks:
                for b in (1, 2, 3, 9):
                    x, w, planes = operands(b, d, h, n, dtype)
                    routes = torch.rand(b, n, generator=torch.Generator().manual_seed(0)) if b > 1 else None
                    found = flash_mglu(x, w, planes, n, "silu", isa, routes=routes)
                    assert close(found, reference.mglu(x.double(), w.double(), planes, "silu", routes))
                    last = None if routes is None else routes[-1:]
                    alone = flash_mglu(x[-1:], w, planes, n, "silu", isa, routes=last)
                    assert torch.equal(alone, found[-1:])
                    assert torch.equal(
                        flash_mglu(x, w, by_rows(planes), n, "silu", isa, routes=routes), found
                    )
            x, w, _ = operands(3, d, h, 1, dtype)
            found = mglu.glu(x, w, w.flip(0), "silu", isa)
            assert close(found, reference.glu(x.double(), w.double(), w.flip(0).double(), "silu"))
        for act in reference.ACTIVATIONS:
            x, w, planes = operands(2, 40, 24, 3, dtype)
            found = flash_mglu(x, w, planes, 3, act, isa)
            assert close(found, reference.mglu(x.double(), w.double(), planes, act))
            found = mglu.glu(x, w, w.flip(0), act, isa)
            assert close(found, reference.glu(x.double(), w.double(), w.flip(0).double(), act))


@isas
def test_products(isa: str) -> None:
    check(isa, SHAPES, (1, 2, 4, 8))
    check(isa, [(9, 70)], (3, 5, 6, 7, 9, 16))


@isas
def test_activations_far_from_zero(isa: str) -> None:
    """A row is one gate each, from -300 to 300: overflow, cancellation and saturation."""
    gates = torch.cat([torch.linspace(-300, 300, 601), torch.linspace(-6, 6, 601), torch.tensor([0.0, -0.0])])
    w = torch.stack([gates.bfloat16(), torch.ones(1204).bfloat16()], 1).contiguous()
    planes = pack(torch.tensor([True, False]).expand(1, 1204, 2))
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    for act in reference.ACTIVATIONS:
        found = flash_mglu(x, w, planes, 1, act, isa)
        exact = reference.mglu(x.double(), w.double(), planes, act)
        assert bool(((found - exact).abs() <= 5e-3 * exact.abs() + 4e-7 * gates.abs().clamp(min=1)).all()), (
            act
        )


@isas
@pytest.mark.parametrize("n", [1, 2, 4, 8, 11])
def test_masks_that_split_nothing_give_exactly_zero(isa: str, n: int) -> None:
    """Both sums are the same operations; pads of 1 contribute nothing."""
    x, w, planes = operands(3, 70, 129, n)
    for plane in (torch.zeros_like(planes), torch.full_like(planes, 255)):
        assert not flash_mglu(x, w, plane, n, "silu", isa).any()
    garbage = planes.clone()
    garbage[..., -1] |= 0b11111110  # beyond column 128
    assert torch.equal(flash_mglu(x, w, garbage, n, "silu", isa), flash_mglu(x, w, planes, n, "silu", isa))


@isas
def test_wrong_operands_give_other_results(isa: str) -> None:
    x, w, planes = operands(1, 16, 128, 4)
    right = flash_mglu(x, w, planes, 4, "silu", isa)
    flipped = planes.clone()
    flipped[2, 5, 9] ^= 1 << 3  # one bit of one mask
    others = flash_mglu(x, w, flipped, 4, "silu", isa) != right
    assert others[0, 5] and others.sum() == 1
    assert not torch.equal(flash_mglu(x, w, planes ^ 255, 4, "silu", isa), right)
    assert close(flash_mglu(x, w, planes[[2, 0, 3, 1]], 4, "silu", isa), right.double())


@isas
@pytest.mark.parametrize("n", [1, 4, 8, 16])
def test_threads_and_calls_change_nothing(isa: str, n: int) -> None:
    x, w, planes = operands(1, 257, 200, n)
    more, before = operands(5, 257, 200, n)[0], torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            results.append(
                torch.cat([flash_mglu(x, w, planes, n, "gelu", isa), flash_mglu(more, w, planes, n, "gelu", isa),
                           mglu.glu(more, w, w.flip(0), "gelu", isa)])
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_rows_go_block_by_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BLOCK_BYTES", 1 << 14)  # several blocks, the last one smaller
    for n, d, h in ((1, 50, 129), (4, 33, 64), (16, 20, 7)):
        x, w, planes = operands(cpu.rows_at_once() + 3, d, h, n, dtype)
        routes = torch.rand(len(x), n, generator=torch.Generator().manual_seed(0))
        for r in (None, routes):
            found = flash_mglu(x, w, planes, n, routes=r)
            assert close(found, reference.mglu(x.double(), w.double(), planes, "silu", r))
        wide = cpu.blocked(x, w, torch.full_like(planes, 255), "silu", None)
        assert bool(wide.abs().max() <= 1e-3 * found.abs().max())


def test_the_reference_and_the_naive_form_by_loops() -> None:
    x, w, planes = operands(2, 4, 9, 2, torch.float64, torch.float64)
    masks = unpack(planes, 9)
    out = torch.zeros(2, 4, dtype=torch.float64)
    for b in range(2):
        for j in range(4):
            for i in range(2):
                on = [k for k in range(9) if planes[i, j, k // 8] >> k % 8 & 1]
                off = [k for k in range(9) if k not in on]
                gate, value = sum(x[b, k] * w[j, k] for k in on), sum(x[b, k] * w[j, k] for k in off)
                out[b, j] += gate / (1 + torch.exp(-torch.as_tensor(gate))) * value
    torch.testing.assert_close(reference.mglu(x, w, planes, "silu"), out)
    torch.testing.assert_close(reference.naive(x, w, masks.double(), "silu"), out)


def test_layouts_give_equal_bits() -> None:
    x, w, planes = operands(1, 33, 77, 5)
    again = planes_of(code_of(planes, 77), 5)
    assert torch.equal(again, planes)
    assert torch.equal(flash_mglu(x, w, again, 5), flash_mglu(x, w, planes, 5))


def test_planes_by_rows_are_the_same_planes() -> None:
    x, w, planes = operands(70, 33, 77, 5)
    arranged = by_rows(planes)
    assert torch.equal(arranged, planes) and arranged.stride() == (10, 50, 1)
    assert by_rows(arranged).data_ptr() == arranged.data_ptr()
    assert torch.equal(cpu.blocked(x, w, arranged, "silu", None), cpu.blocked(x, w, planes, "silu", None))
    assert torch.equal(reference.mglu(x, w, arranged, "silu"), reference.mglu(x, w, planes, "silu"))


def test_shapes_and_views() -> None:
    x, w, planes = operands(6, 10, 24, 2)
    flat = flash_mglu(x, w, planes, 2)
    assert torch.equal(flash_mglu(x.view(2, 3, 24), w, planes, 2), flat.view(2, 3, 10))
    assert torch.equal(flash_mglu(x[0], w, planes, 2), flat[0])
    assert torch.equal(flash_mglu(x.T.contiguous().T, w, planes, 2), flat)
    apart = torch.cat([w, w], 1)[:, :24]  # rows 48 elements apart
    assert torch.equal(flash_mglu(x, apart, planes, 2), flat)
    assert torch.equal(flash_mglu(x, w.T.contiguous().T, planes, 2), flat)
    negated = torch._neg_view(x)
    assert torch.equal(flash_mglu(negated, w, planes, 2), flash_mglu(-x, w, planes, 2))
    assert flash_mglu(x[:0], w, planes, 2).shape == (0, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_weights_run_as_plain_torch(dtype: torch.dtype) -> None:
    x, w, planes = operands(2, 10, 24, 2, dtype, dtype)
    found = flash_mglu(x, w, planes, 2)
    assert found.dtype == dtype and close(found, reference.mglu(x.double(), w.double(), planes, "silu"))
    assert mglu.choice(dtype=dtype, weight=dtype).name == "reference"
    with pytest.raises(UsageError, match=r"has no scalar code for this dtype|not built"):
        flash_mglu(x, w, planes, 2, backend="cpu")


def test_gradients_in_the_torch_path_only() -> None:
    x, w, planes = operands(2, 6, 9, 2, torch.float32, torch.float32)
    for t in (x, w):
        t.requires_grad_()
    masks = unpack(planes, 9).float()
    gate, value = x @ (w * masks).mT, x @ (w * (1 - masks)).mT
    expected = torch.autograd.grad((torch.nn.functional.silu(gate) * value).sum(), (x, w))
    for backend in ("auto", "torch"):
        found = torch.autograd.grad(flash_mglu(x, w, planes, 2, "silu", backend).sum(), (x, w))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.func.vmap(lambda x: flash_mglu(x, w, planes, 2))(x), flash_mglu(x, w, planes, 2)
    )


@built
def test_a_gradient_is_refused_rather_than_lost() -> None:
    x, w, planes = operands(1, 6, 9, 2)
    y = flash_mglu(x.requires_grad_(), w, planes, 2, backend="cpu")
    with pytest.raises(RuntimeError, match=r"backward|autograd"):
        y.sum().backward()


def test_meta_and_traced_tensors_go_through_the_operator() -> None:
    x, w, planes = operands(2, 10, 24, 2)
    meta = flash_mglu(*(t.to("meta") for t in (x.view(2, 1, 24), w, planes)), 2)
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 1, 10), torch.bfloat16, "meta")
    for routes in (None, torch.rand(2, 2)):
        torch.library.opcheck(
            torch.ops.gnomon.flash_mglu,
            (x, w, planes, 2, "silu", "auto", routes),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"x": a["x"][:, :20]}, r"x \(2, 20\) doesn't fit a weight of \(10, 24\)"),
        (lambda a: a | {"n_masks": 0}, r"n_masks=0 is outside 1 … 16"),
        (lambda a: a | {"n_masks": 17}, r"n_masks=17 is outside"),
        (
            lambda a: a | {"n_masks": 3},
            r"3 masks of a weight of \(10, 24\) are torch.uint8 \(3, 10, 3\)",
        ),
        (lambda a: a | {"planes": a["planes"][..., :2]}, r"Planes are torch.uint8 \(2, 10, 2\)"),
        (lambda a: a | {"planes": a["planes"].to(torch.int8)}, r"Planes are torch.int8"),
        (lambda a: a | {"planes": a["planes"].mT.contiguous().mT}, r"beside each other"),
        (lambda a: a | {"x": a["x"].double()}, r"x is torch.float64 .*float16, bfloat16 and float32"),
        (lambda a: a | {"weight": a["weight"].double()}, r"the weight torch.float64"),
        (lambda a: a | {"act": "sliu"}, r"Unknown activation 'sliu'. Did you mean 'silu'"),
        (lambda a: a | {"backend": "cuda"}, r"Unknown backend 'cuda'"),
        (lambda a: a | {"routes": torch.ones(2, 3)}, r"routes \(2, 3\) on cpu don't fit: .* takes \(2, 2\)"),
        (lambda a: a | {"planes": a["planes"].to("meta")}, r"its masks on meta"),
    ],
)
def test_refusals(change: object, message: str) -> None:
    x, w, planes = operands(2, 10, 24, 2)
    arguments = change({"x": x, "weight": w, "planes": planes, "n_masks": 2})  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        flash_mglu(**arguments)


def test_glus_that_do_not_belong_together() -> None:
    x, w, _ = operands(2, 10, 24, 2)
    with pytest.raises(UsageError, match="don't belong together"):
        mglu.glu(x, w, w[:5])


@built
def test_what_runs_and_why() -> None:
    assert mglu.choice(backend="cpu").name == mglu.choice().name != "reference"
    assert mglu.choice(backend="torch").name == "reference"
    assert mglu.choice(dtype=torch.float32).name != "avx512_bf16"
    assert chosen()["mglu"].startswith(mglu.choice().name)


def test_without_a_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, planes = operands(40, 10, 24, 2)
    before = flash_mglu(x, w, planes, 2, backend="torch")
    native.why_not.cache_clear()
    choosing.forget()
    monkeypatch.setattr(native, "_opened", lambda: (None, "no compiler here"))
    try:
        assert torch.equal(flash_mglu(x, w, planes, 2), before)
        with pytest.raises(UsageError, match="no compiler here"):
            flash_mglu(x, w, planes, 2, backend="cpu")
    finally:
        native.why_not.cache_clear()
        choosing.forget()


# ------------------------------------------------------------------------------------------- elsewhere


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_triton_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q"]
    command += ["-m", "not slow", str(HERE / "mglu_triton_checks.py")]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter runs on any device")
def test_a_cpu_tensor_gets_the_reason() -> None:
    x, w, planes = operands(1, 4, 8, 1)
    with pytest.raises(GnomonError, match="FlashMGLU's Triton kernel can't run here: the tensors are on cpu"):
        triton.mglu(x, w, planes, "silu")


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library, built so that AVX-512 intrinsics are emulated."""
    compiler = shutil.which("g++")
    if compiler is None or not Path("/usr/include/simde/x86/avx512.h").exists():
        pytest.skip("needs g++ and SIMDe (Debian: libsimde-dev)")
    folder, target = Path(native.__file__).parent, tmp_path / "emulated.so"
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-include", str(HERE / "emulate.hpp")]
    sources = [str(folder / name) for name in ("library.cpp", "mglu/mglu.cpp")]
    subprocess.run([compiler, *flags, "-o", str(target), *sources], check=True)
    opened = ctypes.CDLL(str(target))
    for name in ("gnomon_mglu", "gnomon_glu"):
        getattr(opened, name).argtypes = native._SIGNATURES[name]
    monkeypatch.setattr(native, "_opened", lambda: (opened, ""))
    for cache in (native.why_not.cache_clear, choosing.forget):
        cache()
    yield
    for cache in (native.why_not.cache_clear, choosing.forget):
        cache()


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_avx512_on_emulated_intrinsics() -> None:
    for isa in ("avx512", "avx512_bf16"):
        assert native.why_not(isa) is None
        check(isa, [(1, 1), (33, 96), (5, 129)], (1, 4, 8, 9))
