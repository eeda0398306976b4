"""Records: the only thing a verdict is computed from.

One JSON object per line. `value` is one number of one method on one unit (`item`) under one seed; further
coordinates (layer, alpha, share kept) are `tags`, what it cost is `budget`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from gnomon.core.errors import GnomonError, NumericalFailure

if TYPE_CHECKING:
    import pandas as pd

BUDGET_FIELDS = ("tokens", "steps", "calls", "trials", "seconds")
FIELDS = ("method", "metric", "value", "unit", "better", "seed", "item", "weight", "stage", "exclusive")

Record = dict[str, Any]


def make_record(
    *,
    method: str,
    metric: str,
    value: SupportsFloat,
    unit: str = "",
    better: str | None = None,
    seed: int = 0,
    item: str | int | None = None,
    weight: SupportsFloat = 1.0,
    tags: Mapping[str, Any] | None = None,
    budget: Mapping[str, float] | None = None,
) -> Record:
    """Validate one record.

    Args:
        value: the measurement; must be finite.
        better: "lower", "higher", or None where neither is better.
        item: the unit that varies inside a seed (document, question, direction), for intervals over items.
        weight: how many observations `value` averages.
        tags: further coordinates; scalars only, no name of a record field.
        budget: what the value cost, any of tokens, steps, calls, trials, seconds.

    Raises:
        NumericalFailure: if `value` is NaN or infinite.
        ValueError: for anything else out of form.
    """
    value, weight = float(value), float(weight)
    if not math.isfinite(value):
        raise NumericalFailure(f"{method}: {metric} is {value}. The computation diverged or divided by zero.")
    if better not in ("lower", "higher", None):
        raise ValueError(f"record {metric!r}: better must be 'lower', 'higher' or None, got {better!r}.")
    if not weight > 0:
        raise ValueError(f"record {metric!r}: weight must be > 0, got {weight}.")
    tags, budget = dict(tags or {}), dict(budget or {})
    if clash := set(tags) & set(FIELDS):
        raise ValueError(f"record {metric!r}: {sorted(clash)} are record fields and can't be tags.")
    for name, tag in tags.items():
        if not isinstance(tag, str | int | float | bool):
            raise ValueError(
                f"record {metric!r}: tag {name!r} must be a string, number or bool, got {type(tag)}."
            )
        if isinstance(tag, float) and not math.isfinite(tag):
            raise ValueError(f"record {metric!r}: tag {name!r} is {tag}; a coordinate must be finite.")
    if not (item is None or isinstance(item, str | int)):
        raise ValueError(f"record {metric!r}: item must be a string, an int or None, got {type(item)}.")
    for name, cost in budget.items():
        if isinstance(cost, str) or not math.isfinite(cost):
            raise ValueError(f"record {metric!r}: budget {name!r} must be a finite number, got {cost!r}.")
    if strange := set(budget) - set(BUDGET_FIELDS):
        raise ValueError(
            f"record {metric!r}: unknown budget fields {sorted(strange)}; known: {BUDGET_FIELDS}."
        )
    return {
        "method": method,
        "metric": metric,
        "value": value,
        "unit": unit,
        "better": better,
        "seed": int(seed),
        "item": item,
        "weight": weight,
        "tags": tags,
        "budget": budget,
    }


def read_records(path: Path) -> list[Record]:
    """All records of a `records.jsonl`; an absent file is an empty list."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):  # splitlines() would cut at U+2028
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise GnomonError(
                f"{path}:{number} is not a JSON record ({error}). The file is damaged."
            ) from None
    return records


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as a table: one column per field, one per tag, and `budget.<field>` per budget field."""
    import pandas as pd

    rows = []
    for record in records:
        row = {key: value for key, value in record.items() if key not in ("tags", "budget")}
        row.update(record["tags"])
        row.update({f"budget.{key}": value for key, value in record["budget"].items()})
        rows.append(row)
    table = pd.DataFrame(rows, columns=None if rows else list(FIELDS))
    # Names, numbers and None side by side, which pandas would turn into text and NaN.
    table["item"] = pd.Series([row["item"] for row in rows], dtype=object)
    return table


def comparable(records: Iterable[Record]) -> list[Record]:
    """What must be equal between two runs of the same settings: all but seconds and timing stages."""
    kept = []
    for record in records:
        if record.get("exclusive"):
            continue
        budget = {key: value for key, value in record["budget"].items() if key != "seconds"}
        kept.append({**record, "budget": budget})
    return kept
