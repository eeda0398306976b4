"""The competitors of the NuMuon study: factories `make(model, *, lr, weight_decay, total_steps)`.

Hidden matrices differ in their optimizer only. Embeddings, head and vectors get AdamW at the same learning rate
and without decay in all of them. Muon is our own at full rank, without Nesterov's momentum: the same code as NuMuon,
so that the rank is all that differs, and on bfloat16 bit for bit what `torch.optim.Muon` computes (the stage
`exact_update` checks it); a CPU without bfloat16 products would take minutes for each of torch's steps.
"""

from __future__ import annotations

import torch
from torch import nn

from gnomon.methods.optim.numuon import MuonWithAdamW, RankSchedule
from gnomon.studies import pretraining

BETAS = (0.9, 0.95)
PIECES = ((0.0, 1.0), (0.35, 0.5), (0.6, 0.25))
"""Where a piecewise rank falls, as shares of the run; the paper's breakpoints aren't stated (inferred)."""
LOWEST = 0.25
HOLD, END = 0.1, 0.8

OPTIMIZERS = {
    name: f"{__name__}:{name.replace('-', '_')}"
    for name in ("adamw", "muon", "numuon-fixed", "numuon-cosine", "numuon-piecewise")
}
"""`module:factory` by name, as `--with` takes it."""


def adamw(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> torch.optim.Optimizer:
    """AdamW on all parameters; decay on the hidden matrices."""
    return pretraining.adamw(model, lr=lr, weight_decay=weight_decay, betas=BETAS)


def muon(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> torch.optim.Optimizer:
    """Muon on the hidden matrices."""
    return _numuon(model, lr, weight_decay, RankSchedule.fixed(1.0))


def numuon_fixed(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int
) -> torch.optim.Optimizer:
    """A quarter of each matrix's rank throughout."""
    return _numuon(model, lr, weight_decay, RankSchedule.fixed(LOWEST))


def numuon_cosine(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int
) -> torch.optim.Optimizer:
    """The paper's schedule: full rank in the first tenth, then a cosine to a quarter at four fifths of the run."""
    return _numuon(
        model, lr, weight_decay, RankSchedule.cosine(1.0, LOWEST, hold=HOLD, end=END, total_steps=total_steps)
    )


def numuon_piecewise(
    model: nn.Module, *, lr: float, weight_decay: float, total_steps: int
) -> torch.optim.Optimizer:
    """Full rank, then a half, then a quarter."""
    return _numuon(model, lr, weight_decay, RankSchedule.piecewise(PIECES, total_steps=total_steps))


def _numuon(model: nn.Module, lr: float, weight_decay: float, ranks: RankSchedule) -> MuonWithAdamW:
    return MuonWithAdamW(
        model,
        lr=lr,
        weight_decay=weight_decay,
        adamw_weight_decay=0.0,
        betas=BETAS,
        rank_fraction=ranks,
        topk="gram",
    )
