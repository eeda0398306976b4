"""The passes that a sampler is made of: prefill of whole blocks, denoising of one, commit.

Shapes: R rows, B tokens of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import unwrap
from gnomon.core.scoring import evaluating

from ..own_masks import additive, attention_of
from .cache import BlockCache
from .config import BlockDiffusionConfig
from .fit import require_fit, require_room, require_sparse_fit, takes
from .loss import without_mask
from .masks import block_causal_mask, require_blocks
from .sparse import BlockState, Session, SparsePolicy, attending

PREFILL = 2048
"""Tokens of the prompt that go through the model at a time; bounds the mask to 2048 × N."""


class BlockDecoder:
    """A model in the middle of a sequence; made by :func:`decoding`."""

    def __init__(
        self, model: nn.Module, cfg: BlockDiffusionConfig, session: Session, *, total: int, prompt: int
    ) -> None:
        self.model, self.cfg, self.session = model, cfg, session
        self.prompt = prompt
        self.cache = BlockCache(total)
        self.passes = {"prefill": 0, "denoise": 0, "commit": 0}
        self._memory: dict[Any, Any] = {}
        self._last: Tensor | None = None  # (R, V), logits after the committed part: token shift reads them
        self._keeps = takes(unwrap(model), "logits_to_keep")

    @property
    def committed(self) -> int:
        """N, tokens whose keys and values don't change any more."""
        return int(self.cache.get_seq_length())

    def prefill(self, ids: Int[Tensor, "R N"]) -> None:
        """Store the keys and values of whole clean blocks.

        Raises:
            UsageError: N isn't whole blocks.
        """
        if ids.shape[1] == 0:
            return
        size = self.cfg.block_size
        require_blocks(ids.shape[1], size)
        self.session.begin(None)
        for part in torch.split(ids, max(1, PREFILL // size) * size, 1):
            past = self.committed
            seen = block_causal_mask(part.shape[1], size, past=past, device=part.device)[None, None]
            dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
            mask = additive(seen, dtype) if self.session.kind == "eager" else seen
            self._last = self._forward(part, "prefill", mask, last=True)[:, -1]
            self.cache.commit(part.shape[1])

    def pretend(self, tokens: int, *, rows: int = 1, generator: torch.Generator | None = None) -> None:
        """Commit `tokens` made-up tokens, standard normal keys and values: for timing long contexts without a prefill.

        Args:
            generator: on the CPU; None draws from the ambient random state.

        Raises:
            UsageError: tokens that aren't whole blocks, or a cache that isn't empty.
        """
        require_blocks(tokens, self.cfg.block_size)
        if self.committed:
            raise UsageError(f"The cache holds {self.committed} tokens already; pretend comes first.")
        device = next(self.model.parameters()).device
        self.prefill(
            torch.zeros(rows, self.cfg.block_size, dtype=torch.long, device=device)
        )  # makes the layers
        for layer in self.cache.layers:
            for kept in (layer.keys, layer.values):
                shape = (*kept.shape[:2], tokens, kept.shape[-1])
                kept[:, :, :tokens] = torch.randn(shape, generator=generator)
        self.cache.commit(tokens - self.cfg.block_size)

    def begin(self, masked: Bool[Tensor, "R B"]) -> None:
        """Start the next block.

        Args:
            masked: positions that are to be filled.

        Raises:
            UsageError: token shift, and the sequence's first token is masked: nothing comes before it.
        """
        if self.cfg.token_shift and self._last is None and bool(masked[:, 0].any()):
            raise UsageError(
                "With token_shift the first token is read off the one before it. Give a token, such as the bos token."
            )
        block = self.committed // self.cfg.block_size
        steps = len(self.cfg.schedule)
        self.session.begin(BlockState(block, steps, self.prompt, masked, memory=self._memory))

    def denoise(self, ids: Int[Tensor, "R B"]) -> Float[Tensor, "R B V"]:
        """Logits of the block's tokens, −∞ for the mask token; nothing is stored.

        Raises:
            NumericalFailure: a logit that isn't a number.
        """
        self.session.step += 1
        logits = self._forward(ids, "denoise", None)
        if self.cfg.token_shift:
            before = torch.zeros_like(logits[:, 0]) if self._last is None else self._last
            logits = torch.cat([before[:, None], logits[:, :-1]], 1)
        logits = without_mask(logits, self.cfg)
        if bool(logits.isnan().any()):
            raise NumericalFailure(
                f"Logits of block {self.committed // self.cfg.block_size} aren't numbers. Load the model in float32 or "
                "bfloat16, and look for NaN in its weights."
            )
        return logits

    def commit(self, ids: Int[Tensor, "R B"]) -> None:
        """Store the finished block: one pass, without which the cache would hold a partly masked one."""
        state = self.session.state
        assert state is not None
        state.commit = True
        self.session.step += 1
        self._last = self._forward(ids, "commit", None, last=True)[:, -1]
        self.cache.commit(ids.shape[1])

    def _forward(
        self, ids: Int[Tensor, "R T"], kind: str, mask: Tensor | None, *, last: bool = False
    ) -> Float[Tensor, "R t V"]:
        self.passes[kind] += 1
        past = self.committed
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        out = self.model(
            input_ids=ids,
            position_ids=positions.expand(len(ids), -1),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": 1} if last and self._keeps else {}),
        )
        logits: Tensor = out.logits
        return logits


@contextmanager
def decoding(
    model: nn.Module,
    cfg: BlockDiffusionConfig,
    *,
    total: int,
    prompt: int = 0,
    sparse: SparsePolicy | None = None,
    measure: bool = False,
) -> Iterator[BlockDecoder]:
    """A decoder for one batch of sequences; the model gets its attention and mode back when the block ends.

    Args:
        total: most tokens of a sequence, whole blocks.
        prompt: tokens of the prompt, which a policy may want to know.
        sparse: what reads less of the prefix; None reads it all.
        measure: compare each set with exact attention. Costs an exact pass over the keys for each.

    Raises:
        UsageError: a model that can't be one, or has too few positions; a policy that leaves out the block.
    """
    kind = attention_of(model)
    require_fit(model, cfg)
    require_blocks(total, cfg.block_size)
    require_room(model, total)
    if sparse is not None:
        require_sparse_fit(model)
        if not sparse.keep_block:
            raise UsageError(f"{type(sparse).__name__} has keep_block=False; a block must see itself.")
    session = Session(kind, sparse, measure=measure)
    with evaluating(model), attending(model, session):
        yield BlockDecoder(model, cfg, session, total=total, prompt=prompt)
