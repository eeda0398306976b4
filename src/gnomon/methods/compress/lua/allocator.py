"""Thresholds of a whole model: installed as masks, trained, hardened to the exact budget, multiplied in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gnomon.core.errors import GnomonError, UsageError, nearest, unknown
from gnomon.core.layers import decoder_stack, is_conv1d, linears, unwrap

from ..pruning.allocation import Allocation
from ..pruning.counts import budget
from ..pruning.targets import Patterns, matrix, prunable
from .budget import exact_masks
from .masks import REGULARISERS, budget_loss
from .parametrization import GRANULARITIES, MaskedWeight, keeping_dtype, shape_of
from .report import SparsityReport
from .scores import ranks

if TYPE_CHECKING:
    from gnomon.core.train import BatchSource

    from .fitting import Batches, LuaFit

TOLERANCE = 1e-3
"""How far from p a trained budget may be and still be called p."""


class LuaAllocator(nn.Module):
    """Learns which weights of a model to remove, from one threshold per row, column or matrix.

    Its parameters are the thresholds alone; the model is held beside them, and its weights don't change before
    :meth:`apply`. Called with a batch and `labels` it returns the model's output with the regulariser in the loss, so
    it trains in Transformers' Trainer as it stands.

    Args:
        model: a Transformers decoder (or a wrapper around one), dense.
        scores: importance of each matrix's weights by its name, see `collect_importance`; [outputs, inputs].
        sparsity: p, the share of the targeted weights that ends up as zero.
        granularity: "row" (the paper's), "column" or "layer" (one threshold for a matrix).
        slope: λ; "in_features" is each matrix's n.
        reg_weight: λ_reg; 8 or less doesn't hold the budget in the paper.
        reg: "kept" or "removed", see :func:`~.masks.budget_loss`.
        targets, exclude: names of matrices or parts of these, see `pruning.prunable`.
        min_kept: weights of each row that stay whatever its threshold; 0 lets rows die.

    Raises:
        UsageError: p outside (0, 1); scores that are missing, of another shape or more than there are matrices; a
            matrix that can't be masked (quantised, tied, parametrised, sharded, on the meta device); a model that is
            sparser than p already.
        NumericalFailure: NaN among the scores.
    """

    accepts_loss_kwargs = False  # Trainer: average over accumulated batches itself, the regulariser included

    def __init__(
        self,
        model: nn.Module,
        scores: Mapping[str, Tensor],
        sparsity: float = 0.7,
        *,
        granularity: str = "row",
        slope: str | float = "in_features",
        reg_weight: float = 16.0,
        reg: str = "kept",
        targets: Patterns = None,
        exclude: Patterns = None,
        min_kept: int = 1,
    ) -> None:
        super().__init__()
        require_settings(sparsity, granularity, slope, reg_weight, reg, min_kept)
        found = prunable(model, targets, exclude)
        _require_scores(model, found, scores)
        self.sparsity, self.granularity, self.reg_weight, self.reg = sparsity, granularity, reg_weight, reg
        self.min_kept = min_kept
        self._model = (model,)  # in a tuple, so that its parameters aren't taken for ours
        self._layers = dict(found)
        self._scores = {name: scores[name] for name in found}
        self.total = sum(matrix(layer).numel() for layer in found.values())
        self.removed = budget(sparsity, self.total)
        zeros = sum(int((matrix(layer) == 0).sum()) for layer in found.values())
        if zeros > self.removed:
            raise UsageError(
                f"{zeros:,} of {self.total:,} weights are zero already, {zeros / self.total:.1%}; "
                f"sparsity={sparsity:g} would need fewer. Ask for more."
            )
        self._masks: dict[str, MaskedWeight] = {}
        for name, layer in found.items():
            weight = matrix(layer)
            n = weight.shape[1]
            self._masks[name] = MaskedWeight(
                ranks(scores[name]).to(weight.device),
                sparsity,
                granularity=granularity,
                slope=float(n) if isinstance(slope, str) else float(slope),
                min_kept=min(min_kept, n),
                transposed=is_conv1d(layer),
            )
        self.masks = nn.ModuleList(self._masks.values())
        self._needed: list[tuple[nn.Parameter, bool]] = []
        self._final: dict[str, Tensor] | None = None
        self.offset = 0.0
        """δ of the last exact hardening."""

    # ------------------------------------------------------------------------------------ as a module

    @property
    def model(self) -> nn.Module:
        """The model that is pruned."""
        return self._model[0]

    @property
    def config(self) -> Any:
        """The model's, for Trainers that ask."""
        return getattr(unwrap(self.model), "config", None)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The model's output; where it has a loss, :meth:`penalty` is added to it."""
        for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask), ("labels", labels)):
            if value is not None:
                inputs[name] = value
        output = self.model(**inputs)
        if getattr(output, "loss", None) is not None and self.installed and not self._any_hard:
            output.loss = output.loss + self.penalty().to(output.loss)
        return output

    def train(self, mode: bool = True) -> LuaAllocator:
        """Training or evaluation mode, of the model too."""
        super().train(mode)
        self.model.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> LuaAllocator:
        """Move the model along; thresholds are moved, never converted."""
        self.model._apply(fn)  # type: ignore[no-untyped-call]
        return cast(LuaAllocator, super()._apply(keeping_dtype(fn), recurse))  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------------------ masks in the model

    @property
    def installed(self) -> bool:
        """Whether the masks are in the model."""
        return any(parametrize.is_parametrized(layer, "weight") for layer in self._layers.values())

    def parametrize(self) -> LuaAllocator:
        """Install the soft masks and freeze everything but the thresholds; a second call changes nothing."""
        if self._final is not None:
            raise UsageError("This allocator was applied: the model is pruned. Make a new one to go on.")
        if self.installed:
            return self
        ours = {id(p) for p in self.parameters()}
        self._needed = [(p, p.requires_grad) for p in self.model.parameters() if id(p) not in ours]
        for parameter, _ in self._needed:
            parameter.requires_grad_(False)
        for name, layer in self._layers.items():
            parametrize.register_parametrization(layer, "weight", self._masks[name], unsafe=True)
        return self

    def unparametrize(self) -> LuaAllocator:
        """Take the masks out; weights, and what requires a gradient, are as they were."""
        for layer in self._layers.values():
            if parametrize.is_parametrized(layer, "weight"):
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        for parameter, needed in self._needed:
            parameter.requires_grad_(needed)
        self._needed = []
        return self

    @contextmanager
    def hard(self) -> Iterator[None]:
        """Inside the block the masks are s > t: what the model is after :meth:`apply` without the exact budget."""
        for one in self._masks.values():
            one.hard = True
        try:
            yield
        finally:
            for one in self._masks.values():
                one.hard = False

    @property
    def _any_hard(self) -> bool:
        return any(one.hard for one in self._masks.values())

    def _weight(self, name: str) -> Tensor:
        """The dense weight as it is stored."""
        layer = self._layers[name]
        if parametrize.is_parametrized(layer, "weight"):
            holder: Any = layer.parametrizations["weight"]  # type: ignore[index]
            return cast(Tensor, holder.original).detach()
        return cast(Tensor, layer.weight).detach()

    # ------------------------------------------------------------------------------------ training

    def penalty(self) -> Float[Tensor, ""]:
        """λ_reg L_reg, float32; its gradient goes through the rounded masks to every threshold."""
        kept = [one.kept(self._weight(name)) for name, one in self._masks.items()]
        count = torch.stack([one.to(kept[0].device) for one in kept]).sum()
        return (self.reg_weight * budget_loss(count, self.total, self.sparsity, self.reg)).float()

    def fit(self, dataloader: Batches | BatchSource, **settings: Any) -> LuaFit:
        """Train the thresholds; see :func:`~.fitting.fit`, which takes the settings."""
        from .fitting import fit

        return fit(self, dataloader, **settings)

    # ------------------------------------------------------------------------------------ results

    def thresholds(self) -> dict[str, Float[Tensor, "rows columns"]]:
        """t of each matrix: m × 1, 1 × n or 1 × 1, float32, a copy."""
        return {name: one.threshold.detach().clone() for name, one in self._masks.items()}

    @property
    def trained_numbers(self) -> int:
        """How many thresholds there are."""
        return sum(one.threshold.numel() for one in self._masks.values())

    def sparsity_report(self, *, exact: bool = False, tolerance: float = TOLERANCE) -> SparsityReport:
        """Zeros per row, matrix, decoder layer and model.

        Args:
            exact: with the offset that meets the budget; else as the thresholds stand.
            tolerance: how far from p counts as converged.
        """
        return self._report(self._final or (self._exact() if exact else self._raw()), tolerance)

    def harden(self, exact: bool = True, *, tolerance: float = TOLERANCE) -> dict[str, Bool[Tensor, "m n"]]:
        """Hard masks, true where a weight stays (never at one that is zero); [outputs, inputs].

        Args:
            exact: shift all thresholds by one offset until exactly round(pN) weights are zero.
            tolerance: without it, how far from p the masks may be.

        Raises:
            GnomonError: not exact, and not p within the tolerance.
        """
        if self._final is not None:
            return dict(self._final)
        if exact:
            return self._exact()
        masks = self._raw()
        report = self._report(masks, tolerance)
        if not report.converged:
            raise GnomonError(
                f"The thresholds have not converged: they give a sparsity of {report.sparsity:.4f}, and "
                f"{self.sparsity:g} was asked for (tolerance {tolerance:g}). A model that is denser only looks better. "
                f"Use exact=True, train longer, or raise reg_weight (now {self.reg_weight:g})."
            )
        return masks

    @torch.no_grad()
    def apply(self, exact: Any = True) -> Any:
        """Multiply the hard masks into the weights, once, and take the parametrization out. A second call does nothing.

        Given a function it is `nn.Module.apply`, which Trainers may call.

        Returns:
            the :class:`SparsityReport` of what is zero now.

        Raises:
            GnomonError: see :meth:`harden`; nothing was changed then.
        """
        if callable(exact):
            return super().apply(exact)
        if self._final is None:
            masks = self.harden(exact)
            self.unparametrize()
            for name, layer in self._layers.items():
                matrix(layer).masked_fill_(~masks[name].to(cast(Tensor, layer.weight).device), 0)
            self._final = masks
        return self._report(self._final, TOLERANCE)

    def allocation(self, axis: str | None = None, *, group: int = 128) -> Allocation:
        """The learned shares, with the exact budget, for any pruner: `prune(model, "sparsegpt", allocation=...)`.

        Args:
            axis: "row", "matrix" or "column"; None is the granularity's own ("column" with group=1).
            group: columns that share a ratio, with axis "column": SparseGPT's blocks.
        """
        own = {"row": "row", "column": "column", "layer": "matrix"}[self.granularity]
        if axis is None:
            axis, group = own, 1 if own == "column" else group
        if axis not in ("row", "matrix", "column"):
            raise unknown("axis", axis, ("row", "matrix", "column"))
        ratios: dict[str, float | Tensor] = {}
        for name, mask in self.harden().items():
            gone = (~mask).cpu()
            if axis == "matrix":
                ratios[name] = float(gone.double().mean())
            elif axis == "row":
                ratios[name] = gone.double().mean(1)
            else:
                ratios[name] = torch.stack([part.double().mean() for part in torch.split(gone, group, dim=1)])
        source = f"lua ({self.granularity})"
        return Allocation(ratios=ratios, axis=cast(Any, axis), group=group, source=source)

    # ------------------------------------------------------------------------------------ inside

    def _raw(self) -> dict[str, Tensor]:
        return {name: one.distance(self._weight(name)) > 0 for name, one in self._masks.items()}

    def _exact(self) -> dict[str, Tensor]:
        found = exact_masks(
            list(self._masks),
            lambda name: self._masks[name].distance(self._weight(name)),
            lambda name: self._scores[name],
            self.total - self.removed,
        )
        self.offset = found.offset
        return dict(found.masks)

    def _report(self, masks: Mapping[str, Tensor], tolerance: float) -> SparsityReport:
        rows = {name: 1 - mask.double().mean(1).cpu() for name, mask in masks.items()}
        zeros = {name: mask.numel() - int(mask.sum()) for name, mask in masks.items()}
        prefix = decoder_stack(self.model).name + "."
        layers: dict[int, list[str]] = {}
        for name in masks:
            layers.setdefault(int(name.removeprefix(prefix).partition(".")[0]), []).append(name)
        return SparsityReport(
            target=self.sparsity,
            sparsity=sum(zeros.values()) / self.total,
            tolerance=tolerance,
            per_matrix={name: zeros[name] / mask.numel() for name, mask in masks.items()},
            per_layer={
                i: sum(zeros[name] for name in names) / sum(masks[name].numel() for name in names)
                for i, names in layers.items()
            },
            rows=rows,
            removed=sum(zeros.values()),
            total=self.total,
            trained=self.trained_numbers,
        )


def count_thresholds(model: nn.Module, granularity: str = "row") -> int:
    """How many thresholds a model has; also of one on the meta device, such as `core.places.skeleton` builds."""
    shapes = (
        tuple(reversed(w.shape)) if is_conv1d(layer) else tuple(w.shape)
        for layer in linears(model).values()
        for w in [cast(Tensor, layer.weight)]
    )
    return sum(math.prod(shape_of(granularity, int(m), int(n))) for m, n in shapes)


def require_settings(
    sparsity: float, granularity: str, slope: str | float, reg_weight: float, reg: str, min_kept: int
) -> None:
    """Refuse settings that make no sense.

    Raises:
        UsageError: with value, limit and way out.
    """
    if not 0 < sparsity < 1:  # NaN is refused too
        raise UsageError(
            f"sparsity={sparsity} must lie in (0, 1): the share of weights that is removed, not a percentage."
        )
    if granularity not in GRANULARITIES:
        raise unknown("granularity", granularity, GRANULARITIES)
    if isinstance(slope, str):
        if slope != "in_features":
            raise unknown("slope", slope, ("in_features",))
    elif not 0 < slope < math.inf:
        raise UsageError(f"slope={slope} must be positive and finite, or 'in_features'.")
    if not 0 <= reg_weight < math.inf:
        raise UsageError(f"reg_weight={reg_weight} must be at least 0 and finite.")
    if reg not in REGULARISERS:
        raise unknown("regulariser", reg, REGULARISERS)
    if min_kept < 0:
        raise UsageError(f"min_kept={min_kept} can't be negative; 0 lets whole rows die.")


def _require_scores(model: nn.Module, found: Mapping[str, nn.Module], scores: Mapping[str, Tensor]) -> None:
    for name, layer in found.items():
        if name not in scores:
            raise UsageError(
                f"There are no scores for {name}, which is pruned ({sum(one not in scores for one in found)} of "
                f"{len(found)} matrices have none). Collect them on this model, or leave it out with exclude=."
            )
        shape = tuple(matrix(layer).shape)
        if tuple(scores[name].shape) != shape:
            raise UsageError(
                f"The scores of {name} have the shape {list(scores[name].shape)}, its weight (outputs × inputs) "
                f"{list(shape)}. Were they collected on another model?"
            )
    known = linears(model)
    if strange := [one for one in scores if one not in known]:
        raise UsageError(
            f"There are scores for {strange[0]}, but the model has no such matrix.{nearest(strange[0], found)}"
        )
