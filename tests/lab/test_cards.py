"""Cards: parsing, errors, and the shipped ones. Source of truth: small cards written by hand."""

from __future__ import annotations

import pytest

from gnomon.core.errors import GnomonError, UsageError
from gnomon.lab.cards import accepted_results, known_cards, load_card, parse_card
from gnomon.systems import find

CARD = """---
slug: toy
title: Toy
paper: none
venue: nowhere
links: {site: "https://example.org"}
claims:
  - {id: toy.1, text: It works., kind: quality, parts: [{part: a, text: It runs.}, {part: b, text: It ends.}]}
inferred: [all of it]
---
Body with --- dashes.
"""


def test_a_card_gives_its_texts_by_id_and_part() -> None:
    card = parse_card(CARD, "toy.md")
    assert card.text("toy.1") == "It works."
    assert card.text("toy.1", "b") == "It ends."
    assert card.texts() == {
        ("toy.1", None): "It works.",
        ("toy.1", "a"): "It runs.",
        ("toy.1", "b"): "It ends.",
    }
    assert (card.inferred, card.limits) == (("all of it",), ())
    assert card.body == "Body with --- dashes.\n"
    assert parse_card(CARD.replace("\n", "\r\n"), "toy.md") == card


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("---\nslug", "slug", "starts with a line '---'"),
        ("title: Toy", "title: [Toy", r"not valid YAML near line \d+"),
        ("title: Toy", "title: 3", "'title' must be a non-empty text, found 3"),
        ("title: Toy\n", "", "'title' must be a non-empty text, found None"),
        ("title: Toy", "titel: Toy", "unknown field 'titel'. Did you mean 'title'"),
        ("inferred: [all of it]", "inferred: all of it", "'inferred' must be a list, found str"),
        ("inferred: [all of it]", "inferred: [{a: b}]", r"inferred\[0\] must be a text"),
        ("kind: quality", "kin: quality", r"claims\[0\]: unknown field 'kin'. Did you mean 'kind'"),
        ("https://example.org", "javascript:alert(1)", "only http and https"),
        ("inferred: [all of it]", "inferred: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("claims:\n", "claims:\n  - {id: toy.1, text: Twice., kind: k}\n", "'toy.1' is used twice"),
    ],
)
def test_a_broken_card_says_where(old: str, new: str, message: str) -> None:
    assert old in CARD
    with pytest.raises(GnomonError, match=rf"toy\.md.*{message}"):
        parse_card(CARD.replace(old, new), "toy.md")


def test_unknown_claims_and_parts_offer_the_nearest() -> None:
    card = parse_card(CARD, "toy.md")
    with pytest.raises(UsageError, match=r"'toy\.2'\. Did you mean 'toy\.1'"):
        card.text("toy.2")
    with pytest.raises(UsageError, match=r"part of claim toy\.1 'c'\. Known: a, b"):
        card.text("toy.1", "c")
    with pytest.raises(UsageError, match=r"Unknown card 'tclm'\. Did you mean 'tlcm'"):
        load_card("tclm")


@pytest.mark.parametrize("slug", known_cards())
def test_shipped_cards_belong_to_a_system_and_name_its_claims(slug: str) -> None:
    card = load_card(slug)
    assert find(card.slug).status == "works"
    assert find(card.slug).title in card.paper
    assert all(claim.id.startswith(f"{card.slug}.") for claim in card.claims)
    assert card.limits and card.body.count("## ") >= 2


def test_tlcm_has_the_five_claims() -> None:
    card = load_card("tlcm")
    assert [claim.id for claim in card.claims] == [f"tlcm.{i}" for i in range(1, 6)]
    assert [part.part for part in card.claim("tlcm.1").parts] == ["a", "b"]


def test_results_of_another_version_are_refused(tmp_path) -> None:
    (tmp_path / "toy.json").write_text('{"schema_version": 2}')
    with pytest.raises(GnomonError, match=r"toy\.json has schema_version 2, but .* reads 1"):
        accepted_results(tmp_path)
    (tmp_path / "toy.json").write_text('{"schema_version": 1, "slug": "toy"}')
    with pytest.raises(GnomonError, match="lacks title, profile"):
        accepted_results(tmp_path)
    with pytest.raises(GnomonError, match="is not a folder"):
        accepted_results(tmp_path / "absent")
