"""How many bits BF16 weights hold: entropies of their patterns, Huffman lengths, the Gaussian closed form.

Everything comes from one table, how often each of the 65,536 patterns occurs.

Notation: n weights, e biased exponent, b the first exponent of a window of 16.
Source: the NF12 card, "Evaluation" and "Invariants" 3; Huffman as in DFloat11 (NeurIPS 2025): a code on the
exponents, sign and mantissa as they are.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from gnomon.core.errors import UsageError

from .encode import blocks, check_matrix
from .tensor import BLOCK, WINDOW, NF12Tensor

SIGN_AND_MANTISSA = 8  # bits that no code on exponents touches


@dataclass(frozen=True)
class Entropy:
    """Bits a weight, from counts."""

    plug_in: float
    """-sum p log2 p; biased low by about (distinct - 1) / (2 n ln 2)."""
    corrected: float
    """With that term added (Miller-Madow)."""

    @classmethod
    def of(cls, counts: Int64[Tensor, " values"]) -> Entropy:
        """From how often each value occurs. NaN where nothing was counted."""
        seen = counts[counts > 0].double()
        if not len(seen):
            return cls(math.nan, math.nan)
        n = float(seen.sum())
        p = seen / n
        plug_in = float(-(p * p.log2()).sum()) + 0.0  # no negative zero
        return cls(plug_in, plug_in + (len(seen) - 1) / (2 * n * math.log(2)))


@dataclass(frozen=True, eq=False)
class Patterns:
    """How often each BF16 bit pattern occurs in a matrix, or in several added together."""

    counts: Int64[Tensor, " 65536"]

    @classmethod
    def of(cls, w: Tensor | NF12Tensor) -> Patterns:
        """Count the patterns of a matrix (N, K), BF16 or FP32 with BF16 values, encoded or not.

        Raises:
            UsageError: as :func:`encode`.
        """
        if isinstance(w, NF12Tensor):
            rows, columns = w.shape
            height = max(1, BLOCK // max(1, columns))
            parts = [
                cls.of(w.rows(torch.arange(k, min(k + height, rows), device=w.device)))
                for k in range(0, rows, height)
            ]
            return sum(parts, cls(torch.zeros(1 << 16, dtype=torch.int64, device=w.device)))
        check_matrix(w)
        counts = torch.zeros(1 << 16, dtype=torch.int64, device=w.device)
        for _, bits in blocks(w):
            counts += torch.bincount(bits.flatten().to(torch.int32) & 0xFFFF, minlength=1 << 16)
        return cls(counts)

    def __add__(self, other: Patterns) -> Patterns:
        return Patterns(self.counts + other.counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def joint(self) -> Entropy:
        """Of whole patterns: what no lossless code of single weights can go below."""
        return Entropy.of(self.counts)

    @property
    def exponent(self) -> Entropy:
        return Entropy.of(self.exponents)

    @property
    def sign_mantissa(self) -> Entropy:
        """Of the byte without the exponent; 8 means that it can't be compressed."""
        return Entropy.of(self.counts.view(2, 256, 128).sum(1).flatten())

    @property
    def exponents(self) -> Int64[Tensor, " 256"]:
        """Weights of each biased exponent."""
        return self.counts.view(2, 256, 128).sum((0, 2))

    @property
    def huffman_bits(self) -> float:
        """Bits a weight of a Huffman code on exponents plus the 8 bits beside it, without any index."""
        counts: list[int] = self.exponents.tolist()
        coded = sum(count * length for count, length in zip(counts, huffman_lengths(counts), strict=True))
        return coded / max(1, self.total) + SIGN_AND_MANTISSA

    def in_window(self, base: int) -> float:
        """Share of weights with exponent in [base, base + 15]."""
        return int(self.exponents[base : base + WINDOW].sum()) / self.total if self.total else math.nan


def huffman_lengths(counts: list[int]) -> list[int]:
    """Code length of each symbol in an optimal prefix code; 0 for one that doesn't occur, 1 for a lone one."""
    lengths = [0] * len(counts)
    heap = [(count, symbol, [symbol]) for symbol, count in enumerate(counts) if count]
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        merged = one[2] + other[2]
        for symbol in merged:
            lengths[symbol] += 1
        heapq.heappush(heap, (one[0] + other[0], min(one[1], other[1]), merged))
    return lengths


def gaussian_in_window(sigma: float, base: int) -> float:
    """Share of N(0, sigma^2) with exponent in [b, b + 15], that is |w| in [2^(b-127), 2^(b-111)).

    Rounding to BF16 moves a weight across the border only next to it, which is left out here.

    Raises:
        UsageError: unless sigma is positive and finite.
    """
    if not 0 < sigma < math.inf:
        raise UsageError(f"sigma={sigma} must be a positive, finite standard deviation.")
    spread = sigma * math.sqrt(2)
    return math.erf(2.0 ** (base - 127 + WINDOW) / spread) - math.erf(2.0 ** (base - 127) / spread)


def gaussian_exceptions(sigma: float, base: int, group: int = 8) -> float:
    """Share of groups with a weight outside the window: 1 - p^8 (collisions, about 1e-30, left out)."""
    return -math.expm1(group * math.log(gaussian_in_window(sigma, base)))
