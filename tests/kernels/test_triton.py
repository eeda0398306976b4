"""The Triton kernels under Triton's interpreter, and compiled where there is a GPU.

The checks themselves lie in triton_checks.py and run in a process of their own. jaxtyping's run-time checker
looks at the faces only: it would wrap the kernels, which Triton reads as source.
"""

from __future__ import annotations

import importlib.util
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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch.why_not(torch.device("cuda")) == "the device has compute capability 7.5; BF16 needs 8.0"
