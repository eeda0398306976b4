"""Board and `gnomon show`. Source of truth: the systems table, the shipped card, the hand-written run."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from example_run import HOSTILE, example_result, hostile_result
from rich.console import Console
from test_report import Page

from gnomon.core.errors import GnomonError, UsageError
from gnomon.lab.board import build, markdown
from gnomon.lab.cards import load_card
from gnomon.lab.show import show
from gnomon.systems import SYSTEMS


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "tlcm.json").write_text(json.dumps(example_result()))
    return folder


def printed(slug: str, results: Path) -> str:
    console = Console(width=100, file=StringIO(), color_system=None)
    console.print(show(slug, results))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_index_lists_every_system_and_works_first(tmp_path: Path, results: Path) -> None:
    index = build(tmp_path / "site", results)
    page = Page(index.read_text())
    rows = [attrs for tag, attrs in page.tags if tag == "tr" and "data-status" in attrs]
    assert len(rows) == len(SYSTEMS)
    statuses = [row["data-status"] for row in rows]
    assert statuses == sorted(statuses, reverse=True) and statuses[0] == "works"
    for system in SYSTEMS:
        assert system.name in page.text and system.summary in page.text
    verdicts = [row["data-verdicts"] for row in rows]
    assert [text for text in verdicts if text] == ["holds fails undecided"]  # the one system with a result
    assert "2 hold" in page.text and "1 fails" in page.text


def test_a_system_page_shows_card_claims_and_numbers(tmp_path: Path, results: Path) -> None:
    build(tmp_path / "site", results)
    page = Page((tmp_path / "site" / "tlcm.html").read_text())
    for wanted in (
        "4b1d6a0e7c55",
        "0.981",
        "How it is measured here",
        "active_layers",
        "threshold",
        "OpenReview",
        load_card("tlcm").limits[0].split()[0],
        "SmolLM2-135M-Instruct (from Q4_1 weights)",
    ):
        assert wanted in page.text, wanted
    hrefs = {attrs.get("href") for tag, attrs in page.tags if tag == "a"}
    assert "index.html" in hrefs and "https://arxiv.org/abs/2609.07876" in hrefs


def test_without_a_result_the_claims_say_so(tmp_path: Path) -> None:
    empty = tmp_path / "none"
    empty.mkdir()
    build(tmp_path / "site", empty)
    text = Page((tmp_path / "site" / "tlcm.html").read_text()).text
    assert "No accepted result yet." in text and text.count("not measured") == len(load_card("tlcm").claims)
    assert "no accepted result yet" in Page((tmp_path / "site" / "index.html").read_text()).text


def test_claims_the_result_does_not_judge_are_listed_as_unmeasured(tmp_path: Path, results: Path) -> None:
    result = example_result()
    result["claims"] = result["claims"][:2]
    (results / "tlcm.json").write_text(json.dumps(result))
    build(tmp_path / "site", results)
    text = Page((tmp_path / "site" / "tlcm.html").read_text()).text
    assert text.count("not measured") == len(load_card("tlcm").claims) - 2


def test_a_board_is_replaced_but_nothing_else_is(tmp_path: Path, results: Path) -> None:
    site = tmp_path / "site"
    build(site, results)
    (site / "stale.html").write_text("old")
    build(site, results)
    assert not (site / "stale.html").exists()
    home = tmp_path / "home"
    home.mkdir()
    (home / "index.html").write_text("<title>mine</title>")
    with pytest.raises(UsageError, match="is not a board, so it is left alone"):
        build(home, results)
    assert (home / "index.html").read_text() == "<title>mine</title>"
    with pytest.raises(UsageError, match="is not a board"):
        build(results / "tlcm.json", results)


def test_hostile_text_stays_text(tmp_path: Path, results: Path) -> None:
    (results / "tlcm.json").write_text(json.dumps(hostile_result()))
    build(tmp_path / "site", results)
    for name in ("index.html", "tlcm.html"):
        page = Page((tmp_path / "site" / name).read_text())
        assert sum(tag == "script" for tag, _ in page.tags) == 1
        assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on") or key == "style"]
        assert "img" not in {tag for tag, _ in page.tags}
    assert all(text in page.text for text in HOSTILE)


@pytest.mark.parametrize(
    ("source", "present", "absent"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;", "<script"),
        ("[x](javascript:alert)", "[x](javascript:alert)", "href"),
        ("![x](https://example.org/a.png)", "x", "<img"),
        ("| a | b |\n|---|--:|\n| 1 | 2 |", '<td class="num">2</td>', "style="),
        ("# Top", "<h2>Top</h2>", "<h1"),
        ("[x](https://example.org)", 'rel="noopener noreferrer"', "target"),
    ],
)
def test_markdown_is_tame(source: str, present: str, absent: str) -> None:
    html = markdown(source)
    assert present in html and absent not in html


def test_show_prints_verdicts_grades_and_how_to_run(results: Path) -> None:
    text = " ".join(printed("tlcm", results).split())
    for wanted in (
        "LLM Layers Immediately Correct Each Other",
        "arXiv:2609.07876",
        "interpret, works",
        "✓ holds [R] 0.981 (0.974 to 0.988), n = 24",
        "✕ fails [R] 0.41, n = 10",
        "tlcm.5 ? undecided",
        "R = real pretrained model",
        "Inferred",
        "Limits",
        "gnomon run tlcm --profile full",
    ):
        assert wanted in text, wanted


def test_show_without_a_result_for_planned_and_unknown_systems(tmp_path: Path) -> None:
    planned = next(system.slug for system in SYSTEMS if system.status == "planned").replace("-", "_")
    assert "no accepted result yet" in printed("tlcm", tmp_path)
    assert "Planned: no part, no study and no card yet." in printed(planned, tmp_path)
    with pytest.raises(UsageError, match=r"Unknown system 'tclm'\. Did you mean 'tlcm'"):
        show("tclm")


def test_show_does_not_read_markup_in_text(results: Path) -> None:
    result = example_result()
    result["claims"][0]["parts"][0]["note"] = "[bold]loud[/bold] [/nonsense]"
    (results / "tlcm.json").write_text(json.dumps(result))
    assert "[bold]loud[/bold] [/nonsense]" in printed("tlcm", results)


def test_a_damaged_result_is_named(tmp_path: Path, results: Path) -> None:
    (results / "tlcm.json").write_text("{")
    with pytest.raises(GnomonError, match=r"tlcm\.json is not valid JSON"):
        build(tmp_path / "site", results)
    assert not (tmp_path / "site").exists()
