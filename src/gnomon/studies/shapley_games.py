"""Games over a model's neurons, played by masking: all coalitions of a few, or each neuron left out by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.methods.compress.shapley import Group, Layout

TOKENS_AT_ONCE = 4096


def players_of(layout: Layout, choice: Sequence[tuple[int, int]], owners: Sequence[int]) -> list[Group]:
    """One group of players made of neurons.

    Args:
        layout: of units "mlp_neuron".
        choice: (index of the MLP, neuron).
        owners: player of each of these neurons.
    """
    import torch

    from gnomon.methods.compress.shapley import Group, Part

    parts = []
    for k, group in enumerate(layout.groups):
        to = torch.full((group.size,), -1)
        for (mlp, neuron), player in zip(choice, owners, strict=True):
            if mlp == k:
                to[neuron] = player
        if not bool((to >= 0).any()):
            continue
        for part in group.parts:
            parts.append(Part(part.module, part.axis, torch.where(part.units >= 0, to[part.units], -1)))
    return [Group("players", max(owners) + 1, tuple(parts))]


def neuron_game(
    model: nn.Module, players: Sequence[Group], ids: Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """U = −loss on `ids` (S, T) for coalitions (k, n), as (k,): inputs of the down projections are masked.

    As many coalitions share a pass as make about `TOKENS_AT_ONCE` tokens.
    """
    import torch

    from gnomon.core.scoring import evaluating, token_nll

    downs = [(p.module, p.units) for p in players[0].parts if p.axis == "column"]
    at_once = max(1, TOKENS_AT_ONCE // ids.numel())

    def some(masks: Tensor) -> Tensor:
        handles = []
        for name, units in downs:
            there = torch.where(units >= 0, masks[:, units.clamp(min=0)], True)  # (k, inner)
            wide = there.repeat_interleave(len(ids), 0)[:, None, :]
            handles.append(
                model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, wide=wide: (args[0] * wide.to(args[0]),)
                )
            )
        try:
            with evaluating(model):
                nll = token_nll(model, ids.repeat(len(masks), 1))
        finally:
            for handle in handles:
                handle.remove()
        return -nll.double().view(len(masks), -1).mean(1).cpu()

    def game(masks: Tensor) -> Tensor:
        return torch.cat([some(part) for part in torch.split(masks, at_once)])

    return game


def left_out(game: Callable[[Tensor], Tensor], players: int) -> Tensor:
    """What each player's absence alone costs: U(all) − U(all but it), (players,)."""
    import torch

    masks = ~torch.eye(players, dtype=torch.bool)
    full: Tensor = game(torch.ones(1, players, dtype=torch.bool))
    return full - game(masks)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's ρ; 0 where one side is constant."""
    from scipy import stats

    if float(x.min()) == float(x.max()) or float(y.min()) == float(y.max()):
        return 0.0
    return float(stats.spearmanr(x.double().numpy(), y.double().numpy()).statistic)
