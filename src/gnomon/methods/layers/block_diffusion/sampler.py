"""Generation block by block, with an exact or a sparse cache.

Whole blocks of the prompt are stored first. Every later block starts as the prompt's tail and masks, is denoised in S
passes or fewer, and is then committed by one more pass over its final tokens.

Shapes: R rows of equal length P.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gnomon.core.errors import UsageError

from .config import BlockDiffusionConfig
from .decoder import BlockDecoder, decoding
from .fit import require_trained
from .sparse import Selection, SparsePolicy
from .transfer import transfer


@dataclass(frozen=True, kw_only=True)
class GenerationStats:
    """What a generation took. Rows of a batch are denoised together, so counts hold for the batch."""

    nfe: int
    """Forward passes of blocks: denoising and commits; passes over the prompt aren't counted."""
    steps: tuple[int, ...]
    """Denoising passes of each block. The last block needs no commit."""
    kv_read: float
    """KV tokens that denoising passes read, for each row and key head, averaged over layers."""
    kv_read_commit: float
    """The same of commit passes."""
    kv_read_selecting: float
    """What the policy read besides to choose; a key alone is half a token."""
    active: float
    """Share of blocks in which some layer read a part of the prefix only. 0 means that all was dense."""
    selections: tuple[Selection, ...] = ()
    """One for each set, where `measure` asked for them."""

    @property
    def recall(self) -> float | None:
        """Mean over the sets of denoising passes, where they were measured."""
        return _mean([one.recall for one in self.selections if not one.commit])

    @property
    def mass(self) -> float | None:
        """Likewise."""
        return _mean([one.mass for one in self.selections if not one.commit])


def generate(
    model: nn.Module,
    input_ids: Int[Tensor, "R P"],
    cfg: BlockDiffusionConfig,
    sparse: SparsePolicy | None = None,
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
    *,
    generator: torch.Generator | None = None,
    measure: bool = False,
    force: bool = False,
) -> tuple[Int[Tensor, "R T"], GenerationStats]:
    """Continue prompts of equal length.

    Args:
        sparse: a policy that reads less of the prefix, such as :class:`gnomon.methods.layers.mage.Mage`.
        stop_ids: a row ends with the first of these; what follows it is filled with it. Generation ends after the block
            in which the last row stops.
        generator: on the CPU, for temperatures above 0; None draws from the ambient random state.
        measure: recall and mass of every set, against exact attention.
        force: take a model that doesn't say it was trained for this (see :func:`declare`).

    Returns:
        prompt and new tokens, (R, T) with T ≤ P + max_new_tokens; and what it took.

    Raises:
        UsageError: the mask token in a prompt, no new tokens, a model that can't be one or wasn't trained for it.
        NumericalFailure: logits that aren't numbers.
    """
    rows, given = input_ids.shape
    _check(input_ids, cfg, max_new_tokens, stop_ids)
    if not force:
        require_trained(model, cfg)
    size = cfg.block_size
    device = next(model.parameters()).device
    ids = input_ids.to(device)
    end = given + max_new_tokens
    first, blocks = given // size, -(-end // size)
    done = ids[:, : first * size]
    steps: list[int] = []
    with decoding(model, cfg, total=blocks * size, prompt=given, sparse=sparse, measure=measure) as decoder:
        decoder.prefill(done)
        for block in range(first, blocks):
            current = torch.full((rows, size), cfg.mask_token_id, device=device)
            tail = ids[:, block * size : (block + 1) * size]
            current[:, : tail.shape[1]] = tail
            current, took = _denoised(decoder, current, generator)
            steps.append(took)
            done = torch.cat([done, current], 1)
            if block == blocks - 1 or _stopped(done[:, given:end], stop_ids):
                break
            decoder.commit(current)
        stats = _stats(decoder, tuple(steps), len(decoder.cache.layers))
    return _filled(done[:, :end], given, stop_ids), stats


def _denoised(
    decoder: BlockDecoder, current: Int[Tensor, "R B"], generator: torch.Generator | None
) -> tuple[Int[Tensor, "R B"], int]:
    """The block without masks, and the passes it took."""
    cfg = decoder.cfg
    masked = current == cfg.mask_token_id
    decoder.begin(masked)
    for step in range(1, len(cfg.schedule) + 1):
        logits = decoder.denoise(current)
        tokens, chosen = transfer(logits, masked, step, cfg, generator)
        current = torch.where(chosen, tokens, current)
        masked = masked & ~chosen
        if not bool(masked.any()):
            return current, step
    raise AssertionError("the schedule fills B positions")


def _stats(decoder: BlockDecoder, steps: tuple[int, ...], layers: int) -> GenerationStats:
    reads = decoder.session.reads
    return GenerationStats(
        nfe=decoder.passes["denoise"] + decoder.passes["commit"],
        steps=steps,
        kv_read=reads.denoise / layers,
        kv_read_commit=reads.commit / layers,
        kv_read_selecting=reads.selecting / layers,
        active=len(reads.active) / len(steps),
        selections=tuple(decoder.session.selections),
    )


def _stopped(new: Int[Tensor, "R n"], stop_ids: Collection[int]) -> bool:
    return bool(stop_ids) and bool(_is_stop(new, stop_ids).any(-1).all())


def _filled(ids: Int[Tensor, "R T"], given: int, stop_ids: Collection[int]) -> Int[Tensor, "R t"]:
    """Rows cut at their first stop token: filled with it up to the longest."""
    if not stop_ids:
        return ids
    new = ids[:, given:]
    stop = _is_stop(new, stop_ids)
    at = torch.where(stop.any(-1), stop.int().argmax(-1), new.shape[1] - 1)  # (R,)
    token = new.gather(1, at[:, None])
    behind = torch.arange(new.shape[1], device=new.device) > at[:, None]
    new = torch.where(behind, token, new)
    return torch.cat([ids[:, :given], new[:, : int(at.max()) + 1]], 1)


def _is_stop(new: Tensor, stop_ids: Collection[int]) -> Tensor:
    return torch.isin(new, torch.tensor(sorted(stop_ids), device=new.device))


def _check(
    input_ids: Tensor, cfg: BlockDiffusionConfig, max_new_tokens: int, stop_ids: Collection[int]
) -> None:
    if max_new_tokens < 1 or not len(input_ids):
        raise UsageError(
            f"max_new_tokens={max_new_tokens} and {len(input_ids)} prompts: both must be at least 1."
        )
    if bool((input_ids == cfg.mask_token_id).any()):
        raise UsageError(
            f"A prompt holds the mask token {cfg.mask_token_id}: it would be taken for a gap to fill. To fill gaps, "
            "use `decoding`; otherwise check the tokenizer."
        )
    if cfg.mask_token_id in stop_ids:
        raise UsageError(f"stop_ids hold the mask token {cfg.mask_token_id}, which is never generated.")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
