r"""Model Shapley: what every parameter, row, neuron, head or layer is worth to the loss, by one backward pass a batch.

Paper: "MODEL SHAPLEY: Find Your Ideal Parameter Player via One Gradient Backpropagation", NeurIPS 2025 (OpenReview
       9ccmoYhZue; no arXiv id known).
Here:  scores (`attribution`, `curvature`, `collect`), players (`layout`), selection (`scores`), deactivation, targeted
       fine-tuning (`finetune`, `callback`), the guided GPTQ Hessian (`hessian`), oracles (`game`), rivals and the
       released code's variants (`rivals`).
Not here: GPTQ (`methods.compress.gptq`), the study.
Inferred: equations 6 and 7 are reconstructed from the prose, Remark 4.7, Algorithm 2 and the code; the pooling of
       `pool="game"`; a head's key and value rows under grouped queries; ranking by signed φ.
Differs from the paper: the plus sign before the quadratic part. Removing players from L gives
       :math:`\phi_i = -g_i\theta_i + \frac{1}{2}\theta_i(H\theta)_i`, which on a quadratic loss is the exact value;
       the minus of Algorithm 2 with the gradient at θ doesn't (`curvature_sign="paper"`). The Fisher is that of
       sequences, times their tokens. Everything else is frozen in fine-tuning.
Limits: far from a quadratic loss the values aren't efficient; absolute ranks keep harmful units; see the card.

Shapes: B sequences, T tokens; W is out × in.

>>> import torch
>>> from gnomon.core.tiny import build                        # or any decoder of yours
>>> model, text = build("tiny:llama-10k"), [torch.arange(64).view(4, 16)]
>>> scores = ModelShapley(model, units="mlp_neuron").fit(text).scores()
>>> scores.phi["model.layers.0.mlp"].shape, scores.n
(torch.Size([24]), 4)
>>> best = select_top(scores, 0.5, by="signed")
>>> with deactivate(model, best):                             # without the other half
...     print(model.model.layers[0].mlp.down_proj.weight.abs().sum(0).count_nonzero().item())
12
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attribution import EfficiencyGap, ModelShapley
from .curvature import gram_scores
from .deactivate import deactivate
from .finetune import MaskedTraining
from .game import (
    aumann_shapley,
    coalitions,
    exact_shapley,
    permutation_shapley,
    quadratic_shapley,
    shapley_of_table,
)
from .hessian import SecondOrder, second_order, shapley_gptq_hessian
from .layout import Group, Layout, Part, layout_of
from .loss import sequence_nll
from .rivals import gradient_scores, random_scores, released_scores, trace_scores, wanda_scores
from .scores import ShapleyScores, UnitMasks, select_top

if TYPE_CHECKING:
    from .callback import MaskedFineTuning

__all__ = [
    "EfficiencyGap",
    "Group",
    "Layout",
    "MaskedFineTuning",
    "MaskedTraining",
    "ModelShapley",
    "Part",
    "SecondOrder",
    "ShapleyScores",
    "UnitMasks",
    "aumann_shapley",
    "coalitions",
    "deactivate",
    "exact_shapley",
    "gradient_scores",
    "gram_scores",
    "layout_of",
    "permutation_shapley",
    "quadratic_shapley",
    "random_scores",
    "released_scores",
    "second_order",
    "select_top",
    "sequence_nll",
    "shapley_gptq_hessian",
    "shapley_of_table",
    "trace_scores",
    "wanda_scores",
]


def __getattr__(name: str) -> Any:
    """MaskedFineTuning, whose Transformers is loaded only when it is asked for."""
    if name != "MaskedFineTuning":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .callback import MaskedFineTuning
    except ImportError as error:
        from gnomon.core.errors import MissingExtra

        raise MissingExtra("Transformers' Trainer (accelerate)", "train", "MaskedFineTuning") from error
    return MaskedFineTuning
