"""Tail-Optimized LRU: evict first the cached blocks that cannot hurt the slowest requests, then fall back to LRU."""

from .latency import LatencyModel, PolicySettings, settings_for_slo, tel_safe_budget

__all__ = ["LatencyModel", "PolicySettings", "settings_for_slo", "tel_safe_budget"]
