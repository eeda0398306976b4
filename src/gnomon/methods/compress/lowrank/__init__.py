"""Low-rank factorisation of a model's linear layers."""

from typing import Any

from .linear import LowRankLinear, to_dense

METHODS = ("svd", "asvd", "svd_llm", "svd_llm_lora", "dobi")


def compress_lowrank(
    model: Any, method: str = "svd", keep: float = 0.8, calib: Any = None, **options: Any
) -> Any:
    """Stand-in until the mathematics is merged."""
    raise NotImplementedError


__all__ = ["METHODS", "LowRankLinear", "compress_lowrank", "to_dense"]
