"""A BF16 matrix as NF12 planes: decode it, a few of its rows, count its bits, check its planes.

Source: the NF12 card, "Layout planes-v1" and "Interface".     Shapes: N rows, K columns, E exceptional groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypedDict

import torch
from jaxtyping import BFloat16, Float, Int, Int32, UInt8
from torch import Tensor

from gnomon.core.errors import GnomonError
from gnomon.kernels import nf12 as kernels
from gnomon.kernels.nf12.reference import GROUP

WINDOW = 16
"""Exponents that a nibble tells apart."""
BASES = range(1, 240)
"""Every weight in a window [b, b + 15] is a normal number, so 0, subnormals, Inf and NaN are exceptions."""
SCALE_FREE = 112
"""The base at which no power-of-two scale is needed to bring the exponents to 0111xxxx."""
BLOCK = 1 << 22  # weights decoded at once where the whole matrix isn't wanted


class NF12Stats(TypedDict):
    """What :meth:`NF12Tensor.stats` reports. Entropies are in bits a weight."""

    bits_per_weight: float
    base: int
    scale_exp: int
    """s = 112 - base: after scaling by 2^s the window's exponents are those with upper nibble 0111."""
    in_window: float
    """Share of weights whose exponent lies in the window."""
    exception_groups: float
    """Share of groups stored verbatim."""
    entropy_joint: float
    """Plug-in entropy of the 65,536 patterns; biased low."""
    entropy_exponent: float
    entropy_joint_corrected: float
    """With the Miller-Madow term added."""
    entropy_exponent_corrected: float


@dataclass(frozen=True, eq=False)
class NF12Tensor:
    """NF12 planes of a matrix; see `gnomon.kernels.nf12.reference` for the meaning of each bit."""

    sm: UInt8[Tensor, "N K_pad"]
    ex: Int32[Tensor, "N groups"]
    esc: BFloat16[Tensor, "E 8"]
    base: int
    shape: tuple[int, int]
    """(N, K) of the matrix."""

    def decode(self, out: Float[Tensor, "N K"] | None = None) -> Float[Tensor, "N K"]:
        """The matrix, bit for bit.

        Args:
            out: where to write it (and what is returned): contiguous, bfloat16 or float32, which is exact too.

        Raises:
            UsageError: `out` has another shape or device.
        """
        return kernels.decode(self.sm, self.ex, self.esc, self.base, self.shape[1], out=out)

    def decode_block(self, first: int, last: int, out: Float[Tensor, "rows K"]) -> Float[Tensor, "rows K"]:
        """Rows first … last - 1 into `out` (bfloat16 or float32)."""
        part = slice(first, last)
        return kernels.decode(self.sm[part], self.ex[part], self.esc, self.base, self.shape[1], out=out)

    @functools.cached_property
    def prepared(self) -> kernels.Prepared:
        """The planes, checked once, for products at every token."""
        return kernels.Prepared(self.sm, self.ex, self.esc, self.base, self.shape[1])

    def rows(self, index: Int[Tensor, "*batch"]) -> BFloat16[Tensor, "*batch K"]:
        """Some rows, decoded without the others (what an embedding needs).

        Raises:
            UsageError: an index outside [0, N).
        """
        some = kernels.decode_rows(index.flatten(), self.sm, self.ex, self.esc, self.base, self.shape[1])
        return some.view(*index.shape, self.shape[1])

    def to(self, device: torch.device | str) -> NF12Tensor:
        """The same planes on another device."""
        return NF12Tensor(self.sm.to(device), self.ex.to(device), self.esc.to(device), self.base, self.shape)

    @property
    def device(self) -> torch.device:
        return self.sm.device

    @property
    def exceptions(self) -> int:
        """Groups stored verbatim."""
        return int((self.ex == 0).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the three planes."""
        return self.sm.nbytes + self.ex.nbytes + self.esc.nbytes

    @property
    def bits_per_weight(self) -> float:
        """12 + 16 f for a share f of exceptional groups, when K is a multiple of 8. NaN for an empty matrix."""
        weights = self.shape[0] * self.shape[1]
        return 8 * self.nbytes / weights if weights else float("nan")

    def stats(self) -> NF12Stats:
        """Size, window and entropies. Decodes the matrix block by block."""
        from .entropy import Patterns  # it knows encode's view of bits, which knows this module

        patterns = Patterns.of(self)
        return NF12Stats(
            bits_per_weight=self.bits_per_weight,
            base=self.base,
            scale_exp=SCALE_FREE - self.base,
            in_window=patterns.in_window(self.base),
            exception_groups=self.exceptions / self.ex.numel() if self.ex.numel() else float("nan"),
            entropy_joint=patterns.joint.plug_in,
            entropy_exponent=patterns.exponent.plug_in,
            entropy_joint_corrected=patterns.joint.corrected,
            entropy_exponent_corrected=patterns.exponent.corrected,
        )

    def validate(self, *, strict: bool = False) -> None:
        """Refuse planes that a decoder must not be given.

        Args:
            strict: also refuse what decodes but was not written by :func:`encode`: esc rows that no slot, or
                more than one slot, points to, or that are out of order.

        Raises:
            GnomonError: wrong shapes or dtypes, a base out of range, an index beyond esc, a slot with bytes
                after its index, and under `strict` the above.
        """
        check_form(self)
        exception = self.ex == 0
        row, group = exception.nonzero(as_tuple=True)
        slots = self.sm.view(*self.ex.shape, GROUP)[row, group]
        if bool((dirty := slots[:, 4:].any(-1)).any()):
            k = int(dirty.nonzero()[0, 0])
            raise GnomonError(
                f"The slot of exceptional group ({int(row[k])}, {int(group[k])}) holds bytes after its 4-byte "
                "index, which must be 0. The planes are damaged."
            )
        index = slots.to(torch.int64)
        index = index[:, 0] | index[:, 1] << 8 | index[:, 2] << 16 | index[:, 3] << 24
        if len(index) and (largest := int(index.max())) >= len(self.esc):
            k = int(index.argmax())
            raise GnomonError(
                f"Exceptional group ({int(row[k])}, {int(group[k])}) points to row {largest} of {len(self.esc)} "
                "verbatim rows. The planes are damaged or belong to different matrices."
            )
        if strict and not torch.equal(index, torch.arange(len(self.esc), device=self.device)):
            raise GnomonError(
                f"{len(index)} exceptional groups point to {len(self.esc)} verbatim rows, but not to each one "
                "once and in order, as the encoder writes them. Decode and encode again to repair."
            )


def padded(columns: int) -> int:
    """K_pad: columns in whole groups."""
    return -(-columns // GROUP) * GROUP


def check_form(t: NF12Tensor) -> None:
    """Refuse planes whose dtypes, shapes or base contradict each other (their values are not looked at).

    Raises:
        GnomonError: with what was found and what was expected.
    """
    rows, columns = t.shape
    wide = padded(columns)
    expected = {
        "sm": (t.sm, torch.uint8, (rows, wide)),
        "ex": (t.ex, torch.int32, (rows, wide // GROUP)),
        "esc": (t.esc, torch.bfloat16, (*t.esc.shape[:1], GROUP)),
    }
    for name, (plane, dtype, shape) in expected.items():
        if plane.dtype != dtype or tuple(plane.shape) != shape:
            raise GnomonError(
                f"Plane {name} is {plane.dtype} {tuple(plane.shape)}; a matrix of {rows} x {columns} has "
                f"{dtype} {shape}. The planes are damaged or belong to different matrices."
            )
    if t.base not in BASES:
        raise GnomonError(
            f"base={t.base} lies outside [{BASES.start}, {BASES.stop - 1}]. The planes are damaged."
        )
