"""core.timing: sizes as sysfs writes them, whose turn it is, quantiles by hand, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnomon.core import timing
from gnomon.core.errors import UsageError
from gnomon.core.timing import (
    Contender,
    Spread,
    copies_for,
    interleaved,
    last_level_cache,
    spread,
    threads_set,
)


def sysfs(folder: Path, *sizes: str) -> Path:
    for position, size in enumerate(sizes):
        (folder / f"index{position}").mkdir()
        (folder / f"index{position}" / "size").write_text(size)
    return folder


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("32K\n", "32K\n", "512K\n", "32768K\n"), 32 << 20),
        (("48K\n", "2M\n", "307200K\n"), 300 << 20),
        (("32K\n", "1G\n"), 1 << 30),
        (("512K\n", "", "?\n"), 512 << 10),  # what can't be read is passed over
        (("\n",), timing.ASSUMED_CACHE),
        ((), timing.ASSUMED_CACHE),
    ],
)
def test_the_largest_cache_counts(tmp_path: Path, sizes: tuple[str, ...], expected: int) -> None:
    assert last_level_cache(sysfs(tmp_path, *sizes)) == expected


def test_a_system_without_the_folder(tmp_path: Path) -> None:
    assert last_level_cache(tmp_path / "none") == timing.ASSUMED_CACHE


@pytest.mark.parametrize(
    ("smallest", "count"), [(1, 400), (100, 4), (101, 4), (399, 2), (400, 1), (10**9, 1)]
)
def test_copies_make_four_times_the_cache(smallest: int, count: int) -> None:
    assert copies_for(smallest, cache=100) == count
    assert (count - 1) * smallest < 400 <= count * smallest


def test_copies_for_this_machine() -> None:
    assert copies_for(1) == 4 * last_level_cache()


def test_nothing_to_copy_is_refused() -> None:
    with pytest.raises(UsageError, match="A copy of 0 bytes can't fill a cache"):
        copies_for(0)


def recording(names: str, copies: int = 1) -> tuple[list[str], list[Contender]]:
    calls: list[str] = []

    def call(name: str, copy: int) -> None:
        calls.append(name if copies == 1 else f"{name}{copy}")

    contenders = [
        Contender(name=name, calls=[lambda name=name, k=k: call(name, k) for k in range(copies)])
        for name in names
    ]
    return calls, contenders


def test_who_begins_moves_on() -> None:
    calls, contenders = recording("abc")
    times = interleaved(contenders, repeats=4, warm_up=0)
    assert "".join(calls) == "abcbcacababc"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_each_copy_has_its_turn_and_the_warm_up_is_not_timed() -> None:
    calls, contenders = recording("ab", copies=2)
    times = interleaved(contenders, repeats=1, warm_up=2)
    assert calls == ["a0", "a1"] * 2 + ["b0", "b1"] * 2 + ["a0", "a1", "b0", "b1"]
    assert [len(seconds) for seconds in times.values()] == [1, 1]


def test_seconds_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(seconds: float) -> None:
        clock[0] += seconds

    slow = Contender(name="slow", calls=[lambda: work(1), lambda: work(2), lambda: work(6)])
    fast = Contender(name="fast", calls=[lambda: work(0.5)])
    assert interleaved([slow, fast], repeats=2) == {"slow": [3, 3], "fast": [0.5, 0.5]}


def test_a_machine_that_slows_down_slows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 1 if calls[0] < 4 else 3  # from the third repeat on, each call takes three times as long
        calls[0] += 1

    contenders = [Contender(name=name, calls=[work]) for name in "ab"]
    assert interleaved(contenders, repeats=4, warm_up=0) == {"a": [1, 1, 3, 3], "b": [1, 1, 3, 3]}


@pytest.mark.parametrize(("names", "repeats"), [("", 1), ("a", 0), ("aba", 1)])
def test_what_can_not_be_timed_is_refused(names: str, repeats: int) -> None:
    with pytest.raises(UsageError, match=r"can't be timed; names must be distinct"):
        interleaved(recording(names)[1], repeats=repeats)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([2.0], Spread(2, 2, 2)),
        ([1.0, 2.0], Spread(1.5, 1.2, 1.8)),
        ([5.0, 1.0, 4.0, 2.0, 3.0, 6.0], Spread(3.5, 2, 5)),  # at positions 0, 1, … 5: the fifths are 1 and 4
        ([1.0, 1.0, 1.0, 1.0, 1.0, 100.0], Spread(1, 1, 1)),  # one interruption changes nothing
    ],
)
def test_spread(seconds: list[float], expected: Spread) -> None:
    found = spread(seconds)
    assert (found.median, found.low, found.high) == pytest.approx(
        (expected.median, expected.low, expected.high)
    )


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), threads_set(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
