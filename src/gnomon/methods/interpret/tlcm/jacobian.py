"""How the next layer reacts when a layer's contribution is scaled or moved: sweeps, Jacobians, eigenspaces.

The pair (i, i+1) is named by `layer` = i. Only token t is perturbed, after layer i, and the perturbed input
is subtracted: b'(D) = Layer_{i+1}(x_{i+1,t} + D) - (x_{i+1,t} + D). Shapes: d hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import NumericalFailure, UsageError

from .next_layer import NextLayer
from .trace import Trace

LARGEST_WIDTH = 8192  # a float32 Jacobian of this width takes 268 MB, its eigenvectors twice that in float64


def alpha_sweep(
    model: nn.Module,
    trace: Trace,
    layer: int,
    token: int,
    alphas: Sequence[float] | Float[Tensor, " A"],
    *,
    row: int = 0,
    path: str = "auto",
) -> Float[Tensor, " A"]:
    """cos(a_t, b'_t(alpha * a_t)) for each alpha, where a_t is the contribution of `layer` (step 7).

    With TLCM it falls as alpha grows: a doubled contribution (alpha = 1) is opposed more, a removed one
    (alpha = -1) hardly or not at all. At alpha = 0 it is the adjacent cosine.
    """
    function = NextLayer(model, trace, layer, row, path)
    token = function.token(token)
    scales = torch.as_tensor(alphas, dtype=function.dtype, device=function.device)
    a = function.a[token]
    with torch.no_grad():
        written = function.at(token, scales[:, None] * a)
    return F.cosine_similarity(written, a[None], dim=-1)


def layer_jacobian(
    model: nn.Module,
    trace: Trace,
    layer: int,
    token: int,
    chunk: int = 64,
    *,
    row: int = 0,
    mode: str = "reverse",
    path: str = "auto",
    allow_large: bool = False,
) -> Float[Tensor, "d d"]:
    """J = d b'_t / d D at D = 0, for layer `layer` + 1 at one token (step 8).

    Args:
        model: the captured model. In a mixture of experts J holds for the experts the router picks here.
        trace: from :func:`capture` of that model.
        layer: corrected layer i.
        token: position t in the sequence (padding included).
        chunk: rows (columns, in forward mode) computed at once.
        row: sequence in the batch.
        mode: "reverse" differentiates backward; "forward" forward, for layers that have no backward pass.
        path: see :class:`NextLayer`.
        allow_large: compute it although d is above 8192.

    Raises:
        UsageError: unknown mode, token that isn't there, d above 8192 without `allow_large`.
        NumericalFailure: if an entry is not finite.
    """
    d = trace.x.shape[-1]
    if d > LARGEST_WIDTH and not allow_large:
        raise UsageError(
            f"A Jacobian of width {d} takes {4 * d * d / 1e9:.1f} GB and {d} derivatives "
            f"(limit {LARGEST_WIDTH}). Pass allow_large=True to compute it, or use steering_resistance(), "
            "which needs none."
        )
    if mode not in ("reverse", "forward"):
        raise UsageError(f"mode={mode!r} is unknown. Use 'reverse' or 'forward'.")
    if chunk < 1:
        raise UsageError(f"chunk={chunk} must be at least 1 row.")
    function = NextLayer(model, trace, layer, row, path)
    token = function.token(token)
    differentiate = _rows if mode == "reverse" else _columns
    parts = [differentiate(function, token, units) for units in torch.split(function.basis(), chunk)]
    jacobian = torch.cat(parts, dim=0 if mode == "reverse" else 1)
    if not bool(jacobian.isfinite().all()):
        raise NumericalFailure(f"The Jacobian of layer {layer + 1} at token {token} is not finite.")
    return jacobian


def _rows(function: NextLayer, token: int, units: Tensor) -> Tensor:
    """Rows e_k^T J: each variant of the input answers for one output. Needs no vmap support in the layer."""
    with torch.enable_grad():
        x = function.x[token].repeat(len(units), 1).requires_grad_()
        written = function(torch.full((len(units),), token, device=x.device), x)
        (rows,) = torch.autograd.grad(written, x, grad_outputs=units)
    return rows


def _columns(function: NextLayer, token: int, units: Tensor) -> Tensor:
    """Columns J e_k: each variant of the input moves along one axis."""
    tokens = torch.full((len(units),), token, device=units.device)
    x = function.x[token].repeat(len(units), 1)
    with torch.no_grad():
        columns: Tensor = torch.func.jvp(lambda moved: function(tokens, moved), (x,), (units,))[1]
    return columns.T


def linearity_error(
    model: nn.Module,
    trace: Trace,
    layer: int,
    token: int,
    jacobian: Float[Tensor, "d d"],
    alphas: Sequence[float] | Float[Tensor, " A"],
    *,
    row: int = 0,
    path: str = "auto",
) -> Float[Tensor, " A"]:
    """||b'(D) - b'(0) - J D|| / ||b'(D) - b'(0)|| for D = alpha * a_t (step 9; the denominator is inferred).

    Raises:
        UsageError: if an alpha is 0, where the quotient is undefined.
    """
    function = NextLayer(model, trace, layer, row, path)
    token = function.token(token)
    scales = torch.as_tensor(alphas, dtype=function.dtype, device=function.device)
    if bool((scales == 0).any()):
        raise UsageError("alpha=0 leaves nothing to compare: the linearity error is 0/0 there.")
    moved = scales[:, None] * function.a[token]
    with torch.no_grad():
        written = function.at(token, torch.cat([torch.zeros_like(moved[:1]), moved]))
    change = written[1:] - written[0]
    predicted = moved @ jacobian.to(moved).T
    error: Tensor = (change - predicted).norm(dim=-1) / change.norm(dim=-1)
    return error


class Spectrum(NamedTuple):
    """S = Q diag(values) Q^T, values ascending, eigenvectors in the columns of Q."""

    values: Float[Tensor, " d"]
    vectors: Float[Tensor, "d d"]


def symmetric_spectrum(jacobian: Float[Tensor, "*k d d"]) -> Spectrum:
    """Eigenspaces of S = (J + J^T)/2 in float64: corrected (negative) and promoted (positive) directions.

    A stack of Jacobians is averaged first. `jacobian` may be S itself, since its symmetric part is S.
    """
    mean = jacobian.double().reshape(-1, *jacobian.shape[-2:]).mean(0)
    return Spectrum(*torch.linalg.eigh((mean + mean.T) / 2))


class Decomposition(NamedTuple):
    """The directions that hold most of a, the largest share first."""

    eigenvalues: Float[Tensor, " top"]
    """lambda_k: -1 is complete reversal, above 0 promotion."""
    weights: Float[Tensor, " top"]
    """q_k^2, the part of |a|^2 in direction k; all d of them sum to |a|^2."""
    strength: Float[Tensor, " top"]
    """lambda_k q_k^2; all d of them sum to a^T J a."""


def decompose(jacobian: Float[Tensor, "d d"], a: Float[Tensor, " d"], top: int = 50) -> Decomposition:
    """Split a contribution into the eigendirections of S, the `top` largest q_k^2 (step 8).

    Use ``top=d`` for all of them, e.g. for the share of negative eigenvalues.
    """
    if top < 1:
        raise UsageError(f"top={top} must be at least 1 direction.")
    values, vectors = symmetric_spectrum(jacobian)
    weights = (vectors.T @ a.to(vectors)).square()
    order = weights.argsort(descending=True, stable=True)[:top]
    return Decomposition(values[order], weights[order], (values * weights)[order])
