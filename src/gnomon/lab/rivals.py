"""Competitors from outside: `gnomon run STUDY --with name=module:factory`.

A study that compares interchangeable competitors says in `rival_protocol` what a factory takes and returns, and
passes the target string to its stages, which get the factory with :func:`load_rival`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnomon.core.errors import UsageError, nearest


def load_rival(target: str) -> Callable[..., Any]:
    """The factory that `module:factory` names; modules beside the current folder are found too.

    Raises:
        UsageError: if the module can't be imported or has no such callable.
    """
    module_name, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"--with {target}: {module_name} can't be imported ({error}).") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UsageError(
            f"--with {target}: {module_name} has no callable {name!r}.{nearest(name, vars(module))}"
        )
    return factory  # type: ignore[no-any-return]


def source_file(target: str) -> Path | None:
    """The file a rival comes from, so that changing it counts as changed code."""
    load_rival(target)
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    return Path(file) if file else None
