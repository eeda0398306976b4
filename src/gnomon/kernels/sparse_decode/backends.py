"""Which implementation of this folder's kernels runs, and why."""

from __future__ import annotations

import torch

from ...core.errors import unknown
from .. import native
from ..choosing import Choice, choose, remembered

__all__ = ["BACKENDS", "DTYPES", "choice", "chosen"]

BACKENDS = ("auto", "torch", *native.ISAS)
"""`torch` is the reference; instruction sets of the compiled library can be named."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def choice(device: str = "cpu", *, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Choice:
    """What runs for caches of this dtype on such a device, and why.

    Raises:
        UsageError: an unknown backend, or one that was asked for and can't run.
    """
    return chosen(device, dtype, backend)


@remembered
def chosen(device: str, dtype: torch.dtype, backend: str) -> Choice:
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    name = {"torch": "reference"}.get(backend, backend)
    lacks = () if dtype in native.DTYPES else native.ISAS
    return choose("sparse_decode", device, name, lambda: "it has no Triton kernel yet", lacks=lacks)
