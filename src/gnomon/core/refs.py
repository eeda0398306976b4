"""Names of models and texts: which strings are names, and how a path enters a run id.

Imports neither torch nor Transformers, so the command line may use it freely.
"""

from __future__ import annotations

from pathlib import Path

from .files import content_hash

EMBEDDED = ("smollm2-135m",)
"""Pretrained models that `gnomon fetch` makes available offline (`core.smollm2`)."""

TINY = "tiny:"
"""Prefix of random models built from a configuration (`core.tiny`)."""

RECIPES = ("stdlib", "topics", "mixed")
"""Texts that are always at hand (`core.data`)."""

GENERATED = "generated:"
"""Prefix of the generated text, followed by its number of documents (`core.generated`)."""


def is_name(value: str) -> bool:
    """Whether `value` is an embedded model, a tiny model or a text recipe; such a name wins over a path."""
    return value in EMBEDDED or value in RECIPES or value.startswith((TINY, GENERATED))


def as_path(value: str) -> Path:
    """`value` as a path, with `~` expanded where there is such a user."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        return Path(value)


def portable(value: str) -> str:
    """The form of a model or data reference that is equal on every machine.

    An existing file or folder becomes `<last component>@sha256:<first 16 hex digits of its content hash>`:
    the same content gives the same run id wherever it lies, and other content another one. Names and hub
    ids stay as they are. A string that is no path costs one look at the file system.
    """
    if not value or is_name(value):
        return value
    try:
        path = as_path(value)
        if not path.exists():
            return value
    except (OSError, ValueError):  # no file could have this name (too long, NUL)
        return value
    resolved = path.resolve()
    return f"{resolved.name}@sha256:{content_hash(resolved)[:16]}"
