r"""What one backward pass tells about every unit and every sequence, without per-sequence weight gradients.

Paper: "MODEL SHAPLEY", NeurIPS 2025; the identities below are this card's.
Here:  for y = Wx with δ = ∂ℓ/∂y the row scalar :math:`a_i = \sum_t δ_{ti}(y-b)_{ti} = \sum_j G_{ij}W_{ij}` and the
       column scalar :math:`a_j = \sum_t x_{tj}(W^Tδ_t)_j = \sum_i G_{ij}W_{ij}`, per sequence, by hooks on the tensors.
Limits: the outputs of the scored maps are held until the backward pass reaches them; parameters as players, and the
       Gram form, hold the inputs too.

Weights need no gradient for this, so the pass computes gradients of activations only.

Shapes: B sequences, T tokens; W is out × in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gnomon.core.errors import UsageError

from .layout import Layout, Part


@dataclass
class Flow:
    """Input of a linear map and the loss gradient of its output, (B, t, in) and (B, t, out)."""

    x: Tensor
    delta: Tensor


@dataclass
class Collected:
    """What the hooks leave behind for one batch of B sequences."""

    sequences: int = 0
    """B, set before the backward pass."""
    scalars: dict[tuple[str, str], Float[Tensor, "B size"]] = field(default_factory=dict)
    """a of every row or column, by (module, axis)."""
    flows: dict[str, list[Flow]] = field(default_factory=dict)
    """By module, one entry for each call."""


@contextmanager
def collecting(layout: Layout, *, flows: bool) -> Iterator[Collected]:
    """Hooks on the scored maps for one forward and backward pass.

    Args:
        flows: keep x and δ of every map instead of scalars.

    Raises:
        UsageError: (in the backward pass) a map whose tokens can't be assigned to sequences, or whose output was
            changed in place.
    """
    found = Collected()
    handles: list[RemovableHandle] = []
    wanted: dict[str, set[str]] = {name: set() for name in layout.modules}
    for part in _parts(layout):
        wanted[part.module].add(part.axis)
    try:
        for name, module in layout.modules.items():
            if flows or "row" in wanted[name]:
                hook = partial(_outputs, found, name, flows, layout.bias)
                handles.append(module.register_forward_hook(hook))
            if not flows and "column" in wanted[name]:
                handles.append(module.register_forward_pre_hook(partial(_inputs, found, name)))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _parts(layout: Layout) -> Iterator[Part]:
    return (part for group in layout.groups for part in group.parts)


def _outputs(
    found: Collected,
    name: str,
    flows: bool,
    bias: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    """Forward hook: let δ reach us. The first map of a frozen model starts the graph."""
    if not torch.is_grad_enabled():  # the first pass of reentrant checkpointing
        return output
    y = output if output.requires_grad else output.detach().requires_grad_()
    kept, version = y.detach(), y._version
    x = args[0].detach() if flows else None

    def backward(delta: Tensor) -> None:
        if kept._version != version:
            raise UsageError(
                f"The output of {name} was changed in place after the map made it, so its scores would be wrong. "
                "Switch the fused activation off."
            )
        d = _by_sequence(delta, found.sequences, name)
        if x is not None:
            found.flows.setdefault(name, []).append(Flow(_by_sequence(x, found.sequences, name), d))
            return
        own = _by_sequence(kept, found.sequences, name)
        b = getattr(module, "bias", None)
        if b is not None and not bias:
            own = own - b.detach().to(own)
        _add(found, (name, "row"), (d * own).sum(1))

    y.register_hook(backward)  # type: ignore[no-untyped-call]
    return y


def _inputs(found: Collected, name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook: give the map an input of its own, whose gradient comes through this map alone."""
    if not torch.is_grad_enabled():
        return None
    x = args[0].view_as(args[0]) if args[0].requires_grad else args[0].detach().requires_grad_()
    kept = x.detach()

    def backward(gradient: Tensor) -> None:
        a = _by_sequence(gradient, found.sequences, name) * _by_sequence(kept, found.sequences, name)
        _add(found, (name, "column"), a.sum(1))

    x.register_hook(backward)
    return (x, *args[1:])


def _add(found: Collected, key: tuple[str, str], a: Tensor) -> None:
    found.scalars[key] = found.scalars[key] + a if key in found.scalars else a


def _by_sequence(t: Tensor, sequences: int, name: str) -> Tensor:
    """(B, t, width) in float32 or more; maps may see (B T, width), as OPT's do."""
    t = t if t.dtype == torch.float64 else t.float()
    if t.shape[0] == sequences:
        return t.reshape(sequences, -1, t.shape[-1])
    rows = t.numel() // t.shape[-1]
    if t.ndim != 2 or not sequences or rows % sequences:
        raise UsageError(
            f"{name} sees {list(t.shape)} for a batch of {sequences} sequences, so its tokens can't be told apart. "
            "Experts of a mixture can't be scored this way."
        )
    return t.reshape(sequences, -1, t.shape[-1])


def weighted_gradient(flows: list[Flow], weights: Float[Tensor, " B"]) -> Float[Tensor, "out columns"]:
    """Σ_s weights_s G^s of a map by one product: G^s = Σ_t δ_t x_tᵀ of sequence s."""
    total: Tensor | None = None
    for flow in flows:
        d = flow.delta * weights.to(flow.delta)[:, None, None]
        part = torch.einsum("bto,bti->oi", d, flow.x)
        total = part if total is None else total + part
    assert total is not None
    return total


def sequence_gradients(flows: list[Flow]) -> Iterator[Float[Tensor, "out columns"]]:
    """G^s of one sequence after the other; never more than one at a time."""
    for s in range(len(flows[0].delta)):
        yield sum((f.delta[s].T @ f.x[s] for f in flows[1:]), start=flows[0].delta[s].T @ flows[0].x[s])


Loss = Callable[[nn.Module, Any], Any]
"""(model, batch) -> losses (B,) of the sequences, or (losses, loss tokens (B,))."""
