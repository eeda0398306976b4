"""`gnomon apply` and `gnomon check` by name: which methods there are, their options, models as strings."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gnomon.core.applying import DENSE, Applied, Method, Source, apply_method
from gnomon.core.checking import CheckReport, check_folder
from gnomon.core.checkpoints import GNOMON_TYPE, model_type, open_checkpoint
from gnomon.core.errors import GnomonError, UsageError, unknown
from gnomon.core.forms import PLAIN
from gnomon.core.models import model_folder
from gnomon.core.refs import as_path
from gnomon.systems import SYSTEMS

from .config import coerce


def methods() -> dict[str, str]:
    """Name of each method that can be applied -> its module (without `dense`, which belongs to no system)."""
    entries = (entry.partition("=") for system in SYSTEMS for entry in system.apply)
    return {name: module for name, _, module in entries}


def find_method(name: str) -> Method:
    """The method of a name, `-` and `_` being equal.

    Raises:
        UsageError: unknown; the nearest is offered.
    """
    if name == DENSE.name:
        return DENSE
    for known, module in methods().items():
        if known.replace("-", "_") == name.replace("-", "_"):
            found: Method = importlib.import_module(module).METHOD
            return found
    raise unknown("method to apply", name, [DENSE.name, *methods()])


def apply(
    name: str,
    *,
    model: str | Path,
    out: str | Path,
    force: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Applied:
    """Apply a method to a model on disk and write the result to a new folder (or file).

    Args:
        name: a method, such as `nf12`, or `dense` for the way back from a lossless form.
        model: an embedded name, `tiny:…`, a folder or a hub id.
        force: replace what stands at `out`, if that is a model or Gnomon's own.
        progress: takes a line per shard.
        settings: fields of the method's settings, as values or as strings.

    Raises:
        UsageError: unknown names, settings or models; a model that the method doesn't take; a bad `out`.
        GnomonError: a damaged model, a full disk.
    """
    method = find_method(name)
    chosen = _settings(method, settings)
    with _source(str(model)) as source:
        return apply_method(method, source, Path(out), chosen, force=force, progress=progress)


def check(
    folder: str | Path,
    *,
    against: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Verify a folder that :func:`apply` wrote: headers, bounds, and the SHA-256 of every tensor.

    Args:
        against: a model whose weights must be equal, bit for bit.

    Raises:
        UsageError: there is no such folder, or no such model to compare it with.
        GnomonError: whatever is not as recorded.
    """
    if not as_path(str(folder)).is_dir():
        raise UsageError(f"There is no folder {folder}. gnomon check verifies one that gnomon apply wrote.")
    with ExitStack() as stack:
        source = stack.enter_context(_source(str(folder)))
        other = stack.enter_context(_source(str(against))) if against is not None else None
        return check_folder(source, other, progress)


def _settings(method: Method, given: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(method.settings)
    fields = {field.name for field in dataclasses.fields(method.settings)}
    for key in given:
        if key not in fields:
            raise unknown(f"setting of {method.name}:", key, fields)
    return method.settings(**{key: coerce(value, hints[key], key) for key, value in given.items()})


@contextmanager
def _source(model: str) -> Iterator[Source]:
    """A model with its headers read, and the form that its type stands for."""
    with model_folder(model) as (name, folder):
        checkpoint = open_checkpoint(folder)
        if checkpoint.kind != "gnomon":
            yield Source(name, checkpoint)
            return
        kind = model_type(checkpoint.config)
        made_by = kind.removeprefix(GNOMON_TYPE)
        if made_by not in {known.replace("-", "_") for known in methods()}:
            raise GnomonError(
                f"{folder} is of type {kind}, which this version of Gnomon can't read. Install the version named "
                "in gnomon.json of that folder."
            )
        method = find_method(made_by)
        yield Source(name, checkpoint, None if method.form is PLAIN else method.form)
