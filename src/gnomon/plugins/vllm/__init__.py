"""Gnomon's two serving policies in vLLM: Tail-Optimized LRU for the prefix cache, Pace for branches.

`pip install gnomon` beside vLLM changes nothing: :func:`register`, which vLLM calls in each of its processes, returns
at once unless `GNOMON_VLLM` names policies. `gnomon serve` sets it; so can anyone:

    GNOMON_VLLM=tail_lru,pace vllm serve MODEL

==================  ============================================================================================
file                holds
==================  ============================================================================================
`settings`          what `GNOMON_VLLM` and `GNOMON_VLLM_SETTINGS` say, validated
`install`           the version check and the three patches
`pool`, `cache`     T-LRU: the free queue of vLLM's block pool, and who tags its blocks
`pacing`            Pace: which running requests a step leaves out
`scheduling`        the scheduler class, on top of whichever one vLLM chose
`metrics`           the counters, on their way to `/metrics`
`offload`           T-LRU as a `CachePolicy` of the CPU tier
`serve`, `launch`   `gnomon serve`, and vLLM's command line under it
==================  ============================================================================================

Names below come when they are asked for, since they subclass vLLM's: `PaceScheduler` and `PaceAsyncScheduler` for
`--scheduler-cls`.
"""

import os

POLICIES = "GNOMON_VLLM"
"""Environment variable: policies separated by commas, such as `tail_lru,pace`. Unset or empty: nothing happens."""


def register() -> None:
    """What vLLM calls as a general plug-in. It may be called more than once in a process."""
    if not os.environ.get(POLICIES, "").strip():
        return
    from .install import install

    install()


def __getattr__(name: str) -> type:
    if name in ("PaceScheduler", "PaceAsyncScheduler"):
        from .scheduling import named_scheduler

        return named_scheduler(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
