"""Tail-Optimized LRU: evict first the cached blocks that cannot hurt the slowest requests, then fall back to LRU.

Paper: "Tail-Optimized Caching for LLM Inference", NeurIPS 2025, arXiv 2510.15152.
Here:  every policy of the paper behind one protocol (`policies`, `expected`, `foresight`), FIFO, LFU, SLRU and ARC
       (`references`), the latency model and an engine's settings (`latency`), the simulator (`simulate`, compiled:
       `kernels.cache_sim`), the optimum as a linear program (`optimum`), a threshold that follows the served
       percentile (`adaptive`), traces (`trace`, `readers`), shared prefixes (`prefix`), a real store of KV caches for
       Transformers models (`store`).
Not here: engines' own caches (`plugins.vllm`; SGLang ships the policy), continuous batching, offloading.
Inferred: inside phase 1 the least recently served goes first, as in both engines' ports; the adaptive rule; C and block
       size of the paper's simulations (tokens, 1).
Differs from the paper: `>` and a loop where the printed pseudo-code has `>=` and one pass, which would trim a block too
       many and free one a conversation; beliefs are compared as logarithms, which have the same order and don't
       underflow.
Limits: TTFT is linear in uncached blocks, which holds while prefills aren't batched with others. Conversations share
       nothing except in `prefix`. ARC, SLRU, the adaptive form and rates by conversation run in Python only.

>>> chat = [Turn(0, "A", 100, 0), Turn(1, "B", 100, 0), Turn(2, "A", 100, 0)]
>>> [simulate(chat, policy, 100).tel(150) for policy in (LRU(), TailOptimizedLRU(150, 100))]
[50, 0]
"""

from .adaptive import AdaptiveTailOptimizedLRU
from .expected import ExpectedTailOptimizedLRU
from .foresight import Belady, EndAware, LengthAware, TailOptimizedBelady
from .latency import LatencyModel, PolicySettings, settings_for_slo, tel_safe_budget
from .optimum import lp_optimal_tel
from .policies import LRU, EvictionPolicy, Policy, TailOptimizedLRU, ThresholdLRU
from .prefix import PrefixResult, PrefixTrace, simulate_prefixes
from .readers import FORMATS, detect_format, read_trace
from .references import ARC, FIFO, LFU, SLRU
from .simulate import CacheSimResult, simulate
from .trace import Trace, TraceOracle, Turn, synthetic

__all__ = [
    "ARC",
    "FIFO",
    "FORMATS",
    "LFU",
    "LRU",
    "SLRU",
    "AdaptiveTailOptimizedLRU",
    "Belady",
    "CacheSimResult",
    "ConversationKVStore",
    "EndAware",
    "EvictionPolicy",
    "ExpectedTailOptimizedLRU",
    "LatencyModel",
    "LengthAware",
    "Policy",
    "PolicySettings",
    "PrefixResult",
    "PrefixTrace",
    "TailOptimizedBelady",
    "TailOptimizedLRU",
    "ThresholdLRU",
    "Trace",
    "TraceOracle",
    "Turn",
    "detect_format",
    "lp_optimal_tel",
    "read_trace",
    "settings_for_slo",
    "simulate",
    "simulate_prefixes",
    "synthetic",
    "tel_safe_budget",
]


def __getattr__(name: str) -> object:
    """The store imports torch, which the policies don't need."""
    if name in ("ConversationKVStore", "Served"):
        from . import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
