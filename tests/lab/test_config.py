"""Settings: coercion, profiles, nearest names, run ids. Truth: values written by hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from gnomon.core.errors import UsageError
from gnomon.lab.config import StudyConfig, coerce, run_id


@dataclass(frozen=True, kw_only=True)
class Sample(StudyConfig):
    """A sample."""

    slug: ClassVar[str] = "sample"
    model: str = "tiny:llama-10k"
    data: str | None = None
    rate: float = 0.1
    keeps: tuple[float, ...] = (0.5, 0.25)
    kind: Literal["fast", "slow"] = "fast"
    flag: bool = False
    profiles: ClassVar[dict[str, dict[str, Any]]] = {"smoke": {"rate": 1.0}, "full": {"seeds": (0, 1, 2)}}


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("1e4", int, 10_000),
        ("12345678901234567", int, 12345678901234567),
        ("1e-4", float, 1e-4),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("0,1,2", tuple[int, ...], (0, 1, 2)),
        ("[0, 1]", tuple[int, ...], (0, 1)),
        ("(0, 1)", tuple[int, ...], (0, 1)),
        ("5", tuple[int, ...], (5,)),
        ([1, 2], tuple[int, ...], (1, 2)),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("yes", bool, True),
        ("a=b", str, "a=b"),
        ("x/y", Path, Path("x/y")),
    ],
)
def test_coerce(text, hint, value):
    assert coerce(text, hint, "field") == value


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("x", int),
        ("1.5", int),
        ("x", float),
        (True, int),
        ("maybe", bool),
        ("1,x", tuple[int, ...]),
        ("[1,", tuple[int, ...]),
        ("nan", float),
        ("-inf", float),
        ("\udcff", str),  # a byte that is not UTF-8, as Python holds it
        (3, str),
    ],
)
def test_coerce_refuses(text, hint):
    with pytest.raises(UsageError, match="field="):
        coerce(text, hint, "field")


def test_profiles_then_overrides_win():
    assert Sample.resolve("cpu") == Sample()
    assert Sample.resolve("smoke").rate == 1.0
    assert Sample.resolve("smoke", {"rate": "2"}).rate == 2.0
    assert Sample.profile_names() == ("smoke", "cpu", "full")


@pytest.mark.parametrize(
    ("profile", "overrides", "message"),
    [
        ("fulll", {}, "'full'"),
        ("cpu", {"ratee": "1"}, "'rate'"),
        ("cpu", {"kind": "fasst"}, "'fast'"),
        ("cpu", {"seeds": "0,0"}, "distinct"),
        ("cpu", {"seeds": "4294967296"}, "below 2"),
        ("cpu", {"threads": "0"}, "at least 1"),
        ("cpu", {"threads": "1000000"}, "at most 1024"),
        ("cpu", {"rivals": "mine=a:b"}, "no interchangeable competitors"),
    ],
)
def test_wrong_settings_offer_a_way_out(profile, overrides, message):
    with pytest.raises(UsageError, match=message):
        Sample.resolve(profile, overrides)


def test_settings_round_trip():
    config = Sample.resolve("full", {"keeps": ".3,.4", "data": "topics"})
    assert Sample.resolve("cpu", config.settings()) == config


def test_run_id_knows_content_not_place(tmp_path):
    ids = []
    for folder, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "corpus.txt"
        file.write_text(text)
        settings, mapping = Sample.resolve("cpu", {"data": str(file)}).portable()
        assert settings["data"].startswith("corpus.txt@sha256:") and str(tmp_path) not in str(settings)
        assert mapping[str(file)] == settings["data"]
        ids.append(run_id("sample", "cpu", settings))
    assert ids[0] == ids[1] != ids[2]
    assert run_id("sample", "full", {}) != run_id("sample", "cpu", {})
