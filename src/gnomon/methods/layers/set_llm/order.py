"""How much an answer depends on the order in which options are written.

For every question and order the scorer gives one number an option; the largest is chosen. c(x, π) = 1 if that is right.
Where all are -inf, no option was chosen (a model that answers in words said something else): that is wrong, and counts
as a choice of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gnomon.core.errors import NumericalFailure, UsageError

from .prompt import Set, SetPrompt

MOST_ORDERS = 5040
"""All orders of seven options; beyond it a number of orders has to be named."""


@dataclass(frozen=True)
class OrderQuestion:
    """A question whose options are a set."""

    before: str
    """What stands before the options."""
    options: tuple[str, ...]
    answer: int
    """Index of the right option."""
    after: str = " Answer:"

    def __post_init__(self) -> None:
        if len(self.options) < 2 or not 0 <= self.answer < len(self.options):
            raise UsageError(
                f"A question needs two options or more and the index of the right one, got {len(self.options)} and "
                f"answer={self.answer}."
            )
        if len(set(self.options)) != len(self.options):
            raise UsageError(
                f"Two options of {self.before[:40]!r} are the same text, so neither can be chosen."
            )

    def prompt(self, order: Sequence[int]) -> SetPrompt:
        """The question with its options written down in this order."""
        return SetPrompt([self.before, Set(self.options).reordered(order), self.after])


Scorer = Callable[[OrderQuestion, Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""(question, orders) -> for each order one number an option, in the question's own numbering."""


@dataclass(frozen=True, kw_only=True)
class OrderSensitivity:
    """Shares of questions; each a mean over `per_question`."""

    random_acc: float
    """Mean over orders: the accuracy where the order is drawn."""
    adversarial_acc: float
    """Right in every order: where it is chosen against the model."""
    majority_acc: float
    """Right by majority over all orders, ties drawn."""
    flip_prob: float
    """Share of orders whose choice differs from the question's most frequent choice."""
    first_place: float
    """How often the option written first is chosen, over 1/k; 1 is no preference."""
    unanswered: float
    """Share of orders in which no option was chosen."""
    questions: int
    orders: int
    """Of the question with most."""
    per_question: tuple[dict[str, float], ...] = field(repr=False)


def orders_of(count: int, permutations: str | int, seed: int | None) -> list[tuple[int, ...]]:
    """The orders of `count` options that are tried.

    Args:
        permutations: "all", or how many.
        seed: which ones: drawn without repetition; None takes the first in lexicographic order, as the paper does.
    """
    total = math.factorial(count)
    if permutations == "all":
        if total > MOST_ORDERS:
            raise UsageError(
                f"{count} options have {total:,} orders. Name a number, such as permutations=24."
            )
        wanted = total
    elif isinstance(permutations, int) and permutations >= 1:
        wanted = min(permutations, total)
    else:
        raise UsageError(f"permutations={permutations!r} must be 'all' or a number of orders.")
    if seed is None or wanted == total:
        return list(itertools.islice(itertools.permutations(range(count)), wanted))
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < wanted:
        found[tuple(torch.randperm(count, generator=generator).tolist())] = None
    return list(found)


def order_sensitivity(
    scorer: Scorer,
    questions: Sequence[OrderQuestion],
    permutations: str | int = "all",
    seed: int | None = None,
) -> OrderSensitivity:
    """Ask every question in several orders.

    Args:
        permutations, seed: see :func:`orders_of`; the seed also draws where a majority is tied.

    Raises:
        UsageError: no question, too many orders.
        NumericalFailure: a score that isn't a number.
    """
    if not questions:
        raise UsageError("There is no question to ask.")
    orders = {k: orders_of(k, permutations, seed) for k in {len(q.options) for q in questions}}
    tie = torch.Generator().manual_seed(seed or 0)
    rows = [_asked(scorer, question, orders[len(question.options)], tie) for question in questions]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return OrderSensitivity(
        random_acc=mean["random"],
        adversarial_acc=mean["adversarial"],
        majority_acc=mean["majority"],
        flip_prob=mean["flips"],
        first_place=mean["first place"],
        unanswered=mean["unanswered"],
        questions=len(rows),
        orders=max(map(len, orders.values())),
        per_question=tuple(rows),
    )


def _asked(
    scorer: Scorer, question: OrderQuestion, orders: Sequence[tuple[int, ...]], tie: torch.Generator
) -> dict[str, float]:
    found = scorer(question, orders)
    chosen = choices_of(question, orders, found)
    finite = [column for column in zip(*found, strict=True) if min(column) > -math.inf]
    spread = max((float(max(column)) - float(min(column)) for column in finite), default=0.0)
    return {**judged(question, orders, chosen, tie), "spread": spread}


def choices_of(
    question: OrderQuestion, orders: Sequence[Sequence[int]], found: Sequence[Sequence[float]]
) -> list[int | None]:
    """The option with the largest score in each order, the first of equal ones; None where all scores are -inf.

    Raises:
        NumericalFailure: another number of scores than of orders or options, or one that isn't a number.
    """
    if len(found) != len(orders):
        raise NumericalFailure(f"{len(found)} rows of scores came back for {len(orders)} orders.")
    chosen: list[int | None] = []
    for row in found:
        scores = [float(score) for score in row]
        if len(scores) != len(question.options) or any(math.isnan(score) for score in scores):
            raise NumericalFailure(
                f"Scores {scores} of {len(question.options)} options: one number each is needed."
            )
        chosen.append(max(range(len(scores)), key=scores.__getitem__) if max(scores) > -math.inf else None)
    return chosen


def judged(
    question: OrderQuestion,
    orders: Sequence[Sequence[int]],
    chosen: Sequence[int | None],
    tie: torch.Generator,
) -> dict[str, float]:
    """What the choices of one question, one an order, say about its sensitivity.

    Args:
        chosen: index of an option in the question's own numbering; None where no option was chosen.
        tie: draws among equally frequent choices.
    """
    counts = Counter(chosen)
    often = max(counts.values())
    most = [choice for choice in (*range(len(question.options)), None) if counts[choice] == often]
    majority = most[int(torch.randint(len(most), (), generator=tie))]
    right = [choice == question.answer for choice in chosen]
    first = sum(order[0] == choice for order, choice in zip(orders, chosen, strict=True)) / len(orders)
    return {
        "random": sum(right) / len(right),
        "adversarial": float(all(right)),
        "majority": float(majority == question.answer),
        "flips": 1 - often / len(chosen),
        "first place": first * len(question.options),
        "unanswered": counts[None] / len(chosen),
    }
