"""What `gnomon show SLUG` prints: paper, claims with verdicts, inferred parts, limits, how to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gnomon.core.errors import unknown
from gnomon.lab.cards import Card, accepted_result, known_cards, load_card
from gnomon.lab.pages import GRADES, SYMBOLS, interval_text, number
from gnomon.lab.pages import decimals_for as decimals
from gnomon.systems import SYSTEMS, System, find

__all__ = ["show"]

STYLES = {"holds": "bold green", "fails": "bold red", "undecided": "bold yellow"}


def show(slug: str, results: Path | None = None) -> RenderableType:
    """All that is known about a system, for a terminal.

    Args:
        slug: a system; `-` and `_` are equal.
        results: folder of accepted results; by default those that ship with Gnomon.

    Raises:
        UsageError: no such system, with the nearest known one.
    """
    try:
        system = find(slug)
    except KeyError:
        raise unknown("system", slug, [s.slug for s in SYSTEMS]) from None
    lines: list[RenderableType] = [
        Text.assemble((system.name, "bold"), f"  {system.family}, ", (system.status, "bold")),
        Text(f"{system.title}. {system.venue}, {system.paper}"),
        Text(system.summary, style="italic"),
    ]
    if system.slug.replace("-", "_") not in {name.replace("-", "_") for name in known_cards()}:
        lines.append(Text("\nPlanned: no part, no study and no card yet."))
        return Group(*lines)
    card = load_card(system.slug)
    return Group(*lines, *_claims(card, accepted_result(system.slug, results)), *_card(card), *_use(system))


def _claims(card: Card, result: dict[str, Any] | None) -> list[RenderableType]:
    lines: list[RenderableType] = [_head("Claims")]
    if result is None:
        lines.append(Text("no accepted result yet"))
    else:
        models = ", ".join(result["models"]) or "no language model"
        lines.append(
            Text(f"accepted run of {result['finished'][:10]} on {models}, commit {result['code']['commit']}")
        )
    judged = {claim["id"]: claim for claim in result["claims"]} if result else {}
    for claim in card.claims:
        verdict = judged.get(claim.id)
        lines.append(Text.assemble("\n", (claim.id, "bold"), "  ", *_verdict(verdict)))
        lines.append(Padding(Text(claim.text), (0, 0, 0, 2)))
        for part in verdict["parts"] if verdict else ():
            label = f"({part['part']}) " if part["part"] else ""
            lines.append(Padding(Text.assemble(label, *_verdict(part), _numbers(part)), (0, 0, 0, 4)))
            lines.append(Padding(Text(part["rule"], style="dim"), (0, 0, 0, 6)))
            if part["note"]:
                lines.append(Padding(Text(part["note"], style="dim"), (0, 0, 0, 6)))
    if result:
        lines.append(
            Text("\n" + "; ".join(f"{letter} = {text}" for letter, text in GRADES.items()), style="dim")
        )
    return lines


def _verdict(judged: dict[str, Any] | None) -> list[tuple[str, str]]:
    if judged is None:
        return [("not measured", "dim")]
    grade = f" [{judged['grade']}]" if judged["grade"] else ""
    return [(f"{SYMBOLS[judged['verdict']]} {judged['verdict']}{grade}", STYLES[judged["verdict"]])]


def _numbers(part: dict[str, Any]) -> str:
    low, high = part["interval"] or (None, None)
    if part["estimate"] is None:
        return ""
    interval = f" ({interval_text(low, high)})" if part["interval"] else ""
    count = f", n = {number(part['n'])}" if part["n"] is not None else ""
    return f"  {number(part['estimate'], decimals(low, high))}{interval}{count}"


def _card(card: Card) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for name, texts in (("Inferred", card.inferred), ("Limits", card.limits)):
        if texts:
            lines.append(_head(name))
            points = Table.grid(padding=(0, 1))  # a grid, so that wrapped lines hang under the text
            for text in texts:
                points.add_row(" •", Text(text))
            lines.append(points)
    return lines


def _use(system: System) -> list[RenderableType]:
    lines: list[RenderableType] = [_head("Run")]
    if system.study:
        lines.append(Text(f"  gnomon run {system.slug}                  a preview (profile cpu)"))
        lines.append(Text(f"  gnomon run {system.slug} --profile full   the whole comparison"))
    names = (entry.partition("=")[0] for entry in system.apply)
    lines += [Text(f"  gnomon apply {name} --model M --out D") for name in names]
    return lines


def _head(title: str) -> Text:
    return Text(f"\n{title}", style="bold underline")
