"""MAGE: the exact first pass over an all-masked block names the cached tokens that all its later passes read.

Paper: "MAGE: All-[MASK] Block Already Knows Where to Look in (Block) Diffusion LLM", NeurIPS 2026, arXiv:2602.14209.
Here:  `Mage` and its rivals `Quest`, `SparseD`, `AvgQuery`, `Oracle`, `Window` and `Random` behind one protocol;
       recall, mass and alignment of queries (`observe`, `generate(measure=True)`), sets shared by a block against one
       for each query, losses along a fixed trajectory (`trajectory_nll`), reads and the speed-up they allow (`cost`).
Not here: the block-diffusion model and its sampler (`methods/layers/block_diffusion`, whose names are at hand here,
       too), kernels (`gnomon.kernels.sparse_decode`), the study; v1's finetuning and predicted budgets.
Inferred: the selection rule and settings, which are third parties' readings of the paper; a sparse commit; queries of a
       prompt's last tokens don't count; how Quest and SparseD are adapted to blocks, and that their incomplete last
       tile is always read; the first two layers dense for all but SparseD.
Differs from the paper: gathering isn't overlapped with the layer's MLP.
Limits: attention is Transformers' own over gathered keys, so reading less saves time at long contexts only; row by row
       no padding; sets are chosen by a stable sort in float32.

Shapes: R rows, Hq query and H key heads, B tokens of a block, N of the prefix, k of a set.

>>> import torch
>>> from gnomon.core.models import load
>>> model = load("tiny:llama-10k").model                       # or a block-diffusion model of yours
>>> cfg = BlockDiffusionConfig(block_size=8, mask_token_id=258, steps=4, strategy="static")
>>> prompt = torch.arange(96).view(1, 96)
>>> exact, dense = generate(model, prompt, cfg, max_new_tokens=16, force=True)
>>> ids, stats = generate(model, prompt, cfg, Mage(k=32, dense_layers=1), max_new_tokens=16, force=True)
>>> stats.kv_read < dense.kv_read, stats.active
(True, 1.0)
>>> seen = observe(model, prompt, cfg, {"mage": Mage(32), "window": Window(32)}, max_new_tokens=8, force=True)
>>> sorted(seen.table())
['mage', 'window']
"""

from ..block_diffusion import (
    BlockDiffusionConfig,
    GenerationStats,
    SparsePolicy,
    block_diff_mask,
    block_diffusion_loss,
    generate,
    recall_and_mass,
)
from .cost import attention_speedup, exact_reads, mage_reads
from .observe import Aligned, Observation, Seen, Watch, observe, trajectory_nll
from .selectors import COMMITS, AvgQuery, Mage, Oracle, Random, Selector, Window
from .tiled import Quest, SparseD
from .tiles import bounds, page_bounds, tile_sets

__all__ = [
    "COMMITS",
    "Aligned",
    "AvgQuery",
    "BlockDiffusionConfig",
    "GenerationStats",
    "Mage",
    "Observation",
    "Oracle",
    "Quest",
    "Random",
    "Seen",
    "Selector",
    "SparseD",
    "SparsePolicy",
    "Watch",
    "Window",
    "attention_speedup",
    "block_diff_mask",
    "block_diffusion_loss",
    "bounds",
    "exact_reads",
    "generate",
    "mage_reads",
    "observe",
    "page_bounds",
    "recall_and_mass",
    "tile_sets",
    "trajectory_nll",
]
