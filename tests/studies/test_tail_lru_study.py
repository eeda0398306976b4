"""The Tail-LRU study. Truth: constructed traces and records, and what the simulator must give by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import gnomon
from gnomon.core.errors import UsageError
from gnomon.lab import Done, StageContext
from gnomon.lab.records import frame
from gnomon.methods.serve.tail_lru import TailOptimizedLRU, synthetic
from gnomon.studies.tail_lru import TailLRUStudy
from gnomon.studies.tail_lru_policies import POLICIES, make
from gnomon.studies.tail_lru_replay import choose
from gnomon.studies.tail_lru_stages import EXCESS, GAP, LINES, UNBOUNDED, lines, lowered, lru_is_bad, optimum


def mine(path: Path, requests: int = 400) -> Path:
    """A trace with shared prefixes in Mooncake's form: conversations that grow by a block or two a turn."""
    rng = np.random.default_rng(0)
    grown: dict[int, list[int]] = {}
    fresh = iter(range(1, 10**6))
    with path.open("w") as file:
        for at in range(requests):
            conversation = int(rng.integers(0, 40))
            ids = grown.setdefault(conversation, [0])
            ids += [next(fresh) for _ in range(int(rng.integers(1, 5)))]
            line = {"timestamp": 10 * at, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return path


def test_smoke_run_with_a_trace_has_every_claim_policy_and_figure(tmp_path):
    overrides = {"trace": str(mine(tmp_path / "my.jsonl"))}
    result = gnomon.run("tail_lru", profile="smoke", runs=tmp_path, overrides=overrides)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == {
        "tails_by_capacity", "gains", "excess", "measured_tails", "own_tails", "own_gains",
    }  # fmt: skip
    assert set(result.verdicts) == {"tail_lru.1", "tail_lru.2", "tail_lru.3"}
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    assert set(table[table["metric"] == EXCESS]["method"]) == set(POLICIES)
    assert (table[table["metric"] == GAP]["value"].abs() < 1e-6).all()
    assert str(tmp_path) not in json.dumps(result.data["settings"])  # a path enters by name and content
    told = [s["value"] for s in map(json.loads, (p.read_text() for p in tmp_path.rglob("done.json")))
            if isinstance(s["value"], dict) and "judged_capacity" in s["value"]]  # fmt: skip
    recorded = table[table["metric"] == "replay: P90 below LRU's"]["value"].tolist()
    assert told and any(value["P90"] == pytest.approx(recorded[0], abs=0.01) for value in told)
    parts = {part["part"]: part for claim in result.data["claims"] for part in claim["parts"]}
    assert parts["replay"]["grade"] == "R" and "no trace" not in parts["replay"]["note"]
    assert {parts[name]["grade"] for name in ("a", "b-number", "c")} == {"S"}


def test_lru_grows_without_bound_and_the_change_is_two_lines(tmp_path):
    ctx = StageContext(tmp_path / "a", seed=0)
    ctx.dir.mkdir(exist_ok=True)
    lru_is_bad(ctx, sizes=[10, 100, 1000])
    lines(ctx)
    table = frame(ctx.snapshot())
    assert table[table["metric"] == UNBOUNDED]["value"].tolist() == [1, 1, 1]
    by = table[table["metric"] == EXCESS].groupby("method")["value"].apply(list)
    assert by["lru"] == [6, 51, 501] and by["tail-belady"] == [0, 0, 0]  # n/2 + 1 by hand
    assert table[table["metric"] == LINES]["value"].tolist() == [2]


def test_a_worse_policy_has_a_gap_to_the_linear_program(tmp_path, monkeypatch):
    from gnomon.methods.serve import tail_lru

    def blind(trace, threshold):
        return TailOptimizedLRU(threshold, 3)

    monkeypatch.setattr(tail_lru, "TailOptimizedBelady", blind)
    ctx = StageContext(tmp_path, seed=0)
    optimum(ctx, count=30, seed=0)
    gaps = frame(ctx.snapshot())["value"]
    assert (gaps > -1e-6).all() and (gaps > 0.5).sum() > 3


def test_a_setting_is_chosen_against_lru_of_the_same_capacity(tmp_path):
    def done(share, xi, p90):
        value = {"P90": p90, "P95": p90, "violations": 0.0, "share": share, "xi_ms": xi, "capacity": 10.0}
        return Done(tmp_path, value, {})

    plain = [done(0.1, 0, 100.0), done(0.2, 0, 50.0)]
    ours = [done(0.1, 5, 80.0), done(0.1, 9, 90.0), done(0.2, 5, 30.0)]
    assert (
        choose(StageContext(tmp_path, seed=0), of=ours, to=plain, what="P90")["share"] == 0.2
    )  # 40 % beats 20 %
    assert lowered({"P90": 3, "P95": 5, "violations": 1}, {"P90": 4, "P95": 4, "violations": 0}) == {
        "P90": 25, "P95": -25, "violations": 0,
    }  # fmt: skip


def test_every_policy_is_made():
    trace = synthetic(50, generator=np.random.default_rng(0))
    assert [make(name, trace, 100, 50, 10, 0).name for name in POLICIES] == [
        *("lru", "threshold-lru", "t-lru", "adaptive t-lru", "et-lru", "end-aware", "length-aware", "belady"),
        *("tail-belady", "fifo", "lfu", "slru", "arc"),
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policies": ("lru", "tlru")}, "Unknown value of policies: 'tlru'"),
        ({"policies": ("lru",)}, "t-lru must be among policies"),
        ({"capacities": (0, 10)}, "capacities must be positive"),
        ({"thresholds_ms": (100.0,)}, "reference_ms=150.0 must be among"),
        ({"room": 1.5}, "are shares"),
        ({"turns": 2}, "turns=2 must be at least 10"),
    ],
)
def test_settings_that_cannot_work(settings, says):
    with pytest.raises(UsageError, match=says):
        TailLRUStudy(**settings)


def test_capacity_below_one_request_and_short_traces_are_refused(tmp_path):
    tiny = {"model": "tiny:llama-10k"}
    with pytest.raises(UsageError, match="100 tokens is below one request"):
        TailLRUStudy(**tiny, capacities=(100, 1000)).check()
    with pytest.raises(UsageError, match="holds 20 requests"):
        TailLRUStudy(**tiny, trace=str(mine(tmp_path / "short.jsonl", 20))).check()
    with pytest.raises(UsageError, match="There is no trace"):
        TailLRUStudy(**tiny, trace=str(tmp_path / "none.jsonl")).check()


def test_the_card_s_example_runs(tmp_path):
    card = (Path(gnomon.__file__).parent / "cards" / "tail_lru.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    late = [float(line.rsplit(" ", 1)[1].rstrip("%")) for line in done.stdout.splitlines()]
    assert len(late) == 2 and late[1] < late[0]
