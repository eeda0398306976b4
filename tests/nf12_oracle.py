"""NF12 planes-v1 in plain loops over Python integers, written from the card's text and nothing else.

Slow and obvious: the source of truth for the encoder, the kernels and files. Matrices are 2-D uint16 arrays of
bit patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

POSITION = {0: 0, 2: 4, 4: 8, 6: 12, 1: 16, 3: 20, 5: 24, 7: 28}
"""Column of a group -> lowest bit of its nibble: 4j for column 2j, 16 + 4j for column 2j + 1."""

Planes = tuple[np.ndarray, np.ndarray, np.ndarray]


def exponent(bits: int) -> int:
    return bits // 128 % 256


def groups_of(bits: np.ndarray) -> list[list[list[int]]]:
    """Rows of groups of real columns; the last group of a row may be shorter than 8."""
    return [[[int(v) for v in row[k : k + 8]] for k in range(0, len(row), 8)] for row in bits]


def is_exception(group: list[int], base: int) -> bool:
    if any(not base <= exponent(v) <= base + 15 for v in group):
        return True
    return len(group) == 8 and all(exponent(v) == base for v in group)


def search(bits: np.ndarray) -> int:
    """The window: 4 best by coverage, then fewest exceptional groups, both times the smallest base of equals."""
    exponents = [exponent(int(v)) for v in bits.flatten()]
    coverage = {b: sum(b <= e <= b + 15 for e in exponents) for b in range(1, 240)}
    best = sorted(coverage, key=lambda b: (-coverage[b], b))[:4]
    groups = [group for row in groups_of(bits) for group in row]
    return min(best, key=lambda b: (sum(is_exception(group, b) for group in groups), b))


def encode(bits: np.ndarray, base: int) -> Planes:
    """(sm, ex, esc) as uint8 (N, K_pad), uint32 (N, K_pad / 8), uint16 (E, 8)."""
    rows, columns = bits.shape
    count = (columns + 7) // 8
    sm, ex = np.zeros((rows, 8 * count), np.uint8), np.zeros((rows, count), np.uint32)
    esc: list[list[int]] = []
    for n, row in enumerate(groups_of(bits)):
        for g, group in enumerate(row):
            if is_exception(group, base):
                sm[n, 8 * g : 8 * g + 4] = list(len(esc).to_bytes(4, "little"))
                esc.append(group + [0] * (8 - len(group)))
                continue
            word = 0
            for column in range(8):
                nibble = 15
                if column < len(group):
                    sign, mantissa = group[column] // 32768, group[column] % 128
                    sm[n, 8 * g + column] = 128 * sign + mantissa
                    nibble = exponent(group[column]) - base
                word += nibble << POSITION[column]
            ex[n, g] = word
    return sm, ex, np.array(esc, np.uint16).reshape(-1, 8)


def decode(planes: Planes, base: int, columns: int) -> np.ndarray:
    sm, ex, esc = planes
    bits = np.zeros(sm.shape, np.uint16)
    for n in range(len(sm)):
        for g in range(ex.shape[1]):
            slot, word = [int(v) for v in sm[n, 8 * g : 8 * g + 8]], int(ex[n, g])
            for column in range(8):
                if word == 0:
                    bits[n, 8 * g + column] = esc[int.from_bytes(bytes(slot[:4]), "little")][column]
                else:
                    e = base + (word >> POSITION[column]) % 16
                    bits[n, 8 * g + column] = 32768 * (slot[column] // 128) + 128 * e + slot[column] % 128
    return bits[:, :columns]


def to_tensor(bits: np.ndarray) -> Tensor:
    """Patterns -> bfloat16, without any arithmetic."""
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16).copy()).view(torch.bfloat16)


def patterns(w: Tensor) -> np.ndarray:
    """bfloat16 -> patterns."""
    return w.contiguous().view(torch.int16).numpy().view(np.uint16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def gaussian(rows: int, columns: int, *, sigma: float = 0.02, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * sigma).to(torch.bfloat16)
