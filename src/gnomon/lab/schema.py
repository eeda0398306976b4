"""The format of `result.json`. The full description is `result.schema.json` beside this file."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from gnomon.core.errors import GnomonError

__all__ = ["SCHEMA_VERSION", "check_result", "check_version", "result_schema"]

SCHEMA_VERSION = 1


@cache
def result_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a result."""
    schema: dict[str, Any] = json.loads(files("gnomon.lab").joinpath("result.schema.json").read_text("utf-8"))
    return schema


def check_version(data: Any, source: Path) -> None:
    """Refuse a result or a run's `config.yaml` of another format version.

    Raises:
        GnomonError: naming the file, both versions and the way out.
    """
    if not isinstance(data, dict):
        raise GnomonError(
            f"{source} holds a {type(data).__name__}, not a result. Name the folder of a finished run."
        )
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise GnomonError(
            f"{source} has schema_version {version!r}, but this version of Gnomon reads {SCHEMA_VERSION}. "
            "Read it with the version that wrote it, or make the run again with --again."
        )


def check_result(data: Any, source: Path) -> dict[str, Any]:
    """Refuse what this version cannot read: another schema version, or a file without the required fields.

    A light check that needs no schema library; tests validate whole results against the schema.

    Raises:
        GnomonError: naming the file, what was found, and the way out.
    """
    check_version(data, source)
    result: dict[str, Any] = data
    missing = [name for name in result_schema()["required"] if name not in result]
    if missing:
        raise GnomonError(f"{source} lacks {', '.join(missing)}. The file is damaged; run the study again.")
    return result
