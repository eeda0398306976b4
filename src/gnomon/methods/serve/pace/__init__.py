"""Pace: each decoding step runs as many parallel branches as the batch's latency slack can carry.

Paper: "Regulating Branch Parallelism in LLM Serving", NeurIPS 2026, arXiv:2605.06914 (its preprint calls it TAPER).
Here:  rows and groups (`rows`), the step's predicted time (`predictor`), deadlines (`deadlines`), Algorithm 1
       (`admit`), policies `off`, `cap`, `eager`, `pace` and `hold` (`policies`), a simulator (`simulate`, `workload`,
       `report`), an engine for Transformers models (`engine`, `pool`, `stages`). Only the engine needs torch.
Not here: schedulers of real engines (`gnomon.plugins`), admission of requests, eviction.
Inferred: the paper's text was not at hand; algorithm, defaults and metrics follow the authors' repository, numbers of
       ablations a summary. `accumulated` deadlines, the SLO of the first token, fixed caps without a budget.
Differs from the paper: coefficients are kept non-negative when they are refitted; `request` deadlines are the default,
       since the repository's `row` deadlines fall back to width 1 for good once a deferred row is late.
Limits: gains exist where branches dominate the batch; where the baseline itself misses the SLO nothing helps. Which
       policy wins depends on whether tokens or steps of progress count: reports print both.

>>> rows = [BranchRow(0, "chat", 1000, deadline=0.020, progress=0)]
>>> rows += [BranchRow(k, "agent", 2000, deadline=0.018, progress=k) for k in (1, 2, 3, 4)]
>>> config = PaceConfig(rho=0.8, tpot_slo_s=0.025)
>>> plan = make_policy("pace").select(build_groups(rows), LatencyPredictor(5e-3, 5e-5, 1e-6), config, now=0.0)
>>> plan.admitted, plan.deferred, round(1e3 * plan.predicted, 2), round(1e3 * plan.budget, 2)
((0, 1, 2, 3, 4), (), 14.25, 16.02)
"""

from typing import TYPE_CHECKING, Any

from .config import PaceConfig
from .deadlines import DeadlineBook, row_deadlines
from .policies import (
    POLICIES,
    AdmissionPolicy,
    Cap,
    Eager,
    Hold,
    Off,
    Pace,
    Plan,
    make_policy,
    register_policy,
)
from .predictor import H200_32B, LatencyPredictor, fit_latency
from .report import ServeLog, ServeReport
from .rows import BranchRow, Group, Groups, build_groups
from .simulate import simulate_decode
from .stages import BranchSpec, stages_from_tags
from .workload import DecodeRequest, Mix, mixed_workload, read_trace

if TYPE_CHECKING:
    from .engine import Deferral, PackedBranchEngine

__all__ = [
    "H200_32B",
    "POLICIES",
    "AdmissionPolicy",
    "BranchRow",
    "BranchSpec",
    "Cap",
    "DeadlineBook",
    "DecodeRequest",
    "Deferral",
    "Eager",
    "Group",
    "Groups",
    "Hold",
    "LatencyPredictor",
    "Mix",
    "Off",
    "Pace",
    "PaceConfig",
    "PackedBranchEngine",
    "Plan",
    "ServeLog",
    "ServeReport",
    "build_groups",
    "fit_latency",
    "make_policy",
    "mixed_workload",
    "read_trace",
    "register_policy",
    "row_deadlines",
    "simulate_decode",
    "stages_from_tags",
]


def __getattr__(name: str) -> Any:
    """The engine on first use, since only it needs torch and Transformers."""
    if name in ("Deferral", "PackedBranchEngine"):
        from . import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
