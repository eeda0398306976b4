"""benchmarks/nf12.py: it runs on tiny shapes, ends with 1 where a kernel is wrong, and says what it left out."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gnomon.core.timing import copies_for
from gnomon.kernels import native

FOLDER = Path(__file__).parents[1] / "benchmarks"
MODULES = ("common", "nf12", "nf12_bulk", "nf12_generation", "nf12_matrices", "nf12_products")
built = pytest.mark.skipif(bool(native.problem()), reason=native.problem())


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts as modules, as they find each other when one of them is run."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)  # put back when the test ends, then gone
    return found


@built
def test_quick_run(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    command = [sys.executable, str(FOLDER / "nf12.py"), "--quick", "--threads", "1", "--repeats", "2"]
    done = subprocess.run(
        [*command, "--json", rows_file], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert rows[0]["kind"] == "machine" and rows[0]["kernels"].keys() >= {"bf16", "nf12"}
    checks = [row for row in rows if row["kind"] == "check"]
    assert len(checks) >= 12 and all(row["right"] for row in checks)
    times = [row for row in rows if row["kind"] == "time" and "seconds" in row]
    contenders = {row["contender"] for row in times}
    assert contenders >= {"NF12, fused", "BF16, same kernel", "FP32, torch linear", "Huffman", "copy, torch"}
    assert all(row["seconds_20"] <= row["seconds"] <= row["seconds_80"] for row in times)
    assert {row["contender"]: row["binds"] for row in rows if row["kind"] == "roof"}.keys() == {
        "NF12, fused",
        "BF16, same kernel",
    }
    assert {row["target"] for row in rows if row["kind"] == "target"} == {1.2, 0.8, 0.71, 5, 0.6}
    assert "left out: generation: --quick" in done.stdout


@built
@pytest.mark.parametrize("broken", ["linear", "decode"])
def test_a_wrong_kernel_ends_it_before_anything_is_timed(
    broken: str,
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    matrices, rows_file = modules["nf12_matrices"], tmp_path / "rows.jsonl"
    if broken == "linear":  # one output, one unit in the last place
        right = matrices.linear

        def wrong(*arguments: object, **settings: object) -> torch.Tensor:
            y: torch.Tensor = right(*arguments, **settings)
            y.view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)[0, 5] += 1
            return y

        monkeypatch.setattr(matrices, "linear", wrong)
    else:
        monkeypatch.setattr(matrices.NF12Tensor, "decode", lambda self: torch.zeros(self.shape).bfloat16())
    assert modules["nf12"].main(["--quick", "--threads", "1", "--json", str(rows_file)]) == 1
    printed = capsys.readouterr()
    assert "Nothing more was timed: " in printed.err
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    wrong_ones = [row["what"] for row in rows if row["kind"] == "check" and not row["right"]]
    assert wrong_ones and all(("fused" if broken == "linear" else "decodes") in what for what in wrong_ones)
    assert not [row for row in rows if row["kind"] == "time"]


def test_without_the_library_it_says_so(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "problem", lambda: "no compiler here")
    assert modules["nf12"].main([]) == 0
    assert capsys.readouterr().out == "Nothing was timed: no compiler here\n"


@pytest.mark.parametrize(
    "arguments",
    [["--threads", "0"], ["--threads", "one"], ["--repeats", "0"], ["--shapes", "64"], ["--shapes", "8x8:1"]],
)
def test_bad_settings_are_refused(
    arguments: list[str], modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        modules["nf12"].main(arguments)
    assert arguments[0] in capsys.readouterr().err


@built
def test_absent_peers_are_named(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zipnn", None)  # what makes an import fail
    monkeypatch.setitem(sys.modules, "zstandard", None)
    report = modules["common"].Report()
    assert modules["nf12_bulk"].peers(report, torch.zeros(8, 8).bfloat16(), 1) == []
    printed = capsys.readouterr().out
    assert "left out: zipnn: not installed; pip install zipnn" in printed
    assert "left out: zstandard: not installed; pip install zstandard" in printed


def test_an_absent_model_is_left_out(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    report = modules["common"].Report()
    modules["nf12_generation"].generation(report, [1])
    [row] = report.rows
    assert row["kind"] == "left out" and "gnomon fetch smollm2-135m" in row["reason"]


def test_memory_limits_the_copies(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    common = modules["common"]
    wanted = copies_for(1 << 20)
    monkeypatch.setattr(common, "available_memory", lambda: 100 * wanted << 20)
    assert common.Copies.of(1 << 20, 4 << 20) == common.Copies(wanted, wanted)
    monkeypatch.setattr(common, "available_memory", lambda: 10 << 20)
    few = common.Copies.of(1 << 20, 3 << 20)  # 70 % of ten in threes
    assert few.count == 2 and f"only 2 of the {wanted} copies" in few.told()
    monkeypatch.setattr(common, "available_memory", lambda: 0)
    assert common.Copies.of(1 << 20, 3 << 20).count == 1


def test_available_memory_heeds_the_group(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    available = modules["common"].available_memory
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:   1000 kB\n")
    assert available(tmp_path) == 1000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert available(tmp_path) == 1000 << 10
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("anon 100000\ninactive_file 150000\n")
    assert available(tmp_path) == 350_000


def test_a_table_lines_up(modules: dict[str, ModuleType]) -> None:
    assert modules["common"].table(["", "ms"], [["NF12", "1.5"], ["x", "10"]]) == (
        "         ms\n  NF12  1.5\n  x      10"
    )
