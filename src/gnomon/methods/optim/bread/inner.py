"""The base optimizer over wide copies of narrow weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon.core.errors import UsageError

HYPER = ("lr", "betas", "eps", "weight_decay")
"""What a group of the outer optimizer hands to the base optimizer before each step."""

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""States of torch's Adam family that have their parameter's shape."""

Group = Mapping[str, Any]


def require_base(base: Any) -> None:
    """Refuse a base that isn't of Adam's family, before any model is touched."""
    known = inspect.signature(base).parameters if callable(base) else {}
    if missing := [name for name in HYPER if name not in known]:
        raise UsageError(
            f"base={getattr(base, '__name__', base)!r} takes no {', '.join(missing)}. Give a class of Adam's family, "
            "called with groups, lr, betas, eps and weight_decay: torch.optim.AdamW, Adam, NAdam or RAdam."
        )


class MasteredOptimizer:
    """A base optimizer for parameters, some of which are narrower than `master_dtype` and get a master copy.

    The masters are made here, so an object of this class lives exactly as long as its state should.
    """

    def __init__(
        self, base: Any, groups: Sequence[tuple[Group, Sequence[Tensor]]], master_dtype: torch.dtype
    ) -> None:
        self.outer = [group for group, _ in groups]
        self.params = [list(params) for _, params in groups]
        self.masters = [[_master(p, master_dtype) for p in params] for params in self.params]
        made = [
            {"params": masters, **_hyper(group)}
            for group, masters in zip(self.outer, self.masters, strict=True)
        ]
        self.optimizer: torch.optim.Optimizer = base(made, **_hyper(self.outer[0]))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, master); the same tensor twice where no copy is needed."""
        rows = zip(self.params, self.masters, strict=True)
        return [pair for params, masters in rows for pair in zip(params, masters, strict=True)]

    @torch.no_grad()
    def step(self) -> None:
        """One step with the outer groups' present rates; a narrow gradient is freed when it was widened."""
        for group, outer in zip(self.optimizer.param_groups, self.outer, strict=True):
            group.update(_hyper(outer))
        for p, master in self.pairs():
            if master is not p:
                master.grad = None if p.grad is None else p.grad.to(master.dtype)
                p.grad = None
        self.optimizer.step()
        for p, master in self.pairs():
            if master is not p and master.grad is not None:
                p.copy_(master)
                master.grad = None

    def view(self) -> dict[Tensor, dict[str, Any]]:
        """The state by parameter, master included."""
        found = {}
        for p, master in self.pairs():
            own = dict(self.optimizer.state.get(master, {}))
            found[p] = own if master is p else {**own, "master": master}
        return found

    def state_dict(self) -> dict[str, Any]:
        wide = [None if master is p else master.detach() for p, master in self.pairs()]
        return {"optimizer": self.optimizer.state_dict(), "masters": wide}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        flat = [master for masters in self.masters for master in masters]
        for i, own in state["optimizer"]["state"].items():
            for name, value in own.items():
                if name in MOMENTS and value.shape != flat[i].shape:
                    raise UsageError(
                        f"The saved state's {name} of parameter {i} has the shape {tuple(value.shape)}, the parameter "
                        f"here {tuple(flat[i].shape)}: it belongs to a model of another size. Build that one."
                    )
        self.optimizer.load_state_dict(state["optimizer"])
        for (p, master), saved in zip(self.pairs(), state["masters"], strict=True):
            if (saved is None) != (master is p):
                raise UsageError(
                    f"The saved state has {'no' if saved is None else 'a'} wide copy of a parameter that is "
                    f"{p.dtype} here: "
                    "the model was saved in another dtype. Load the model in that one."
                )
            if saved is not None:
                master.copy_(saved)


def _hyper(group: Group) -> dict[str, Any]:
    return {name: group[name] for name in HYPER}


def _master(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.detach().to(dtype) if p.dtype.itemsize < dtype.itemsize else p
