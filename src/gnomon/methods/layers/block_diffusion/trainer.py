"""Transformers' Trainer with the block-diffusion loss."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from gnomon.core.errors import MissingExtra, UsageError

from .batches import BlockDiffusionCollator, DiffusionLoss
from .config import BlockDiffusionConfig
from .fit import declare


class BlockDiffusionTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose items are `{"input_ids": […]}`, with `loss_mask` or `labels` if not all tokens have a loss.

    The model is declared a block-diffusion model, so checkpoints say so. Use `remove_unused_columns=False` where items
    bring a `loss_mask`, or the Trainer drops it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        *,
        cfg: BlockDiffusionConfig,
        data_collator: BlockDiffusionCollator | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            data_collator: one for `cfg`; made with `pad_token_id` by default.

        Raises:
            UsageError: a model that can't be one, neither collator nor pad token, a collator of other settings.
            MissingExtra: Accelerate isn't installed.
        """
        if find_spec("accelerate") is None:
            raise MissingExtra("accelerate", "train", "BlockDiffusionTrainer")
        if data_collator is None:
            if pad_token_id is None:
                raise UsageError("Give pad_token_id (best the end-of-text token), or a data_collator.")
            data_collator = BlockDiffusionCollator(cfg, pad_token_id=pad_token_id)
        if data_collator.cfg != cfg:
            raise UsageError("The data_collator was made for another BlockDiffusionConfig than cfg.")
        declare(model, cfg)
        super().__init__(model, args, data_collator=data_collator, **options)
        self.diffusion_loss = DiffusionLoss(cfg)
        self.model_accepts_loss_kwargs = False  # a mean for each batch: the Trainer divides by their number

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        loss = self.diffusion_loss(model, inputs)
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[Tensor, None, None]:
        """The loss alone: logits of a masked block aren't a model's answer."""
        with torch.no_grad():
            return self.diffusion_loss(model, self._prepare_inputs(inputs)).detach(), None, None
