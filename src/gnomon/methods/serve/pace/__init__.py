"""Pace: each decoding step runs as many parallel branches as the batch's latency slack can carry."""

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
from .rows import BranchRow, Group, Groups, build_groups

__all__ = [
    "H200_32B",
    "POLICIES",
    "AdmissionPolicy",
    "BranchRow",
    "Cap",
    "DeadlineBook",
    "Eager",
    "Group",
    "Groups",
    "Hold",
    "LatencyPredictor",
    "Off",
    "Pace",
    "PaceConfig",
    "Plan",
    "build_groups",
    "fit_latency",
    "make_policy",
    "register_policy",
    "row_deadlines",
]
