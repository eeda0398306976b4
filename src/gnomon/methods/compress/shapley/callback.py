"""Targeted fine-tuning in the Hugging Face Trainer: `Trainer(…, callbacks=[MaskedFineTuning(masks)])`."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback

from .finetune import MaskedTraining
from .scores import UnitMasks


class MaskedFineTuning(TrainerCallback):  # type: ignore[misc]
    """Trains the chosen units and freezes everything else; see :class:`MaskedTraining`.

    The model is masked as soon as the Trainer is made, before it builds its optimizer and wraps the model, so only
    what trains gets optimizer state. When training ends all hooks are gone and `requires_grad` is as before.
    In a loop of your own: `with MaskedFineTuning(masks).attach(model, optimizer): …`.

    Args:
        masks: True = trained.
        freeze: "all", or "released" for what the paper's code freezes.
    """

    def __init__(self, masks: UnitMasks, *, freeze: Literal["all", "released"] = "all") -> None:
        self.masks = masks
        self.freeze: Literal["all", "released"] = freeze
        self.training: MaskedTraining | None = None

    def attach(self, model: nn.Module, optimizer: Any = None) -> MaskedTraining:
        """Mask a model, and an optimizer's steps if there is one already; a context manager that ends it."""
        if self.training is None:
            self.training = MaskedTraining(model, self.masks, freeze=self.freeze)
        if optimizer is not None:
            self.training.watch(optimizer)
        return self.training

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if kwargs.get("model") is not None:
            self.attach(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attach(kwargs["model"], kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training is not None:
            self.training.release()
            self.training = None
