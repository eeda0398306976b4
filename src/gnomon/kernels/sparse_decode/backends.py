"""Which implementation of this folder's kernels runs, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.errors import unknown
from .. import launch, native
from ..choosing import Choice, choose, remembered
from . import triton

__all__ = ["BACKENDS", "DTYPES", "choice", "chosen", "chosen_for_blocks"]

BACKENDS = ("auto", "torch", "triton", *native.ISAS)
"""`torch` is the reference; Triton and the instruction sets of the compiled library can be named."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def choice(device: str = "cpu", *, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Choice:
    """What runs for caches of this dtype on such a device, and why.

    Raises:
        UsageError: an unknown backend, or one that was asked for and can't run.
    """
    return chosen(device, dtype, backend)


@remembered
def chosen(device: str, dtype: torch.dtype, backend: str) -> Choice:
    """What runs for one query row a head: `sparse_decode` and `dense_decode`."""

    def no_triton() -> str | None:
        if dtype not in triton.DTYPES:
            return f"its Triton kernel has no code for {dtype}"
        return launch.why_not(torch.device("cuda"))

    return _chosen(device, dtype, backend, no_triton)


@remembered
def chosen_for_blocks(device: str, dtype: torch.dtype, backend: str) -> Choice:
    """What runs for the rows of a block: `block_decode` and `exact_with_importance`."""
    return _chosen(device, dtype, backend, lambda: "its block decode has no Triton kernel yet")


def _chosen(device: str, dtype: torch.dtype, backend: str, no_triton: Callable[[], str | None]) -> Choice:
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    name = {"torch": "reference"}.get(backend, backend)
    lacks = () if dtype in native.DTYPES else native.ISAS
    return choose("sparse_decode", device, name, no_triton, lacks=lacks)
