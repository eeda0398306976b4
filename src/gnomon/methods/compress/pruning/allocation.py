"""How much of each matrix is removed: the type that allocators give and pruners take.

Here:  :class:`Allocation` and its checks.
Not here: how the shares are found (`allocators`), how they become whole numbers of weights (`counts`).

Shapes: a matrix is [out, in] = outputs × inputs, as in `nn.Linear`; Conv1D's weight is read transposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnomon.core.errors import UsageError, nearest

Shapes = Mapping[str, tuple[int, int]]
"""Dotted name of a matrix inside the unwrapped model -> (outputs, inputs)."""

Axis = Literal["matrix", "row", "column"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """Shares of weights to remove: sparsities, not kept shares, each in [0, 1].

    `ratios` has one entry per prunable matrix, under the name that :func:`~.targets.prunable` gives it (that of the
    module, without ".weight"). What an entry is depends on `axis`:

    | axis | entry | says |
    |---|---|---|
    | "matrix" | float | share of the whole matrix |
    | "row" | float64 tensor [out] | share of each output's weights |
    | "column" | float64 tensor [⌈in / group⌉] | share of each `group` neighbouring columns, all rows together |

    With axis "row" or "column" a float means the same share everywhere. The last column group is narrower where
    `group` doesn't divide `in`; `group=1` is one share per input.

    What a pruner makes of it, always with exactly as many weights as the shares ask for:

    | pruner | "matrix" | "row" | "column" |
    |---|---|---|---|
    | magnitude | smallest of the matrix | smallest of each row | smallest of each group |
    | wanda | smallest of each row, the same share in all | smallest of each row | smallest rank in the row, per group |
    | sparsegpt | the share of each block of columns | of each row, spread over the blocks | block = group |
    | N:M patterns | N per matrix, nearest to the share | as the matrix's mean | as the matrix's mean |

    So Wanda with axis "row" and shares k_j / in removes the k_j smallest of row j: what learned thresholds t_j on
    ranks remove, where k_j = #{i : s_ij ≤ t_j}. For Lua's layer granularity use "matrix", for its column granularity
    "column" with group=1 (Wanda then compares the ranks s of a column, ties by S).

    `allocation="lua"` calls `gnomon.methods.compress.lua.allocate(model, calib, *, sparsity, targets, exclude,
    **options)`, which returns an Allocation whose mean is `sparsity`. The model it gets is dense; it must leave it as
    it found it.
    """

    ratios: Mapping[str, float | Tensor]
    axis: Axis = "matrix"
    group: int = 128
    """Columns of a group; read with axis "column" only."""
    source: str = "given"
    """Name of the allocator, for reports."""

    def __post_init__(self) -> None:
        if self.axis not in ("matrix", "row", "column"):
            raise UsageError(f"axis={self.axis!r} must be matrix, row or column.")
        if self.group < 1:
            raise UsageError(f"group={self.group} must be at least one column.")
        for name, ratio in self.ratios.items():
            if self.axis == "matrix" and isinstance(ratio, Tensor) and ratio.numel() != 1:
                raise UsageError(
                    f"The ratio of {name} is a tensor of {list(ratio.shape)}, but axis='matrix' takes one number. "
                    "Say axis='row' or axis='column'."
                )
            values = torch.as_tensor(ratio, dtype=torch.float64)
            if not bool(((values >= 0) & (values <= 1)).all()):  # NaN fails too
                worst = values.flatten()[int(((values - 0.5).abs().nan_to_num(math.inf)).argmax())]
                raise UsageError(
                    f"The ratio of {name} holds {float(worst):g}, but a share of removed weights lies in [0, 1]. Are "
                    "these kept shares, or percentages?"
                )

    def require(self, shapes: Shapes) -> None:
        """Refuse anything but one entry of the right shape for each matrix.

        Raises:
            UsageError: missing, unknown, or of another shape.
        """
        if missing := [name for name in shapes if name not in self.ratios]:
            raise UsageError(
                f"The allocation has no ratio for {missing[0]} ({len(missing)} of {len(shapes)} matrices are "
                "missing). Give every matrix one, or leave it out with exclude=."
            )
        if more := [name for name in self.ratios if name not in shapes]:
            raise UsageError(
                f"The allocation names {more[0]!r}, which is not pruned.{nearest(more[0], shapes)}"
            )
        for name, shape in shapes.items():
            units, ratio = self.units(shape), self.ratios[name]
            if isinstance(ratio, Tensor) and ratio.numel() != 1 and tuple(ratio.shape) != (len(units),):
                raise UsageError(
                    f"The ratios of {name} have the shape {list(ratio.shape)}, but {len(units)} are needed: one for "
                    f"each {'row' if self.axis == 'row' else f'group of {self.group} columns'} of {list(shape)}."
                )

    def units(self, shape: tuple[int, int]) -> Tensor:
        """How many weights each share is about, int64 [1], [out] or [groups]; their sum is out · in."""
        out, inputs = shape
        if self.axis == "matrix":
            return torch.tensor([out * inputs])
        if self.axis == "row":
            return torch.full((out,), inputs)
        widths = [min(self.group, inputs - first) for first in range(0, inputs, self.group)]
        return torch.tensor(widths) * out

    def shares(self, name: str, shape: tuple[int, int]) -> Tensor:
        """The shares of one matrix as float64 on the CPU, [1], [out] or [groups]."""
        ratio = torch.as_tensor(self.ratios[name], dtype=torch.float64).detach().cpu()
        return ratio.reshape(-1).expand(len(self.units(shape))) if ratio.numel() == 1 else ratio

    def wanted(self, name: str, shape: tuple[int, int]) -> float:
        """Weights of one matrix to remove, not yet a whole number."""
        return float((self.shares(name, shape) * self.units(shape)).sum())

    def of(self, name: str, shape: tuple[int, int]) -> float:
        """Share of one matrix."""
        return self.wanted(name, shape) / (shape[0] * shape[1])

    def mean(self, shapes: Shapes) -> float:
        """Share of all matrices together, weighted by their weights."""
        total = sum(out * inputs for out, inputs in shapes.values())
        return math.fsum(self.wanted(name, shape) for name, shape in shapes.items()) / total
