"""The stage of the MAGE study that times a block behind a long prefix. It is declared exclusive.

A model with random weights decodes one block behind made-up keys and values: all its denoising passes, the choice of
sets, the gathering, and the commit, through the MLPs and the head. All policies make equally many passes and reveal
equally many tokens. They take turns on one cache, whose committed part no call changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.lab import StageContext
from gnomon.studies.mage_stages import EXACT, MAGE, QUEST, RATIO, SKIP, SPARSED

if TYPE_CHECKING:
    from torch import Tensor

    from gnomon.methods.layers.block_diffusion import BlockDecoder
    from gnomon.methods.layers.mage import SparsePolicy

TIME, GAIN, KV = "time of a block", "times as fast as ", "KV tokens a block reads"
VOCABULARY = 260
AGREES = 1e-4
"""Largest difference of logits between exact attention and attention over a gathered whole."""


class Everything:
    """A policy that gathers the whole prefix: exact attention by the sparse path."""

    keep_block = True

    def select(self, layer: int, q: Tensor, k_prefix: Tensor, step: int, state: Any) -> Tensor:
        import torch

        rows, heads, n, _ = k_prefix.shape
        return torch.arange(n, device=k_prefix.device).expand(rows, heads, -1)


def latency(
    ctx: StageContext,
    *,
    context: int,
    block: int,
    passes: int,
    k: int,
    layers: int,
    heads: int,
    key_heads: int,
    width: int,
    threads: int,
    repeats: int,
) -> dict[str, float]:
    """Seconds of a block for exact decoding, MAGE, Quest and SparseD, beside what their reads would allow.

    Args:
        context: tokens of the prefix.
        layers, heads, key_heads, width: of the model; its hidden size is heads · width. No layer is kept dense.
    """
    import torch

    from gnomon.core.timing import Contender, interleaved, threads_set
    from gnomon.methods.layers.mage import Mage, Quest, SparseD, attention_speedup

    contenders: dict[str, SparsePolicy | None] = {
        EXACT: None,
        MAGE: Mage(k, 0),
        QUEST: Quest(k, dense_layers=0),
        SPARSED: SparseD(SKIP, RATIO, dense_layers=0),
    }
    shape = {"layers": layers, "heads": heads, "key_heads": key_heads, "width": width}
    tags: dict[str, Any] = {"context": context, "k": k, "block": block, "passes": passes, "threads": threads}
    reads: dict[str, float] = {}
    with threads_set(threads), torch.inference_mode(), behind(context, block, passes, **shape) as decoder:
        agree(decoder, context)
        for name, policy in contenders.items():
            reads[name] = counted(decoder, policy, context)
        turns = [
            Contender(name=name, calls=[partial(one_block, decoder, policy, context)])
            for name, policy in contenders.items()
        ]
        times = interleaved(turns, repeats=repeats)
        size = decoder.cache.bytes
    for name, seconds in times.items():
        for repeat, value in enumerate(seconds):
            ctx.record(
                method=name, metric=TIME, value=value, unit="s", better="lower", item=repeat, tags=tags
            )
        ctx.record(method=name, metric=KV, value=reads[name], better="lower", tags=tags)
    for rival in (EXACT, QUEST, SPARSED):
        gain = statistics.median(a / b for a, b in zip(times[rival], times[MAGE], strict=True))
        allowed = {"reads allow": reads[rival] / reads[MAGE]}
        if rival == EXACT:
            allowed["cost model"] = attention_speedup(context, block, passes, k)
        ctx.record(method=MAGE, metric=GAIN + rival, value=gain, better="higher", tags={**tags, **allowed})
    return {"cache bytes": size, "repeats": repeats}


@contextmanager
def behind(
    context: int, block: int, passes: int, *, layers: int, heads: int, key_heads: int, width: int
) -> Iterator[BlockDecoder]:
    """A decoder of a model with random weights after `context` made-up tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gnomon.core.models import as_device, as_dtype
    from gnomon.methods.layers.block_diffusion import BlockDiffusionConfig, decoding

    where = as_device(None)
    config = LlamaConfig(
        hidden_size=heads * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=width,
        intermediate_size=3 * heads * width,
        vocab_size=VOCABULARY,
        max_position_embeddings=context + 2 * block,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(where, as_dtype(None, where)).eval()
    cfg = BlockDiffusionConfig(
        block_size=block, mask_token_id=VOCABULARY - 1, steps=passes, strategy="static"
    )
    with decoding(model, cfg, total=context + block, prompt=context) as decoder:
        decoder.pretend(context, generator=torch.Generator().manual_seed(context))
        yield decoder


def one_block(decoder: BlockDecoder, policy: SparsePolicy | None, context: int) -> None:
    """Fill a block of masks and commit it, then take it back."""
    import torch

    from gnomon.methods.layers.block_diffusion import transfer

    cfg = decoder.cfg
    device = next(decoder.model.parameters()).device
    decoder.session.policy = policy
    current = torch.full((1, cfg.block_size), cfg.mask_token_id, device=device)
    masked = torch.ones_like(current, dtype=torch.bool)
    decoder.begin(masked)
    for step in range(1, len(cfg.schedule) + 1):
        tokens, chosen = transfer(decoder.denoise(current), masked, step, cfg)
        current, masked = torch.where(chosen, tokens, current), masked & ~chosen
    decoder.commit(current)
    decoder.cache.commit(context - decoder.committed)
    if device.type == "cuda":
        torch.cuda.synchronize()


def counted(decoder: BlockDecoder, policy: SparsePolicy | None, context: int) -> float:
    """KV tokens that a block reads for a row and key head, choice and commit included; mean over layers."""

    def so_far() -> float:
        reads = decoder.session.reads
        return (reads.denoise + reads.commit + reads.selecting) / len(decoder.cache.layers)

    before = so_far()
    one_block(decoder, policy, context)
    return so_far() - before


def agree(decoder: BlockDecoder, context: int) -> None:
    """The sparse path over a whole prefix gives exact decoding's logits.

    Raises:
        AssertionError: it doesn't; nothing is to be timed then.
    """
    import torch

    ids = torch.full((1, decoder.cfg.block_size), 65, device=next(decoder.model.parameters()).device)
    found = []
    for policy in (None, Everything()):
        decoder.session.policy = policy
        decoder.begin(torch.ones_like(ids, dtype=torch.bool))
        found.append(decoder.denoise(ids)[..., : decoder.cfg.mask_token_id].double())
    error = float((found[0] - found[1]).norm() / found[0].norm())
    limit = (
        AGREES if found[0].isfinite().all() and decoder.cache.layers[0].keys.dtype == torch.float32 else 2e-2
    )
    if not error < limit:
        raise AssertionError(
            f"Attention over the gathered {context} tokens is off by {error:.1e} of exact attention; nothing was timed."
        )
