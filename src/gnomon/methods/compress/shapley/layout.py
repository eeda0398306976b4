r"""Players: which rows and columns of which linear maps make up a unit, for every decoder of the core's table.

Paper: "MODEL SHAPLEY", NeurIPS 2025; rows of projections (its code), neurons, heads, layers (App. E.3).
Here:  the units of a model as index maps over the rows and columns of its linear layers.
Inferred: a head is a *query* head: its rows of the query projection, its columns of the output projection, and its
       key and value rows where no other query head reads them. A layer is its linear maps; norms belong to nobody.
Limits: mixtures of experts and fused query-key-value maps of unknown order are refused for heads and neurons.
       A neuron's gate and up rows may be fused as [gate; up] (Phi-3).
       A neuron's three parts multiply each other: its removal is nearly cubic in them, and no quadratic form sees that.
       Its down column alone has the same effect and is linear; a function of the model can make such units.

A *row* is an output, a *column* an input: `nn.Linear` stores W (out, in), GPT-2's `Conv1D` its transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import decoder_stack, is_conv1d, linears, sublayers, unwrap

UNITS = ("param", "row", "mlp_neuron", "head", "layer")
BLOCKS = ("layer", "matrix", "unit", "global")
Axis = Literal["row", "column"]
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense")
QUERIES, KEYS_VALUES = ("q_proj",), ("k_proj", "v_proj")


@dataclass(frozen=True)
class Part:
    """Rows or columns of one linear map that belong to units of a group."""

    module: str
    """Dotted name inside the unwrapped model."""
    axis: Axis
    units: Int[Tensor, " size"]
    """Unit of each row or column, −1 where it belongs to none."""


@dataclass(frozen=True)
class Group:
    """Units under one name in the scores."""

    name: str
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """All players of a model."""

    kind: str
    """One of `UNITS`, or "callable"."""
    groups: tuple[Group, ...]
    modules: dict[str, nn.Module] = field(repr=False)
    """Linear maps by name."""
    layers: dict[str, int] = field(repr=False)
    """Index of the decoder layer of each map; maps of models without a decoder count as layers of their own."""
    bias: bool = True
    """Whether the bias entry of a row belongs to the row's unit, as the paper's deactivation has it."""

    @property
    def sizes(self) -> dict[str, int]:
        """Units by group."""
        return {group.name: group.size for group in self.groups}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a group's scores: (units,), or the parameter's own."""
        if self.kind == "param":
            return tuple(self.parameter(name).shape)
        return (self.sizes[name],)

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter `module.weight` or `module.bias`."""
        module, _, leaf = name.rpartition(".")
        return cast(nn.Parameter, getattr(self.modules[module], leaf))

    def blocks(self, block: str) -> Int[Tensor, " units"]:
        """Block of every unit, groups in order: units of one block share a number.

        layer: the same decoder layers; matrix: the same linear maps; unit: each its own; global: all one.
        """
        total = sum(self.sizes.values())
        if block == "unit":
            return torch.arange(total)
        if block == "global":
            return torch.zeros(total, dtype=torch.long)
        keys: dict[frozenset[Any], int] = {}
        found = []
        for group in self.groups:
            touched: list[set[Any]] = [set() for _ in range(group.size)]
            for part in group.parts:
                mark = self.layers[part.module] if block == "layer" else part.module
                for unit in set(part.units.tolist()):
                    if unit >= 0:
                        touched[unit].add(mark)
            found += [keys.setdefault(frozenset(marks), len(keys)) for marks in touched]
        return torch.tensor(found, dtype=torch.long)

    def counts(self) -> dict[str, Float[Tensor, " size"]]:
        """Parameters of every unit, by group."""
        found = {}
        for group in self.groups:
            count = torch.zeros(group.size, dtype=torch.float64)
            for part in group.parts:
                rows, columns = matrix(self.modules[part.module]).shape
                each = columns + (self.bias and _bias(self.modules[part.module]) is not None)
                mine = part.units >= 0
                per = float(each if part.axis == "row" else rows)
                count.index_add_(
                    0, part.units[mine], torch.full((int(mine.sum()),), per, dtype=torch.float64)
                )
            found[group.name] = count
        return found


def matrix(module: nn.Module) -> Tensor:
    """W of a linear map, out × in, as a view of what is stored."""
    weight = cast(Tensor, module.weight)
    return weight.T if is_conv1d(module) else weight


def layout_of(
    model: nn.Module, units: str | Callable[[nn.Module], Sequence[Group]], *, bias: bool = True
) -> Layout:
    """Find the players.

    Args:
        units: one of `UNITS`, or a function from the unwrapped model to groups of its own making.
        bias: whether a row's bias entry belongs to it.

    Raises:
        UsageError: an unknown kind, no such unit in the model, quantised or tied weights, a structure that can't be
            told apart (experts, unknown fused maps).
    """
    root = unwrap(model)
    modules, layers = _maps(root)
    kind = "callable" if callable(units) else str(units)
    if callable(units):
        groups = tuple(units(root))
    elif units not in UNITS:
        raise unknown("units:", str(units), UNITS)
    elif units in ("mlp_neuron", "head", "layer"):
        groups = {"mlp_neuron": _neurons, "head": _heads, "layer": _layers}[units](root, modules, layers)
    else:
        groups = tuple(
            Group(name, len(matrix(m)), (Part(name, "row", torch.arange(len(matrix(m)))),))
            for name, m in modules.items()
        )
    if not groups or not any(group.size for group in groups):
        raise UsageError(f"{type(root).__name__} has no unit of kind {kind!r}: nothing would be scored.")
    used = {part.module for group in groups for part in group.parts}
    for group in groups:
        for part in group.parts:
            _check_part(part, group, modules)
    modules = {name: module for name, module in modules.items() if name in used}
    _refuse_unreadable(modules)
    if kind == "param":
        groups = _parameters(modules, bias)
    return Layout(kind, groups, modules, layers, bias)


def _maps(root: nn.Module) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """Linear maps by name, and the layer of each; of a model without decoder layers all linear maps."""
    try:
        stack = decoder_stack(root)
    except UsageError:
        found = {
            name: module
            for name, module in root.named_modules()
            if isinstance(module, nn.Linear) or is_conv1d(module)
        }
        return found, {name: i for i, name in enumerate(found)}
    found = linears(root)
    at = len(stack.name.split("."))
    names = [name for name, _ in root.get_submodule(stack.name).named_children()]
    return found, {name: names.index(name.split(".")[at]) for name in found}


def _check_part(part: Part, group: Group, modules: Mapping[str, nn.Module]) -> None:
    if part.module not in modules:
        raise unknown("linear map", part.module, modules)
    if part.axis not in ("row", "column"):
        raise unknown("axis of a part", part.axis, ("row", "column"))
    size = matrix(modules[part.module]).shape[0 if part.axis == "row" else 1]
    if part.units.shape != (size,) or part.units.dtype != torch.long:
        raise UsageError(
            f"Part of {part.module}: units must be int64 of shape ({size},), one for each {part.axis}, got "
            f"{part.units.dtype} {list(part.units.shape)}."
        )
    if size and int(part.units.max()) >= group.size:
        raise UsageError(
            f"Part of {part.module} names unit {int(part.units.max())}, but group {group.name!r} has {group.size}."
        )


def _refuse_unreadable(modules: Mapping[str, nn.Module]) -> None:
    homes: dict[tuple[Any, ...], str] = {}
    for name, module in modules.items():
        if name.endswith(".base_layer"):
            raise UsageError(f"{name} carries an adapter, whose share can't be told apart. Merge it first.")
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2:
            what = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else "no weight"
            raise UsageError(
                f"{name} is a {type(module).__name__} with {what}: quantised or fused weights have no gradient to "
                "score. Load the model in bfloat16 or float32."
            )
        if weight.is_meta:
            raise UsageError(f"{name} has no weights (meta device). Load the model first.")
        home = (weight.device, weight.data_ptr(), tuple(weight.shape))
        if weight.numel() and home in homes:
            raise UsageError(
                f"{name} and {homes[home]} share one weight, which would count twice. Untie them first."
            )
        homes[home] = name


def _parameters(modules: Mapping[str, nn.Module], bias: bool) -> tuple[Group, ...]:
    groups = []
    for name, module in modules.items():
        groups.append(Group(f"{name}.weight", matrix(module).numel(), ()))
        if bias and (b := _bias(module)) is not None:
            groups.append(Group(f"{name}.bias", b.numel(), ()))
    return tuple(groups)


def _bias(module: nn.Module) -> Tensor | None:
    return cast("Tensor | None", getattr(module, "bias", None))


# ------------------------------------------------------------------------------------------- neurons and heads


def mlp_maps(root: nn.Module, layer: nn.Module) -> tuple[list[str], str]:
    """Names of a layer's maps into the MLP (gate, up, or one) and out of it.

    Raises:
        UsageError: no such pair: experts, a router, or an MLP of another form.
    """
    names = {module: name for name, module in root.named_modules()}
    mlp = sublayers(layer).mlp
    # OPT has no MLP module: its two maps lie in the layer itself
    owned = layer.children() if isinstance(mlp, nn.Linear) else mlp.modules()
    inside: list[nn.Module] = [m for m in owned if isinstance(m, nn.Linear) or is_conv1d(m)]
    if len(inside) >= 2:
        down = inside[-1]
        width, inner = matrix(down).shape
        into = [matrix(m).shape for m in inside[:-1]]
        if len(into) <= 2 and all(
            shape[1] == width and shape[0] in (inner, 2 * inner) for shape in map(tuple, into)
        ):
            return [names[m] for m in inside[:-1]], names[down]
    shapes = ", ".join(f"{names[m]} {list(matrix(m).shape)}" for m in inside) or "no linear map"
    raise UsageError(
        f"The MLP of {names[layer]} holds {shapes}; neurons need one or two maps into the inner width and one out of "
        "it. Mixtures of experts and other forms: pass units= a function that lists the groups."
    )


def _neurons(
    root: nn.Module, modules: Mapping[str, nn.Module], layers: Mapping[str, int]
) -> tuple[Group, ...]:
    groups = []
    for layer in decoder_stack(root).layers:
        into, down = mlp_maps(root, layer)
        inner = matrix(modules[down]).shape[1]
        own = torch.arange(inner)
        parts = [Part(name, "row", torch.arange(len(matrix(modules[name]))) % inner) for name in into]
        parent = down.rpartition(".")[0]
        groups.append(Group(parent, inner, (*parts, Part(down, "column", own))))
    return tuple(groups)


def _heads(root: nn.Module, modules: Mapping[str, nn.Module], layers: Mapping[str, int]) -> tuple[Group, ...]:
    names = {module: name for name, module in root.named_modules()}
    groups = []
    for layer in decoder_stack(root).layers:
        attn = sublayers(layer).attn
        config = getattr(attn, "config", None) or getattr(root, "config", None)
        heads = int(getattr(config, "num_attention_heads", 0))
        shared = int(getattr(config, "num_key_value_heads", 0) or heads)
        inside = {n.rpartition(".")[2]: n for n in modules if n.startswith(f"{names[attn]}.")}
        out = next((inside[n] for n in OUTPUT_PROJECTIONS if n in inside), None)
        if out is None or not heads or matrix(modules[out]).shape[1] % heads:
            raise UsageError(
                f"{names[attn]} ({type(attn).__name__}) has no output projection called "
                f"{', '.join(OUTPUT_PROJECTIONS)} whose inputs split into num_attention_heads={heads}. Pass units= a "
                "function that lists the groups."
            )
        width = matrix(modules[out]).shape[1] // heads
        parts = [Part(out, "column", torch.arange(heads * width) // width)]
        for short, name in inside.items():
            if name != out:
                rows = _head_rows(short, type(attn).__name__, heads, shared, width)
                if len(rows) != len(matrix(modules[name])):
                    raise UsageError(
                        f"{name} has {len(matrix(modules[name]))} rows, but {heads} heads of {width} with {shared} for "
                        f"keys and values make {len(rows)}. Pass units= a function that lists the groups."
                    )
                parts.append(Part(name, "row", rows))
        groups.append(Group(names[attn], heads, tuple(parts)))
    return tuple(groups)


def _head_rows(short: str, kind: str, heads: int, shared: int, width: int) -> Int[Tensor, " rows"]:
    """Query head of each row of a projection, −1 where several heads read it."""
    query = torch.arange(heads * width) // width
    kept = torch.arange(shared * width) // width if shared == heads else torch.full((shared * width,), -1)
    if short in QUERIES:
        return query
    if short in KEYS_VALUES:
        return kept
    if short in ("c_attn", "qkv_proj"):  # [queries; keys; values]
        return torch.cat([query, kept, kept])
    if short == "query_key_value" and "NeoX" in kind:  # per head: its query, key and value
        return torch.arange(heads * 3 * width) // (3 * width)
    raise UsageError(
        f"{short} of {kind} fuses query, key and value in an order that isn't known here. Pass units= a function "
        "that lists the groups."
    )


def _layers(
    root: nn.Module, modules: Mapping[str, nn.Module], layers: Mapping[str, int]
) -> tuple[Group, ...]:
    stack = decoder_stack(root)
    parts = tuple(
        Part(name, "row", torch.full((len(matrix(module)),), layers[name]))
        for name, module in modules.items()
    )
    return (Group(stack.name, len(stack.layers), parts),)
