"""Which implementation runs and why; what happens without a library, a compiler, or with a stale build."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gnomon.core.errors import UsageError
from gnomon.kernels import bf16, choosing, chosen, native, nf12

built = pytest.mark.skipif(bool(native.problem()), reason=native.problem() or "built")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose installation had no compiler."""
    native._opened.cache_clear()
    native.why_not.cache_clear()
    choosing.forget()
    monkeypatch.setattr(native, "_FOLDER", Path("/nowhere"))
    yield
    native._opened.cache_clear()
    native.why_not.cache_clear()
    choosing.forget()


@pytest.mark.usefixtures("unbuilt")
def test_without_a_library_the_reference_runs_and_says_why() -> None:
    choice = nf12.choice()
    assert choice.name == "reference"
    assert "compiler" in choice.reason
    assert choice.reason.count("compiler") == 1  # said once, not once per instruction set
    w = torch.randn(16, 64).bfloat16()
    x = torch.randn(2, 64)
    torch.testing.assert_close(bf16.linear(x, w), x @ w.float().T)
    assert "reference" in chosen()["nf12"]
    with pytest.raises(UsageError, match=r"impl='avx2' was asked for, but .*compiler"):
        nf12.choice(impl="avx2")


def test_first_usable_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda isa: None if isa in ("avx2", "scalar") else f"lacks {isa}")
    choice = choosing.choose("k", "cpu", "auto", lambda: "no Triton")
    assert (choice.name, choice.reason) == (
        "avx2",
        "no avx512_bf16: lacks avx512_bf16; no avx512: lacks avx512",
    )
    assert choosing.choose("k", "cpu", "auto", lambda: None, lacks=("avx2",)).name == "scalar"
    assert choosing.choose("k", "cuda", "auto", lambda: None) == choosing.Choice("triton", "fastest")
    without = choosing.choose("k", "cuda", "auto", lambda: "no Triton")
    assert without.name == "reference"
    assert "no Triton" in without.reason


@built
def test_dtypes_decide_too() -> None:
    assert nf12.choice(dtype=torch.float64).name == "reference"
    assert nf12.choice(dtype=torch.float32).name != "avx512_bf16"
    x, w = torch.randn(2, 64, dtype=torch.float64), torch.randn(16, 64).bfloat16()
    torch.testing.assert_close(bf16.linear(x, w), x @ w.double().T)


@built
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native._open()[0]
    assert library is not None
    (tmp_path / "other.cpp").write_text("// changed")
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    with pytest.raises(OSError, match="other sources"):
        native.checked(ctypes.CDLL(library._name))


def in_a_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime_is_mapped() -> None:
    code = (
        "from gnomon.kernels import bf16; import torch; bf16.linear(torch.ones(1, 8), torch.ones(4, 8).bfloat16());"
        "maps = [line.split()[-1] for line in open('/proc/self/maps')];"
        "print(len({m for m in maps if any(n in m for n in ('libgomp', 'libiomp', 'libomp'))}))"
    )
    assert in_a_process(code) == "1"


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_torch_governs_the_threads(threads: int) -> None:
    """Threads that exist after a kernel ran, in a process where nothing else has used OpenMP."""
    code = (
        "import os, torch; from gnomon.kernels import bf16;"
        "w = torch.zeros(64, 64, dtype=torch.bfloat16); x = torch.zeros(1, 64);"
        "bf16.linear(x, w, impl='reference');"
        f"torch.set_num_threads({threads}); before = len(os.listdir('/proc/self/task'));"
        "bf16.linear(x, w, impl='scalar'); print(len(os.listdir('/proc/self/task')) - before)"
    )
    assert in_a_process(code, OMP_NUM_THREADS="1") == str(threads - 1)


def test_kernels_are_in_every_result() -> None:
    from gnomon.lab.provenance import environment

    kernels = environment(threads=1, jobs=1)["kernels"]
    assert set(kernels) == {"bf16", "cache_sim", "mglu", "nf12", "sparse_decode"}
    assert all("(" in text for text in kernels.values())
