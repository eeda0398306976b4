"""The runtime type and shape checker that pytest switches on for the whole package (see pyproject.toml)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a fine float


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check `function`'s arguments and result at each call.

    Methods annotated with `typing.Self` stay unchecked: beartype resolves it only where it decorates the
    whole class, while jaxtyping's import hook decorates function by function.
    """
    try:
        return _beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
