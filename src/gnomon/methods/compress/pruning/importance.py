r"""Importance of every weight of a decoder: Wanda's scores, magnitude, or a metric of the caller's.

Paper: Wanda's metric, :math:`S_{ij} = |W_{ij}| \, \lVert X_{:,j} \rVert_2`, as "Lua-LLM" uses it.
Here:  one pass of the whole model, or layer by layer, where each layer may be pruned before the next is measured.
Not here: what the scores are used for.
Inferred: ‖X_j‖ is the root of the mean square over all real tokens, so that scores don't grow with the amount of text;
       within a layer that is a common factor.

Whole-model scores on the dense model and layer-by-layer scores on pruned inputs differ: say which one is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, unknown
from gnomon.core.layers import decoder_stack, unwrap

from ..calibration import Batch, Calib, arguments, require_calib, state_kept
from .masks import magnitude_scores, require_scores, wanda_scores
from .statistics import Collector
from .targets import Patterns, blocks, matrix, prunable
from .walk import layer_by_layer

Metric = Callable[[Tensor, Tensor], Tensor]
"""(weight [out, in] in float32, ‖X_j‖ [in] in float32) -> scores [out, in]; higher is more important."""
METRICS = ("wanda", "magnitude")

Visit = Callable[[list[str], dict[str, Tensor]], None]
"""Called with a decoder layer's matrices and their scores; may change the weights of that layer."""


def collect_importance(
    model: nn.Module,
    calib: Calib | None = None,
    metric: str | Metric = "wanda",
    *,
    sequential: bool = False,
    device: torch.device | str | None = "cpu",
    targets: Patterns = None,
    exclude: Patterns = None,
    visit: Visit | None = None,
) -> dict[str, Float[Tensor, "_ _"]]:
    """Scores of every prunable matrix by its dotted name, float32 on the CPU.

    Args:
        calib: batches of token ids (B, T), or dictionaries with input_ids and attention_mask; padding has no part in
            the norms. Not needed for "magnitude" alone.
        metric: "wanda", "magnitude", or a function of a weight and its inputs' norms.
        sequential: run one decoder layer at a time; only that layer's inputs are held, for all batches.
        device: where sums, and with `sequential` those inputs, lie; None: beside the layers.
        visit: with `sequential`; the next layer's inputs come from the layer as `visit` left it.

    Raises:
        UsageError: see `prunable` and `require_calib`; a matrix that no token reaches.
        NumericalFailure: activations or scores that aren't finite; names the matrix.
    """
    score = metric_of(metric)
    if visit is not None and not sequential:
        raise UsageError("visit= is called between layers: pass sequential=True.")
    matrices = prunable(model, targets, exclude)
    scores: dict[str, Tensor] = {}
    if metric == "magnitude" and not sequential:
        return {
            name: magnitude_scores(matrix(module)).cpu().contiguous() for name, module in matrices.items()
        }
    batches = require_calib(calib, model, "Collecting importance")
    with (
        state_kept(unwrap(model)),
        closing(
            visits(model, matrices, batches, sequential=sequential, device=device, once=visit is None)
        ) as steps,
    ):
        for names, collector in steps:
            found = {
                name: scores_of(name, matrices[name], collector, score).cpu().contiguous() for name in names
            }
            scores |= found
            if visit is not None:
                visit(names, found)
    return scores


def metric_of(metric: str | Metric) -> Metric:
    """The function of a metric's name.

    Raises:
        UsageError: an unknown name.
    """
    if callable(metric):
        return metric
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    return wanda_scores if metric == "wanda" else lambda weight, norms: magnitude_scores(weight)


def scores_of(name: str, module: nn.Module, collector: Collector, score: Metric) -> Tensor:
    """Scores of one matrix on its weight's device, checked."""
    weight = matrix(module)
    norms = collector.of(name).norms.to(weight.device)
    kind = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scores = score(weight.to(kind), norms.to(kind)).detach()
    try:
        require_scores(scores, weight)
    except NumericalFailure as error:
        raise NumericalFailure(f"{name}: {error}") from None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return scores.float()


def visits(
    model: nn.Module,
    matrices: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    *,
    gram: bool = False,
    sequential: bool,
    device: torch.device | str | None = "cpu",
    once: bool = False,
) -> Generator[tuple[list[str], Collector], None, None]:
    """(matrices of a decoder layer, the sums of their inputs), layer after layer; for consumers that prune as they go.

    With `sequential` each layer reads what the layers before it give by then; without, what the dense model gives,
    and all sums are held at once. The caller holds `state_kept`; `once` says that it changes nothing.
    """
    groups = blocks(model, list(matrices))
    if not sequential:
        collector = Collector(matrices, gram=gram, device=device)
        runner = decoder_stack(model).runner
        at = next(unwrap(model).parameters()).device
        for batch in batches:
            moved = batch.to(at)
            with torch.no_grad(), collector.watching(moved):
                runner(**arguments(runner, moved))
        for names in groups:
            yield names, collector
            for name in names:
                collector.sums.pop(name, None)
        return
    of_layer = {_layer(model, names[0]): names for names in groups}
    left = len(groups)
    for step in layer_by_layer(model, batches, store=device):
        names = of_layer.get(step.index, [])
        if names:
            left -= 1
            collector = Collector({name: matrices[name] for name in names}, gram=gram, device=device)
            step.run(collector.watching, keep=once)
            yield names, collector
        if not left:
            return
        if not (names and once):
            step.run(keep=True)


def _layer(model: nn.Module, name: str) -> int:
    """Index of the decoder layer that a matrix lies in."""
    return int(name.removeprefix(decoder_stack(model).name + ".").partition(".")[0])
