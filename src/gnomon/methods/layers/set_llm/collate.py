"""Batches of set prompts and responses for the Trainers of Transformers and TRL.

Prompts are padded on the left and responses on the right, so that all responses of a batch begin in one column; with
positions handed in, padding on either side shifts none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from gnomon.core.errors import UsageError

from ..own_masks import additive, attention_of
from .masks import SET_LLM, rung, set_attention_mask
from .prompt import SetPrompt, encode, parse_set_markup

IGNORED = -100
"""Label of tokens without a loss."""


class SetCollator:
    """Turns `{"prompt": …, "response": …}` into what a model's forward pass takes.

    A prompt is a :class:`SetPrompt` or text with markup. The loss is that of the response, its end included. Give a
    Trainer `remove_unused_columns=False`, and TRL's `SFTConfig` `dataset_kwargs={"skip_prepare_dataset": True}`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        model: nn.Module | None = None,
        mode: str = SET_LLM,
        canonical: bool = False,
        bos: bool = True,
        eos: bool = True,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            model: decides which kind of mask is made: boolean for sdpa (also without a model), additive for eager.
            mode: one of `MODES`.
            canonical: sort the elements of sets, as in :func:`encode`.
            eos: end responses with the tokenizer's EOS, so that generation learns to stop.
            max_length: of prompt and response together; longer items are refused, since cutting would cut a set.
            dtype: of additive masks: that in which attention is computed.
        """
        self.tokenizer, self.rung, self.bos, self.eos = tokenizer, rung(mode), bos, eos
        self.canonical, self.max_length, self.dtype = canonical, max_length, dtype
        self.eager = model is not None and attention_of(model) == "eager"

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Batch of B items: input_ids, position_ids and labels (B, T), attention_mask (B, 1, T, T).

        Raises:
            UsageError: an item without prompt or response, an empty response, an item that is too long.
        """
        if not items:
            raise UsageError("A batch needs an item or more.")
        prompts = [self._prompt(item) for item in items]
        responses = [self._response(item) for item in items]
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if self.max_length is not None and len(prompt) + len(response) > self.max_length:
                raise UsageError(
                    f"Item {i} has {len(prompt)} + {len(response)} tokens, above max_length={self.max_length}. Leave "
                    "it out, or shorten its text."
                )
        left, right = max(map(len, prompts)), max(map(len, responses))
        shape = (len(items), left + right)
        ids = torch.zeros(shape, dtype=torch.long)
        positions = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        real = torch.zeros(shape, dtype=torch.bool)
        sets, elements = (torch.full((len(items), left), -1) for _ in range(2))
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            own, answer = slice(left - len(prompt), left), slice(left, left + len(response))
            ids[i, own], ids[i, answer] = prompt.input_ids, response
            positions[i, own] = prompt.position_ids
            if self.rung.positions != "none":
                positions[i, answer] = torch.arange(len(response)) + prompt.next_position
            sets[i, own], elements[i, own] = prompt.set_id, prompt.elem_id
            labels[i, answer] = response
            real[i, own] = real[i, answer] = True
        seen = set_attention_mask(sets, elements, right, real, mask=self.rung.mask)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._given(seen),
            "labels": labels,
        }

    def _given(self, seen: Bool[Tensor, "B 1 T T"]) -> Tensor:
        return additive(seen, self.dtype) if self.eager else seen

    def _prompt(self, item: Mapping[str, Any]) -> Any:
        prompt = item.get("prompt")
        if isinstance(prompt, str):
            prompt = parse_set_markup(prompt)
        if not isinstance(prompt, SetPrompt):
            raise UsageError(
                f"prompt is a {type(prompt).__name__}; give a SetPrompt, or text with <set> markup."
            )
        found = encode(
            prompt, self.tokenizer, bos=self.bos, canonical=self.canonical, positions=self.rung.positions
        )
        if not found.ends_in_text:
            raise UsageError(
                "A prompt ends in a set, so its last token depends on the order. End it with a text."
            )
        return found

    def _response(self, item: Mapping[str, Any]) -> Tensor:
        text = item.get("response")
        if not isinstance(text, str) or not text:
            raise UsageError(f"response={text!r} must be a text that isn't empty.")
        row = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if self.eos and self.tokenizer.eos_token_id is not None:
            row.append(self.tokenizer.eos_token_id)
        return torch.tensor(row)
