"""Products with an NF12 matrix: straight from the planes (fused), or decoded first, whole or in blocks.

Fused reads 12 bits a weight and suits few rows of x, where reading weights is what takes the time. Buffered
decodes to BF16 and leaves the product to torch, so its result is bit for bit that of the original matrix; for
many rows the decoding is paid once. Blocked, on a CPU, decodes a few rows at a time into the cache and
multiplies from there, in float32 where the processor has no bfloat16 product; its result is bit for bit that
of `kernels.bf16.module.BF16Linear`. Gradients reach x and the bias, never the matrix.

Shapes: rows = batch x tokens of x, K inputs, N outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.errors import UsageError, unknown
from gnomon.kernels.blocked import blocked_linear, fused_rows, has_bfloat16_products
from gnomon.kernels.tracing import is_plain, is_traced, is_transformed

from .config import NF12Config
from .tensor import NF12Tensor

MODES = ("auto", "fused", "buffered", "blocked")


def linear(
    x: Float[Tensor, "*batch K"],
    w: NF12Tensor,
    bias: Float[Tensor, " N"] | None = None,
    mode: str = "auto",
    *,
    config: NF12Config | None = None,
) -> Float[Tensor, "*batch N"]:
    """x W^T + bias, in the dtype of x (in autocast's, under autocast).

    Args:
        x: any floating dtype; float16 is multiplied in float32, because BF16 weights don't fit into it.
        w: (N, K).
        bias: dtype of x.
        mode: "fused", "buffered", "blocked" (CPU, no gradient), or "auto": fused for at most
            `config.fused_rows_cpu` (`_cuda`) rows; blocked for more of them where it applies and the processor
            has no bfloat16 product; else buffered.
        config: thresholds.

    Raises:
        UsageError: unknown mode; x with another number of columns.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    x, bias = _autocast(x, bias)
    _check_inputs(x, w.shape[1], w)
    rows = x.numel() // max(1, x.shape[-1])
    limits = config or _DEFAULTS
    if mode == "auto":
        limit = limits.fused_rows_cuda if x.is_cuda else limits.fused_rows_cpu
        limit = fused_rows() if limit is None else limit
        mode = "fused" if rows <= limit else "blocked" if _blocks(x) else "buffered"
    if is_transformed() or (
        torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    ):
        return _linear(x, bias, w, mode)
    return _product(x, bias, w, mode)


_DEFAULTS = NF12Config()


def _blocks(x: Tensor) -> bool:
    """Whether blocks are the faster way for many rows: where torch multiplies bfloat16 without instructions
    for it, or x is float32 and the matrix would have to be widened whole."""
    return (
        x.device.type == "cpu"
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and not has_bfloat16_products()))
        and not is_traced()
    )


def _product(x: Tensor, bias: Tensor | None, w: NF12Tensor, mode: str) -> Tensor:
    """Without gradients, whatever the mode."""
    if mode == "fused" and x.dtype in (torch.bfloat16, torch.float32):
        y = w.prepared.linear(x)
        return y if bias is None else y + bias.to(y.dtype)
    with torch.no_grad():
        if mode != "blocked" or x.dtype not in (torch.bfloat16, torch.float32) or is_traced():
            return _multiply(x, w, bias)
        if x.device.type != "cpu":
            raise UsageError(f"mode='blocked' is for CPUs; x is on {x.device}. mode='auto' chooses.")
        y = blocked_linear(x.reshape(x.shape[:-1].numel(), w.shape[1]), w.shape[0], w.decode_block)
        y = y.view(*x.shape[:-1], w.shape[0])
        return y if bias is None else y + bias.to(y.dtype)


def linear_transposed(
    x: Float[Tensor, "*batch N"], w: NF12Tensor, bias: Float[Tensor, " K"] | None = None
) -> Float[Tensor, "*batch K"]:
    """x W + bias for a matrix stored inputs first, as GPT-2's `Conv1D` does. Always buffered.

    Raises:
        UsageError: x with another number of columns than W has rows.
    """
    x, bias = _autocast(x, bias)
    _check_inputs(x, w.shape[0], w)
    return _transposed(x, bias, w)


class _Linear(torch.autograd.Function):
    """x W^T + bias to every kind of differentiation: backward, forward-mode, and both under torch.func."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, w: NF12Tensor, mode: str) -> Tensor:
        return _product(x, bias, w, mode)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.w, ctx.mode = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """dx = dy W, with W decoded anew instead of kept since the forward pass."""
        dx = _transposed(dy, None, ctx.w) if ctx.needs_input_grad[0] else None
        return dx, _summed(dy) if ctx.needs_input_grad[1] else None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dbias: Tensor | None, *_: None) -> Tensor | None:
        """The map is linear: the tangent is dx W^T + dbias."""
        return _tangent(dx, dbias, lambda x: _linear(x, None, ctx.w, ctx.mode))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bias: Any, w: NF12Tensor, mode: str) -> tuple[Tensor, int]:
        return _batched(info, in_dims, x, bias, lambda x, bias: _linear(x, bias, w, mode))


class _Transposed(torch.autograd.Function):
    """x W + bias, likewise."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, w: NF12Tensor) -> Tensor:
        return _multiply_transposed(x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.w = inputs[2]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """dx = dy W^T."""
        dx = _linear(dy, None, ctx.w, "buffered") if ctx.needs_input_grad[0] else None
        return dx, _summed(dy) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dbias: Tensor | None, *_: None) -> Tensor | None:
        return _tangent(dx, dbias, lambda x: _transposed(x, None, ctx.w))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bias: Any, w: NF12Tensor) -> tuple[Tensor, int]:
        return _batched(info, in_dims, x, bias, lambda x, bias: _transposed(x, bias, w))


def _linear(x: Tensor, bias: Tensor | None, w: NF12Tensor, mode: str) -> Tensor:
    product: Tensor = _Linear.apply(x, bias, w, mode)  # type: ignore[no-untyped-call]
    return product


def _transposed(x: Tensor, bias: Tensor | None, w: NF12Tensor) -> Tensor:
    product: Tensor = _Transposed.apply(x, bias, w)  # type: ignore[no-untyped-call]
    return product


def _summed(dy: Tensor) -> Tensor:
    """Gradient of a bias."""
    return dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]).sum(0)


def _tangent(dx: Tensor | None, dbias: Tensor | None, product: Callable[[Tensor], Tensor]) -> Tensor | None:
    if dx is None:
        return dbias
    return product(dx) if dbias is None else product(dx) + dbias


def _batched(
    info: Any,
    in_dims: Any,
    x: Tensor,
    bias: Tensor | None,
    product: Callable[[Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, int]:
    """Under vmap a batch is one more axis of x in front; a bias that has one is added afterwards."""
    x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
    if bias is None or in_dims[1] is None:
        return product(x, bias), 0
    bias = bias.movedim(in_dims[1], 0)
    return product(x, None) + bias.view(len(bias), *[1] * (x.ndim - 2), -1), 0


def _multiply(x: Tensor, w: NF12Tensor, bias: Tensor | None) -> Tensor:
    """Buffered x W^T + bias: the whole matrix is decoded, then one product."""
    wide = _product_dtype(x)
    return F.linear(x.to(wide), _decoded(w, wide), None if bias is None else bias.to(wide)).to(x.dtype)


def _multiply_transposed(x: Tensor, w: NF12Tensor, bias: Tensor | None) -> Tensor:
    """Buffered x W + bias, by the call that `Conv1D` makes, so that the results are equal bit for bit."""
    wide = _product_dtype(x)
    flat, matrix = x.reshape(x.shape[:-1].numel(), w.shape[0]).to(wide), _decoded(w, wide)
    y = flat @ matrix if bias is None else torch.addmm(bias.to(wide), flat, matrix)
    return y.view(*x.shape[:-1], w.shape[1]).to(x.dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x, unless BF16 weights would overflow or be rounded in it."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


class _Scratch(threading.local):
    """One buffer a thread, as large as the largest matrix so far: fresh pages cost more than decoding.

    CPU only. On a CUDA device the caching allocator does this and knows about streams.
    """

    buffer: Tensor | None = None

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = shape[0] * shape[1] * dtype.itemsize
        if self.buffer is None or len(self.buffer) < size:
            self.buffer = None  # free it before asking for more
            with torch.inference_mode(False):  # or it could not be written to outside of inference mode later
                self.buffer = torch.empty(size, dtype=torch.uint8)
        return self.buffer[:size].view(dtype).view(shape)


_scratch = _Scratch()


def release_scratch() -> None:
    """Give back the buffer that this thread's buffered products decode into."""
    _scratch.buffer = None


def _decoded(w: NF12Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix in `dtype`, valid until this thread's next product."""
    if w.device.type != "cpu" or not is_plain(w.sm):
        return w.decode().to(dtype)
    direct = dtype if dtype == torch.float32 else torch.bfloat16  # what decoding can write
    return w.decode(_scratch.take(w.shape, direct)).to(dtype)


def _autocast(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What autocast would make of the inputs of a linear layer."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), None if bias is None else bias.to(dtype)


def _check_inputs(x: Tensor, inputs: int, w: NF12Tensor) -> None:
    if x.ndim == 0 or x.shape[-1] != inputs:
        raise UsageError(
            f"x has shape {tuple(x.shape)}, but the NF12 matrix of {w.shape[0]} x {w.shape[1]} takes {inputs} "
            "inputs in the last axis."
        )
    if not x.is_floating_point() or x.layout != torch.strided:
        kind = str(x.dtype if x.layout == torch.strided else x.layout).removeprefix("torch.")
        raise UsageError(
            f"x is {kind}; NF12 multiplies dense tensors of floating-point numbers. Convert x first."
        )
