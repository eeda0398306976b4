"""What the command line prints and reads: tables on a terminal, plain lines in a pipe, `name=value` options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.core.errors import UsageError


def say(line: str) -> None:
    """Print to standard error, so that standard output holds results only.

    Control characters are left out: a file's content that an error quotes must not steer the terminal.
    """
    print(_harmless(line, but="\n\t"), file=sys.stderr, flush=True)


def _harmless(text: str, *, but: str = "") -> str:
    return "".join(c for c in text if c.isprintable() or c in but)


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


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    head: bool = True,
    styles: Mapping[str, str] | None = None,
) -> None:
    """A table on a terminal, tab-separated lines in a pipe. Control characters are left out, as in :func:`say`.

    Args:
        head: whether the columns' names are the first line in a pipe (they always head a table).
        styles: rich style by cell text.
    """
    if not sys.stdout.isatty():
        for row in ([columns] if head else []) + list(rows):
            print("\t".join(map(_harmless, row)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_harmless(cell), style=(styles or {}).get(cell, "")) for cell in row))
    Console().print(table)


def split_pairs(texts: Sequence[str], flag: str, form: str) -> dict[str, str]:
    """Split `name=value` at the first `=`; refuse a missing `=` and a name given twice."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"{flag} takes {form}, got {text!r}.")
        if name in pairs:
            raise UsageError(f"{flag} gives {name!r} twice: {pairs[name]!r} and {value!r}.")
        pairs[name] = value
    return pairs
