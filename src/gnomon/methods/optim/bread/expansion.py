r"""Landscape expansions: what is done to matrices whose block isn't active.

.. math:: \min_{W_a, C} H(W_a, \{W_j + C_j\}_{j \in J})

C_j is α/r · U_j V_j for LoRA, and the sum of all plain gradient steps for SGD, which is added to W_j at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import UsageError, nearest, number, unknown
from gnomon.core.layers import is_conv1d

ROUNDINGS = ("stochastic", "nearest")
U_NAME, V_NAME, SCALE_NAME = "bread_u", "bread_v", "bread_scale"
PRESETS = ("badam", "bread-lora", "bread-lora+", "bread-sgd", "bread-signsgd")


@dataclass(frozen=True, kw_only=True)
class LoRAExpansion:
    """C_j = α/r · U_j V_j, trained by the base optimizer with a state that is kept for the whole run."""

    rank: int = 8
    """r; 0 is BAdam."""
    alpha: float | None = None
    """α; None is 4 r, as in the paper's plain LoRA (inferred for BREAD)."""
    lr_ratio_u: float = 1.0
    """Rate of U over that of V: 16 is BREAD-LoRA+."""
    targets: tuple[str, ...] | None = None
    """Last parts of the names of linear maps, such as "q_proj"; None is every linear map in a block (inferred)."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 0:
            raise UsageError(f"rank={self.rank} must be a whole number, at least 0 (which is BAdam).")
        if self.alpha is not None and not 0 < number(self.alpha) < math.inf:
            raise UsageError(f"alpha={self.alpha!r} must be positive and finite; None is 4 · rank.")
        if not 0 < number(self.lr_ratio_u) < math.inf:
            raise UsageError(
                f"lr_ratio_u={self.lr_ratio_u!r} must be positive and finite: 1 is LoRA, 16 is LoRA+."
            )
        if self.targets is not None and (isinstance(self.targets, str) or not self.targets):
            raise UsageError(
                f"targets={self.targets!r} must be a tuple of names such as ('q_proj', 'v_proj'), or None for all."
            )

    @property
    def scale(self) -> float:
        """α/r."""
        return 4.0 if self.alpha is None else self.alpha / max(1, self.rank)


@dataclass(frozen=True, kw_only=True)
class SGDExpansion:
    """W_j ← W_j − β g_j (or β sign g_j) during the backward pass, after which g_j is freed.

    These gradients are gone before clipping or a trainer can see them. With several batches a step each of them is a
    step of its own, at weights that the one before has moved.
    """

    lr_scale: float = 5.0
    """β over the learning rate; follows its schedule. 0 is BAdam at BREAD's cost."""
    sign: bool = False
    """signSGD."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of bfloat16 weights. To the nearest, most updates at a fine-tuning rate are below half an ulp and vanish."""
    vectors: bool = False
    """Update norms and biases too, which the paper's matrices are not."""
    seed: int = 0
    """Of stochastic rounding."""
    batches: int = 1
    """Batches of one step, by which a step of signs is divided (losses are by whoever trains)."""

    def __post_init__(self) -> None:
        if not 0 <= number(self.lr_scale) < math.inf:
            raise UsageError(
                f"lr_scale={self.lr_scale!r} must be finite and not negative; 0 changes nothing."
            )
        if not isinstance(self.batches, int) or self.batches < 1:
            raise UsageError(f"batches={self.batches!r} must be at least 1, and whole.")
        if not isinstance(self.seed, int):
            raise UsageError(f"seed={self.seed!r} must be a whole number.")
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)


Expansion = LoRAExpansion | SGDExpansion


def preset(name: str, *, rank: int = 8, lr_scale: float = 5.0) -> Expansion | None:
    """The expansion of a method by its name in the paper, one of `PRESETS`; None for BAdam.

    Raises:
        UsageError: an unknown name.
    """
    if name not in PRESETS:
        raise unknown("BREAD method", name, PRESETS)
    if name == "badam":
        return None
    if name.startswith("bread-lora"):
        return LoRAExpansion(rank=rank, lr_ratio_u=16.0 if name.endswith("+") else 1.0)
    return SGDExpansion(lr_scale=lr_scale, sign=name == "bread-signsgd")


# ------------------------------------------------------------------------------------------- plain steps


def stochastic_round(
    x: Float[Tensor, "*shape"], generator: torch.Generator | None = None
) -> Float[Tensor, "*shape"]:
    """bfloat16 above or below a float32, with the probability that makes the expectation x."""
    bits = x.float().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    # The low half is what bfloat16 drops: adding noise to it carries with the right probability, for either sign.
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


@torch.no_grad()
def sgd_update_(
    p: Tensor,
    grad: Tensor,
    beta: float,
    *,
    sign: bool = False,
    rounding: str = "stochastic",
    generator: torch.Generator | None = None,
) -> None:
    """W ← W − β g, or − β sign g, in place; a bfloat16 weight is rounded once, as `rounding` says."""
    direction = grad.sign() if sign else grad
    if p.dtype == torch.bfloat16 and rounding == "stochastic":
        wide = p.float().sub_(direction, alpha=beta)
        p.copy_(stochastic_round(wide, generator))
    else:
        p.sub_(direction, alpha=beta)


# --------------------------------------------------------------------------------------------- adapters


def linears_of(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Name -> linear map, for those whose weight is among the named parameters."""
    wanted = set(names)
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and f"{name}.weight" in wanted
    }


def pick_targets(found: Mapping[str, nn.Module], targets: tuple[str, ...] | None) -> dict[str, nn.Module]:
    """Those linear maps that `targets` names.

    Raises:
        UsageError: a target that matches nothing, or no linear map at all.
    """
    last = {name: name.rpartition(".")[2] for name in found}
    for target in targets or ():
        if target not in last.values():
            raise UsageError(
                f"The target {target!r} matches no linear map in a block.{nearest(target, set(last.values()))}"
            )
    if not found:
        raise UsageError("The blocks hold no linear map, so LoRA has nothing to expand. Use SGDExpansion().")
    return {name: m for name, m in found.items() if targets is None or last[name] in targets}


class Adapters:
    """U_j and V_j as parameters of the linear maps themselves, added by forward hooks until they are removed.

    They lie in float32 (`dtype`) and take part in the forward pass in its dtype. A state dict of the model holds
    them under the module's own name, as `bread_u` (out × r) and `bread_v` (r × in).
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        expansion: LoRAExpansion,
        *,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        self.modules = dict(modules)
        self.scale = expansion.scale
        self._handles = []
        for module in self.modules.values():
            weight: Tensor = module.weight  # type: ignore[assignment]
            rows, columns = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
            bound = 1 / math.sqrt(columns)  # Kaiming-uniform with a = √5, as LoRA's A has it
            v = torch.empty(expansion.rank, columns, dtype=dtype)
            v = v.uniform_(-bound, bound, generator=generator).to(weight.device)
            u = torch.zeros(rows, expansion.rank, dtype=dtype, device=weight.device)
            module.register_parameter(U_NAME, nn.Parameter(u, requires_grad=False))
            module.register_parameter(V_NAME, nn.Parameter(v, requires_grad=False))
            setattr(module, SCALE_NAME, self.scale)
            self._handles.append(module.register_forward_hook(_add_product))

    def pair(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """(U, V) of a linear map."""
        module = self.modules[name]
        return getattr(module, U_NAME), getattr(module, V_NAME)

    @torch.no_grad()
    def merge(self, masters: Mapping[Tensor, Tensor]) -> None:
        """W_j ← W_j + C_j, U_j ← 0; a wide copy of W_j moves with it."""
        for name, module in self.modules.items():
            u, v = self.pair(name)
            weight: Tensor = module.weight  # type: ignore[assignment]
            c = self.scale * (u @ v)
            wide = masters.get(weight, weight)
            total = wide.to(torch.promote_types(wide.dtype, c.dtype)) + (
                c if isinstance(module, nn.Linear) else c.T
            )
            wide.copy_(total)
            if wide is not weight:
                weight.copy_(wide)
            u.zero_()

    def remove(self) -> None:
        """Take the adapters off; what they added to the function is gone unless it was merged."""
        for handle in self._handles:
            handle.remove()
        for module in self.modules.values():
            for name in (U_NAME, V_NAME):
                del module._parameters[name]
            delattr(module, SCALE_NAME)


def _add_product(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """x ↦ Wx + α/r · U V x, for x of any leading shape."""
    x = args[0]
    u, v = getattr(module, U_NAME), getattr(module, V_NAME)
    product = F.linear(F.linear(x, v.to(x.dtype)), u.to(x.dtype))
    scale: float = getattr(module, SCALE_NAME)
    return output + (scale * product).to(output.dtype)
