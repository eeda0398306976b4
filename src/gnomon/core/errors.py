"""Errors that end the search: each says value, limit, cause and way out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


class GnomonError(Exception):
    """Base of every error Gnomon raises on purpose; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(GnomonError):
    """The request itself was wrong (unknown name, bad value, impossible combination)."""

    exit_code = 2


class NumericalFailure(GnomonError):
    """A computation left the numbers (NaN, divergence, singular matrix). Ends a stage, never the run."""


class MissingExtra(GnomonError, ImportError):
    """An optional library is needed that is not installed."""

    exit_code = 2

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {library}, which is not installed. Install it with: pip install 'gnomon[{extra}]'"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean …?`` with the closest known names, or the known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)  # None or a number may come, too
    if close:
        return f" Did you mean {' or '.join(repr(c) for c in close)}?"
    return f" Known: {', '.join(names)}." if names else ""


def number(value: Any) -> float:
    """A number as a float, also of a tensor that holds one; NaN for anything else, which every range refuses.

    A text is no number: YAML reads 1e-3 as one, and a rate must not depend on that.
    """
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """An error for an unknown name that offers the nearest known one."""
    return UsageError(f"Unknown {kind} {name!r}.{nearest(name, known)}")
