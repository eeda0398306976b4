"""A plain NF12 encoder for tests of kernels: column by column as the card has it, sharing no code with Gnomon's."""

from __future__ import annotations

import numpy as np
import torch


def encode(weight: torch.Tensor, base: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sm, ex, esc) of a BF16 matrix with this base."""
    bits = weight.view(torch.int16).numpy().view(np.uint16).astype(np.int64)
    n, k = bits.shape
    pad = (base + 15) << 7
    bits = np.pad(bits, ((0, 0), (0, -k % 8)), constant_values=pad)
    bits = bits.reshape(n, bits.shape[1] // 8, 8)
    nibbles = (bits >> 7 & 0xFF) - base
    exception = ((nibbles < 0) | (nibbles > 15)).any(2) | (nibbles == 0).all(2)
    sm = (bits >> 8 & 0x80) | (bits & 0x7F)
    ex = sum((nibbles[:, :, i] & 15) << (4 * (i // 2) + 16 * (i % 2)) for i in range(8))
    index = np.cumsum(exception).reshape(exception.shape) - 1
    slot = np.stack([index >> 8 * i & 0xFF for i in range(4)] + [0 * index] * 4, axis=-1)
    sm, ex = np.where(exception[:, :, None], slot, sm), np.where(exception, 0, ex)
    return (
        torch.from_numpy(sm.reshape(n, sm.shape[1] * 8).astype(np.uint8)),
        torch.from_numpy(ex.astype(np.uint32).view(np.int32)),
        torch.from_numpy(bits[exception].astype(np.uint16).view(np.int16)).view(torch.bfloat16),
    )


def patterns(order: str = "numeric") -> torch.Tensor:
    """All 65,536 BF16 patterns as a (256, 256) matrix."""
    every = np.arange(65536)
    if order == "permuted":
        every = np.random.default_rng(0).permutation(every)
    if order == "repeated":  # each pattern eight times over: groups of one exponent
        every = np.repeat(every, 8)
    return torch.from_numpy(every.astype(np.uint16).view(np.int16).reshape(256, -1)).view(torch.bfloat16)


def gaussian(n: int, k: int, sigma: float = 0.02, seed: int = 0) -> torch.Tensor:
    """Weights as a trained matrix has them."""
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * sigma).bfloat16()
