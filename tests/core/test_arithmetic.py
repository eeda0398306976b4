"""Word problems: every sum checked with Python's own arithmetic, parts that can't meet, masks token by token."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.core import arithmetic
from gnomon.core.arithmetic import (
    KINDS,
    ItemBatches,
    collate,
    encode,
    exact_match,
    final_number,
    items,
    split_of,
)
from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build, byte_tokenizer
from gnomon.core.train import TrainConfig, train

torch.set_num_threads(1)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def test_every_worked_step_is_right_and_uses_the_question() -> None:
    for item in items(800):
        *steps, last = item.worked.split(". ")
        known = {int(n) for n in re.findall(r"\d+", item.question)}
        for step in steps:
            a, sign, b, result = re.fullmatch(r"(\d+) ([+*/-]) (\d+) = (\d+)", step).groups()  # type: ignore[union-attr]
            assert OPERATIONS[sign](int(a), int(b)) == int(result) and {int(a), int(b)} <= known
            known.add(int(result))
        assert last == f"The answer is {item.answer}." and str(item.answer) == result
        assert item.answer > 0 and final_number(item.worked) == item.answer
        assert item.prompt == f"Q: {item.question}\nA:"


def test_parts_never_meet() -> None:
    """By construction: the part is a function of the problem, whatever seed, count or words."""
    drawn = {
        part: [i for seed in (0, 1, 7) for i in items(200, split=part, seed=seed)]
        for part in arithmetic.SPLITS
    }  # type: ignore[arg-type]
    keys = {part: {item.key for item in some} for part, some in drawn.items()}
    assert (
        not keys["train"] & keys["test"]
        and not keys["train"] & keys["valid"]
        and not keys["valid"] & keys["test"]
    )
    for part, some in drawn.items():
        assert all(split_of(item.key) == part for item in some)
    sums: dict[str, set[tuple[int, ...]]] = {
        part: {tuple(sorted(map(int, re.findall(r"\d+", i.question)))) for i in some if i.kind == "sum"}
        for part, some in drawn.items()
    }
    assert not sums["train"] & sums["test"]
    shares = [split_of(str(i)) for i in range(4000)]
    assert (
        shares.count("test") == pytest.approx(400, abs=75) == shares.count("valid")
    )  # 4 standard deviations


def test_a_seed_fixes_the_items() -> None:
    assert items(50, seed=3) == items(120, seed=3)[:50] != items(50, seed=4)
    assert [item.kind for item in items(16)] == 2 * list(KINDS)
    assert len({item.key for item in items(1500)}) == 1500
    first = items(1, seed=0)[0]
    assert (first.kind, first.answer) == ("sum", sum(map(int, re.findall(r"\d+", first.question))))


def test_masks() -> None:
    """Labels are the answer and its eos, nothing of the prompt or the padding; the whole text round-trips."""
    tokenizer = byte_tokenizer()
    some = items(5)
    batch = collate([encode(item, tokenizer) for item in some], pad=tokenizer.pad_token_id)
    for row, item in enumerate(some):
        ids, labels, mask = (batch[name][row] for name in ("input_ids", "labels", "attention_mask"))
        assert tokenizer.decode(labels[labels != -100]) == f" {item.worked}{tokenizer.eos_token}"
        assert tokenizer.decode(ids[(mask == 1) & (labels == -100)]) == item.prompt
        assert int(mask.sum()) == len(item.prompt) + len(item.worked) + 2
        assert bool((ids[mask == 0] == tokenizer.pad_token_id).all())


def test_a_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    item = items(1)[0]
    prompt, answer = encode(item, tokenizer, chat=True)
    assert tokenizer.decode(prompt) == f"<user>{item.question}<assistant>"
    assert tokenizer.decode(answer) == f"{item.worked}{tokenizer.eos_token}"


def test_batches_pass_through_all_items_and_resume() -> None:
    tokenizer, some = byte_tokenizer(), items(7)

    def source() -> ItemBatches:
        return ItemBatches(some, tokenizer, batch=3, generator=torch.Generator().manual_seed(1))

    batches = source()
    seen = [tuple(row.tolist()) for _ in range(7) for row in next(batches)["labels"]]  # 21 = three epochs
    texts = ["".join(chr(t) for t in row if 0 <= t < 256) for row in seen]
    for epoch in (texts[:7], texts[7:14], texts[14:]):
        assert sorted(epoch) == sorted(f" {item.worked}" for item in some)
    assert texts[:7] != texts[7:14]
    one, other = source(), source()
    for _ in range(4):
        next(one)
    state = one.state_dict()
    expected = [next(one)["input_ids"] for _ in range(4)]
    other.load_state_dict(state)
    assert all(torch.equal(next(other)["input_ids"], ids) for ids in expected)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        (" 3 + 4 = 7. The answer is 7.", 7),
        ("The answer is 7. The answer is 12", 12),
        ("the answer is: -3.", -3),
        ("The answer is 1,204.", 1204),
        ("The answer is 3.5.", None),
        ("7", None),
        ("", None),
        ("The answer is seven.", None),
    ],
)
def test_final_numbers(reply: str, number: int | None) -> None:
    assert final_number(reply) == number


def test_scoring_and_training() -> None:
    """The loop takes the batches with their masks; a model that says the right thing is right, any other isn't."""
    tokenizer = byte_tokenizer()
    some = items(8)
    with seeded(0):
        model = build("tiny:llama-10k")
    batches = ItemBatches(some, tokenizer, batch=4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, batches, optimizer, TrainConfig(steps=12, lr=1e-2)).losses
    assert losses[-1] < losses[0] - 0.5
    score = exact_match(model, tokenizer, some[:3], max_new_tokens=6)
    assert score.accuracy == 0 and len(score.replies) == 3


class Oracle(torch.nn.Module):
    """Stands in for a model in `generate`: knows the answers of some prompts, and errs in one."""


def test_exact_match_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, some = byte_tokenizer(), items(4)
    said = [f" {item.worked}" for item in some]
    said[2] = f" It is {some[2].answer + 1}. The answer is {some[2].answer + 1}."

    def reply(model: Any, prompts: Any, **_: Any) -> list[list[int]]:
        assert [tokenizer.decode(prompt) for prompt in prompts] == [item.prompt for item in some]
        return [[*text.encode(), tokenizer.eos_token_id] for text in said]

    monkeypatch.setattr(arithmetic, "generate", reply)
    score = exact_match(Oracle(), tokenizer, some)
    assert score.right == (True, True, False, True) and score.accuracy == 0.75
    assert score.replies == tuple(said)


def test_bad_input() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(UsageError, match="count=0 must be at least 1"):
        items(0)
    with pytest.raises(UsageError, match=r"Unknown kind of problem 'sums'. Did you mean 'sum'"):
        items(1, kinds=("sums",))
    with pytest.raises(UsageError, match="kinds is empty"):
        items(1, kinds=())
    with pytest.raises(UsageError, match=r"No new 'share' problem .* the test part is nearly used up"):
        items(2000, split="test", kinds=("share",))
    with pytest.raises(UsageError, match=r"batch=9 must lie in 1..3"):
        ItemBatches(items(3), tokenizer, batch=9, generator=torch.Generator())
    with pytest.raises(UsageError, match="no chat template"):
        encode(items(1)[0], tokenizer, chat=True)
    with pytest.raises(UsageError, match="There is no item"):
        exact_match(Oracle(), tokenizer, [])
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="no eos token"):
        encode(items(1)[0], tokenizer)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_part() -> None:
    with pytest.raises(UsageError, match="Unknown split 'dev'"):
        items(1, split="dev")  # type: ignore[arg-type]


def test_the_example_in_the_docstring_is_of_this_form() -> None:
    source = ast.get_docstring(ast.parse(Path(arithmetic.__file__).read_text()))
    assert source is not None and "A: 34 + 17 = 51. 51 - 9 = 42. The answer is 42." in source
