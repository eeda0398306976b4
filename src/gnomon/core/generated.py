"""A generated English-like text: deterministic, endless, free of any licence.

Six kinds of document (a story with dialogue, a report with dates and figures, lists, a table with brackets,
a letter, a quiz of small sums) made by a grammar from seeded choices, so that newlines, punctuation, digits
and words all occur in natural places. Document k depends on the seed and k only: a longer corpus begins with
the shorter one. `random.Random` draws, because its string seeding is the same in every Python version.
"""

from __future__ import annotations

import random
from collections.abc import Callable

PEOPLE = (
    "Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Paul Rosa".split()
)
PLACES = "Aldham Birchwood Corvane Dunmere Eastholt Fenwick Garlow Hexley Ivybridge Kelso Larkhill".split()
THINGS = (
    "lamp barrel letter map clock bridge garden boat ladder mirror basket engine window kettle notebook "
    "violin fence bell wheel lantern ticket compass blanket hammer statue telescope"
).split()
QUALITIES = (
    "old quiet broken bright narrow heavy wooden empty careful sudden warm distant useful strange gentle "
    "plain crowded clean steep familiar"
).split()
PAST = (
    "found carried painted repaired measured forgot borrowed opened followed counted described sold "
    "cleaned hid moved drew praised replaced"
).split()
MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLANTS = "wheat barley apples pears onions carrots beans clover oats plums".split()
SUBJECTS = "harvest library railway school market harbour museum weather orchard theatre".split()

MINIMUM_CHARACTERS = 2_500
"""Shortest document: enough for one window of 512 tokens of a common tokenizer."""


def documents(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """The first `count` documents as (name, text); the kinds take turns."""
    made = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        draw = random.Random(f"gnomon-{seed}-{index}")
        parts = [_title(draw)]
        while sum(map(len, parts)) < MINIMUM_CHARACTERS:
            parts.append(kind(draw))
        made.append((f"{kind.__name__.lstrip('_')}-{index:05d}", "\n\n".join(parts) + "\n"))
    return made


def _thing(draw: random.Random) -> str:
    return f"{draw.choice(QUALITIES)} {draw.choice(THINGS)}"


def _date(draw: random.Random) -> str:
    day, month, year = draw.randint(1, 28), draw.randint(1, 12), draw.randint(1890, 2024)
    return draw.choice(
        [
            f"{day} {MONTHS[month - 1]} {year}",
            f"{MONTHS[month - 1]} {day}, {year}",
            f"{year}-{month:02d}-{day:02d}",
        ]
    )


def _number(draw: random.Random) -> str:
    whole, thousands = draw.randint(2, 99), draw.randint(0, 999)
    return draw.choice([f"{whole}", f"{whole},{thousands:03d}", f"{whole}.{thousands % 10}"])


def _title(draw: random.Random) -> str:
    subject, place = draw.choice(SUBJECTS), draw.choice(PLACES)
    return draw.choice(
        [f"# The {subject} of {place}", f"{place.upper()}: THE {subject.upper()}, {_date(draw)}"]
    )


def _sentence(draw: random.Random) -> str:
    who, other, place = draw.choice(PEOPLE), draw.choice(PEOPLE), draw.choice(PLACES)
    return draw.choice(
        [
            f"{who} {draw.choice(PAST)} the {_thing(draw)} near {place}.",
            f"On {draw.choice(WEEKDAYS)} {who} and {other} {draw.choice(PAST)} the {draw.choice(THINGS)}, "
            f"but the {_thing(draw)} was gone.",
            f"Nobody in {place} knew why the {draw.choice(THINGS)} was so {draw.choice(QUALITIES)}.",
            f"When {who} came back, the {_thing(draw)} stood beside the {draw.choice(THINGS)}; it was late.",
            f"It took {draw.randint(2, 60)} days until {who} {draw.choice(PAST)} it.",
        ]
    )


def _paragraph(draw: random.Random) -> str:
    return " ".join(_sentence(draw) for _ in range(draw.randint(3, 6)))


def _story(draw: random.Random) -> str:
    one, two = draw.sample(PEOPLE, 2)
    return (
        f"{_paragraph(draw)}\n\n"
        f'"Where is the {_thing(draw)}?" asked {one}.\n\n'
        f'"I left it in {draw.choice(PLACES)}," said {two}, "beside the {draw.choice(THINGS)}. '
        f"Didn't you see it on {draw.choice(WEEKDAYS)}?\"\n\n"
        f'"No!" {one} {draw.choice(["laughed", "sighed", "whispered", "answered"])}. "{_sentence(draw)}"'
    )


def _report(draw: random.Random) -> str:
    change = f"{draw.choice(['+', '-'])}{draw.randint(1, 60)}% since {draw.randint(1890, 2024)}"
    price = f"{draw.randint(1, 40)}.{draw.randint(0, 99):02d}"
    return (
        f"{draw.choice(PLACES)}, {_date(draw)}. The {draw.choice(SUBJECTS)} counted {_number(draw)} visitors "
        f"({change}). Fields of {draw.choice(PLANTS)} gave {_number(draw)} tonnes; the price rose to {price} on "
        f"{_date(draw)}. {_sentence(draw)}"
    )


def _lists(draw: random.Random) -> str:
    mark = draw.choice(["- ", "* ", "{}. ", "[ ] "])
    rows = [f"{mark.format(i)}{_thing(draw)} ({_number(draw)})" for i in range(1, draw.randint(4, 8))]
    return f"What {draw.choice(PEOPLE)} needs for {draw.choice(WEEKDAYS)}:\n\n" + "\n".join(rows)


def _table(draw: random.Random) -> str:
    rows = [
        f"item[{i}] = {{name: '{draw.choice(THINGS)}', since: {_date(draw)!r}, "
        f"place: ({draw.randint(-90, 90)}, {draw.randint(-180, 180)})}}"
        for i in range(draw.randint(4, 8))
    ]
    return f"## Inventory of {draw.choice(PLACES)}\n\n" + "\n".join(rows)


def _letter(draw: random.Random) -> str:
    return (
        f"{_date(draw)}\n\nDear {draw.choice(PEOPLE)},\n\n{_paragraph(draw)}\n\nYours,\n{draw.choice(PEOPLE)}"
    )


def _sums(draw: random.Random) -> str:
    a, b, who = draw.randint(2, 400), draw.randint(2, 400), draw.choice(PEOPLE)
    thing = draw.choice(PLANTS)
    return draw.choice(
        [
            f"Q: {who} had {a} {thing} and bought {b} more. How many now?\nA: {a} + {b} = {a + b}.",
            f"Q: Is {a} less than {b}?\nA: {'Yes' if a < b else 'No'}: {a} - {b} = {a - b}.",
            f"Q: {a} rows of {b % 20 + 2} {thing}: how many?\nA: {a} * {b % 20 + 2} = {a * (b % 20 + 2)}.",
        ]
    )


KINDS: tuple[Callable[[random.Random], str], ...] = (_story, _report, _lists, _table, _letter, _sums)
