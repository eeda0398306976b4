"""Write the generated tables into README and docs, between their markers, from systems, cards and accepted results.

`python tools/tables.py` rewrites them (`make readme`); a test compares the two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.core.files import write_atomic
from gnomon.lab.cards import accepted_result
from gnomon.lab.result import Result
from gnomon.systems import SYSTEMS

ROOT = Path(__file__).parents[1]
VERDICTS = {"holds": "hold", "fails": "fail", "undecided": "undecided"}
PRUNERS = ("magnitude", "wanda", "sparsegpt")
ALLOCATIONS = ("uniform", "owl", "alpha", "atp", "lua")
MODELS = {"small": "the small model trained in the study", "pretrained": "SmolLM2-135M"}


@dataclass(frozen=True)
class Table:
    """A generated table: the page that holds it, its name in the markers, what it comes from, and the text."""

    page: str
    name: str
    source: str
    text: Callable[[], str]

    @property
    def start(self) -> str:
        return f"<!-- {self.name}: written by `make readme` from {self.source} -->"

    @property
    def end(self) -> str:
        return f"<!-- /{self.name} -->"

    def filled(self, page: str) -> str:
        """`page` with the present table between its markers.

        Raises:
            ValueError: if the markers are not there exactly once each.
        """
        if page.count(self.start) != 1 or page.count(self.end) != 1:
            raise ValueError(f"{self.page} must hold {self.start!r} and {self.end!r} once each.")
        head, tail = page.partition(self.start)[0], page.partition(self.end)[2]
        return f"{head}{self.start}\n{self.text()}\n{self.end}{tail}"


# ------------------------------------------------------------------------------------------ README: systems


def systems() -> str:
    """All systems, working ones first, families together."""
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


# ------------------------------------------------------------------------------- docs: pruners x allocations


def pruning() -> str:
    """Loss of every pruner under every allocation, one table per model; a line that says so without a result."""
    result = accepted_result("lua")
    return "No result of the `full` profile is accepted yet." if result is None else pruning_of(result)


def pruning_of(result: dict[str, Any]) -> str:
    """The same of a given result of the study `lua`."""
    frame = Result(result).frame()
    losses = frame[frame.metric.eq("loss")]
    blocks = []
    for on, spoken in MODELS.items():
        rows = losses[losses.on.eq(on)]
        if rows.empty:
            continue
        found = {(row.method, row.sparsity): row for row in rows.itertuples()}
        sparsities = sorted({row.sparsity for row in rows.itertuples() if row.sparsity > 0})
        best = {p: min(row.mean for (name, at), row in found.items() if at == p) for p in sparsities}
        lines = [
            f"Loss in nats a token on {spoken}; dense: {found['dense', 0.0].mean:.3f}. In brackets the 95 % interval "
            "over seeds, where there are several; bold is the lowest mean of a column.",
            "",
            "| pruner | allocation | " + " | ".join(f"{p:.0%} removed" for p in sparsities) + " |",
            "|---|---|" + "---:|" * len(sparsities),
        ]
        for method, pruner, allocation in _pairs():
            cells = [_loss(found.get((method, p)), best[p]) for p in sparsities]
            if any(cells):
                lines.append(
                    f"| {pruner} | {allocation} | " + " | ".join(cell or "" for cell in cells) + " |"
                )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _pairs() -> list[tuple[str, str, str]]:
    """Name in the records, pruner and allocation; Lua's own masks last."""
    pairs = [
        (one if rule == "uniform" else f"{one} + {rule}", one, rule)
        for one in PRUNERS
        for rule in ALLOCATIONS
    ]
    return [*pairs, ("lua", "Lua-LLM's own masks", "a threshold per row")]


def _loss(row: Any, best: float) -> str:
    if row is None:
        return ""
    mean = f"**{row.mean:.3f}**" if row.mean == best else f"{row.mean:.3f}"
    several = row.n > 1 and row.low == row.low and row.low is not None  # neither NaN nor None
    return f"{mean} [{row.low:.3f}, {row.high:.3f}]" if several else mean


TABLES = (
    Table("README.md", "systems", "src/gnomon/systems.py", systems),
    Table("docs/pruning-a-model.md", "pruning", "src/gnomon/results/lua.json", pruning),
)


if __name__ == "__main__":
    for table in TABLES:
        path = ROOT / table.page
        write_atomic(path, table.filled(path.read_text()))
