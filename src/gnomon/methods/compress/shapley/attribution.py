r"""Model Shapley: the value of every parameter, row, neuron, head or layer from one backward pass a batch.

Paper: "MODEL SHAPLEY", NeurIPS 2025 (OpenReview 9ccmoYhZue).
Here:  :class:`ModelShapley`, which streams batches: :math:`\phi_u = -\overline{a_u} + \frac{1}{2}\overline{c\,a_uA_b}`.
Inferred: the pooling of `pool="game"`; the moving average's bias is divided out; sequences weigh equally.
Differs from the paper: the plus sign (`curvature_sign="paper"` has the minus of its Algorithm 2), and the Fisher times
       the tokens of a sequence, without which the second part is negligible.
Limits: a sum of parts far outside the quadratic region is no efficient share; see :meth:`ModelShapley.efficiency_gap`.
       Norms, embeddings and the head are no players.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, unknown
from gnomon.core.layers import unwrap

from ..calibration import state_kept
from .collect import Loss, collecting
from .curvature import (
    Order,
    double_backward_attention,
    gram_orders,
    hessian_orders,
    parameter_orders,
    unit_orders,
)
from .deactivate import deactivate
from .layout import BLOCKS, Group, layout_of
from .loss import moved, sequence_nll
from .scores import ShapleyScores, UnitMasks

CURVATURES = ("fisher", "hvp", "gram", "none")
POOLS = ("game", "mean", "sum")
SCALES = ("tokens", "none")


@dataclass(frozen=True)
class EfficiencyGap:
    """Shapley values sum to what all players are worth together; these do so near a quadratic loss only."""

    total: float
    """Σ φ."""
    actual: float
    """L with no player minus L with all of them, nats."""

    @property
    def gap(self) -> float:
        """Σ φ minus the actual worth."""
        return self.total - self.actual


class ModelShapley:
    """Scores of units, batch by batch.

    Args:
        model: any module with linear maps; of a Transformers decoder those of its layers. In evaluation mode.
        units: "param", "row" (of every linear map), "mlp_neuron" (gate row, up row, down column), "head", "layer", or
            a function from the model to groups (`Group`, `Part`).
        curvature: "fisher" (per sequence), "hvp" (exact), "gram" (the released code's) or "none".
        block: for "fisher", which units interact: of a "layer", of the same "matrix", "unit" (each with itself), or
            "global". "hvp" always couples all players.
        curvature_sign: +1, or "paper" for the minus of its algorithm.
        fisher_scale: "tokens" multiplies the Fisher by a sequence's loss tokens, "none" by 1.
        loss_fn: (model, batch) -> losses (B,), or (losses, tokens); None: `sequence_nll`.
        ewma: α of a moving average over batches, bias-corrected; None: the mean over all sequences.
        pool: "game" (a unit is one player), or the "sum" or "mean" of its parameters' scores.
        bias: whether a row's bias belongs to it.
        device: where parameter scores lie between batches ("cpu" when they don't fit beside the model).

    Raises:
        UsageError: an unknown option, or a model without such units (see `layout_of`).
    """

    def __init__(
        self,
        model: nn.Module,
        units: str | Callable[[nn.Module], Sequence[Group]] = "mlp_neuron",
        curvature: str = "fisher",
        block: str = "layer",
        curvature_sign: int | Literal["paper"] = 1,
        fisher_scale: str | None = "tokens",
        loss_fn: Loss | None = None,
        ewma: float | None = None,
        *,
        pool: str = "game",
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value, known in (
            ("curvature", curvature, CURVATURES),
            ("block", block, BLOCKS),
            ("pool", pool, POOLS),
            ("fisher_scale", fisher_scale or "none", SCALES),
        ):
            if value not in known:
                raise unknown(f"{name}:", value, known)
        if curvature_sign not in (1, "paper"):
            raise UsageError(f"curvature_sign={curvature_sign!r} must be +1 or 'paper' (minus).")
        if ewma is not None and not 0 < ewma <= 1:
            raise UsageError(f"ewma={ewma} must lie in (0, 1]: the weight of the newest batch.")
        if curvature == "hvp" and block not in ("layer", "global"):
            raise UsageError(
                f"block={block!r} with curvature='hvp': the Hessian's product couples all players. Leave block out."
            )
        self.model, self.root = model, unwrap(model)
        self.curvature, self.block, self.pool = curvature, block, pool
        self.sign = 1.0 if curvature_sign == 1 else -1.0
        self.scaled = fisher_scale == "tokens"
        self.loss_fn: Loss = sequence_nll if loss_fn is None else loss_fn
        self.ewma, self.device = ewma, device
        self.layout = layout_of(self.root, units, bias=bias)
        self.n = 0
        self.batches = 0
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}

    def update(self, batch: Any) -> Self:
        """Add a batch: one forward and one backward pass (two for "hvp").

        Raises:
            UsageError: the model is in training mode; no sequence has a token with a loss; the loss doesn't come from
                the scored maps.
            NumericalFailure: a score that isn't finite; earlier batches stay as they were.
        """
        self._require_evaluation()
        at = next(self.root.parameters()).device
        with torch.inference_mode(False), state_kept(self.root):
            order, counted = self._orders(moved(batch, at))
        for name in order.first:
            if not bool(torch.isfinite(order.first[name]).all() & torch.isfinite(order.second[name]).all()):
                raise NumericalFailure(
                    f"The scores of {name} hold NaN or infinity on batch {self.batches + 1}. Run the model in bfloat16 "
                    "or float32, or look for the batch."
                )
        self._add(order, counted)
        return self

    def fit(self, loader: Iterable[Any]) -> Self:
        """Add all batches of a probe set.

        Raises:
            UsageError: the set is empty; and as :meth:`update`.
        """
        before = self.batches
        for batch in loader:
            self.update(batch)
        if self.batches == before:
            raise UsageError("The probe set is empty: no batch came. Pass a list, or a fresh iterator.")
        return self

    def scores(self) -> ShapleyScores:
        """Scores from all batches so far.

        Raises:
            UsageError: no batch came yet.
        """
        if not self.batches:
            raise UsageError("There are no scores before the first batch. Call fit(loader) or update(batch).")
        share = 1.0 / self.n
        if self.ewma is not None:
            share = 1.0 / (1.0 - (1.0 - self.ewma) ** self.batches)
        counts = self.layout.counts() if self.pool == "mean" and self.layout.kind != "param" else {}
        first, second = {}, {}
        for name, total in self._first.items():
            each = share / counts[name].to(total).clamp(min=1) if name in counts else share
            first[name] = -total * each
            second[name] = self.sign * self._second[name] * each
        phi = {name: first[name] + second[name] for name in first}
        return ShapleyScores(phi, first, second, self.n, self.layout)

    def efficiency_gap(self, loader: Iterable[Any]) -> EfficiencyGap:
        """Σ φ beside what removing all players costs on these batches.

        Raises:
            UsageError: an empty loader, no scores yet, or pooled means, whose sum means nothing.
        """
        if self.pool == "mean" and self.layout.kind != "param":
            raise UsageError(
                "Means over a unit's parameters have no meaningful sum. Use pool='game' or 'sum'."
            )
        scores = self.scores()
        self._require_evaluation()
        batches = list(loader)
        if not batches:
            raise UsageError("The probe set is empty: no batch came. Pass a list, or a fresh iterator.")
        none = UnitMasks(
            {n: torch.zeros(self.layout.shape(n), dtype=torch.bool) for n in self.layout.sizes}, self.layout
        )
        full = self._mean_loss(batches)
        with deactivate(self.root, none):
            empty = self._mean_loss(batches)
        return EfficiencyGap(float(scores.flat().double().sum()), empty - full)

    def all_reduce(self, group: Any = None) -> Self:
        """Sum over the processes of a distributed run, each of which scored batches of its own.

        Raises:
            UsageError: with a moving average, whose order has no meaning across processes.
        """
        if self.ewma is not None:
            raise UsageError("A moving average can't be summed over processes. Use ewma=None.")
        import torch.distributed as dist

        at = next(iter(self._first.values())).device
        counts = torch.tensor([self.n, self.batches], dtype=torch.float64, device=at)
        for value in (counts, *self._first.values(), *self._second.values()):
            dist.all_reduce(value, group=group)
        self.n, self.batches = int(counts[0]), int(counts[1])
        return self

    # ------------------------------------------------------------------------------------------- one batch

    def _orders(self, batch: Any) -> tuple[Order, int]:
        if self.curvature == "hvp":
            return self._exact(batch)
        flows = self.curvature == "gram" or self.layout.kind == "param"
        with torch.enable_grad(), collecting(self.layout, flows=flows) as found:
            losses, tokens = self._losses(batch)
            found.sequences = len(losses)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        if not found.scalars and not found.flows:
            raise UsageError("No scored map took part in the loss. Does loss_fn run the model it is given?")
        counts, counted = _counted(tokens)
        given = next(iter(found.scalars.values()), None)
        given = next(iter(found.flows.values()))[0].delta if given is None else given
        weights = (counts / counted).to(given)
        scale = (tokens if self.scaled else torch.ones_like(tokens)).to(given)
        if self.curvature == "gram" and self.layout.kind != "param":
            return gram_orders(found, self.layout, weights), counted
        if self.layout.kind == "param":
            order = parameter_orders(
                found, self.layout, weights, scale, curvature=self.curvature, block=self.block
            )
            return order, counted
        order = unit_orders(
            found,
            self.layout,
            weights,
            scale,
            curvature=self.curvature,
            block=self.block,
            pool=self.pool,
        )
        return order, counted

    def _exact(self, batch: Any) -> tuple[Order, int]:
        counted = 0

        def mean() -> Tensor:
            nonlocal counted
            losses, tokens = self._losses(batch, graph=False)
            counts, counted = _counted(tokens)
            return (losses * counts.to(losses)).sum() / counted

        with double_backward_attention(self.root):
            order = hessian_orders(self.layout, mean)
        return order, counted

    def _losses(self, batch: Any, *, graph: bool = True) -> tuple[Tensor, Tensor]:
        given = self.loss_fn(self.root, batch)
        losses, tokens = given if isinstance(given, tuple) else (given, torch.ones_like(given))
        if losses.ndim != 1 or tokens.shape != losses.shape:
            raise UsageError(
                f"loss_fn gave losses of {list(losses.shape)} and tokens of {list(tokens.shape)}; it must give one "
                "number for each sequence, (B,)."
            )
        _counted(tokens)
        if graph and not losses.requires_grad:
            raise UsageError(
                "The loss has no gradient: no scored map took part in it, or loss_fn switched gradients off."
            )
        return losses, tokens.detach()

    def _mean_loss(self, batches: Sequence[Any]) -> float:
        at = next(self.root.parameters()).device
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                losses, tokens = self._losses(moved(batch, at), graph=False)
                counts, counted = _counted(tokens)
                total += float((losses.double() * counts.to(losses)).sum())
                count += counted
        return total / count

    def _add(self, order: Order, counted: int) -> None:
        for totals, new in ((self._first, order.first), (self._second, order.second)):
            for name, value in new.items():
                added = (
                    value.double() if self.layout.kind != "param" else value.to(self.device or value.device)
                )
                if self.ewma is not None:
                    kept, taken = 1.0 - self.ewma, self.ewma
                else:
                    kept, taken = 1.0, float(counted)
                totals[name] = totals[name] * kept + added * taken if name in totals else added * taken
        self.n += counted
        self.batches += 1

    def _require_evaluation(self) -> None:
        training = [name for name, module in self.root.named_modules() if module.training]
        if training:
            raise UsageError(
                f"The model is in training mode ({training[0] or type(self.root).__name__}), where dropout changes the "
                "scores. Call model.eval() first."
            )


def _counted(tokens: Tensor) -> tuple[Tensor, int]:
    """1 for every sequence with a loss, and how many these are."""
    counts = (tokens > 0).to(tokens.dtype)
    counted = int(counts.sum())
    if not counted:
        raise UsageError(
            "No sequence of the batch has a token with a loss: two real tokens in a row, of which the second's label "
            "isn't -100."
        )
    return counts, counted
