"""FlashMGLU (torch path only so far)."""

from __future__ import annotations

from torch import Tensor

from . import reference

__all__ = ["flash_mglu"]


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
    """The sum over routes."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if routes is not None:
        routes = routes.reshape(len(flat), n_masks)
    return reference.mglu(flat, weight, planes, act, routes).view(*x.shape[:-1], weight.shape[0])
