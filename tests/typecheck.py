"""The runtime type and shape checker that pytest switches on for the whole package (see pyproject.toml)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import beartype._check.code.codemain as checks
from beartype import BeartypeConf, FrozenDict, beartype
from beartype.roar import BeartypeDecorHintPep673Exception
from numpy.typing import ArrayLike

# beartype looks at a random item of a list, drawn from the global generator, so that checking would change what
# a seeded function draws. It gets a generator of its own (test_typecheck.py sees to it that this works).
checks.getrandbits = random.Random(0).getrandbits

_beartype = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,  # an int is a fine float
        hint_overrides=FrozenDict({ArrayLike: object}),  # for typing only: refuses (1.0,) at run time
    )
)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check `function`'s arguments and result at each call.

    Two kinds stay unchecked. Constructors judge their arguments themselves, with messages that tests look at.
    Methods annotated with `typing.Self`: beartype resolves it only where it decorates the whole class, while
    jaxtyping's import hook decorates function by function.
    """
    if function.__name__ == "__init__":
        return function
    try:
        return _beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
