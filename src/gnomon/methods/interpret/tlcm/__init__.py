"""Transformer Layer Correction Mechanism: how layer i+1 undoes part of what layer i wrote.

Paper: "LLM Layers Immediately Correct Each Other", NeurIPS 2025, OpenReview 7DY7kB8wyZ, arXiv 2609.07876.
Here:  every measurement of the paper. `capture` records the contributions c_i = Attn_i + MLP_i of all layers;
       `similarity`, `adjacent`, `counts`, `token_table`, `position_curve` describe their cosines;
       `null_gaussian` and `null_cross_token` are what to compare them with; `alpha_sweep`, `layer_jacobian`,
       `decompose` and `linearity_error` ask the next layer causally.
Not here: the study with its claims, and the training of checkpoints for the emergence experiment.
Inferred: the steering tools (future work in the paper) and the denominator of `linearity_error`.
Differs from the paper: statistics leave the first token out by default; thresholds in units of the Gaussian
       null (`sigma_threshold`) are offered for narrow models.

Shapes: n layers, B sequences, T positions, d hidden width. Layer pairs (i, i+1) are named by i.

>>> import torch, transformers
>>> config = transformers.LlamaConfig(
...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
>>> model = transformers.LlamaForCausalLM(config)
>>> trace = capture(model, torch.arange(3, 99)[None])         # 96 tokens, of which the first is not counted
>>> M = similarity(trace)                                      # mean cosine of all layer pairs over tokens
>>> M.adjacent.shape, counts(trace).shape, float(null_cross_token(trace).std.max()) < 1
(torch.Size([3]), torch.Size([95]), True)
>>> opposed = alpha_sweep(model, trace, layer=1, token=40, alphas=[-1, 0, 1])
>>> bool(opposed[1].isclose(adjacent(trace)[1, 39], atol=1e-6))  # alpha = 0 changes nothing
True
>>> J = layer_jacobian(model, trace, layer=1, token=40)
>>> values, weights, strength = decompose(J, trace.contribution[1, 0, 40])
"""

from .cosines import (
    THRESHOLD,
    PositionCurve,
    RunningSimilarity,
    SimMatrix,
    adjacent,
    counts,
    position_curve,
    sigma_threshold,
    similarity,
)
from .jacobian import (
    Decomposition,
    Spectrum,
    alpha_sweep,
    decompose,
    layer_jacobian,
    linearity_error,
    symmetric_spectrum,
)
from .next_layer import NextLayer
from .nulls import CrossTokenNull, GaussianNull, null_cross_token, null_gaussian
from .steering import steering_resistance, surviving_gain, unresisted_part
from .tokens import CLASSES, token_class, token_table
from .trace import Trace, capture

__all__ = [
    "CLASSES",
    "THRESHOLD",
    "CrossTokenNull",
    "Decomposition",
    "GaussianNull",
    "NextLayer",
    "PositionCurve",
    "RunningSimilarity",
    "SimMatrix",
    "Spectrum",
    "Trace",
    "adjacent",
    "alpha_sweep",
    "capture",
    "counts",
    "decompose",
    "layer_jacobian",
    "linearity_error",
    "null_cross_token",
    "null_gaussian",
    "position_curve",
    "sigma_threshold",
    "similarity",
    "steering_resistance",
    "surviving_gain",
    "symmetric_spectrum",
    "token_class",
    "token_table",
    "unresisted_part",
]
