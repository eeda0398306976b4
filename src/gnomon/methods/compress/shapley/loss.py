"""The loss that is shared out: mean negative log-likelihood of each sequence's own tokens.

Here:  batches of any form to (losses, tokens), padding and prompt excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.scoring import token_nll

IGNORED = -100
"""Label of tokens that are read but not learnt, such as a prompt's."""


def sequence_nll(model: nn.Module, batch: Any) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Mean loss of each sequence over its loss tokens, nats, and how many these are.

    Args:
        batch: token ids (B, T), or a mapping with `input_ids` and perhaps `attention_mask` and `labels`, in which −100
            takes a token out of the loss.

    Raises:
        UsageError: a batch of another form, labels that are other tokens than the inputs.
    """
    ids, mask, labels = _fields(batch)
    nll = token_nll(model, ids, mask)  # (B, T - 1), 0 at padding
    counted = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if mask is not None:
        counted = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if labels is not None:
        wanted = labels[:, 1:] != IGNORED
        if bool((labels[:, 1:] != ids[:, 1:])[wanted & counted].any()):
            raise UsageError(
                "labels hold other tokens than input_ids, so this isn't the next-token loss. Pass loss_fn=."
            )
        counted = counted & wanted
    tokens = counted.sum(1).to(nll.dtype)
    return torch.where(counted, nll, 0.0).sum(1) / tokens.clamp(min=1), tokens


def _fields(batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    fields = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, mask, labels = (fields.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UsageError(
            f"A batch is {what}, but must be token ids (B, T) or a mapping that holds input_ids. For other data pass "
            "loss_fn=."
        )
    for name, other in (("attention_mask", mask), ("labels", labels)):
        if other is not None and (not isinstance(other, Tensor) or other.shape != ids.shape):
            found = list(other.shape) if isinstance(other, Tensor) else type(other).__name__
            raise UsageError(f"{name} is {found}, but input_ids are {list(ids.shape)}.")
    return ids, mask, labels


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device: tensors and mappings of them; other things as they are."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    return batch
