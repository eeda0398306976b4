"""Sparse decoding's Triton kernels: under the interpreter, compiled for GPUs that aren't there, and their choice."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnomon.core.errors import GnomonError, UsageError
from gnomon.kernels import choosing, launch
from gnomon.kernels import sparse_decode as kernel
from gnomon.kernels.sparse_decode import triton

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gnomon.kernels.sparse_decode import triton_kernels as kernels

FLOATS = {"best": "*fp32", "top": "*fp32", "sums": "*fp32", "weighted": "*fp32", "scale": "fp32"}
OTHERS = {"position": "*i32", "kept": "*i64", "visible": "*u8"}
for name, capability, dtype, flag in (
    ("winners", 80, "bf16", True), ("winners", 90, "bf16", False), ("winners", 80, "fp32", True),
    ("dense", 80, "bf16", True), ("dense", 90, "bf16", False), ("dense", 80, "fp32", True),
    ("gather", 80, "bf16", False), ("gather", 90, "bf16", True), ("combine", 90, "bf16", True),
):
    function = getattr(kernels, name)
    sizes = {"R": 16, "N": 64 if dtype == "bf16" else 32, "D": 128, "S": 8, "MASKED": flag, "KEEP": flag, "WIDE": False}
    fixed = {key: value for key, value in sizes.items() if key in function.arg_names}
    known = FLOATS | OTHERS | dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}")
    types = {key: known.get(key, "i64" if key[1:2] == "_" else "i32") for key in function.arg_names}
    source = ASTSource(function, types | dict.fromkeys(fixed, "constexpr"), fixed)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in made.asm["ptx"] and made.metadata.shared <= 99 << 10, made.metadata.shared
    if dtype == "bf16" and name in ("winners", "dense"):
        assert "mma" in made.asm["ptx"]  # by tensor cores
    print(name, capability, dtype, flag)
"""


def in_a_process(*arguments: str, interpret: bool) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@needs_triton
def test_under_the_interpreter() -> None:
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-q")
    in_a_process("-m", "pytest", *options, str(HERE / "sparse_triton_checks.py"), interpret=True)


@needs_triton
def test_compiled_without_a_gpu() -> None:
    """For Ampere and Hopper, every form of every kernel; a program's shared memory fits all Ampere cards."""
    assert len(in_a_process("-c", COMPILE, interpret=False).splitlines()) == 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_this_gpu() -> None:
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-q")
    in_a_process("-m", "pytest", *options, str(HERE / "sparse_triton_checks.py"), interpret=False)


def test_it_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing.forget()
    monkeypatch.setattr(launch, "why_not", lambda device: None)
    assert kernel.choice("cuda").name == "triton"
    assert kernel.choice("cpu").name != "triton"  # its interpreter runs only when asked for
    double = kernel.choice("cuda", dtype=torch.float64)
    assert double.name == "reference" and "no code for torch.float64" in double.reason
    choosing.forget()
    monkeypatch.setattr(launch, "why_not", lambda device: "there is no CUDA device")
    assert kernel.choice("cuda").name == "reference"
    with pytest.raises(UsageError, match="impl='triton' was asked for, but there is no CUDA"):
        kernel.choice("cuda", backend="triton")
    choosing.forget()


@needs_triton
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter runs on any device")
def test_a_cpu_tensor_gets_the_reason() -> None:
    q, k = torch.zeros(1, 2, 8), torch.zeros(1, 1, 4, 8)
    for call in (
        lambda: triton.sparse_decode(q, k, k, 2, 1, 1.0, None),
        lambda: triton.dense_decode(q, k, k, 1.0, None),
    ):
        with pytest.raises(GnomonError, match="Triton kernel can't run here: the tensors are on cpu"):
            call()
