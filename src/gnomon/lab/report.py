"""The report of a run: one HTML page that is complete in itself.

Claim and verdict come first, then figures, numbers with intervals, and what it takes to repeat the run. The
page works offline, in light and dark, on paper and on a phone. It is a view: everything on it comes from
`result.json`, the figures beside it and the system's card.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.files import read_json, write_atomic
from gnomon.lab.cards import Card, load_card
from gnomon.lab.pages import decimals_for, interval_text, number, plot, render, shared_span
from gnomon.lab.schema import check_result

__all__ = ["claim_rows", "headline_groups", "tagged_tables", "verdict_counts", "write_report"]

Json = dict[str, Any]
BUDGET_FIELDS = ("tokens", "steps", "calls", "trials", "seconds")


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder.

    Args:
        run_dir: folder with `result.json`, `records.jsonl` and `figures/`.

    Returns:
        The path of the page.

    Raises:
        GnomonError: there is no result, or one of another schema version.
    """
    source = run_dir / "result.json"
    if not source.is_file():
        raise GnomonError(
            f"{run_dir} has no result.json, so the run is not finished. Run the same command again."
        )
    result = check_result(read_json(source), source)
    card = _card(result["slug"])
    methods = result["methods"]
    page = render(
        "report.html",
        result=result,
        title=card.title if card else result["title"],
        paper=f"{card.paper}, {card.venue}" if card else "",
        notices=_notices(result),
        counts=verdict_counts(result["claims"]),
        claim_rows=claim_rows(result["claims"], card),
        figures=[_figure(run_dir, figure) for figure in result["figures"]],
        headline_groups=headline_groups(methods),
        tagged_tables=tagged_tables(methods),
        budget_fields=[f for f in BUDGET_FIELDS if any(f in method["budget"] for method in methods)],
        inferred=card.inferred if card else (),
        limits=card.limits if card else (),
        environment={k: v for k, v in result["environment"].items() if k not in ("versions", "kernels")},
        provenance=_provenance(result, run_dir / "records.jsonl"),
    )
    path = run_dir / "report.html"
    write_atomic(path, page)
    return path


def verdict_counts(claims: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many claims hold, fail and are undecided."""
    counts = {"holds": 0, "fails": 0, "undecided": 0}
    for claim in claims:
        counts[claim["verdict"]] += 1
    return counts


def claim_rows(claims: Iterable[Json], card: Card | None) -> list[Json]:
    """Claims as the template shows them, with a small plot per part.

    A claim with one unnamed part is shown without a heading of that part: its text is the claim's.
    """
    known = {claim.id: claim for claim in card.claims} if card else {}
    return [
        {
            **claim,
            "parts": [_part(part) for part in claim["parts"]],
            "full_scale": known[claim["id"]].full_scale if claim["id"] in known else "",
        }
        for claim in claims
    ]


def headline_groups(methods: Iterable[Json]) -> list[Json]:
    """Metrics without tags, one group per metric; its methods share the axis of their plots."""
    groups: dict[tuple[str, str], Json] = {}
    for method in methods:
        for metric in method["metrics"]:
            if not metric["tags"]:
                key = (metric["metric"], metric["unit"])
                group = groups.setdefault(
                    key, {"metric": key[0], "unit": key[1], "better": metric["better"], "rows": []}
                )
                group["rows"].append(_row(method["name"], metric))
    for group in groups.values():
        span = shared_span([row[end] for row in group["rows"] for end in ("mean", "low", "high")])
        for row in group["rows"]:
            alone = (
                len(group["rows"]) == 1 and row["low"] is None
            )  # a dot without anything beside it says nothing
            row["plot"] = None if alone else plot(row["mean"], row["low"], row["high"], span=span, width=180)
    return list(groups.values())


def tagged_tables(methods: Iterable[Json]) -> list[Json]:
    """Metrics with tags, one table per metric and set of tags, one column per tag."""
    tables: dict[tuple[str, str, tuple[str, ...]], Json] = {}
    for method in methods:
        for metric in method["metrics"]:
            if metric["tags"]:
                tags = tuple(metric["tags"])
                key = (metric["metric"], metric["unit"], tuple(sorted(tags)))
                table = tables.setdefault(key, {"metric": key[0], "unit": key[1], "tags": tags, "rows": []})
                row = _row(method["name"], metric)
                row["tags"] = [metric["tags"][tag] for tag in table["tags"]]
                table["rows"].append(row)
    for table in tables.values():
        columns = list(zip(*(row["tags"] for row in table["rows"]), strict=True))
        table["numeric"] = [all(type(value) in (int, float) for value in column) for column in columns]
    return list(tables.values())


def _card(slug: str) -> Card | None:
    try:
        return load_card(slug)
    except UsageError:  # a researcher's own study has no card
        return None


def _row(method: str, metric: Json) -> Json:
    low, high = metric["low"], metric["high"]
    return {
        "method": method,
        "mean": metric["mean"],
        "low": low,
        "high": high,
        "mean_text": number(metric["mean"], decimals_for(low, high)),
        "interval_text": interval_text(low, high),
        "n": metric["n"],
        "over": metric["over"],
    }


def _part(part: Json) -> Json:
    return {
        **_judged(part),
        "label": part["part"],
        "within": [_judged(rule) for rule in part.get("within", [])],
    }


def _judged(part: Json) -> Json:
    low, high = part["interval"] or (None, None)
    bound = part.get("bound")
    return {
        **part,
        "estimate_text": number(part["estimate"], decimals_for(low, high)),
        "interval_text": interval_text(low, high),
        "plot": plot(part["estimate"], low, high, reference=0.0 if bound is None else bound),
    }


def _figure(run_dir: Path, figure: Json) -> Json:
    name = figure["name"]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise GnomonError(
            f"{run_dir}: figure name {name!r} is not a plain file name (letters, digits, '.', '_', '-')."
        )
    folder = run_dir / "figures"
    light, dark = (_data_address(folder / file) for file in (f"{name}.svg", f"{name}.dark.svg"))
    return {"name": name.replace("_", " "), "caption": figure["caption"], "light": light, "dark": dark}


def _data_address(path: Path) -> str | None:
    if not path.is_file():
        return None
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _notices(result: Json) -> list[Json]:
    """What a reader must know before reading a verdict."""
    notices = []
    if result["profile"] != "full":
        notices.append(
            {
                "head": "Preview, not evidence.",
                "text": f"This is the {result['profile']} profile. Only a run of the full profile, "
                "with every baseline and the seeds its claims ask for, can be accepted as a result.",
            }
        )
    code = result["code"]
    if code["dirty"] or code["accepted_changes"]:
        cause = "the run began in a modified tree" if code["commit"] else "the code lies in no repository"
        if code["accepted_changes"]:
            cause = "the code changed during the run"
        notices.append(
            {"head": "Not reproducible from a commit.", "text": f"It cannot be accepted: {cause}."}
        )
    failed = [stage["function"] for stage in result["stages"] if stage["failed"]]
    if failed:
        count = "One stage" if len(failed) == 1 else f"{len(failed)} stages"
        notices.append(
            {"head": f"{count} failed.", "text": f"See {', '.join(sorted(set(failed)))} under Run, Stages."}
        )
    return notices


def _provenance(result: Json, records: Path) -> Json:
    code = result["code"]
    commit = code["commit"] or "outside a repository"
    lines = 0
    if records.is_file():
        with records.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
    return {
        "run": result["run_id"],
        "commit": f"{commit} with local changes" if code["dirty"] else commit,
        "code hash": code["hash"],
        "code changes accepted": ", ".join(code["accepted_changes"]) or "none",
        "records": lines,
        "began": result["created"],
        "finished": result["finished"],
    }
