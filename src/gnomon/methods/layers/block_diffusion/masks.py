"""Who sees whom: the mask of training over [noisy; clean], and the block-causal one of a prefix.

Shapes: L tokens of a sequence, B of a block, nb = L / B blocks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gnomon.core.errors import UsageError


def require_blocks(length: int, block_size: int) -> None:
    """Refuse lengths that aren't whole blocks.

    Raises:
        UsageError: with the next lengths that are.
    """
    if block_size < 1 or length < 1 or length % block_size:
        below = length // block_size * block_size if block_size >= 1 else 0
        raise UsageError(
            f"{length} tokens aren't whole blocks of {block_size}, so the mask would be wrong. Cut them to {below}, or "
            f"pad them to {below + block_size}."
        )


def block_diff_mask(
    L: int, B: int, device: torch.device | str | None = None
) -> Bool[Tensor, "twice_L twice_L"]:
    """True where query i of [x_t; x_0] may see key j.

    A noisy token sees its own noisy block and the clean blocks before it; a clean token sees clean blocks up to its
    own.

    Raises:
        UsageError: L isn't a multiple of B.

    >>> block_diff_mask(4, 2).int().tolist()[2], int(block_diff_mask(4, 2).sum())
    ([0, 0, 1, 1, 1, 1, 0, 0], 24)
    """
    require_blocks(L, B)
    block = torch.arange(L, device=device) // B
    own = block[:, None] == block[None]
    before = block[:, None] > block[None]
    noisy = torch.cat([own, before], 1)
    clean = torch.cat([torch.zeros_like(own), own | before], 1)
    return torch.cat([noisy, clean])


def block_causal_mask(
    queries: int, B: int, *, past: int = 0, device: torch.device | str | None = None
) -> Bool[Tensor, "Q K"]:
    """Block-causal mask of `queries` tokens after `past` cached ones; both are whole blocks.

    Raises:
        UsageError: they aren't.
    """
    require_blocks(queries, B)
    if past:
        require_blocks(past, B)
    block = torch.arange(past + queries, device=device) // B
    return block[past:, None] >= block[None]


def sources(L: int, B: int, *, shift: bool, device: torch.device | None = None) -> Int[Tensor, " L"]:
    """Place in [x_t; x_0] of the hidden state that predicts token i: i itself, or with token shift i − 1.

    The first token of a block is then read off the clean half, where its predecessor's block is whole; in decoding
    that is the commit pass. Token 0 has no predecessor; its entry means nothing.
    """
    at = torch.arange(L, device=device)
    if not shift:
        return at
    return torch.where(at % B == 0, L + at - 1, at - 1).clamp(min=0)
