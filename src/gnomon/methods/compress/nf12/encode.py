"""BF16 matrix -> NF12 planes, on bit patterns only.

Twelve bits hold the sign, the mantissa and an exponent in a window [b, b + 15]. A group of eight columns with
any weight outside the window is an exception: its slot holds an index, its weights are kept verbatim. A slot
is known as an exception by its exponent word 0, so a group whose eight nibbles are all 0 (a *collision*)
becomes an exception too.

    bits of a weight     sign 15, exponent e 14..7, mantissa 6..0
    sm byte              sign << 7 | mantissa
    nibble               e - b, stored in split-16 order (see gnomon.kernels.nf12.reference)

Here:  the choice of b and the planes.      Not here: decoding (`gnomon.kernels.nf12`), files (`container.py`).
Source: the NF12 card, "Layout planes-v1" and "Encoder" (inferred from the abstract).
Shapes: N rows, K columns, K_pad = K rounded up to a multiple of 8. Bytes are little-endian, as in torch's views.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int16, Int64, UInt8
from torch import Tensor

from gnomon.core.errors import UsageError
from gnomon.kernels.nf12.reference import GROUP

from .tensor import BASES, WINDOW, NF12Tensor, padded

CANDIDATES = 4
"""Windows, best by coverage, whose exceptions are counted exactly."""
BLOCK = 1 << 20  # weights handled at once: many beside a table of 65,536 bins, few beside a level-3 cache
LOST = 0xFFFF  # the bits of a float32 that a bfloat16 lacks
INDEX_LIMIT = 1 << 31  # sizes and indices have to fit the container's signed 32-bit numbers

# Eight exponent bytes of a group as one 64-bit word: 0xF0 in every byte tells those that left the window.
_ABOVE_NIBBLE = -0x0F0F0F0F0F0F0F10


@dataclass(frozen=True)
class Plan:
    """A window and what it costs."""

    base: int
    """b, the exponent of nibble 0."""
    exceptions: int
    """Groups that would be stored verbatim: 16 bytes each on top of 12 bits a weight."""


def encode(w: Tensor, base: int | str = "auto") -> NF12Tensor:
    """The matrix in 12 bits a weight, 16 more for each weight of an exceptional group; `decode` gives it back.

    Every BF16 pattern survives: NaN payloads, infinities, subnormals, both zeros.

    Args:
        w: (N, K), bfloat16, or float32 whose values are all bfloat16 (low 16 bits zero).
        base: exponent of nibble 0, in [1, 239]; "auto" takes the one of :func:`plan`.

    Raises:
        UsageError: not a dense 2-D matrix of such values, on the meta device, or a base out of range.
    """
    check_matrix(w)
    return emit(w, plan(w).base if base == "auto" else _checked_base(base))


def plan(w: Tensor) -> Plan:
    """Of the four windows that cover the most weights, the one with the fewest exceptional groups.

    Ties go to the smallest b in both rankings, so that a matrix of one magnitude gets nibble 15, never 0.
    """
    check_matrix(w)
    covered = exponent_counts(w).unfold(0, WINDOW, 1).sum(-1)[BASES.start : BASES.stop]  # of base b at b - 1
    best = sorted(BASES, key=lambda b: (-int(covered[b - 1]), b))[:CANDIDATES]
    counts = exception_counts(w, best)
    return min((Plan(b, counts[b]) for b in best), key=lambda p: (p.exceptions, p.base))


def exponent_counts(w: Tensor) -> Int64[Tensor, " 256"]:
    """How many weights have each biased exponent."""
    pairs = torch.zeros(1 << 16, dtype=torch.int64, device=w.device)
    odd = torch.zeros(256, dtype=torch.int64, device=w.device)
    for _, bits in blocks(w):
        exponents = exponents_of(bits).flatten()
        if len(exponents) % 2:
            odd[int(exponents[-1])] += 1
            exponents = exponents[:-1]
        two = exponents.view(torch.int16)  # one increment for two weights
        if len(two) and int(two.min()) < 0:  # an exponent above 127; bincount wants them non-negative
            two = two.to(torch.int32) & 0xFFFF
        pairs += torch.bincount(two, minlength=1 << 16)
    table = pairs.view(256, 256)
    return table.sum(0) + table.sum(1) + odd


def exception_counts(w: Tensor, bases: list[int]) -> dict[int, int]:
    """Exceptional groups under each base, exactly.

    A group inside the lowest and the highest window lies inside those between them as well, so only the
    others, which are few when the bases are good, are looked at base by base.
    """
    low, high = min(bases), max(bases)
    counts = dict.fromkeys(bases, 0)
    for _, bits in blocks(w, fill_like_last=True):
        exponents = exponents_of(bits)
        top, bottom = words_of(exponents - high), words_of(exponents - low)
        suspect = ((top | bottom) & _ABOVE_NIBBLE).ne(0) | top.eq(0)
        where = suspect.nonzero(as_tuple=True)
        groups = exponents.view(*suspect.shape, GROUP)[where]
        whole = (where[1] + 1) * GROUP <= w.shape[1]  # a padded group has nibbles 15, so it never collides
        for b in bases:
            word = words_of(groups - b)[:, 0]
            counts[b] += int(((word & _ABOVE_NIBBLE).ne(0) | (word.eq(0) & whole)).sum())
    return counts


def emit(w: Tensor, base: int) -> NF12Tensor:
    """The planes for a given window."""
    rows, columns = w.shape
    wide = padded(columns)
    sm = torch.empty(rows, wide, dtype=torch.uint8, device=w.device)
    ex = torch.empty(rows, wide // GROUP, dtype=torch.int32, device=w.device)
    slots = sm.view(rows, wide // GROUP, GROUP).view(torch.int64)[..., 0]  # (N, K_pad/8), one word a group
    verbatim: list[Tensor] = []
    found = 0
    for start, bits in blocks(w, fill=(base + WINDOW - 1) << 7):  # pads: sign and mantissa 0, nibble 15
        stop = start + len(bits)
        nibbles = words_of(exponents_of(bits) - base)
        exception = (nibbles & _ABOVE_NIBBLE).ne_(0).logical_or_(nibbles.eq(0))
        sm[start:stop] = (bits >> 8).bitwise_and_(0x80).bitwise_or_(bits & 0x7F)
        ex[start:stop] = split16(nibbles)
        row, group = exception.nonzero(as_tuple=True)
        if len(row):
            kept = bits.view(len(bits), -1, GROUP)[row, group]
            kept[group == columns // GROUP, columns % GROUP :] = 0  # pads of a verbatim group are 0
            ex[start:stop][row, group] = 0
            slots[start:stop][row, group] = torch.arange(found, found + len(row), device=w.device)
            verbatim.append(kept)
            found += len(row)
    esc = torch.cat(verbatim) if verbatim else torch.empty(0, GROUP, dtype=torch.int16, device=w.device)
    return NF12Tensor(sm, ex, esc.view(torch.bfloat16), base, (rows, columns))


def split16(nibbles: Int64[Tensor, "rows groups"]) -> Int64[Tensor, "rows groups"]:
    """Eight nibbles in the bytes of a word -> column 2j at bits 4j, column 2j + 1 at bits 16 + 4j (low 32 bits).

    Bytes of the word from the lowest, step by step:  0 1 2 3 4 5 6 7  ->  02 13 .. .. 46 57 .. ..  ->
    02 .. 13 .. 46 .. 57 ..  ->  0246 1357 as two half-words.
    """
    x = (nibbles >> 12).bitwise_or_(nibbles).bitwise_and_(0x0000FFFF0000FFFF)
    x = (x & 0x0000FF000000FF00).bitwise_left_shift_(8).bitwise_or_(x & 0x000000FF000000FF)
    return (x >> 24).bitwise_or_(x)


def blocks(
    w: Tensor, *, fill: int | None = None, fill_like_last: bool = False
) -> Iterator[tuple[int, Int16[Tensor, "rows columns"]]]:
    """(first row, bit patterns of some rows), contiguous; filled up to whole groups if a filling is named.

    Args:
        w: a matrix that passed :func:`check_matrix`.
        fill: bit pattern of the pads.
        fill_like_last: fill with each row's last column, which leaves the range of a group as it is.
    """
    rows, columns = w.shape
    filled = fill is not None or fill_like_last
    height = max(1, BLOCK // max(1, columns))
    for start in range(0, rows if columns else 0, height):
        bits = _patterns(w[start : start + height])
        if filled and columns % GROUP:
            whole = bits.new_empty(len(bits), padded(columns))
            whole[:, :columns] = bits
            whole[:, columns:] = bits[:, -1:] if fill is None else fill
            bits = whole
        yield start, bits


def exponents_of(bits: Int16[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Biased exponents. The shift copies the sign into the upper byte, which the conversion drops."""
    return (bits >> 7).to(torch.uint8)


def words_of(exponents: UInt8[Tensor, "rows columns"]) -> Int64[Tensor, "rows groups"]:
    """The eight bytes of each group as one integer."""
    return exponents.view(torch.int64)


def holds_bf16(w: Float[Tensor, "rows columns"]) -> bool:
    """Whether every value of a float32 matrix is a bfloat16."""
    height = max(1, BLOCK // max(1, w.shape[1]))
    parts = (w[k : k + height].detach().contiguous().view(torch.int32) for k in range(0, len(w), height))
    return not any(bool((part & LOST).any()) for part in parts)


def _patterns(rows: Tensor) -> Int16[Tensor, "rows columns"]:
    """Bit patterns of BF16 values, contiguous; of FP32 values their upper half."""
    if rows.dtype == torch.bfloat16:
        return rows.detach().contiguous().view(torch.int16)
    wide = rows.detach().contiguous().view(torch.int32)
    if bool((lost := wide & LOST).any()):
        value = float(rows.flatten()[lost.flatten().nonzero()[0, 0]])
        raise UsageError(
            f"A float32 weight is {value!r}, which no bfloat16 equals (its low 16 bits are not zero), so it "
            "can't be stored without loss. If rounding is acceptable, pass w.to(torch.bfloat16)."
        )
    return (wide >> 16).to(torch.int16)


def check_matrix(w: Tensor) -> None:
    """Refuse what has no BF16 bit patterns to store.

    Raises:
        UsageError: see :func:`encode`.
    """
    if w.is_quantized or w.layout != torch.strided:
        kind = "quantized" if w.is_quantized else str(w.layout).removeprefix("torch.")
        raise UsageError(
            f"The weight is {kind}; NF12 stores dense bfloat16 matrices. Convert it first "
            f"({'w.dequantize()' if w.is_quantized else 'w.to_dense()'})."
        )
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise UsageError(
            f"The weight is {str(w.dtype).removeprefix('torch.')}; NF12 stores bfloat16 bit patterns (or float32 "
            "whose values are all bfloat16). If rounding is acceptable, pass w.to(torch.bfloat16)."
        )
    if w.ndim != 2:
        raise UsageError(
            f"The weight has shape {tuple(w.shape)}; NF12 stores matrices (2 axes). Keep vectors as they are, "
            "and flatten other tensors to (rows, columns) first."
        )
    if w.is_meta:
        raise UsageError("The weight is on the meta device and has no values. Load the model first.")
    if max(w.shape[0], padded(w.shape[1])) >= INDEX_LIMIT or w.numel() // GROUP >= INDEX_LIMIT:
        raise UsageError(
            f"The weight has shape {tuple(w.shape)}; sides and groups of 8 must stay below 2^31. Split it by rows."
        )


def _checked_base(base: int | str) -> int:
    if isinstance(base, bool) or not isinstance(base, int) or base not in BASES:
        raise UsageError(
            f"base={base!r} must be an integer from {BASES.start} to {BASES.stop - 1}, so that every weight in "
            "the window [base, base + 15] is a normal number, or 'auto'."
        )
    return base
