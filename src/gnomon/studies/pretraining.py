"""What studies that train language models share: settings, one training stage, held-out losses.

A competitor is a factory `make(model, *, lr, weight_decay, total_steps, **options)`. It may change the model (wrap
its layers, draw weights anew) and returns its optimizer, or an :class:`Entrant` when something is left to do after
the last step. All competitors of a study take the same batches, schedule and grid of learning rates.

`pretrain` is the stage that tuning tunes: it returns its loss, and its records are learning curves under metrics of
their own, which no claim reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError
from gnomon.lab import Done, Lab, StageContext, StudyConfig, load_rival
from gnomon.lab.tune import Tuned, tune

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.core.data import Split
    from gnomon.core.models import Loaded
    from gnomon.core.train import BatchSource, TrainConfig
    from gnomon.lab.engine import Handle

    Rows = Sequence[Tensor]
    """Batches of token ids, each (B, T)."""

EVALUATION_BATCH = 16
CURVE_WINDOWS = 64
"""Held-out windows for a point of a learning curve; the final loss takes all that the study asks for."""
SHARED = (
    "model",
    "scratch",
    "data",
    "steps",
    "batch",
    "length",
    "accumulate",
    "schedule",
    "warmup",
    "cooldown",
    "clip",
    "points",
    "windows",
)
"""Settings that go to every competitor's training as they are."""
CURVE = " while training"
"""Ends the names of metrics that belong to learning curves."""


@dataclass(frozen=True)
class Entrant:
    """A competitor that is ready to train."""

    optimizer: torch.optim.Optimizer
    finish: Callable[[nn.Module], nn.Module] = lambda model: model
    """Called after the last step; gives the model that is judged and kept."""
    watch: Callable[[nn.Module], Mapping[str, float]] = lambda model: {}
    """Numbers by name, taken along the learning curve and before `finish`."""
    numbers: int | None = None
    """Trained numbers, where that isn't what requires a gradient."""
    keep: bool = True
    """False: the model isn't saved, because it is of no class that could be loaded again."""


@dataclass(frozen=True, kw_only=True)
class PretrainingStudy(StudyConfig):
    """Settings that studies of training share; field defaults are a preview."""

    model: str = "tiny:llama-0.5m"
    """The architecture that is trained: embedded name, `tiny:`, folder or hub id."""
    scratch: bool = True
    """Weights are drawn anew; False goes on from the model's own."""
    data: str = "stdlib"
    """Text: recipe, file or folder (`core.data`)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (0.005, 0.01)
    """The grid of learning rates, the same for all."""
    tuning_seeds: tuple[int, ...] = (1000,)
    steps: int = 150
    batch: int = 8
    """Windows of a batch."""
    length: int = 128
    """Tokens of a window."""
    accumulate: int = 1
    """Batches of a step."""
    schedule: str = "wsd"
    """Of the learning rate, one of `core.train.SCHEDULES`."""
    warmup: float = 0.1
    cooldown: float = 0.2
    """Shares of the run in which the learning rate rises and, with `wsd`, falls."""
    clip: float = 1.0
    """Largest gradient norm, 0 for none."""
    points: int = 10
    """Looks at the model while it trains."""
    windows: int = 192
    """Held-out windows that losses are measured on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rates or min(self.rates) <= 0:
            raise UsageError(f"rates must be positive learning rates, at least one, got {self.rates}.")
        least = {"steps": 2, "batch": 1, "length": 2, "accumulate": 1, "points": 1, "windows": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {getattr(self, name)}.")
        if not (self.warmup >= 0 and self.cooldown > 0 and self.warmup + self.cooldown <= 1):
            raise UsageError(
                f"warmup={self.warmup} and cooldown={self.cooldown} must be shares whose sum is at most 1."
            )
        if self.clip < 0:
            raise UsageError(f"clip={self.clip} must be a positive gradient norm, or 0 for none.")

    def check(self) -> None:
        super().check()
        parts(self.data)

    def training(self) -> dict[str, Any]:
        """Arguments of :func:`pretrain` that all competitors share."""
        return {name: getattr(self, name) for name in SHARED}

    def tuned(self, lab: Lab, **competitor: Any) -> Tuned:
        """The best learning rate of a competitor on the tuning seeds; `competitor` are arguments of `pretrain`."""
        return tune(
            lab,
            pretrain,
            grid={"lr": self.rates},
            seeds=self.tuning_seeds,
            score="loss",
            **competitor,
            **self.training(),
        )

    def trained(self, lab: Lab, tuned: Tuned, seed: int, **competitor: Any) -> Handle:
        """A competitor trained at its best learning rate."""
        return lab.stage(pretrain, seed=seed, **tuned.settings, **competitor, **self.training())


def pretrain(
    ctx: StageContext,
    *,
    method: str,
    make: str,
    seed: int,
    lr: float,
    model: str,
    scratch: bool,
    data: str,
    steps: int,
    batch: int,
    length: int,
    accumulate: int,
    schedule: str,
    warmup: float,
    cooldown: float,
    clip: float,
    points: int,
    windows: int,
    weight_decay: float = 0.0,
    summed_decay: float | None = None,
    options: Mapping[str, Any] | None = None,
    watch: str | None = None,
) -> dict[str, float]:
    """Train a language model and keep it.

    Args:
        make: `module:factory` of the competitor.
        lr: peak rate.
        warmup, cooldown: shares of the run in which the rate rises and, with schedule "wsd", falls.
        clip: largest gradient norm; 0 never clips.
        points: of the learning curve, evenly spaced.
        windows: held-out windows for the final loss.
        weight_decay: λ of matrices.
        summed_decay: Σ_t η_t λ, from which λ follows; instead of `weight_decay`.
        options: further arguments of the factory.
        watch: `module:function` from the model to numbers by name, recorded with each point of the curve.

    Returns:
        final loss, λ and costs. The model lies in `model/`, unless its entrant says otherwise.
    """
    import torch

    from gnomon.core import data as texts
    from gnomon.core.train import TrainConfig, schedule_factor

    loaded = load(model, scratch=scratch, dtype="float32")
    learnt, held_out = streams(loaded, data)
    config = TrainConfig(
        steps=steps,
        warmup=max(1, round(warmup * steps)),
        schedule=schedule,
        decay=cooldown,
        min_lr_ratio=0.01,
        clip=clip or None,
        accumulate=accumulate,
        checkpoint_every=max(1, steps // 10),
        autocast="bf16" if loaded.device.type == "cuda" else "none",
    )
    decay = weight_decay
    if summed_decay is not None:
        decay = summed_decay / (lr * sum(schedule_factor(config, t) for t in range(steps)))
    entrant = enter(make, loaded.model, lr=lr, weight_decay=decay, total_steps=steps, options=options)
    some = rows(held_out, length, CURVE_WINDOWS)
    task = Task(
        texts.Batches(learnt, batch=batch, length=length, generator=torch.Generator().manual_seed(seed)),
        glance=lambda network: loss_of(network, some),
        judge=lambda network: loss_of(network, rows(held_out, length, windows)),
    )
    _, value = fit(
        ctx,
        loaded,
        entrant,
        task,
        config,
        method=method,
        points=points,
        tags={"lr": lr} | ({} if summed_decay is None else {"summed decay": summed_decay}),
        watch=[load_rival(watch)] if watch else [],
    )
    return {**value, "decay": decay}


@dataclass(frozen=True)
class Task:
    """What is learnt, and how a model is judged by it."""

    batches: BatchSource
    glance: Callable[[nn.Module], float]
    """The loss at a point of the learning curve."""
    judge: Callable[[nn.Module], float]
    """The loss in the end."""


def enter(
    make: str,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    total_steps: int,
    options: Mapping[str, Any] | None = None,
) -> Entrant:
    """The competitor of a factory `module:function`, ready to train."""
    made = load_rival(make)(
        model, lr=lr, weight_decay=weight_decay, total_steps=total_steps, **{**(options or {})}
    )
    return made if isinstance(made, Entrant) else Entrant(made)


def fit(
    ctx: StageContext,
    loaded: Loaded,
    entrant: Entrant,
    task: Task,
    config: TrainConfig,
    *,
    method: str,
    points: int,
    tags: Mapping[str, Any],
    watch: Sequence[Callable[[nn.Module], Mapping[str, float]]] = (),
    keep: bool = True,
) -> tuple[nn.Module, dict[str, float]]:
    """Train a competitor inside a stage: learning curve, resume, final loss.

    Args:
        points: of the learning curve, evenly spaced.
        tags: of the curve's records.
        watch: functions from the model to numbers by name, beside the entrant's own.
        keep: the model is saved in `model/`, if its entrant agrees.

    Returns:
        the model that was judged; its loss and what it cost.
    """
    import dataclasses

    from gnomon.core.memory import state_bytes
    from gnomon.core.models import save
    from gnomon.core.train import Step, train

    numbers = entrant.numbers or sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    at = {round(config.steps * i / points) for i in range(1, points + 1)}
    watched = [entrant.watch, *watch]

    def look() -> dict[str, float]:
        return {name: value for one in watched for name, value in one(loaded.model).items()}

    def on_step(done: Step) -> None:
        if done.step in at and ctx.first:
            for metric, value in {"loss": task.glance(loaded.model), **look()}.items():
                ctx.record(
                    method=method, metric=metric + CURVE, value=value, tags={**tags, "step": done.step}
                )

    spent = train(loaded.model, task.batches, entrant.optimizer, config, resume=ctx, on_step=on_step)
    last = {f"last {name}": value for name, value in look().items()}
    left = state_bytes(entrant.optimizer)  # before finishing, which may drop it
    judged = dataclasses.replace(loaded, model=entrant.finish(loaded.model))
    if keep and entrant.keep and ctx.first:
        save(judged, ctx.dir / "model")
    return judged.model, {
        "loss": task.judge(judged.model),
        "tokens": spent.tokens,
        "seconds": spent.seconds,
        "trained numbers": numbers,
        "state bytes": left,
        **last,
    }


def adamw(
    model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW on all parameters, with decay on the hidden matrices only: the baseline of studies of optimizers."""
    import torch

    from gnomon.methods.optim.numuon import split_muon_params

    hidden, other = split_muon_params(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in hidden], "weight_decay": weight_decay},
        {"params": [p for _, p in other], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def budget(trained: Done, trials: int) -> dict[str, float]:
    """What a trained model cost, for records."""
    return {
        "tokens": trained.value["tokens"],
        "steps": trained.args["steps"],
        "trials": trials,
        "seconds": trained.value["seconds"],
    }


def catch_up(ctx: StageContext, *, of: Done, reference: Done, method: str, to: str) -> None:
    """Steps after which a learning curve passes the end of another one; both took the same batches."""
    mine, theirs = (curve(done) for done in (of, reference))
    goal = theirs[max(theirs)]
    reached = next((step for step in sorted(mine) if mine[step] <= goal), None)
    ctx.record(
        method=method,
        metric=f"share of the steps to {to}'s final loss",
        value=1.0 if reached is None else reached / max(theirs),
        better="lower",
        tags={"reached": reached is not None},
    )


def curve(trained: Done) -> dict[int, float]:
    """Loss by step of a trained model."""
    lines = (trained.dir / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {int(r["tags"]["step"]): r["value"] for r in records if r["metric"] == "loss" + CURVE}


# ---------------------------------------------------------------------------------------- models and texts


def load(model: str, *, scratch: bool, dtype: str | None = None) -> Loaded:
    """The model under study; with `scratch` its architecture with weights drawn from the stage's seed."""
    import dataclasses

    from gnomon.core.models import load as load_model

    loaded = load_model(model, dtype=dtype)
    if not scratch or model.startswith("tiny:"):
        return loaded
    fresh = type(loaded.model)(loaded.model.config).to(loaded.device, loaded.dtype).eval()
    return dataclasses.replace(loaded, model=fresh)


def parts(data: str) -> Split:
    """Documents to learn, to judge on, and to leave alone."""
    from gnomon.core.data import corpus, split

    return split(corpus(data), valid=0.1, test=0.05, seed=0)


def streams(loaded: Loaded, data: str) -> tuple[Tensor, Tensor]:
    """Token ids to learn and to judge on; no document is in both."""
    from gnomon.core.data import token_stream

    whole = parts(data)
    return token_stream(whole.train, loaded.tokenizer), token_stream(whole.valid, loaded.tokenizer)


def rows(stream: Tensor, length: int, count: int) -> Rows:
    """Up to `count` windows, spread evenly over the stream, in batches."""
    import torch

    from gnomon.core.data import windows

    found = windows(stream, length)
    at = torch.linspace(0, len(found) - 1, min(count, len(found))).round().long()
    return list(torch.split(found[at], EVALUATION_BATCH))


def loss_of(model: nn.Module, batches: Rows) -> float:
    """Mean negative log-likelihood of a token, in nats."""
    import torch

    from gnomon.core.scoring import evaluating, token_nll

    device = next(model.parameters()).device
    with evaluating(model):
        return float(torch.cat([token_nll(model, ids.to(device)) for ids in batches]).mean())
