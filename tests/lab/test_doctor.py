"""`gnomon doctor`: every finding says what follows from it, and a broken machine is described, not crashed on."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from gnomon import cli
from gnomon.core import smollm2
from gnomon.lab import doctor


def finding(name: str) -> doctor.Finding:
    [found] = [one for one in doctor.examine() if one.name == name]
    return found


def test_everything_promised_is_there_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in findings]
    wanted = "gnomon python torch blas threads device transformers smollm2-135m compiler chromium bubblewrap"
    assert {*wanted.split(), "cpu features", "disk space", "extra train", "extra dev"} <= set(names)
    assert len(set(names)) == len(names)
    assert all(
        one["value"] and one["meaning"] and one["state"] in ("good", "missing", "bad") for one in findings
    )


def test_the_plain_form_marks_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [at] = [i for i, line in enumerate(lines) if line.startswith("--  bubblewrap")]
    assert lines[at].endswith("not found") and "refused" in lines[at + 1]


def test_a_missing_extra_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "peft" else asked(name))
    found = finding("extra train")
    assert (found.state, found.value) == ("missing", "missing: peft")
    assert found.meaning == "Install it with: pip install 'gnomon[train]'"


def test_a_missing_core_library_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "diptest" else asked(name))
    assert finding("diptest").state == "bad"


def test_the_embedded_model_is_there_or_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm2, "cached", lambda name: None)
    assert "gnomon fetch smollm2-135m" in finding("smollm2-135m").meaning
    monkeypatch.setattr(smollm2, "cached", lambda name: tmp_path)
    assert finding("smollm2-135m").value == str(tmp_path)


@pytest.mark.parametrize(("free", "state"), [(1_900_000_000, "bad"), (2_100_000_000, "good")])
def test_little_disk_space_is_bad(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free))
    found = finding("disk space")
    assert (found.state, found.value) == (state, f"{free / 1e9:.1f} GB free")


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> list[doctor.Finding]:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_tools", lambda: broken(Path()))
    found = next(one for one in doctor.examine() if "no such device" in one.value)
    assert found.state == "bad"
    assert finding("disk space")  # the others are still there


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f\n", {"fpu", "avx2", "avx512f"}),  # x86
        ("processor : 0\nFeatures\t: fp asimd sve\n", {"fp", "asimd", "sve"}),  # ARM
        ("nothing of the kind\n", set()),
    ],
)
def test_processor_flags(text: str, flags: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert doctor._cpu_flags(tmp_path / "cpuinfo") == flags
    assert doctor._cpu_flags(tmp_path / "absent") == set()
