"""Huffman-coded BF16 in NumPy: the format, and what the compiled codec has to equal, bit for bit.

A BF16 weight is 8 raw bits and an exponent of about 2.6 bits of information. As in DFloat11 the sign and mantissa
stay a byte, and the exponents of one tensor share one Huffman code:

    sm       uint8 (n)           sign << 7 | mantissa of each weight
    lengths  uint8 (256)         bits of each exponent's code, 0 = doesn't occur, at most 11
    stream   uint8               the codes, chunk after chunk of 4,096 weights, each chunk from a whole byte on,
                                 then 16 zero bytes; a code's first bit is the lowest free bit of its byte
    starts   int64 (chunks + 1)  first byte of each chunk and of the zeros: chunks decode in parallel

The code is canonical (shorter codes first, then smaller exponents; counting upwards), so its lengths define it.
The limit of 11 bits lets one small table resolve any code; on Gaussian weights it costs 0.005 bits a weight.

Source: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression via Dynamic-Length Float" (DFloat11),
for the split; lengths by package-merge (Larmore and Hirschberg 1990). The layout is this project's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import BFloat16, Int64, UInt8
from torch import Tensor

from gnomon.core.errors import GnomonError, UsageError

LONGEST = 11
"""Bits of the longest code."""

CHUNK = 4096
"""Weights that can be decoded on their own."""

PADDING = 16
"""Zero bytes after the last chunk: a decoder reads whole words ahead of what it needs."""

BAD_CODE = "its code lengths are not those of a complete code of at most 11 bits"
BAD_STARTS = "the starts of its chunks don't rise from 0 to the end of its stream"
BAD_STREAM = "its stream ends inside a chunk"


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A BF16 tensor as sign and mantissa bytes and a Huffman code of its exponents (see the module)."""

    sm: UInt8[Tensor, " n"]
    lengths: UInt8[Tensor, " 256"]
    starts: Int64[Tensor, " chunks_and_end"]
    stream: UInt8[Tensor, " bytes"]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in (self.sm, self.lengths, self.starts, self.stream))


def code_lengths(counts: Int64[Tensor, " 256"]) -> UInt8[Tensor, " 256"]:
    """Lengths of the best prefix code of at most 11 bits for symbols that occur this often (package-merge).

    Each symbol is a coin of value 2^-1 ... 2^-11 that costs its count; the cheapest coins of total value
    (symbols - 1) are wanted, and a symbol's length is the number of its coins. Packages of two coins of one value
    compete with the coins of the next.
    """
    coins = sorted((count, (symbol,)) for symbol, count in enumerate(counts.tolist()) if count)
    lengths = np.zeros(256, dtype=np.uint8)
    if len(coins) == 1:
        lengths[coins[0][1][0]] = 1
    elif coins:
        row: list[tuple[int, tuple[int, ...]]] = []
        for _ in range(LONGEST):
            packages = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(row[::2], row[1::2], strict=False)]
            row = sorted(coins + packages, key=lambda item: item[0])
        for _, symbols in row[: 2 * len(coins) - 2]:
            np.add.at(lengths, list(symbols), 1)
    return torch.from_numpy(lengths)


def encode(weight: BFloat16[Tensor, "..."]) -> Coded:
    """Code a tensor of any shape.

    Raises:
        UsageError: it is not bfloat16.
    """
    flat = bits_of(weight)
    exponents = flat >> 7 & 0xFF
    lengths = code_lengths(torch.from_numpy(np.bincount(exponents, minlength=256)))
    codes, size = _canonical(lengths.numpy()), lengths.numpy().astype(np.int64)
    place = np.arange(LONGEST)
    streams = []
    for start in range(0, len(flat), CHUNK):
        e = exponents[start : start + CHUNK]
        bits = codes[e][:, None] >> (size[e][:, None] - 1 - place).clip(0) & 1  # each code's first bit first
        streams.append(np.packbits(bits[place < size[e][:, None]].astype(np.uint8), bitorder="little"))
    starts = np.cumsum([0] + [len(s) for s in streams])
    return Coded(
        sm=torch.from_numpy((flat >> 8 & 0x80 | flat & 0x7F).astype(np.uint8)),
        lengths=lengths,
        starts=torch.from_numpy(starts),
        stream=torch.from_numpy(np.concatenate([*streams, np.zeros(PADDING, np.uint8)])),
        shape=tuple(weight.shape),
    )


def decode(coded: Coded) -> BFloat16[Tensor, "..."]:
    """The tensor, bit for bit.

    Raises:
        GnomonError: the parts don't belong together, or the stream can't be one of this code.
    """
    check(coded)
    lengths, starts, stream = coded.lengths.numpy(), coded.starts.numpy(), coded.stream.numpy()
    if coded.sm.numel() and not _complete(lengths):
        raise corrupt(coded, BAD_CODE)
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] + PADDING != len(stream):
        raise corrupt(coded, BAD_STARTS)
    codes = _canonical(lengths)
    symbols = {(int(lengths[s]), int(codes[s])): int(s) for s in lengths.nonzero()[0]}
    exponents: list[int] = []
    for chunk, start in enumerate(starts[:-1]):
        bits = iter(np.unpackbits(stream[start : starts[chunk + 1]], bitorder="little").tolist())
        for _ in range(min(CHUNK, coded.sm.numel() - chunk * CHUNK)):
            length, code = 0, 0
            while (length, code) not in symbols:
                if (bit := next(bits, None)) is None or length == LONGEST:
                    raise corrupt(coded, BAD_STREAM)
                length, code = length + 1, code << 1 | bit
            exponents.append(symbols[length, code])
    sm = coded.sm.numpy().astype(np.uint16)
    flat = (sm & 0x80) << 8 | np.array(exponents, dtype=np.uint16) << 7 | sm & 0x7F
    return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).view(coded.shape)


def bits_of(weight: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The tensor's patterns, flat, never through floats (which would quiet NaNs).

    Raises:
        UsageError: it is not bfloat16.
    """
    if weight.dtype != torch.bfloat16:
        raise UsageError(f"The weight is {weight.dtype}, and this code is for bfloat16. Convert it first.")
    flat = weight.detach().cpu().contiguous().view(torch.int16).flatten()
    return flat.numpy().view(np.uint16)


def check(coded: Coded) -> None:
    """Sizes of the parts, before anything is read through them.

    Raises:
        GnomonError: they don't belong together.
    """
    n = math.prod(coded.shape)
    wanted = {
        "sm": (coded.sm, torch.uint8, n),
        "lengths": (coded.lengths, torch.uint8, 256),
        "starts": (coded.starts, torch.int64, math.ceil(n / CHUNK) + 1),
        "stream": (coded.stream, torch.uint8, coded.stream.numel()),
    }
    for name, (part, dtype, size) in wanted.items():
        if (
            part.dtype != dtype
            or part.shape != (size,)
            or not part.is_contiguous()
            or part.device.type != "cpu"
        ):
            raise corrupt(
                coded,
                f"its part {name} is {part.dtype} {tuple(part.shape)} on {part.device}, not a contiguous {dtype} "
                f"({size},) on cpu",
            )


def corrupt(coded: Coded, reason: str) -> GnomonError:
    """The error for a tensor that can't be decoded."""
    return GnomonError(f"The Huffman-coded tensor {coded.shape} is corrupt: {reason}. Encode it again.")


def _canonical(
    lengths: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each symbol's code, first bit highest."""
    codes = np.zeros(256, dtype=np.int64)
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol in (lengths == length).nonzero()[0]:
            codes[symbol] = code
            code += 1
        code <<= 1
    return codes


def _complete(lengths: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """Whether every sequence of bits has a meaning, or there is a single code of one bit."""
    used = lengths[lengths > 0].astype(np.int64)
    if len(used) == 0 or used.max() > LONGEST:
        return False
    return bool((2 ** (LONGEST - used)).sum() == 2**LONGEST or used.tolist() == [1])
