"""The compiled kernels: one shared library, built when Gnomon is installed and loaded when first used.

`why_not(isa)` says what keeps an instruction set from running here: no library (no compiler at installation,
or its sources changed since), or a processor without it. Nothing here decides what to run; `choosing` does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
from pathlib import Path
from typing import Any

import torch  # first of all: its OpenMP runtime is the one that the library has to share
from torch import Tensor

__all__ = ["DTYPES", "ISAS", "library", "pointer", "problem", "why_not"]

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {  # of the functions called at every token, so that plain integers do as arguments
    "gnomon_bf16_linear": (_I, _I, _P, _N, _N, _I, _P, _N, _N, _P),
    "gnomon_nf12_linear": (_I, _I, _P, _N, _N, _I, _P, _P, _P, _N, _N, _N, _I, _P),
    "gnomon_read": (_I, _P, _N),
    "gnomon_copy": (_I, _P, _P, _N),
    "gnomon_mglu": (_I, _I, _P, _N, _N, _I, _P, _N, _N, _P, _I, _N, _N, _P, _I, _P),
    "gnomon_glu": (_I, _I, _P, _N, _N, _I, _P, _N, _P, _N, _N, _I, _P),
    "gnomon_mglu_widen": (_I, _P, _N, _N, _P, _I, _N, _N, _N, _N, _P),
    "gnomon_sparse_decode": (_I, _I, _P, _P, _P, _I, _N, _N, _N, _N, _N, _N, _P, _P, _N, _N, _F, _P, _P),
    "gnomon_dense_decode": (_I, _I, _P, _P, _P, _I, _N, _N, _N, _N, _N, _P, _P, _F, _P),
    "gnomon_cache_sim": (_P, _P, _P, _P, _P, _P, _P, _P, _P),
    "gnomon_nf12_decode": (_I, _I, _P, _P, _P, _N, _N, _N, _I, _P, _N, _N, _P, _I),
}

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16")
"""Instruction sets of the C++ kernels, slowest first; their positions are the ABI's numbers."""

DTYPES = {torch.bfloat16: 0, torch.float32: 1}
"""Kinds of numbers that the C++ kernels take and give, with the ABI's numbers."""

_FOLDER = Path(__file__).parent
_LACKING = {
    "scalar": "",
    "avx2": "this processor has no AVX2 with FMA",
    "avx512": "this processor has no AVX-512 (F, BW, VL, DQ)",
    "avx512_bf16": "this processor has no AVX-512 with VBMI and BF16",
}


def sources_digest() -> str:
    """Digest of the C++ sources beside this file, as setup.py builds it into the library."""
    digest = hashlib.sha256()
    for path in sorted(p for p in _FOLDER.rglob("*") if p.suffix in {".cpp", ".hpp", ".inc"}):
        digest.update(path.relative_to(_FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _open() -> tuple[Any, str]:
    """(library, "") or (None, why there is none)."""
    names = [f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    built = next((path for name in names if (path := _FOLDER / name).is_file()), None)
    if built is None:
        return None, (
            "the C++ kernels were not built when Gnomon was installed (is there a C++ compiler?); "
            "install one (Debian: apt install g++) and run: pip install --force-reinstall --no-deps gnomon, "
            "in a clone: make kernels"
        )
    try:
        return checked(ctypes.CDLL(str(built))), ""
    except (OSError, AttributeError) as error:
        return None, f"{built.name} can't be loaded ({error}); build it again: make kernels"


def checked(opened: ctypes.CDLL) -> ctypes.CDLL:
    """The library, if it was built from these sources.

    Raises:
        OSError: it was built from others, so its functions may take other arguments.
    """
    opened.gnomon_sources.restype = ctypes.c_char_p
    if opened.gnomon_sources().decode() != sources_digest():
        raise OSError("it was built from other sources than these")
    for name, arguments in _SIGNATURES.items():
        getattr(opened, name).argtypes = arguments
    return opened


@functools.cache
def _opened() -> tuple[Any, str]:
    return _open()


def problem() -> str:
    """Why there is no library; empty where there is one."""
    return _opened()[1]


def library() -> Any:
    """The loaded library; ask :func:`problem` first."""
    return _opened()[0]


@functools.cache
def why_not(isa: str) -> str | None:
    """What keeps this instruction set from running here, or None."""
    if reason := problem():
        return reason
    return None if library().gnomon_supports(ISAS.index(isa)) else _LACKING[isa]


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """The address of a tensor's first element, as an argument."""
    return ctypes.c_void_p(tensor.data_ptr())
