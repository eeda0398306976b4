"""Plain steps inside the backward pass: each gradient is used and freed as soon as it is ready.

Exact for a linear map, whose input's gradient is formed before its weight changes, with and without (non-reentrant)
activation checkpointing, and for a weight used several times: autograd sums all uses before the hook sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gnomon.core.errors import NumericalFailure, UsageError

from .expansion import SGDExpansion, sgd_update_
from .ranks import average_


class OnTheFly:
    """Takes steps of `rule` in backward hooks; a matrix whose gradient isn't finite keeps its value."""

    def __init__(self, rule: SGDExpansion) -> None:
        self.rule = rule
        self.batches = rule.batches
        """A trainer's callback may know better than the rule."""
        self.draws = 0
        self._handles: list[RemovableHandle] = []
        self._broken: list[tuple[str, Tensor]] = []
        self._changed: Tensor | None = None
        self._updated = 0

    def attach(self, params: Sequence[tuple[str, Tensor, Mapping[str, Any]]]) -> None:
        """Update these from now on, and no others; each comes with its name and group."""
        self.detach()
        for name, p, group in params:
            hook = self._hook(name, group)
            self._handles.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def require_finite(self) -> None:
        """One look, with one synchronisation, at all updates since the last.

        Raises:
            NumericalFailure: some gradients held NaN or infinity.
        """
        told, self._broken = self._broken, []
        if not told:
            return
        flags = torch.stack([flag.to(told[0][1].device) for _, flag in told]).tolist()
        if bad := [name for (name, _), broken in zip(told, flags, strict=True) if broken]:
            raise NumericalFailure(
                f"The gradients of {len(bad)} of {len(told)} matrices outside the active block held NaN or "
                "infinity, first "
                f"that of {bad[0]}. These matrices kept their values; others may have had their update of "
                "this backward "
                "pass, the active block hasn't. Lower lr or lr_scale, or skip the batch."
            )

    def forget(self) -> None:
        """Drop the flags of a backward pass that is given up."""
        self._broken.clear()

    def changed(self) -> float | None:
        """Share of bfloat16 elements that updates really changed since the last call; None if there were no updates."""
        count, self._changed = self._changed, None
        total, self._updated = self._updated, 0
        return None if count is None else float(count) / total

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]

    def _hook(self, name: str, group: Mapping[str, Any]) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def update(p: Tensor) -> None:
            grad = p.grad
            if grad is None:
                return
            if grad.is_sparse:
                raise UsageError(sparse(name))
            average_(grad)
            # The update is masked, because looking at the flag here would wait for the device once a matrix.
            broken = ~torch.isfinite(grad).all()
            grad.masked_fill_(broken, 0)
            self._broken.append((name, broken))
            self.draws += 1
            beta = float(group["lr"]) * self.rule.lr_scale / (self.batches if self.rule.sign else 1)
            narrow = p.dtype.itemsize < 4
            before = p.detach().clone() if narrow else None
            sgd_update_(
                p,
                grad,
                beta,
                sign=self.rule.sign,
                rounding=self.rule.rounding,
                generator=self._generator(p) if narrow else None,
            )
            if before is not None:
                count = (p != before).sum()
                self._changed = count if self._changed is None else self._changed.to(count.device) + count
                self._updated += p.numel()
            p.grad = None

        return update

    def _generator(self, p: Tensor) -> torch.Generator:
        """Equal on all ranks and after a resume; another one for each update."""
        return torch.Generator(p.device).manual_seed((self.rule.seed * 1_000_003 + self.draws) % 2**63)


def no_copy(optimizer: torch.optim.Optimizer) -> UsageError:
    """What to say about a copy or a pickle of an optimizer that lives in hooks."""
    name = type(optimizer).__name__
    return UsageError(
        f"{name} works through hooks on its model's parameters, which a copy or pickle of it would lack. Copy "
        f"the model, build {name} for the copy, and hand on state_dict() with load_state_dict()."
    )


def sparse(name: str) -> str:
    """What to say about a sparse gradient."""
    return (
        f"Parameter {name} has a sparse gradient, as an embedding with sparse=True makes. Use sparse=False: neither "
        "Adam's state nor an update during the backward pass is made for it."
    )
