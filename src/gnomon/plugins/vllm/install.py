"""Put the policies into vLLM: a version check, then three patches.

=====================================  =========================================================================
patched                                so that
=====================================  =========================================================================
`SchedulerConfig.get_scheduler_cls`    the scheduler that vLLM would have chosen is subclassed (`scheduling`)
`EngineCoreOutputs`, its annotation    counters survive the way from the engine's process (`metrics`)
`StatLoggerManager.__init__`           they reach `/metrics`
=====================================  =========================================================================

The stat logger is no entry point of its own on purpose: vLLM turns statistics on as soon as one is found, for everyone
who has the package installed.
"""

from __future__ import annotations

import functools
from typing import Any

from gnomon.core.errors import GnomonError

from . import POLICIES
from .settings import Settings

VERSIONS = ("0.32",)
"""Releases (major.minor) whose hooks these are; each was run through the tests marked `vllm`."""

__all__ = ["VERSIONS", "install", "require_version"]


def require_version(version: str) -> None:
    """Refuse a vLLM that these patches were not made for.

    Raises:
        GnomonError: with the versions that have the hooks.
    """
    release = version.partition("+")[0].split(".")
    if ".".join(release[:2]) not in VERSIONS:
        raise GnomonError(
            f"{POLICIES} is set, but this is vLLM {version}, whose scheduler and block pool may differ from those that "
            f"Gnomon's policies were made for. Versions that have the hooks: {', '.join(f'{v}.*' for v in VERSIONS)}. "
            f"Install one of them, or unset {POLICIES}."
        )


def require_hooks() -> None:
    """Refuse a vLLM in which a name that the policies lean on is missing.

    Raises:
        GnomonError: with the missing names.
    """
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
    from vllm.v1.core.sched.scheduler import Scheduler

    queue = "popleft popleft_n remove append append_n prepend_n iter_blocks_after"
    scheduler = "schedule update_from_output add_request make_stats reset_prefix_cache _free_request"
    wanted = [
        (FreeKVCacheBlockQueue, queue),
        (BlockPool, "touch free_blocks get_new_blocks"),
        (Scheduler, f"{scheduler} _free_request_blocks"),
    ]
    missing = [f"{c.__name__}.{n}" for c, names in wanted for n in names.split() if not hasattr(c, n)]
    if missing:
        raise GnomonError(f"This vLLM lacks {', '.join(missing)}, which {POLICIES} needs. Unset {POLICIES}.")


def install() -> None:
    """Check the version and the settings, then patch. A second call changes nothing.

    Raises:
        GnomonError: another version of vLLM, or settings that make no sense; vLLM then doesn't start.
    """
    import vllm

    require_version(vllm.__version__)
    Settings.from_environment()
    require_hooks()

    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.metrics.loggers import StatLoggerManager

    from . import metrics, scheduling

    metrics.let_counters_travel()
    _wrap(SchedulerConfig, "get_scheduler_cls", scheduling.chosen)
    _wrap(StatLoggerManager, "__init__", metrics.with_logger)


def _wrap(owner: type, name: str, wrapper: Any) -> None:
    """Replace `owner.name` by `wrapper(original)`, once."""
    original = getattr(owner, name)
    if getattr(original, "_gnomon", False):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    wrapped.__dict__["_gnomon"] = True
    setattr(owner, name, wrapped)
