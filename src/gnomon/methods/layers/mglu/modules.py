"""The layers: one weight with its mask logits, the same with packed masks, and a drop-in for a gated MLP.

Shapes: h inputs, d outputs of the shared matrix, n masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from gnomon.core.errors import GnomonError, NumericalFailure, UsageError, unknown
from gnomon.kernels.mglu import flash_mglu
from gnomon.kernels.mglu.planes import by_rows, code_of, pack, planes_of, width
from gnomon.kernels.tracing import is_traced

from . import moeg
from .config import MASKED, MGLUConfig, require_masks

LAYOUTS = ("planes", "code")

__all__ = ["LAYOUTS", "FrozenMGLULinear", "MGLULinear", "SwiMGLUMLP"]


class MGLULinear(nn.Module):
    """W and the logits of its masks, which are float32 or wider. No biases."""

    mask_logits: Tensor | None
    masked: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_masks: int = 4,
        *,
        mask_init_std: float = 0.01,
        weight_init_std: float | None = None,
        learned: bool = True,
        masked: str = "both",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            in_features, out_features, n_masks: h, d and n_m.
            mask_init_std: logits are drawn from N(0, its square).
            weight_init_std: W likewise; None draws as `nn.Linear` does. (The paper's isn't stated.)
            learned: False keeps the logits from training: a buffer, which no optimizer sees.
            masked: as in `MGLUConfig`; "neither" has no logits.
            generator: of both draws; None takes torch's own.

        Raises:
            UsageError: a number of features or masks that makes no sense.
        """
        super().__init__()
        require_masks(n_masks)
        if not all(isinstance(one, int) and one >= 1 for one in (in_features, out_features)):
            raise UsageError(
                f"A matrix of {out_features!r} x {in_features!r} has no weights. Give whole numbers, at least 1."
            )
        if masked not in MASKED:
            raise unknown("choice of what is masked", masked, MASKED)
        self.in_features, self.out_features, self.n_masks = in_features, out_features, n_masks
        self.mask_init_std, self.weight_init_std, self.masked = mask_init_std, weight_init_std, masked
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        if masked == "neither":
            self.register_parameter("mask_logits", None)
        else:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            logits = torch.empty(n_masks, out_features, in_features, device=device, dtype=wide)
            if learned:
                self.mask_logits = nn.Parameter(logits)
            else:
                self.register_buffer("mask_logits", logits)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw W, then the logits, anew."""
        bound = self.in_features**-0.5
        if self.weight_init_std is None:
            self.weight.uniform_(-bound, bound, generator=generator)
        else:
            self.weight.normal_(0, self.weight_init_std, generator=generator)
        if self.mask_logits is not None:
            drawn = torch.empty_like(
                self.mask_logits, dtype=self.weight.dtype
            )  # equal draws whatever is kept
            self.mask_logits.copy_(drawn.normal_(0, self.mask_init_std, generator=generator))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MGLULinear:
        """A model that is cast to bfloat16 takes W along, but logits stay in float32 or better: steps would be lost."""
        logits = self.mask_logits
        own = {id(t) for t in (logits, None if logits is None else logits.grad) if t is not None}

        def kept(t: Tensor) -> Tensor:
            new = fn(t)
            return t.to(new.device) if id(t) in own and new.dtype.itemsize < 4 else new

        super()._apply(kept, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def masks(self) -> Float[Tensor, "n d h"]:
        """Hard masks in the dtype of W; their gradient goes to the logits as it is."""
        if self.mask_logits is None:
            return self.weight.new_ones(1, *self.weight.shape)
        return moeg.straight_through(self.mask_logits, self.weight.dtype)

    def gate_value(
        self, x: Float[Tensor, "*batch h"]
    ) -> tuple[Float[Tensor, "*batch n d"], Float[Tensor, "*batch n d"]]:
        """Gate and value of each route, before the activation."""
        return moeg.gate_value(x, self.weight, self.masks, self.masked)

    def mix(
        self, x: Float[Tensor, "*batch h"], act: str, routes: Float[Tensor, "*batch n"] | None = None
    ) -> Float[Tensor, "*batch d"]:
        """The sum over routes."""
        return moeg.mix(*self.gate_value(x), act, routes)

    def extra_repr(self) -> str:
        kept = "" if self.mask_logits is None or self.mask_logits.requires_grad else ", masks not trained"
        only = "" if self.masked == "both" else f", masked={self.masked!r}"
        return f"in_features={self.in_features}, out_features={self.out_features}, n_masks={self.n_masks}{kept}{only}"


class FrozenMGLULinear(nn.Module):
    """W and its masks as bits, for inference: 16 + n_m bits a weight in bfloat16."""

    mask_planes: Tensor
    mask_code: Tensor

    def __init__(
        self, weight: nn.Parameter, masks: UInt8[Tensor, "..."], n_masks: int, layout: str = "planes"
    ) -> None:
        """
        Args:
            weight: (d, h), taken as it is.
            masks: planes (n, d, ceil(h/8)) or code (d, h), as `layout` says.

        Raises:
            UsageError: masks that don't belong to the weight, an unknown layout.
        """
        super().__init__()
        require_masks(n_masks)
        if layout not in LAYOUTS:
            raise unknown("layout of masks", layout, LAYOUTS)
        d, h = weight.shape
        shape = (n_masks, d, width(h)) if layout == "planes" else (d, h)
        if tuple(masks.shape) != shape or masks.dtype != torch.uint8:
            raise UsageError(
                f"Masks are {masks.dtype} {tuple(masks.shape)}; {n_masks} of a weight of {d} x {h} as {layout} are "
                f"torch.uint8 {shape}."
            )
        self.in_features, self.out_features, self.n_masks, self.layout = h, d, n_masks, layout
        self.weight = weight.requires_grad_(False)
        self.register_buffer(f"mask_{layout}", masks)
        self.eval()

    @classmethod
    def of(cls, layer: MGLULinear, layout: str = "planes") -> FrozenMGLULinear:
        """Pack the masks of a trained layer; its logits are left behind, its weight is shared.

        Raises:
            UsageError: an ablation that the kernels don't compute; the code for more than eight masks.
            NumericalFailure: logits that aren't numbers.
        """
        if layer.mask_logits is None or layer.masked != "both":
            raise UsageError(
                f"masked={layer.masked!r} is an ablation, which has no packed form. Keep it as it is, or train with "
                "masked='both'."
            )
        if bool(layer.mask_logits.isnan().any()):
            raise NumericalFailure(
                f"{int(layer.mask_logits.isnan().sum())} mask logits are NaN: training diverged, and as bits they "
                "would look like zeros. Go back to an earlier checkpoint."
            )
        planes = pack(moeg.hard_masks(layer.mask_logits.detach()))
        if layout == "code":
            return cls(layer.weight, code_of(planes, layer.in_features), layer.n_masks, layout)
        return cls(layer.weight, planes, layer.n_masks, layout)

    @property
    def planes(self) -> UInt8[Tensor, "n d w"]:
        """The masks as planes, whatever the layout; from the code they are made at each call."""
        return self.mask_planes if self.layout == "planes" else planes_of(self.mask_code, self.n_masks)

    def mix(
        self, x: Float[Tensor, "*batch h"], act: str, routes: Float[Tensor, "*batch n"] | None = None
    ) -> Float[Tensor, "*batch d"]:
        """The sum over routes, by :func:`flash_mglu`.

        Raises:
            UsageError: in training mode.
        """
        if self.training:
            raise UsageError(
                "This layer's masks are frozen, so it can't be trained. Call model.eval(), or go on with the model "
                "from before freeze_masks."
            )
        self._arrange()
        return flash_mglu(x, self.weight, self.planes, self.n_masks, act, routes=routes)

    def _arrange(self) -> None:
        """Once: planes as CPU kernels read them fastest; loaders put them in as they are stored."""
        planes = self.mask_planes if self.layout == "planes" else None
        if (
            planes is None
            or planes.device.type != "cpu"
            or is_traced()
            or planes.transpose(0, 1).is_contiguous()
        ):
            return
        with torch.inference_mode(False):  # a tensor made in it could never be loaded into again
            self.mask_planes = by_rows(planes)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Stored is the order of the card, whatever it is in memory: files take contiguous tensors alone."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout == "planes":
            destination[f"{prefix}mask_planes"] = destination[f"{prefix}mask_planes"].contiguous()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, n_masks={self.n_masks}, "
            f"layout={self.layout!r}"
        )


class SwiMGLUMLP(nn.Module):
    """A gated MLP with one shared matrix: `down_proj(MGLU(x))`, in the place of Transformers' `LlamaMLP`."""

    proj: MGLULinear | FrozenMGLULinear
    router: nn.Linear | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        config: MGLUConfig | None = None,
        *,
        down_proj: nn.Module | None = None,
        init_std: float | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            hidden_size, intermediate_size: h and d.
            config: None is the paper's default.
            down_proj: an output projection to keep; None makes one.
            init_std: of W, of the router, and of an output projection that is made; None draws as `nn.Linear`.
            generator: of all draws.
        """
        super().__init__()
        self.config = config = config or MGLUConfig()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.proj = MGLULinear(
            hidden_size,
            intermediate_size,
            config.n_masks,
            mask_init_std=config.mask_init_std,
            weight_init_std=init_std,
            learned=config.learned,
            masked=config.masked,
            generator=generator,
            **where,
        )
        made: list[nn.Linear] = []
        if down_proj is None:
            down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **where)
            made.append(down_proj)
        self.down_proj = down_proj
        self.router = None
        if config.top_k is not None:
            self.router = nn.Linear(hidden_size, config.n_masks, bias=False, **where)
            made.append(self.router)
        _draw(made, init_std, generator)

    def routes(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch n"] | None:
        """Weights of the routes; None where all are summed as they are."""
        if self.router is None or self.config.top_k is None:
            return None
        return moeg.top_k_routes(self.router(x), self.config.top_k)

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        if x.shape[-1] != self.hidden_size:
            raise UsageError(f"x has {x.shape[-1]} columns, but the layer takes {self.hidden_size}.")
        out: Tensor = self.down_proj(self.proj.mix(x, self.config.hidden_act, self.routes(x)))
        return out

    def freeze(self, layout: str = "planes") -> None:
        """Pack the masks, in place.

        Raises:
            UsageError, NumericalFailure: as :meth:`FrozenMGLULinear.of`; it is frozen already.
        """
        if isinstance(self.proj, FrozenMGLULinear):
            raise UsageError(f"The masks are frozen already, as {self.proj.layout}.")
        self.proj = FrozenMGLULinear.of(self.proj, layout)


@torch.no_grad()
def _draw(layers: Sequence[nn.Linear], std: float | None, generator: torch.Generator | None) -> None:
    for layer in layers:
        if std is not None:
            layer.weight.normal_(0, std, generator=generator)
        elif generator is not None:
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)


def require_filled(layer: FrozenMGLULinear, name: str = "A frozen layer") -> None:
    """For loaders: nothing can be drawn in the place of masks that a file lacks.

    Raises:
        GnomonError: always.
    """
    raise GnomonError(
        f"{name} ({layer.out_features} x {layer.in_features}) has weights or masks that the files lack. The checkpoint "
        "is damaged or was saved before freeze_masks."
    )
