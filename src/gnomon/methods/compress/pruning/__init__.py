r"""Pruning of decoders: allocators, pruners and importance scores, freely combined, exact in their budgets.

Paper: the baselines of "Lua-LLM: Learning Unstructured-Sparsity Allocation for Large Language Models", NeurIPS 2025:
       magnitude, Wanda, SparseGPT, MaskLLM; OWL, AlphaPruning, ATP.
Here:  which matrices (`targets`), importance (`importance`, `statistics`, `walk`), masks of one matrix (`masks`,
       `sparsegpt`, `maskllm`), shares of blocks (`allocators`, `allocate`), whole models (`plan`, `prune`), files
       (`export`).
Not here: Lua's learned thresholds (`compress.lua`), which are one more allocation.
Inferred: see the modules; ATP is recalled, not read.
Differs from the paper: the floors are as stated, where the released code removes one more; budgets are exact
       unless exact=False.
Limits: linear layers of the decoder layers only; experts that aren't `nn.Linear` stay dense. Sequential pruning needs
       layers that hand on nothing but the hidden state. Zeros save no memory unless the export's consumer uses them.

Shapes: W is [out, in]; a mask is True where a weight is kept; p is the share removed.

>>> import torch
>>> from gnomon.core.tiny import build                        # or any model of yours
>>> model, text = build("tiny:llama-10k"), [torch.arange(64).view(2, 32)]
>>> report = prune(model, "wanda", 0.6, allocation="owl", calib=text)
>>> report.removed == round(0.6 * report.weights), report.off
(True, 0)
"""

from ..calibration import Calib
from .allocate import ALLOCATIONS, Allocator, Request, allocate
from .allocation import Allocation, Shapes
from .allocators import (
    alpha_shares,
    atp_grid,
    atp_shares,
    exact_mean,
    hill_alpha,
    outlier_percentage,
    owl_shares,
)
from .counts import budget, fit_counts
from .export import load_masks, save_pruned, to_semi_structured
from .importance import METRICS, Metric, collect_importance
from .maskllm import MaskLLMConfig, hard_mask, initial_logits, learn_masks, masks_of, soft_mask
from .masks import (
    lowest,
    magnitude_mask,
    magnitude_scores,
    mask_from,
    nm_mask,
    uniform_ranks,
    wanda_mask,
    wanda_scores,
)
from .plan import METHODS, PRUNERS, PruneConfig
from .prune import prune
from .quota import Pattern, Quota
from .report import PruneReport
from .sparsegpt import Pruned, sparsegpt
from .targets import blocks, matrix, prunable, shapes_of

__all__ = [
    "ALLOCATIONS",
    "METHODS",
    "METRICS",
    "PRUNERS",
    "Allocation",
    "Allocator",
    "Calib",
    "MaskLLMConfig",
    "Metric",
    "Pattern",
    "PruneConfig",
    "PruneReport",
    "Pruned",
    "Quota",
    "Request",
    "Shapes",
    "allocate",
    "alpha_shares",
    "atp_grid",
    "atp_shares",
    "blocks",
    "budget",
    "collect_importance",
    "exact_mean",
    "fit_counts",
    "hard_mask",
    "hill_alpha",
    "initial_logits",
    "learn_masks",
    "load_masks",
    "lowest",
    "magnitude_mask",
    "magnitude_scores",
    "mask_from",
    "masks_of",
    "matrix",
    "nm_mask",
    "outlier_percentage",
    "owl_shares",
    "prunable",
    "prune",
    "save_pruned",
    "shapes_of",
    "soft_mask",
    "sparsegpt",
    "to_semi_structured",
    "uniform_ranks",
    "wanda_mask",
    "wanda_scores",
]
