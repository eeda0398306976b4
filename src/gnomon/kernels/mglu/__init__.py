"""FlashMGLU: a layer with one weight and its masks as bits, from one read of both.

value_i = xW - gate_i, so one plain sum and n_m masked ones give all 2 n_m products of a row. `flash_mglu` takes the
fastest implementation that runs where the tensors are; `choice` says which and why. `glu` is a plain GLU by the same
loop: what this one is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import UsageError, unknown
from .. import launch, native
from ..choosing import Choice, choose, remembered
from ..tracing import is_plain, is_traced, is_transformed
from . import cpu, reference
from .planes import MOST_MASKS, width

__all__ = ["BACKENDS", "choice", "flash_mglu", "glu"]

BACKENDS = ("auto", "torch", "cpu", "triton", *native.ISAS)
"""`torch` is the reference; `cpu` the best instruction set of the library, which can also be named."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def choice(
    device: str = "cpu",
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Choice:
    """What `flash_mglu` runs for an x and a weight of these dtypes on such a device, and why.

    Raises:
        UsageError: an unknown backend, or one that was asked for and can't run.
    """
    return _choice(device, dtype, weight, backend)


@remembered
def _choice(device: str, dtype: torch.dtype, weight: torch.dtype, backend: str) -> Choice:
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    lacks: tuple[str, ...] = ()
    if dtype not in native.DTYPES or weight != torch.bfloat16:
        lacks = native.ISAS
    elif dtype != torch.bfloat16:
        lacks = ("avx512_bf16",)
    if backend != "cpu":
        name = {"torch": "reference"}.get(backend, backend)
        return choose("mglu", device, name, lambda: launch.why_not(torch.device("cuda")), lacks=lacks)
    reasons = {}
    for isa in reversed(native.ISAS):
        try:
            return Choice(choose("mglu", device, isa, lambda: None, lacks=lacks).name, "asked for")
        except UsageError as error:
            reasons[isa] = str(error)
    raise UsageError(reasons["scalar"])


def flash_mglu(
    x: Tensor,
    weight: Tensor,
    planes: Tensor,
    n_masks: int,
    act: str = "silu",
    backend: str = "auto",
    *,
    routes: Tensor | None = None,
) -> Tensor:
    """sum_i r_i g(x (M_i * W)) * (x ((1 - M_i) * W)): (..., h) -> (..., d), in the dtype of x; sums in float32.

    Few rows of x run at the speed at which W and its masks are read; many are multiplied block by block.

    Args:
        x: float16, bfloat16 or float32.
        weight: (d, h), of one of these dtypes. The C++ kernels have code for bfloat16 weights.
        planes: uint8 (n_masks, d, ceil(h / 8)), see `planes.py`; on a CPU fastest in the order of `planes.by_rows`.
        act: g, by a name of `reference.ACTIVATIONS`.
        backend: one of `BACKENDS` to insist on. Differentiable is only "torch", which "auto" takes where a gradient
            is asked for.
        routes: (..., n_masks), a weight for each route; None is 1.

    Raises:
        UsageError: tensors that don't belong together; an unknown activation or backend; one that can't run.
    """
    _check(x, weight, planes, n_masks)
    act = reference.canonical(act)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if routes is not None:
        if routes.shape != (*x.shape[:-1], n_masks) or routes.device != x.device:
            raise UsageError(
                f"routes {tuple(routes.shape)} on {routes.device} don't fit: x of {tuple(x.shape)} on {x.device} "
                f"with {n_masks} masks takes {(*x.shape[:-1], n_masks)}."
            )
        routes = routes.reshape(len(flat), n_masks)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, routes))
    if backend == "torch" or (backend == "auto" and (learns or is_transformed())):
        out = reference.mglu(flat, weight, planes, act, routes)
    elif not learns and is_plain(x) and not is_traced():
        out = _flash(flat, weight, planes, n_masks, act, backend, routes)
    else:
        out = _flash_op(flat, weight, planes, n_masks, act, backend, routes)
    return out.view(*x.shape[:-1], weight.shape[0])


def _flash(
    x: Tensor, weight: Tensor, planes: Tensor, n_masks: int, act: str, backend: str, routes: Tensor | None
) -> Tensor:
    name = _choice(x.device.type, x.dtype, weight.dtype, backend).name
    if name == "reference":
        return reference.mglu(x, weight, planes, act, routes)
    if name == "triton":
        from . import triton

        return triton.mglu(x, weight, planes, act, routes)
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    if len(x) > cpu.rows_at_once() and backend in ("auto", "cpu"):
        return cpu.blocked(x, weight, planes, act, routes)
    return cpu.mglu(x, weight, planes, act, routes, name)


_flash_op = torch.library.custom_op(
    "gnomon::flash_mglu",
    _flash,
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, Tensor planes, int n_masks, str act, str backend, Tensor? routes) -> Tensor"
    ),
)


@_flash_op.register_fake
def _(
    x: Tensor, weight: Tensor, planes: Tensor, n_masks: int, act: str, backend: str, routes: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def glu(x: Tensor, gate: Tensor, value: Tensor, act: str = "silu", backend: str = "auto") -> Tensor:
    """g(x W_g) * (x W_v) for a few rows of x, by MGLU's loop: (..., h) -> (..., d). To compare with; no gradient.

    Raises:
        UsageError: tensors that don't belong together; an unknown activation or backend; one that can't run.
    """
    if gate.shape != value.shape or gate.dtype != value.dtype or x.shape[-1:] != gate.shape[1:]:
        raise UsageError(
            f"x {tuple(x.shape)}, gate {gate.dtype} {tuple(gate.shape)} and value {value.dtype} "
            f"{tuple(value.shape)} don't belong together."
        )
    act = reference.canonical(act)
    flat = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    name = _choice(x.device.type, x.dtype, gate.dtype, backend).name
    if name in native.ISAS and gate.stride(-1) == value.stride(-1) == 1:
        out = cpu.glu(flat, gate.detach(), value.detach(), act, name)
    elif name == "triton":
        from . import triton

        out = triton.glu(flat, gate.detach(), value.detach(), act)
    else:
        out = reference.glu(flat, gate.detach(), value.detach(), act)
    return out.view(*x.shape[:-1], gate.shape[0])


def _check(x: Tensor, weight: Tensor, planes: Tensor, n_masks: int) -> None:
    """What would make a kernel read outside its operands."""
    if not isinstance(n_masks, int) or not 1 <= n_masks <= MOST_MASKS:
        raise UsageError(f"n_masks={n_masks!r} is outside 1 … {MOST_MASKS}.")
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise UsageError(
            f"x is {x.dtype} and the weight {weight.dtype}; the kernels take float16, bfloat16 and float32."
        )
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise UsageError(f"x {tuple(x.shape)} doesn't fit a weight of {tuple(weight.shape)}.")
    shape = (n_masks, weight.shape[0], width(weight.shape[1]))
    if (
        planes.dtype != torch.uint8
        or tuple(planes.shape) != shape
        or (shape[-1] > 1 and planes.stride(-1) != 1)
    ):
        raise UsageError(
            f"Planes are {planes.dtype} {tuple(planes.shape)}; {n_masks} masks of a weight of "
            f"{tuple(weight.shape)} are torch.uint8 {shape} with bytes of a row beside each other."
        )
    if not x.device == weight.device == planes.device:
        raise UsageError(f"x is on {x.device}, the weight on {weight.device}, its masks on {planes.device}.")
