"""Run twice with RANK and WORLD_SIZE=2, which meet through a file, and once alone: `poet_ranks_script.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gnomon.core.seeding import seeded
from gnomon.methods.optim.poet import (
    POETConfig,
    apply_poet,
    merge_on_schedule,
    poet_layers,
    poet_param_groups,
)

STEPS, INTERVAL, CUT = 8, 3, 5
"""Merges after steps 3 and 6; a checkpoint after 5, in the middle of an interval."""


def build(seed: int = 0) -> nn.Sequential:
    with seeded(3):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    cfg = POETConfig(block_size=2, init="keep", merge_interval=INTERVAL, target_modules=("*",), seed=seed)
    apply_poet(model, cfg)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(poet_param_groups(model, base_lr=0.01, poet_lr=0.03))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    rank: int,
    world: int,
    cut: Path | None = None,
) -> list[float]:
    """Losses of all rows after each step, from step `first` on."""
    plain = getattr(model, "module", model)
    merge_on_schedule(model, optimizer, clip=0.5)
    losses = []
    for t in range(first, STEPS):
        whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(t))
        x = whole[rank::world]
        optimizer.zero_grad()
        (model(x) - x[:, :4].sin()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.manual_seed(1000 * rank + t)  # ranks differ in what they would draw globally
        optimizer.step()
        with torch.no_grad():
            losses.append(float((plain(whole) - whole[:, :4].sin()).square().mean()))
        if cut is not None and t + 1 == CUT:
            torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, cut)
    return losses


def main(folder: Path) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kept: dict[str, Any] = {}
    if world == 1:
        model = build()
        kept["losses"] = train(model, optimizer_of(model), 0, 0, 1)
        resumed = build()
        optimizer = optimizer_of(resumed)
        state = torch.load(folder / "cut.pt", weights_only=True)
        resumed.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        kept["resumed"] = train(resumed, optimizer, CUT, 0, 1)
        torch.save(kept, folder / "alone.pt")
        return
    meeting = f"file://{folder.resolve() / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(build())
    cut = folder / "cut.pt" if rank == 0 else None
    kept["losses"] = train(model, optimizer_of(model), 0, rank, world, cut)
    # Rank 1 would draw other permutations; those of rank 0 must count, from the start and at each merge.
    other = nn.parallel.DistributedDataParallel(build(seed=rank))
    kept["other losses"] = train(other, optimizer_of(other), 0, rank, world)
    for kind, one in (("state", model), ("other", other)):
        kept[kind] = {name: value.clone() for name, value in one.module.state_dict().items()}
        kept[f"{kind} merges"] = [layer.merges for layer in poet_layers(one).values()]
    torch.save(kept, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
