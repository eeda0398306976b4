"""Lua-LLM: one pruning threshold per weight row, learnt end to end, allocates sparsity inside and across layers.

Paper: "Lua-LLM: Learning Unstructured-Sparsity Allocation for Large Language Models", NeurIPS 2025 (OpenReview
       CA1xVSvn72).
Here:  uniform scores (`scores`), soft and hard masks and the budget's regulariser (`masks`), the mask of a layer
       (`parametrization`), the exact budget (`budget`), a model's thresholds (`allocator`), their training (`fitting`,
       `trainer`), model folders (`apply`).
Not here: importance, pruners, the other allocators (`..pruning`), the study. Fine-tuning of the pruned model, and the
       kernels that would make its zeros fast.
Inferred: the exact budget by one offset of all thresholds, ties by importance; thresholds per column and per matrix,
       which keep the scores of the rows and λ = n; the regulariser on kept weights as default, because λ_reg = 16 was
       tuned with the code that has it; `min_kept`.
Differs from the paper: a weight stays where s > t, not s ≥ t, so that t = p is Wanda; no weight decay by default;
       ranks by sorting, which is O(n log n) a row, in two bytes each; grouped heads are counted once.
Limits: zeros save neither memory nor time without a kernel for them. Learning needs the memory of a forward and a
       backward pass, the ranks, and one masked matrix more per layer. Fused experts of mixtures stay dense.

Shapes: W, S and s are m × n (outputs × inputs); t is m × 1, 1 × n or 1 × 1.

>>> import torch
>>> from gnomon.core.tiny import build                          # or any decoder of yours
>>> model, text = build("tiny:llama-10k"), [torch.arange(64).view(2, 32)]
>>> scores = collect_importance(model, text, metric="wanda")
>>> alloc = LuaAllocator(model, scores, sparsity=0.6)
>>> _ = alloc.fit(text, steps=5)                                # 500 on a model that was trained
>>> report = alloc.apply()
>>> report.removed == round(0.6 * report.total), report.trained
(True, 384)
"""

from typing import TYPE_CHECKING, Any

from ..pruning import collect_importance, prune
from .allocator import TOLERANCE, LuaAllocator, count_thresholds
from .budget import ExactMasks, exact_masks
from .fitting import LuaFit, allocate, fit
from .masks import budget_loss, hard_mask, masked, soft_mask
from .parametrization import GRANULARITIES, MaskedWeight
from .report import SparsityReport
from .scores import ranks, uniform_scores

if TYPE_CHECKING:
    from .trainer import LuaCallback, LuaTrainer

__all__ = [
    "GRANULARITIES",
    "TOLERANCE",
    "ExactMasks",
    "LuaAllocator",
    "LuaCallback",
    "LuaFit",
    "LuaTrainer",
    "MaskedWeight",
    "SparsityReport",
    "allocate",
    "budget_loss",
    "collect_importance",
    "count_thresholds",
    "exact_masks",
    "fit",
    "hard_mask",
    "masked",
    "prune",
    "ranks",
    "soft_mask",
    "uniform_scores",
]


def __getattr__(name: str) -> Any:
    """Classes that subclass Transformers' Trainer are imported when they are asked for."""
    if name in ("LuaCallback", "LuaTrainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
