"""One function for all pruners and allocators: a dense model in, the same model with zeros out, and a report.

Paper: pruners and allocators are the baselines of "Lua-LLM"; see the modules that hold them.
Here:  the order of work, restoring on failure.
Not here: what is refused beforehand (`plan`), writing files (`export`), learned allocation (`compress.lua`).
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor, nn

from gnomon.core.layers import unwrap

from ..calibration import Calib, state_kept
from ..obs import InverseFactor, inverse_factor
from .allocate import Allocator, allocate
from .allocation import Allocation
from .importance import metric_of, scores_of, visits
from .kept import Originals
from .maskllm import learn_masks
from .masks import magnitude_scores, mask_from, nm_mask, wanda_mask
from .plan import Job, PruneConfig
from .quota import Pattern, Quota
from .report import PruneReport
from .sparsegpt import sparsegpt
from .statistics import Collector, InputSums
from .targets import Patterns, matrix

log = logging.getLogger(__name__)


def prune(
    model: nn.Module,
    method: str = "wanda",
    sparsity: float | None = None,
    *,
    pattern: str | None = None,
    allocation: str | Mapping[str, float | Tensor] | Allocation | Allocator = "uniform",
    calib: Calib | None = None,
    sequential: bool = True,
    exact: bool = True,
    config: PruneConfig | None = None,
    targets: Patterns = None,
    exclude: Patterns = None,
    device: torch.device | str | None = "cpu",
) -> PruneReport:
    """Set weights of the decoder's linear layers to zero, in place.

    If anything fails, the model is as it was before. Embeddings, norms, biases and the head are never touched.

    Args:
        method: "magnitude", "wanda", "sparsegpt", "maskllm" (N:M only); "owl", "alpha", "atp" and "lua" are Wanda with
            that allocation.
        sparsity: share of the weights to remove; may be left out with a pattern, or with an allocation that is given
            as numbers.
        pattern: "2:4" keeps 2 of every 4 neighbouring inputs of an output.
        allocation: "uniform", "owl", "alpha", "atp", "lua", a dictionary (matrix -> share), an `Allocation`, or a
            function of a `Request`.
        calib: batches of token ids, or dictionaries with input_ids and attention_mask; not for magnitude with uniform
            or alpha. MaskLLM trains on them.
        sequential: measure every decoder layer on what the pruned layers before it give, one layer's inputs held at a
            time; else on the dense model in one pass, all sums held at once.
        exact: round(p N) zeros in all, those that were there included; else the floors of the published code.
        device: where sums and the inputs of the layer at hand lie; None: beside the layer.

    Raises:
        UsageError: before any work, for whatever can't be done.
        NumericalFailure: weights or activations that aren't finite; an H that no damping mends.
    """
    job = Job.checked(
        model,
        method,
        sparsity,
        pattern,
        allocation,
        calib,
        sequential,
        exact,
        config or PruneConfig(),
        targets,
        exclude,
        device,
    )
    found = allocate(job.allocation, job.request)
    job = replace(job, found=found).planned()
    with Originals(job.matrices, on_error=True) as originals:
        masks = _RUNNERS[job.method](job, originals)
        report = _report(job, masks)
    log.info("%s, %s: %.6f of %d weights are zero", method, found.source, report.sparsity, report.weights)
    return report


def _magnitude(job: Job, originals: Originals) -> dict[str, Tensor]:
    masks = {}
    for name, module in job.matrices.items():
        weight = matrix(module)
        masks[name] = _mask(magnitude_scores(weight), weight, _quota(job, name), rows=False)
    _apply(job, originals, masks)
    return {name: mask.cpu() for name, mask in masks.items()}


def _wanda(job: Job, originals: Originals) -> dict[str, Tensor]:
    masks: dict[str, Tensor] = {}
    score = metric_of(job.config.metric)
    with state_kept(unwrap(job.model)), closing(_steps(job)) as steps:
        for names, collector in steps:
            for name in names:
                weight, quota = matrix(job.matrices[name]), _quota(job, name)
                if job.config.variant and isinstance(quota, Quota):
                    scores_of(
                        name, job.matrices[name], collector, score
                    )  # refuses what isn't finite, by name
                    mask = wanda_mask(weight, collector.of(name).norms.to(weight.device), quota, variant=True)
                else:
                    scores = scores_of(name, job.matrices[name], collector, score)
                    mask = _mask(scores, weight, quota, rows=True)
                originals.write(name, torch.where(mask, weight, 0))
                masks[name] = mask.cpu()
    return masks


def _sparsegpt(job: Job, originals: Originals) -> dict[str, Tensor]:
    masks: dict[str, Tensor] = {}
    with state_kept(unwrap(job.model)), closing(_steps(job, gram=True)) as steps:
        for names, collector in steps:
            last: tuple[InputSums, InverseFactor] | None = None
            for name in names:
                sums = collector.of(name)
                if last is None or last[0] is not sums:  # query, key and value share one factor
                    last = (sums, _factor(job, name, collector))
                done = sparsegpt(
                    matrix(job.matrices[name]), last[1], _quota(job, name), block=job.config.block
                )
                originals.write(name, done.weight)
                masks[name] = done.mask.cpu()
                job.losses[name] = done.loss / sums.tokens
    return masks


def _maskllm(job: Job, originals: Originals) -> dict[str, Tensor]:
    patterns = {name: quota for name in job.matrices if isinstance(quota := _quota(job, name), Pattern)}
    prior = None
    if job.config.prior is not None:
        prior = {}
        score = metric_of(job.config.prior)
        with (
            state_kept(unwrap(job.model)),
            closing(
                visits(job.model, job.matrices, job.batches, sequential=False, device=job.device, once=True)
            ) as steps,
        ):
            for names, collector in steps:
                for name in names:
                    scores = scores_of(name, job.matrices[name], collector, score)
                    prior[name] = nm_mask(scores, matrix(job.matrices[name]), patterns[name]).cpu()
    masks = learn_masks(job.model, job.matrices, job.batches, patterns, job.config.maskllm, prior)
    _apply(job, originals, masks)
    return {name: mask.cpu() for name, mask in masks.items()}


_RUNNERS = {"magnitude": _magnitude, "wanda": _wanda, "sparsegpt": _sparsegpt, "maskllm": _maskllm}


def _steps(
    job: Job, *, gram: bool = False, dense: bool = False
) -> Generator[tuple[list[str], Collector], None, None]:
    """Layers with the sums of their inputs; `dense`: in one pass over the model as it is, which stays so."""
    return visits(
        job.model,
        job.matrices,
        job.batches,
        gram=gram,
        sequential=job.sequential and not dense,
        device=job.device,
        once=dense,
    )


def _mask(scores: Tensor, weight: Tensor, quota: Quota | Pattern, *, rows: bool) -> Tensor:
    if isinstance(quota, Pattern):
        return nm_mask(scores, weight, quota)
    return mask_from(scores, weight, quota, rows=rows)


def _quota(job: Job, name: str) -> Quota | Pattern:
    assert job.quotas is not None
    return job.quotas[name]


def _apply(job: Job, originals: Originals, masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        originals.write(name, torch.where(mask, matrix(job.matrices[name]), 0))


def _factor(job: Job, name: str, collector: Collector) -> InverseFactor:
    """Of one input's H, on the device of the layer; what it took is noted."""
    gram = collector.of(name).gram
    assert gram is not None
    factor = inverse_factor(gram.to(matrix(job.matrices[name]).device), damping=job.config.damping)
    if factor.damping > job.config.damping:
        note = f"{name}: Cholesky failed at damping {job.config.damping:g}, so it was raised to {factor.damping:g}."
        job.notes.append(note)
        log.warning("%s", note)
    if dead := int(factor.dead.sum()):
        job.notes.append(
            f"{name}: {dead} of {len(factor.dead)} inputs are always zero; their weights go first."
        )
    return factor


def _report(job: Job, masks: Mapping[str, Tensor]) -> PruneReport:
    """Counted on the weights as they are stored now."""
    assert job.found is not None
    zeros = {name: int((matrix(module) == 0).sum()) for name, module in job.matrices.items()}
    sizes = {name: matrix(module).numel() for name, module in job.matrices.items()}
    removed, total = sum(zeros.values()), sum(sizes.values())
    report = PruneReport(
        masks={name: masks[name] for name in job.matrices},
        sparsity=removed / total,
        per_layer={name: zeros[name] / sizes[name] for name in zeros},
        requested=job.sparsity,
        method=job.method,
        allocation=job.found,
        pattern=job.pattern,
        removed=removed,
        zeros_before=sum(job.zeros.values()),
        weights=total,
        losses=dict(job.losses),
        notes=tuple(job.notes),
    )
    if job.exact and job.pattern is None and report.off:
        note = f"{report.off} kept weights are zero in the dtype they are stored in."
        report = replace(report, notes=(*report.notes, note))
    return report
