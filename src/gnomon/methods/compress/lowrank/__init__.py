"""Low-rank factorisation of a model's linear layers."""

from .linear import LowRankLinear, to_dense

__all__ = ["LowRankLinear", "to_dense"]
