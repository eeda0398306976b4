"""The optimizers of matrices: :class:`NuMuon`, and :class:`Muon`, its full-rank case."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, unknown

from .lmo import BACK_ENDS, NS_COEFFICIENTS, NS_STEPS, newton_schulz, top_k
from .schedule import RankSchedule
from .sharded import as_sharded, whole
from .split import split_muon_params, why_not_muon

logger = logging.getLogger(__name__)

LR_ADJUSTS = ("match_rms_adamw", "original", None)
FULL_RANKS = ("ns", "svd")


def shape_scale(rows: int, columns: int, lr_adjust: str | None) -> float:
    """s(m, n), which multiplies the learning rate of the update but not of the decay.

    `match_rms_adamw` (Moonlight) is 0.2 √max(m, n), with which an update has root mean square 0.2 √(k/q): at full
    rank AdamW's, so that AdamW's learning rate and decay carry over. `original` is √max(1, m/n); None is 1.
    """
    if lr_adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if lr_adjust == "original" else 1.0


class NuMuon(torch.optim.Optimizer):
    r"""Muon whose update keeps only the k leading singular directions of the momentum.

    .. math::
        M_t &= β M_{t-1} + (1 - β) G_t \\
        W_t &= (1 - ηλ) W_{t-1} - η \, s(m, n) \, U_k V_k^T, \quad k = ⌈r(t) \min(m, n)⌉

    with U_k, V_k of M_t (of (1 − β)G_t + βM_t with `nesterov`). The decay is the conditional-gradient form of
    Algorithm 1: W_t = (1 − ηλ) W_{t−1} + ηλ (−s/λ U_k V_kᵀ) stays within ‖W‖₂ ≤ s/λ and ‖W‖_* ≤ ks/λ.

    For matrices inside the network only: embeddings, the head and vectors belong to another optimizer
    (:func:`split_muon_params`), or to the same one in :class:`MuonWithAdamW`. Kernels of four or more
    dimensions count as a matrix of outputs × rest.

    Random columns depend on `seed`, the step and the parameter's position alone, so replicas of data parallelism
    stay equal and a resumed run draws what an uncut one would have drawn. Sharded parameters (DTensor) are
    gathered one at a time, and every rank computes the same update.

    State: the momentum, and with `warm_start` the last q × k factor, both in the parameter's dtype. With bfloat16
    weights so is the momentum; keep float32 weights and autocast for a float32 one.

    Args:
        params: matrices, named or not, or groups of them, or a model, of which the hidden matrices are taken.
        lr: η. 1e-2 in the paper, whose s is unknown; with the default s AdamW's learning rate fits.
        weight_decay: λ.
        momentum: β in [0, 1).
        nesterov: off in Algorithm 1.
        rank_fraction: r in (0, 1] or a :class:`RankSchedule`.
        topk: one of `BACK_ENDS`, see :func:`top_k`.
        krylov_iters, oversample: L and p of the randomised ones.
        warm_start: the randomised ones begin with the last step's singular vectors.
        full_rank: at k = q, Newton-Schulz as in Muon (`ns`), whose singular values are .7 to 1.13, or exact ones
            (`svd`), which let the update's norm change smoothly as k leaves q.
        lr_adjust: one of `LR_ADJUSTS`, see :func:`shape_scale`.
        ns_coefficients, ns_steps: of Newton-Schulz.
        ns_dtype: of its products; None is bfloat16, and float32 on a CPU, where bfloat16 may be far slower.
        seed: of the random columns.

    Raises:
        UsageError: an option out of range, or a parameter that isn't a hidden matrix.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = False,
        *,
        rank_fraction: float | RankSchedule = 1.0,
        topk: str = "krylov",
        krylov_iters: int = 2,
        oversample: int = 8,
        warm_start: bool = True,
        full_rank: str = "ns",
        lr_adjust: str | None = "match_rms_adamw",
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        ns_steps: int = NS_STEPS,
        ns_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(params, nn.Module):
            params, other = split_muon_params(params)
            logger.warning(
                "NuMuon takes %d matrices of the model and leaves %d other parameters as they are. Give these to "
                "another optimizer (split_muon_params), or use MuonWithAdamW(model).",
                len(params),
                len(other),
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "rank_fraction": rank_fraction,
            "topk": topk,
            "krylov_iters": krylov_iters,
            "oversample": oversample,
            "warm_start": warm_start,
            "full_rank": full_rank,
            "lr_adjust": lr_adjust,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "seed": seed,
            "step": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices, with options of their own where `param_group` names them.

        Raises:
            UsageError: as the constructor; the optimizer is then as before.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            names = group.get("param_names", [None] * len(group["params"]))
            for name, parameter in zip(names, group["params"], strict=True):
                _check_matrix(name, parameter)
            group["rank_fraction"] = RankSchedule.of(group["rank_fraction"]).plain()
        except UsageError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay as they are.

        Returns:
            what `closure` returned, called with gradients switched on.

        Raises:
            NumericalFailure: a gradient isn't finite; weights and state are as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_finite()
        position = 0
        for group in self.param_groups:
            self._step_group(group, position)
            group["step"] += 1
            position += len(group["params"])
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken.

        Raises:
            UsageError: the state isn't of this kind, or its rank schedule is another: k would jump unseen.
        """
        for i, (old, own) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            if (
                missing := own.keys() - old.keys() - {"param_names", "initial_lr"}
            ):  # schedulers add the second
                raise UsageError(
                    f"Group {i} of the saved state lacks {', '.join(sorted(missing))}: it was saved by another "
                    f"optimizer than {type(self).__name__}. Load it with that one, or begin with a fresh state."
                )
            if "rank_fraction" in own:
                _require_same_schedule(i, old, own)
        super().load_state_dict(dict(state_dict))

    def _require_finite(self) -> None:
        """One look at all gradients before anything changes; one synchronisation with the device."""
        zeros: list[Tensor] = []
        told: list[str] = []
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for name, p in zip(names, group["params"], strict=True):
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise UsageError(
                        f"Parameter {name or tuple(p.shape)} has a sparse gradient, as an embedding with sparse=True "
                        "makes. Use sparse=False, or torch.optim.SparseAdam for it."
                    )
                zeros.append(whole((p.grad * 0).sum()))  # or NaN; a rank's share of the gradient may be empty
                told.append(name or f"of shape {tuple(p.shape)}")
        if not zeros:
            return
        finite = torch.stack([zero.to(zeros[0]) for zero in zeros]) == 0
        if not bool(finite.all()):
            bad = [what for what, fine in zip(told, finite.tolist(), strict=True) if not fine]
            raise NumericalFailure(
                f"The gradients of {len(bad)} of {len(told)} parameters hold NaN or infinity, first that {bad[0]}. "
                "Weights and state are as before this step. Lower the learning rate, clip gradients, or skip the batch."
            )

    def _step_group(self, group: dict[str, Any], position: int) -> None:
        for index, p in enumerate(group["params"]):
            if p.grad is not None and p.numel():
                self._update(p, p.grad, group, position + index)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        averaged = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        m = whole(averaged).flatten(1)  # (m, n), the whole matrix on every rank
        step = as_sharded(_direction(m, group, state, index).reshape(p.shape), p)
        # One rounding per step: in bfloat16 a decay of 1e-4 alone would round to nothing.
        w = p.to(torch.promote_types(p.dtype, torch.float32))  # p itself unless it is narrower
        lr = float(group["lr"])
        w.mul_(1 - lr * group["weight_decay"])
        w.add_(step.to(w.dtype), alpha=-lr * shape_scale(m.shape[0], m.shape[1], group["lr_adjust"]))
        if w is not p:
            p.copy_(w)


class Muon(NuMuon):
    """NuMuon at full rank, with Nesterov's momentum and Newton-Schulz by default: the baseline on equal code.

    Args:
        params: as for :class:`NuMuon`.
        options: the others of :class:`NuMuon`, except what concerns the rank.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        **options: Any,
    ) -> None:
        if options.get("rank_fraction", 1.0) != 1.0:
            raise UsageError(
                f"Muon has full rank, so rank_fraction={options['rank_fraction']} must be 1. Use NuMuon."
            )
        super().__init__(params, lr, weight_decay, momentum, nesterov, **options)


def _direction(m: Tensor, group: dict[str, Any], state: dict[str, Any], index: int) -> Tensor:
    """U_k V_kᵀ of m (its approximation by Newton-Schulz at full rank); keeps the factor for the next step."""
    q = min(m.shape)
    k = RankSchedule.of(group["rank_fraction"]).rank(group["step"], q)
    if k == q and group["full_rank"] == "ns":
        dtype = group["ns_dtype"] or (torch.float32 if m.device.type == "cpu" else torch.bfloat16)
        return newton_schulz(m, steps=group["ns_steps"], coefficients=group["ns_coefficients"], dtype=dtype)
    method = "svd" if k == q else group["topk"]
    warm = group["warm_start"] and method in ("krylov", "lowrank")
    f = top_k(
        m,
        k,
        method=method,
        iters=group["krylov_iters"],
        oversample=group["oversample"],
        start=state.get("basis") if warm else None,
        generator=_generator(group["seed"], group["step"], index, m.device),
    )
    if warm:
        side = f.v if m.shape[1] <= m.shape[0] else f.u  # (q, k)
        # In the parameter's dtype, because load_state_dict converts to it; contiguous, to keep no wider storage.
        state["basis"] = torch.empty(side.shape, dtype=m.dtype, device=m.device).copy_(side)
    return f.direction


def _generator(seed: int, step: int, index: int, device: torch.device) -> torch.Generator:
    """Equal on all ranks and after a resume; another one for each step and parameter."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + index
    return torch.Generator(device).manual_seed(mixed % 2**63)


# ---------------------------------------------------------------------------------------------- refusals


def _check_options(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise UsageError(f"{name}={group[name]} must be finite and not negative.")
    if not 0 <= group["momentum"] < 1:
        raise UsageError(
            f"momentum={group['momentum']} must lie in [0, 1): it is the old average's share of the new one."
        )
    for name, least in (("krylov_iters", 1), ("oversample", 0), ("ns_steps", 1), ("step", 0)):
        if not isinstance(group[name], int) or group[name] < least:
            raise UsageError(f"{name}={group[name]} must be a whole number, at least {least}.")
    if len(group["ns_coefficients"]) != 3:
        raise UsageError(f"ns_coefficients={group['ns_coefficients']} must be the three numbers a, b, c.")
    if group["topk"] not in BACK_ENDS:
        raise unknown("topk", group["topk"], BACK_ENDS)
    if group["full_rank"] not in FULL_RANKS:
        raise unknown("full_rank", group["full_rank"], FULL_RANKS)
    if group["lr_adjust"] not in LR_ADJUSTS:
        raise unknown("lr_adjust", str(group["lr_adjust"]), [name for name in LR_ADJUSTS if name])


def _check_matrix(name: str | None, p: Tensor) -> None:
    told = (
        f"Parameter {name!r} of shape {tuple(p.shape)}" if name else f"A parameter of shape {tuple(p.shape)}"
    )
    way_out = (
        "Use split_muon_params(model) to give it to AdamW, or MuonWithAdamW(model) for both in one object"
    )
    if not p.is_floating_point():
        raise UsageError(f"{told} has dtype {p.dtype}, but singular vectors need real numbers. {way_out}.")
    if p.ndim < 2:
        raise UsageError(
            f"{told} has {p.ndim} dimension{'s' * (p.ndim != 1)}, but NuMuon needs matrices: a vector has one singular "
            f"value. {way_out}. The flat parameters of FSDP 1 are vectors too: shard with fully_shard (FSDP 2)."
        )
    if p.ndim == 3:
        raise UsageError(
            f"{told} may be a stack of experts or a kernel of a one-dimensional convolution, which need different "
            f"treatment. {way_out}, or hold the experts as separate matrices."
        )
    if name and (reason := why_not_muon(name)):
        raise UsageError(f"{told} {reason}. {way_out}. To insist, pass it without its name.")


def _require_same_schedule(i: int, old: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    saved, mine = RankSchedule.of(old["rank_fraction"]), RankSchedule.of(own["rank_fraction"])
    if saved != mine:
        t = old["step"]
        raise UsageError(
            f"Group {i} of the saved state had a rank schedule {saved}, this optimizer has {mine}: after step {t} the "
            f"rank fraction would jump from {saved.fraction(t):.4g} to {mine.fraction(t):.4g}. Build the optimizer "
            f"with the saved schedule (total_steps={saved.total_steps}); to change it on purpose, load and then set "
            "optimizer.param_groups[i]['rank_fraction']."
        )
