"""`gnomon report`: figures and page again from the records; with `--check` all verdicts recomputed and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnomon.core.files import dump_json, write_atomic

from .engine import Progress
from .figures import draw
from .records import read_records
from .report import write_report
from .result import judge, load_result, summarise
from .run import reopen, writer


def remake(folder: Path, progress: Progress = lambda line: None) -> Path:
    """Draw the figures and write the report of a finished run again with the present code.

    Verdicts and numbers stay those of the run; :func:`check` says whether they follow from its records.
    """
    result = load_result(folder).data
    lab, _, _ = reopen(folder)
    with writer(folder):
        result["figures"] = draw(lab.figures, lab.records(), lab.finished(), folder / "figures", progress)
        write_atomic(folder / "result.json", dump_json(result))
        return write_report(folder)


def check(folder: Path) -> list[str]:
    """Recompute every verdict, estimate and summary of a run from its records alone.

    Returns:
        The differences, one line each; empty if all agree.
    """
    stored = load_result(folder).data
    lab, found, _ = reopen(folder)
    records = lab.records()
    differences = []
    if read_records(folder / "records.jsonl") != records:
        differences.append("records.jsonl differs from the records of the done stages")
    for name, again in (
        ("claims", judge(lab.claims, records, found.texts())),
        ("methods", summarise(records)),
    ):
        differences += _differences(name, stored[name], again)
    return differences


def _differences(path: str, stored: Any, again: Any) -> list[str]:
    if isinstance(stored, dict) and isinstance(again, dict):
        lines = []
        for key in sorted(stored.keys() | again.keys()):
            lines += _differences(f"{path}.{key}", stored.get(key), again.get(key))
        return lines
    if isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
        return [
            line
            for index, (a, b) in enumerate(zip(stored, again, strict=True))
            for line in _differences(f"{path}[{index}]", a, b)
        ]
    if isinstance(stored, float) and isinstance(again, float | int):
        close = abs(stored - again) <= 1e-9 * max(1.0, abs(stored))
        return [] if close else [f"{path}: stored {stored!r}, recomputed {again!r}"]
    return [] if stored == again else [f"{path}: stored {stored!r}, recomputed {again!r}"]
