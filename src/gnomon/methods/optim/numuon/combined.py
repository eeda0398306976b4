"""Muon for the matrices and AdamW for the rest, as one optimizer object with two kinds of group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from gnomon.core.errors import UsageError, unknown

from .optimizer import NuMuon
from .split import split_muon_params

GROUP_KINDS = ("numuon", "adamw")
BETAS, EPS = (0.9, 0.95), 1e-8


class MuonWithAdamW(NuMuon):
    """One object for what takes one optimizer: a Trainer, a scheduler, a checkpoint.

    Groups have a `kind`, "numuon" or "adamw"; a scheduler scales both rates. The AdamW part is torch's own
    function and state.

    Args:
        params: a model, which :func:`split_muon_params` divides, or matrices or groups of them.
        other: parameters or groups of them for AdamW; with a model in `params` they must be left out.
        lr: of the matrices.
        adamw_lr: of the others; None is `lr`, which fits with the default `lr_adjust`. (The paper: 3e-4 with 1e-2.)
        adamw_weight_decay: None is `weight_decay`.
        betas, eps: of AdamW.
        options: the others of :class:`NuMuon`.

    Raises:
        UsageError: as :class:`NuMuon`; both a model and `other`.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        other: Iterable[Any] = (),
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        **options: Any,
    ) -> None:
        other = list(other)
        if isinstance(params, nn.Module):
            if other:
                raise UsageError(
                    f"A model is split by itself, so {len(other)} other parameters can't be given too. Split with "
                    "split_muon_params(model, other=patterns) and pass both lists."
                )
            params, other = split_muon_params(params)
        super().__init__(params, lr, weight_decay, **options)
        own = {
            "kind": "adamw",
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            "betas": betas,
            "eps": eps,
        }
        groups = other if other and isinstance(other[0], dict) else [{"params": other}]
        for group in groups:
            if group["params"]:
                self.add_param_group({**own, **group})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the `kind` that `param_group` names; by default "numuon".

        Raises:
            UsageError: as the constructor; the optimizer is then as before.
        """
        kind = param_group.setdefault("kind", "numuon")
        if kind not in GROUP_KINDS:
            raise unknown("kind of group", kind, GROUP_KINDS)
        if kind == "numuon":
            super().add_param_group(param_group)
            return
        common = {name: self.defaults[name] for name in ("lr", "weight_decay")}
        group = {**common, "betas": BETAS, "eps": EPS, "step": 0, **param_group}
        _check_adamw(group)
        numuon, self.defaults = self.defaults, {}
        try:
            torch.optim.Optimizer.add_param_group(self, group)
        finally:
            self.defaults = numuon

    def _step_group(self, group: dict[str, Any], position: int) -> None:
        if group["kind"] == "numuon":
            super()._step_group(group, position)
            return
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] |= {"step": torch.tensor(0.0)} | {
                    name: torch.zeros_like(p, memory_format=torch.preserve_format)
                    for name in ("exp_avg", "exp_avg_sq")
                }
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _check_adamw(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps"):
        if not 0 <= group[name] < math.inf:
            raise UsageError(f"{name}={group[name]} of an AdamW group must be finite and not negative.")
    for beta in group["betas"]:
        if not 0 <= beta < 1:
            raise UsageError(f"betas={group['betas']} of an AdamW group must lie in [0, 1).")
