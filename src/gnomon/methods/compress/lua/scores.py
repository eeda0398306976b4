"""Uniform scores: where a weight's importance stands in its row, as a share.

Shapes: S and s are m × n (outputs × inputs).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError

CHUNK = 1 << 24
"""Numbers sorted at once: bounds the indices that sorting makes beside them (16 bytes each)."""
NARROW = torch.iinfo(torch.int16).max
"""Widest row whose ranks fit into two bytes."""


def uniform_scores(scores: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    r"""Empirical distribution function of each row: :math:`s_{ij} = \#\{k : S_{ik} \le S_{ij}\} / n`, float32.

    So s lies in {1/n, ..., 1} and is the rank over n; ties share the highest rank. It doesn't change when a row, or
    everything, is multiplied by a positive number. By sorting: O(n log n) a row.

    Raises:
        UsageError: not a matrix, or an empty one.
        NumericalFailure: a score that is NaN.
    """
    return as_scores(ranks(scores))


def ranks(scores: Float[Tensor, "m n"]) -> Int[Tensor, "m n"]:
    """The ranks 1 to n behind :func:`uniform_scores`, in int16 where that is wide enough, else int32.

    bfloat16 and float16 can't tell neighbouring shares of a wide row apart; whole numbers of the same size can.
    """
    if scores.ndim != 2 or not scores.numel():
        raise UsageError(
            f"Scores must be a matrix (outputs × inputs) with an entry, got {list(scores.shape)}."
        )
    rows, n = scores.shape
    found = torch.empty(rows, n, dtype=torch.int16 if n <= NARROW else torch.int32, device=scores.device)
    step = max(1, CHUNK // n)
    for first in range(0, rows, step):
        part = scores[first : first + step].contiguous()
        if bool(part.isnan().any()):
            raise NumericalFailure(
                "The importance scores hold NaN, which has no rank. Were the calibration activations finite? bfloat16 "
                "or float32 overflow less than float16."
            )
        ordered = part.sort(-1).values
        # right=True counts what is smaller or equal, so equal scores get the highest of their ranks
        found[first : first + step] = torch.searchsorted(ordered, part, right=True).to(found.dtype)
    return found


def as_scores(rank: Int[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Ranks as shares of the row's width, float32."""
    return rank.float().div_(rank.shape[-1])
