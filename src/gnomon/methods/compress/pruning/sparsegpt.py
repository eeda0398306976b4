r"""SparseGPT: weights are removed column by column, and the columns after them make up for it.

Paper: "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", read from its repository.
Here:  one matrix: masks by blocks of columns, the sweep with its updates, N:M.
Not here: H (`statistics`), its factor (`compress.obs`, which raises the damping where Cholesky fails).
Inferred: with an exact budget, blocks' floors are topped up by largest remainder, and shares of rows are spread over
       the blocks in proportion; where dead inputs are more than the budget, those beyond it keep their weights.
Differs from the code: ⌊p · numel⌋ weights a block, where it indexes from 0 and removes one more.

Shapes: W is [out, in], H [in, in]. Inside, everything is held transposed: a column is then one run of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError

from ..obs import DAMPING, InverseFactor, inverse_factor
from .counts import fit_counts, floors
from .masks import lowest
from .quota import Pattern, Quota

BLOCK = 128
"""Columns whose mask is chosen at once."""


class Pruned(NamedTuple):
    """One matrix after the sweep."""

    weight: Float[Tensor, "out in"]
    """float32, float64 if that came in; zero where the mask is False."""
    mask: Bool[Tensor, "out in"]
    """True where kept."""
    loss: float
    r"""Σ err²: the rise of ‖(W − Ŵ)X‖² that the sweep accounts for, in units of the H that was given."""
    damping: float
    """Share of the mean diagonal that was added."""


def sparsegpt(
    weight: Float[Tensor, "out in"],
    gram: Float[Tensor, "in in"] | InverseFactor,
    sparsity: float | Quota | Pattern,
    *,
    damping: float = DAMPING,
    block: int = BLOCK,
    exact: bool = True,
) -> Pruned:
    r"""Prune one matrix and update the weights that stay.

    With U from :math:`H^{-1} = U^\top U`, per block: saliency :math:`w^2 / U_{jj}^2`, the lowest go; then for each
    column j: :math:`e = (w - q) / U_{jj}`, :math:`W_{:, j:} \mathrel{-}= e \, U_{j, j:}`.

    Args:
        gram: H = Σ x xᵀ or a multiple; or its factor, to share it between matrices that read the same input.
        sparsity: share; quota with shares of rows, or of column groups, which then are the blocks; or pattern.
        damping: as in `inverse_factor`; not read if a factor is given.
        exact: round(p · out · in) weights; else ⌊p · numel⌋ of each block.

    Raises:
        UsageError: shapes that don't fit.
        NumericalFailure: an H that no damping makes definite; weights that aren't finite.
    """
    out, inputs = weight.shape
    factor = gram if isinstance(gram, InverseFactor) else inverse_factor(gram, damping=damping)
    if factor.upper.shape[0] != inputs:
        raise UsageError(f"H is about {factor.upper.shape[0]} inputs, but the matrix has {inputs}.")
    if block < 1:
        raise UsageError(f"block={block} must be at least one column.")
    kind = torch.float64 if weight.dtype == torch.float64 else torch.float32
    w = weight.detach().T.to(kind, copy=True).contiguous()  # [in, out]
    if not bool(torch.isfinite(w).all()):
        raise NumericalFailure("The matrix holds NaN or infinity.")
    upper = factor.upper.to(w.device, kind)
    dead = factor.dead.to(w.device)
    if isinstance(sparsity, Pattern):
        sparsity.require_fits("the matrix", (out, inputs))
        block = -(-block // sparsity.of) * sparsity.of
        w[dead] = 0
        chooser: _Chooser = _Grouped(sparsity)
    else:
        quota = (
            sparsity if isinstance(sparsity, Quota) else Quota.uniform(sparsity, (out, inputs), exact=exact)
        )
        block = quota.group if quota.axis == "column" else block
        if quota.total is None or int(((w == 0) | dead[:, None]).sum()) <= quota.total:
            w[dead] = 0
        chooser = (_ByRow if quota.axis == "row" else _ByBlock)(quota, w == 0, block, dead)
    removed = torch.zeros_like(w, dtype=torch.bool)
    loss = 0.0
    for first in range(0, inputs, block):
        loss += _sweep(w, removed, upper, first, min(first + block, inputs), chooser)
    w.masked_fill_(removed, 0)
    if not bool(torch.isfinite(w).all()):
        raise NumericalFailure(
            "The updated weights aren't finite. Raise the damping, or give more calibration text."
        )
    return Pruned(w.T, ~removed.T, loss, factor.damping)


def _sweep(w: Tensor, removed: Tensor, upper: Tensor, first: int, last: int, chooser: _Chooser) -> float:
    """One block: choose, remove column by column, then update everything after the block."""
    part, gone = w[first:last], removed[first:last]
    corner = upper[first:last, first:last]
    diagonal = corner.diagonal()
    chooser.block(first, last, part, diagonal, gone)
    errors = torch.zeros_like(part)
    for j in range(last - first):
        chooser.column(j, part, diagonal, gone)
        error = torch.mul(part[j], gone[j], out=errors[j]).div_(diagonal[j])
        if j + 1 < last - first:
            part[j + 1 :].addr_(corner[j, j + 1 :], error, alpha=-1)
    if last < len(w):
        w[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)
    return float(errors.double().square().sum())


class _Chooser:
    """Decides what goes, when a block or a column begins."""

    def block(self, first: int, last: int, part: Tensor, diagonal: Tensor, gone: Tensor) -> None:
        """Called once a block."""

    def column(self, j: int, part: Tensor, diagonal: Tensor, gone: Tensor) -> None:
        """Called once a column, j from the start of the block."""


class _ByBlock(_Chooser):
    """A count for each block, over all its rows and columns."""

    def __init__(self, quota: Quota, zero: Tensor, block: int, dead: Tensor) -> None:
        sizes = torch.tensor([part.numel() for part in torch.split(zero, block)])
        shares = quota.shares if quota.axis == "column" else quota.shares.expand(len(sizes))
        counts = floors(shares * sizes)
        if quota.total is not None:
            least = torch.stack([part.sum() for part in torch.split(zero, block)])
            counts = fit_counts(shares * sizes, sizes, quota.total, least=least)
        self.counts, self.size, self.dead = counts, block, dead

    def block(self, first: int, last: int, part: Tensor, diagonal: Tensor, gone: Tensor) -> None:
        scores = _saliency(part, diagonal, self.dead[first:last])
        count = self.counts[first // self.size : first // self.size + 1]
        gone.copy_(lowest(scores.reshape(1, -1), count).view_as(gone))


class _ByRow(_Chooser):
    """A count for each row of W, spread over the blocks in proportion to their width."""

    def __init__(self, quota: Quota, zero: Tensor, block: int, dead: Tensor) -> None:
        inputs = zero.shape[0]
        self.counts = floors(quota.wanted)
        if quota.total is not None:
            sizes = torch.full_like(self.counts, inputs)
            self.counts = fit_counts(quota.wanted, sizes, quota.total, least=zero.sum(0))
        self.counts = self.counts.to(zero.device)
        self.taken = torch.zeros_like(self.counts)
        self.zeros_left, self.zero, self.dead = zero.sum(0), zero, dead

    def block(self, first: int, last: int, part: Tensor, diagonal: Tensor, gone: Tensor) -> None:
        zeros = self.zero[first:last].sum(0)
        self.zeros_left = self.zeros_left - zeros
        aim = torch.round(self.counts.double() * last / self.zero.shape[0]).long() - self.taken
        # Not fewer than the zeros that are here; not so many that those of later blocks would exceed the row's count.
        now = torch.maximum(
            torch.minimum(aim, self.counts - self.taken - self.zeros_left), torch.zeros_like(aim)
        )
        now = torch.maximum(now, torch.minimum(zeros, self.counts - self.taken)).clamp(max=last - first)
        self.taken = self.taken + now
        scores = _saliency(part, diagonal, self.dead[first:last])
        gone.copy_(lowest(scores.T.contiguous(), now).T)


class _Grouped(_Chooser):
    """N:M: chosen when the sweep reaches a group, from its weights as they are by then."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def column(self, j: int, part: Tensor, diagonal: Tensor, gone: Tensor) -> None:
        width = self.pattern.of
        if j % width == 0:
            scores = (part[j : j + width] / diagonal[j : j + width, None]).square()
            order = scores.argsort(dim=0, stable=True)[: width - self.pattern.keep]
            gone[j : j + width].scatter_(0, order, True)


def _saliency(part: Tensor, diagonal: Tensor, dead: Tensor) -> Tensor:
    """w² / U_jj²; weights of dead inputs go before all others but zeros."""
    scores = (part / diagonal[:, None]).square()
    if bool(dead.any()):
        scores[dead] = -1.0
        scores.masked_fill_(part == 0, -2.0)
    return scores
