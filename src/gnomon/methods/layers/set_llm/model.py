"""A causal language model of Transformers that reads sets: scoring, generation, and what can't be guaranteed.

The weights and the model's code stay as they are; only positions and masks are handed in. A prompt is bidirectional,
so it goes through the model in one pass; the response is decoded from its cache as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import unwrap
from gnomon.core.scoring import evaluating

from ..own_masks import as_given, require_own_masks
from .masks import SET_LLM, rung, set_attention_mask
from .order import OrderQuestion
from .prompt import SetEncoding, SetPrompt, encode


class SetLLM:
    """A model, a tokenizer and a rung of the ablation.

    Its answers don't depend on the order of elements where `mode` is invariant, up to rounding: sums come in another
    order, which bfloat16 shows in the logits and float32 hardly (log-probabilities within 1e-3).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        mode: str = SET_LLM,
        canonical: bool = False,
        bos: bool = True,
        guarantee: bool = False,
    ) -> None:
        """
        Args:
            model: decoder with rotary positions, with sdpa or eager attention.
            mode: one of `MODES`.
            canonical: sort the elements of sets by their tokens first: then orders give equal bits, in any mode.
            bos: as in :func:`encode`; False for prompts from a chat template.
            guarantee: refuse what would break invariance instead of leaving it to the caller: a mode that isn't
                invariant, and weights in less than float32.

        Raises:
            UsageError: a model that takes no such masks or positions, or no guarantee.
        """
        self.model, self.tokenizer, self.rung = model, tokenizer, rung(mode)
        self.mode, self.canonical, self.bos = mode, canonical, bos
        require_fit(model, positions=self.rung.positions)
        if guarantee and not canonical:
            self._require_invariance()

    def _require_invariance(self) -> None:
        if not self.rung.invariant:
            raise UsageError(f"mode={self.mode!r} depends on the order of elements. Use {SET_LLM!r}.")
        kinds = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        if low := [str(kind) for kind in kinds if torch.finfo(kind).bits < 32]:
            raise UsageError(
                f"The weights are {', '.join(low)}, whose rounding shows the order of elements. Use model.float() to "
                "evaluate, or canonical=True."
            )

    # ------------------------------------------------------------------------------------------ inputs

    def encode(self, prompt: SetPrompt) -> SetEncoding:
        """The prompt as this mode reads it.

        Raises:
            UsageError: as :func:`encode`; a prompt that ends in a set, since the response is read off its last token,
                and which element that is depends on the order.
        """
        found = encode(
            prompt, self.tokenizer, bos=self.bos, canonical=self.canonical, positions=self.rung.positions
        )
        if not found.ends_in_text:
            raise UsageError(
                "The prompt ends in a set, so its last token would depend on the order of elements. End it with a "
                "text, such as ' Answer:'."
            )
        return found

    def _mask(self, of: SetEncoding, n_response: int = 0) -> Tensor:
        device = next(self.model.parameters()).device
        seen = set_attention_mask(of.set_id, of.elem_id, n_response, mask=self.rung.mask).to(device)
        return as_given(seen, self.model)

    def _positions(self, of: SetEncoding, first: int, count: int) -> Tensor:
        """(1, count) positions of response tokens from number `first` on."""
        device = next(self.model.parameters()).device
        if self.rung.positions == "none":
            return torch.zeros(1, count, dtype=torch.long, device=device)
        return torch.arange(of.next_position + first, of.next_position + first + count, device=device)[None]

    # ------------------------------------------------------------------------------------------ scoring

    def score(self, prompt: SetPrompt, continuations: Sequence[str]) -> Float[Tensor, " C"]:
        """log p(continuation | prompt) of each, in nats, summed over its tokens; float64.

        Raises:
            UsageError: as :meth:`encode`; no continuation, or one without tokens; more tokens than positions.
        """
        return self.score_many([prompt], continuations)[0]

    def score_many(self, prompts: Sequence[SetPrompt], continuations: Sequence[str]) -> Float[Tensor, "P C"]:
        """:meth:`score` of the same continuations after several prompts at once, such as all orders of a question."""
        rows = [self._tokens(text) for text in continuations]
        if not rows or not prompts:
            raise UsageError(
                "There is no continuation to score." if prompts else "There is no prompt to go on from."
            )
        given = [self.encode(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        for of in given:
            self._require_room(of, longest)
        with evaluating(self.model):
            cache, logits, real = self._prefill(given)
            sums = _log_softmax(logits)[:, [row[0] for row in rows]].cpu()  # (P, C)
            if longest > 1:
                sums = sums + self._rest(given, rows, cache, real)
        return sums

    def logits(self, prompts: Sequence[SetPrompt]) -> Float[Tensor, "P V"]:
        """The next token's logits after each of several prompts."""
        if not prompts:
            raise UsageError("There is no prompt to go on from.")
        with evaluating(self.model):
            return self._prefill([self.encode(prompt) for prompt in prompts])[1]

    def _prefill(self, given: Sequence[SetEncoding]) -> tuple[Any, Tensor, Tensor]:
        """The cache of P prompts, padded on the left to N tokens; the logits (P, V) after them; real tokens (P, N)."""
        device = next(self.model.parameters()).device
        width = max(map(len, given))
        ids, positions = (torch.zeros(len(given), width, dtype=torch.long) for _ in range(2))
        sets, elements = (torch.full((len(given), width), -1) for _ in range(2))
        for i, of in enumerate(given):
            at = slice(width - len(of), width)
            ids[i, at], positions[i, at] = of.input_ids, of.position_ids
            sets[i, at], elements[i, at] = of.set_id, of.elem_id
        real = sets >= 0
        seen = set_attention_mask(sets, elements, 0, real, mask=self.rung.mask)
        out = self.model(
            input_ids=ids.to(device),
            attention_mask=as_given(seen.to(device), self.model),
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=1,
        )
        return out.past_key_values, out.logits[:, -1], real

    def _rest(
        self,
        given: Sequence[SetEncoding],
        rows: Sequence[Sequence[int]],
        cache: Any,
        real: Bool[Tensor, "P N"],
    ) -> Float[Tensor, "P C"]:
        """What the tokens after the first one add, from the prompts' cache."""
        device = next(self.model.parameters()).device
        many, steps = len(rows), max(map(len, rows)) - 1
        cache.batch_repeat_interleave(many)  # prompt by prompt, each with all continuations
        ids = torch.zeros(len(given), many, steps, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[:, i, : len(row) - 1] = torch.tensor(row[:-1])
        positions = torch.cat([self._positions(of, 0, steps).expand(many, -1) for of in given])
        # Pads behind a continuation stand after what is scored, and nothing looks ahead, so they need no mask.
        causal = torch.ones(steps, steps, dtype=torch.bool).tril().expand(len(given), -1, -1)
        seen = torch.cat([real[:, None].expand(-1, steps, -1), causal], -1)
        seen = seen.repeat_interleave(many, 0)[:, None]
        out = self.model(
            input_ids=ids.flatten(0, 1).to(device),
            attention_mask=as_given(seen.to(device), self.model),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits = _log_softmax(out.logits).cpu().view(len(given), many, steps, -1)
        sums = torch.zeros(len(given), many, dtype=logits.dtype)
        for i, row in enumerate(rows):
            for t, token in enumerate(row[1:]):
                sums[:, i] += logits[:, i, t, token]
        return sums

    def ask(
        self, question: OrderQuestion, orders: Sequence[Sequence[int]], *, batch_size: int = 24
    ) -> list[list[float]]:
        """Log-likelihoods of a question's options in each of several orders: a scorer for `order_sensitivity`."""
        found: list[list[float]] = []
        for first in range(0, len(orders), batch_size):
            prompts = [question.prompt(order) for order in orders[first : first + batch_size]]
            found += self.score_many(prompts, question.options).tolist()
        return found

    def _tokens(self, text: str) -> list[int]:
        found = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if not found:
            raise UsageError(f"The continuation {text!r} has no tokens to score.")
        return found

    def _require_room(self, of: SetEncoding, more: int) -> None:
        limit = getattr(unwrap(self.model).config, "max_position_embeddings", None)
        if limit is not None and len(of) + more > limit:
            raise UsageError(
                f"The prompt has {len(of)} tokens and the response {more}, more than the model's {limit} positions."
            )

    # --------------------------------------------------------------------------------------- generation

    def generate(self, prompt: SetPrompt, **options: Any) -> str:
        """The model's own `generate`, with all its options, from this prompt; the new text alone.

        Raises:
            UsageError: as :meth:`encode`; options that read the prompt in pieces or bring a cache or mask of their own.
        """
        for name in ("attention_mask", "position_ids", "past_key_values", "input_ids", "prefill_chunk_size"):
            if options.get(name) is not None:
                raise UsageError(
                    f"{name} can't be given: the prompt goes through the model in one pass, as a set."
                )
        of = self.encode(prompt)
        device = next(self.model.parameters()).device
        ids = of.input_ids[None].to(device)
        with evaluating(self.model), self._reading(of):
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
        rows = out if isinstance(out, Tensor) else out.sequences
        return str(self.tokenizer.decode(rows[0, ids.shape[1] :], skip_special_tokens=True))

    @contextmanager
    def _reading(self, of: SetEncoding) -> Iterator[None]:
        """Give the model the prompt's mask and positions in the first pass, and the response's positions later."""
        root = unwrap(self.model)

        def replace(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            ids = given["input_ids"]
            cache = given.get("past_key_values")
            past = 0 if cache is None else int(cache.get_seq_length())
            rows, count = ids.shape
            if past == 0:
                given["attention_mask"] = self._mask(of, count - len(of)).expand(rows, -1, -1, -1)
                after = self._positions(of, 0, count - len(of))
                positions = torch.cat([of.position_ids[None].to(ids.device), after], 1)
            else:
                positions = self._positions(of, past - len(of), count)
            given["position_ids"] = positions.expand(rows, -1)
            return args, given

        handle = root.register_forward_pre_hook(replace, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def require_fit(model: nn.Module, *, positions: str = "set") -> None:
    """Refuse models whose attention takes no such mask, or whose positions aren't rotary.

    Raises:
        UsageError: with the reason.
    """
    config = require_own_masks(
        model,
        windows="which look at a token's place in the sequence, so the order of elements shows",
        states="which read tokens in their order",
    )
    root = unwrap(model)
    name, modules = type(root).__name__, [type(module).__name__.lower() for module in root.modules()]
    if getattr(config, "alibi", False) or any("alibi" in module for module in modules):
        raise UsageError(
            f"{name} weighs tokens by their distance in the sequence (ALiBi), so their order shows."
        )
    if not any("rotary" in module for module in modules):
        raise UsageError(
            f"{name} has no rotary positions, which positions={positions!r} are for. Use a model with RoPE: Llama, "
            "Qwen, OLMo, Phi."
        )


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least, returned as float64, in which sums of tokens are added up."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1).double()
