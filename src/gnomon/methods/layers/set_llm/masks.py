r"""SetPE and SetMask: positions and visibility that don't depend on the order of a set's elements.

Both are functions of (which set, which element, offset in the element, total lengths) alone, so that exchanging whole
elements permutes rows and columns and nothing else: Z̃ = P Z Pᵀ, M̃ = P M Pᵀ, hence Ã = P A Pᵀ (theorem 1).

Shapes: B rows, N tokens of a prompt, R of a response, T = N + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gnomon.core.errors import UsageError, unknown

POSITIONS = ("set", "index", "none")


@dataclass(frozen=True)
class Rung:
    """One rung of the paper's ablation."""

    mask: Literal["causal", "prefix", "set"]
    positions: Literal["set", "index", "none"]

    @property
    def invariant(self) -> bool:
        """Whether the order of elements can't show. (A bag of words is blind to much more than that.)"""
        return self.mask != "causal" and self.positions != "index"


MODES = {
    "causal+pe": Rung("causal", "index"),
    "causal+nope": Rung("causal", "none"),
    "prefix+nope": Rung("prefix", "none"),
    "prefix+pe": Rung("prefix", "index"),
    "prefix+setpe": Rung("prefix", "set"),
    "setmask+setpe": Rung("set", "set"),
}
SET_LLM = "setmask+setpe"


def rung(mode: str) -> Rung:
    """The rung of this name.

    Raises:
        UsageError: there is none.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    return MODES[mode]


def set_positions(lengths: Sequence[Sequence[int]]) -> tuple[Int[Tensor, " N"], int]:
    """SetPE: elements of a set begin at the same position; after the set, numbering goes on at start + all its tokens.

    Args:
        lengths: tokens of every element, by part; a text is a part of one element.

    Returns:
        positions, and the one after the last.

    >>> set_positions([[3], [2, 3], [1]])[0].tolist()
    [0, 1, 2, 3, 4, 3, 4, 5, 8]
    """
    positions: list[int] = []
    start = 0
    for part in lengths:
        if not part or min(part) < 1:
            raise UsageError(
                f"A part with elements of {list(part)} tokens: sets and elements can't be empty."
            )
        for length in part:
            positions += range(start, start + length)
        start += sum(
            part
        )  # the sum, not the longest: or what follows would depend on how tokens are shared out
    return torch.tensor(positions, dtype=torch.long), start


def set_attention_mask(
    set_id: Int[Tensor, "..."],
    elem_id: Int[Tensor, "..."],
    n_response: int = 0,
    pad_mask: Bool[Tensor, "..."] | None = None,
    *,
    mask: str = "set",
) -> Bool[Tensor, "b 1 T T"]:
    """SetMask, True where a token may look: all of the prompt but the other elements of its own set.

    Response tokens see the prompt and the response up to themselves; the prompt doesn't see the response.

    Args:
        set_id, elem_id: (N,) or (B, N), of the prompt's tokens, as in :class:`SetEncoding`.
        n_response: R, tokens after the prompt.
        pad_mask: (T,) or (B, T), True at real tokens; rows of different lengths may be padded anywhere. Pads see
            themselves alone, since a row without a True is NaN after the softmax.
        mask: "prefix" lets the elements of a set see each other, "causal" is the ordinary mask.

    Raises:
        UsageError: shapes that don't fit, an unknown mask.
    """
    if mask not in ("causal", "prefix", "set"):
        raise unknown("mask", mask, ("causal", "prefix", "set"))
    if set_id.shape != elem_id.shape or set_id.ndim not in (1, 2) or n_response < 0:
        raise UsageError(
            f"set_id {list(set_id.shape)} and elem_id {list(elem_id.shape)} must both be (N,) or (B, N), and "
            f"n_response={n_response} at least 0."
        )
    sets, elements = (ids if ids.ndim == 2 else ids[None] for ids in (set_id, elem_id))
    prompt = sets.shape[1]
    length = prompt + n_response
    seen = torch.ones(len(sets), length, length, dtype=torch.bool, device=sets.device)
    if mask == "causal":
        seen = seen.tril()
    else:
        seen[:, :, prompt:] = seen[:, :, prompt:].tril(-prompt)
        if mask == "set":
            same_set = sets[:, :, None] == sets[:, None]
            same_element = elements[:, :, None] == elements[:, None]
            seen[:, :prompt, :prompt] = ~same_set | same_element
    if pad_mask is not None:
        real = pad_mask if pad_mask.ndim == 2 else pad_mask[None]
        if real.shape != (len(sets), length):
            raise UsageError(
                f"pad_mask is {list(pad_mask.shape)}, but there are {len(sets)} x {length} tokens."
            )
        real = real.bool()
        seen = seen & real[:, :, None] & real[:, None]
        seen |= torch.eye(length, dtype=torch.bool, device=sets.device) & ~real[:, :, None]
    return seen[:, None]
