"""The competitors of the MGLU study: factories `make(model, *, lr, weight_decay, total_steps, **options)`.

Each takes a decoder with gated MLPs whose weights are drawn, and leaves it with the feed-forward layers that it stands
for. h, d, attention and the output projections are the same in all, but for the SwiGLU of equal bytes. All train with
AdamW and the paper's betas: matrices decay, vectors don't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import UsageError
from gnomon.core.layers import decoder_stack, sublayers, unwrap
from gnomon.methods.layers.mglu import (
    MGLUConfig,
    SwiMGLUMLP,
    hard_masks,
    mask_stats,
    mglu_layers,
    param_groups,
    replace_mlp,
)
from gnomon.studies.pretraining import Entrant

BETAS = (0.9, 0.99)
MATRICES = ("gate_proj", "up_proj", "down_proj")

ENTRANTS = {
    name: f"{__name__}:{name.replace('-', '_')}"
    for name in ("gelu", "swiglu", "swiglu-shared", "swiglu-bytes", "swimglu")
}
"""`module:factory` by name, as `--with` takes it."""


class GELUFeedForward(nn.Module):
    """gelu(x W) W_o: a layer without a gate."""

    def __init__(self, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.up_proj, self.down_proj = up_proj, down_proj

    def forward(self, x: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        out: Tensor = self.down_proj(F.gelu(self.up_proj(x)))
        return out


def gelu(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """A GELU layer of the gate's width: as many numbers as a SwiMGLU, without masks. No class can load it again."""
    for layer, name, mlp in gated(model):
        setattr(layer, name, GELUFeedForward(mlp.gate_proj, mlp.down_proj).train(layer.training))
    return Entrant(_adamw(model, lr, weight_decay), keep=False)


def swiglu(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """The model as it is."""
    for _ in gated(model):
        pass
    return Entrant(_adamw(model, lr, weight_decay))


def swiglu_bytes(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, n_masks: int
) -> Entrant:
    """SwiGLU so narrow that the whole feed-forward layer takes the bytes of a SwiMGLU with `n_masks`."""
    for _, _, mlp in gated(model):
        width = equal_bytes_width(mlp.gate_proj.out_features, n_masks)
        with torch.no_grad():
            for name in MATRICES:  # a part of the drawn weights is drawn, too
                old: nn.Linear = getattr(mlp, name)
                part = old.weight[:, :width] if name == "down_proj" else old.weight[:width]
                rows, columns = part.shape
                new = nn.Linear(columns, rows, bias=False, device=part.device, dtype=part.dtype)
                new.weight.copy_(part)
                setattr(mlp, name, new.train(old.training))
        mlp.intermediate_size = width
    settings: Any = unwrap(model).config
    settings.intermediate_size = width
    return Entrant(_adamw(model, lr, weight_decay))


def swiglu_shared(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """silu(x W) * (x W): gate and value are one matrix, without masks."""
    replace_mlp(model, MGLUConfig(n_masks=1, masked="neither"))
    return Entrant(torch.optim.AdamW(param_groups(model, weight_decay), lr=lr, betas=BETAS))


def swimglu(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, **settings: Any
) -> Entrant:
    """One matrix and masks; `settings` are those of :class:`MGLUConfig`."""
    replace_mlp(model, MGLUConfig(**settings))
    groups = param_groups(model, weight_decay)
    return Entrant(torch.optim.AdamW(groups, lr=lr, betas=BETAS), watch=watch_masks(model))


# ------------------------------------------------------------------------------------------------- helpers


def equal_bytes_width(width: int, n_masks: int) -> int:
    """d' at which SwiGLU's 48 h d' bits are SwiMGLU's (32 + n) h d."""
    return round(width * (32 + n_masks) / 48)


def gated(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(layer, attribute, MLP) of each layer of a decoder.

    Raises:
        UsageError: an MLP whose gate, value and output aren't three linear layers without biases.
    """
    for layer in decoder_stack(model).layers:
        mlp = sublayers(layer).mlp
        parts = [getattr(mlp, name, None) for name in MATRICES]
        if not all(isinstance(part, nn.Linear) and part.bias is None for part in parts):
            raise UsageError(
                f"{type(mlp).__name__} has no {', '.join(MATRICES)} without biases. The study compares with a GLU of "
                "this form: take a model of the Llama, Mistral, Qwen or OLMo kind."
            )
        yield layer, next(name for name, child in layer.named_children() if child is mlp), mlp


def feed_forward_bits(model: nn.Module) -> int:
    """Of all feed-forward layers as they are deployed: 16 a weight, 1 a mask's element."""
    total = 0
    for layer in decoder_stack(model).layers:
        for name, p in (mlp := sublayers(layer).mlp).named_parameters():
            total += 0 if name.endswith("mask_logits") else 16 * p.numel()
        if isinstance(mlp, SwiMGLUMLP) and mlp.proj.mask_logits is not None:
            total += mlp.proj.mask_logits.numel()  # type: ignore[operator]
    return total


def watch_masks(model: nn.Module) -> Callable[[nn.Module], Mapping[str, float]]:
    """The share of ones, and of bits that are others than those that the masks have now."""

    def bits(of: nn.Module) -> list[Tensor]:
        logits = (mlp.proj.mask_logits for mlp in mglu_layers(of).values())
        return [hard_masks(one.detach()) for one in logits if isinstance(one, Tensor)]

    before = bits(model)

    def watch(trained: nn.Module) -> dict[str, float]:
        changed = [(a != b.to(a.device)).double().mean() for a, b in zip(bits(trained), before, strict=True)]
        ratios = [one.gate_ratio for one in mask_stats(trained).values()]
        return {
            "gate share": sum(ratios) / len(ratios),
            "mask bits that changed": float(sum(changed)) / len(changed),
        }

    return watch


def _adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """The groups of `param_groups`, for models without masks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)
