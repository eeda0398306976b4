"""Cards and accepted results: the package data that says what a paper claims and what was measured.

A card is `gnomon/cards/<slug>.md`: YAML front matter between two `---` lines, then Markdown. An accepted
result is `gnomon/results/<slug>.json`. Cards are read as untrusted text: `yaml.safe_load`, every field
checked, unknown fields refused with the nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gnomon.core.errors import GnomonError, nearest, unknown
from gnomon.core.files import read_json
from gnomon.lab.schema import check_result

__all__ = [
    "Card",
    "Claim",
    "ClaimPart",
    "accepted_result",
    "accepted_results",
    "known_cards",
    "load_card",
    "parse_card",
]


@dataclass(frozen=True)
class ClaimPart:
    """A part of a claim that gets a verdict of its own."""

    part: str
    text: str


@dataclass(frozen=True)
class Claim:
    """A row of the paper's claims, in our words, with the paper's numbers quoted as the paper's."""

    id: str
    text: str
    kind: str
    parts: tuple[ClaimPart, ...] = ()
    full_scale: str = ""
    """What would have to be run to settle the claim at the paper's scale."""

    def part_text(self, part: str | None) -> str:
        """The text of one part; of the whole claim for None.

        Raises:
            UsageError: the claim has no such part.
        """
        if part is None:
            return self.text
        for candidate in self.parts:
            if candidate.part == part:
                return candidate.text
        if not self.parts:
            raise unknown(f"part {part!r} of claim", self.id, ()) from None
        raise unknown(f"part of claim {self.id}", part, [p.part for p in self.parts])


@dataclass(frozen=True)
class Card:
    """What is known about one system."""

    slug: str
    title: str
    paper: str
    venue: str
    links: Mapping[str, str]
    claims: tuple[Claim, ...]
    inferred: tuple[str, ...]
    limits: tuple[str, ...]
    body: str
    """Markdown after the front matter."""

    def claim(self, id: str) -> Claim:
        """The claim `id`.

        Raises:
            UsageError: no such claim, with the nearest known one.
        """
        for claim in self.claims:
            if claim.id == id:
                return claim
        raise unknown(f"claim of card {self.slug}", id, [c.id for c in self.claims])

    def texts(self) -> dict[tuple[str, str | None], str]:
        """Every text by (claim, part); the part is None for the claim as a whole."""
        rows: dict[tuple[str, str | None], str] = {(claim.id, None): claim.text for claim in self.claims}
        return rows | {(claim.id, part.part): part.text for claim in self.claims for part in claim.parts}

    def text(self, id: str, part: str | None = None) -> str:
        """Text of claim `id`, or of one of its parts."""
        return self.claim(id).part_text(part)


def parse_card(text: str, source: str) -> Card:
    """Parse a card.

    Args:
        text: the whole file.
        source: its name, for error messages.

    Raises:
        GnomonError: no front matter, invalid YAML, or a field that is missing, unknown or of the wrong type.
    """
    match = re.match(r"---\n(.*?)\n---\n(.*)\Z", text.replace("\r\n", "\n"), re.DOTALL)
    if match is None:
        raise GnomonError(f"{source}: a card starts with a line '---', YAML fields, and another line '---'.")
    try:
        front = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f" near line {place.line + 2}" if place else ""
        raise GnomonError(
            f"{source}: the front matter is not valid YAML{line} ({getattr(error, 'problem', error)}). "
            "Quote texts that contain ': ' or start with a quote."
        ) from None
    top = _mapping(front, _names(Card) - {"body"}, source)
    links = top.get("links") or {}
    if not isinstance(links, dict):
        raise GnomonError(f"{source}: links must map a name to an address, not be a {type(links).__name__}.")
    for name, address in links.items():
        if urlsplit(str(address)).scheme not in ("http", "https"):
            raise GnomonError(
                f"{source}: link {name!r} is {address!r}; only http and https addresses are allowed."
            )
    claims = tuple(
        _claim(row, f"{source}: claims[{i}]") for i, row in enumerate(_sequence(top, "claims", source))
    )
    ids = [claim.id for claim in claims]
    if repeated := sorted({id for id in ids if ids.count(id) > 1}):
        raise GnomonError(f"{source}: claim id {repeated[0]!r} is used twice; ids must differ.")
    return Card(
        slug=_text(top, "slug", source),
        title=_text(top, "title", source),
        paper=_text(top, "paper", source),
        venue=_text(top, "venue", source),
        links={str(name): str(address) for name, address in links.items()},
        claims=claims,
        inferred=_texts(top, "inferred", source),
        limits=_texts(top, "limits", source),
        body=match[2].strip() + "\n",
    )


def known_cards() -> list[str]:
    """Slugs that have a card, sorted."""
    return sorted(
        entry.name.removesuffix(".md")
        for entry in files("gnomon").joinpath("cards").iterdir()
        if entry.name.endswith(".md")
    )


@cache
def load_card(slug: str) -> Card:
    """The card of a system that ships with Gnomon.

    Raises:
        UsageError: there is no such card.
    """
    wanted = {name.replace("-", "_"): name for name in known_cards()}
    name = wanted.get(slug.replace("-", "_"))
    if name is None:
        raise unknown("card", slug, known_cards())
    card = parse_card(files("gnomon").joinpath("cards", f"{name}.md").read_text("utf-8"), f"cards/{name}.md")
    if card.slug.replace("-", "_") != name.replace("-", "_"):
        raise GnomonError(
            f"cards/{name}.md says slug: {card.slug}. File name and slug must agree; rename one."
        )
    return card


def accepted_results(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """All accepted results by slug, from `folder` or else from the package."""
    found: dict[str, dict[str, Any]] = {}
    source = folder if folder is not None else Path(str(files("gnomon").joinpath("results")))
    if folder is not None and not folder.is_dir():
        raise GnomonError(
            f"{folder} is not a folder, so it holds no accepted results. Name one with *.json files."
        )
    for path in sorted(source.glob("*.json")):
        result = check_result(read_json(path), path)
        found[str(result["slug"]).replace("-", "_")] = result
    return found


def accepted_result(slug: str, folder: Path | None = None) -> dict[str, Any] | None:
    """The accepted result of one system, or None while there is none."""
    return accepted_results(folder).get(slug.replace("-", "_"))


def _claim(row: Any, source: str) -> Claim:
    row = _mapping(row, _names(Claim), source)
    parts = []
    for i, entry in enumerate(_sequence(row, "parts", source)):
        part = _mapping(entry, _names(ClaimPart), f"{source}.parts[{i}]")
        parts.append(ClaimPart(_text(part, "part", source), _text(part, "text", source)))
    return Claim(
        id=_text(row, "id", source),
        text=_text(row, "text", source),
        kind=_text(row, "kind", source),
        parts=tuple(parts),
        full_scale=_text(row, "full_scale", source) if row.get("full_scale") else "",
    )


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def _mapping(value: Any, known: set[str], source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GnomonError(
            f"{source}: expected fields {', '.join(sorted(known))}, found {type(value).__name__}."
        )
    for name in value:
        if name not in known:
            raise GnomonError(f"{source}: unknown field {name!r}.{nearest(str(name), known)}")
    return value


def _text(row: Mapping[str, Any], name: str, source: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise GnomonError(f"{source}: field {name!r} must be a non-empty text, found {value!r}.")
    return value.strip()


def _sequence(row: Mapping[str, Any], name: str, source: str) -> list[Any]:
    value = row.get(name) or []
    if not isinstance(value, list):
        raise GnomonError(f"{source}: field {name!r} must be a list, found {type(value).__name__}.")
    return value


def _texts(row: Mapping[str, Any], name: str, source: str) -> tuple[str, ...]:
    values = _sequence(row, name, source)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise GnomonError(f"{source}: {name}[{i}] must be a text, found {value!r}. Quote it.")
    return tuple(values)
