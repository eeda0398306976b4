r"""Masks of one matrix from scores: magnitude, Wanda, N:M, and Wanda's variant by cumulative sums.

Paper: "A Simple and Effective Pruning Approach for Large Language Models" (Wanda), read from its repository.
Here:  which weights go, given scores; a mask is True where a weight is kept.
Not here: updates of the kept weights (`sparsegpt`), learned masks (`maskllm`), gathering the norms (`importance`).
Inferred: with an exact budget, remainders of a row's floor go to the rows whose next weight scores lowest; weights that
       are zero come first whatever they score; column shares rank inside rows, as Lua's thresholds do.
Differs from the code: ⌊pN⌋ weights, where it indexes from 0 and removes one more.

Shapes: W and S are [out, in]; norms are [in].
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError

from .counts import fit_counts, floors
from .quota import Pattern, Quota

FEW = 6
"""Order statistics that selection finds faster than sorting does."""


def magnitude_scores(weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """S = |W| in float32 at least."""
    size = weight.detach().abs()
    return size if size.dtype == torch.float64 else size.float()


def wanda_scores(weight: Float[Tensor, "out in"], norms: Float[Tensor, " in"]) -> Float[Tensor, "out in"]:
    r""":math:`S_{ij} = |W_{ij}| \, \lVert X_{:,j} \rVert_2`, float32 at least.

    Raises:
        UsageError: norms of another length.
    """
    if norms.shape != weight.shape[1:]:
        raise UsageError(f"A matrix of {list(weight.shape)} was given norms of {list(norms.shape)}.")
    scores = magnitude_scores(weight)
    return scores * norms.to(scores.device, scores.dtype)


def magnitude_mask(
    weight: Float[Tensor, "out in"], sparsity: float | Quota, *, exact: bool = True
) -> Bool[Tensor, "out in"]:
    """Remove the smallest |W| of the matrix, or of each row or column group if the quota says so."""
    quota = _quota(sparsity, weight, exact)
    return mask_from(magnitude_scores(weight), weight, quota, rows=False)


def wanda_mask(
    weight: Float[Tensor, "out in"],
    norms: Float[Tensor, " in"],
    sparsity: float | Quota,
    *,
    exact: bool = True,
    variant: bool = False,
) -> Bool[Tensor, "out in"]:
    """Remove the smallest S of each row.

    Args:
        sparsity: a share, or a quota with shares of rows or column groups.
        exact: round(p · out · in) weights in all; else ⌊p · in⌋ of each row.
        variant: how many go differs by row: as many as make up the share α of the row's sum of scores, α such that
            the matrix loses what it should.
    """
    quota, scores = _quota(sparsity, weight, exact), wanda_scores(weight, norms)
    if variant:
        return _cumulative(scores, weight, quota)
    return mask_from(scores, weight, quota, rows=True)


def mask_from(
    scores: Float[Tensor, "out in"], weight: Float[Tensor, "out in"], quota: Quota, *, rows: bool
) -> Bool[Tensor, "out in"]:
    """Remove the lowest scores within the units of the quota.

    Args:
        scores: any finite numbers.
        rows: what one share for the matrix means: that share of each row, or the lowest of the whole matrix.

    Raises:
        UsageError: shapes that differ.
        NumericalFailure: a score that is NaN or infinite.
    """
    require_scores(scores, weight)
    zero = weight == 0
    if quota.axis == "column":
        key = _rank_key(scores) if rows else scores
        return ~_lowest_of_groups(key.masked_fill(zero, -math.inf), zero, quota)
    scores = scores.masked_fill(zero, -math.inf)  # zeros count as removed, so they go first
    if quota.axis == "matrix" and not rows:
        if quota.total is not None and int(zero.sum()) > quota.total:
            raise UsageError(
                f"{quota.total} weights are to be removed of {zero.numel()}, of which {int(zero.sum())} are zero "
                "already. Ask for a higher sparsity."
            )
        count = floors(quota.wanted) if quota.total is None else torch.tensor([quota.total])
        flat = scores.flatten()
        if quota.total is None:  # the published form: everything up to the threshold, ties too
            k = int(count)
            return scores > _kth(flat, k) if k else torch.ones_like(zero)
        return ~lowest(flat[None], count).view_as(scores)
    wanted = quota.wanted
    if quota.axis == "matrix":
        wanted = (quota.shares * weight.shape[1]).expand(weight.shape[0])
    counts = floors(wanted)
    if quota.total is not None:
        counts = _row_counts(scores, zero, wanted, counts, quota.total)
    return ~lowest(scores, counts)


def nm_mask(
    scores: Float[Tensor, "out in"], weight: Float[Tensor, "out in"], pattern: Pattern
) -> Bool[Tensor, "out in"]:
    """Keep the N highest scores of every M neighbouring columns of a row; of equal ones the later."""
    require_scores(scores, weight)
    pattern.require_fits("the matrix", (weight.shape[0], weight.shape[1]))
    groups = scores.masked_fill(weight == 0, -math.inf).reshape(len(scores), -1, pattern.of)
    order = groups.argsort(dim=-1, stable=True)
    mask = torch.ones_like(groups, dtype=torch.bool)
    return mask.scatter_(-1, order[..., : pattern.of - pattern.keep], False).flatten(1)


def lowest(scores: Float[Tensor, "units size"], counts: Int[Tensor, " units"]) -> Bool[Tensor, "units size"]:
    """Exactly `counts[u]` True entries in row u, at its lowest scores; of equal ones the first."""
    counts = counts.to(scores.device)
    values = _order_statistics(scores, counts - 1)
    threshold = values.gather(1, (counts - 1).clamp(min=0)[:, None])
    below, ties = scores < threshold, scores == threshold
    need = counts - below.sum(1)
    excess = ties.sum(1) != need
    if bool(excess.any()):  # rare: equal scores on both sides of the cut
        ties[excess] &= ties[excess].cumsum(1) <= need[excess, None]
    return below | ties


def require_scores(scores: Tensor, weight: Tensor) -> None:
    """Refuse scores that can't rank the weights."""
    if scores.shape != weight.shape:
        raise UsageError(
            f"Scores of {list(scores.shape)} can't rank a matrix of {list(weight.shape)}. Key them by name, and mind "
            "that Conv1D stores its weight transposed."
        )
    if not bool(torch.isfinite(scores).all()):
        raise NumericalFailure(
            "The scores hold NaN or infinity, so they rank nothing. Look at the activations they were made from."
        )


def uniform_ranks(scores: Float[Tensor, "out in"]) -> Int[Tensor, "out in"]:
    """#{k : S_ik ≤ S_ij}: the empirical distribution function of the row times its length; ties share the highest."""
    ordered = scores.sort(1).values
    return torch.searchsorted(ordered, scores.contiguous(), right=True)


def _quota(sparsity: float | Quota, weight: Tensor, exact: bool) -> Quota:
    if isinstance(sparsity, Quota):
        return sparsity
    return Quota.uniform(sparsity, (weight.shape[0], weight.shape[1]), exact=exact)


def _row_counts(scores: Tensor, zero: Tensor, wanted: Tensor, counts: Tensor, total: int) -> Tensor:
    """Exact counts; a remainder costs a row its next weight, so those with the lowest one give it."""
    size = torch.full_like(counts, scores.shape[1])
    least, priority = zero.sum(1), None
    if total != int(counts.sum()):
        at = counts.to(scores.device).clamp(max=scores.shape[1] - 1)
        priority = _order_statistics(scores, at).gather(1, at[:, None])[:, 0]
        priority = priority.clamp(min=-1e300 if priority.dtype == torch.float64 else -3e38)
    return fit_counts(wanted, size, total, least=least, priority=priority)


def _rank_key(scores: Tensor) -> Tensor:
    """Rank within the row; between equal ranks the score, squeezed into less than one rank."""
    span = float(scores.max() - scores.min())
    inside = (scores.double() - scores.min()) / (2 * span) if span else torch.zeros_like(scores).double()
    return uniform_ranks(scores).double() + inside


def _lowest_of_groups(key: Tensor, zero: Tensor, quota: Quota) -> Tensor:
    """Removed entries where each group of columns has a count of its own."""
    out, width = key.shape[0], quota.group
    whole = key.shape[1] // width
    counts = floors(quota.wanted)
    if quota.total is not None:
        least = torch.stack([part.sum() for part in torch.split(zero, width, 1)])
        counts = fit_counts(quota.wanted, quota.units, quota.total, least=least)
    parts = []
    if whole:
        grouped = key[:, : whole * width].reshape(out, whole, width).transpose(0, 1).flatten(1)
        parts.append(lowest(grouped, counts[:whole]).view(whole, out, width).transpose(0, 1).reshape(out, -1))
    if whole * width < key.shape[1]:
        tail = key[:, whole * width :]
        parts.append(lowest(tail.reshape(1, -1), counts[whole:]).view_as(tail))
    return torch.cat(parts, 1)


def _cumulative(scores: Tensor, weight: Tensor, quota: Quota) -> Tensor:
    """Rows lose the weights whose cumulated score stays within the share α of the row's sum; α is bisected."""
    if quota.axis != "matrix":
        raise UsageError(
            "Wanda's cumulative variant finds the shares of rows itself; give one share a matrix."
        )
    require_scores(scores, weight)
    scores = scores.masked_fill(weight == 0, 0.0)
    cumulated = scores.sort(1).values.double().cumsum(1)
    share = cumulated / cumulated[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)
    target = int(floors(quota.wanted)) if quota.total is None else quota.total
    low, high = 0.0, 1.0
    for _ in range(60):
        alpha = (low + high) / 2
        low, high = (alpha, high) if int((share <= alpha).sum()) <= target else (low, alpha)
    counts = (share <= low).sum(1)
    if quota.total is not None:
        at = counts.clamp(max=share.shape[1] - 1)
        size = torch.full_like(counts, share.shape[1])
        counts = fit_counts(
            counts.double(),
            size,
            target,
            least=(weight == 0).sum(1),
            priority=share.gather(1, at[:, None])[:, 0],
        )
    return ~lowest(scores.masked_fill(weight == 0, -math.inf), counts)


def _kth(flat: Tensor, k: int) -> Tensor:
    """The k-th smallest, from 1."""
    if flat.device.type != "cpu":
        return flat.sort().values[k - 1]
    return torch.as_tensor(np.partition(flat.numpy(), k - 1)[k - 1])


def _order_statistics(scores: Tensor, at: Tensor) -> Tensor:
    """The rows with the right values in their sorted places, at least in the places `at` and those between."""
    at = at.clamp(0, scores.shape[1] - 1)
    low, high = int(at.min()), int(at.max())
    if scores.device.type != "cpu" or high - low >= FEW:
        return scores.sort(1).values
    return torch.from_numpy(np.partition(scores.numpy(), range(low, high + 1), axis=1))
