"""The Triton kernels under Triton's interpreter, and compiled where there is a GPU.

The checks themselves lie in triton_checks.py and run in a process of their own. jaxtyping's run-time checker
looks at the faces only: it would wrap the kernels, which Triton reads as source.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnomon.core.errors import GnomonError, MissingExtra
from gnomon.kernels import launch
from gnomon.kernels.bf16 import triton as bf16
from gnomon.kernels.nf12 import triton as nf12

HERE = Path(__file__).parent
FACES = "gnomon.kernels.nf12.triton,gnomon.kernels.bf16.triton,typecheck.checked"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_checks(marks: str, interpret: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-m", marks]
    command += [f"--jaxtyping-packages={FACES}", str(HERE / "triton_checks.py")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "PYTEST_"))}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_under_the_interpreter() -> None:
    run_checks("not slow", interpret=True)


@needs_triton
@pytest.mark.slow
def test_under_the_interpreter_all_of_it() -> None:
    run_checks("slow", interpret=True)


@needs_triton
@pytest.mark.gpu
def test_compiled() -> None:
    run_checks("slow or not slow", interpret=False)


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gnomon.kernels.bf16.triton_kernels import read
from gnomon.kernels.gemv.triton_kernels import gemv
from gnomon.kernels.nf12.triton_kernels import read_ptx

ALIGNED = [["tt.divisibility", 16]]
for ones in ({}, {"n": 1}, {"groups": 1}):  # Triton makes arguments equal to 1 constants
    for reader, weight in ((read, ("*i32",)), (read_ptx, ("*i64", "*i32", "*i32", "i32"))):
        constants = {"B": 2, "ROWS": 4, "read": reader} | ones
        arguments = {"x": "*bf16", "weight": weight, "out": "*fp32", "n": "i32", "groups": "i32", "share": "i32"}
        signature = arguments | dict.fromkeys(constants, "constexpr")
        attrs = {(0,): ALIGNED, (2,): ALIGNED} | {(1, i): ALIGNED for i in range(len(weight))}
        source = ASTSource(gemv, signature=signature, constexprs=constants, attrs=attrs)
        options = {"num_warps": 1, "enable_fp_fusion": False}
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = kernel.asm["ptx"]
        fused = [line.split()[0] for line in ptx.splitlines() if "fma.rn" in line]
        print(json.dumps([kernel.metadata.shared, ptx.count("shfl.sync"), len(fused), ptx.count("mul.f32")]))
"""


@needs_triton
@pytest.mark.slow
def test_products_compile_alike() -> None:
    """For a GPU that needn't be there: no data goes through shared memory, and both formats get the same sums."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plain = [json.loads(line) for line in done.stdout.splitlines()[0::2]]
    coded = [json.loads(line) for line in done.stdout.splitlines()[1::2]]
    sums = 2 * 4  # B * ROWS
    assert plain == coded == [[0, 5 * sums, 8 * sums, 0]] * 3


PLANES = (
    torch.zeros(1, 8, dtype=torch.uint8),
    torch.ones(1, 1, dtype=torch.int32),
    torch.zeros(0, 8).bfloat16(),
)


@needs_triton
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter runs on any device")
def test_a_cpu_tensor_gets_the_reason() -> None:
    reason = "the tensors are on cpu, and Triton kernels run on CUDA devices"
    assert nf12.why_not(torch.device("cpu")) == reason
    with pytest.raises(GnomonError, match=f"NF12's Triton decode can't run here: {reason}"):
        nf12.decode(*PLANES, 112, 8)
    with pytest.raises(GnomonError, match=f"NF12's Triton GEMV can't run here: {reason}"):
        nf12.linear(torch.ones(1, 8), *PLANES, 112)
    with pytest.raises(GnomonError, match=f"the Triton BF16 GEMV can't run here: {reason}"):
        bf16.linear(torch.ones(1, 8), torch.ones(1, 8).bfloat16())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert launch.why_not(torch.device("cuda")) == "Triton is not installed (pip install 'gnomon[gpu]')"
    assert not launch.interpreted()
    with pytest.raises(MissingExtra, match=r"NF12's Triton decode needs Triton.*gnomon\[gpu\]"):
        nf12.decode(*PLANES, 112, 8)


def test_a_device_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch.why_not(torch.device("cuda")) == "the device has compute capability 7.5; BF16 needs 8.0"
