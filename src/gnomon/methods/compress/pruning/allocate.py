"""Allocations of a model by name: the statistics that `allocators` turns into shares, gathered from its weights.

Here:  uniform, OWL, AlphaPruning, ATP; Lua by its own module; dictionaries and functions of the caller.
Not here: the formulas (`allocators`), Lua (`compress.lua`, loaded when it is asked for).
Inferred: ATP (recalled) takes the common difference with the lowest loss on the calibration text, the masks being
       Wanda's or magnitude's, put in at once on the dense model's scores.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import unwrap

from ..calibration import Batch, Calib, mean_nll, require_calib, state_kept
from .allocation import Allocation, Shapes
from .allocators import (
    alpha_shares,
    atp_grid,
    atp_shares,
    hill_alpha,
    outlier_percentage,
    owl_shares,
)
from .importance import Metric, metric_of, scores_of, visits
from .kept import Originals
from .masks import mask_from
from .quota import Quota
from .statistics import Collector
from .targets import Patterns, blocks, matrix, shapes_of

ALLOCATIONS = ("uniform", "owl", "alpha", "atp", "lua")
WITH_TEXT = ("owl", "atp", "lua")
"""Allocations that run the model on calibration text."""

LUA = "gnomon.methods.compress.lua"


@dataclass(frozen=True)
class Request:
    """What an allocator may look at."""

    model: nn.Module
    matrices: Mapping[str, nn.Module]
    sparsity: float
    calib: Calib | None = None
    metric: str | Metric = "wanda"
    """For OWL's outliers and ATP's masks."""
    rows: bool = True
    """ATP's masks compare inside rows, as Wanda does; else over the matrix."""
    targets: Patterns = None
    exclude: Patterns = None
    device: torch.device | str | None = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the allocator: `outlier`, `spread` (owl); `tail`, `spread` (alpha); `points` (atp); `lua.allocate`'s."""
    block: int | None = None
    """Columns of a block of SparseGPT, for which Lua learns a share each."""

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.matrices)


Allocator = Callable[[Request], Allocation | Mapping[str, float | Tensor]]
"""A function of the caller's: what it returns is checked like any other allocation."""

OPTIONS = {"owl": ("outlier", "spread"), "alpha": ("tail", "spread"), "atp": ("points",)}


def allocate(
    allocation: str | Mapping[str, float | Tensor] | Allocation | Allocator, request: Request
) -> Allocation:
    """The allocation of a name, a dictionary (name of a matrix -> share) or a function.

    Raises:
        UsageError: an unknown name or option, or entries that don't fit the matrices.
    """
    if isinstance(allocation, str):
        require_known(allocation, request)
        found = _NAMED[allocation](request)
    elif isinstance(allocation, Allocation):
        found = allocation
    elif isinstance(allocation, Mapping):
        found = Allocation(ratios=dict(allocation))
    else:
        given = allocation(request)
        found = given if isinstance(given, Allocation) else Allocation(ratios=dict(given), source="callable")
    found.require(request.shapes)
    return found


def require_known(name: str, request: Request) -> None:
    """Refuse what :func:`allocate` would refuse, without doing its work."""
    if name not in ALLOCATIONS:
        raise unknown("allocation", name, ALLOCATIONS)
    known = _lua_options() if name == "lua" else OPTIONS.get(name, ())
    for option in request.options:
        if option not in known:
            raise unknown(f"option of allocation {name!r}", option, known)
    if name in WITH_TEXT:
        require_calib(request.calib, request.model, f"allocation={name!r}")
    if name == "lua" and importlib.util.find_spec(LUA) is None:
        raise UsageError(
            "allocation='lua' needs gnomon.methods.compress.lua, which this version doesn't have."
        )


def _uniform(request: Request) -> Allocation:
    return Allocation(ratios=dict.fromkeys(request.matrices, request.sparsity), source="uniform")


def _owl(request: Request) -> Allocation:
    """Outliers of the dense model's scores."""
    outlier = float(request.options.get("outlier", 5.0))
    score, outliers = metric_of(request.metric), []
    batches = require_calib(request.calib, request.model, "allocation='owl'")
    with state_kept(unwrap(request.model)), closing(_measured(request, batches)) as steps:
        for names, collector in steps:
            scores = [scores_of(name, request.matrices[name], collector, score) for name in names]
            outliers.append(outlier_percentage(scores, outlier=outlier))
    spread = float(request.options.get("spread", 0.08))
    return _by_block(request, owl_shares(outliers, _sizes(request), request.sparsity, spread=spread), "owl")


def _alpha(request: Request) -> Allocation:
    """Mean exponent of each block's matrices."""
    tail = str(request.options.get("tail", "xmin_peak"))
    alphas = []
    for names in blocks(request.model, list(request.matrices)):
        of = [
            hill_alpha(torch.linalg.svdvals(_real(matrix(request.matrices[name]))).square(), tail=tail)
            for name in names
        ]
        alphas.append(math.fsum(of) / len(of))
    spread = float(request.options.get("spread", 0.3))
    return _by_block(request, alpha_shares(alphas, _sizes(request), request.sparsity, spread=spread), "alpha")


def _atp(request: Request) -> Allocation:
    """The common difference whose masks lose least on the calibration text."""
    sizes, p = _sizes(request), request.sparsity
    grid = atp_grid(len(sizes), p, int(request.options.get("points", 9)))
    batches = require_calib(request.calib, request.model, "allocation='atp'")
    score, root = metric_of(request.metric), unwrap(request.model)
    scores: dict[str, Tensor] = {}
    with state_kept(root), closing(_measured(request, batches)) as steps:
        for names, collector in steps:
            scores |= {
                name: scores_of(name, request.matrices[name], collector, score).cpu() for name in names
            }
    losses: list[float] = []
    with state_kept(root), torch.no_grad(), Originals(request.matrices) as originals:
        for beta in grid:
            tried = _by_block(request, atp_shares(len(sizes), sizes, p, beta), "atp")
            for name in request.matrices:
                shape = request.shapes[name]
                weight = originals.of(name)
                total = round(tried.wanted(name, shape))
                quota = Quota.of(tried, name, shape, max(total, int((weight == 0).sum())))
                mask = mask_from(scores[name].to(weight.device), weight, quota, rows=request.rows)
                originals.write(name, weight * mask)
            losses.append(float(mean_nll(root, batches)))
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    best = grid[min(range(len(grid)), key=finite.__getitem__)]
    return _by_block(request, atp_shares(len(sizes), sizes, p, best), "atp")


def _lua(request: Request) -> Allocation:
    """By `gnomon.methods.compress.lua.allocate`; under SparseGPT a share for each of its blocks of columns."""
    module = importlib.import_module(LUA)
    options: dict[str, Any] = {"metric": request.metric}
    if request.block is not None:
        options |= {"granularity": "column", "axis": "column", "group": request.block}
    found = module.allocate(
        request.model,
        request.calib,
        sparsity=request.sparsity,
        targets=request.targets,
        exclude=request.exclude,
        **(options | dict(request.options)),
    )
    return cast(Allocation, found)


def _lua_options() -> tuple[str, ...]:
    """Whatever Lua's allocation and its training take, apart from what `Request` holds itself."""
    if importlib.util.find_spec(LUA) is None:
        return ()
    module = importlib.import_module(LUA)
    found = {*inspect.signature(module.allocate).parameters, *inspect.signature(module.fit).parameters}
    return tuple(sorted(found - {"model", "calib", "sparsity", "targets", "exclude", "settings"}))


_NAMED: dict[str, Callable[[Request], Allocation]] = {
    "uniform": _uniform,
    "owl": _owl,
    "alpha": _alpha,
    "atp": _atp,
    "lua": _lua,
}


def _measured(
    request: Request, batches: Sequence[Batch]
) -> Generator[tuple[list[str], Collector], None, None]:
    return visits(
        request.model, request.matrices, batches, sequential=False, device=request.device, once=True
    )


def _sizes(request: Request) -> list[int]:
    """Pruned weights of each block."""
    shapes = request.shapes
    return [
        sum(math.prod(shapes[name]) for name in names)
        for names in blocks(request.model, list(request.matrices))
    ]


def _by_block(request: Request, shares: Tensor, source: str) -> Allocation:
    """One share for all matrices of a block."""
    groups = blocks(request.model, list(request.matrices))
    return Allocation(
        ratios={
            name: float(share) for names, share in zip(groups, shares.tolist(), strict=True) for name in names
        },
        source=source,
    )


def _real(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float64 else weight.float()
