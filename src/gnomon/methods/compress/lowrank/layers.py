"""Which linear layers of a model are compressed, and how one is replaced."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import decoder_stack, is_conv1d, linears, unwrap

from .linear import LowRankLinear


def compressible(model: nn.Module) -> dict[str, nn.Linear]:
    """Dotted name (inside the unwrapped model) -> every `nn.Linear` of the decoder layers; no embedding, no head.

    Raises:
        UsageError: nothing to compress, or something that can't be: a model with factors in it already, GPT-2's
            Conv1D, subclasses of `nn.Linear` (quantised, parametrised, adapted), shared or sharded weights, weights
            on the meta device, hooks that would be lost.
        NumericalFailure: a weight that isn't finite.
    """
    _refuse_compressed(model)
    found = linears(model)
    if not found:
        raise UsageError(
            f"{type(unwrap(model)).__name__} has no linear layer in its decoder layers to compress."
        )
    seen: dict[int, str] = {}
    chosen: dict[str, nn.Linear] = {}
    for name, module in found.items():
        chosen[name] = _plain(name, module)
        if (other := seen.setdefault(id(module.weight), name)) != name:
            raise UsageError(f"{name} shares its weight with {other}; give each a weight of its own first.")
    for name, module in chosen.items():  # last, because it reads the weights
        if not bool(torch.isfinite(module.weight).all()):
            raise NumericalFailure(
                f"{name}.weight holds NaN or infinity, so it has no singular values. Was the model trained with too "
                "high a learning rate?"
            )
    return chosen


def shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> (m, n) = (outputs, inputs) of every layer that is or could be compressed."""
    return {name: (layer.out_features, layer.in_features) for name, layer in _counted(model).items()}


def ranks_of(model: nn.Module) -> dict[str, int]:
    """Name -> rank of every compressed layer; layers that stayed dense aren't in it."""
    return {name: layer.rank for name, layer in _counted(model).items() if isinstance(layer, LowRankLinear)}


def replace(model: nn.Module, name: str, a: Tensor, b: Tensor) -> LowRankLinear:
    """Put (A, B) in the place of the linear layer `name`; bias, dtype, device, mode and requires_grad stay as they are.

    Raises:
        NumericalFailure: a factor that isn't finite in the weight's dtype.
    """
    root = unwrap(model)
    old = root.get_submodule(name)
    if not isinstance(old, nn.Linear):
        raise UsageError(f"{name} is a {type(old).__name__}, not a linear layer that could be replaced.")
    a, b = (factor.to(old.weight.device, old.weight.dtype).contiguous() for factor in (a, b))
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise NumericalFailure(
            f"The factors of {name} aren't finite in {old.weight.dtype}. Convert the model to bfloat16 or float32."
        )
    new = LowRankLinear.from_factors(a, b, old.bias)
    new.a.requires_grad_(old.weight.requires_grad)
    new.b.requires_grad_(old.weight.requires_grad)
    if old.bias is not None and new.bias is not None:
        new.bias.requires_grad_(old.bias.requires_grad)
    new.train(old.training)
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, new)
    return new


def _refuse_compressed(model: nn.Module) -> None:
    name = next((name for name, module in model.named_modules() if isinstance(module, LowRankLinear)), None)
    if name is not None:
        raise UsageError(
            f"{type(unwrap(model)).__name__} is compressed already: {name} is a LowRankLinear. Compress the dense "
            "model, or call `to_dense` first (which doesn't bring back what was cut)."
        )


def _plain(name: str, module: nn.Module) -> nn.Linear:
    if is_conv1d(module):
        raise UsageError(
            f"{name} is GPT-2's Conv1D, which stores its weight as inputs x outputs; written back from factors a "
            "square one would load transposed. Use a model with nn.Linear layers."
        )
    if name.endswith(".base_layer"):
        raise UsageError(f"{name} has an adapter. Merge it into the weight first (merge_and_unload).")
    if type(module) is not nn.Linear or not module.weight.is_floating_point():
        raise UsageError(
            f"{name} is a {type(module).__name__} of {getattr(module.weight, 'dtype', 'unknown dtype')}, not a plain "
            "nn.Linear in floating point. Load the model without quantisation or parametrisation."
        )
    if module.weight.is_meta:
        raise UsageError(
            f"{name} is on the meta device and has no values. Load the whole model first, without leaving layers to "
            "the disk."
        )
    if tuple(module.weight.shape) != (module.out_features, module.in_features) or hasattr(
        module.weight, "device_mesh"
    ):
        raise UsageError(f"{name} holds a shard of its weight. Gather the whole model first.")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise UsageError(f"{name} has hooks, which its replacement wouldn't have. Remove them first.")
    return module


def _counted(model: nn.Module) -> dict[str, nn.Linear | LowRankLinear]:
    """Linear layers of the decoder, dense and compressed, in the model's order."""
    stack = decoder_stack(model)
    inside = stack.root.get_submodule(stack.name).named_modules(prefix=stack.name)
    return {name: module for name, module in inside if isinstance(module, nn.Linear | LowRankLinear)}
