"""SAGA: attention with fewer key heads than value heads, and Atop-N, an approximate choice of the N best positions.

Paper: "More Value per Key: Asymmetric Sparse Attention for Faster LLM Decoding", NeurIPS 2026, arXiv:2610.04753.
Here:  attention with three head counts (`attention`), Atop-N and other selectors behind one protocol (`select`), the
       formulas of traffic and recall (`cost`), conversion of pretrained models (`to_saga`, whose algebra is `align`
       and whose statistics are `calibrate`), distillation (`convert_and_finetune`), statistics of a choice
       (`selection_stats`), Transformers classes (`hf`).
Not here: the step's kernels (`gnomon.kernels.sparse_decode`), registration with the Auto classes (`import gnomon.hf`),
       `gnomon apply saga` (`apply`), the study.
Inferred: nearly all. Only the abstracts were available, so the definition of Atop-N (best score of each of N strided
       buckets), when it is on (single decoding steps), the conversion and all defaults are ours.
Differs from the paper: not known.
Limits: prompts are dense unless `sparse_prefill`; no sliding windows, latent attention, soft caps or sinks; a model of
       this type holds more than GQA with as many key heads, since caches of values stay: (H_k + H_v) L d.

>>> import tempfile, torch, gnomon.hf
>>> from transformers import AutoModelForCausalLM
>>> from gnomon.core.tiny import build                                   # or any model of yours with grouped queries
>>> model, tokens = build("tiny:llama-10k"), torch.arange(64).view(2, 32)
>>> config = SagaConfig(num_key_heads=1, num_value_heads=2, top_n=8)
>>> saga = to_saga(model, config, calibration=[tokens])
>>> out = saga.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=258)  # 8 positions per head and step
>>> with selection_stats(saga) as stats:
...     _ = saga.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=258)
>>> all(0 < layer.mass <= 1 for layer in stats.values())
True
>>> folder = tempfile.TemporaryDirectory()
>>> saga.save_pretrained(folder.name)
>>> again = AutoModelForCausalLM.from_pretrained(folder.name)
>>> bool((again(tokens).logits == saga(tokens).logits).all())
True
>>> round(cost_model(H_q=32, H_k=2, H_v=8, L=131072, N=512, d=128).speedup, 2)
7.53
"""

import importlib
from typing import Any

from gnomon.kernels.sparse_decode import sparse_decode

from .attention import dense_attention, head_map, sparse_attention
from .config import SELECTORS, SagaConfig
from .convert import INITS, Alignment, align_model, default_key_heads, to_saga
from .cost import Cost, cost_model, expected_recall
from .distill import STAGES, convert_and_finetune
from .interface import saga_attention, saga_attention_eager
from .model import configure, saga_config
from .select import Asked, Selector, choose, exact, select, selector_of
from .stats import LayerSelection, kept_mass, recall, selection_stats

__all__ = [
    "INITS",
    "SELECTORS",
    "STAGES",
    "Alignment",
    "Asked",
    "Cost",
    "LayerSelection",
    "SagaConfig",
    "Selector",
    "align_model",
    "choose",
    "configure",
    "convert_and_finetune",
    "cost_model",
    "default_key_heads",
    "dense_attention",
    "exact",
    "expected_recall",
    "head_map",
    "kept_mass",
    "recall",
    "saga_attention",
    "saga_attention_eager",
    "saga_config",
    "select",
    "selection_stats",
    "selector_of",
    "sparse_attention",
    "sparse_decode",
    "to_saga",
]


def __getattr__(name: str) -> Any:
    """Transformers classes, such as `SagaLlamaForCausalLM` and `SagaTrainer`: loaded when they are asked for."""
    if name == "SagaTrainer":
        return importlib.import_module(f"{__name__}.distill").trainer_class()
    if name.startswith("Saga"):
        return getattr(importlib.import_module(f"{__name__}.hf"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
