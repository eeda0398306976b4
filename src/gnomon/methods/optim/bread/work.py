"""How much of a backward pass serves no update: what plain block descent pays and throws away.

To reach the active block, the loss is differentiated with respect to the input of every deeper layer. A deeper layer
that isn't updated has paid for its input's gradient and made nothing of it; a layer that has an expansion updates
its own weight from the very same output gradient.

Counted are the linear maps of the blocks, 2 · rows · in · out operations for each gradient. Attention's products,
norms, and the head, whose input gradient every method needs, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .expansion import U_NAME, V_NAME, linears_of
from .optimizer import BlockOptimizer


@dataclass(frozen=True, kw_only=True)
class BackwardWork:
    """Operations of one backward pass, in the linear maps of the blocks."""

    block: str
    """The active one."""
    input_gradients: int
    """Spent on gradients with respect to inputs."""
    idle: int
    """Of these, in layers in which the pass updates nothing."""
    weight_gradients: int
    """Spent on gradients of weights, adapters' included."""

    @property
    def idle_share(self) -> float:
        """Share of the input-gradient work that updates nothing; 0 where there is none."""
        return self.idle / self.input_gradients if self.input_gradients else 0.0


def backward_work(optimizer: BlockOptimizer, forward: Callable[[], Any]) -> list[BackwardWork]:
    """Count the backward pass that follows `forward()`, for each block in its turn; one backward pass a step each.

    Only forward passes are run: whether a gradient will be formed is known from what requires one. Nothing is
    changed: turn, weights and random state of the order stay.

    Args:
        forward: runs the optimizer's model on a batch with gradients switched on.
    """
    names = [name for block in optimizer.blocks for name in block.parameters]
    linears = linears_of(optimizer.model, names)
    owner = {name: block.name for block in optimizer.blocks for name in block.parameters}
    turns, found = optimizer.turns, []
    kept = turns.queue, turns.position
    try:
        for i, block in enumerate(optimizer.blocks):
            turns.queue, turns.position = [i], 0
            optimizer._activate()
            found.append(_count(block.name, linears, owner, forward))
    finally:
        turns.queue, turns.position = kept
        optimizer._activate()
    return found


def _count(
    active: str, linears: dict[str, nn.Module], owner: dict[str, str], forward: Callable[[], Any]
) -> BackwardWork:
    spent: dict[str, int] = {}
    useful: set[str] = set()
    weights = 0
    handles = []

    def seer(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            nonlocal weights
            x, weight = args[0], module.weight
            assert isinstance(weight, Tensor)
            rows = x.numel() // x.shape[-1]
            work = 2 * rows * weight.numel()
            block = owner[f"{name}.weight"]
            if x.requires_grad:
                spent[block] = spent.get(block, 0) + work
            if weight.requires_grad:
                weights += work
                useful.add(block)
            for label in (U_NAME, V_NAME):
                factor = getattr(module, label, None)
                if factor is not None and factor.requires_grad:
                    weights += 2 * rows * factor.numel()
                    useful.add(block)

        return see

    for name, module in linears.items():
        handles.append(module.register_forward_hook(seer(name)))
    try:
        with torch.enable_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    idle = sum(work for block, work in spent.items() if block not in useful)
    return BackwardWork(
        block=active, input_gradients=sum(spent.values()), idle=idle, weight_gradients=weights
    )
