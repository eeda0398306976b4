"""Gnomon in Inspect AI: tasks, and models in both directions. Needs the extra `agents`.

    inspect eval gnomon/set_order --model openai/gpt-4.1 -T permutations=24
    inspect eval gnomon/set_order --model gnomon/smollm2-135m -M mode=setmask+setpe -T answer=likelihood

| name | what it is |
|---|---|
| `set_order` | task: how much answers depend on the order in which options are written (Set-LLM) |
| `gnomon/<model>` | provider: any model that `gnomon.core.models.load` knows, batched; with `-M mode=…` it reads sets |
| :class:`InspectChat` | any Inspect model as a `gnomon.core.chat.ChatModel`, for engines that know nothing of Inspect |

Inspect finds these through the entry point `inspect_ai` of the package, which asks for the attribute `registered` here.
Importing this module imports nothing of Inspect.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from gnomon.core.errors import MissingExtra

_LAZY = {"InspectChat": "chat", "registered": "register", "set_order": "register"}

__all__ = ["InspectChat", "registered", "set_order"]


def __getattr__(name: str) -> Any:
    """
    Raises:
        MissingExtra: Inspect AI isn't installed.
    """
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("inspect_ai") is None:
        raise MissingExtra("Inspect AI", "agents", f"gnomon.plugins.inspect.{name}")
    found = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return found if name == "InspectChat" else found()
