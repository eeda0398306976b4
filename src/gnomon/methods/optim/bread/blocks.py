"""Which parameters form a block, how deep each lies, and whose turn it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import Parameter

from gnomon.core.errors import UsageError, nearest, unknown
from gnomon.core.layers import decoder_stack, sublayers

KINDS = ("layer", "sublayer", "matrix")
ORDERS = ("random", "ascending", "descending", "fixed")

Kind = Literal["layer", "sublayer", "matrix"]
Order = Literal["random", "ascending", "descending", "fixed"]


@dataclass(frozen=True)
class Block:
    """Parameters that are trained by Adam together."""

    name: str
    parameters: tuple[str, ...]
    """Dotted names in the model."""
    depth: float
    """Forward position of the deepest parameter: the layer's number, -1 for embeddings, L after the layers."""


@dataclass(frozen=True)
class Partition:
    """A model's blocks in forward order (a given list: in its own), and what is active beside them."""

    blocks: tuple[Block, ...]
    always: tuple[str, ...]
    depths: Mapping[str, float]
    """Of every parameter in a block."""


def make_blocks(
    model: nn.Module,
    blocks: Kind | Sequence[Sequence[str]] = "layer",
    *,
    always_active: Sequence[str] = (),
    include_embeddings: bool = False,
    include_head: bool = False,
) -> Partition:
    """Divide the trainable parameters of a decoder into blocks.

    Embeddings, final norm and head belong to no block unless asked for; a tied head goes with the embeddings when
    both are. The halves of a layer ("sublayer") are attention and MLP, each with the norm before it. A "matrix" block
    is a matrix with its module's bias; a layer's norms go with its first matrix.

    Args:
        blocks: a granularity, or lists of names: each a parameter's, or a module's ("model.layers.1" is not a part
            of "model.layers.10"), or "*" for everything. Any model will do if the names are given.
        always_active: names like these, of what is trained in every step.
        include_embeddings, include_head: a block for each; the head's holds the final norm too.

    Raises:
        UsageError: no decoder layers, a name that matches nothing, blocks that overlap, are empty or can't be trained.
    """
    given = not isinstance(blocks, str)
    if not isinstance(blocks, Collection):
        raise UsageError(f"blocks={blocks!r} must be {', '.join(KINDS)} or a list of lists of names.")
    if isinstance(blocks, str) and blocks not in KINDS:
        raise unknown("kind of block", blocks, (*KINDS, "a list of lists of names"))
    canonical = _canonical(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    always = _resolve(always_active, canonical, "always_active")
    if given:
        if include_embeddings or include_head:
            raise UsageError(
                "include_embeddings and include_head belong to a granularity such as blocks='layer'; with "
                "lists of names "
                "add the names to a list."
            )
        found = [_resolve(names, canonical, f"block {i}") for i, names in enumerate(blocks)]
        named = [(_title(names), own) for names, own in zip(blocks, found, strict=True)]
        depths = _depths(model, [members for _, members in named], canonical)
    else:
        named, depths = _by_kind(model, str(blocks), canonical, set(always), include_embeddings, include_head)
    _require_apart(named, always)
    made = []
    for title, members in named:
        own = tuple(name for name in members if name in trainable)
        if not own:
            raise UsageError(
                f"Block {title!r} holds no trainable parameter ({len(members)} frozen or not floating point, "
                "as quantised "
                "weights are). Set requires_grad before building the optimizer, or leave the block out."
            )
        made.append(Block(title, own, max(depths[name] for name in own)))
    if not made:
        raise UsageError("There is no block to train: blocks is an empty list. Use blocks='layer'.")
    if frozen := [name for name in always if name not in trainable]:
        raise UsageError(f"always_active names {frozen[0]!r}, which is frozen. Set its requires_grad first.")
    inside = {name for block in made for name in block.parameters}
    return Partition(tuple(made), tuple(always), {name: depths[name] for name in inside})


def _canonical(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> its first one; tied weights have several."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def _resolve(entries: Sequence[str], canonical: Mapping[str, str], what: str) -> list[str]:
    if isinstance(entries, str):
        raise UsageError(f"{what} is the text {entries!r}, but a list of names is needed: [{entries!r}].")
    if not isinstance(entries, Collection) or not all(isinstance(entry, str) for entry in entries):
        raise UsageError(f"{what} is {entries!r}, but a list of names is needed, such as ['model.layers.1'].")
    if not entries and what != "always_active":
        raise UsageError(f"{what} is empty, so its turn would train nothing. Leave it out.")
    found: dict[str, None] = {}
    for entry in entries:
        prefix = entry.rstrip(".")
        matched = [
            own for name, own in canonical.items() if prefix in ("*", name) or name.startswith(f"{prefix}.")
        ]
        if not matched:
            modules = {name.rpartition(".")[0] for name in canonical} | set(canonical)
            raise UsageError(f"{what}: {entry!r} matches no parameter.{nearest(entry, modules)}")
        found |= dict.fromkeys(matched)
    return list(found)


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "nothing"


def _require_apart(named: Iterable[tuple[str, Sequence[str]]], always: Sequence[str]) -> None:
    owner = dict.fromkeys(always, "always_active")
    for title, members in named:
        for name in members:
            if name in owner:
                raise UsageError(
                    f"{name!r} lies in {owner[name]!r} and in {title!r}: it would be trained twice. Give each "
                    "parameter "
                    "to one of them (a tied weight counts as one parameter)."
                )
            owner[name] = title


# ------------------------------------------------------------------------------------------- granularity


def _by_kind(
    model: nn.Module,
    kind: str,
    canonical: Mapping[str, str],
    always: set[str],
    embeddings: bool,
    head: bool,
) -> tuple[list[tuple[str, list[str]]], dict[str, float]]:
    stack = decoder_stack(model)
    names = {id(p): name for name, p in model.named_parameters()}
    named: list[tuple[str, list[str]]] = []
    depths: dict[str, float] = {}
    children = [name for name, _ in stack.root.get_submodule(stack.name).named_children()]
    inside: set[str] = set()
    for i, (child, layer) in enumerate(zip(children, stack.layers, strict=True)):
        title = f"{stack.name}.{child}"
        for part, members, shift in _parts(kind, layer):
            own = [names[id(p)] for p in members]
            named.append((f"{title}.{part}" if part else title, own))
            depths |= dict.fromkeys(own, i + shift)
            inside |= set(own)
    outside = [
        name for name in dict.fromkeys(canonical.values()) if name not in inside and name not in always
    ]
    tables = {
        names[id(p)]
        for module in stack.root.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    first = [name for name in outside if name in tables]
    rest = [name for name in outside if name not in tables]
    tied = stack.head is not None and {names[id(p)] for p in stack.head.parameters()} & tables
    if embeddings:
        named.insert(0, ("embeddings", first))
        depths |= dict.fromkeys(first, -1.0)
    if head:
        last = rest + [name for name in first if tied and not embeddings and name in tied]
        named.append(("head", last))
        depths |= dict.fromkeys(last, float(len(stack.layers)))
    return named, depths


def _parts(kind: str, layer: nn.Module) -> list[tuple[str, list[Parameter], float]]:
    """(name, parameters, depth within the layer) of each block of a layer."""
    if kind == "layer":
        return [("", list(layer.parameters()), 0.0)]
    if kind == "sublayer":
        return _halves(layer)
    return [(name, members, 0.0) for name, members in _matrices(layer)]


def _halves(layer: nn.Module) -> list[tuple[str, list[Parameter], float]]:
    parts = sublayers(layer)
    first = {id(p) for module in (parts.attn, parts.attn_out) for p in module.parameters()}
    second = {id(p) for module in (parts.mlp, parts.mlp_out) for p in module.parameters()}
    norms: list[list[Parameter]] = []
    for module in layer.modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in first | second]
        if own and any(p.ndim > 1 for p in own):
            second |= {id(p) for p in own}  # OPT's first MLP matrix is a child of the layer itself
        elif own:
            norms.append(own)
    for i, own in enumerate(norms):  # one stands before attention, another before the MLP
        (first if i < (len(norms) + 1) // 2 else second).update(id(p) for p in own)
    shift = 0.0 if parts.parallel else 0.5
    return [
        ("attention", [p for p in layer.parameters() if id(p) in first], 0.0),
        ("mlp", [p for p in layer.parameters() if id(p) in second], shift),
    ]


def _matrices(layer: nn.Module) -> list[tuple[str, list[Parameter]]]:
    found: list[tuple[str, list[Parameter]]] = []
    loose: list[Parameter] = []
    for name, module in layer.named_modules():
        own = list(module.named_parameters(recurse=False))
        matrices = [(label, p) for label, p in own if p.ndim > 1]
        vectors = [p for _, p in own if p.ndim <= 1]
        if not matrices:
            loose += vectors
        for j, (label, p) in enumerate(matrices):
            found.append((f"{name}.{label}" if name else label, [p, *(vectors if j == 0 else [])]))
    if not found:
        raise UsageError(f"{type(layer).__name__} holds no matrix, so blocks='matrix' has nothing to divide.")
    found[0][1].extend(loose)
    return found


def _depths(
    model: nn.Module, blocks: Sequence[Sequence[str]], canonical: Mapping[str, str]
) -> dict[str, float]:
    """Layer numbers in a decoder; elsewhere the position of the block in the list."""
    try:
        stack = decoder_stack(model)
    except UsageError:
        return {name: float(i) for i, members in enumerate(blocks) for name in members}
    depths: dict[str, float] = {}
    children = [name for name, _ in stack.root.get_submodule(stack.name).named_children()]
    tables = {name for name, module in stack.root.named_modules() if isinstance(module, nn.Embedding)}
    for name, own in canonical.items():
        layer = next((i for i, c in enumerate(children) if name.startswith(f"{stack.name}.{c}.")), None)
        depth = -1.0 if name.rpartition(".")[0] in tables else float(len(children))
        depths.setdefault(own, depth if layer is None else float(layer))
    return depths


# ------------------------------------------------------------------------------------------------- turns


class Turns:
    """Whose turn it is: every block once in each block-epoch.

    "random" draws a new permutation when the old one is used up, never a block by itself. "ascending" and
    "descending" go by depth, "fixed" takes the blocks as they were given.
    """

    def __init__(self, depths: Sequence[float], order: str, generator: torch.Generator) -> None:
        if order not in ORDERS:
            raise unknown("order of blocks", order, ORDERS)
        self.depths, self.order, self.generator = tuple(depths), order, generator
        self.epoch, self.position, self.queue = 0, 0, self._draw()

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the active blocks."""
        return (self.queue[self.position],)

    def advance(self) -> None:
        self.position += 1
        if self.position == len(self.queue):
            self.epoch, self.position, self.queue = self.epoch + 1, 0, self._draw()

    def _draw(self) -> list[int]:
        count = len(self.depths)
        if self.order == "random":
            drawn = torch.randperm(count, generator=self.generator, device=self.generator.device)
            return [int(i) for i in drawn.tolist()]
        if self.order == "fixed":
            return list(range(count))
        return sorted(range(count), key=self.depths.__getitem__, reverse=self.order == "descending")

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "queue": list(self.queue),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position, self.queue = state["epoch"], state["position"], list(state["queue"])
        self.generator.set_state(state["generator"].cpu())  # a trainer may have moved it to its device
