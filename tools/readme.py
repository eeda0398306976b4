"""Write the table of systems into README.md, between its markers, from `gnomon/systems.py` and the accepted results.

`python tools/readme.py` rewrites it (`make readme`); a test compares the two.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from gnomon.core.files import write_atomic
from gnomon.lab.cards import accepted_result
from gnomon.systems import SYSTEMS

README = Path(__file__).parents[1] / "README.md"
START = "<!-- systems: written by `make readme` from src/gnomon/systems.py -->"
VERDICTS = {"holds": "hold", "fails": "fail", "undecided": "undecided"}
END = "<!-- /systems -->"


def table() -> str:
    """The Markdown table, working systems first, families together."""
    lines = ["| system | what it does | paper | status |", "|---|---|---|---|"]
    for system in sorted(SYSTEMS, key=lambda s: (s.status != "works", s.family, s.slug)):
        name = f"`{system.slug}`"
        if system.status == "works":
            name = f"[{name}](src/{system.study.replace('.', '/')}.py)"
        paper = f"{_cell(system.title)} ({system.venue}, {_cell(system.paper)})"
        lines.append(
            f"| {name} | {_cell(system.summary)} | {paper} | {system.status}{_verdicts(system.slug)} |"
        )
    return "\n".join(lines)


def _verdicts(slug: str) -> str:
    """How the claims were judged in the accepted result, or nothing while there is none."""
    result = accepted_result(slug)
    if result is None:
        return ""
    counts = Counter(claim["verdict"] for claim in result["claims"])
    told = [f"{counts[v]} {word}" for v, word in VERDICTS.items() if counts[v]]
    return f"; claims: {', '.join(told)}"


def _cell(text: str) -> str:
    """Text that can't end its cell; an arXiv id becomes a link."""
    text = text.replace("|", r"\|")
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def filled(readme: str) -> str:
    """`readme` with the present table between its markers.

    Raises:
        ValueError: if the markers are not there exactly once each.
    """
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {START!r} and {END!r} once each.")
    head, tail = readme.partition(START)[0], readme.partition(END)[2]
    return f"{head}{START}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    write_atomic(README, filled(README.read_text()))
