"""benchmarks/gpu_check.py: its polite ending, its checks under Triton's interpreter, and that it can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=plain | env, capture_output=True, text=True, check=False)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # where it finds what benchmarks share
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    expected = f"Nothing was checked: there is no CUDA device that torch {torch.__version__} can use.\n"
    assert capsys.readouterr().out == expected


def test_an_unknown_kernel_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--only", "nf21"]) == 2
    assert "Unknown kernel 'nf21'. Did you mean 'nf12'?" in capsys.readouterr().err


@needs_triton
def test_under_the_interpreter(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "rows.jsonl"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("All checks passed.\n")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["name"] == "Triton's interpreter"
    assert sum(row["kind"] == "check" for row in rows) > 20
    assert all(row["right"] for row in rows if row["kind"] == "check")


def test_a_wrong_kernel_fails_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: object) -> None:
        bench.check("one", True)  # type: ignore[attr-defined]
        bench.check("two", False, "off by one")  # type: ignore[attr-defined]
        bench.leave_out("three", "no memory")  # type: ignore[attr-defined]

    monkeypatch.setattr(script, "KERNELS", {"broken": broken})
    monkeypatch.setattr(script, "interpreted", lambda: True)
    monkeypatch.setattr(script, "why_not", lambda device: None)
    assert script.main([]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  two  (off by one)" in printed
    assert "left out: three: no memory" in printed
    assert printed.endswith("1 checks failed: two\n")
    assert {"kind": "check", "what": "two", "right": False, "note": "off by one"} in [
        json.loads(line) for line in printed.splitlines() if line.startswith("{")
    ]
