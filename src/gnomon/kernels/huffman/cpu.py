"""Huffman-coded BF16 through the compiled library: as many threads as torch has.

Format: `reference.py`. What the C++ does beyond it: `huffman.cpp`.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from gnomon.core.errors import GnomonError, UsageError
from gnomon.kernels import native
from gnomon.kernels.huffman import reference
from gnomon.kernels.huffman.reference import CHUNK, PADDING, Coded
from gnomon.kernels.native import pointer

_REASONS = {1: reference.BAD_CODE, 2: reference.BAD_STARTS, 3: reference.BAD_STREAM}


def why_not() -> str | None:
    """Why the compiled codec can't run here, or None if it can."""
    return native.problem() or None


def encode(weight: BFloat16[Tensor, "..."]) -> Coded:
    """Code a tensor of any shape; equal to the reference's, byte for byte.

    Raises:
        UsageError: it is not bfloat16.
        GnomonError: there is no compiled library.
    """
    library = _library()
    flat = torch.from_numpy(reference.bits_of(weight))
    n, threads = flat.numel(), torch.get_num_threads()
    counts = torch.empty(256, dtype=torch.int64)
    library.gnomon_huffman_count(pointer(flat), c_int64(n), pointer(counts))
    lengths = reference.code_lengths(counts)
    starts = torch.empty(-(-n // CHUNK) + 1, dtype=torch.int64)
    library.gnomon_huffman_starts(pointer(flat), c_int64(n), pointer(lengths), pointer(starts), threads)
    sm = torch.empty(n, dtype=torch.uint8)
    stream = torch.empty(int(starts[-1]) + PADDING, dtype=torch.uint8)
    library.gnomon_huffman_encode(
        pointer(flat), c_int64(n), pointer(lengths), pointer(starts), pointer(sm), pointer(stream), threads
    )
    return Coded(sm=sm, lengths=lengths, starts=starts, stream=stream, shape=tuple(weight.shape))


def decode(coded: Coded, out: BFloat16[Tensor, "..."] | None = None) -> BFloat16[Tensor, "..."]:
    """The tensor, bit for bit, into `out` if given (contiguous, on the CPU).

    Raises:
        UsageError: `out` is not such a tensor.
        GnomonError: the parts don't belong together, or there is no compiled library. A stream with wrong bits
            may also decode to wrong exponents; nothing outside it is read.
    """
    library = _library()
    reference.check(coded)
    if out is None:
        out = torch.empty(coded.shape, dtype=torch.bfloat16)
    elif (
        out.shape != coded.shape
        or out.dtype != torch.bfloat16
        or out.device.type != "cpu"
        or not out.is_contiguous()
    ):
        raise UsageError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device} (contiguous: {out.is_contiguous()}), but the "
            f"decoded tensor is bfloat16 {coded.shape} on cpu."
        )
    status = library.gnomon_huffman_decode(
        pointer(coded.sm),
        c_int64(coded.sm.numel()),
        pointer(coded.lengths),
        pointer(coded.starts),
        pointer(coded.stream),
        c_int64(coded.stream.numel()),
        pointer(out),
        torch.get_num_threads(),
    )
    if status:
        raise reference.corrupt(coded, _REASONS[status])
    return out


def _library() -> Any:
    if reason := native.problem():
        raise GnomonError(
            f"The compiled Huffman codec can't run here: {reason}. The reference runs anywhere."
        )
    return native.library()
