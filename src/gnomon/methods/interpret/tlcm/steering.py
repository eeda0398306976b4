"""What the next layer does to a steering vector added to the residual stream after layer i.

These tools are inferred: the paper proposes to "intervene on directions TLCM is not targeting" as future
work. A vector injected after layer i meets its correction in layer i + 1.
Shapes: V vectors, N tokens, d hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import UsageError

from .jacobian import symmetric_spectrum
from .next_layer import NextLayer
from .trace import Trace

_CHUNK = 256  # variants of the input evaluated at once


def steering_resistance(
    model: nn.Module,
    trace: Trace,
    layer: int,
    v: Float[Tensor, "*V d"],
    *,
    tokens: Sequence[int] | None = None,
    row: int = 0,
    path: str = "auto",
) -> Float[Tensor, "*V N"]:
    """Rayleigh quotient v^T S v / |v|^2 at each token: below 0 a small push along v is resisted.

    Equals v^T J v / |v|^2; one derivative per vector and token, no Jacobian is formed.

    Args:
        model: the captured model.
        trace: from :func:`capture` of that model.
        layer: the layer after which v is added; layer + 1 reacts.
        v: one direction or several; their lengths don't matter.
        tokens: positions in the sequence (default: all counted ones).
        row: sequence in the batch.
        path: see :class:`NextLayer`.
    """
    function = NextLayer(model, trace, layer, row, path)
    positions, units = _positions(function, tokens), _units(function, v)
    quotients = []
    for token, direction in _variants(positions, units):
        with torch.enable_grad():
            x = function.x[token].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(function(token, x), x, grad_outputs=direction)
        quotients.append((gradient * direction).sum(-1))
    return torch.cat(quotients).reshape(*v.shape[:-1], len(positions))


def surviving_gain(
    model: nn.Module,
    trace: Trace,
    layer: int,
    v: Float[Tensor, "*V d"],
    *,
    strength: float = 0.0,
    tokens: Sequence[int] | None = None,
    row: int = 0,
    path: str = "auto",
) -> Float[Tensor, "*V N"]:
    """How much of a push along v is left after the next layer: 1 untouched, 0 undone, above 1 amplified.

    The push is D = strength * |x_{i+1,t}| * v/|v| at token t alone. Measured by running the layer:
    1 + <b'(D) - b'(0), v> / <D, v>. At strength 0 it is the limit 1 + v^T J v / |v|^2.

    Args:
        strength: length of the push as a share of the residual stream's norm there (below 0: against v).
        model, trace, layer, v, tokens, row, path: as in :func:`steering_resistance`.
    """
    if strength == 0.0:
        return 1 + steering_resistance(model, trace, layer, v, tokens=tokens, row=row, path=path)
    function = NextLayer(model, trace, layer, row, path)
    positions, units = _positions(function, tokens), _units(function, v)
    gains = []
    with torch.no_grad():
        for token, direction in _variants(positions, units):
            x = function.x[token]
            length = strength * x.norm(dim=-1, keepdim=True)
            change = function(token, x + length * direction) - function(token, x)
            gains.append(1 + (change * direction).sum(-1) / length[:, 0])
    return torch.cat(gains).reshape(*v.shape[:-1], len(positions))


def unresisted_part(jacobians: Float[Tensor, "*k d d"], v: Float[Tensor, "*V d"]) -> Float[Tensor, "*V d"]:
    """Projection of v on the non-negative eigenspace of the mean S: what TLCM does not target.

    Args:
        jacobians: one or a stack from :func:`layer_jacobian` (or their mean S).
        v: one vector or several.
    """
    values, vectors = symmetric_spectrum(jacobians)
    kept = vectors[:, values >= 0]
    return ((v.to(kept) @ kept) @ kept.T).to(v)


def _positions(function: NextLayer, tokens: Sequence[int] | None) -> Tensor:
    if tokens is None:
        tokens = function.counted.nonzero()[:, 0].tolist()
    if not len(tokens):
        raise UsageError("There is no token to measure at: `tokens` is empty, or the sequence counts none.")
    return torch.tensor([function.token(token) for token in tokens], device=function.device)


def _units(function: NextLayer, v: Tensor) -> Tensor:
    """[V, d] directions of length 1."""
    if v.shape[-1] != function.width:
        raise UsageError(f"v has {v.shape[-1]} entries, the residual stream {function.width}.")
    rows = v.reshape(-1, function.width).to(function.device, function.dtype)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not bool((lengths > 0).all()) or not bool(lengths.isfinite().all()):
        raise UsageError("A steering vector is zero or not finite, so it has no direction.")
    return rows / lengths


def _variants(positions: Tensor, units: Tensor) -> list[tuple[Tensor, Tensor]]:
    """All (token, direction) pairs in chunks; the token varies fastest."""
    tokens = torch.split(positions.repeat(len(units)), _CHUNK)
    directions = torch.split(units.repeat_interleave(len(positions), dim=0), _CHUNK)
    return list(zip(tokens, directions, strict=True))
