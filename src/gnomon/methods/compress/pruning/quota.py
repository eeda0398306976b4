"""What one matrix has to give: shares over its units, and the exact number if there is one.

Here:  :class:`Quota`, made from an :class:`~.allocation.Allocation` or from one number; N:M patterns.
Not here: which weights go (`masks`, `sparsegpt`, `maskllm`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.core.errors import UsageError

from .allocation import Allocation, Axis
from .counts import budget


@dataclass(frozen=True, kw_only=True, eq=False)
class Quota:
    """Shares of one matrix [out, in] to remove."""

    shares: Float[Tensor, " units"]
    """float64; one, one a row, or one a column group: see `Allocation`."""
    units: Int[Tensor, " units"]
    """Weights that each share is about."""
    axis: Axis = "matrix"
    group: int = 128
    total: int | None = None
    """Exactly so many weights; None: the floors of the published code."""

    @property
    def wanted(self) -> Float[Tensor, " units"]:
        """Weights of each unit, not yet whole numbers."""
        return self.shares * self.units

    @classmethod
    def of(cls, allocation: Allocation, name: str, shape: tuple[int, int], total: int | None = None) -> Quota:
        """The part of an allocation that is about one matrix."""
        return cls(
            shares=allocation.shares(name, shape),
            units=allocation.units(shape),
            axis=allocation.axis,
            group=allocation.group,
            total=total,
        )

    @classmethod
    def uniform(cls, sparsity: float, shape: tuple[int, int], *, exact: bool = True) -> Quota:
        """The same share everywhere.

        Raises:
            UsageError: not in [0, 1].
        """
        require_share(sparsity, closed=True)
        size = shape[0] * shape[1]
        return cls(
            shares=torch.tensor([sparsity], dtype=torch.float64),
            units=torch.tensor([size]),
            total=budget(sparsity, size) if exact else None,
        )


@dataclass(frozen=True)
class Pattern:
    """N:M: of every M neighbouring inputs of an output at most N are kept, as the hardware's name goes.

    The released code of Wanda counts the removed ones; for 2:4 and 4:8 that is the same.
    """

    keep: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= self.of or not self.of:
            raise UsageError(f"The pattern {self.keep}:{self.of} keeps {self.keep} of {self.of}.")

    @property
    def sparsity(self) -> float:
        """1 − N/M."""
        return 1 - self.keep / self.of

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """From "2:4".

        Raises:
            UsageError: not of that form, or with nothing to remove or to keep.
        """
        found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
        if found is None or not 0 < int(found[1]) < int(found[2]):
            raise UsageError(
                f"pattern={text!r} is not of the form N:M with 0 < N < M, N of every M neighbouring weights kept, such "
                "as '2:4'."
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"

    def require_fits(self, name: str, shape: tuple[int, int]) -> None:
        """Refuse a matrix whose inputs don't divide into groups."""
        if shape[1] % self.of:
            raise UsageError(
                f"{name} has {shape[1]} inputs, which aren't groups of {self.of}. Leave it out with exclude=, or take "
                "another pattern."
            )


def require_share(sparsity: float, *, closed: bool = False, name: str = "sparsity") -> None:
    """Refuse what is no share of removed weights.

    Args:
        closed: 0 and 1 are allowed.
    """
    inside = 0 <= sparsity <= 1 if closed else 0 < sparsity < 1
    if not inside:
        raise UsageError(
            f"{name}={sparsity} must be the share of weights to remove, between 0 and 1"
            f"{', which are allowed' if closed else ''}; 0.6 keeps 40 %."
        )
