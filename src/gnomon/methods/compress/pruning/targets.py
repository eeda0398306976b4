"""Which matrices of a decoder are pruned, and how each is read as [outputs, inputs].

Here:  names, refusals, the matrix view.
Not here: fused expert tensors of mixtures, which are no linear layers: they stay dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, nearest
from gnomon.core.layers import decoder_stack, is_conv1d, linears, unwrap

Patterns = Sequence[str] | None
"""Names of matrices: whole ("model.layers.0.mlp.up_proj"), endings ("up_proj", "mlp.up_proj") or with * and ?."""


def prunable(model: nn.Module, targets: Patterns = None, exclude: Patterns = None) -> dict[str, nn.Module]:
    """Dotted name (inside the unwrapped model) -> every linear layer of the decoder layers, in the model's order.

    Embeddings, norms, biases and the head are never among them. Weights are read through :func:`matrix`.

    Args:
        targets: only these; all if None.
        exclude: not these.

    Raises:
        UsageError: no matrix left; a pattern that fits nothing; a quantised, parametrised, adapted, tied, sharded or
            meta weight.
        NumericalFailure: a weight that isn't finite.
    """
    found = linears(model)
    kind = type(unwrap(model)).__name__
    if not found:
        raise UsageError(f"{kind} has no linear layer in its decoder layers to prune.")
    names = _picked(found, targets, "targets", True)
    names -= _picked(found, exclude, "exclude", False)
    chosen = {name: module for name, module in found.items() if name in names}
    if not chosen:
        raise UsageError(f"targets={targets} and exclude={exclude} leave no matrix of {kind} to prune.")
    owners: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in chosen.items():
        _require_plain(name, module)
        shared = [owner for owner in owners[id(module.weight)] if owner != f"{name}.weight"]
        if shared:
            raise UsageError(
                f"{name} shares its weight with {shared[0]}, which would be pruned too. Leave it out with exclude=, or "
                "give each a weight of its own first."
            )
    for name, module in chosen.items():  # last, because it reads the weights
        if not bool(torch.isfinite(cast(Tensor, module.weight)).all()):
            raise NumericalFailure(
                f"{name}.weight holds NaN or infinity, so its weights can't be ranked. Was the model trained with too "
                "high a learning rate?"
            )
    return chosen


def matrix(module: nn.Module) -> Float[Tensor, "out inputs"]:
    """The weight as [outputs, inputs], sharing its memory: writing into it changes the layer. Conv1D is transposed."""
    weight = cast(Tensor, module.weight).detach()
    return weight.T if is_conv1d(module) else weight


def shapes_of(matrices: Mapping[str, nn.Module]) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs)."""
    return {name: (int(w.shape[0]), int(w.shape[1])) for name, m in matrices.items() for w in [matrix(m)]}


def blocks(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """The names by decoder layer, in order of depth; layers without any are left out.

    Raises:
        UsageError: a name in no decoder layer.
    """
    prefix = decoder_stack(model).name + "."
    found: dict[int, list[str]] = {}
    for name in names:
        index = name.removeprefix(prefix).partition(".")[0]
        if not name.startswith(prefix) or not index.isdigit():
            raise UsageError(f"{name} lies in no decoder layer of {type(unwrap(model)).__name__}.")
        found.setdefault(int(index), []).append(name)
    return [found[index] for index in sorted(found)]


def _picked(found: Mapping[str, nn.Module], patterns: Patterns, what: str, everything: bool) -> set[str]:
    if patterns is None:
        return set(found) if everything else set()
    if isinstance(patterns, str):
        raise UsageError(f"{what}={patterns!r} is one name. Pass a list: {what}=[{patterns!r}].")
    names: set[str] = set()
    for pattern in patterns:
        fit = {n for n in found if n == pattern or n.endswith(f".{pattern}") or fnmatchcase(n, pattern)}
        if not fit:
            endings = {name.rpartition(".")[2] for name in found}
            raise UsageError(f"{what} names {pattern!r}, which fits no matrix.{nearest(pattern, endings)}")
        names |= fit
    return names


def _require_plain(name: str, module: nn.Module) -> None:
    weight = module.weight
    if name.endswith(".base_layer"):
        raise UsageError(f"{name} has an adapter. Merge it into the weight first (merge_and_unload).")
    plain = type(module) is nn.Linear or (
        is_conv1d(module) and not hasattr(module, "parametrizations") and type(module).__name__ == "Conv1D"
    )
    if not plain or not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        raise UsageError(
            f"{name} is a {type(module).__name__} of {getattr(weight, 'dtype', 'unknown dtype')}, not a plain linear "
            "layer in floating point. Load the model without quantisation or parametrisation, or leave it out with "
            "exclude=."
        )
    if weight.is_meta:
        raise UsageError(
            f"{name} is on the meta device and has no values. Load the whole model first, without leaving layers to "
            "the disk."
        )
    sides = (module.in_features, module.out_features) if type(module) is nn.Linear else (module.nf,)
    if weight.ndim != 2 or any(side not in weight.shape for side in sides) or hasattr(weight, "device_mesh"):
        raise UsageError(f"{name} holds a shard of its weight. Gather the whole model first.")
