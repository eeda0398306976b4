"""MGLU: a gated feed-forward layer with one weight matrix, split into gate and value by learned binary masks.

Paper: "Masked Gated Linear Unit", NeurIPS 2025, arXiv:2506.23225.
Here:  masks with the straight-through estimator and their sum over routes (`moeg`), the layers (`modules`), whole
       models (`model`: `replace_mlp`, `freeze_masks`, `mask_stats`, `param_groups`), Transformers classes (`hf`);
       top-k routed, fixed and partly masked variants (`MGLUConfig`).
Not here: FlashMGLU's kernels (`gnomon.kernels.mglu`), registration with the Auto classes (`import gnomon.hf`), the
       study.
Inferred: equations 1 to 3 and the routing formulas, which are rebuilt from the paper's prose and listing; the packed
       layouts; W is drawn like the model's other matrices; vectors get no weight decay.
Differs from the paper: in float32 the value is xW - gate, which saves products; a routed layer in training computes all
       routes, chosen or not.

Shapes: x (..., h), weight (d, h), masks and logits (n_m, d, h); the paper's W is the transpose.

>>> import tempfile, torch, gnomon.hf
>>> from transformers import AutoModelForCausalLM
>>> from gnomon.core.tiny import build                                   # or any model of yours with a gated MLP
>>> model, tokens = build("tiny:llama-10k"), torch.arange(64).view(2, 32)
>>> model = replace_mlp(model, MGLUConfig(n_masks=2))
>>> optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=3e-3)
>>> for _ in range(10):
...     _ = model(tokens, labels=tokens).loss.backward(), optimizer.step(), optimizer.zero_grad()
>>> folder = tempfile.TemporaryDirectory()
>>> model.save_pretrained(folder.name)
>>> again = AutoModelForCausalLM.from_pretrained(folder.name)
>>> bool((again(tokens).logits == model(tokens).logits).all())
True
>>> packed = freeze_masks(again)                                         # 16 + 2 bits a weight in bfloat16
>>> torch.testing.assert_close(packed(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
"""

import importlib
from typing import Any

from gnomon.kernels.mglu import flash_mglu

from .config import MASKED, MGLUConfig
from .model import MaskStats, freeze_masks, mask_stats, mglu_layers, param_groups, replace_mlp
from .modules import LAYOUTS, FrozenMGLULinear, MGLULinear, SwiMGLUMLP
from .moeg import gate_value, hard_masks, mglu, mix, straight_through, top_k_routes

__all__ = [
    "LAYOUTS",
    "MASKED",
    "FrozenMGLULinear",
    "MGLUConfig",
    "MGLULinear",
    "MaskStats",
    "SwiMGLUMLP",
    "flash_mglu",
    "freeze_masks",
    "gate_value",
    "hard_masks",
    "mask_stats",
    "mglu",
    "mglu_layers",
    "mix",
    "param_groups",
    "replace_mlp",
    "straight_through",
    "top_k_routes",
]


def __getattr__(name: str) -> Any:
    """Transformers classes, such as `MGLULlamaForCausalLM`: loaded when they are asked for."""
    if name.startswith("MGLU"):
        return getattr(importlib.import_module(f"{__name__}.hf"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
