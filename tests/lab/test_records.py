"""Records: what may be one, and the table made of them. Truth: values written by hand."""

import math

import pytest

from gnomon.core.errors import GnomonError, NumericalFailure
from gnomon.lab.records import comparable, frame, make_record, read_records
from gnomon.lab.stage import StageContext

GOOD = {"method": "m", "metric": "loss", "value": 1.5}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"value": math.inf}, NumericalFailure, "loss is inf"),
        ({"better": "smaller"}, ValueError, "'lower', 'higher' or None"),
        ({"weight": 0}, ValueError, "weight must be > 0"),
        ({"tags": {"seed": 1}}, ValueError, "can't be tags"),
        ({"tags": {"layer": [1]}}, ValueError, "must be a string, number or bool"),
        ({"tags": {"layer": math.nan}}, ValueError, "must be finite"),
        ({"item": 1.5}, ValueError, "item must be"),
        ({"budget": {"tokens": "many"}}, ValueError, "finite number"),
        ({"budget": {"token": 1}}, ValueError, "unknown budget fields"),
    ],
)
def test_what_is_no_record_is_refused_and_not_counted(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        make_record(**{**GOOD, **change})
    context = StageContext(tmp_path, 0)
    with pytest.raises(error):
        context.record(**{**GOOD, **change})
    assert context.snapshot() == [] and read_records(tmp_path / "records.jsonl") == []


def test_a_table_has_a_column_per_tag_and_budget_field():
    one = make_record(**GOOD, tags={"layer": 3}, budget={"tokens": 10})
    two = make_record(**GOOD, item="a\u2028b", seed=2)
    table = frame([one, two])
    assert table["layer"].tolist()[0] == 3 and math.isnan(table["layer"].tolist()[1])
    assert table["budget.tokens"].tolist()[0] == 10
    assert table["item"].tolist() == [None, "a\u2028b"] and table["seed"].tolist() == [0, 2]
    assert frame([]).empty


def test_odd_separators_survive_the_file(tmp_path):
    context = StageContext(tmp_path, 7)
    context.record(**GOOD, item="line\u2028and\u0085next", tags={"token": "\x1c<script>"})
    (record,) = read_records(tmp_path / "records.jsonl")
    assert record["item"] == "line\u2028and\u0085next" and record["seed"] == 7
    (tmp_path / "records.jsonl").write_text("{")
    with pytest.raises(GnomonError, match=r"records\.jsonl:1"):
        read_records(tmp_path / "records.jsonl")


def test_comparable_forgets_seconds_and_timings_only():
    timed = make_record(**GOOD, budget={"seconds": 1.0, "tokens": 5}) | {"exclusive": False}
    kept = comparable([timed, {**timed, "exclusive": True}])
    assert kept == [{**timed, "budget": {"tokens": 5}}]
