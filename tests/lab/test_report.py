"""The report. Source of truth: the hand-written run in `example_run`, and numbers formatted by hand."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from example_run import HOSTILE, example_result, hostile_result, write_run

from gnomon.core.errors import GnomonError
from gnomon.lab.pages import decimals_for, duration, interval_text, json_block, number, plot
from gnomon.lab.report import headline_groups, tagged_tables, verdict_counts, write_report
from gnomon.lab.schema import result_schema


class Page(HTMLParser):
    """Tags with their attributes and the text outside scripts and styles, as a browser would read them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._hidden = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._hidden = ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


def report(folder: Path, result: dict[str, Any]) -> str:
    return write_report(write_run(folder / "run", result)).read_text()


def contrast(one: str, two: str) -> float:
    """WCAG 2 contrast ratio of two colours `#rrggbb`."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


# --- the format ---


@pytest.mark.parametrize("result", [example_result(), hostile_result()])
def test_example_results_follow_the_schema(result: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(result_schema())
    jsonschema.Draft202012Validator(result_schema()).validate(result)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("claims", 0, "verdict"), "maybe"),
        (("claims", 0, "grade"), "A"),
        (("claims", 0, "parts", 0, "interval"), [1.0]),
        (("claims", 0, "surprise"), 1),
        (("methods", 0, "metrics", 0, "over"), "day"),
        (("methods", 0, "budget", "euros"), 1),
        (("figures", 0, "name"), "../secret"),
        (("finished",), "yesterday"),
    ],
)
def test_the_schema_refuses(path: tuple[str | int, ...], value: object) -> None:
    result: Any = example_result()
    place = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(result_schema()).validate(result)


# --- numbers ---


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-0.0625, "−0.0625"),
        (1234567, "1\u202f234\u202f567"),
        (7.26, "7.26"),
        (0.000012345, "1.23e−05"),
        (3.0, "3"),
        (-0.0, "0"),
        (None, "–"),
        (True, "true"),
        (1234.5678, "1\u202f235"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_written_for_readers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_rounding_follows_the_interval_and_keeps_no_negative_zero() -> None:
    assert decimals_for(0.974, 0.988) == 3  # half width 0.007: one digit
    assert decimals_for(-0.03, 0.012) == 3  # half width 0.021: two digits
    assert decimals_for(1e3, 9e3) == 0
    assert decimals_for(1.0, 1.0) is None
    assert interval_text(-0.2041, -0.18) == "−0.204 to −0.180"
    assert number(-0.0004, 2) == "0.00"


@pytest.mark.parametrize(("seconds", "text"), [(3.14, "3.1 s"), (59.7, "1 min 00 s"), (5211, "1 h 26 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_plot_keeps_the_order_of_its_values() -> None:
    drawn = plot(-0.1, -0.2, -0.05, reference=0.0)
    assert (
        drawn is not None and drawn.low is not None and drawn.high is not None and drawn.reference is not None
    )
    assert 0 < drawn.low < drawn.centre < drawn.high < drawn.reference < drawn.width
    assert drawn.label == "Estimate −0.10, 95 % interval −0.20 to −0.05, held against 0"
    assert plot(None, None, None) is None
    half = plot(-0.1, None, -0.05)
    assert half is not None and half.low is not None and half.low < half.centre < half.ends[0] == half.high
    assert half.label.endswith("interval up to −0.05") and interval_text(0.2, None) == "0.2 or more"
    lone = plot(2.0, None, None, reference=2.0)
    assert lone is not None and lone.centre == lone.reference


# --- the page ---


def test_claims_and_verdicts_come_before_everything_else(tmp_path: Path) -> None:
    html = report(tmp_path, example_result())
    order = [
        html.index(f'id="{part}"') for part in ("claims", "tlcm.1", "tlcm.5", "figures", "numbers", "run")
    ]
    assert order == sorted(order)
    text = Page(html).text
    for wanted in (
        "2 hold",
        "1 fails",
        "2 undecided",
        "0.981",
        "0.974 to 0.988",
        "n = 24",
        "wholly above 0.9",
        "SmolLM2-135M-Instruct (from Q4_1 weights)",
        "11 pairs qualify",
        "gnomon run tlcm --profile full",
        "gnomon.run('tlcm', profile='full', jobs=2)",
        "simulator with parameters we chose",
        "Xeon",
        "4b1d6a0e7c55",
        "threshold",
        "2.13.0",
        "12\u202f288",
        "measure-00a41c",
        "At full scale",
    ):
        assert wanted in text, wanted
    assert "Preview" not in text and "Not reproducible" not in text


def test_every_verdict_has_the_same_weight(tmp_path: Path) -> None:
    html = report(tmp_path, example_result())
    for verdict, count in verdict_counts(example_result()["claims"]).items():
        assert len(re.findall(rf'class="badge {verdict} large"', html)) == count


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_only_full_is_evidence(tmp_path: Path, profile: str) -> None:
    assert f"Preview, not evidence. This is the {profile} profile" in Page(
        report(tmp_path, {**example_result(), "profile": profile})
    ).text.replace("  ", " ")


def test_code_changes_failed_stages_and_missing_models_are_said(tmp_path: Path) -> None:
    result = example_result()
    result["code"]["accepted_changes"] = ["beef"]
    result["stages"][3]["failed"] = "NumericalFailure: loss is NaN at step 7."
    result["models"] = []
    text = Page(report(tmp_path, result)).text
    assert "the code changed during the run" in text
    assert "One stage failed." in text and "loss is NaN at step 7." in text
    assert "no language model: none took part in this run" in text


def test_figures_are_inside_the_page_in_both_colours(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", example_result())
    page = Page(write_report(run).read_text())
    images = [attrs for tag, attrs in page.tags if tag in ("img", "source")]
    assert [attrs.get("media") for attrs in images] == ["(prefers-color-scheme: dark)", None]
    assert all(
        (a.get("src") or a.get("srcset") or "").startswith("data:image/svg+xml;base64,") for a in images
    )
    for file in (run / "figures").iterdir():
        file.unlink()
    assert "not in the run folder" in Page(write_report(run).read_text()).text


def test_a_figure_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    result = example_result()
    result["figures"][0]["name"] = "../../secret"
    with pytest.raises(GnomonError, match=r"'\.\./\.\./secret' is not a plain file name"):
        report(tmp_path, result)


def test_headline_is_what_has_no_tags_and_methods_share_an_axis() -> None:
    methods = example_result()["methods"]
    groups = headline_groups(methods)
    assert [(g["metric"], [r["method"] for r in g["rows"]]) for g in groups] == [
        ("active_layers", ["smollm2-135m", "cross-token null", "Gaussian null"]),
        ("negative_share", ["smollm2-135m", "cross-token null"]),
    ]
    real, null, _ = (row["plot"] for row in groups[0]["rows"])
    assert null.high < real.low  # 0.62 + 0.05 lies far left of 7.26 - 0.31 on the common axis
    assert [(t["metric"], t["tags"], len(t["rows"])) for t in tagged_tables(methods)] == [
        ("adjacent_cosine", ("layer",), 58),
        ("opposition", ("layer", "alpha"), 12),
    ]


def test_tags_in_another_order_stay_in_their_columns() -> None:
    methods = copy.deepcopy(example_result()["methods"][:1])
    swept = [m for m in methods[0]["metrics"] if m["metric"] == "opposition"]
    swept[1]["tags"] = dict(reversed(swept[1]["tags"].items()))
    table = tagged_tables(methods)[1]
    assert table["rows"][1]["tags"] == [swept[1]["tags"]["layer"], swept[1]["tags"]["alpha"]]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    html = report(tmp_path, hostile_result())
    page = Page(html)
    clean = Page(report(tmp_path / "clean", {**example_result(), "profile": "smoke"}))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in clean.tags}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"]
    assert sum(tag == "script" for tag, _ in page.tags) == 2  # the data and our own
    for text in HOSTILE:
        assert text in page.text


def test_json_cannot_end_its_element() -> None:
    block = json_block({"a": "</script><!--", "b": "&"})
    assert "<" not in block and ">" not in block and "&" not in block
    assert __import__("json").loads(block) == {"a": "</script><!--", "b": "&"}


def test_the_policy_allows_nothing_from_outside(tmp_path: Path) -> None:
    page = Page(report(tmp_path, example_result()))
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy and "http" not in policy
    addresses = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href", "srcset", "action")]
    assert all(v is not None and v.startswith(("#", "data:")) for v in addresses)


def test_a_study_without_a_card_has_a_report_too(tmp_path: Path) -> None:
    text = Page(
        report(tmp_path, {**example_result(), "slug": "mine", "title": "My rival", "claims": []})
    ).text
    assert "My rival" in text and "This study states no claim." in text


def test_unreadable_runs_say_why(tmp_path: Path) -> None:
    with pytest.raises(GnomonError, match=r"no result\.json, so the run is not finished"):
        write_report(tmp_path)
    with pytest.raises(GnomonError, match="schema_version 3, but this version of Gnomon reads 1"):
        report(tmp_path, {**example_result(), "schema_version": 3})


# --- the style sheet ---


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_have_contrast_aa(mode: str) -> None:
    css = files("gnomon.lab").joinpath("templates", "style.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)", 1)
    block = light if mode == "light" else dark.split("}", 1)[0]
    colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    pairs = [(ink, paper) for ink in ("ink", "muted", "link", "sun") for paper in ("page", "surface", "sunk")]
    pairs += [(v, f"{v}-tint") for v in ("holds", "fails", "undecided")]
    pairs += [(v, p) for v in ("holds", "fails", "undecided") for p in ("page", "surface")]
    for ink, paper in pairs:
        assert contrast(colour[ink], colour[paper]) >= 4.5, (ink, paper)
