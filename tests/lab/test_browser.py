"""Reports and board in headless Chromium. Source of truth: what the browser itself sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from example_run import HOSTILE, example_result, hostile_result, write_run

from gnomon.lab.board import build
from gnomon.lab.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = Path("/usr/bin/chromium")
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed"),
]

PAGES = ("report", "hostile", "index", "system")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "results").mkdir()
    (folder / "results" / "tlcm.json").write_text(json.dumps(hostile_result()))
    index = build(folder / "site", folder / "results")
    return {
        "report": write_report(write_run(folder / "good", example_result())),
        "hostile": write_report(write_run(folder / "bad", hostile_result())),
        "index": index,
        "system": index.with_name("tlcm.html"),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Open a page; any message on the console, dialog, error or request beyond the file fails the test."""
    trouble: list[str] = []
    contexts = []

    def allowed(route: Any) -> None:
        address = route.request.url
        if address.startswith("data:") or address == route.request.frame.url or address.endswith(".html"):
            route.continue_()
        else:
            trouble.append(f"request: {address}")
            route.abort()

    def open_page(name: str, width: int = 1200, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.route("**/*", allowed)
        page.on(
            "request", lambda r: r.url.startswith(("file:", "data:")) or trouble.append(f"request: {r.url}")
        )
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def open_all(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_no_sideways_scrolling_on_a_phone(visit: Callable[..., Any], name: str, scheme: str) -> None:
    page = visit(name, width=375, scheme=scheme)
    open_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 375


@pytest.mark.parametrize("name", PAGES)
def test_light_and_dark_differ(visit: Callable[..., Any], name: str) -> None:
    look = "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
    light, dark = visit(name).evaluate(look), visit(name, scheme="dark").evaluate(look)
    assert light == ["rgb(251, 250, 247)", "rgb(33, 31, 27)"]
    assert dark == ["rgb(23, 22, 19)", "rgb(236, 232, 223)"]


def test_the_figure_follows_the_colour_scheme(visit: Callable[..., Any]) -> None:
    shown = {
        s: visit("report", scheme=s).evaluate("document.querySelector('.plate img').currentSrc")
        for s in ("light", "dark")
    }
    assert shown["light"] != shown["dark"]
    assert visit("report").evaluate("document.querySelector('.plate img').naturalWidth") > 0


@pytest.mark.parametrize("name", ["hostile", "system"])
def test_hostile_text_stays_text(visit: Callable[..., Any], name: str) -> None:
    page = visit(name)
    open_all(page)
    assert page.evaluate("document.querySelectorAll('[onerror], img[src=x], script:not([type])').length") == 1
    shown = page.evaluate("document.body.innerText")
    assert all(text in shown for text in HOSTILE)


def test_an_injected_script_or_request_would_be_stopped(browser: Any, pages: dict[str, Path]) -> None:
    """The policy holds even if escaping ever failed: nothing added to the page runs or loads."""
    page = browser.new_page()
    page.goto(pages["report"].as_uri())
    blocked = page.evaluate(
        """() => new Promise((done) => {
            const seen = [];
            document.addEventListener("securitypolicyviolation", (event) => {
                event.preventDefault();
                seen.push(event.effectiveDirective);
                if (seen.length === 3) done([...seen].sort());
            });
            const script = document.createElement("script");
            script.textContent = "window.broken = true";
            document.body.append(script);
            const image = new Image();
            image.src = "https://example.org/a.png";
            document.body.setAttribute("style", "color: red");
            setTimeout(() => done(seen), 2000);
        })"""
    )
    assert blocked == ["img-src", "script-src-elem", "style-src-attr"]
    assert page.evaluate("window.broken") is None
    page.close()


def test_tables_sort_by_number_and_by_text(visit: Callable[..., Any]) -> None:
    page = visit("report")
    open_all(page)
    table = page.locator("details table.sortable").first
    column = "(t) => [...t.tBodies[0].rows].map((row) => parseFloat(row.cells[2].dataset.value))"
    head = table.locator("th", has_text="Mean")
    before = table.evaluate(column)
    head.locator("button").click()
    assert table.evaluate(column) == sorted(before) != before
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")  # from the keyboard
    assert table.evaluate(column) == sorted(before, reverse=True)
    table.locator("th", has_text="layer").locator("button").click()
    layers = table.evaluate("(t) => [...t.tBodies[0].rows].map((row) => Number(row.cells[1].textContent))")
    assert layers == sorted(layers) and head.get_attribute("aria-sort") is None
    sweep = page.locator("details table.sortable").nth(1)
    sweep.locator("th", has_text="alpha").locator("button").click()
    alphas = sweep.evaluate("(t) => [...t.tBodies[0].rows].map((row) => Number(row.cells[2].dataset.value))")
    assert alphas == sorted(alphas) and alphas[0] == -1


def test_the_board_filters_and_sorts(visit: Callable[..., Any]) -> None:
    page = visit("index")
    shown = "[...document.querySelectorAll('#systems tbody tr:not([hidden])')].map((r) => r.dataset.family)"
    everything = page.evaluate(shown)
    page.select_option("[name=family]", "serve")
    assert set(page.evaluate(shown)) == {"serve"}
    page.fill("[name=search]", "lru prompt")
    assert page.evaluate(shown) == ["serve"]
    assert page.text_content("#shown") == f"1 of {len(everything)}"
    page.fill("[name=search]", "")
    page.select_option("[name=family]", "")
    page.select_option("[name=verdict]", "fails")
    assert page.evaluate(shown) == ["interpret"]
    page.select_option("[name=verdict]", "")
    page.locator("#systems th", has_text="Family").locator("button").click()
    assert page.evaluate(shown) == sorted(everything)
    page.click("text=TLCM")
    assert page.url.endswith("/tlcm.html")


def test_copy_buttons_answer(visit: Callable[..., Any]) -> None:
    page = visit("report")
    page.click("button[data-copy=command]")
    page.wait_for_function(
        "['Copied', 'Selected'].includes(document.querySelector('[data-copy=command]').textContent)"
    )


def test_headings_do_not_skip_a_level_and_controls_take_focus(visit: Callable[..., Any]) -> None:
    page = visit("report")
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_without_scripts_everything_is_still_there(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["report"].as_uri())
    assert page.locator(".claim").count() == 5
    assert not page.locator("button.copy").first.is_visible()
    context.close()
