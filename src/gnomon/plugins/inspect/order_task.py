"""Task `gnomon/set_order`: do answers change when options are written in another order?

One sample is one question, asked in several orders. Its score holds the shares of
`gnomon.methods.layers.set_llm.order_sensitivity`, which runs the same questions on a model without Inspect:

| metric | over a question's orders |
|---|---|
| random | share answered rightly: accuracy where the order is drawn |
| adversarial | 1 if all are answered rightly: accuracy where the order is chosen against the model |
| majority | 1 if the most frequent choice is right (k! calls), ties drawn |
| flips | share of orders whose choice differs from the most frequent one |
| first place | how often the option written first is chosen, over 1/k; 1 is no preference |
| unanswered | share of orders in which the reply names no option, or several |

Replies lie in the sample's store, so that a log can be scored again without its model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gnomon.core.chat import ChatReply, Message, Usage
from gnomon.core.errors import UsageError
from gnomon.methods.layers.set_llm import Asking, OrderQuestion, SetChat, orders_of
from gnomon.methods.layers.set_llm.items import GENERATED, questions, read
from gnomon.methods.layers.set_llm.order import choices_of, judged

from .chat import InspectChat

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.scorer import Score, Scorer, Target
    from inspect_ai.solver import Generate, Solver, TaskState

VERSION = 1
"""Of questions, wording and grading: scores of two versions aren't comparable."""

REPLIES, ORDERS = "replies", "orders"


def set_order(
    data: str = GENERATED,
    count: int | None = None,
    permutations: str | int = "all",
    seed: int = 0,
    answer: str = "text",
) -> Task:
    """How much answers depend on the order of options.

    Args:
        data: "words" (generated questions, none of whose words Gnomon trains on), or a .jsonl file with `question`,
            `choices` and `answer` a line, also in ARC's form.
        count: how many questions; None takes 24 generated ones, or all of a file.
        permutations: "all" orders of a question, or how many are drawn.
        seed: of the drawing of orders, of ties, and of the model where it samples.
        answer: "text" reads the choice off the reply; "likelihood" takes the likeliest option, for models of the
            provider `gnomon/…`.
    """
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample

    asking = Asking(answer=answer, seed=seed)  # type: ignore[arg-type]
    if count is not None and count < 1:
        raise UsageError(f"count={count} would ask nothing. Use 1 or more.")
    asked = questions(data, "test", count or 24) if data == GENERATED else read(data)[:count]
    solve, score = parts()
    samples = []
    for number, question in enumerate(asked):
        orders = orders_of(len(question.options), permutations, seed)
        samples.append(
            Sample(
                id=number + 1,
                input=asking.request(question, orders[0]).messages[0].content,
                choices=[option.strip() for option in question.options],
                target=question.options[question.answer].strip(),
                metadata={**dataclasses.asdict(question), ORDERS: orders, "seed": seed + number},
            )
        )
    return Task(
        dataset=MemoryDataset(samples, name=data, shuffled=False),
        solver=solve(answer=answer, seed=seed),
        scorer=score(answer=answer),
        name="set_order",
        version=VERSION,
    )


def _question(metadata: dict[str, Any]) -> tuple[OrderQuestion, Sequence[Sequence[int]]]:
    fields = {field.name: metadata[field.name] for field in dataclasses.fields(OrderQuestion)}
    return OrderQuestion(**{**fields, "options": tuple(fields["options"])}), metadata[ORDERS]


@functools.cache
def parts() -> tuple[Callable[..., Solver], Callable[..., Scorer]]:
    """Solver and scorer, registered under their names, so that Inspect can make them again from a log."""
    from inspect_ai.scorer import mean, scorer, stderr
    from inspect_ai.solver import solver

    graded = scorer(metrics={"*": [mean(), stderr()]}, name="order_sensitivity")
    return solver(name="in_all_orders")(in_all_orders), graded(order_sensitivity)


def in_all_orders(answer: str = "text", seed: int = 0) -> Solver:
    """Asks a sample's question in all its orders at once, and stores the replies."""
    asking = Asking(answer=answer, seed=seed)  # type: ignore[arg-type]

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        import anyio
        from inspect_ai.model import ModelOutput, get_model

        model = get_model()
        own = getattr(model.api, "chat", None)
        if asking.answer == "likelihood" and own is None:
            raise UsageError(
                f"answer='likelihood' needs a model of Gnomon's provider (gnomon/…), which {model} isn't. Use "
                "answer='text'."
            )
        how = dataclasses.replace(asking, markup=isinstance(own, SetChat))
        question, orders = _question(state.metadata)
        chat = InspectChat(model)
        replies = await anyio.to_thread.run_sync(chat.generate, how.requests(question, orders))
        state.store.set(
            REPLIES, [{"text": reply.text, "logprobs": reply.choice_logprobs} for reply in replies]
        )
        state.output = ModelOutput.from_content(model=str(model), content=replies[0].text)
        return state

    return solve


def order_sensitivity(answer: str = "text") -> Scorer:
    """Grades the stored replies to one question."""
    from inspect_ai.scorer import Score

    asking = Asking(answer=answer)  # type: ignore[arg-type]

    async def score(state: TaskState, target: Target) -> Score:
        question, orders = _question(state.metadata)
        stored = state.store.get(REPLIES)
        if stored is None:  # it ended before the model had answered
            return Score.unscored(explanation="The sample ended before its replies came.")
        replies = [
            ChatReply(
                message=Message(role="assistant", content=one["text"]),
                model="",
                usage=Usage(),
                choice_logprobs=None if one["logprobs"] is None else tuple(one["logprobs"]),
            )
            for one in stored
        ]
        chosen = choices_of(question, orders, asking.scores(question, replies))
        values = judged(question, orders, chosen, torch.Generator().manual_seed(state.metadata["seed"]))
        named = ["none" if one is None else question.options[one].strip() for one in chosen]
        return Score(
            value={name.replace(" ", "_"): value for name, value in values.items()},
            answer="; ".join(sorted(set(named))),
            metadata={"chosen": chosen},
        )

    return score
