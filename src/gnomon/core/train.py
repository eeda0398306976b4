"""One plain training loop: batches, schedule, clipping, token count, resume.

A single process needs nothing else. Under a launcher (`accelerate launch`, `torchrun`: WORLD_SIZE > 1) the same
loop runs on every rank through Accelerate's data parallelism: every rank draws the same batches and keeps its
own share of their rows, so data position, token count and random state are equal everywhere and the
checkpoint of rank 0 serves any number of ranks, if its folder is visible to all of them.

Not here: sharded models and their optimizers; for these use Transformers' or TRL's trainers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from . import checkpoint
from .errors import GnomonError, MissingExtra, NumericalFailure, UsageError, unknown

SCHEDULES = ("cosine", "linear", "constant", "wsd")
AUTOCASTS = ("none", "bf16")

Batch = Tensor | Mapping[str, Tensor]
"""Token ids (B, T), or keyword arguments of the model, each with B rows."""


@runtime_checkable
class BatchSource(Protocol):
    """An endless stream of batches that knows its position."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """Whoever owns the run: where checkpoints go, and the records made so far."""

    @property
    def checkpoint(self) -> Path: ...

    def snapshot(self) -> list[dict[str, Any]]: ...

    def restore(self, records: list[dict[str, Any]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of :func:`train`."""

    steps: int
    """Optimizer steps."""
    lr: float | None = None
    """Peak learning rate of the optimizer's first group; the others keep their ratio to it. None: as they are."""
    warmup: int = 0
    """Steps over which the rate rises linearly; step 1 already has 1/warmup of the peak."""
    schedule: str = "cosine"
    """After the warm-up, one of `SCHEDULES`; `wsd` (warm-up, stable, decay) is constant, then linear."""
    min_lr_ratio: float = 0.0
    """What the schedule falls to, as a share of the peak; reached one step after the last."""
    decay: float = 0.2
    """Share of all steps, at the end, in which `wsd` falls."""
    clip: float | None = 1.0
    """Largest global gradient norm; None never clips."""
    accumulate: int = 1
    """Batches per optimizer step."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None writes none."""
    autocast: str = "none"
    """Precision of forward passes, one of `AUTOCASTS`; weights and optimizer keep theirs."""

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("accumulate", self.accumulate)):
            if value < 1:
                raise UsageError(f"{name}={value} must be at least 1.")
        if not 0 <= self.warmup <= self.steps:
            raise UsageError(
                f"warmup={self.warmup} must lie in [0, steps={self.steps}]: a longer one never reaches the peak rate."
            )
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.autocast not in AUTOCASTS:
            raise unknown("autocast", self.autocast, AUTOCASTS)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise UsageError(
                f"lr={self.lr} must be positive and finite, or None to keep the optimizer's own."
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise UsageError(f"min_lr_ratio={self.min_lr_ratio} must lie in [0, 1].")
        if not 0 < self.decay <= 1:
            raise UsageError(f"decay={self.decay} must lie in (0, 1].")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(
                f"clip={self.clip} would stop training. Use a positive norm, or None not to clip."
            )
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(
                f"checkpoint_every={self.checkpoint_every} must be at least 1, or None for never."
            )


@dataclass(frozen=True)
class Step:
    """What `on_step` sees after each optimizer step."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Mean loss of the step's batches, before the update, over all ranks."""
    lr: float
    """Rate of the first group in this step."""
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Tokens read so far."""
    seconds: float
    """Seconds spent in steps so far, without `on_step` and checkpoints."""


@dataclass(frozen=True)
class TrainResult:
    """What training used and gave; counts include what was done before a resume."""

    steps: int
    tokens: int
    losses: list[float]
    """One per step, see :attr:`Step.loss`."""
    seconds: float


@dataclass
class _Progress:
    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def schedule_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate in a step, counted from 0."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    low = config.min_lr_ratio
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "wsd":
        length = config.decay * config.steps
        progress = max(0.0, (step - (config.steps - length)) / length)
    return 1 - (1 - low) * progress


def train(
    model: nn.Module,
    batches: BatchSource,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    *,
    resume: Resumable | None = None,
    on_step: Callable[[Step], None] | None = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    name: str = "train",
) -> TrainResult:
    """Train in place.

    With `resume` and `checkpoint_every`, a run that was cut off goes on from its last checkpoint: model,
    optimizer, data position, global random states, counts and records (restored through `resume`) are as they
    were, and on a CPU the result is bit for bit that of an uncut run.

    Args:
        model: a Transformers causal LM, or anything that `loss_fn` understands; put in training mode.
        batches: source of batches; under a launcher each holds the rows of all ranks.
        optimizer: its groups' rates are multiplied by the schedule, and are as before when this returns. One with
            `updates_in_backward` (LOMO) leaves no gradients: there is nothing to clip, and the norm is 0. One with
            `averages_gradients` (BREAD) sees to ranks itself.
        resume: owner of checkpoints and records (a stage's `ctx`).
        on_step: called after every step, on every rank.
        loss_fn: `loss_fn(model, batch)` gives a mean loss; the parts of a step then count equally. By default
            the next-token loss, where every target token of a step counts equally.
        name: tells the checkpoints of several loops of one owner apart.

    Raises:
        NumericalFailure: on a loss or gradient that isn't finite; the model stays as before that step.
        UsageError: if batches run out, can't be shared among ranks, or nothing receives a gradient.
        GnomonError: if the checkpoint was written with other settings.
    """
    accelerator = _accelerator()
    world = 1 if accelerator is None else accelerator.num_processes
    rank = 0 if accelerator is None else accelerator.process_index
    bare = getattr(optimizer, "averages_gradients", False)  # placed on its device only, not wrapped
    runner = model if accelerator is None else accelerator.prepare_model(model, evaluation_mode=bare)
    found = [float(group["lr"]) for group in optimizer.param_groups]
    peaks = found if config.lr is None else _scaled(found, config.lr)
    settings = {**asdict(config), "peaks": peaks}
    done = _Progress() if resume is None else _resume(resume, name, settings, model, batches, optimizer)
    if resume is not None and rank == 0:
        checkpoint.sweep(resume.checkpoint, name)
    was_training = model.training
    try:
        while done.step < config.steps:
            began = time.perf_counter()
            model.train()  # each time, because on_step may have evaluated
            factor = schedule_factor(config, done.step)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            micro = [_draw(batches, done.step, config) for _ in range(config.accumulate)]
            loss = _backward(runner, micro, loss_fn, config, accelerator, rank, world)
            norm = _grad_norm(optimizer)
            _require_finite(loss, norm.item(), done.step + 1, peaks[0] * factor, config)
            if config.clip is not None:
                clip_grads_with_norm_(_parameters(optimizer), config.clip, norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done.step += 1
            done.tokens += sum(map(_tokens, micro))
            done.losses.append(loss)
            done.seconds += time.perf_counter() - began
            if on_step is not None:
                on_step(Step(done.step, loss, peaks[0] * factor, norm.item(), done.tokens, done.seconds))
            if resume is not None and rank == 0 and _due(config, done.step):
                _save(resume, name, done, settings, model, batches, optimizer)
    finally:
        model.train(was_training)
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, found, strict=True):
            group["lr"] = rate
    return TrainResult(done.step, done.tokens, list(done.losses), done.seconds)


# --------------------------------------------------------------------------------------------- one step


def _draw(batches: BatchSource, step: int, config: TrainConfig) -> Batch:
    try:
        return next(batches)
    except StopIteration:
        raise UsageError(
            f"Batches ran out in step {step + 1} of {config.steps} ({config.accumulate} a step). Give a source "
            "that starts over, or fewer steps."
        ) from None


def _backward(
    runner: nn.Module,
    micro: list[Batch],
    loss_fn: Callable[[nn.Module, Any], Tensor] | None,
    config: TrainConfig,
    accelerator: Any,
    rank: int,
    world: int,
) -> float:
    """Accumulate gradients over a step's batches; returns the mean loss over all ranks."""
    device = next(runner.parameters()).device
    parts = [_rows(_to(batch, device), rank, world) for batch in micro]
    # Every rank sees the whole batches, so the number of targets over all ranks needs no communication.
    total = sum(map(_targets, micro)) if loss_fn is None else len(micro) * world
    shares = [(_targets(batch) if loss_fn is None else 1) / max(total, 1) for batch in parts]
    if not all(shares):
        raise UsageError(
            "A batch holds no target token, so it has no loss: every label is -100, or its rows are one token "
            "long. Leave such batches out."
        )
    loss = torch.zeros((), device=device)
    for i, (batch, share) in enumerate(zip(parts, shares, strict=True)):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if accelerator is None or last else accelerator.no_sync(runner):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.autocast == "bf16"):
                value = next_token_loss(runner, batch) if loss_fn is None else loss_fn(runner, batch)
            if accelerator is None:
                (value * share).backward()  # type: ignore[no-untyped-call]
            else:
                accelerator.backward(value * (share * world))  # data parallelism averages over ranks
        loss += value.detach().float() * share
    if accelerator is not None:
        loss = accelerator.reduce(loss, "sum")
    return loss.item()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _grad_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Global 2-norm of the gradients, 0 where they were used up; a function, so that no name keeps them alive."""
    grads = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    if not grads and getattr(optimizer, "updates_in_backward", False):
        return torch.zeros(())
    if not grads:
        raise UsageError(
            "No parameter of the optimizer received a gradient: they are frozen, or not the model's. "
            "Build the optimizer from the model's parameters with requires_grad=True."
        )
    return get_total_norm(grads)


def _scaled(found: list[float], lr: float) -> list[float]:
    if not found[0] > 0:
        raise UsageError(
            f"The first group's learning rate is {found[0]}, to which lr={lr} can't be a ratio. Give the "
            "optimizer a positive rate, or lr=None."
        )
    return [lr * rate / found[0] for rate in found]


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Transformers' own mean loss over the batch's targets; padding (mask 0, on the right) is no target."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    loss: Tensor = model(**{**inputs, "labels": _labels(batch)}, use_cache=False).loss
    return loss


def _labels(batch: Batch) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    if "labels" in batch:
        return batch["labels"]
    ids = batch["input_ids"]
    return ids.masked_fill(batch["attention_mask"] == 0, -100) if "attention_mask" in batch else ids


def _targets(batch: Batch) -> int:
    labels = _labels(batch)
    return int((labels[:, 1:] != -100).sum())


def _tokens(batch: Batch) -> int:
    """Real tokens that the model reads; all, where a mask of pairs doesn't tell which are real."""
    if isinstance(batch, Tensor):
        return batch.numel()
    if "attention_mask" in batch and batch["attention_mask"].ndim == 2:
        return int((batch["attention_mask"] != 0).sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def _to(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device)
    return {key: value.to(device) for key, value in batch.items()}


def _rows(batch: Batch, rank: int, world: int) -> Batch:
    """This rank's share of the rows: neighbours stay together."""
    if isinstance(batch, Tensor):
        if len(batch) % world:
            raise UsageError(
                f"A batch of {len(batch)} rows can't be shared evenly among {world} processes. Use a batch size "
                f"that is a multiple of {world}."
            )
        share = len(batch) // world
        return batch[rank * share : (rank + 1) * share]
    return {key: _rows(value, rank, world) for key, value in batch.items()}  # type: ignore[misc]


def _require_finite(loss: float, norm: float, step: int, lr: float, config: TrainConfig) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm} (loss {loss:.4g})"
    clip = "set clip=1.0" if config.clip is None else f"a clip below {config.clip:g}"
    cast = " or autocast='none'" if config.autocast != "none" else ""
    raise NumericalFailure(
        f"Training left the numbers in step {step} of {config.steps}: {what} at learning rate {lr:.3g}. The model "
        f"is as before this step. Try a lower lr, a longer warmup (now {config.warmup}), {clip}{cast}."
    )


# ----------------------------------------------------------------------------------- ranks and resuming


def _accelerator() -> Any:
    """Accelerate's face of the process group, or None in a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    try:
        from accelerate import Accelerator
    except ImportError:
        raise MissingExtra("accelerate", "train", "Training on several processes (WORLD_SIZE > 1)") from None
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    if not accelerator.distributed_type.value.startswith("MULTI_"):
        raise UsageError(
            f"This loop trains whole copies of a model (data parallelism), but the launcher asks for "
            f"{accelerator.distributed_type.value}. Launch with `accelerate launch --multi_gpu`, or use a trainer "
            "of Transformers or TRL for a sharded model."
        )
    return accelerator


def _due(config: TrainConfig, step: int) -> bool:
    return config.checkpoint_every is not None and step % config.checkpoint_every == 0


def _save(
    resume: Resumable,
    name: str,
    done: _Progress,
    settings: dict[str, Any],
    model: nn.Module,
    batches: BatchSource,
    optimizer: torch.optim.Optimizer,
) -> None:
    state = {
        "settings": settings,
        "progress": asdict(done),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "batches": batches.state_dict(),
        "random": checkpoint.random_states(),
        "records": json.dumps(resume.snapshot()),
    }
    checkpoint.save(resume.checkpoint, name, done.step, state)


def _resume(
    resume: Resumable,
    name: str,
    settings: dict[str, Any],
    model: nn.Module,
    batches: BatchSource,
    optimizer: torch.optim.Optimizer,
) -> _Progress:
    """Put everything back as the newest checkpoint has it, or leave all as it is when there is none."""
    state = checkpoint.load(resume.checkpoint, name)
    if state is None:
        return _Progress()
    theirs = state["settings"]
    if theirs != settings:
        changed = [
            f"{k}={theirs.get(k)!r} there, {v!r} here" for k, v in settings.items() if theirs.get(k) != v
        ]
        raise GnomonError(
            f"The checkpoint in {resume.checkpoint} was written with other settings ({'; '.join(changed)}). Train "
            "with those, or remove the folder to begin anew."
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.load_state_dict(state["batches"])
    resume.restore(json.loads(state["records"]))
    checkpoint.set_random_states(state["random"])
    return _Progress(**state["progress"])
