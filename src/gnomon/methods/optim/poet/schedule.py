"""When to merge: every T_m optimizer steps, with a fresh optimizer state and a gentle start after each merge.

Hooks of the optimizer do it, so that any loop that calls `optimizer.step()` is enough. The counts live in the layers'
state, hence in `model.state_dict()`: a run that is cut off between two merges goes on where it was.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gnomon.core.errors import NumericalFailure, UsageError, number

from .apply import require_layers
from .layer import POETLinear

logger = logging.getLogger(__name__)

_active: weakref.WeakKeyDictionary[nn.Module, weakref.ref[MergeSchedule]] = weakref.WeakKeyDictionary()
"""First POET layer of a model -> its schedule: of several made for one model only the newest counts steps."""


def clip_factor(merges: int, steps: int, ramp: int) -> float:
    """Share of the clipping threshold: .1 in the first step after a merge, 1 after `ramp` steps or before any merge."""
    return 1.0 if merges == 0 or steps >= ramp else 0.1 + 0.9 * steps / ramp


class MergeSchedule:
    """Looks at gradients before an optimizer's step, counts after it, and merges when T_m steps are done.

    Args:
        model: with POET layers; may be inside DistributedDataParallel or the like.
        optimizer: holds the rotations, perhaps inside wrappers such as AcceleratedOptimizer.
        clip: the loop's threshold of the global gradient norm, which is lowered after each merge. None lowers nothing.

    Raises:
        UsageError: no POET layers, rotations that the optimizer doesn't hold, sharded ones, or a useless `clip`.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, clip: float | None = None) -> None:
        if clip is not None and not number(clip) > 0:
            raise UsageError(f"clip={clip!r} must be a positive norm, or None.")
        self.layers = require_layers(model)
        self.optimizer = innermost(optimizer)
        self.clip = clip
        self.cfg = self._first.cfg
        self._require_held()
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        _active[self._first] = weakref.ref(self)

    @property
    def _first(self) -> POETLinear:
        return next(iter(self.layers.values()))

    @property
    def active(self) -> bool:
        """Whether this is the newest schedule of its model, not detached."""
        found = _active.get(self._first)
        return found is not None and found() is self

    @property
    def merges(self) -> int:
        """Merges so far."""
        return self._first.merges

    @property
    def steps(self) -> int:
        """Steps since the last merge."""
        return self._first.steps

    def unhook(self) -> None:
        """Leave the optimizer alone: whoever made this calls `before_step` and `after_step`."""
        for handle in self._handles:
            handle.remove()

    def detach(self) -> None:
        """Merge no more."""
        self.unhook()
        if self.active:
            del _active[self._first]

    # -------------------------------------------------------------------------------------------- the two hooks

    def before_step(self, *, finite: bool = True) -> None:
        """Refuse gradients that would spoil the rotations; clip more than the loop did, if a merge was just now.

        Args:
            finite: look for NaN and infinity; off where a gradient scaler skips such steps by itself.

        Raises:
            UsageError: a rotation without a gradient.
            NumericalFailure: a gradient of a rotation isn't finite; weights and state are as before.
        """
        self._require_gradients(finite)
        factor = clip_factor(self.merges, self.steps, self.cfg.clip_ramp_steps)
        if self.clip is not None and factor < 1:
            params = [
                p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            clip_grads_with_norm_(params, factor * self.clip, get_total_norm([p.grad for p in params]))

    def after_step(self) -> bool:
        """Count a step; merge if T_m are done. Returns whether it merged."""
        for layer in self.layers.values():
            layer.steps += 1
        if self.steps < self.cfg.merge_interval:
            return False
        self.merge()
        return True

    def merge(self) -> None:
        """Merge all layers now, draw the next permutations (rank 0's count), and clear the optimizer's state of q.

        Raises:
            NumericalFailure: rotations that aren't finite; nothing is merged.
        """
        layers = list(self.layers.values())
        for layer in layers:
            layer.require_rotation()
        drawn = [layer.draw(layer.generator(i)) for i, layer in enumerate(layers)]
        for layer, permutations in zip(layers, _from_rank_0(drawn, layers[0]), strict=True):
            layer.reinit(*permutations)
            for q in (layer.q_out, layer.q_in):
                self.optimizer.state.pop(q, None)
        logger.info("POET: merge %d of %d layers", self.merges, len(layers))

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [one for one in args if one is not optimizer]  # torch passes the optimizer itself, too
        closure = given[0] if given else kwargs.get("closure")
        if self.active and closure is None:  # a closure makes the gradients later, inside the step
            self.before_step(finite=getattr(optimizer, "found_inf", None) is None)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active:
            self.after_step()

    # ------------------------------------------------------------------------------------------------ refusals

    def _rotations(self) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{side}": getattr(layer, side)
            for name, layer in self.layers.items()
            for side in ("q_out", "q_in")
        }

    def _require_held(self) -> None:
        rotations = self._rotations()
        if sharded := next((name for name, q in rotations.items() if hasattr(q, "full_tensor")), None):
            raise UsageError(
                f"{sharded} is sharded, but a merge needs whole rotations and weights. POET holds few trained numbers: "
                "use data parallelism."
            )
        decays = {
            id(p): group.get("weight_decay", 0)
            for group in self.optimizer.param_groups
            for p in group["params"]
        }
        if missing := [name for name, q in rotations.items() if id(q) not in decays]:
            raise UsageError(
                f"{len(missing)} of {len(rotations)} rotations aren't in the optimizer, first {missing[0]}: it was "
                "built before apply_poet, or from other parameters. Build it from poet_param_groups(model, …)."
            )
        if decayed := [name for name, q in rotations.items() if decays[id(q)] > 0]:
            logger.warning(
                "The optimizer decays %d rotations, first %s: weight decay pulls them to the identity, not the weights "
                "to zero. poet_param_groups(model, …) gives them none.",
                len(decayed),
                decayed[0],
            )

    def _require_gradients(self, finite: bool) -> None:
        rotations = self._rotations()
        if missing := [name for name, q in rotations.items() if q.grad is None]:
            raise UsageError(
                f"{len(missing)} of {len(rotations)} rotations have no gradient, first {missing[0]}: the layer was not "
                "used in this step, its input and rotations were frozen, or backward wasn't called. Leave an unused "
                "layer out with exclude_modules."
            )
        if not finite:
            return
        norms = torch.stack([q.grad.norm().to(self._first.q_out.device) for q in rotations.values()])  # type: ignore[union-attr]
        if not bool(torch.isfinite(norms).all()):
            bad = [
                name for name, fine in zip(rotations, torch.isfinite(norms).tolist(), strict=True) if not fine
            ]
            raise NumericalFailure(
                f"The gradients of {len(bad)} of {len(rotations)} rotations hold NaN or infinity, first that of "
                f"{bad[0]}. Weights and state are as before this step. Lower the learning rates, clip gradients, or "
                "skip the batch."
            )


def merge_on_schedule(model: nn.Module, optimizer: Any, *, clip: float | None = None) -> MergeSchedule:
    """Let `optimizer.step()` merge every `cfg.merge_interval` steps; see :class:`MergeSchedule`.

    A step with a closure is counted but its gradients aren't looked at.
    """
    return MergeSchedule(model, optimizer, clip=clip)


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers that have an `optimizer` attribute.

    Raises:
        UsageError: there is none.
    """
    inner = optimizer
    while (held := getattr(inner, "optimizer", None)) is not None:
        inner = held
    if not isinstance(inner, torch.optim.Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is no torch optimizer and holds none, so its state of the rotations can't "
            "be cleared at a merge."
        )
    return inner


def _from_rank_0(drawn: list[tuple[Tensor, Tensor]], layer: POETLinear) -> list[tuple[Tensor, Tensor]]:
    """The permutations that rank 0 drew, on every rank, in one message."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return drawn
    lengths = [len(p) for pair in drawn for p in pair]
    flat = torch.cat([p for pair in drawn for p in pair]).to(layer.q_out.device)
    dist.broadcast(flat, src=0)
    cut = torch.split(flat, lengths)
    return list(zip(cut[::2], cut[1::2], strict=True))
