"""LOMO: plain gradient steps inside the backward pass, so that one gradient lives at a time.

Method: low-memory optimisation (LOMO), as the BREAD paper uses it: BREAD-SGD on everything, without a block for Adam.
Here:  the optimizer. There is no state but the count of random draws.
Not here: LOMO's own clipping and loss scaling, AdaLomo.
Differs: bfloat16 weights are rounded stochastically by default; to the nearest most updates of a fine-tuning rate
       vanish.

>>> import torch
>>> layer = torch.nn.Linear(3, 1)
>>> optimizer = LOMO(layer, lr=0.1)
>>> before = layer.weight.detach().clone()
>>> layer(torch.ones(2, 3)).mean().backward()                 # the update happens here
>>> optimizer.step()                                          # looks whether all gradients were finite
>>> layer.weight.grad is None, torch.allclose(layer.weight, before - 0.1)
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError, number

from ..bread.expansion import SGDExpansion
from ..bread.on_the_fly import OnTheFly, no_copy


class LOMO(torch.optim.Optimizer):
    """W ← W − lr · g for every parameter, during the backward pass.

    With several batches a step each of them moves the weights; divide losses by their number as usual. Clipping by
    the global norm can't be had, because the gradients are gone by then.

    Args:
        params: a model, whose trainable parameters are taken, or parameters, named or not, or groups of them.
        lr: may be scheduled; the value at the time of the backward pass counts.
        sign: steps of the gradient's sign.
        batches: batches a step, by which a step of signs is divided.
        rounding, seed: of bfloat16 weights, see :class:`SGDExpansion`.

    Raises:
        UsageError: a rate out of range, float16 weights, a model wrapped by DistributedDataParallel.
    """

    updates_in_backward = True
    """For training loops: no gradient is left to look at."""
    averages_gradients = True
    """For training loops: over the ranks, so that the model is left unwrapped."""

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        *,
        sign: bool = False,
        batches: int = 1,
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        seed: int = 0,
    ) -> None:
        if isinstance(params, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise UsageError(
                f"The model is wrapped in {type(params).__name__}, which reduces gradients after they were used here. "
                "Leave it unwrapped: gradients are averaged over the processes before each update."
            )
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        rule = SGDExpansion(lr_scale=1.0, sign=sign, rounding=rounding, seed=seed, batches=batches)
        self.on_the_fly = OnTheFly(rule)
        super().__init__(params, {"lr": lr})
        self._attach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if not 0 <= number(lr := self.param_groups[-1]["lr"]) < math.inf:
            self.param_groups.pop()
            raise UsageError(f"lr={lr!r} must be finite and not negative.")
        for p in self.param_groups[-1]["params"]:
            if p.dtype == torch.float16:
                self.param_groups.pop()
                raise UsageError(
                    f"A parameter of shape {tuple(p.shape)} is float16, whose gradients need a loss scale "
                    "that an update "
                    "during the backward pass can't see. Use bfloat16 or float32."
                )
        if hasattr(self, "_attached"):
            self._attach()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """All is done already; raises if a gradient since the last step wasn't finite.

        Raises:
            NumericalFailure: naming the first such parameter, which kept its value; others may have moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.on_the_fly.require_finite()
        self._require_used()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.on_the_fly.forget()

    def close(self) -> None:
        """Stop updating: backward passes leave gradients again."""
        self.on_the_fly.detach()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "on_the_fly": self.on_the_fly.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "on_the_fly" not in state_dict:
            raise UsageError(
                "The saved state isn't LOMO's. Resume with the optimizer that wrote it, or begin a new run."
            )
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.on_the_fly.load_state_dict(state_dict["on_the_fly"])
        self._attach()  # groups are new objects after loading

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would have no hooks.

        Raises:
            UsageError: always.
        """
        raise no_copy(self)

    def _require_used(self) -> None:
        left = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if left:
            raise UsageError(
                f"{len(left)} parameters have gradients that no update used, the first of shape "
                f"{tuple(left[0].shape)}: they were frozen when LOMO was built, or it was closed. Set requires_grad "
                "before building it."
            )

    def _attach(self) -> None:
        rows: list[tuple[str, Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            names = group.get("param_names", [f"of shape {tuple(p.shape)}" for p in group["params"]])
            rows += [(n, p, group) for n, p in zip(names, group["params"], strict=True) if p.requires_grad]
        self.on_the_fly.attach(rows)
        self._attached = True
