"""What this machine and installation have, what each thing means for Gnomon, and how to get what is missing.

Each finding is independent: one that can't be made says so and never stops the others.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnomon import __version__

State = Literal["good", "missing", "bad"]
LOW_DISK_BYTES = 2_000_000_000  # a `full` run with its checkpoints and the converted embedded model


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `gnomon doctor`."""

    name: str
    state: State
    """good; missing = something optional is absent; bad = Gnomon will fail or mislead because of it."""
    value: str
    meaning: str
    """What follows from it, or the command that mends it."""


def examine(runs: Path | None = None) -> list[Finding]:
    """Look at everything.

    Args:
        runs: the folder that runs would be written to (default: the current one).
    """
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": _python,
        "torch": _torch,
        "processor": _processor,
        "kernels": _kernels,
        "libraries": _libraries,
        "extras": _extras,
        "embedded model": _embedded_model,
        "disk": lambda: _disk(runs or Path.cwd()),
        "tools": _tools,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:  # a broken installation is what doctor is for
            text = f"{type(error).__name__}: {error}"
            findings.append(Finding(name=name, state="bad", value=text, meaning="This check itself failed."))
    return findings


def _python() -> list[Finding]:
    version, supported = platform.python_version(), sys.version_info >= (3, 11)
    return [
        Finding(
            name="gnomon",
            state="good",
            value=__version__,
            meaning=f"Loaded from {Path(__file__).parents[1]}.",
        ),
        Finding(
            name="python",
            state="good" if supported else "bad",
            value=f"{version} on {platform.system()} {platform.machine()}",
            meaning="Python 3.11 or newer is needed."
            if not supported
            else "Text recipes read the standard library, so their content hash depends on this version.",
        ),
    ]


def _torch() -> list[Finding]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    findings = [
        Finding(
            name="torch",
            state="good",
            value=f"{torch.__version__} ({build} build)",
            meaning="Does the arithmetic.",
        ),
        Finding(
            name="blas",
            state="good",
            value=blas.group(1) if blas else "unknown",
            meaning="The matrix library; equal seeds give equal records on one machine and version set only.",
        ),
        Finding(
            name="threads",
            state="good",
            value=f"{torch.get_num_threads()} of {os.cpu_count()} cores",
            meaning="torch's default here; a study sets its own number (`-o threads=N`) and records it.",
        ),
    ]
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        value = f"{torch.cuda.device_count()} x {name}"
        findings.append(
            Finding(name="device", state="good", value=value, meaning="Models load as bf16 on it.")
        )
    else:
        meaning = "No CUDA device: models load as fp32 on the CPU, and the `gpu` profile is out of reach."
        findings.append(Finding(name="device", state="missing", value="cpu", meaning=meaning))
    return findings


def _processor() -> list[Finding]:
    flags = _cpu_flags()
    wanted = ["avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve"]
    found = [flag for flag in wanted if flag in flags]
    meaning = "Instruction sets that fast paths can use; without them the portable ones run."
    if "avx512_bf16" not in flags and "amx_bf16" not in flags and "sve" not in flags:
        meaning += " bf16 arithmetic is emulated here and slow: keep fp32."
    return [
        Finding(name="cpu features", state="good", value=", ".join(found) or "none known", meaning=meaning)
    ]


def _kernels() -> list[Finding]:
    import torch

    from gnomon.kernels import chosen, native

    built = Finding(
        name="kernels",
        state="missing" if native.problem() else "good",
        value="plain torch" if native.problem() else "compiled library",
        meaning=native.problem() or "The C++ kernels are built and current.",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [built] + [
        Finding(name=f"kernel {name}", state="good", value=choice, meaning="Recorded in every result.")
        for name, choice in chosen(device).items()
    ]


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Feature flags as Linux names them; empty on other systems."""
    if not cpuinfo.exists():
        return set()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def _requirements() -> dict[str, list[str]]:
    """Required distribution names by extra ("" = always), from the installed package's own metadata."""
    required: dict[str, list[str]] = {}
    for text in importlib.metadata.requires("gnomon") or []:
        name = re.match(r"[A-Za-z0-9._-]+", text)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        if name and name.group() != "gnomon":
            required.setdefault(extra.group(1) if extra else "", []).append(name.group())
    return required


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libraries() -> list[Finding]:
    findings = []
    for name in _requirements().get("", []):
        version = _version(name)
        if version is None:
            meaning = f"Gnomon needs it. Install it with: pip install {name}"
            findings.append(Finding(name=name, state="bad", value="not installed", meaning=meaning))
        elif name in ("transformers", "numpy", "scipy"):
            findings.append(
                Finding(name=name, state="good", value=version, meaning="Recorded in every result.")
            )
    return findings


def _extras() -> list[Finding]:
    findings = []
    for extra, names in _requirements().items():
        if not extra:
            continue
        missing = [name for name in names if _version(name) is None]
        findings.append(
            Finding(
                name=f"extra {extra}",
                state="missing" if missing else "good",
                value=f"missing: {', '.join(missing)}" if missing else "installed",
                meaning=f"Install it with: pip install 'gnomon[{extra}]'"
                if missing
                else f"Holds {', '.join(names)}.",
            )
        )
    return findings


def _embedded_model() -> list[Finding]:
    from gnomon.core.smollm2 import cached

    folder = cached("smollm2-135m")
    if folder is None:
        meaning = "Studies that measure a real model need it. Get it with: gnomon fetch smollm2-135m"
        return [Finding(name="smollm2-135m", state="missing", value="not fetched", meaning=meaning)]
    meaning = "The embedded pretrained model; `--model smollm2-135m`."
    return [Finding(name="smollm2-135m", state="good", value=str(folder), meaning=meaning)]


def _disk(folder: Path) -> list[Finding]:
    free = shutil.disk_usage(folder).free
    low = free < LOW_DISK_BYTES
    return [
        Finding(
            name="disk space",
            state="bad" if low else "good",
            value=f"{free / 1e9:.1f} GB free",
            meaning="Too little for a full run: free some, or name another place with --runs DIR."
            if low
            else "Runs are written below the current folder, or to --runs DIR.",
        )
    ]


def _tools() -> list[Finding]:
    tools = [
        ("compiler", ("c++", "g++", "clang++"), "Builds the C++ fast paths; without it the references run."),
        ("chromium", ("chromium", "chromium-browser", "google-chrome"), "Only the browser tests need it."),
        (
            "bubblewrap",
            ("bwrap",),
            "Code written by a model runs only inside it; without it that is refused.",
        ),
    ]
    findings = []
    for name, programs, meaning in tools:
        path = next((found for program in programs if (found := shutil.which(program))), None)
        state: State = "good" if path else "missing"
        findings.append(Finding(name=name, state=state, value=path or "not found", meaning=meaning))
    return findings
