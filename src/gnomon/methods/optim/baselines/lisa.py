"""LISA: Adam on a few random layers at a time, with embeddings and head always on.

Method: layerwise importance sampled AdamW (LISA), as the BREAD paper names it among the related ones.
Here:  γ layers, drawn anew every K steps without regard to earlier draws, with fresh Adam states; everything outside
       the layers (embeddings, final norm, head) is trained throughout and keeps its state.
Inferred: a layer's state is dropped when it is frozen, all layers are equally likely, γ = 2.

>>> import torch
>>> from gnomon.core.tiny import build
>>> model, tokens = build("tiny:llama-10k"), torch.arange(64).view(2, 32)
>>> optimizer = LISA(model, lr=1e-3, layers=2, switch_every=5)
>>> model(tokens, labels=tokens).loss.backward()
>>> optimizer.step()
>>> len(optimizer.active_blocks())
2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import decoder_stack

from ..bread.blocks import Turns
from ..bread.optimizer import BlockOptimizer


class Draws(Turns):
    """`together` different blocks a turn, drawn anew each time: a block may be drawn again, or never."""

    def __init__(self, count: int, together: int, generator: torch.Generator) -> None:
        self.together = together
        super().__init__([0.0] * count, "random", generator)
        self.order = f"random, {together} together"

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(self.queue)

    def advance(self) -> None:
        self.epoch, self.queue = self.epoch + 1, self._draw()

    def _draw(self) -> list[int]:
        drawn = torch.randperm(len(self.depths), generator=self.generator, device=self.generator.device)
        return sorted(int(i) for i in drawn[: self.together].tolist())


class LISA(BlockOptimizer):
    """Everything of :class:`BlockOptimizer` (schedulers, resume, wide copies) with LISA's turns.

    Args:
        model: a Transformers decoder.
        layers: γ.
        switch_every: K.
        options: lr, betas, eps, weight_decay, master_dtype, generator of :class:`BlockOptimizer`.

    Raises:
        UsageError: as :class:`BlockOptimizer`; γ outside 1..L.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Any = torch.optim.AdamW,
        *,
        layers: int = 2,
        switch_every: int = 100,
        **options: Any,
    ) -> None:
        for name in ("blocks", "expansion", "scope", "order", "always_active"):
            if name in options:
                raise UsageError(
                    f"{name}= is what makes LISA what it is. For another choice use BlockOptimizer."
                )
        stack = decoder_stack(model)
        if not isinstance(layers, int) or not 1 <= layers <= len(stack.layers):
            raise UsageError(
                f"layers={layers!r} must lie in 1..{len(stack.layers)}, the layers of this model."
            )
        self.layers = layers
        outside = [
            n for n, p in model.named_parameters() if not n.startswith(f"{stack.name}.") and p.requires_grad
        ]
        super().__init__(model, base, switch_every=switch_every, always_active=outside, **options)

    def _make_turns(self, order: str, generator: torch.Generator) -> Turns:
        return Draws(len(self.partition.blocks), self.layers, generator)
