"""Sparse rotations in a permuted frame, and the three ways to multiply with R_o W R_i.

Both variants are one thing. A permutation p of the d coordinates of a side is drawn, Ψ = I[p], and n blocks of size
b rotate the first n·b coordinates of the permuted vector; the others stay: R = Ψᵀ Diag(G¹, …, Gⁿ, I) Ψ. In the
block-stochastic variant n = d/b and nothing stays; in the fully stochastic one n = 1 and the set S is p's first b.

The frozen weight is kept as W̃ = Ψ_o W Ψ_iᵀ, so that x and y = W_eff x need one permutation each.

Shapes: d_o × d_i of W; G_o (n_o, b_o, b_o), G_i (n_i, b_i, b_i); x (…, d_i) are rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def draw(
    d: int, blocks: int, size: int, generator: torch.Generator | None, *, ordered: bool
) -> Int[Tensor, " d"]:
    """A permutation p of d coordinates, uniform; of `ordered` ones the chosen set and the rest are sorted."""
    device = generator.device if generator is not None else None
    p = torch.randperm(d, generator=generator, device=device)
    if ordered:
        p = torch.cat((p[: blocks * size].sort().values, p[blocks * size :].sort().values))
    return p


def rotate(x: Float[Tensor, "*rows d"], g: Float[Tensor, "n b b"]) -> Float[Tensor, "*rows d"]:
    """Diag(G¹, …, Gⁿ, I) applied to each row of x."""
    n, b, _ = g.shape
    head = x[..., : n * b].reshape(*x.shape[:-1], n, b)
    turned = torch.einsum("...nb,ncb->...nc", head, g).flatten(-2)
    return turned if n * b == x.shape[-1] else torch.cat((turned, x[..., n * b :]), -1)


def rotate_rows(w: Float[Tensor, "d k"], g: Float[Tensor, "n b b"]) -> Float[Tensor, "d k"]:
    """Diag(G¹, …, Gⁿ, I) W."""
    n, b, _ = g.shape
    turned = torch.bmm(g, w[: n * b].view(n, b, w.shape[1])).flatten(0, 1)
    return turned if n * b == w.shape[0] else torch.cat((turned, w[n * b :]))


def transformed(
    w: Float[Tensor, "o i"], g_out: Float[Tensor, "n_o b_o b_o"], g_in: Float[Tensor, "n_i b_i b_i"]
) -> Float[Tensor, "o i"]:
    """Diag(G_o) W̃ Diag(G_i): W_eff in the permuted frame."""
    return rotate(rotate_rows(w, g_out), g_in.mT)


def multiply(
    x: Float[Tensor, "*rows i"],
    w: Float[Tensor, "o i"],
    g_out: Float[Tensor, "n_o b_o b_o"],
    g_in: Float[Tensor, "n_i b_i b_i"],
) -> Float[Tensor, "*rows o"]:
    """ỹ = Diag(G_o) W̃ Diag(G_i) x̃ without forming a second d_o × d_i matrix; autograd keeps x̃ and u."""
    z = rotate(x, g_in.to(x.dtype))
    return rotate(F.linear(z, w.to(x.dtype)), g_out.to(x.dtype))


def multiply_ckpt(
    x: Float[Tensor, "*rows i"],
    w: Float[Tensor, "o i"],
    g_out: Float[Tensor, "n_o b_o b_o"],
    g_in: Float[Tensor, "n_i b_i b_i"],
) -> Float[Tensor, "*rows o"]:
    """The same function, of which only the input is kept: z and u are computed again on the way back.

    Under autocast all products are in its dtype, in both directions.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    y: Tensor = _Multiply.apply(x, w, g_out, g_in)  # type: ignore[no-untyped-call]
    return y


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, g_out: Tensor, g_in: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, g_out, g_in)
        with torch.autocast(x.device.type, enabled=False):
            return multiply(x, w, g_out, g_in)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
        x, w, g_out, g_in = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            w, g_o, g_i = w.to(x.dtype), g_out.to(x.dtype), g_in.to(x.dtype)
            u = F.linear(rotate(x, g_i), w)  # y = rotate(u, G_o)
            dg_out = _by_block(u, dy, g_o).to(g_out.dtype)
            dz = rotate(dy, g_o.mT) @ w
            dg_in = _by_block(x, dz, g_i).to(g_in.dtype)
            dx = rotate(dz, g_i.mT) if ctx.needs_input_grad[0] else None
        return dx, None, dg_out, dg_in


def _by_block(before: Tensor, after: Tensor, g: Tensor) -> Tensor:
    """dG of after = rotate(before, G): Σ over rows of d(after) ⊗ before, block by block."""
    n, b, _ = g.shape
    left, right = (t[..., : n * b].reshape(-1, n, b).transpose(0, 1) for t in (after, before))
    return left.mT @ right  # (n, b, rows) @ (n, rows, b)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Float32 products in float32: neither autocast nor TF32, since what a merge rounds stays rounded."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision if device.type == "cuda" else None
    if before is not None:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before is not None:
            backend.fp32_precision = before
