"""What the command line prints: tables on a terminal, plain lines in a pipe, JSON on request."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def say(line: str) -> None:
    """Print to standard error, so that standard output holds results only."""
    print(line, file=sys.stderr, flush=True)


def print_python(function: str, *args: Any, **kwargs: Any) -> None:
    """Print the Python call that a command stands for; keywords that are None are left out."""
    named = {name: value for name, value in kwargs.items() if value is not None}
    shown = [_literal(a) for a in args] + [f"{name}={_literal(value)}" for name, value in named.items()]
    imports = f"import {function.rpartition('.')[0]}"
    if any("Path(" in text for text in shown):
        imports += "; from pathlib import Path"
    say(f"Python: {imports}; {function}({', '.join(shown)})")


def _literal(value: Any) -> str:
    """`value` as Python source."""
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    if isinstance(value, list):
        return f"[{', '.join(_literal(v) for v in value)}]"
    return repr(value)


def print_rows(rows: Sequence[Mapping[str, Any]], *, json: bool) -> None:
    """Print rows that need not share all columns."""
    if json:
        print(jsonlib.dumps(rows, indent=1))
        return
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    if not sys.stdout.isatty():  # these columns are not fixed, so their names belong to the lines
        cells = [columns, *cells]
    print_table(columns, cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None
) -> None:
    """A table on a terminal; in a pipe tab-separated lines without a head.

    Args:
        styles: rich style by cell text.
    """
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    Console().print(table)
