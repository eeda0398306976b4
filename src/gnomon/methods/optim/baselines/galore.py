"""GaLore: AdamW on gradients projected to their leading singular directions, full weights trained.

Paper: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", ICML 2024,
       arXiv:2403.03507.
Here:  the projector, the optimizer, the groups of a language model.
Not here: 8-bit moments, layer-wise updates in the backward pass.
Inferred: moments stay as they are when the projector changes, as in the paper's algorithm; a rank above a matrix's
       smaller side means full rank there.
Differs from the paper: decay comes before the step, as in torch's AdamW.

Shapes: W, G m × n; rank r. Left: P (m, r), R = PᵀG (r, n); right: P (n, r), R = G P (m, r). State: the projector and
two moments of R, mr + 2nr numbers on the left.

>>> import torch
>>> w = torch.nn.Parameter(torch.randn(8, 12))
>>> optimizer = GaLore([{"params": [w], "rank": 2}], lr=1e-2)
>>> w.square().sum().backward()
>>> optimizer.step()
>>> {name: tuple(value.shape) for name, value in optimizer.state[w].items()}
{'step': (), 'projector': (8, 2), 'exp_avg': (2, 12), 'exp_avg_sq': (2, 12)}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gnomon.core.errors import NumericalFailure, UsageError, number, unknown
from gnomon.core.layers import linears

PROJ_TYPES = ("std", "reverse_std", "left", "right")


def side_of(rows: int, columns: int, proj_type: str) -> str:
    """Which side of the gradient is projected: "std" the smaller one, so that the moments are smaller, too."""
    if proj_type in ("left", "right"):
        return proj_type
    return "left" if (rows < columns) == (proj_type == "std") else "right"


def projector(g: Float[Tensor, "m n"], rank: int, side: str) -> Float[Tensor, "d r"]:
    """The `rank` leading left or right singular vectors of G, as columns, from an SVD in float32 or better."""
    wide = g.to(torch.promote_types(g.dtype, torch.float32))
    u, _, vh = torch.linalg.svd(wide, full_matrices=False)
    p: Tensor = (u if side == "left" else vh.mT)[:, :rank]
    return p.to(g.dtype).clone(memory_format=torch.contiguous_format)  # not a view of the whole factor


def project(g: Float[Tensor, "m n"], p: Float[Tensor, "d r"], side: str) -> Float[Tensor, "a b"]:
    """PᵀG or G P."""
    return p.mT @ g if side == "left" else g @ p


def project_back(low: Float[Tensor, "a b"], p: Float[Tensor, "d r"], side: str) -> Float[Tensor, "m n"]:
    """P R or R Pᵀ."""
    return p @ low if side == "left" else low @ p.mT


class GaLore(torch.optim.Optimizer):
    r"""AdamW inside the projected space, for groups that name a `rank`; torch's AdamW for the others.

    .. math:: W_t = (1 - ηλ) W_{t-1} - η α P \, \mathrm{Adam}(P^T G_t)

    with P anew from G every `update_proj_gap` steps. Adam works entry by entry and so depends on the basis: at full
    rank this is AdamW only where P is a signed permutation.

    Args:
        params: parameters or groups of them; matrices in groups with a `rank`.
        lr, betas, eps, weight_decay: η, those of AdamW, and λ.
        rank: of all groups that name none; None is AdamW.
        update_proj_gap: T, steps of one projector.
        scale: α.
        proj_type: one of `PROJ_TYPES`, see :func:`side_of`.

    Raises:
        UsageError: an option out of range, or a rank for what isn't a matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "proj_type": proj_type,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where `param_group` names them.

        Raises:
            UsageError: as the constructor; the optimizer is then as before.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
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
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        rank = group["rank"]
        if not state:
            state["step"] = torch.tensor(0.0)
        if rank is None:
            self._adamw(p, grad, state, group, group["weight_decay"])
            return
        side = side_of(p.shape[0], p.shape[1], group["proj_type"])
        if int(state["step"]) % group["update_proj_gap"] == 0:
            state["projector"] = projector(grad, min(rank, *p.shape), side)
        low = project(grad, state["projector"], side)
        change = torch.zeros_like(low)  # what AdamW makes of zero is the step itself
        self._adamw(change, low, state, group, 0.0)
        # One rounding per step: in bfloat16 a decay of 1e-4 alone would round to nothing.
        w = p.to(torch.promote_types(p.dtype, torch.float32))  # p itself unless it is narrower
        w.mul_(1 - float(group["lr"]) * group["weight_decay"])
        w.add_(project_back(change, state["projector"], side).to(w.dtype), alpha=group["scale"])
        if w is not p:
            p.copy_(w)

    def _adamw(
        self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], decay: float
    ) -> None:
        """torch's own step on p, with moments of the gradient's shape."""
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        adamw(
            [p],
            [grad],
            exp_avgs=[state["exp_avg"]],
            exp_avg_sqs=[state["exp_avg_sq"]],
            max_exp_avg_sqs=[],
            state_steps=[state["step"]],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=decay,
            eps=group["eps"],
            maximize=False,
        )

    def _require_finite(self) -> None:
        """One look at all gradients before anything changes; an SVD of NaN would fail halfway."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return
        if any(g.is_sparse for g in grads):
            raise UsageError(
                "A sparse gradient, as an embedding with sparse=True makes, has no projection. Use sparse=False."
            )
        finite = torch.stack([torch.isfinite(g).all().to(grads[0].device) for g in grads])
        if not bool(finite.all()):
            raise NumericalFailure(
                f"The gradients of {int((~finite).sum())} of {len(grads)} parameters hold NaN or infinity. Weights and "
                "state are as before this step. Lower the learning rate, clip gradients, or skip the batch."
            )


def galore_param_groups(model: nn.Module, rank: int, **options: Any) -> list[dict[str, Any]]:
    """Groups for :class:`GaLore`: the weights of linear layers inside the decoder with `rank`, the others without.

    Args:
        options: others for the projected group, such as `scale`.

    Raises:
        UsageError: the model has no decoder layers.
    """
    hidden = [
        p for m in linears(model).values() if isinstance(p := m.weight, nn.Parameter) and p.requires_grad
    ]
    known = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return [{"params": hidden, "rank": rank, **options}, {"params": rest}]


def _check(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps", "scale"):
        if not 0 <= number(group[name]) < math.inf:
            raise UsageError(f"{name}={group[name]!r} must be finite and not negative.")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= number(b) < 1 for b in betas):
        raise UsageError(f"betas={betas!r} must lie in [0, 1), two numbers.")
    if group["proj_type"] not in PROJ_TYPES:
        raise unknown("proj_type", str(group["proj_type"]), PROJ_TYPES)
    for name in ("rank", "update_proj_gap"):
        value = group[name]
        if name == "rank" and value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value} must be a whole number, at least 1.")
    for p in group["params"]:
        if group["rank"] is not None and (
            p.ndim != 2 or not p.is_floating_point() or hasattr(p, "full_tensor")
        ):
            kind = "sharded" if hasattr(p, "full_tensor") else f"of dtype {p.dtype}"
            raise UsageError(
                f"A parameter of shape {tuple(p.shape)}, {kind}, has rank={group['rank']}, but GaLore projects whole "
                "matrices of real numbers. Put it into a group without a rank (galore_param_groups(model, rank))."
            )
