"""Generated word problems with worked answers: instruction data to fine-tune on, offline, scored by exact match.

    Q: Karin had 34 plums and bought 17 more, then gave away 9. How many plums are left?
    A: 34 + 17 = 51. 51 - 9 = 42. The answer is 42.

Whether a problem belongs to train, valid or test follows from a hash of its kind and numbers alone, in a form in which
34 + 17 and 17 + 34 are one problem. So no seed, count or choice of words can make a part hold a problem of another
one. Names and things are decoration and occur in all parts; a single step of a longer problem may recur elsewhere.
There are about 10,000 problems in train and 1,200 in each of the others.

`random.Random` draws, seeded by a string, which gives the same items in every Python version.

Encoding: prompt and answer are tokenized apart and joined, so that the border never falls inside a token; labels are
-100 on the prompt and on padding, and the answer ends with eos, which is learnt.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .errors import UsageError, unknown
from .generated import PEOPLE
from .generation import generate

SPLITS = ("train", "valid", "test")
Split = Literal["train", "valid", "test"]

THINGS = "apples pears onions carrots beans plums lemons eggs walnuts tulips cherries figs".split()

IGNORED = -100
"""Label of what isn't learnt, as Transformers has it."""
ATTEMPTS = 200
"""Draws for each item before the space of problems counts as used up."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One problem."""

    kind: str
    question: str
    worked: str
    """The steps, ending in "The answer is n."."""
    answer: int
    key: str
    """Kind and numbers, in the form that decides the split."""

    @property
    def prompt(self) -> str:
        """What the model reads; the worked answer follows after a space."""
        return f"Q: {self.question}\nA:"


def items(
    count: int,
    *,
    split: Split = "train",
    seed: int = 0,
    kinds: Sequence[str] | None = None,
) -> list[Item]:
    """`count` problems of a part, all different in kind or numbers; the kinds take turns.

    A longer list begins with the shorter one of the same seed.

    Args:
        kinds: some of `KINDS`; None is all.

    Raises:
        UsageError: an unknown part or kind, or more problems than there are.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if count < 1:
        raise UsageError(f"count={count} must be at least 1.")
    chosen = tuple(KINDS) if kinds is None else tuple(kinds)
    for kind in chosen:
        if kind not in KINDS:
            raise unknown("kind of problem", kind, KINDS)
    if not chosen:
        raise UsageError("kinds is empty. Name at least one, or None for all.")
    draw = random.Random(f"gnomon-arithmetic-{seed}-{split}")
    made: list[Item] = []
    seen: set[str] = set()
    while len(made) < count:
        kind = chosen[len(made) % len(chosen)]
        for _ in range(ATTEMPTS):
            item = KINDS[kind](draw)
            if item.key not in seen and split_of(item.key) == split:
                break
        else:
            raise UsageError(
                f"No new {kind!r} problem was found in {ATTEMPTS} draws after {len(made)} of {count} items: "
                f"the {split} part "
                "is nearly used up. Ask for fewer, or for more kinds."
            )
        seen.add(item.key)
        made.append(item)
    return made


def split_of(key: str) -> Split:
    """Part of a problem: a tenth of all problems is test, a tenth valid."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 10
    return "test" if place == 0 else "valid" if place == 1 else "train"


# -------------------------------------------------------------------------------------------------- kinds


def _sum(draw: random.Random) -> Item:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    who, what = draw.choice(PEOPLE), draw.choice(THINGS)
    question = draw.choice(
        [
            f"{who} had {a} {what} and bought {b} more. How many {what} does {who} have now?",
            f"There are {a} {what} in one basket and {b} in another. How many {what} are there in all?",
        ]
    )
    return _item("sum", question, [f"{a} + {b} = {a + b}."], a + b, sorted((a, b)))


def _difference(draw: random.Random) -> Item:
    b, rest = draw.randint(2, 99), draw.randint(1, 99)
    a = b + rest
    who, what = draw.choice(PEOPLE), draw.choice(THINGS)
    question = draw.choice(
        [
            f"{who} had {a} {what} and sold {b}. How many {what} are left?",
            f"Of {a} {what}, {b} were eaten. How many {what} remain?",
        ]
    )
    return _item("difference", question, [f"{a} - {b} = {rest}."], rest, (a, b))


def _product(draw: random.Random) -> Item:
    a, b = draw.randint(2, 99), draw.randint(2, 20)
    what = draw.choice(THINGS)
    question = draw.choice(
        [
            f"A field has {a} rows of {b} {what}. How many {what} are there?",
            f"Each of {a} boxes holds {b} {what}. How many {what} do they hold together?",
        ]
    )
    return _item("product", question, [f"{a} * {b} = {a * b}."], a * b, sorted((a, b)))


def _share(draw: random.Random) -> Item:
    b, each = draw.randint(2, 20), draw.randint(2, 99)
    what = draw.choice(THINGS)
    question = f"{b * each} {what} are shared equally among {b} people. How many does each get?"
    return _item("share", question, [f"{b * each} / {b} = {each}."], each, (b * each, b))


def _bought_and_given(draw: random.Random) -> Item:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    c = draw.randint(1, a + b - 1)
    who, what = draw.choice(PEOPLE), draw.choice(THINGS)
    question = f"{who} had {a} {what} and bought {b} more, then gave away {c}. How many {what} are left?"
    steps = [f"{a} + {b} = {a + b}.", f"{a + b} - {c} = {a + b - c}."]
    return _item("bought-and-given", question, steps, a + b - c, (*sorted((a, b)), c))


def _rows_and_more(draw: random.Random) -> Item:
    a, b, c = draw.randint(2, 30), draw.randint(2, 12), draw.randint(2, 99)
    what = draw.choice(THINGS)
    question = f"A garden has {a} rows of {b} {what} and {c} more by the fence. How many {what} are there?"
    steps = [f"{a} * {b} = {a * b}.", f"{a * b} + {c} = {a * b + c}."]
    return _item("rows-and-more", question, steps, a * b + c, (*sorted((a, b)), c))


def _change(draw: random.Random) -> Item:
    a, b = draw.randint(2, 12), draw.randint(2, 20)
    paid = a * b + draw.randint(1, 60)
    who, what = draw.choice(PEOPLE), draw.choice(THINGS)
    question = (
        f"{who} buys {a} bags of {what} at {b} coins each and pays with {paid} coins. "
        f"How many coins does {who} get back?"
    )
    steps = [f"{a} * {b} = {a * b}.", f"{paid} - {a * b} = {paid - a * b}."]
    return _item("change", question, steps, paid - a * b, (*sorted((a, b)), paid))


def _three_days(draw: random.Random) -> Item:
    a, b, c = draw.randint(2, 40), draw.randint(2, 40), draw.randint(2, 5)
    who, what = draw.choice(PEOPLE), draw.choice(THINGS)
    question = (
        f"{who} picked {a} {what} on Monday, {b} more than that on Tuesday, and on Wednesday {c} times as many as on "
        f"Tuesday. How many {what} were picked on Wednesday?"
    )
    steps = [f"{a} + {b} = {a + b}.", f"{a + b} * {c} = {(a + b) * c}."]
    return _item("three-days", question, steps, (a + b) * c, (*sorted((a, b)), c))


KINDS: dict[str, Callable[[random.Random], Item]] = {
    "sum": _sum,
    "difference": _difference,
    "product": _product,
    "share": _share,
    "bought-and-given": _bought_and_given,
    "rows-and-more": _rows_and_more,
    "change": _change,
    "three-days": _three_days,
}
"""The first four take one step, the others two."""


def _item(kind: str, question: str, steps: Iterable[str], answer: int, numbers: Iterable[int]) -> Item:
    worked = " ".join([*steps, f"The answer is {answer}."])
    return Item(
        kind=kind,
        question=question,
        worked=worked,
        answer=answer,
        key=f"{kind}:{','.join(map(str, numbers))}",
    )


# ----------------------------------------------------------------------------------------------- encoding


def encode(item: Item, tokenizer: Any, *, chat: bool = False) -> tuple[list[int], list[int]]:
    """(prompt, answer) as token ids, the answer closed by eos.

    Args:
        chat: the question is a user's message in the tokenizer's chat template.

    Raises:
        UsageError: the tokenizer has no eos, or no template for `chat`.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError(
            "The tokenizer has no eos token, so nothing would end an answer. Set tokenizer.eos_token."
        )
    if chat:
        if not tokenizer.chat_template:
            raise UsageError("chat=True, but the tokenizer has no chat template. Use chat=False.")
        messages = [{"role": "user", "content": item.question}]
        before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answer = item.worked
    else:
        before, answer = item.prompt, f" {item.worked}"
    prompt = tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
    ids = tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    if not chat and tokenizer.bos_token_id is not None and _adds_bos(tokenizer):
        prompt = [tokenizer.bos_token_id, *prompt]
    return list(prompt), [*ids, tokenizer.eos_token_id]


def collate(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, pad: int
) -> dict[str, Int[Tensor, "B T"]]:
    """input_ids, attention_mask and labels, padded on the right; labels are -100 on prompts and padding."""
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), width), pad)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(pairs):
        length = len(prompt) + len(answer)
        ids[row, :length] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : length] = torch.tensor(list(answer))
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class ItemBatches:
    """An endless source of batches for `core.train`: all items once in each epoch, in a new order each time."""

    def __init__(
        self,
        problems: Sequence[Item],
        tokenizer: Any,
        *,
        batch: int,
        generator: torch.Generator,
        chat: bool = False,
    ) -> None:
        """
        Args:
            generator: on the CPU; the only source of chance.

        Raises:
            UsageError: fewer items than a batch, or what :func:`encode` refuses.
        """
        if not 1 <= batch <= len(problems):
            raise UsageError(f"batch={batch} must lie in 1..{len(problems)}, the number of items.")
        self.pairs = [encode(item, tokenizer, chat=chat) for item in problems]
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.batch, self.generator = batch, generator
        self.order: list[int] = []
        self.at = 0

    def __iter__(self) -> ItemBatches:
        return self

    def __next__(self) -> dict[str, Int[Tensor, "B T"]]:
        taken: list[int] = []
        while len(taken) < self.batch:
            if self.at == len(self.order):
                self.order = torch.randperm(len(self.pairs), generator=self.generator).tolist()
                self.at = 0
            taken.append(self.order[self.at])
            self.at += 1
        return collate([self.pairs[i] for i in taken], pad=self.pad)

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to draw the same batches from here on."""
        return {"generator": self.generator.get_state(), "order": list(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order, self.at = list(state["order"]), state["at"]


# ------------------------------------------------------------------------------------------------ scoring


@dataclass(frozen=True)
class ExactMatch:
    """How many answers were right, and what was said."""

    right: tuple[bool, ...]
    replies: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def final_number(reply: str) -> int | None:
    """The number after the last "The answer is", else None: a reply that doesn't commit itself has no answer."""
    found = re.findall(r"[Tt]he answer is:? *(-?\d[\d,]*)(?!\.?\d)", reply)
    return int(found[-1].replace(",", "")) if found else None


def exact_match(
    model: nn.Module,
    tokenizer: Any,
    problems: Sequence[Item],
    *,
    chat: bool = False,
    max_new_tokens: int = 64,
    batch_size: int = 16,
) -> ExactMatch:
    """Greedy answers, right if their final number is the item's."""
    if not problems:
        raise UsageError("There is no item to score.")
    prompts = [encode(item, tokenizer, chat=chat)[0] for item in problems]
    new = generate(
        model, prompts, max_new_tokens=max_new_tokens, eos=tokenizer.eos_token_id, batch_size=batch_size
    )
    replies = tuple(tokenizer.decode(row, skip_special_tokens=True) for row in new)
    right = tuple(final_number(reply) == item.answer for reply, item in zip(replies, problems, strict=True))
    return ExactMatch(right, replies)


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id
