"""The competitors of the POET study: factories `make(model, *, lr, weight_decay, total_steps, **options)`.

Hidden matrices differ in what is trained; embeddings, head and norms get AdamW at the same rate in all of them.
LoRA and OFT come from peft, on the model's usual initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gnomon.core.layers import is_conv1d, linears
from gnomon.methods.optim.baselines.galore import GaLore
from gnomon.methods.optim.numuon import MuonWithAdamW, split_muon_params
from gnomon.methods.optim.poet import (
    POETConfig,
    apply_poet,
    initial_weight,
    merge_on_schedule,
    merge_poet,
    poet_param_groups,
    record_spectra,
    spectrum_report,
)
from gnomon.studies import pretraining
from gnomon.studies.pretraining import Entrant

BETAS = (0.9, 0.999)
REFERENCE_BLOCK = 32
"""b at which the rotations' rate is the one that is tuned; elsewhere it is inversely proportional to b."""

ENTRANTS = {
    name: f"{__name__}:{name.replace('-', '_')}"
    for name in ("adamw", "adamw-normalized", "muon", "galore", "lora", "oft", "poet")
}
"""`module:factory` by name, as `--with` takes it."""


def adamw(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """AdamW on all weights, from the model's usual initial ones."""
    return Entrant(
        pretraining.adamw(model, lr=lr, weight_decay=weight_decay, betas=BETAS), watch=watch_spectra(model)
    )


def adamw_normalized(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """AdamW on all weights, from POET's initial ones: the control that tells the method from its initialisation."""
    with torch.no_grad():
        for layer in linears(model).values():
            if is_conv1d(layer):
                continue
            weight: torch.Tensor = layer.weight  # type: ignore[assignment]
            weight.copy_(initial_weight(weight, "normalized", None))
    return Entrant(
        pretraining.adamw(model, lr=lr, weight_decay=weight_decay, betas=BETAS), watch=watch_spectra(model)
    )


def muon(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> Entrant:
    """Muon on the hidden matrices (the project's own; on bfloat16 bit for bit `torch.optim.Muon`)."""
    optimizer = MuonWithAdamW(model, lr=lr, weight_decay=weight_decay, adamw_weight_decay=0.0, nesterov=True)
    return Entrant(optimizer, watch=watch_spectra(model))


def galore(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, rank: int, gap: int
) -> Entrant:
    """GaLore on the hidden matrices."""
    hidden, other = split_muon_params(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in hidden], "rank": rank, "weight_decay": weight_decay},
        {"params": [p for _, p in other], "weight_decay": 0.0},
    ]
    return Entrant(GaLore(groups, lr=lr, betas=BETAS, update_proj_gap=gap), watch=watch_spectra(model))


def lora(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, rank: int, alpha: float
) -> Entrant:
    """Frozen hidden matrices with adapters, trained from scratch."""
    import peft

    return _adapted(model, peft.LoraConfig(r=rank, lora_alpha=int(alpha), target_modules="all-linear"), lr)


def oft(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int, block_size: int) -> Entrant:
    """Rotations of the inputs only (R_o = I), without merging."""
    import peft

    config = peft.OFTConfig(
        r=0, oft_block_size=block_size, target_modules="all-linear", use_cayley_neumann=True
    )
    return _adapted(model, config, lr)


def poet(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    total_steps: int,
    clip: float = 1.0,
    seed: int = 0,
    **settings: Any,
) -> Entrant:
    """Rotations around frozen weights, merged on schedule.

    Args:
        clip: the loop's threshold, lowered after each merge.
        seed: of initial weights and permutations, beside the ambient random state.
        settings: of :class:`POETConfig`.
    """
    drawn = int(torch.randint(2**31, ()))  # from the stage's seed, so that each has weights of its own
    report = apply_poet(model, POETConfig(**settings, seed=(drawn + seed) % 2**31))
    watch = watch_spectra(model)
    rotations = lr
    if settings.get("variant", "bs") == "bs":
        rotations = lr * REFERENCE_BLOCK / settings["block_size"]
    optimizer = torch.optim.AdamW(poet_param_groups(model, lr, rotations), betas=BETAS)
    merge_on_schedule(model, optimizer, clip=clip)
    return Entrant(optimizer, finish=merge_poet, watch=watch, numbers=report.trainable + report.other)


def watch_spectra(model: nn.Module) -> Callable[[nn.Module], Mapping[str, float]]:
    """What has become of the spectra that the hidden matrices have now."""
    before = record_spectra(model)
    largest = {name: float(sigma[0]) for name, sigma in before.items()}

    def watch(trained: nn.Module) -> dict[str, float]:
        layers = spectrum_report(trained, before)
        found = {
            "spectrum drift": max(one.drift for one in layers.values() if one.drift is not None),
            "SVD entropy": sum(one.entropy for one in layers.values()) / len(layers),
            "growth of the top singular value": sum(
                one.sigma_max / largest[name] for name, one in layers.items()
            )
            / len(layers),
        }
        live = [one.orthogonality for one in layers.values() if one.orthogonality is not None]
        return found | ({"orthogonality error": max(live)} if live else {})

    return watch


def _adapted(model: nn.Module, config: Any, lr: float) -> Entrant:
    """A model whose hidden matrices are frozen below adapters of peft; everything else trains."""
    import peft

    frozen = {id(layer.weight) for layer in linears(model).values()}
    config.target_modules = {
        name for name, m in model.named_modules() if id(getattr(m, "weight", None)) in frozen
    }
    adapted = peft.get_peft_model(model, config)  # changes `model` itself
    for p in model.parameters():
        p.requires_grad_(p.requires_grad or id(p) not in frozen)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, betas=BETAS, weight_decay=0.0
    )
    return Entrant(optimizer, finish=lambda _: adapted.merge_and_unload())
