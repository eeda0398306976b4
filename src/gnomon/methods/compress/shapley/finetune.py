r"""Train chosen units only: everything else stays bit for bit what it was.

Paper: "MODEL SHAPLEY", NeurIPS 2025, "targeted knowledge injection": θ ← θ − η∇L on the top α of the units.
Here:  :class:`MaskedTraining`, for any loop: gradient hooks, moments of frozen entries cleared after each step, decay
       kept off them, and all other parameters frozen. The Trainer's callback is `MaskedFineTuning` (`callback`).
Differs from the paper: its code masks rows of gate and up projections and leaves all the rest training, so that 10 % is
       far more than 10 %; `freeze="released"` does that.
Limits: a matrix with few trained rows still gets a whole gradient and whole moments; the saving is in what is frozen.

Decay: AdamW's is applied here to trained entries, in its own order (before the update), while the optimizer's is off;
that of Adam and SGD joins the gradient likewise. Of other optimizers with decay the frozen entries are put back.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import unwrap

from .curvature import player_masks
from .scores import UnitMasks

logger = logging.getLogger(__name__)
FREEZE = ("all", "released")
RELEASED = ("gate_proj", "up_proj")
"""Maps whose rows the released code masks."""


class MaskedTraining:
    """Freeze a model but for the chosen units, until :meth:`release`.

        with MaskedTraining(model, masks).watch(optimizer):
            ...any loop...

    Args:
        model: the model that was scored, or one of the same form.
        masks: True = trained.
        freeze: "all" freezes everything else; "released" masks rows of gate and up projections and trains the rest.

    Raises:
        UsageError: no unit is chosen, the model has other parameters, or nothing to mask in "released".
    """

    def __init__(
        self, model: nn.Module, masks: UnitMasks, *, freeze: Literal["all", "released"] = "all"
    ) -> None:
        if freeze not in FREEZE:
            raise unknown("freeze:", freeze, FREEZE)
        if not masks.share:
            raise UsageError("No unit is chosen, so nothing would train. Choose at least one.")
        root = unwrap(model)
        parameters = dict(root.named_parameters())
        found = player_masks(masks.layout, masks.chosen)
        if freeze == "released":
            found = {name: mask for name, mask in found.items() if name.split(".")[-2] in RELEASED}
            if not found:
                raise UsageError(
                    f"freeze='released' masks {' and '.join(RELEASED)}, of which no unit is made. Use units='row'."
                )
        self.masks: dict[nn.Parameter, Tensor] = {}
        self._hooks: list[Any] = []
        self._before = [(p, p.requires_grad) for p in parameters.values()]
        for name, mask in found.items():
            p = parameters.get(name)
            if p is None or not _fits(mask, p):
                raise UsageError(
                    f"{name} is {'missing' if p is None else list(p.shape)} here, but the masks are for "
                    f"{list(mask.shape)}. Pass the model that was scored, before it is wrapped or adapted."
                )
        for name, p in parameters.items():
            mask_ = found.get(name)
            train = freeze == "released" if mask_ is None else bool(mask_.any())
            p.requires_grad_(train)
            if mask_ is not None and train and not bool(mask_.all()):
                mask_ = mask_.to(p.device)
                self.masks[p] = mask_
                self._hooks.append(p.register_hook(lambda grad, mask=mask_: grad * mask))  # type: ignore[no-untyped-call]
        self._decay: list[tuple[dict[str, Any], Any]] = []
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def trained(self) -> int:
        """Numbers that can change, mask by mask."""
        total = 0
        for p, _ in self._before:
            if p.requires_grad:
                mask = self.masks.get(p)
                total += p.numel() if mask is None else int(mask.expand(p.shape).sum())
        return total

    def watch(self, optimizer: torch.optim.Optimizer) -> MaskedTraining:
        """Keep decay and moments off the frozen entries in every step of an optimizer, wrapped ones included."""
        inner: Any = optimizer
        while not isinstance(getattr(inner, "state", None), dict) or isinstance(
            getattr(inner, "optimizer", None), torch.optim.Optimizer
        ):
            inner = inner.optimizer  # Accelerate's wrapper
        self._hooks.append(inner.register_step_pre_hook(lambda opt, args, kwargs: self._before_step(opt)))
        self._hooks.append(inner.register_step_post_hook(lambda opt, args, kwargs: self._after_step(opt)))
        if _decay_form(inner) is None and any(group.get("weight_decay") for group in inner.param_groups):
            logger.warning(
                "%s's weight decay is of an unknown form: frozen entries are put back after each step, at the price "
                "of a copy.",
                type(inner).__name__,
            )
        return self

    def release(self) -> None:
        """Remove the hooks and give every parameter its former requires_grad back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for p, needed in self._before:
            p.requires_grad_(needed)

    def __enter__(self) -> MaskedTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        form = _decay_form(optimizer)
        for group in optimizer.param_groups:
            mine = [p for p in group["params"] if p in self.masks and p.grad is not None]
            for p in mine:
                p.grad.mul_(self.masks[p])  # whatever wrote it past the hook
            decay = group.get("weight_decay") or 0.0
            if not mine or not decay:
                continue
            if form is None:
                self._kept += [(p, p.clone()) for p in mine]
                continue
            for p in group["params"]:
                if p.grad is None:
                    continue
                mask = self.masks.get(p)
                if form == "decoupled":
                    shrink = group["lr"] * decay
                    p.mul_(1 - shrink if mask is None else 1 - shrink * mask)
                else:
                    p.grad.add_(p if mask is None else p * mask, alpha=decay)
            self._decay.append((group, group["weight_decay"]))
            group["weight_decay"] = 0.0

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group, decay in self._decay:
            group["weight_decay"] = decay
        self._decay.clear()
        for p, before in self._kept:
            p.copy_(torch.where(self.masks[p], p, before))
        self._kept.clear()
        for p, mask in self.masks.items():
            for value in optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    value.mul_(mask)


def _fits(mask: Tensor, p: nn.Parameter) -> bool:
    return mask.ndim == p.ndim and all(
        mine in (1, size) for mine, size in zip(mask.shape, p.shape, strict=True)
    )


def _decay_form(optimizer: torch.optim.Optimizer) -> str | None:
    """How an optimizer's weight decay acts: "decoupled", "coupled" (joins the gradient), or None: not known."""
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get(
            "decoupled_weight_decay"
        )
        return "decoupled" if decoupled else "coupled"
    return "coupled" if type(optimizer) is torch.optim.SGD and not optimizer.defaults["maximize"] else None
