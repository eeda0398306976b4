"""Durable writes. Truth: what is on disk after a failure at each step."""

import json
import math
import os

import pytest

from gnomon.core import files
from gnomon.core.errors import GnomonError, MissingExtra, nearest, unknown
from gnomon.core.files import content_hash, dump_json, read_json, require_space, write_atomic, written_folder


@pytest.mark.parametrize("step", ["_write", "_fsync", "_replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, step):
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def fail(*arguments):
        raise OSError("disk is gone")

    monkeypatch.setattr(files, step, fail)
    with pytest.raises(OSError, match="disk is gone"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    final = tmp_path / "model"
    with pytest.raises(RuntimeError), written_folder(final) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_folder(final) as folder:
        (folder / "whole").write_text("x")
        assert not final.exists()
    assert [p.name for p in final.iterdir()] == ["whole"]
    with pytest.raises(GnomonError, match="--force"), written_folder(final):
        pass
    with written_folder(final, force=True) as folder:
        (folder / "other").write_text("x")
    assert [p.name for p in final.iterdir()] == ["other"]


class Killed(BaseException):
    """Stands in for SIGKILL: nothing cleans up after it, because cleaning up is patched away."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path, monkeypatch, renames):
    """Killed before the 1st rename, between the two, or before the old folder is removed: one of them stands
    whole, at the latest when the next writer begins, and nothing is left over."""
    final, real, done = tmp_path / "model", os.replace, []
    with written_folder(final) as folder:
        (folder / "old").write_text("x")
    (tmp_path / ".model.more.abcdefgh.tmp").mkdir()  # of somebody who is writing `model.more` now

    def replace(source, target):
        if len(done) == renames:
            raise Killed
        real(source, target)
        done.append(target)

    def killed(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, "_replace", replace)
        patch.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(Killed), written_folder(final, force=True) as folder:
            (folder / "new").write_text("x")
    (tmp_path / ".model.abcdefgh.tmp").write_text("of a killed write_atomic")
    files.clear_leftovers(final)
    assert [path.name for path in final.iterdir()] == ["new" if renames == 2 else "old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.more.abcdefgh.tmp", "model"]


def test_a_failed_replacement_puts_the_old_folder_back(tmp_path, monkeypatch):
    final, real = tmp_path / "model", os.replace
    with written_folder(final) as folder:
        (folder / "old").write_text("x")

    def replace(source, target):
        if str(source).endswith(".tmp"):
            raise OSError("disk is gone")
        real(source, target)

    monkeypatch.setattr(files, "_replace", replace)
    with pytest.raises(OSError, match="disk is gone"), written_folder(final, force=True):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


def test_files_and_folders_have_the_usual_modes(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", "x")
        with written_folder(tmp_path / "d"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_without_nan(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json({"x": value})


def test_damaged_json_names_the_file(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(GnomonError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")
    assert json.loads(dump_json({"b": 1, "a": "é"})) == {"a": "é", "b": 1}


def test_require_space_states_both_numbers(tmp_path):
    with pytest.raises(GnomonError, match=r"MB free, but 1,000,000,000,000 MB are needed"):
        require_space(tmp_path, 10**18)
    require_space(tmp_path, 1)


def test_content_hash_follows_content_and_names_only(tmp_path):
    def folder(name, **contents):
        (tmp_path / name / "sub").mkdir(parents=True)
        for file, text in contents.items():
            (tmp_path / name / "sub" / file).write_text(text)
        return content_hash(tmp_path / name)

    base = folder("a", x="1", y="2")
    assert base == folder("b", y="2", x="1")
    assert len({base, folder("c", x="1"), folder("d", x="2", y="1"), folder("e", x="1", z="2")}) == 4
    (tmp_path / "a" / ".hidden").write_text("no matter")
    assert content_hash(tmp_path / "a") == base
    # SHA-256 of b"abc", from FIPS 180-2.
    (tmp_path / "abc").write_bytes(b"abc")
    assert content_hash(tmp_path / "abc").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_unknown_names_offer_the_nearest():
    assert "'numuon'" in nearest("numoun", ["numuon", "poet"])
    assert "Known: a, b" in nearest("zzz", ["b", "a"])
    assert unknown("profile", "smok", ["smoke"]).exit_code == 2
    assert "pip install 'gnomon[train]'" in str(MissingExtra("trl", "train", "DPO"))
