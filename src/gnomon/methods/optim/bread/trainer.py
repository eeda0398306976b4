"""BREAD in Transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .optimizer import BlockOptimizer


class BlockCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the optimizer how many batches make a step, and leaves a plain model when training ends.

    >>> Trainer(model, args, optimizers=(optimizer, None), callbacks=[BlockCallback(optimizer)])  # doctest: +SKIP

    A checkpoint in the middle of training holds the adapters beside the weights, and the Trainer resumes from it. After
    training the adapters are merged (the best model's, with `load_best_model_at_end`), so `save_model` writes a plain
    model.
    """

    def __init__(self, optimizer: BlockOptimizer) -> None:
        self.optimizer = optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.optimizer.on_the_fly is not None:
            self.optimizer.on_the_fly.batches = args.gradient_accumulation_steps

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.optimizer.close()
