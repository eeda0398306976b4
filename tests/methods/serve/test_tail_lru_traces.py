"""Trace files in every format, with the line of each mistake; prefix trees by hand and against conversations."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from gnomon.core.errors import UsageError
from gnomon.methods.serve.tail_lru import (
    LRU,
    PrefixTrace,
    TailOptimizedLRU,
    detect_format,
    read_trace,
    simulate,
    simulate_prefixes,
)


def write(folder: Path, name: str, lines: list[object]) -> Path:
    path = folder / name
    if name.endswith(".json"):
        path.write_text(json.dumps(lines))
    else:
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
    return path


def turn(time: float, conversation: str = "A", prompt: int = 5, response: int = 2) -> dict[str, object]:
    return {"time": time, "conversation": conversation, "prompt_len": prompt, "response_len": response}


def test_plain_turns(tmp_path: Path) -> None:
    path = write(tmp_path, "t.jsonl", [turn(0), turn(1.5, "B"), turn(2, "A", 7)])
    trace = read_trace(path)
    assert (
        detect_format(path) == "turns" and trace.history.tolist() == [0, 0, 7] and trace.names == ("A", "B")
    )
    table = write(
        tmp_path, "t.csv", ["time,conversation,prompt_len,response_len", "0,A,5,2", "1.5,B,5,2", "2,A,7,2"]
    )
    assert list(read_trace(table)) == list(trace)
    assert len(read_trace(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([turn(1), turn(0.5, "B")], r"Line 2 arrives at 0\.5 s, before line 1"),
        ([turn(1), turn(1, "B")], "Lines 1 and 2 arrive at the same time"),
        (
            [turn(0), {**turn(1), "promt_len": 3}],
            "Line 2: unknown column 'promt_len'. Did you mean 'prompt_len'",
        ),
        (
            [turn(0), {"time": 1, "conversation": "A", "prompt_len": 3}],
            "line 2: the turns format needs 'response_len'",
        ),
        ([turn(0), turn(1, prompt=-3)], "Line 2: prompt_len=-3"),
        ([turn(0), turn(1, prompt="long")], "Line 2: prompt_len='long'"),
        ([turn(0), turn("soon")], "Line 2: time='soon' is neither"),
        ([turn(0), "{"], "line 2: no JSON"),
        ([[1, 2]], "Line 1: an object with named fields"),
        ([{"when": 1}], "no known format: its first line has when"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, lines: list[object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_trace(write(tmp_path, "t.jsonl", lines))


def test_ties_can_be_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "t.jsonl", [turn(1), turn(1, "B")])
    assert len(read_trace(path, ties="keep")) == 2
    same = write(tmp_path, "s.jsonl", [turn(1), turn(1, "A")])
    with pytest.raises(UsageError, match="an earlier turn of its conversation"):
        read_trace(same, ties="keep")


def test_unknown_files_and_formats(tmp_path: Path) -> None:
    path = write(tmp_path, "t.jsonl", [turn(0)])
    with pytest.raises(UsageError, match=r"Unknown trace format 'wildchatt'. Did you mean 'wildchat'"):
        read_trace(path, "wildchatt")
    with pytest.raises(UsageError, match="There is no trace"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="Parquet"):
        read_trace(write(tmp_path, "t.parquet", [turn(0)]))


def test_wildchat(tmp_path: Path) -> None:
    def message(role: str, content: str, time: str | None = None) -> dict[str, object]:
        return {"role": role, "content": content, "timestamp": time}

    chats = [
        {
            "conversation_hash": "a", "timestamp": "2023-04-09 00:02:53+00:00",
            "conversation": [
                message("user", "x" * 40, "2023-04-09T00:00:10+00:00"), message("assistant", "y" * 80),
                message("user", "x" * 8), message("assistant", "y" * 9, "2023-04-09T00:02:00+00:00"),
            ],
        },
        {"conversation_hash": "b", "timestamp": "2023-04-09 00:01:00 UTC", "conversation": [message("user", "xxxx")]},
    ]  # fmt: skip
    trace = read_trace(write(tmp_path, "w.jsonl", chats))
    assert list(np.diff(trace.time)) == [50, 60] and [t.conversation for t in trace] == ["a", "b", "a"]
    assert (trace.prompt.tolist(), trace.response.tolist()) == ([10, 1, 2], [20, 0, 3])
    assert read_trace(tmp_path / "w.jsonl", count=len).prompt.tolist() == [40, 4, 8]
    chats[0]["conversation"][3]["timestamp"] = None
    with pytest.raises(UsageError, match="Line 1: turn 2 of conversation 'a' has no timestamp"):
        read_trace(write(tmp_path, "w.jsonl", chats))


def test_sharegpt(tmp_path: Path) -> None:
    chats = [
        {"id": f"c{k}", "conversations": [
            {"from": "system", "value": "sys!"}, {"from": "human", "value": "x" * 8},
            {"from": "gpt", "value": "y" * 12},
            {"from": "human", "value": "x" * 4}, {"from": "gpt", "value": "y" * 4},
        ]} for k in range(200)
    ]  # fmt: skip
    path = write(tmp_path, "s.json", chats)
    with pytest.raises(UsageError, match="have no times"):
        read_trace(path)
    trace = read_trace(path, generator=np.random.default_rng(0))
    assert len(trace) == 400 and set(trace.prompt.tolist()) == {1, 3}  # the system message counts once
    starts = np.sort(trace.time[trace.first_turn])
    assert np.diff(starts).mean() == pytest.approx(1, rel=0.25)
    chats[3]["conversations"][1]["from"] = "robot"
    with pytest.raises(UsageError, match="Line 4: from='robot' is unknown"):
        read_trace(write(tmp_path, "s.json", chats), generator=np.random.default_rng(0))


def test_azure(tmp_path: Path) -> None:
    rows = [
        "2023-11-16 18:15:46.6805900,100,50",
        "2023-11-16 18:15:50.9951690,180,10",
        "2023-11-16 18:15:51,30,5",
    ]
    path = write(tmp_path, "a.csv", ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    apart = read_trace(path)
    assert len(apart.names) == 3 and apart.time[1] - apart.time[0] == pytest.approx(4.314579)
    linked = read_trace(path, link=True)
    assert (
        len(linked.names) == 2
        and linked.history.tolist() == [0, 150, 0]
        and linked.prompt.tolist() == [100, 30, 30]
    )


def test_mooncake(tmp_path: Path) -> None:
    def line(ms: int, length: int, ids: list[int]) -> dict[str, object]:
        return {"timestamp": ms, "input_length": length, "output_length": 9, "hash_ids": ids}

    good = [line(0, 1000, [0, 1]), line(0, 600, [0, 2]), line(27, 1500, [0, 1, 3])]
    trace = read_trace(write(tmp_path, "m.jsonl", good))
    assert isinstance(trace, PrefixTrace) and trace.time.tolist() == [0, 0, 0.027]
    assert simulate_prefixes(trace, "lru", 10).hits.tolist() == [0, 1, 2]
    assert simulate_prefixes(trace, "lru", 10).uncached.tolist() == [1000, 88, 476]
    for wrong, says in (
        (line(30, 1000, [0]), "Line 4: 1 hash_ids for 1000 tokens"),
        (line(5, 10, [0]), "Line 4 arrives at 0.005 s, before"),
        (line(30, 10, [-1]), "whole numbers ≥ 0"),
        (line(30, 1000, [9, 1]), "block 1 follows block 9, elsewhere 0"),
    ):
        with pytest.raises(UsageError, match=says):
            read_trace(write(tmp_path, "m.jsonl", [*good, wrong]))


def prefixes(*requests: list[int]) -> PrefixTrace:
    lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
    return PrefixTrace(np.arange(len(requests)) * 1.0, tuple(tuple(ids) for ids in requests), lengths, 1)


def test_only_leaves_go_and_a_shared_prefix_outlives_its_branches() -> None:
    trace = prefixes([0, 1, 2], [0, 3], [5, 6], [0, 1, 2])
    # Five blocks after the second; one must go for the third: block 2, the least recent leaf.
    assert simulate_prefixes(trace, "lru", 5).hits.tolist() == [0, 1, 0, 2]


def test_budgets_count_from_the_deepest_branch() -> None:
    """ξ = 3: of a history of 5 the last three may go, blocks 2 to 4. Of one of 2 everything may."""
    trace = prefixes([0, 1, 2, 3, 4], [9], [0, 1, 2, 3, 4])
    assert simulate_prefixes(trace, "t-lru", 3, xi=3).hits.tolist() == [0, 0, 2]
    # A short branch of the same prefix, later: the shared blocks keep the budget of the long one.
    branch = prefixes([0, 1, 2, 3, 4], [0, 1], [7, 8, 9], [0, 1])
    assert simulate_prefixes(branch, "t-lru", 4, xi=3).hits.tolist() == [0, 2, 0, 2]
    assert (
        simulate_prefixes(branch, "lru", 4).hits.tolist()[3] < 2
        or simulate_prefixes(branch, "lru", 3).hits[3] < 2
    )


def test_trees_of_conversations_are_the_conversations() -> None:
    """Chains that share nothing, fed whole, decide as the conversation form does (answers 0, Q̂ as there)."""
    rng = np.random.default_rng(0)
    differ = 0
    for _ in range(60):
        lengths: dict[int, int] = {}
        turns, requests = [], []
        for t in range(20):
            conv, q = int(rng.integers(0, 4)), int(rng.integers(1, 5))
            lengths[conv] = lengths.get(conv, 0) + q
            turns.append((float(t), conv, q, 0))
            requests.append([conv * 1000 + k for k in range(lengths[conv])])
        trace, tree = turns, prefixes(*requests)
        capacity, xi = int(rng.integers(5, 40)), int(rng.integers(0, 20))
        lru, tail = simulate(trace, LRU(), capacity), simulate(trace, TailOptimizedLRU(xi, 3), capacity)
        np.testing.assert_array_equal(simulate_prefixes(tree, "lru", capacity).hits, lru.cached)
        np.testing.assert_array_equal(
            simulate_prefixes(tree, "t-lru", capacity, xi=xi, qhat=3).hits, tail.cached
        )
        differ += (lru.cached != tail.cached).any()
        best = simulate_prefixes(tree, "belady", capacity).hits.sum()
        assert best >= max(lru.cached.sum(), tail.cached.sum())
    assert differ > 10


def test_prefix_refusals() -> None:
    trace = prefixes([0, 1])
    with pytest.raises(UsageError, match=r"Unknown policy 'tlru'. Did you mean 't-lru'"):
        simulate_prefixes(trace, "tlru", 3)
    with pytest.raises(UsageError, match="capacity=-3"):
        simulate_prefixes(trace, "lru", -3)
    assert simulate_prefixes(prefixes([0, 1], [0, 1]), "threshold-lru", 9, min_blocks=3).hits.tolist() == [
        0,
        0,
    ]


@pytest.mark.skipif(
    "GNOMON_TEST_DATA" not in os.environ, reason="GNOMON_TEST_DATA names no folder of public traces"
)
def test_published_traces() -> None:
    folder = Path(os.environ["GNOMON_TEST_DATA"]) / "traces"
    mooncake = read_trace(folder / "mooncake_conversation.jsonl", limit=2000)
    assert mooncake.nodes > 20_000 and simulate_prefixes(mooncake, "lru", 10**6).hits.sum() > 0
    azure = read_trace(folder / "azure_llm_2023_conv.csv", ties="keep", limit=2000)
    assert len(azure) == 2000 and azure.prompt.mean() > 500
