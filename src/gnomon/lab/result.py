"""Results: claims judged and methods summarised from records, and the file that holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.core import stats
from gnomon.core.errors import GnomonError
from gnomon.core.files import read_json

from .records import BUDGET_FIELDS, Record, frame, read_records
from .schema import check_result

if TYPE_CHECKING:
    import pandas as pd

    from .engine import Claim
    from .rule import Judgement


@dataclass(frozen=True)
class Result:
    """A finished run or an accepted result.

    Attributes:
        data: the content of `result.json` (documented in `lab/result.schema.json`).
        dir: the run folder, or None for an accepted result.
    """

    data: dict[str, Any]
    dir: Path | None = None

    @property
    def report(self) -> Path | None:
        return self.dir / "report.html" if self.dir else None

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict by claim id."""
        return {claim["id"]: claim["verdict"] for claim in self.data["claims"]}

    def frame(self) -> pd.DataFrame:
        """The run's records as a table; for an accepted result, which has none, its summary rows."""
        if self.dir is not None:
            return frame(read_records(self.dir / "records.jsonl"))
        import pandas as pd

        return pd.DataFrame(
            [
                {"method": method["name"], **{k: v for k, v in row.items() if k != "tags"}, **row["tags"]}
                for method in self.data["methods"]
                for row in method["metrics"]
            ]
        )


def load_result(path: Path | str) -> Result:
    """Read a run folder, its `result.json`, or an accepted result.

    Raises:
        GnomonError: if there is none, or it was written by another version of the format.
    """
    path = Path(path)
    file = path / "result.json" if path.is_dir() else path
    if not file.exists():
        raise GnomonError(
            f"{path} holds no result.json: the run has not finished, or this is not a run folder."
        )
    data = read_json(file)
    check_result(data, file)
    inside_run = file.name == "result.json" and (file.parent / "records.jsonl").exists()
    return Result(data, file.parent if inside_run else None)


def judge(
    claims: Iterable[Claim], records: list[Record], texts: dict[tuple[str, str | None], str]
) -> list[dict[str, Any]]:
    """Rows of `result.json`'s `claims`: each part by its rule, each row by the parts.

    Args:
        texts: claim text by (id, part); (id, None) is the row's own.
    """
    table = frame(records)
    rows: dict[str, list[dict[str, Any]]] = {}
    for claim in claims:
        judged = claim.rule.judge(table)
        rows.setdefault(claim.id, []).append(
            {
                "part": claim.part,
                "text": texts.get((claim.id, claim.part), ""),
                "grade": claim.grade,
                "rule": claim.rule.describe(),
                **_found(judged, getattr(claim.rule, "bound", None)),
                "within": [{"name": f.name, **_found(f.judgement, f.bound)} for f in judged.within],
            }
        )
    return [
        {
            "id": id,
            "text": texts.get((id, None), ""),
            "verdict": stats.combine([part["verdict"] for part in parts]),
            "grade": stats.weakest_grade([(part["grade"], part["verdict"]) for part in parts]),
            "parts": sorted(parts, key=lambda part: part["part"] or ""),
        }
        for id, parts in sorted(rows.items(), key=lambda row: _natural(row[0]))
    ]


def _found(judged: Judgement, bound: float | None) -> dict[str, Any]:
    """A judgement as `result.json` holds it."""
    interval = judged.interval
    return {
        "verdict": judged.verdict,
        "estimate": _finite(judged.estimate),
        "interval": None if interval is None else [_finite(end) for end in interval],
        "bound": bound,
        "n": judged.n,
        "note": judged.note,
    }


def _natural(id: str) -> tuple[str, int]:
    head, _, number = id.rpartition(".")
    return head, int(number) if number.isdigit() else 0


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def summarise(records: list[Record]) -> list[dict[str, Any]]:
    """Mean and 95 % interval per method, metric and tags: over seeds if there are several, else over items."""
    methods: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        tags = tuple(sorted(record["tags"].items(), key=str))
        groups.setdefault((record["method"], record["metric"], tags), []).append(record)
        budget = methods.setdefault(record["method"], {"budget": {}, "metrics": []})["budget"]
        for name in BUDGET_FIELDS:
            if name in record["budget"]:
                budget[name] = max(budget.get(name, 0), record["budget"][name])
    for (method, metric, tags), group in groups.items():
        by_seed: dict[int, list[Record]] = {}
        for record in group:
            by_seed.setdefault(record["seed"], []).append(record)
        over = "seed" if len(by_seed) > 1 else "item"
        if over == "seed":
            values = [_weighted_mean(same) for same in by_seed.values()]
            weights = [1.0] * len(values)
        else:
            values = [record["value"] for record in group]
            weights = [record["weight"] for record in group]
        mean, low, high, stderr = stats.weighted_t(values, weights)
        methods[method]["metrics"].append(
            {
                "metric": metric,
                "tags": dict(tags),
                "unit": group[0]["unit"],
                "better": group[0]["better"],
                "mean": mean,
                "low": low,
                "high": high,
                "stderr": stderr,
                "n": len(values),
                "over": over,
            }
        )
    return [{"name": name, **content} for name, content in methods.items()]


def _weighted_mean(records: list[Record]) -> float:
    total = sum(record["weight"] for record in records)
    return float(sum(record["value"] * record["weight"] for record in records) / total)
