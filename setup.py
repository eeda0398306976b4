"""Builds the C++ kernels, where there is a compiler; everything else about the package is in pyproject.toml.

One shared library with a plain C ABI, called through ctypes: it needs neither Python's headers' ABI nor torch
at build time. `optional=True`: without a compiler the installation succeeds, kernels run as plain torch, and
`gnomon doctor` says so.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from setuptools import Extension, setup

KERNELS = Path("src/gnomon/kernels")


def sources_digest() -> str:
    """The same digest as `gnomon.kernels.native.sources_digest`, which notices a stale library by it."""
    digest = hashlib.sha256()
    root = Path(__file__).parent / KERNELS
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".cpp", ".hpp", ".inc"}):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


flags = ["-std=c++17", "-O3", "-fno-math-errno", "-g0", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
if sys.platform == "linux":  # elsewhere compilers bring no OpenMP of their own: one thread there
    flags.append("-fopenmp")

setup(
    ext_modules=[
        Extension(
            "gnomon.kernels._native",
            sources=sorted(
                str(p.relative_to(Path(__file__).parent))
                for p in (Path(__file__).parent / KERNELS).rglob("*.cpp")
            ),
            depends=sorted(str(p) for p in KERNELS.rglob("*.[hi]*")),
            define_macros=[("GNOMON_SOURCES", f'"{sources_digest()}"')],
            extra_compile_args=flags,
            extra_link_args=[flag for flag in flags if flag == "-fopenmp"],
            language="c++",
            optional=True,
        )
    ]
)
