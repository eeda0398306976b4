"""What a block optimizer refuses, each with the reason and a way out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gnomon.core.errors import UsageError, number, unknown
from gnomon.core.layers import unwrap

from .expansion import Expansion, SGDExpansion
from .on_the_fly import sparse

SCOPES = ("all", "partial")
MARK = "_gnomon_block_optimizer"
"""An attribute of a model that has an optimizer of this kind."""


def check_options(
    hyper: Mapping[str, Any],
    switch_every: int,
    expansion: Expansion | None,
    scope: str | None,
    master_dtype: torch.dtype,
    generator: torch.Generator | None,
) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= number(hyper[name]) < math.inf:
            raise UsageError(f"{name}={hyper[name]!r} must be finite and not negative.")
    betas = hyper["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= number(b) < 1 for b in betas):
        raise UsageError(f"betas={hyper['betas']} must be two numbers in [0, 1).")
    if not isinstance(switch_every, int) or switch_every < 1:
        raise UsageError(
            f"switch_every={switch_every} must be a whole number, at least 1: it is the steps of one block's turn."
        )
    if expansion is not None and not isinstance(expansion, Expansion):
        raise UsageError(
            f"expansion={expansion!r} is no expansion, and would leave plain block descent. Give LoRAExpansion(…), "
            "SGDExpansion(…), preset('bread-lora') or None."
        )
    if master_dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise UsageError(
            f"master_dtype={master_dtype!r} must be torch.float32, torch.float64 or, for a copy no wider than the "
            "weights, torch.bfloat16. Adam's moments overflow in float16."
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UsageError(
            f"generator={generator!r} must be a torch.Generator().manual_seed({generator!r}), or None."
        )
    if scope is not None and scope not in SCOPES:
        raise unknown("scope", scope, SCOPES)
    if scope is not None and expansion is None:
        raise UsageError(
            f"scope={scope!r} says which inactive matrices an expansion takes, but there is none. Give expansion=, or "
            "leave the scope out."
        )
    if isinstance(expansion, SGDExpansion) and expansion.sign and hyper["weight_decay"]:
        raise UsageError(
            f"sign=True with weight_decay={hyper['weight_decay']}: a matrix would decay while it is active "
            "only, and move "
            "by signs, whatever its size, the rest of the time. Use weight_decay=0."
        )


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is {type(model).__name__}, but blocks are found in a whole model: give that, not its parameters."
        )
    if unwrap(model) is not model:
        raise UsageError(
            f"The model is wrapped in {type(model).__name__}, but blocks and hooks belong to the bare one: "
            "pass the model "
            "inside. For several processes leave it unwrapped, gradients are averaged here; torch.compile and peft's "
            "adapters can't follow parameters that switch."
        )
    if getattr(model, MARK, False):
        raise UsageError(
            "The model already has a BlockOptimizer (or is a copy of one that has). Call its close() first: "
            "two of them "
            "would freeze each other's blocks."
        )
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            raise UsageError(f"{name} carries an adapter of another library. Merge and unload it first.")
        if isinstance(module, nn.Embedding) and module.sparse:
            raise UsageError(sparse(f"{name}.weight"))
    for name, p in model.named_parameters():
        if hasattr(p, "full_tensor"):
            raise UsageError(
                f"{name} is sharded (FSDP), which blocks can't be: whole copies only. A block's Adam state is small; "
                "shard nothing, or use another optimizer."
            )
        if p.dtype == torch.float16:
            raise UsageError(
                f"{name} is float16, whose gradients need a loss scale that updates during the backward pass "
                "can't see, and "
                "that torch's GradScaler refuses on float16 weights. Load the model in bfloat16 or float32."
            )
    check_reentrant(model)


def check_reentrant(model: nn.Module) -> None:
    for name, module in model.named_modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        keywords = getattr(function, "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant"):
            raise UsageError(
                f"{name or 'The model'} uses reentrant gradient checkpointing, which gives no gradient to "
                "layers whose input "
                "needs none, as those above frozen ones. Call model.gradient_checkpointing_enable("
                "gradient_checkpointing_kwargs={'use_reentrant': False})."
            )


def check_unwrapped(model: nn.Module) -> None:
    running = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if running is not None and running.module is model:
        raise UsageError(
            "The model runs inside DistributedDataParallel, which fixed at construction what it reduces, while blocks "
            "switch. Call the bare model: this optimizer averages gradients over the processes itself."
        )


def check_autocast(device: str) -> None:
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        raise UsageError(
            "SGDExpansion under float16 autocast: its updates come before the loss scale is taken out, and would be "
            "thousands of times too long. Use bfloat16 autocast, or LoRAExpansion."
        )
