"""POET: train a model by rotating frozen weights from both sides, so that their spectra stay as initialised.

Paper: "Reparameterized LLM Training via Orthogonal Equivalence Transformation", NeurIPS 2025, arXiv:2506.08001 v4; the
       input-centric forward from "POET-X: Memory-efficient LLM Training by Scaling Orthogonal Transformation",
       ICML 2026, arXiv:2603.05500.
Here:  small rotations and their gradients (`cayley`), sparse rotations and the three forwards (`primitives`), settings
       and initialisations (`config`), the layer, wrapping and merging a model (`apply`), merging on schedule
       (`schedule`, `callback`), spectra and directions (`report`).
Not here: POET-XQ (a quantised frozen weight), fused kernels, sharded models, the study.
Differs from the paper: fully and block-stochastic primitives are one thing, n blocks on the first coordinates of a
       permuted vector. From the published code: the first permutation is folded into the stored weight, so that
       init="keep" keeps a pretrained model's function; a bias is added after the rotation and stays with its neuron;
       the fourth power of the Neumann form has the factor 1, as in the formula.
Inferred: independent sets on both sides of each layer in the fully stochastic variant; b rounded down there; after a
       merge the clipping threshold is a tenth and rises linearly; biases train with the base group.
Limits: a bfloat16 weight is rounded to bfloat16 at each merge (computed in float32), so its spectrum drifts by that;
       keep float32 weights and autocast. Even `neumann_terms` keep spectra better than odd ones. A checkpoint of a
       wrapped model loads into a wrapped model only: `merge_poet` before saving for others.

Shapes: W is d_o × d_i (outputs × inputs), W_eff = R_o W R_i, blocks are b × b.

>>> import tempfile, torch
>>> from transformers import AutoModelForCausalLM
>>> from gnomon.core.tiny import build                       # or any model of yours
>>> model, tokens = build("tiny:llama-10k"), torch.arange(64).view(2, 32)
>>> report = apply_poet(model, POETConfig(block_size=8, merge_interval=4))
>>> optimizer = torch.optim.AdamW(poet_param_groups(model, base_lr=3e-3, poet_lr=3e-3))
>>> schedule = merge_on_schedule(model, optimizer, clip=1.0)
>>> for _ in range(10):
...     loss = model(tokens, labels=tokens).loss
...     loss.backward()
...     _ = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
...     optimizer.step()
...     optimizer.zero_grad()
>>> schedule.merges, schedule.steps                          # merged after steps 4 and 8
(2, 2)
>>> folder = tempfile.mkdtemp()
>>> merge_poet(model).save_pretrained(folder)                # plain layers again
>>> loaded = AutoModelForCausalLM.from_pretrained(folder)
>>> bool((loaded(tokens).logits == model(tokens).logits).all())
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .apply import POETReport, apply_poet, merge_poet, poet_layers, poet_param_groups
from .cayley import (
    above,
    cayley,
    cayley_backward,
    cayley_neumann,
    cayley_neumann_backward,
    norm_bound,
    orthogonality_error,
    rotation,
    skew,
)
from .config import POETConfig, blocks_of, initial_weight, rotation_numbers
from .layer import POETLinear
from .report import (
    LayerReport,
    hyperspherical_energy,
    record_spectra,
    singular_values,
    spectrum_drift,
    spectrum_report,
    svd_entropy,
)
from .schedule import MergeSchedule, clip_factor, merge_on_schedule

if TYPE_CHECKING:
    from .callback import POETCallback

__all__ = [
    "LayerReport",
    "MergeSchedule",
    "POETCallback",
    "POETConfig",
    "POETLinear",
    "POETReport",
    "above",
    "apply_poet",
    "blocks_of",
    "cayley",
    "cayley_backward",
    "cayley_neumann",
    "cayley_neumann_backward",
    "clip_factor",
    "hyperspherical_energy",
    "initial_weight",
    "merge_on_schedule",
    "merge_poet",
    "norm_bound",
    "orthogonality_error",
    "poet_layers",
    "poet_param_groups",
    "record_spectra",
    "rotation",
    "rotation_numbers",
    "singular_values",
    "skew",
    "spectrum_drift",
    "spectrum_report",
    "svd_entropy",
]


def __getattr__(name: str) -> Any:
    """POETCallback, whose Transformers is loaded only when it is asked for."""
    if name != "POETCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .callback import POETCallback
    except ImportError as error:
        from gnomon.core.errors import MissingExtra

        raise MissingExtra("Transformers' Trainer (accelerate)", "train", "POETCallback") from error
    return POETCallback
