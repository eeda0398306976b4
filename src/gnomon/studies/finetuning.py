"""What studies that fine-tune on questions and answers share: items, one training stage, the loss of answers.

Competitors are factories as in `studies.pretraining`. All of a study take the same items, batches, schedule and grid of
learning rates. Items are generated arithmetic (`core.arithmetic`) or come from files; whether one is learnt, tuned on
or judged on follows from a hash of its question, so no seed or count can mix the parts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Done, StageContext
from gnomon.studies.pretraining import Task, enter, fit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gnomon.core.arithmetic import Item

ARITHMETIC = "arithmetic"
EVALUATION_BATCH = 16
GLANCE_ITEMS = 32
"""Held-out items for a point of a learning curve."""


def finetune(
    ctx: StageContext,
    *,
    method: str,
    make: str,
    seed: int,
    lr: float,
    of: Done | None = None,
    model: str | None = None,
    base: str,
    items: str,
    kinds: Sequence[str],
    learnt: int,
    held_out: int,
    split: str,
    answers: int,
    steps: int,
    batch: int,
    longest: int,
    schedule: str,
    warmup: float,
    points: int,
    dtype: str = "float32",
    checkpointing: bool = False,
    weight_decay: float = 0.0,
    options: Mapping[str, Any] | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Fine-tune a pretrained model on answers; losses are means over answer tokens in nats.

    Args:
        make: `module:factory` of the competitor.
        lr: peak rate.
        of: the stage that pretrained the model, or
        model: a pretrained one by name.
        base: names it in the records.
        items, kinds, learnt, held_out: see :func:`problems`; numbers of items.
        split: which part is judged on, "valid" or "test".
        answers: items that are answered greedily and scored by exact match, 0 for none.
        longest: items with more tokens than this are left out.
        warmup: share of the run in which the rate rises.
        checkpointing: of activations, not reentrant.
        keep: the model is saved in `model/`.

    Returns:
        final loss, exact match, costs, and the peak bytes of optimizer state and gradients.
    """
    import torch

    from gnomon.core import arithmetic
    from gnomon.core.models import load
    from gnomon.core.train import TrainConfig
    from gnomon.methods.optim.bread import measure_peak

    if (of is None) == (model is None):
        raise UsageError("finetune takes either the stage of a pretrained model (of=) or its name (model=).")
    loaded = load(str(of.dir / "model") if of is not None else str(model), dtype=dtype)
    if checkpointing:
        loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    learn = fitting(problems(items, "train", learnt, kinds), loaded.tokenizer, longest)
    judged = fitting(problems(items, split, held_out, kinds), loaded.tokenizer, longest)
    config = TrainConfig(
        steps=steps,
        warmup=max(1, round(warmup * steps)),
        schedule=schedule,
        clip=None,  # an update during the backward pass can't be clipped, so none is
        checkpoint_every=max(1, steps // 4),
        autocast="bf16" if loaded.device.type == "cuda" and dtype == "float32" else "none",
    )
    entrant = enter(make, loaded.model, lr=lr, weight_decay=weight_decay, total_steps=steps, options=options)
    batches = answer_batches(judged, loaded.tokenizer)
    some = answer_batches(judged[:GLANCE_ITEMS], loaded.tokenizer)
    task = Task(
        arithmetic.ItemBatches(
            learn, loaded.tokenizer, batch=batch, generator=torch.Generator().manual_seed(seed)
        ),
        glance=lambda network: answer_loss(network, some),
        judge=lambda network: answer_loss(network, batches),
    )
    with measure_peak(loaded.model, entrant.optimizer) as peak:
        final, value = fit(
            ctx,
            loaded,
            entrant,
            task,
            config,
            method=method,
            points=points,
            tags={"lr": lr, "base": base},
            keep=keep,
        )
    score = None
    if answers and items == ARITHMETIC:
        score = arithmetic.exact_match(final, loaded.tokenizer, judged[:answers]).accuracy
    return {
        **value,
        "exact match": score,
        "peak state bytes": peak.state,
        "peak gradient bytes": peak.gradients,
        "peak device bytes": peak.device,
    }


def answer_batches(items: Sequence[Item], tokenizer: Any) -> list[dict[str, Tensor]]:
    """Batches to judge on; items of similar length lie together, so that little is padding."""
    from gnomon.core.arithmetic import collate, encode

    pairs = sorted((encode(item, tokenizer) for item in items), key=lambda pair: len(pair[0]) + len(pair[1]))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return [collate(pairs[i : i + EVALUATION_BATCH], pad=pad) for i in range(0, len(pairs), EVALUATION_BATCH)]


def answer_loss(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Mean negative log-likelihood of an answer's token, in nats."""
    import torch

    from gnomon.core.scoring import evaluating
    from gnomon.core.train import next_token_loss

    device = next(model.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            tokens = int((batch["labels"][:, 1:] != -100).sum())
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            total += float(next_token_loss(model, moved)) * tokens
            count += tokens
    return total / count


# ------------------------------------------------------------------------------------------------- items


def problems(recipe: str, split: str, count: int, kinds: Sequence[str] = ()) -> list[Item]:
    """Up to `count` items of a part.

    Args:
        recipe: "arithmetic", which always has as many as asked for or refuses; a .jsonl file, or a folder of such.
        split: "train", "valid" or "test".
        kinds: of arithmetic; none is all.

    Raises:
        UsageError: an unknown recipe or kind, a file that can't be read as items, a part without any.
    """
    from gnomon.core.arithmetic import items, split_of

    if recipe == ARITHMETIC:
        return items(count, split=split, kinds=kinds or None)  # type: ignore[arg-type]
    found = [item for item in read_items(recipe) if split_of(item.key) == split]
    random.Random("gnomon-finetuning").shuffle(found)
    if not found:
        raise UsageError(f"{recipe} has no item in its {split} part, which is a tenth or more. Give more.")
    return found[:count]


def read_items(path: str) -> list[Item]:
    """Items of a .jsonl file, or of all in a folder: one object a line, with `instruction` and `output`, as
    MathInstruct and Alpaca have them; a non-empty `input` follows the instruction on a line of its own.

    Raises:
        UsageError: no such file, or a line of another form.
    """
    from gnomon.core.refs import as_path

    place = as_path(path)
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not place.exists():
        if place.suffix == ".jsonl" or "/" in path:
            raise UsageError(f"There is no file or folder {path}.")
        raise unknown("items", path, (ARITHMETIC, "a .jsonl file", "a folder of them"))
    if not files or any(file.suffix != ".jsonl" for file in files):
        raise UsageError(
            f"Items come from .jsonl files with `instruction` and `output` on each line, and {path} "
            f"{'holds none' if place.is_dir() else 'is none'}. A .json list becomes one with: jq -c '.[]'."
        )
    return [item for file in files for item in _read(file)]


def _read(file: Path) -> list[Item]:
    from gnomon.core.arithmetic import Item, final_number

    found: dict[str, Item] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise UsageError(f"{file.name}, line {number}, is no JSON.") from None
        texts = [row.get(name) if isinstance(row, dict) else None for name in ("instruction", "output")]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise UsageError(
                f"{file.name}, line {number}, needs an `instruction` and an `output`, both texts that aren't empty."
            )
        instruction, output = (str(text).strip() for text in texts)
        if isinstance(extra := row.get("input"), str) and extra.strip():
            instruction = f"{instruction}\n{extra.strip()}"
        found[instruction] = Item(
            kind="file",
            question=instruction,
            worked=output,
            answer=final_number(output) or 0,
            key=f"file:{instruction}",
        )
    return list(found.values())


def fitting(items: Sequence[Item], tokenizer: Any, longest: int) -> list[Item]:
    """Those that have at most `longest` tokens.

    Raises:
        UsageError: none has.
    """
    from gnomon.core.arithmetic import encode

    kept = [item for item in items if sum(map(len, encode(item, tokenizer))) <= longest]
    if not kept:
        raise UsageError(f"None of {len(items)} items has at most longest={longest} tokens. Raise it.")
    return kept
