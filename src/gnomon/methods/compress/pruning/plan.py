"""What pruning is asked to do: settings, everything that is refused beforehand, and what each matrix has to give.

Here:  checks before any work; shares turned into exact numbers, or into an N of M per matrix.
Not here: the work itself (`prune`).
Inferred: allocations other than uniform under N:M give each matrix an N of its own, nearest to its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gnomon.core.errors import UsageError, unknown

from ..calibration import Batch, Calib, require_calib
from ..obs import DAMPING
from .allocate import OPTIONS, Request, require_known
from .allocation import Allocation
from .counts import budget, fit_counts
from .importance import Metric, metric_of
from .maskllm import MaskLLMConfig, masks_of
from .quota import Pattern, Quota, require_share
from .sparsegpt import BLOCK
from .targets import Patterns, matrix, prunable, shapes_of

PRUNERS = ("magnitude", "wanda", "sparsegpt", "maskllm")
SHORTHANDS = {"owl": "owl", "alpha": "alpha", "atp": "atp", "lua": "lua"}
"""Methods that are Wanda with an allocation of that name."""
METHODS = (*PRUNERS, *SHORTHANDS)


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """What the methods can be told beyond `prune`'s own arguments."""

    metric: str | Metric = "wanda"
    """Of the method "wanda": "wanda", "magnitude" or a function (weight, norms) -> scores; compared inside rows."""
    variant: bool = False
    """Wanda's variant by cumulative sums; for the metric "wanda" without a pattern."""
    damping: float = DAMPING
    """SparseGPT: share of the mean diagonal of H."""
    block: int = BLOCK
    """SparseGPT: columns whose mask is chosen at once."""
    maskllm: MaskLLMConfig = field(default_factory=MaskLLMConfig)
    prior: str | None = "wanda"
    """MaskLLM: the mask it starts near, "wanda", "magnitude", or None."""
    options: Mapping[str, Any] | None = None
    """Of a named allocation: outlier, spread (owl); tail, spread (alpha); points (atp); steps, lr, ... (lua)."""

    def __post_init__(self) -> None:
        metric_of(self.metric)
        if self.prior not in ("wanda", "magnitude", None):
            raise unknown("prior", str(self.prior), ("wanda", "magnitude"))
        if not 0 <= self.damping < math.inf or self.block < 1:
            raise UsageError(
                f"damping={self.damping} must be finite, 0 or more, and block={self.block} at least 1."
            )


TOLERANCE = 5e-3
"""How far a given allocation's mean may lie from the sparsity that is asked for beside it."""


def _sparsity(
    sparsity: float | None,
    pattern: Pattern | None,
    given: Allocation | None,
    shapes: Mapping[str, tuple[int, int]],
) -> float:
    """The share that all of it together loses."""
    if pattern is not None:
        if sparsity is not None and abs(sparsity - pattern.sparsity) > 1e-9:
            raise UsageError(
                f"pattern={pattern} removes {pattern.sparsity:g}, but sparsity={sparsity}. Leave one of them out."
            )
        return pattern.sparsity
    if sparsity is None:
        if given is None:
            raise UsageError("Nothing says how much to remove. Pass sparsity=0.5 or pattern='2:4'.")
        sparsity = given.mean(shapes)
    require_share(sparsity)
    if given is not None:
        _require_mean(given.mean(shapes), sparsity)
    return sparsity


def _require_mean(mean: float, sparsity: float) -> None:
    """Refuse to report as p what an allocation has not reached."""
    if abs(mean - sparsity) > TOLERANCE:
        raise UsageError(
            f"The allocation removes {mean:.4f} of the weights, but {sparsity:.4f} are asked for. Train it until it "
            "reaches its target, or ask for what it gives."
        )


def _patterns(
    found: Allocation, shapes: Mapping[str, tuple[int, int]], pattern: Pattern
) -> dict[str, Pattern]:
    """N per matrix: floors of the removed of each M, then the largest remainders while the budget lasts."""
    names, m = list(shapes), pattern.of
    sizes = {name: math.prod(shapes[name]) for name in names}
    wanted = {name: found.of(name, shapes[name]) * m for name in names}
    gone = {name: math.floor(wanted[name] + 1e-6) for name in names}
    left = pattern.sparsity * sum(sizes.values()) - sum(gone[name] / m * sizes[name] for name in names)
    for name in sorted(names, key=lambda name: gone[name] - wanted[name]):
        step = sizes[name] / m
        if wanted[name] - gone[name] > 1e-6 and gone[name] < m and left >= step / 2:
            gone[name] += 1
            left -= step
    return {name: Pattern(m - gone[name], m) for name in names}


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Everything that was asked for, checked."""

    model: nn.Module
    method: str
    sparsity: float
    pattern: Pattern | None
    allocation: Any
    batches: list[Batch]
    sequential: bool
    exact: bool
    config: PruneConfig
    matrices: dict[str, nn.Module]
    request: Request
    device: torch.device | str | None
    zeros: dict[str, int]
    found: Allocation | None = None
    quotas: Mapping[str, Quota | Pattern] | None = None
    losses: dict[str, float]
    notes: list[str]

    @classmethod
    def checked(
        cls,
        model: nn.Module,
        method: str,
        sparsity: float | None,
        pattern: str | None,
        allocation: Any,
        calib: Calib | None,
        sequential: bool,
        exact: bool,
        config: PruneConfig,
        targets: Patterns,
        exclude: Patterns,
        device: torch.device | str | None,
    ) -> Job:
        """Refuse whatever can't be done, before anything is."""
        if method not in METHODS:
            raise unknown("pruning method", method, METHODS)
        if method in SHORTHANDS:
            if not (isinstance(allocation, str) and allocation in ("uniform", SHORTHANDS[method])):
                raise UsageError(
                    f"method={method!r} is Wanda with that allocation; with another one say method='wanda'."
                )
            method, allocation = "wanda", SHORTHANDS[method]
        parsed = None if pattern is None else Pattern.parse(pattern)
        if method == "maskllm" and parsed is None:
            raise UsageError("MaskLLM learns N:M masks only. Pass pattern='2:4', or take another method.")
        if parsed is not None and method == "maskllm":
            masks_of(parsed)
        if config.variant and (method != "wanda" or parsed is not None or config.metric != "wanda"):
            raise UsageError("variant=True is a form of method='wanda' with its own metric and no pattern.")
        matrices = prunable(model, targets, exclude)
        shapes = shapes_of(matrices)
        given = allocation if isinstance(allocation, Allocation) else None
        if isinstance(allocation, Mapping):
            given = Allocation(ratios=dict(allocation))
        if given is not None:
            given.require(shapes)
        p = _sparsity(sparsity, parsed, given, shapes)
        if parsed is not None:
            for name, shape in shapes.items():
                parsed.require_fits(name, shape)
        needs = method != "magnitude"
        batches = require_calib(calib, model, f"method={method!r}") if needs else []
        request = Request(
            model=model,
            matrices=matrices,
            sparsity=p,
            calib=calib,
            metric="magnitude" if method == "magnitude" else config.metric,
            rows=method != "magnitude",
            targets=targets,
            exclude=exclude,
            device=device,
            options=dict(config.options or {}),
            block=config.block if method == "sparsegpt" and parsed is None else None,
        )
        if isinstance(allocation, str):
            require_known(allocation, request)
        elif not isinstance(allocation, Mapping | Allocation) and not callable(allocation):
            raise UsageError(
                f"allocation is a {type(allocation).__name__}, but must be a name, a dictionary, an Allocation or a "
                "function."
            )
        elif request.options:
            raise UsageError(
                f"options={dict(request.options)} are of named allocations: {', '.join(OPTIONS)}."
            )
        zeros = {name: int((matrix(module) == 0).sum()) for name, module in matrices.items()}
        total = sum(out * inputs for out, inputs in shapes.values())
        if parsed is None and exact and sum(zeros.values()) > budget(p, total):
            raise UsageError(
                f"{sum(zeros.values()):,} of {total:,} weights are zero already, a share of "
                f"{sum(zeros.values()) / total:.4f}, more than sparsity={p}. Ask for more, or pass exact=False."
            )
        return cls(
            model=model,
            method=method,
            sparsity=p,
            pattern=parsed,
            allocation=given if given is not None else allocation,
            batches=batches,
            sequential=sequential,
            exact=exact,
            config=config,
            matrices=matrices,
            request=request,
            device=device,
            zeros=zeros,
            losses={},
            notes=[],
        )

    def planned(self) -> Job:
        """What each matrix has to give."""
        assert self.found is not None
        shapes = self.request.shapes
        _require_mean(self.found.mean(shapes), self.sparsity)
        if self.pattern is not None:
            patterns = _patterns(self.found, shapes, self.pattern)
            for one in set(patterns.values()) if self.method == "maskllm" else ():
                masks_of(one)  # refuses what has too many
            if len({one.keep for one in patterns.values()}) > 1:
                self.notes.append(
                    "Matrices keep different numbers of every "
                    f"{self.pattern.of} weights, so the model as a whole has no {self.pattern} pattern."
                )
            return replace(self, quotas=patterns)
        totals: dict[str, int | None] = dict.fromkeys(shapes)
        if self.exact:
            sizes = torch.tensor([out * inputs for out, inputs in shapes.values()])
            wanted = torch.tensor(
                [self.found.wanted(name, shape) for name, shape in shapes.items()], dtype=torch.float64
            )
            least = torch.tensor([self.zeros[name] for name in shapes])
            counts = fit_counts(wanted, sizes, budget(self.sparsity, int(sizes.sum())), least=least)
            totals = dict(zip(shapes, counts.tolist(), strict=True))
        quotas = {name: Quota.of(self.found, name, shape, totals[name]) for name, shape in shapes.items()}
        return replace(self, quotas=quotas)
