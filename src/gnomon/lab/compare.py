"""`gnomon compare`: the same metrics of several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.core.errors import UsageError

from .result import load_result


def compare(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """One row per method, metric and tags that any run has; one column per run (mean and 95 % interval).

    A row whose runs had different budgets says so in `note`: such numbers don't compare methods.

    Raises:
        UsageError: for fewer than two runs, one run twice, or runs of different systems.
    """
    if len(folders) < 2:
        raise UsageError("compare needs at least two run folders.")
    results = [load_result(folder).data for folder in folders]
    slugs = {result["slug"] for result in results}
    if len(slugs) > 1:
        raise UsageError(
            f"These runs are of different systems ({', '.join(sorted(slugs))}) and don't compare."
        )
    columns = _columns(results, folders)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    budgets: dict[str, list[dict[str, Any]]] = {}
    for column, result in zip(columns, results, strict=True):
        for method in result["methods"]:
            told = {k: v for k, v in method["budget"].items() if k != "seconds"}
            budgets.setdefault(method["name"], []).append(told)
            for metric in method["metrics"]:
                tags = " ".join(f"{k}={v}" for k, v in sorted(metric["tags"].items()))
                key = (method["name"], metric["metric"], tags)
                row = rows.setdefault(
                    key, {"method": key[0], "metric": key[1], "tags": tags, "unit": metric["unit"]}
                )
                row[column] = _shown(metric)
    for row in rows.values():
        seen = budgets[row["method"]]
        row["note"] = "budgets differ" if any(budget != seen[0] for budget in seen[1:]) else ""
    first = ("method", "metric", "tags", "unit")
    return [
        {**{name: row[name] for name in first}, **dict.fromkeys(columns, ""), **row} for row in rows.values()
    ]


def _columns(results: Sequence[dict[str, Any]], folders: Sequence[Path]) -> list[str]:
    """A name per run: profile and id, and the folder where these are those of another run too."""
    names = [f"{result['profile']} {result['run_id']}" for result in results]
    told = [
        f"{name} ({folder})" if names.count(name) > 1 else name
        for name, folder in zip(names, folders, strict=True)
    ]
    if twice := {name for name in told if told.count(name) > 1}:
        raise UsageError(f"compare was given the same run twice: {', '.join(sorted(twice))}.")
    return told


def _shown(metric: dict[str, Any]) -> str:
    if metric["low"] is None:
        return f"{metric['mean']:.4g}"
    return f"{metric['mean']:.4g} [{metric['low']:.4g}, {metric['high']:.4g}]"
