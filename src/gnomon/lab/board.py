"""The board: one static site of all systems, their cards and their accepted results.

`index.html` lists every row of `gnomon.systems`; a system with a card has a page of its own. The site works
from `file://`, under the same security policy and style sheet as a report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from gnomon.core.errors import UsageError
from gnomon.core.files import written_folder
from gnomon.lab.cards import Card, accepted_results, known_cards, load_card
from gnomon.lab.pages import GRADES, render
from gnomon.lab.report import claim_rows, headline_groups, tagged_tables, verdict_counts
from gnomon.systems import SYSTEMS, System

__all__ = ["build", "markdown"]

Json = dict[str, Any]
MARK = '<meta name="generator" content="Gnomon board">'


def build(out: Path, results: Path | None = None) -> Path:
    """Write the site.

    Args:
        out: folder of the site; absent, empty, or an earlier board, which is replaced as a whole.
        results: folder of accepted `<slug>.json` files; by default those that ship with Gnomon.

    Returns:
        The path of `index.html`.

    Raises:
        UsageError: `out` holds something that is not a board.
        GnomonError: a card or a result that cannot be read.
    """
    index = out / "index.html"
    used = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if used and not (index.is_file() and MARK in index.read_text("utf-8", errors="replace")[:4096]):
        raise UsageError(
            f"{out} exists and is not a board, so it is left alone. Choose an absent or empty folder."
        )
    cards = {slug.replace("-", "_"): load_card(slug) for slug in known_cards()}
    accepted = accepted_results(results)
    pages: dict[str, str] = {}
    rows = []
    for system in SYSTEMS:
        key = system.slug.replace("-", "_")
        card, result = cards.get(key), accepted.get(key)
        if card is not None:
            pages[f"{system.slug}.html"] = _system_page(system, card, result)
        rows.append(_row(system, card, result))
    rows.sort(key=lambda row: row["system"].status != "works")  # what can be used comes first
    pages["index.html"] = render(
        "board.html", rows=rows, families=list(dict.fromkeys(s.family for s in SYSTEMS))
    )
    with written_folder(out, force=True) as folder:
        for name, page in pages.items():
            (folder / name).write_text(page, encoding="utf-8")
    return index


def markdown(text: str) -> Markup:
    """A card's body as HTML: raw HTML stays text, a page loads no images, and `#` becomes h2."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = reader.parse(text)
    return Markup(reader.renderer.render([_tamed(token) for token in tokens], reader.options, {}))


def _tamed(token: Token) -> Token:
    """Turn what the page's policy forbids (inline style) into a class, and keep h1 for the page's title."""
    style = str(token.attrs.pop("style", ""))
    if "right" in style:
        token.attrSet("class", "num")
    if token.tag == "h1":
        token.tag = "h2"
    for child in token.children or ():
        if child.type == "link_open":
            child.attrSet("rel", "noopener noreferrer")
    return token


def _row(system: System, card: Card | None, result: Json | None) -> Json:
    claims = result["claims"] if result else []
    counts = verdict_counts(claims)
    grades = {part["grade"] for claim in claims for part in claim["parts"]}
    words = (
        system.slug,
        system.name,
        system.family,
        system.title,
        system.venue,
        system.paper,
        system.summary,
    )
    return {
        "system": system,
        "page": f"{system.slug}.html" if card else "",
        "counts": counts if result else None,
        "seen": " ".join(verdict for verdict, count in counts.items() if count),
        "decided": counts["holds"] + counts["fails"] if result else "",
        "grades": [letter for letter in GRADES if letter in grades],
        "search": " ".join(words).lower(),
    }


def _system_page(system: System, card: Card, result: Json | None) -> str:
    claims = claim_rows(result["claims"], card) if result else []
    measured = {claim["id"] for claim in claims}
    claims += [_unmeasured(claim) for claim in card.claims if claim.id not in measured]
    return render(
        "system.html",
        system=system,
        card=card,
        result=result,
        claim_rows=claims,
        counts=verdict_counts(result["claims"]) if result else {},
        headline_groups=headline_groups(result["methods"]) if result else [],
        tagged_tables=tagged_tables(result["methods"]) if result else [],
        body=markdown(card.body),
    )


def _unmeasured(claim: Any) -> Json:
    nothing: Json = {"verdict": None, "rule": "", "note": "", "within": []}
    parts = [{"label": part.part, "text": part.text, **nothing} for part in claim.parts]
    return {
        "id": claim.id,
        "text": claim.text,
        "verdict": None,
        "grade": None,
        "parts": parts,
        "full_scale": claim.full_scale,
    }
