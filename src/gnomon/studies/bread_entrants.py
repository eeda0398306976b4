"""The competitors of the BREAD study: factories `make(model, *, lr, weight_decay, total_steps, **options)`.

All but LISA train what lies in the decoder's layers; embeddings, final norm and head stay. One grid of rates serves
all of them, so those that take plain gradient steps multiply it: `sgd_scale` times Adam's rate, `sign_scale` times it
for steps of a sign.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gnomon.core.layers import decoder_stack, linears
from gnomon.methods.optim.baselines.galore import GaLore
from gnomon.methods.optim.baselines.lisa import LISA
from gnomon.methods.optim.baselines.lomo import LOMO
from gnomon.methods.optim.bread import BlockOptimizer, preset
from gnomon.studies.pretraining import Entrant

BETAS = (0.9, 0.999)
PARTIAL = "-partial"
BLOCKWISE = (
    "badam",
    "bread-lora",
    "bread-lora+",
    "bread-sgd",
    "bread-signsgd",
    "bread-lora-partial",
    "bread-sgd-partial",
)
"""Forms of the method, and BAdam, which is it without an expansion."""
RIVALS = ("adamw", "lora", "galore", "lomo", "lisa")
COMPETITORS = (*BLOCKWISE, *RIVALS)


def maker(name: str) -> str:
    """`module:factory` of a competitor, as `--with` takes it."""
    return f"{__name__}:{'block_descent' if name in BLOCKWISE else name}"


def block_descent(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    total_steps: int,
    form: str,
    switch_every: int,
    rank: int,
    sgd_scale: float,
    sign_scale: float,
    order: str = "random",
    blocks: str = "layer",
) -> Entrant:
    """BAdam or a form of BREAD, by its name in `BLOCKWISE`; the order is drawn from the stage's seed."""
    name = form.removesuffix(PARTIAL)
    expansion = preset(name, rank=rank, lr_scale=sign_scale if name == "bread-signsgd" else sgd_scale)
    scope = None if expansion is None else "partial" if form.endswith(PARTIAL) else "all"
    drawn = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    optimizer = BlockOptimizer(
        model,
        lr=lr,
        betas=BETAS,
        weight_decay=weight_decay,
        blocks=blocks,
        switch_every=switch_every,
        order=order,  # type: ignore[arg-type]
        expansion=expansion,
        scope=scope,  # type: ignore[arg-type]
        generator=drawn,
    )
    return _closing(optimizer)


def everything(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """AdamW on all weights, which the base model is pretrained with."""
    return Entrant(torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=weight_decay))


def adamw(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """AdamW on all layers; weights narrower than float32 have float32 copies, as in mixed precision."""
    layers = _only_layers(model)
    if next(model.parameters()).dtype.itemsize < 4:  # one block that holds everything is AdamW
        optimizer = BlockOptimizer(
            model,
            lr=lr,
            betas=BETAS,
            weight_decay=weight_decay,
            blocks=[list(layers)],
            switch_every=total_steps + 1,
            order="fixed",
        )
        return _closing(optimizer)
    groups = _decaying(layers, weight_decay)
    return _entrant(torch.optim.AdamW(groups, lr=lr, betas=BETAS))


def lora(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, rank: int) -> Entrant:
    """LoRA from peft on all linear maps of the layers, α = 4 r as in the paper; W is frozen."""
    import peft

    frozen = {id(layer.weight) for layer in linears(model).values()}
    targets = {name for name, m in model.named_modules() if id(getattr(m, "weight", None)) in frozen}
    config = peft.LoraConfig(r=rank, lora_alpha=4 * rank, target_modules=targets)
    adapted = peft.get_peft_model(model, config)  # changes `model` itself
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=BETAS, weight_decay=0.0)
    return _entrant(optimizer, finish=lambda _: adapted.merge_and_unload())


def galore(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, rank: int, gap: int
) -> Entrant:
    """GaLore on the matrices of the layers, AdamW on their vectors."""
    groups = _decaying(_only_layers(model), weight_decay)
    groups[0]["rank"] = rank
    return _entrant(GaLore(groups, lr=lr, betas=BETAS, update_proj_gap=gap))


def lomo(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, sgd_scale: float) -> Entrant:
    """Plain steps during the backward pass, on everything in the layers."""
    optimizer = LOMO(list(_only_layers(model).items()), lr=lr * sgd_scale)
    return _closing(optimizer)


def lisa(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, layers: int, switch_every: int
) -> Entrant:
    """Two layers at a time, drawn anew at each switch; embeddings and head train throughout."""
    drawn = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    optimizer = LISA(
        model,
        lr=lr,
        betas=BETAS,
        weight_decay=weight_decay,
        layers=layers,
        switch_every=switch_every,
        generator=drawn,
    )
    return _closing(optimizer)


# -------------------------------------------------------------------------------------- ranks of equal bytes


def lora_rank(model: nn.Module, target: int) -> int:
    """The smallest rank at which LoRA's two float32 moments take at least `target` bytes."""
    one = 8 * sum(sum(shape) for shape in _shapes(model))
    return max(1, math.ceil(target / one))


def galore_rank(model: nn.Module, target: int, width: int = 4) -> int:
    """The smallest rank at which GaLore's projectors and moments take at least `target` bytes; at most full rank.

    Args:
        width: bytes of a weight, which its state has too.
    """
    shapes = _shapes(model)
    matrices = {id(layer.weight) for layer in linears(model).values()}
    vectors = sum(p.numel() for p in _layers(model).values() if id(p) not in matrices)

    def needed(rank: int) -> int:
        ranks = [min(rank, *shape) for shape in shapes]
        numbers = sum((min(s) + 2 * max(s)) * r for s, r in zip(shapes, ranks, strict=True))
        return width * (numbers + 2 * vectors)

    full = max(min(shape) for shape in shapes)
    return next((rank for rank in range(1, full) if needed(rank) >= target), full)


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(model.get_parameter(f"{name}.weight").shape) for name in linears(model)]


def _layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the decoder's layers by name."""
    inside = f"{decoder_stack(model).name}."
    return {name: p for name, p in model.named_parameters() if name.startswith(inside)}


def _only_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """The same, and everything else is frozen."""
    found = _layers(model)
    for name, p in model.named_parameters():
        p.requires_grad_(name in found)
    return found


def _decaying(layers: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which don't."""
    return [
        {"params": [p for p in layers.values() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in layers.values() if p.ndim < 2], "weight_decay": 0.0},
    ]


def _closing(optimizer: BlockOptimizer | LOMO) -> Entrant:
    """Its hooks go, and adapters are merged, after the last step."""

    def finish(trained: nn.Module) -> nn.Module:
        optimizer.close()
        return trained

    return _entrant(optimizer, finish=finish)


def _entrant(optimizer: torch.optim.Optimizer, **more: Any) -> Entrant:
    numbers = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return Entrant(optimizer, numbers=numbers, **more)
