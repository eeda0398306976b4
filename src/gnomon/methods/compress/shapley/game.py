r"""Shapley values of small games, exact and sampled, and the closed forms of quadratic ones: the oracles.

Paper: "MODEL SHAPLEY", NeurIPS 2025 (OpenReview 9ccmoYhZue); the value itself is Shapley's.
Here:  :math:`\phi_i = \sum_{S \not\ni i} \frac{|S|!\,(n-|S|-1)!}{n!} (U(S \cup i) - U(S))` over all coalitions, the
       same by random orders, by the Aumann–Shapley integral, and for quadratic losses in one line, with either sign.
Not here: models. A game is a function of which players are present.
Differs from the paper: its Algorithm 2 has the minus sign before the quadratic part with the gradient at the trained
       weights, which its Theorems 4.2 and 4.4 contradict; `sign=-1` gives it.

Shapes: n players.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError

MOST_PLAYERS = 20
"""A million coalitions; one player more doubles them."""

Game = Callable[[Any], Any]
"""Utility U of a coalition, given as bool mask (n,) of the players that are present; or of k coalitions (k, n) at a
time, as (k,)."""


def coalitions(n: int) -> Bool[Tensor, "N n"]:
    """All N = 2ⁿ coalitions; player i is present in row r if bit i of r is set.

    Raises:
        UsageError: n below 1 or above `MOST_PLAYERS`.
    """
    if not 1 <= n <= MOST_PLAYERS:
        raise UsageError(
            f"n={n} players have 2^{n} coalitions; the exact value is for 1 to {MOST_PLAYERS} players. "
            "permutation_shapley samples larger games."
        )
    return (torch.arange(1 << n)[:, None] >> torch.arange(n)) % 2 == 1


def exact_shapley(fn: Game, n: int, *, at_once: int = 0) -> Float[Tensor, " n"]:
    """Shapley values by all coalitions, float64.

    Args:
        fn: the game; called once per coalition.
        n: players, at most `MOST_PLAYERS`.
        at_once: how many coalitions `fn` takes in one call; 0: one, as a mask (n,).

    Raises:
        UsageError: n out of range, or `fn` gives something else than one number per coalition.
        NumericalFailure: a utility that isn't finite.
    """
    present = coalitions(n)
    if at_once > 0:
        values = torch.cat([_utilities(fn(part), len(part)) for part in torch.split(present, at_once)])
    else:
        values = torch.cat([_utilities(fn(one), 1) for one in present])
    return shapley_of_table(values)


def shapley_of_table(values: Float[Tensor, " N"]) -> Float[Tensor, " n"]:
    """Shapley values from the utilities of all coalitions in the order of :func:`coalitions`."""
    n = len(values).bit_length() - 1
    if len(values) != 1 << n or n < 1:
        raise UsageError(f"{len(values)} utilities aren't those of all 2^n coalitions.")
    values = values.double()
    size = coalitions(n).sum(1)  # (N,)
    # log of |S|! (n - |S| - 1)! / n!; the last entry, of the whole coalition, is never used
    s = torch.arange(n, dtype=torch.float64)
    log = torch.lgamma(s + 1) + torch.lgamma(n - s) - torch.lgamma(torch.tensor(float(n + 1)).double())
    weight = torch.cat([log.exp(), torch.zeros(1, dtype=torch.float64)])[size]
    phi = torch.empty(n, dtype=torch.float64)
    for i in range(n):
        gain, w = (t.view(-1, 2, 1 << i) for t in (values, weight))  # axis 1: is player i present?
        phi[i] = ((gain[:, 1] - gain[:, 0]) * w[:, 0]).sum()
    return phi


def permutation_shapley(
    fn: Game, n: int, samples: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, " n"]:
    """Unbiased estimate by random orders of arrival: the mean gain of each player when it joins; float64.

    Every order's gains sum to U(all) − U(none), so the estimate is efficient for any number of samples.

    Args:
        samples: orders, each n calls of `fn` (and one for the empty coalition).
        generator: of the orders; seeded with 0 if None.

    Raises:
        UsageError: no player or no sample.
        NumericalFailure: a utility that isn't finite.
    """
    if n < 1 or samples < 1:
        raise UsageError(
            f"n={n} players and samples={samples}: at least one of each is needed to sample a game."
        )
    draw = torch.Generator().manual_seed(0) if generator is None else generator
    none = float(_utilities(fn(torch.zeros(n, dtype=torch.bool)), 1))
    total = torch.zeros(n, dtype=torch.float64)
    for _ in range(samples):
        present, before = torch.zeros(n, dtype=torch.bool), none
        for i in torch.randperm(n, generator=draw, device=draw.device).tolist():
            present = present.clone()  # fn may keep its argument
            present[i] = True
            after = float(_utilities(fn(present), 1))
            total[i] += after - before
            before = after
    return total / samples


def _utilities(found: Any, count: int) -> Float[Tensor, " k"]:
    values = torch.as_tensor(found, dtype=torch.float64).detach().cpu().flatten()
    if len(values) != count:
        raise UsageError(f"The game gave {len(values)} utilities for {count} coalitions.")
    if not bool(torch.isfinite(values).all()):
        raise NumericalFailure("A coalition's utility is NaN or infinite.")
    return values


def quadratic_shapley(
    g: Float[Tensor, "*n"], theta: Float[Tensor, "*n"], curved: Float[Tensor, "*n"], *, sign: int = 1
) -> Float[Tensor, "*n"]:
    r"""Shapley values of removing parameters from a quadratic loss: :math:`-g\theta + \frac{1}{2}\theta (H\theta)`.

    Args:
        g: gradient at θ.
        curved: Hθ.
        sign: of the second part; −1 is what the paper's algorithm prints, which isn't the Shapley value.
    """
    return -g * theta + sign * theta * curved / 2


def aumann_shapley(
    gradient: Callable[[Tensor], Tensor], theta: Float[Tensor, "*n"], *, steps: int = 64
) -> Float[Tensor, "*n"]:
    r"""Aumann–Shapley values :math:`-\theta \int_0^1 g(t\theta)\,dt` of the utility −L by the midpoint rule.

    Equal to the Shapley values for quadratic losses with any number of steps; another fair share otherwise.
    The sign is that of a player's worth: Σ = L(0) − L(θ) up to the rule's error.
    """
    if steps < 1:
        raise UsageError(f"steps={steps} of the midpoint rule must be at least 1.")
    at = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    mean = sum(gradient(float(t) * theta) for t in at) / steps
    return -theta * mean
