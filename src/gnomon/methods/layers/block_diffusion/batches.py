"""Noised batches: a collator for Transformers' Trainer, a source for `core.train`, and the loss that reads both.

A batch holds `input_ids`, `noisy_ids`, `weights` and `loss_mask`, each (R, L), and may hold `position_ids`. Noise is
drawn where batches are made, so that a run that goes on from a checkpoint sees the noise it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from gnomon.core.errors import UsageError

from .config import BlockDiffusionConfig
from .loss import DiffusionTerms, denoiser_logits, noise, weighted_terms

IGNORED = -100
"""Label of tokens without a loss."""


def noised_batch(
    input_ids: Int[Tensor, "R L"],
    cfg: BlockDiffusionConfig,
    generator: torch.Generator | None,
    loss_mask: Bool[Tensor, "R L"] | None = None,
) -> dict[str, Tensor]:
    """A batch of these tokens with noise drawn."""
    drawn = noise(input_ids, cfg, generator, loss_mask=loss_mask)
    counted = torch.ones_like(drawn.masked) if loss_mask is None else loss_mask
    return {
        "input_ids": input_ids,
        "noisy_ids": drawn.noisy_ids,
        "weights": drawn.weights,
        "loss_mask": counted,
    }


class DiffusionLoss:
    """`loss_fn` of `core.train.train`, and of any loop that has such batches."""

    def __init__(self, cfg: BlockDiffusionConfig) -> None:
        self.cfg = cfg

    def terms(self, model: nn.Module, batch: Mapping[str, Tensor]) -> DiffusionTerms:
        """The loss and the unweighted loss of masked tokens."""
        at = batch.get("position_ids")
        logits = denoiser_logits(model, batch["noisy_ids"], batch["input_ids"], self.cfg, at)
        return weighted_terms(logits, batch["input_ids"], batch["weights"], batch["loss_mask"].bool())

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.terms(model, batch).loss


class TokenSource(Protocol):
    """Endless batches (R, L) that know their position, such as `core.data.Batches`."""

    def __next__(self) -> Tensor: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoisyBatches:
    """A source of noised batches; its state is that of the tokens and of the noise."""

    def __init__(self, source: TokenSource, cfg: BlockDiffusionConfig, *, generator: torch.Generator) -> None:
        self.source, self.cfg, self.generator = source, cfg, generator

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        return noised_batch(next(self.source), self.cfg, self.generator)

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on from here."""
        return {"source": self.source.state_dict(), "noise": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.generator.set_state(state["noise"])


class BlockDiffusionCollator:
    """Turns `{"input_ids": […]}` into a noised batch of whole blocks.

    An item may bring `loss_mask` (1 where a token may be masked and has a loss) or `labels` (-100 where not); a prompt
    is left out so. Rows are filled up on the right with `pad_token_id`, best the end-of-text token: up to the end of
    their last block pads have a loss (so the model learns to end a block), whole blocks of pads have none, and no real
    token sees those.
    """

    def __init__(
        self,
        cfg: BlockDiffusionConfig,
        *,
        pad_token_id: int,
        generator: torch.Generator | None = None,
        max_length: int | None = None,
    ) -> None:
        """
        Args:
            generator: draws the noise; None takes the ambient random state, which a Trainer seeds.
            max_length: longer items are refused, since cutting would cut a response.
        """
        if pad_token_id == cfg.mask_token_id:
            raise UsageError(
                f"pad_token_id={pad_token_id} is the mask token. Pad with the end-of-text token."
            )
        self.cfg, self.pad, self.generator, self.max_length = cfg, pad_token_id, generator, max_length

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Batch of the items; L is the longest row's length in whole blocks.

        Raises:
            UsageError: no item; one that is empty or too long; masks of another length than the tokens.
        """
        if not items:
            raise UsageError("A batch needs an item or more.")
        rows = [torch.as_tensor(item["input_ids"], dtype=torch.long) for item in items]
        size = self.cfg.block_size
        for i, row in enumerate(rows):
            if row.ndim != 1 or not len(row):
                raise UsageError(
                    f"Item {i} has input_ids of shape {list(row.shape)}; give one token or more."
                )
            if self.max_length is not None and len(row) > self.max_length:
                raise UsageError(f"Item {i} has {len(row)} tokens, above max_length={self.max_length}.")
        length = max(-(-len(row) // size) * size for row in rows)
        ids = torch.full((len(rows), length), self.pad)
        counted = torch.zeros(len(rows), length, dtype=torch.bool)
        for i, (row, item) in enumerate(zip(rows, items, strict=True)):
            ids[i, : len(row)] = row
            counted[i, : -(-len(row) // size) * size] = True
            counted[i, : len(row)] = self._own(i, item, len(row))
        return noised_batch(ids, self.cfg, self.generator, counted)

    def _own(self, i: int, item: Mapping[str, Any], length: int) -> Bool[Tensor, " n"]:
        if item.get("loss_mask") is not None:
            own = torch.as_tensor(item["loss_mask"]) != 0
        elif item.get("labels") is not None:
            own = torch.as_tensor(item["labels"]) != IGNORED
        else:
            return torch.ones(length, dtype=torch.bool)
        if own.shape != (length,):
            raise UsageError(f"Item {i} has {length} tokens, but loss_mask or labels of {list(own.shape)}.")
        return own
