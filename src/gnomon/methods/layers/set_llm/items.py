"""Questions whose options are a set: made of word lists, or read from a file.

Which part a word belongs to (learnt, tuned on, judged on) follows from its place in a shuffled list, so that a question
that is judged never shows a word that was learnt, neither as answer nor as distractor.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from gnomon.core.errors import UsageError, unknown
from gnomon.core.refs import as_path

from .order import OrderQuestion

GENERATED = "words"
PARTS = ("train", "valid", "test")
SHARES = (0.6, 0.2, 0.2)
OPTIONS = 4

WORDS = {
    "an animal": "horse rabbit wolf tiger sheep eagle spider donkey fox goat bear snake lion mouse "
    "frog camel whale deer monkey duck",
    "a colour": "purple yellow green orange blue red pink brown grey violet crimson scarlet turquoise "
    "beige black white maroon indigo golden silver",
    "a fruit": "apple banana cherry lemon mango peach pear grape melon plum strawberry pineapple "
    "apricot fig coconut papaya raspberry blueberry kiwi date",
    "a country": "France Spain Brazil Egypt Japan Canada Norway Kenya India Mexico Poland Greece Chile "
    "Peru Italy Turkey Portugal Sweden China Cuba",
    "a job": "teacher doctor baker lawyer nurse farmer pilot carpenter plumber painter engineer "
    "waiter tailor butcher soldier barber sailor dentist clerk miner",
    "a tool": "hammer saw drill shovel screwdriver wrench axe rake pliers chisel scissors ladder "
    "knife spade crowbar file hoe broom needle clamp",
    "a piece of clothing": "shirt jacket trousers hat sweater scarf gloves coat dress skirt socks belt boots "
    "sandals tie vest apron pyjamas hood cap",
    "a musical instrument": "piano violin guitar flute trumpet drum cello harp clarinet saxophone organ banjo "
    "trombone accordion oboe tuba mandolin bassoon viola harmonica",
    "a part of the body": "elbow knee shoulder ankle finger nose ear mouth neck chest stomach wrist thumb toe "
    "hip chin forehead tongue heel lip",
    "a vehicle": "car bus train bicycle truck tram boat ship airplane helicopter motorcycle van taxi "
    "submarine tractor scooter canoe yacht wagon ferry",
    "a drink": "water milk coffee tea wine beer juice cocoa lemonade cider brandy rum whisky soda "
    "vodka gin champagne punch sherry espresso",
    "a piece of furniture": "table chair sofa bed desk shelf cupboard wardrobe bench stool couch drawer bookcase "
    "dresser cabinet crib nightstand armchair ottoman rocker",
}
TEMPLATES = (
    "Question: Which word names {}? Choices:",
    "Question: Which of these is {}? Choices:",
    "Question: One of these words stands for {}. Which one? Choices:",
)
AFTER = " Answer:"


def questions(recipe: str, part: str, count: int, *, seed: int = 0) -> list[OrderQuestion]:
    """Up to `count` questions of a part.

    Args:
        recipe: "words", or a .jsonl file with a question a line (:func:`read`).
        part: "train", "valid" or "test".
        seed: of the drawing; a file's own order counts.

    Raises:
        UsageError: an unknown recipe or part, a file that can't be read as questions, or that has too few.
    """
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    if recipe == GENERATED:
        draw = random.Random(f"gnomon-set-llm-{part}-{seed}")
        return [_generated(part, draw) for _ in range(count)]
    found = read(recipe)
    bounds = [0, round(SHARES[0] * len(found)), round((SHARES[0] + SHARES[1]) * len(found)), len(found)]
    at = PARTS.index(part)
    own = found[bounds[at] : bounds[at + 1]]
    if not own:
        raise UsageError(
            f"{recipe} has {len(found)} questions, which leave none for {part}. Give ten or more."
        )
    return own[:count]


def _generated(part: str, draw: random.Random) -> OrderQuestion:
    kinds = draw.sample(sorted(WORDS), OPTIONS)
    options = [draw.choice(_words(kind)[part]) for kind in kinds]
    answer = draw.randrange(OPTIONS)
    before = draw.choice(TEMPLATES).format(kinds[answer])
    return OrderQuestion(before, tuple(f" {word}" for word in options), answer, AFTER)


@cache
def _words(kind: str) -> dict[str, list[str]]:
    """The words of a kind by part."""
    words = sorted(set(WORDS[kind].split()))
    random.Random(f"gnomon-set-llm-{kind}").shuffle(words)
    first, second = round(SHARES[0] * len(words)), round((SHARES[0] + SHARES[1]) * len(words))
    return {"train": words[:first], "valid": words[first:second], "test": words[second:]}


def read(path: str) -> list[OrderQuestion]:
    """Questions of a .jsonl file: `question`, `choices` (texts, or ARC's `{"text": […], "label": […]}`) and the right
    one as `answer` (its index or text) or ARC's `answerKey` (its label).

    Raises:
        UsageError: no such file, or a line of another form.
    """
    place = as_path(path)
    if not place.is_file() or place.suffix != ".jsonl":
        if place.suffix == ".jsonl" or "/" in path:
            raise UsageError(f"There is no .jsonl file {path}.")
        raise unknown("questions", path, (GENERATED, "a .jsonl file"))
    rows = [line for line in place.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [_question(line, f"{Path(path).name}, line {number}") for number, line in enumerate(rows, 1)]


def _question(line: str, where: str) -> OrderQuestion:
    try:
        parsed = json.loads(line)
    except ValueError:
        raise UsageError(f"{where}, is no JSON.") from None
    row: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    text, choices, labels = row.get("question"), row.get("choices"), list[Any]()
    if isinstance(choices, dict):
        labels = list(choices.get("label") or [])
        choices = choices.get("text")
    if (
        not isinstance(text, str)
        or not isinstance(choices, list)
        or not all(isinstance(one, str) and one.strip() for one in choices)
    ):
        raise UsageError(
            f"{where}, needs a `question` (a text) and `choices` (a list of texts that aren't empty)."
        )
    answer = row.get("answer", row.get("answerKey"))
    if isinstance(answer, str):
        known = labels if answer in labels else choices
        answer = known.index(answer) if answer in known else None
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UsageError(f"{where}, needs an `answer`: the index, text or label of one of its choices.")
    options = tuple(f" {one.strip()}" for one in choices)
    return OrderQuestion(f"Question: {text.strip()} Choices:", options, answer, AFTER)
