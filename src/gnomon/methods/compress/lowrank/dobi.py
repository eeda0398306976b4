"""Dobi-SVD: how many directions of its output each layer needs is learned; the directions come from an average.

1. Every layer's output y = W x is truncated softly (`gate`) at a learned position γ, the only parameters. The loss is
   the mean token loss, which is the logarithm of the perplexity: exp of it overflows when a layer loses too much and
   its gradient then drowns the other terms. Plus λ |share − target| and a penalty for γ outside [1, min(m, n)].
2. Ranks k are the γ in their proportions, within the budget exactly (`ranks.budget_ranks`).
3. W̃ = V Vᵀ W: V is the principal subspace of the right singular vectors that the truncated outputs have on each
   batch (`pca`). So A = V and B = Vᵀ W.

Outputs of a layer lie in the column space of W; with W = Q R they are truncated as x Rᵀ, so that a wide layer costs
no more than its narrow side. Biases are added after truncation.
Left out on purpose: the remapping to 8 bits, which changes what a number costs and not what the model computes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure

from ..calibration import Batch, mean_nll, real_positions, state_kept
from .config import DobiConfig
from .gate import gate, right_vectors, truncate
from .pca import IncrementalPCA
from .ranks import Shapes, budget_ranks

log = logging.getLogger(__name__)


def learn_positions(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Sequence[Batch],
    keep: float,
    config: DobiConfig,
) -> dict[str, float]:
    """γ of every layer after training; the model stays as it is.

    Raises:
        NumericalFailure: a loss that isn't finite.
    """
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    device = next(model.parameters()).device
    dense = sum(m * n for m, n in shapes.values())
    cost = torch.tensor([m + n for m, n in shapes.values()], device=device, dtype=torch.float64) / dense
    most = torch.tensor([min(shape) for shape in shapes.values()], device=device, dtype=torch.float64)
    start = [keep * m * n / (m + n) for m, n in shapes.values()]
    gamma = nn.Parameter(torch.tensor(start, device=device, dtype=torch.float64).clamp(min=1))
    optimizer = torch.optim.Adam([gamma], lr=config.lr[0])
    steps, step = config.epochs * len(batches), 0
    with state_kept(model), _Truncated(layers).on(model) as gates:
        for _ in range(config.epochs):
            for batch in batches:
                done = step / max(steps - 1, 1)
                optimizer.param_groups[0]["lr"] = config.lr[0] + done * (config.lr[1] - config.lr[0])
                gates.batch = batch
                gates.gates = {
                    name: gate(gamma[i], int(most[i]), config.beta) for i, name in enumerate(shapes)
                }
                share = (gamma * cost).sum()
                outside = (gamma - most).clamp(min=0).sum() + (1 - gamma).clamp(min=0).sum()
                loss = mean_nll(model, [batch]).double() + config.share_weight * (share - keep).abs()
                loss = loss + config.range_weight * outside
                if not bool(torch.isfinite(loss)):
                    raise NumericalFailure(
                        f"Dobi-SVD's loss is {loss.item()} in step {step + 1} of {steps}. Run the model in bfloat16 or "
                        f"float32, or lower lr={config.lr}."
                    )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step += 1
    log.info("Dobi-SVD: share %.4f after %d steps, target %.4f", share.item(), steps, keep)
    clamped = torch.minimum(gamma.detach().clamp(min=1), most)
    return {name: float(clamped[i]) for i, name in enumerate(shapes)}


def dobi_ranks(positions: Mapping[str, float], keep: float, shapes: Shapes) -> dict[str, int]:
    """Whole ranks in the proportions of γ that store at most the share `keep`."""
    return budget_ranks(positions, keep, shapes)


def dobi_bases(
    model: nn.Module, layers: Mapping[str, nn.Linear], batches: Sequence[Batch], ranks: Mapping[str, int]
) -> dict[str, Tensor]:
    """V (m × k, orthonormal) of every layer: the principal subspace of the batches' top-k right singular vectors.

    The layers see what the model computes with every output truncated to its rank (inferred).
    """
    device = next(model.parameters()).device
    with state_kept(model), torch.no_grad(), _Truncated(layers).on(model) as gates:
        gates.gates = {
            name: (torch.arange(min(layer.weight.shape), device=device) < ranks[name]).double()
            for name, layer in layers.items()
        }
        gates.pca = {
            name: IncrementalPCA(min(2 * ranks[name], *layer.weight.shape)) for name, layer in layers.items()
        }
        for batch in batches:
            gates.batch = batch
            mean_nll(model, [batch])
        return {
            name: gates.bases[name].double() @ pca.components(ranks[name]) for name, pca in gates.pca.items()
        }


class _Truncated:
    """Hooks that truncate the outputs of layers."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.layers = layers
        self.batch: Batch | None = None
        self.gates: dict[str, Tensor] = {}
        self.pca: dict[str, IncrementalPCA] | None = None
        """When set, takes in every batch's right singular vectors as far as the gate is open."""
        self.bases: dict[str, Tensor] = {}
        """Q (m × q), an orthonormal basis of the column space of W, in float32 or better."""
        for name, layer in layers.items():
            w = layer.weight.detach()
            w = w.to(torch.promote_types(w.dtype, torch.float32))
            m, n = w.shape
            self.bases[name] = torch.linalg.qr(w).Q if m > n else torch.eye(m, dtype=w.dtype, device=w.device)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[_Truncated]:
        hooks = [layer.register_forward_hook(self._hook(name)) for name, layer in self.layers.items()]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def cut(module: nn.Linear, args: tuple[Any, ...], output: Tensor) -> Tensor:
            assert self.batch is not None
            basis, t = self.bases[name], self.gates[name].to(output.device)
            bias = module.bias if module.bias is not None else 0.0
            y = (output - bias).reshape(-1, output.shape[-1]).to(basis.dtype)
            z = y if basis.shape[0] == basis.shape[1] else y @ basis  # (tokens, q)
            if self.batch.mask is not None:  # padding must not turn the directions
                z = z.masked_fill(~real_positions(output, self.batch, name)[:, None], 0)
            if not bool(torch.isfinite(z).all()):
                raise NumericalFailure(
                    f"The output of {name} holds NaN or infinity on the calibration text. Run the model in bfloat16 "
                    "or float32, or look for the batch."
                )
            if self.pca is not None:
                _, v = right_vectors(z)
                k = min(int((t > 0.5).sum()), v.shape[1])
                self.pca[name].update(v[:, :k].T)
            z = truncate(z, t[: min(z.shape)].to(z.dtype))
            y = z if basis.shape[0] == basis.shape[1] else z @ basis.T
            return y.to(output.dtype).reshape(output.shape) + bias

        return cut
