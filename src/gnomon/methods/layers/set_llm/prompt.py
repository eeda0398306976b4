"""Prompts that mix text and sets, and their token form.

Every part and every element is tokenized separately, because a tokenizer that merges across a border would make an
element's tokens depend on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gnomon.core.errors import UsageError

SET_TAG, ELEMENT_TAG = "set", "el"
_TAGS = re.compile(rf"<(/?)({SET_TAG}|{ELEMENT_TAG})>")
_SLOT = "\x02{}\x03"
"""Stands for a part while a chat template is filled in; control characters that no template touches."""


@dataclass(frozen=True)
class Set:
    """Elements whose order means nothing.

    Give all of them the same beginning and end (such as a leading space or "\\n- "), or the order shows in the text.
    """

    elements: tuple[str, ...]

    def __init__(self, elements: Sequence[str]) -> None:
        if isinstance(elements, str):
            raise UsageError(f"A set is made of a list of texts, got one text {elements[:40]!r}.")
        if not elements:
            raise UsageError(
                "A set without elements has no meaning in a prompt. Leave it out, or give it one."
            )
        for element in elements:
            if not isinstance(element, str):
                raise UsageError(
                    f"An element is a {type(element).__name__}; elements are texts, not sets again."
                )
            if not element:
                raise UsageError("A set holds an empty element. Leave it out, or give it a text.")
        object.__setattr__(self, "elements", tuple(elements))

    def reordered(self, order: Sequence[int]) -> Set:
        """The same set, written down in another order."""
        if sorted(order) != list(range(len(self.elements))):
            raise UsageError(f"order={list(order)} is no permutation of {len(self.elements)} elements.")
        return Set([self.elements[i] for i in order])


@dataclass(frozen=True)
class SetPrompt:
    """Texts and sets, one after the other."""

    parts: tuple[str | Set, ...]

    def __init__(self, parts: Sequence[str | Set]) -> None:
        if isinstance(parts, str | Set):
            parts = [parts]
        for part in parts:
            if not isinstance(part, str | Set):
                raise UsageError(f"A part is a {type(part).__name__}; parts of a prompt are texts and sets.")
        kept = tuple(part for part in parts if part != "")
        if not kept:
            raise UsageError("A prompt without text or set has nothing to go on from.")
        object.__setattr__(self, "parts", kept)

    @property
    def sets(self) -> tuple[Set, ...]:
        """The sets in it, in the prompt's order."""
        return tuple(part for part in self.parts if isinstance(part, Set))

    def reordered(self, orders: Sequence[Sequence[int]]) -> SetPrompt:
        """The same prompt with its sets written down in other orders, one for each set."""
        if len(orders) != len(self.sets):
            raise UsageError(f"{len(orders)} orders were given for {len(self.sets)} sets.")
        left = iter(orders)
        return SetPrompt(
            [part.reordered(next(left)) if isinstance(part, Set) else part for part in self.parts]
        )

    def text(self) -> str:
        """The prompt as plain text, elements in the order they stand in."""
        return "".join(part if isinstance(part, str) else "".join(part.elements) for part in self.parts)


def parse_set_markup(text: str) -> SetPrompt:
    """`"Choices:<set><el> red</el><el> blue</el></set> Answer:"` as a prompt. Spaces inside tags count.

    Raises:
        UsageError: tags that don't match, nested sets, text inside a set but outside its elements.
    """
    parts: list[str | Set] = []
    elements: list[str] | None = None
    inside, at = False, 0
    for found in _TAGS.finditer(text):
        between, (closing, tag) = text[at : found.start()], found.groups()
        at = found.end()
        if inside:
            if not (closing and tag == ELEMENT_TAG):
                raise UsageError(f"{found.group()} stands inside an element: sets in sets aren't defined.")
            assert elements is not None
            elements.append(between)
            inside = False
        elif elements is not None:
            if between.strip():
                raise UsageError(f"{between.strip()[:40]!r} stands inside a set, but in no element.")
            if tag == ELEMENT_TAG and not closing:
                inside = True
            elif tag == SET_TAG and closing:
                parts.append(Set(elements))
                elements = None
            else:
                raise UsageError(f"{found.group()} can't stand inside a set: sets in sets aren't defined.")
        else:
            if closing or tag != SET_TAG:
                raise UsageError(f"{found.group()} stands outside of a set. Write <set><el>…</el></set>.")
            parts.append(between)
            elements = []
    if inside or elements is not None:
        raise UsageError(f"The last <{ELEMENT_TAG if inside else SET_TAG}> isn't closed.")
    return SetPrompt([*parts, text[at:]])


def apply_chat_template(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> SetPrompt:
    """A conversation as a prompt: contents are texts, sets or prompts; the template's own text comes around them.

    Encode the result with `bos=False`: a template writes its own beginning.

    Raises:
        UsageError: a template that drops, repeats or changes a content with sets in it.
    """
    contents: list[SetPrompt] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            plain.append(dict(message))
            continue
        contents.append(content if isinstance(content, SetPrompt) else SetPrompt(content))
        plain.append({**message, "content": _SLOT.format(len(contents) - 1)})
    text = tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )
    parts: list[str | Set] = []
    for i, content in enumerate(contents):
        before, slot, text = text.partition(_SLOT.format(i))
        if not slot or _SLOT.format(i) in text:
            raise UsageError(
                f"The chat template doesn't put content {i} in once as it is. Build the prompt by hand with SetPrompt."
            )
        parts += [before, *content.parts]
    return SetPrompt(joined([*parts, text]))


def joined(parts: Sequence[str | Set]) -> list[str | Set]:
    """Texts side by side become one, as a tokenizer would have seen them."""
    found: list[str | Set] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@dataclass(frozen=True)
class SetEncoding:
    """A prompt of N tokens."""

    input_ids: Int[Tensor, " N"]
    position_ids: Int[Tensor, " N"]
    set_id: Int[Tensor, " N"]
    """Number of the part a token belongs to; a text is a set of one element."""
    elem_id: Int[Tensor, " N"]
    """Number of the element inside the part."""
    next_position: int
    """Where the response's positions begin."""
    ends_in_text: bool

    def __len__(self) -> int:
        return len(self.input_ids)


def encode(
    prompt: SetPrompt, tokenizer: Any, *, bos: bool = True, canonical: bool = False, positions: str = "set"
) -> SetEncoding:
    """Token ids, positions and memberships of a prompt.

    Args:
        bos: put the tokenizer's BOS in front, where it has one and adds it to texts itself.
        canonical: sort the elements of every set by their token ids. With it any model is blind to the order, bit for
            bit; but that one order may still favour an element.
        positions: "set" (SetPE), "index" (0 … N-1) or "none" (all 0).

    Raises:
        UsageError: an element without tokens; unknown positions.
    """
    from .masks import POSITIONS, set_positions

    if positions not in POSITIONS:
        raise UsageError(f"positions={positions!r} must be one of {', '.join(POSITIONS)}.")
    parts = [[tokens] for tokens in (_bos(tokenizer) if bos else []) if tokens]
    for part in prompt.parts:
        elements = [part] if isinstance(part, str) else part.elements
        rows = [
            list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in elements
        ]
        for text, row in zip(elements, rows, strict=True):
            if not row:
                raise UsageError(f"{text[:40]!r} has no tokens in this tokenizer. Leave it out.")
        parts.append(sorted(rows) if canonical else rows)
    ids = [token for part in parts for row in part for token in row]
    lengths = [[len(row) for row in part] for part in parts]
    position_ids, following = set_positions(lengths)
    if positions != "set":
        following = len(ids) if positions == "index" else 0
        position_ids = (
            torch.arange(len(ids)) if positions == "index" else torch.zeros(len(ids), dtype=torch.long)
        )
    return SetEncoding(
        input_ids=torch.tensor(ids),
        position_ids=position_ids,
        set_id=torch.tensor([i for i, part in enumerate(lengths) for n in part for _ in range(n)]),
        elem_id=torch.tensor([j for part in lengths for j, n in enumerate(part) for _ in range(n)]),
        next_position=following,
        ends_in_text=isinstance(prompt.parts[-1], str) or len(prompt.parts[-1].elements) == 1,
    )


def _bos(tokenizer: Any) -> list[list[int]]:
    """BOS as a part of its own, where the tokenizer puts it before texts."""
    bos = getattr(tokenizer, "bos_token_id", None)
    own = tokenizer("a", verbose=False)["input_ids"]
    return [[bos]] if bos is not None and len(own) and own[0] == bos else []
