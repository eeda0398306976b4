"""POET in the Hugging Face Trainer: `Trainer(…, callbacks=[POETCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .apply import merge_poet, poet_layers
from .schedule import MergeSchedule


class POETCallback(TrainerCallback):  # type: ignore[misc]
    """Merges every `cfg.merge_interval` optimizer steps, clears the rotations' optimizer state, ramps the clipping.

    The model must be wrapped (:func:`apply_poet`) before the Trainer is made. Its own optimizer is fine, as is one
    over :func:`poet_param_groups`, which the rotations' own learning rate needs. Checkpoints hold the wrapped model
    and resume in the middle of an interval.

    Args:
        merge_at_end: put plain layers in their place when training ends, so that `save_model` writes a model that
            anyone can load.
    """

    def __init__(self, merge_at_end: bool = True) -> None:
        self.merge_at_end = merge_at_end
        self.schedule: MergeSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clip = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None
        self.schedule = MergeSchedule(kwargs["model"], kwargs["optimizer"], clip=clip)
        self.schedule.unhook()  # this class calls it, as the Trainer's events come

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.schedule is not None:
            scaler = getattr(kwargs.get("optimizer"), "scaler", None)
            self.schedule.before_step(finite=scaler is None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.schedule is not None and not getattr(kwargs.get("optimizer"), "step_was_skipped", False):
            self.schedule.after_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.schedule is not None:
            self.schedule.detach()
            self.schedule = None
        if self.merge_at_end and poet_layers(kwargs["model"]):
            merge_poet(kwargs["model"])
