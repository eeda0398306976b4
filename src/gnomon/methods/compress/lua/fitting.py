"""Training thresholds with the plain loop of `core.train`, which resumes and runs on several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.train import Batch, BatchSource, Resumable, Step, TrainConfig, train

from ..pruning import collect_importance
from ..pruning.allocation import Allocation
from ..pruning.targets import Patterns

if TYPE_CHECKING:
    from .allocator import LuaAllocator

Batches = Iterable[Tensor | Mapping[str, Tensor]]
"""A DataLoader, a list: anything that starts over when it is iterated again."""


@dataclass(frozen=True)
class LuaFit:
    """What training gave."""

    steps: int
    tokens: int
    losses: list[float]
    """Per step: cross-entropy plus λ_reg L_reg, with soft masks, before the step."""
    sparsity: float
    """Zeros that the thresholds give as they stand, before the exact budget."""
    seconds: float
    """Of the steps, those before a resume included."""


class Endless:
    """Batches of a source that is iterated over and over, with its position."""

    def __init__(self, source: Batches) -> None:
        """
        Args:
            source: no iterator or generator, which would be empty the second time.
        """
        if isinstance(source, Iterator):
            raise UsageError(
                f"The batches are a {type(source).__name__}, which can be read only once. Pass a DataLoader, a list, "
                "or a source with state_dict (`core.data.Batches`)."
            )
        self.source, self.taken = source, 0
        self._iterator: Iterator[Batch] | None = None

    def __next__(self) -> Batch:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.source)
            found = next(self._iterator, None)
            if found is not None:
                self.taken += 1
                return found
            self._iterator = None
        raise StopIteration  # it is empty

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Read as many batches again; a source that shuffles must do so from a seed of its own."""
        self.taken, self._iterator = 0, None
        while self.taken < state["taken"]:
            next(self)


def fit(
    alloc: LuaAllocator,
    dataloader: Batches | BatchSource,
    *,
    steps: int = 500,
    lr: float = 5e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    schedule: str = "constant",
    warmup: int = 0,
    clip: float | None = None,
    accumulate: int = 1,
    autocast: str = "none",
    resume: Resumable | None = None,
    checkpoint_every: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    name: str = "lua",
) -> LuaFit:
    """Train the thresholds with AdamW on next-token loss plus regulariser; the masks stay installed.

    Checkpoints hold thresholds and optimizer, not the model's weights, which don't change.

    Args:
        dataloader: batches of token ids (B, T), or mappings with `input_ids`, `attention_mask`, `labels`; read over and
            over. Never text that the model is judged on.
        steps, lr, schedule: the paper's; its batches hold 4,096 tokens.
        weight_decay: the paper's is 0.05, which pulls thresholds towards 0, that is towards a denser model, and which
            the regulariser has to fight.
        resume: owner of checkpoints (a stage's `ctx`), see `core.train.train`.
        on_step: called after each step.

    Raises:
        UsageError: batches that can't be read again, none at all, or a step without a target token.
        NumericalFailure: a loss that isn't finite.
    """
    config = TrainConfig(
        steps=steps,
        warmup=warmup,
        schedule=schedule,
        clip=clip,
        accumulate=accumulate,
        checkpoint_every=checkpoint_every,
        autocast=autocast,
    )
    if not lr > 0 or not weight_decay >= 0:
        raise UsageError(f"lr={lr} must be positive and weight_decay={weight_decay} at least 0.")
    batches = dataloader if isinstance(dataloader, BatchSource) else Endless(dataloader)
    alloc.parametrize()
    optimizer = torch.optim.AdamW(alloc.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
    modes = [(module, module.training) for module in alloc.model.modules()]
    try:
        # its own next-token loss is what the allocator adds the regulariser to
        done = train(alloc, batches, optimizer, config, resume=resume, on_step=on_step, name=name)
    finally:
        for module, training in modes:
            module.training = training
    report = alloc.sparsity_report()
    return LuaFit(done.steps, done.tokens, done.losses, report.sparsity, done.seconds)


def allocate(
    model: nn.Module,
    calib: Sequence[Tensor | Mapping[str, Tensor]],
    *,
    sparsity: float,
    targets: Patterns = None,
    exclude: Patterns = None,
    granularity: str = "row",
    metric: Any = "wanda",
    axis: str | None = None,
    group: int = 128,
    **settings: Any,
) -> Allocation:
    """Learn an allocation on calibration text and leave the model as it was: `prune(..., allocation="lua")`.

    Args:
        calib: batches that both the importance and the training read.
        metric: of `collect_importance`.
        axis, group: of :meth:`LuaAllocator.allocation`.
        settings: of :func:`fit`, such as steps and lr.

    Raises:
        UsageError, NumericalFailure: see :class:`LuaAllocator` and :func:`fit`; the model is as it was then too.
    """
    from .allocator import LuaAllocator

    scores = collect_importance(model, calib, metric=metric, targets=targets, exclude=exclude)
    alloc = LuaAllocator(model, scores, sparsity, granularity=granularity, targets=targets, exclude=exclude)
    try:
        alloc.fit(calib, **settings)
        return alloc.allocation(axis, group=group)
    finally:
        alloc.unparametrize()
