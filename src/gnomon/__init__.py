"""Gnomon: a workbench of recent LLM methods, each one a part, a study and a card.

`import gnomon` loads neither torch nor Transformers; names below are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "apply": "gnomon.lab.apply",
    "check": "gnomon.lab.apply",
    "run": "gnomon.lab.run",
    "load_result": "gnomon.lab.result",
    "eval": "gnomon.core.evaluate",
}

__all__ = ["__version__", "apply", "check", "eval", "load_result", "run"]

if TYPE_CHECKING:
    from gnomon.core.evaluate import eval
    from gnomon.lab.apply import apply, check
    from gnomon.lab.result import load_result
    from gnomon.lab.run import run


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gnomon' has no attribute {name!r}")
