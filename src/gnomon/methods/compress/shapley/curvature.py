r"""First- and second-order parts of one batch, in each form of the curvature.

Paper: "MODEL SHAPLEY", NeurIPS 2025, Theorems 4.2 and 4.4 (quadratic part), the blockwise Fisher, its code ("gram").
Here:  with a_u^s = Σ_{i∈u} g_i^s θ_i of unit u and sequence s, A_b^s its sum over the block, c_s the Fisher's scale:

       ========  ===========================================================================================
       none      0
       fisher    ½ mean_s c_s a_u^s A_b^s; no matrix is formed
       hvp       ½ Σ_{i∈u} θ_i (Hθ)_i by one double backward pass, θ on the players and 0 elsewhere
       gram      ½ Σ_{i∈u} W_i (G Gᵀ W)_i with the batch's mean gradient G: the released code's, neither of the two
       ========  ===========================================================================================

Inferred: of pool="sum" and "mean" the blocks are sets of parameters, of "game" sets of units; they differ where a
       unit spans several matrices and the block is the matrix.
Not here: signs, which are the caller's.

Shapes: B sequences; values are flat per group of units, or shaped like the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gnomon.core.layers import is_conv1d

from .collect import Collected, sequence_gradients, weighted_gradient
from .layout import Group, Layout, Part, matrix


class Order(NamedTuple):
    """Means over the sequences of a batch, by group; the second without sign."""

    first: dict[str, Tensor]
    """mean_s a_u^s"""
    second: dict[str, Tensor]


# --------------------------------------------------------------------------------------- units, from scalars


def unit_orders(
    found: Collected,
    layout: Layout,
    weights: Float[Tensor, " B"],
    scale: Float[Tensor, " B"],
    *,
    curvature: str,
    block: str,
    pool: str,
) -> Order:
    """First and Fisher order of units from the scalars of rows and columns.

    Args:
        weights: 1/B for each sequence that counts, else 0.
        scale: c_s.
    """
    rows = {
        part_key(group, k): _sums(found, group, part).to(weights)  # maps may lie on several devices
        for group in layout.groups
        for k, part in enumerate(group.parts)
    }
    a = {
        group.name: sum_of([rows[part_key(group, k)] for k in range(len(group.parts))])
        for group in layout.groups
    }  # (B, units)
    first = {name: weights @ values for name, values in a.items()}
    if curvature != "fisher":
        return Order(first, {name: torch.zeros_like(values) for name, values in first.items()})
    w = weights * scale
    if block == "matrix" and pool != "game":  # blocks of parameters: each matrix by itself
        second = {}
        totals = _by_module(layout, rows)
        for group in layout.groups:
            terms = [
                w @ (rows[part_key(group, k)] * totals[part.module]) for k, part in enumerate(group.parts)
            ]
            second[group.name] = sum_of(terms) / 2
        return Order(first, second)
    flat = torch.cat(list(a.values()), 1)
    ids = layout.blocks(block).to(flat.device)
    if block == "unit":
        seen = flat
    else:
        sums = flat.new_zeros(len(flat), int(ids.max()) + 1).index_add_(1, ids, flat)
        seen = sums[:, ids]
    joint = torch.split(w @ (flat * seen) / 2, [group.size for group in layout.groups])
    return Order(first, {group.name: part for group, part in zip(layout.groups, joint, strict=True)})


def part_key(group: Group, k: int) -> tuple[str, int]:
    return group.name, k


def sum_of(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _sums(found: Collected, group: Group, part: Part) -> Float[Tensor, "B units"]:
    """The scalars of a part, summed into its units; zero where the map wasn't called."""
    a = found.scalars.get((part.module, part.axis))
    where = next(iter(found.scalars.values())) if a is None else a
    out = where.new_zeros(found.sequences, group.size)
    return out if a is None else pooled(a, part, out)


def pooled(
    values: Float[Tensor, "B size"], part: Part, out: Float[Tensor, "B units"]
) -> Float[Tensor, "B units"]:
    """Add the values of rows or columns to their units."""
    units = part.units.to(values.device)
    if len(units) == out.shape[1] and bool((units == torch.arange(len(units), device=units.device)).all()):
        return out + values
    mine = units >= 0
    return out.index_add(1, units[mine], values[:, mine])


def _by_module(layout: Layout, rows: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
    """A of every matrix: the sum over its parameters that belong to units, (B, 1)."""
    totals: dict[str, Tensor] = {}
    for group in layout.groups:
        for k, part in enumerate(group.parts):
            mine = rows[part_key(group, k)].sum(1, keepdim=True)
            totals[part.module] = totals[part.module] + mine if part.module in totals else mine
    return totals


# ------------------------------------------------------------------------------- parameters, and the Gram form


def parameter_orders(
    found: Collected,
    layout: Layout,
    weights: Float[Tensor, " B"],
    scale: Float[Tensor, " B"],
    *,
    curvature: str,
    block: str,
) -> Order:
    """First and second order of single parameters from the flows; values shaped like the parameters."""
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    totals: dict[Any, Tensor] = {}
    if curvature == "fisher" and block != "unit":
        totals = _parameter_blocks(found, layout, block)
    for name, flows in found.flows.items():
        module = layout.modules[name]
        w, b = matrix(module).detach(), getattr(module, "bias", None) if layout.bias else None
        w = w.to(flows[0].delta)
        bias = sum_of([flow.delta.sum(1) for flow in flows]) if b is not None else None  # (B, out)
        values = {"weight": w * weighted_gradient(flows, weights)}
        if b is not None and bias is not None:
            values["bias"] = b.detach().to(bias) * (weights.to(bias) @ bias)
        curved = {key: torch.zeros_like(value) for key, value in values.items()}
        if curvature == "gram":
            curved["weight"] = gram_part(weighted_gradient(flows, weights), w)
        elif curvature == "fisher" and block == "unit":
            for s, g in enumerate(sequence_gradients(flows)):
                curved["weight"] += float(weights[s] * scale[s]) * (g * w).square() / 2
            if b is not None and bias is not None:
                curved["bias"] = (weights * scale).to(bias) @ (bias * b.detach().to(bias)).square() / 2
        elif curvature == "fisher":
            by = weights * scale * totals[_block_of(name, layout, block)].to(weights)
            curved["weight"] = w * weighted_gradient(flows, by) / 2
            if b is not None and bias is not None:
                curved["bias"] = b.detach().to(bias) * (by.to(bias) @ bias) / 2
        for leaf, value in values.items():
            turned = leaf == "weight" and is_conv1d(module)
            first[f"{name}.{leaf}"] = value.T if turned else value
            second[f"{name}.{leaf}"] = curved[leaf].T if turned else curved[leaf]
    return Order(first, second)


def gram_part(g: Float[Tensor, "m n"], w: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """½ W ∘ (G Gᵀ W), the released code's cooperative part of every weight, halved as it adds it."""
    return w * (g @ (g.T @ w)) / 2


def gram_orders(found: Collected, layout: Layout, weights: Float[Tensor, " B"]) -> Order:
    """First order and Gram part, summed into units."""
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for group in layout.groups:
        zero = weights.new_zeros(1, group.size)
        first[group.name], second[group.name] = zero, zero.clone()
        for part in group.parts:
            if part.module not in found.flows:
                continue
            flows, module = found.flows[part.module], layout.modules[part.module]
            g = weighted_gradient(flows, weights)
            w = matrix(module).detach().to(g)
            axis = 1 if part.axis == "row" else 0
            alone = (g * w).sum(axis, keepdim=True).view(1, -1)
            if layout.bias and part.axis == "row" and (b := getattr(module, "bias", None)) is not None:
                by_bias = weights.to(g) @ sum_of([f.delta.sum(1) for f in flows])
                alone = alone + (by_bias * b.detach().to(g))[None]
            first[group.name] = pooled(alone, part, first[group.name].to(g))
            joint = gram_part(g, w).sum(axis, keepdim=True).view(1, -1)
            second[group.name] = pooled(joint, part, second[group.name].to(g))
    return Order({k: v[0] for k, v in first.items()}, {k: v[0] for k, v in second.items()})


def gram_scores(
    G: Float[Tensor, "m n"], W: Float[Tensor, "m n"]
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Float[Tensor, " m"]]:
    """The released code's row scores of one matrix: (individual, cooperative, individual + ½ cooperative).

    The last is the negative of the paper's formula; the code ranks by its absolute value.
    """
    individual, cooperative = (G * W).sum(1), 2 * gram_part(G, W).sum(1)
    return individual, cooperative, individual + cooperative / 2


def _block_of(name: str, layout: Layout, block: str) -> Any:
    return {"matrix": name, "layer": layout.layers[name], "global": 0}[block]


def _parameter_blocks(found: Collected, layout: Layout, block: str) -> dict[Any, Float[Tensor, " B"]]:
    """A_b^s of blocks of parameters, from row sums."""
    totals: dict[Any, Tensor] = {}
    for name, flows in found.flows.items():
        module = layout.modules[name]
        b = getattr(module, "bias", None) if layout.bias else None
        w = matrix(module).detach().to(flows[0].delta)
        terms = []
        for flow in flows:  # Σ_t δ_t · (W x_t + b)
            y = flow.x @ w.T
            terms.append((flow.delta * (y if b is None else y + b.detach().to(y))).sum((1, 2)))
        key = _block_of(name, layout, block)
        total = sum_of(terms)
        totals[key] = totals[key] + total.to(totals[key]) if key in totals else total
    return totals


# -------------------------------------------------------------------------------------------- the exact Hessian


def hessian_orders(layout: Layout, losses: Callable[[], Tensor]) -> Order:
    """First order and ½ θ ∘ (Hθ) of the mean loss, by a double backward pass.

    Args:
        losses: gives the loss, a scalar with a graph; called with gradients on for the players' parameters.
    """
    owners = {
        f"{name}.{leaf}": p
        for name, module in layout.modules.items()
        for leaf in (("weight", "bias") if layout.bias else ("weight",))
        if isinstance(p := getattr(module, leaf, None), nn.Parameter)
    }
    masks = {name: mask.to(owners[name].device) for name, mask in player_masks(layout).items()}
    owners = {name: p for name, p in owners.items() if name in masks}
    needed = {name: p.requires_grad for name, p in owners.items()}
    try:
        for p in owners.values():
            p.requires_grad_(True)
        with torch.enable_grad():
            loss = losses()
            wrt = list(owners.values())
            if not loss.requires_grad:  # no player takes part in it
                grads: list[Tensor | None] = [None] * len(wrt)
            else:
                grads = list(torch.autograd.grad(loss, wrt, create_graph=True, allow_unused=True))
            along = [
                (g * (p.detach() * masks[name])).sum()
                for (name, p), g in zip(owners.items(), grads, strict=True)
                if g is not None and g.requires_grad
            ]
            curved: list[Tensor | None] = [None] * len(wrt)
            if along:
                curved = list(torch.autograd.grad(sum_of(along), wrt, allow_unused=True))
    finally:
        for name, p in owners.items():
            p.requires_grad_(needed[name])
    first, second = {}, {}
    for (name, p), g, h in zip(owners.items(), grads, curved, strict=True):
        theta = p.detach() * masks[name]
        first[name] = torch.zeros_like(p) if g is None else g.detach() * theta
        second[name] = torch.zeros_like(p) if h is None else theta * h / 2
    if layout.kind == "param":
        return Order(first, second)
    return Order(_pool_parameters(first, layout), _pool_parameters(second, layout))


def player_masks(layout: Layout, chosen: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Which entries of which parameters belong to (chosen) units: bool, broadcastable to the parameter.

    Args:
        chosen: masks of units by group; None: all units.
    """
    if layout.kind == "param":
        return {
            group.name: torch.ones(layout.shape(group.name), dtype=torch.bool)
            if chosen is None
            else chosen[group.name].cpu()
            for group in layout.groups
        }
    rows: dict[str, dict[str, Tensor]] = {}
    for group in layout.groups:
        mask = torch.ones(group.size, dtype=torch.bool) if chosen is None else chosen[group.name].cpu()
        for part in group.parts:
            mine = (part.units >= 0) & mask[part.units.clamp(min=0)]
            axes = rows.setdefault(part.module, {})
            axes[part.axis] = axes[part.axis] | mine if part.axis in axes else mine
    found = {}
    for name, axes in rows.items():
        module = layout.modules[name]
        terms = [axes["row"][:, None]] if "row" in axes else []
        terms += [axes["column"][None, :]] if "column" in axes else []
        mask = terms[0] if len(terms) == 1 else terms[0] | terms[1]
        found[f"{name}.weight"] = mask.T if is_conv1d(module) else mask
        if layout.bias and "row" in axes and isinstance(getattr(module, "bias", None), nn.Parameter):
            found[f"{name}.bias"] = axes["row"]
    return found


def _pool_parameters(values: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Sums of the parameters' values over units."""
    found = {}
    for group in layout.groups:
        out: Tensor | None = None
        for part in group.parts:
            module = layout.modules[part.module]
            v = values[f"{part.module}.weight"]
            v = (v.T if is_conv1d(module) else v).sum(1 if part.axis == "row" else 0)
            if part.axis == "row" and (b := values.get(f"{part.module}.bias")) is not None:
                v = v + b
            out = pooled(v[None], part, v.new_zeros(1, group.size) if out is None else out.to(v))
        assert out is not None
        found[group.name] = out[0]
    return found


@contextmanager
def double_backward_attention(model: nn.Module) -> Iterator[None]:
    """Attention that can be differentiated twice: PyTorch's plain form, and eager instead of flash kernels."""
    config = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)
    switch = getattr(model, "set_attn_implementation", None)
    other = kind if kind not in (None, "eager", "sdpa") and switch is not None else None
    if other is not None and switch is not None:
        switch("eager")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if other is not None and switch is not None:
            switch(other)
