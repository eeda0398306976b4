"""Recovering what a conversion lost: align, train W_Q and W_K alone, then everything, against the original model.

    align    shared keys from calibration text (`convert`); without this stage heads are merged by their mean
    local    W_Q and W_K only, on the Kullback-Leibler divergence from the original's next-token distribution, or on
             the squared distance of the hidden states after each layer, in units of the original's
    distill  all weights, on a mix of that divergence and the ordinary loss

Stages are the card's (inferred); the work is the Hugging Face Trainer's, with all its arguments. Gradients flow
through dense attention, unless the model's `sparse_prefill` is set.

Limit: folders of a type of Gnomon's own can't be resumed from by the Trainer (`own_types`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gnomon.core.errors import MissingExtra, UsageError, unknown
from gnomon.core.layers import unwrap
from gnomon.core.modes import evaluation_mode

from .config import SagaConfig
from .convert import require_convertible, to_saga
from .model import attentions

__all__ = [
    "LOSSES",
    "STAGES",
    "collate",
    "convert_and_finetune",
    "divergence",
    "hidden_distance",
    "trainer_class",
]

STAGES = ("align", "local", "distill")
LOSSES = ("kl", "hidden")
"""What the local stage minimises."""


def divergence(
    student: Float[Tensor, "B T V"], teacher: Float[Tensor, "B T V"], real: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean KL(teacher ‖ student) of the next-token distributions at real positions, in nats."""
    p = torch.log_softmax(teacher[real].float(), -1)
    q = torch.log_softmax(student[real].float(), -1)
    found: Tensor = (p.exp() * (p - q)).sum(-1).mean()
    return found


def hidden_distance(
    student: Sequence[Tensor], teacher: Sequence[Tensor], real: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean over layers of ‖h - h'‖² / ‖h‖² over real positions; h of the teacher."""
    parts = []
    for ours, theirs in zip(student, teacher, strict=True):
        goal = theirs[real].float()
        parts.append((ours[real].float() - goal).square().sum() / goal.square().sum().clamp(min=1e-30))
    return torch.stack(parts).mean()


def collate(examples: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Tensor]:
    """A batch padded on the right: input_ids, attention_mask and labels (the ids, -100 at padding)."""
    rows = [torch.as_tensor(one["input_ids"]).long() for one in examples]
    masks = [
        torch.as_tensor(one.get("attention_mask", torch.ones_like(ids)))
        for one, ids in zip(examples, rows, strict=True)
    ]
    goals = [torch.as_tensor(one.get("labels", ids)).long() for one, ids in zip(examples, rows, strict=True)]

    def padded(parts: Sequence[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=value)

    mask = padded(masks, 0)
    return {
        "input_ids": padded(rows, pad),
        "attention_mask": mask,
        "labels": padded(goals, -100).masked_fill(mask == 0, -100),
    }


@functools.cache
def trainer_class() -> Any:
    """`SagaTrainer`, a Hugging Face Trainer that distils from a teacher.

    Raises:
        MissingExtra: accelerate isn't installed.
    """
    if find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "train", "Distillation")
    from transformers import Trainer

    class SagaTrainer(Trainer):  # type: ignore[misc]
        """Takes `teacher`, `loss` (one of `LOSSES`) and `kl_share`, beside what every Trainer takes."""

        def __init__(
            self, *args: Any, teacher: Any, loss: str = "kl", kl_share: float = 1.0, **kwargs: Any
        ) -> None:
            if loss not in LOSSES:
                raise unknown("loss", loss, LOSSES)
            if not 0 <= kl_share <= 1:
                raise UsageError(f"kl_share={kl_share} must lie between 0 and 1.")
            super().__init__(*args, **kwargs)
            self.teacher, self.loss, self.kl_share = teacher.to(self.args.device), loss, kl_share
            self.model_accepts_loss_kwargs = False  # losses here are means over a batch

        def compute_loss(
            self,
            model: Any,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            """The stage's loss of one batch."""
            given = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
            hidden = self.loss == "hidden"
            mask = given.get("attention_mask")
            real = torch.ones_like(given["input_ids"], dtype=torch.bool) if mask is None else mask != 0
            with torch.no_grad(), evaluation_mode(self.teacher):
                goal = self.teacher(**given, use_cache=False, output_hidden_states=hidden)
            labels = None if self.kl_share == 1 or hidden else inputs["labels"]
            out = model(**given, labels=labels, use_cache=False, output_hidden_states=hidden)
            if hidden:
                loss = hidden_distance(out.hidden_states[1:], goal.hidden_states[1:], real)
            else:
                loss = divergence(out.logits, goal.logits, real)
                if labels is not None:
                    loss = self.kl_share * loss + (1 - self.kl_share) * out.loss
            return (loss, out) if return_outputs else loss

    return SagaTrainer


def convert_and_finetune(
    model: Any,
    config: SagaConfig,
    dataset: Any,
    stages: Sequence[str] = STAGES,
    trainer_args: Any = None,
    *,
    local_loss: str = "kl",
    kl_share: float = 0.5,
    calibration_examples: int = 64,
) -> Any:
    """A SAGA model converted from `model` and trained to do what it does.

    Args:
        model: the original; it is the teacher and stays as it is (but is moved to the Trainer's device).
        dataset: examples with `input_ids`, perhaps `attention_mask` and `labels`, by index; padded as needed.
        stages: some of `STAGES`, in their order.
        trainer_args: TrainingArguments or their fields, for all stages; or a dictionary of such by stage. By default
            one epoch each with cosine decay, 3e-4 for local and 5e-5 for distill, saved nowhere.
        local_loss: one of `LOSSES`.
        kl_share: weight of the divergence in the last stage; the rest is the ordinary loss.
        calibration_examples: examples, from the first, that the alignment looks at.

    Raises:
        UsageError: a model or head counts without a rule; unknown stages; an empty data set.
        MissingExtra: accelerate isn't installed.
    """
    _require_stages(stages)
    if local_loss not in LOSSES:
        raise unknown("loss", local_loss, LOSSES)
    init = "aligned" if "align" in stages else "mean"
    require_convertible(model, config, init)
    if not len(dataset):
        raise UsageError("The data set is empty. Give examples with input_ids.")
    trainings = [stage for stage in stages if stage != "align"]
    settings = {stage: _arguments(stage, trainer_args) for stage in trainings}
    kind = trainer_class() if trainings else None
    teacher: Any = unwrap(model)
    pad = int(getattr(teacher.config, "pad_token_id", None) or 0)
    calibration = None
    if init == "aligned":
        some = [dataset[i] for i in range(min(calibration_examples, len(dataset)))]
        calibration = [collate(some[i : i + 8], pad) for i in range(0, len(some), 8)]
    student = to_saga(teacher, config, calibration, init)
    for stage in trainings:
        local = stage == "local"
        assert kind is not None
        trainer = kind(
            model=student,
            args=settings[stage],
            train_dataset=dataset,
            data_collator=functools.partial(collate, pad=pad),
            teacher=teacher,
            loss=local_loss if local else "kl",
            kl_share=1.0 if local else kl_share,
        )
        if local:
            with only_trainable(student, ("q_proj", "k_proj")):
                trainer.train()
        else:
            trainer.train()
    return student.eval()


@contextmanager
def only_trainable(model: nn.Module, parts: Sequence[str]) -> Iterator[None]:
    """Inside, only the attention projections of these names learn; each parameter gets its own setting back."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(False)
    for attn in attentions(model):
        for part in parts:
            getattr(attn, part).requires_grad_(True)
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)


def _require_stages(stages: Sequence[str]) -> None:
    if isinstance(stages, str) or not stages:
        raise UsageError(f"stages={stages!r} must be some of {', '.join(STAGES)}, as a tuple.")
    for stage in stages:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
    if list(stages) != [stage for stage in STAGES if stage in stages]:
        raise UsageError(f"stages={tuple(stages)} must each come once, in the order {', '.join(STAGES)}.")


def _arguments(stage: str, given: Any) -> Any:
    """TrainingArguments of a stage."""
    if find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "train", "Distillation")
    from transformers import TrainingArguments

    if isinstance(given, Mapping) and given.keys() & set(STAGES):
        given = given.get(stage)
    if isinstance(given, TrainingArguments):
        given.remove_unused_columns = False
        return given
    defaults: dict[str, Any] = {
        "output_dir": f"saga-{stage}",
        "save_strategy": "no",
        "report_to": "none",
        "num_train_epochs": 1,
        "learning_rate": 3e-4 if stage == "local" else 5e-5,
        "lr_scheduler_type": "cosine",
    }
    return TrainingArguments(**{**defaults, **(given or {}), "remove_unused_columns": False})
