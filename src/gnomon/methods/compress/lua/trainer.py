"""Training thresholds with Transformers' Trainer: what to log and what to keep.

`Trainer(model=alloc, ...)` is enough to train; `LuaTrainer` installs the masks and logs the sparsity as it goes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from transformers import Trainer, TrainerCallback

from gnomon.core.errors import MissingExtra, UsageError

from .allocator import LuaAllocator


def progress(alloc: LuaAllocator) -> dict[str, float]:
    """`sparsity`, what the thresholds give as they stand, and `penalty`, for a log."""
    return {
        "sparsity": alloc.sparsity_report().sparsity,
        "penalty": float(alloc.penalty().detach()),
    }


class LuaCallback(TrainerCallback):  # type: ignore[misc]
    """Adds :func:`progress` to what a Trainer prints; for `Trainer(model=alloc, callbacks=[LuaCallback(alloc)])`."""

    def __init__(self, alloc: LuaAllocator) -> None:
        self.alloc = alloc

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any
    ) -> None:
        """Called by the Trainer; `logs` is what it is about to write."""
        if logs is not None and self.alloc.installed:
            logs.update(progress(self.alloc))


class LuaTrainer(Trainer):  # type: ignore[misc]
    """A Trainer of thresholds: `LuaTrainer(alloc, args, train_dataset=...)`.

    Checkpoints hold the thresholds alone. After training call `alloc.apply()`, then `model.save_pretrained(folder)`
    writes an ordinary dense checkpoint. For the card's settings: `TrainingArguments(learning_rate=5e-3, max_steps=500,
    lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0)`.
    """

    def __init__(self, alloc: LuaAllocator, *args: Any, **settings: Any) -> None:
        if not isinstance(alloc, LuaAllocator):
            raise UsageError(
                f"LuaTrainer trains the thresholds of a LuaAllocator, but got a {type(alloc).__name__}. Pass the "
                "allocator, which holds the model."
            )
        if find_spec("accelerate") is None:  # Trainer says so only when half of it is built
            raise MissingExtra("accelerate", "train", "Training with Transformers' Trainer")
        self.alloc = alloc.parametrize()
        super().__init__(alloc, *args, **settings)

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Log with :func:`progress`."""
        super().log({**logs, **(progress(self.alloc) if self.alloc.installed else {})}, *args, **settings)
