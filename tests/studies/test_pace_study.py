"""The Pace study. Truth: the card's coefficients, counts by hand, and the simulator's own limits."""

import dataclasses
import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import gnomon
from gnomon.core.errors import UsageError
from gnomon.lab import StageContext
from gnomon.lab.cards import load_card
from gnomon.lab.records import frame
from gnomon.lab.stage import Done
from gnomon.methods.serve import pace
from gnomon.studies import pace_engine, pace_stages
from gnomon.studies.pace import PaceStudy

FIGURES = {"goodputs", "attainments", "step_times", "widths", "ablations"}
TINY = {"model": "tiny:llama-10k", "data": "generated:60"}


def records_of(ctx):
    return frame([json.loads(line) for line in (ctx.dir / "records.jsonl").read_text().splitlines()])


@pytest.fixture
def ctx(tmp_path):
    return StageContext(tmp_path, 0)


@pytest.mark.slow
def test_smoke_run_has_every_claim_and_figure(tmp_path):
    gnomon.run("pace", profile="smoke", runs=tmp_path)
    (folder,) = (tmp_path / "pace").iterdir()
    result = gnomon.load_result(folder)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    judged = {(c["id"], part["part"]) for c in result.data["claims"] for part in c["parts"]}
    assert judged == {(claim.id, part.part) for claim in load_card("pace").claims for part in claim.parts}
    parts = {(c["id"], p["part"]): p["verdict"] for c in result.data["claims"] for p in c["parts"]}
    assert parts["pace.4", "memory"] == parts["pace.4", "tokens"] == "holds"  # exact at any size
    assert {parts[f"pace.{k}", p] for k, p in ((1, "simulated"), (2, "causes"), (3, "a"))} == {"undecided"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"loads": "branchy,mixed,long,loose"}, "lacks few"),
        ({"loads": "branchy,mixed,few"}, "at least four"),
        ({"loads": "branchy,mixed,few,lng"}, "Did you mean 'long'"),
        ({"ablated": "branch"}, "branchy"),
        ({"caps": "2,3"}, "2 and 5 among them"),
        ({"turns": "0"}, "turns=0"),
        ({"sizes": "4"}, "two numbers of rows"),
        ({"prompt": "3"}, "prompt=3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        PaceStudy.resolve("cpu", setting)


def test_all_policies_serve_the_same_requests(ctx, monkeypatch):
    monkeypatch.setitem(
        pace_stages.LOADS,
        "branchy",
        {"concurrency": 8, "slo": 0.009, "mix": {"branch_tokens": (5, 9), "serial_tokens": (20, 30)}},
    )
    names = pace_stages.policies((2,), ablations=True)
    pace_stages.serve(ctx, load="branchy", seed=0, requests=12, policies=names, noise=0.0)
    table = records_of(ctx)
    assert set(table["method"]) == set(names) and len(names) == 11
    assert table["budget.tokens"].nunique() == 1
    values = table.pivot_table(index="method", columns="metric", values="value")
    same = values.loc[["eager", "pace, no budget"], "throughput"]
    assert same.iloc[0] == same.iloc[1]  # a planner without a budget is eager
    assert values.loc["off", "externality"] == 0 < values.loc["eager", "externality"]
    assert values.loc["off", "width"] == 1 < values.loc["cap:2", "width"] <= 2
    assert values.loc["pace, b and c x 6", "width"] <= values.loc["pace", "width"]
    logs = values["log goodput, progress"]
    np.testing.assert_allclose(np.exp(logs), np.maximum(values["goodput, progress"], 1))


def test_an_unknown_policy_is_refused():
    with pytest.raises(UsageError, match="policy"):
        pace_stages.one("pace, faster", [], pace_stages.LOADS["branchy"], noise=0.0, seed=0)


def test_a_load_is_the_same_for_all_and_another_for_each_seed():
    assert pace_stages.drawn("few", 5, 1) == pace_stages.drawn("few", 5, 1)
    assert pace_stages.drawn("few", 5, 1) != pace_stages.drawn("few", 5, 2)


def test_calibration_recovers_a_known_machine(ctx, monkeypatch):
    def step(self, plan):
        rows = {row.row: row for row in self._rows.values()}
        context = sum(rows[k].context + 1 for k in plan.admitted)
        right(self, plan)
        return 0.01 + 0.002 * len(plan.admitted) + 1e-5 * context

    right = pace.PackedBranchEngine.step
    monkeypatch.setattr(pace.PackedBranchEngine, "step", step)
    value = pace_engine.calibrate(ctx, sizes=(1, 3, 6), repeats=4, prompt=16, threads=1, seed=0, **TINY)
    assert (value["a"], value["b"], value["c"]) == pytest.approx((0.01, 0.002, 1e-5), rel=1e-6)
    assert len(value["steps"]) == 12 and sorted({n for n, _, _ in value["steps"]}) == [1, 3, 6]
    table = records_of(ctx)
    assert (table[table.metric == "packed step"].groupby("method").size() == 4).all()
    assert table[table.metric.str.startswith("held-out")]["value"].item() < 1e-9


def test_memory_and_tokens_of_the_engine(ctx):
    pace_engine.memory(ctx, requests=3, scale=2, prompt=8, seed=0, **TINY)
    table = records_of(ctx).pivot_table(index="method", columns="metric", values="value")
    assert (table["tokens unlike those alone"] == 0).all() and len(table) == 4
    audited = table.loc[["off", "cap:2", "pace"]]
    for what in ("allocated", "freed", "moved"):
        assert (audited[f"{what} by deferrals"] == 0).all()
    assert (audited["steps that deferred rows"] > 0).all()


def test_engine_runs_use_the_fitted_predictor(ctx, tmp_path):
    of = Done(tmp_path, {"a": 1e-3, "b": 1e-4, "c": 0.0}, {})
    value = pace_engine.engine_runs(
        ctx, of=of, requests=4, concurrency=2, scale=1, prompt=8, threads=1, seed=1, **TINY
    )
    assert value["equal outputs"] and value["slo"] > 0
    table = records_of(ctx)
    assert set(table["method"]) == set(pace_engine.POLICIES) and table["budget.tokens"].nunique() == 1
    width = table[table.metric == "engine width"].set_index("method")["value"]
    assert width["off"] == 1 < width["cap:2"] <= 2 < width["eager"]


def test_planning_is_timed_by_repeat(ctx):
    pace_stages.planning(ctx, requests=3, branches=4, repeats=2, plans=3)
    table = records_of(ctx)
    assert len(table) == 4 and (table["value"] > 0).all() and sorted(set(table["item"])) == [0, 1]


def test_the_card_s_example_runs(capsys):
    text = (Path(gnomon.__file__).parent / "cards" / "pace.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "pace.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "off",
        "cap:2",
        "eager",
        "pace",
    ]


def test_every_profile_is_a_setting():
    for profile in PaceStudy.profile_names():
        study = PaceStudy.resolve(profile)
        assert len(study.loads) >= 4 and dataclasses.is_dataclass(study)
    assert len(PaceStudy.resolve("full").seeds) >= 6
