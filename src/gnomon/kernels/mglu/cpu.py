"""MGLU and GLU through the compiled library: arguments checked by the caller, threads as torch has them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..blocked import BLOCK_BYTES, fused_rows
from .planes import width
from .reference import ACTIVATIONS, activation, canonical

__all__ = ["blocked", "glu", "mglu", "rows_at_once"]

_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def rows_at_once() -> int:
    """Rows of x up to which the matrix-vector kernel is the faster one."""
    return 2 * fused_rows()


def mglu(x: Tensor, weight: Tensor, planes: Tensor, act: str, routes: Tensor | None, isa: str) -> Tensor:
    """x (B, h) and bfloat16 weight (d, h) -> (B, d) in the dtype of x, by one instruction set of `native.ISAS`."""
    x = x.contiguous()
    routes = None if routes is None else routes.float().contiguous()
    rows, columns = weight.shape
    out = x.new_empty(x.shape[0], rows)
    failed = native.library().gnomon_mglu(
        native.ISAS.index(isa), torch.get_num_threads(),
        x.data_ptr(), x.shape[0], columns, native.DTYPES[x.dtype],
        weight.data_ptr(), rows, weight.stride(0),
        planes.data_ptr(), len(planes), planes.stride(0), planes.stride(1),
        None if routes is None else routes.data_ptr(), _NUMBERS[canonical(act)], out.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {x.dtype}"
    return out


def glu(x: Tensor, gate: Tensor, value: Tensor, act: str, isa: str) -> Tensor:
    """As :func:`mglu`, with the two bfloat16 weights of a GLU."""
    x = x.contiguous()
    rows, columns = gate.shape
    out = x.new_empty(x.shape[0], rows)
    failed = native.library().gnomon_glu(
        native.ISAS.index(isa), torch.get_num_threads(),
        x.data_ptr(), x.shape[0], columns, native.DTYPES[x.dtype],
        gate.data_ptr(), gate.stride(0), value.data_ptr(), value.stride(0), rows,
        _NUMBERS[canonical(act)], out.data_ptr(),
    )  # fmt: skip
    assert not failed, f"the chooser let {isa} through for {x.dtype}"
    return out


def blocked(x: Tensor, weight: Tensor, planes: Tensor, act: str, routes: Tensor | None) -> Tensor:
    """For many rows of x: W and each M_i * W are widened block by block and multiplied in float32.

    As xW and the gates come from one product each, the value is their difference, in float32.
    """
    g, masks, (rows, columns) = activation(act), len(planes), weight.shape
    assert planes.shape[-1] == width(columns)
    height = max(16, BLOCK_BYTES // max(1, 4 * columns * (masks + 1)))
    buffer = torch.empty(masks + 1, min(height, max(1, rows)), columns)
    factor, out = x.float(), x.new_empty(x.shape[0], rows)
    for first in range(0, rows, height):
        last = min(rows, first + height)
        block = (
            buffer[:, : last - first]
            if last - first == buffer.shape[1]
            else buffer.new_empty(masks + 1, last - first, columns)
        )
        native.library().gnomon_mglu_widen(
            torch.get_num_threads(), weight.data_ptr(), columns, weight.stride(0),
            planes.data_ptr(), masks, planes.stride(0), planes.stride(1), first, last, block.data_ptr(),
        )  # fmt: skip
        sums = (factor @ block.flatten(0, 1).T).view(len(x), masks + 1, last - first)
        whole, gates = sums[:, :1], sums[:, 1:]
        parts = g(gates) * (whole - gates)
        parts = parts if routes is None else parts * routes.float()[:, :, None]
        out[:, first:last] = parts.sum(1)
    return out
