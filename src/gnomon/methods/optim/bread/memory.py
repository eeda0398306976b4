"""What training needs: by formula from a config, without weights, and measured while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.memory import state_bytes

from .blocks import Kind, make_blocks
from .expansion import PRESETS, linears_of, pick_targets

METHODS = (*PRESETS, "adamw", "lora", "lomo")
GRADIENT, MOMENTS = 4, 8
"""Bytes a number of a float32 gradient and of Adam's two moments."""


def estimate_memory(
    config: Any,
    method: str = "bread-lora",
    rank: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    *,
    blocks: Kind = "layer",
    targets: tuple[str, ...] | None = None,
    include_embeddings: bool = False,
    include_head: bool = False,
) -> dict[str, int]:
    r"""Peak bytes by kind and their `total`, without activations, temporary buffers and the framework's own.

    .. math:: 2 P + 16 P_{block} + 16 P_{adapters} + 2 \max_j |W_j|

    in bfloat16, with P_block of the largest block: a float32 master, gradient and two moments make 16. float32 weights
    need no master. AdamW is the case of one block that holds everything: 18 bytes a parameter.

    Args:
        config: a Transformers config, or a model, whose weights may be on the meta device.
        method: one of `METHODS`; "lora" trains adapters alone, "lomo" is BREAD-SGD without an active block.
        rank, targets: of adapters, see :class:`LoRAExpansion`.
        dtype: of the weights.
        blocks, include_embeddings, include_head: see :func:`make_blocks`.

    Raises:
        UsageError: an unknown method, a negative rank, or a config without decoder layers.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if not isinstance(rank, int) or rank < 0:
        raise UsageError(f"rank={rank!r} must not be negative, and whole.")
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype={dtype!r} must be a torch.dtype, such as torch.bfloat16.")
    model = config if isinstance(config, nn.Module) else skeleton(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    partition = make_blocks(model, blocks, include_embeddings=include_embeddings, include_head=include_head)
    inside = [name for block in partition.blocks for name in block.parameters]
    largest = max(sum(sizes[name] for name in block.parameters) for block in partition.blocks)
    numbers = sum(sizes.values())
    block = {"adamw": numbers, "lora": 0, "lomo": 0}.get(method, largest)
    adapters = 0
    if "lora" in method:
        chosen = pick_targets(linears_of(model, inside), targets)
        adapters = rank * sum(sum(model.get_parameter(f"{name}.weight").shape) for name in chosen)
    matrices = sizes.values() if method == "lomo" else [sizes[n] for n in inside]
    stray = max(matrices) if method == "lomo" or method.endswith("sgd") else 0
    master = 4 if dtype.itemsize < 4 else 0
    found = {
        "weights": dtype.itemsize * numbers,
        "masters": master * block,
        "gradients": GRADIENT * block,
        "moments": MOMENTS * block,
        "adapters": 4 * adapters,
        "adapter_gradients": GRADIENT * adapters,
        "adapter_moments": MOMENTS * adapters,
        "stray_gradient": dtype.itemsize * stray,
    }
    return {**found, "total": sum(found.values())}


def skeleton(config: Any) -> nn.Module:
    """The causal language model of a Transformers config on the meta device: shapes without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@dataclass
class PeakMemory:
    """The most that was held at once, in bytes."""

    state: int = 0
    """Of the optimizer (`state_bytes`), looked at after each step."""
    gradients: int = 0
    """Of the model's parameters, looked at whenever one comes; a master's, within a step, isn't seen."""
    device: int | None = None
    """All that torch allocated on the CUDA device, activations included; None without one."""


@contextmanager
def measure_peak(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[PeakMemory]:
    """Watch steps that are taken inside the block; exact for states and gradients, on any device."""
    found = PeakMemory()
    params = list(model.parameters())
    handles: list[Any] = []
    watched: set[int] = set()

    def see(grad: Tensor) -> None:
        held = sum(p.grad.nbytes for p in params if p.grad is not None)
        found.gradients = max(found.gradients, held + grad.nbytes)

    def watch(*_: Any) -> None:
        for p in params:
            if p.requires_grad and id(p) not in watched:
                watched.add(id(p))
                # Sees a gradient come, before hooks that run after the accumulation may free it.
                handles.append(p.register_hook(see))  # type: ignore[no-untyped-call]

    def after(*_: Any) -> None:
        # What a turn's last step held is gone by the time a hook can look.
        found.state = max(found.state, state_bytes(optimizer), getattr(optimizer, "dropped_bytes", 0))

    cuda = next((p.device for p in params if p.device.type == "cuda"), None)
    if cuda is not None:
        torch.cuda.reset_peak_memory_stats(cuda)
    handles.append(model.register_forward_pre_hook(watch))
    handles.append(optimizer.register_step_post_hook(after))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        if cuda is not None:
            found.device = torch.cuda.max_memory_allocated(cuda)
