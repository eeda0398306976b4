"""A block-diffusion language model: blocks from left to right, tokens of a block in any order.

Paper: what MAGE (arXiv:2602.14209) accelerates: "Block Diffusion", ICLR 2025, arXiv:2503.09573, and the samplers of
       SDAR, Fast-dLLM v2 and LLaDA 2.0, as the MAGE card sums them up.
Here:  loss, training mask, collator, Trainer and batches for `core.train`; the sampler with static, dynamic, sequential
       and entropy-bounded transfer, an exact cache, and a place for policies that read less of it; token shift. Runs on
       Transformers decoders with full attention, through masks of four dimensions and position ids.
Not here: the policies (`methods/layers/mage`); sub-blocks, complementary masks, block-size schedules, masks by
       document; low-variance clipping beyond `t_min` and `t_max`.
Inferred: with token shift the first token of a block is read off the clean token before it (the commit pass), the
       first of a sequence is always given; every strategy fills n_s positions at least; Σ H − max H as the entropy
       bound; rows of a batch share their passes.
Differs from the paper: strata of noise levels are shuffled over blocks; blocks of all rows count equally.
Limits: prompts of a batch have equal length; no sliding windows, latent-attention policies, ALiBi or state-space
       layers; a saved model is an ordinary checkpoint whose config.json says `block_diffusion`, and a causal reader of
       it warns of nothing.

Shapes: R rows, L tokens, B tokens of a block, V vocabulary.

>>> import torch
>>> from gnomon.core.models import load
>>> model = load("tiny:llama-10k").model                          # or AutoModelForCausalLM; token 258 is the mask
>>> cfg = BlockDiffusionConfig(block_size=8, mask_token_id=258, steps=4)
>>> declare(model, cfg)
>>> g = torch.Generator().manual_seed(0)
>>> tokens = torch.arange(64).view(2, 32)
>>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
>>> for _ in range(3):
...     _ = block_diffusion_loss(model, tokens, cfg, generator=g).backward(), optimizer.step(), optimizer.zero_grad()
>>> ids, stats = generate(model, tokens[:, :12], cfg, max_new_tokens=20)
>>> ids.shape, stats.nfe <= 3 * 4 + 2
(torch.Size([2, 32]), True)
"""

import importlib
from typing import Any

from .batches import BlockDiffusionCollator, DiffusionLoss, NoisyBatches, noised_batch
from .config import STRATEGIES, BlockDiffusionConfig
from .decoder import BlockDecoder, decoding
from .fit import declare, declared
from .loss import (
    DiffusionTerms,
    Noised,
    block_diffusion_loss,
    denoiser_logits,
    diffusion_terms,
    draw_times,
    noise,
    weighted_terms,
)
from .masks import block_causal_mask, block_diff_mask
from .sampler import GenerationStats, generate
from .sparse import BlockState, Selection, SparsePolicy, recall_and_mass
from .transfer import bounded, propose, transfer

__all__ = [
    "STRATEGIES",
    "BlockDecoder",
    "BlockDiffusionCollator",
    "BlockDiffusionConfig",
    "BlockState",
    "DiffusionLoss",
    "DiffusionTerms",
    "GenerationStats",
    "Noised",
    "NoisyBatches",
    "Selection",
    "SparsePolicy",
    "block_causal_mask",
    "block_diff_mask",
    "block_diffusion_loss",
    "bounded",
    "declare",
    "declared",
    "decoding",
    "denoiser_logits",
    "diffusion_terms",
    "draw_times",
    "generate",
    "noise",
    "noised_batch",
    "propose",
    "recall_and_mass",
    "transfer",
    "weighted_terms",
]


def __getattr__(name: str) -> Any:
    """`BlockDiffusionTrainer`, loaded when it is asked for."""
    if name == "BlockDiffusionTrainer":
        return importlib.import_module(f"{__name__}.trainer").BlockDiffusionTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
