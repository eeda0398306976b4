"""Multiple choice for pruned models: which text goes on from here? Made from held-out documents, or read from a file.

A generated question is the beginning of a passage; the right answer is the line that follows it, the wrong ones are
lines of other documents. A model that has lost its grip on the text is left with chance, one in four.

A file is .jsonl with `{"context": "…", "choices": ["…", …], "answer": 0}` a line, as most published sets convert to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import GnomonError, UsageError

if TYPE_CHECKING:
    from gnomon.core.data import Corpus
    from gnomon.core.models import Loaded
    from gnomon.core.scoring import Question

CONTINUATIONS = "continuations"
"""Name of the generated set."""
CHOICES = 4
CONTEXT = 160
"""Characters of context, at least; whole lines."""
SHORTEST, LONGEST = 20, 100
"""Characters of a line that may be an answer."""

Items = Sequence[tuple["Question", int]]
"""(question, number of the right choice)"""


def items(recipe: str, held_out: Corpus, count: int, seed: int = 0) -> Items:
    """Up to `count` questions of a file, or exactly as many made from documents.

    Raises:
        UsageError: no such file, or documents too short for any question.
        GnomonError: a line that is no question.
    """
    return _continuations(held_out, count, seed) if recipe == CONTINUATIONS else _read(recipe, count)


def accuracy(loaded: Loaded, chosen: Items) -> float:
    """Share of questions whose right choice is likeliest per byte."""
    from gnomon.core.scoring import score_choices

    scores = score_choices(loaded.model, loaded.tokenizer, [question for question, _ in chosen])
    right = [found.best("byte") == answer for found, (_, answer) in zip(scores, chosen, strict=True)]
    return sum(right) / len(right)


def store_items(chosen: Items, path: Path) -> None:
    """Write questions for :func:`stored_items`."""
    table = [
        {"context": q.context, "choices": q.choices, "delimiter": q.delimiter, "answer": answer}
        for q, answer in chosen
    ]
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_items(path: Path) -> Items:
    """Questions that :func:`store_items` wrote."""
    from gnomon.core.scoring import Question

    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        question = Question(context=row["context"], choices=tuple(row["choices"]), delimiter=row["delimiter"])
        found.append((question, int(row["answer"])))
    return found


def _continuations(held_out: Corpus, count: int, seed: int) -> Items:
    from gnomon.core.scoring import Question

    draw = random.Random(f"gnomon-continuations-{seed}")
    lines = {
        document.name: [
            line for line in document.text.splitlines() if SHORTEST <= len(line.strip()) <= LONGEST
        ]
        for document in held_out.documents
    }
    places = [
        (document.name, context, line)
        for document in held_out.documents
        for context, line in _places(document.text)
    ]
    names = [name for name, found in lines.items() if found]
    if not places or len(names) < CHOICES:
        raise UsageError(
            f"{held_out.name} has {len(names)} documents with lines of {SHORTEST} to {LONGEST} characters; questions "
            f"need {CHOICES} of them and {CONTEXT} characters before one. Use a longer text, or a file of questions."
        )
    made = []
    for _ in range(count):
        name, context, right = draw.choice(places)
        others = draw.sample([one for one in names if one != name], CHOICES - 1)
        choices = [right, *(draw.choice(lines[other]) for other in others)]
        order = draw.sample(range(CHOICES), CHOICES)
        question = Question(context=context, choices=tuple(choices[i] for i in order), delimiter="\n")
        made.append((question, order.index(0)))
    return made


def _places(text: str) -> list[tuple[str, str]]:
    """(context, the line after it) wherever both are long enough."""
    lines, found = text.splitlines(), []
    for at, line in enumerate(lines):
        if not SHORTEST <= len(line.strip()) <= LONGEST:
            continue
        first, size = at, 0
        while first and size < CONTEXT:
            first -= 1
            size += len(lines[first]) + 1
        if size >= CONTEXT:
            found.append(("\n".join(lines[first:at]), line))
    return found


def _read(recipe: str, count: int) -> Items:
    from gnomon.core.scoring import Question

    path = Path(recipe).expanduser()
    if not path.is_file():
        raise UsageError(
            f"There is no file {recipe}. questions is {CONTINUATIONS!r} or a .jsonl file with context, choices, answer."
        )
    found: list[tuple[Question, int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip() or len(found) == count:
            continue
        try:
            row: Any = json.loads(line)
            choices, answer = tuple(row["choices"]), row["answer"]
            valid = isinstance(row["context"], str) and all(isinstance(one, str) and one for one in choices)
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid or type(answer) is not int or not 0 <= answer < len(choices):
            raise GnomonError(
                f"{path.name}, line {number}: no question with a text `context`, texts `choices` and the number "
                "`answer` of the right one."
            )
        found.append((Question(context=row["context"], choices=choices), answer))
    if not found:
        raise UsageError(f"{path.name} holds no question.")
    return found
