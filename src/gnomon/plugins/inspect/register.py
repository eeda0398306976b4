"""What Inspect's entry point enters: tasks and the provider, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import order_task
from .provider import provider


@functools.cache
def registered() -> dict[str, Callable[..., Any]]:
    """The registered tasks by name. The provider is registered, too."""
    from inspect_ai import task
    from inspect_ai.model import modelapi

    modelapi(name="gnomon")(provider)
    order_task.parts()
    return {"set_order": task(order_task.set_order)}


def set_order() -> Callable[..., Any]:
    """The task, registered."""
    return registered()["set_order"]
