"""Where a result came from: code, commit, versions, machine. No user, host or path names."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
KERNEL_SOURCES = {".cpp", ".hpp", ".inc"}
REPORTED = (
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "statsmodels",
    "safetensors",
    "tokenizers",
    "accelerate",
    "peft",
    "trl",
)


def code_hash(*own: Path | None) -> str:
    """Hash of everything that can change a record: the package's Python and kernel sources, the user's `own`
    files (study, rivals) and the modules beside them that they import.

    Cards, results, templates and docs don't count.
    """
    digest = hashlib.sha256()
    sources = [p for p in PACKAGE.rglob("*") if p.suffix == ".py" or p.suffix in KERNEL_SOURCES]
    for path in sorted(sources):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for file in own:
        if file is not None and PACKAGE not in file.resolve().parents:
            for path in own_sources(file):
                name = "own" if path == file.resolve() else path.name
                digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def own_sources(study_file: Path) -> list[Path]:
    """A study file and the modules beside it that it imports, at any depth; installed ones don't count."""
    folder, todo, found = study_file.resolve().parent, [study_file.resolve()], set[Path]()
    installed = (Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
    if any(folder.is_relative_to(place) for place in installed):
        return todo  # a rival out of a library: its neighbours are everything that is installed
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            names, start = list[str](), folder
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = path.parents[node.level - 1] if node.level else folder
                names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            for name in names:
                parts = name.split(".")
                for length in range(1, len(parts) + 1):
                    base = start.joinpath(*parts[:length])
                    candidates = (base.parent / f"{base.name}.py", base / "__init__.py")
                    todo += [candidate for candidate in candidates if candidate.is_file()]
    return sorted(found)


def git(*arguments: str, folder: Path) -> str | None:
    """Output of a git command in `folder`, or None where git or the repository is missing or it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_state() -> dict[str, Any]:
    """Commit of the tree the package was imported from, and whether that tree differs from it.

    An installed copy outside a repository that tracks it has no commit.
    """
    commit = git("rev-parse", "HEAD", folder=PACKAGE)
    tracked = git("ls-files", "--error-unmatch", "systems.py", folder=PACKAGE)
    if commit is None or tracked is None:
        return {"commit": None, "dirty": True}
    root = Path(git("rev-parse", "--show-toplevel", folder=PACKAGE) or PACKAGE)
    changed = git("status", "--porcelain", "--untracked-files=no", folder=root)
    new = git("status", "--porcelain", "--", str(PACKAGE), folder=root)
    return {"commit": commit, "dirty": bool(changed or new)}


def processor() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(*, threads: int, jobs: int, packages: Iterable[str] = REPORTED) -> dict[str, Any]:
    """Versions and machine of this process, as `result.json` holds them."""
    import torch

    from gnomon.kernels import chosen

    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "dtype": "bfloat16" if cuda else "float32",
        "threads": threads,
        "jobs": jobs,
        "versions": versions,
        "kernels": chosen("cuda" if cuda else "cpu"),
    }
