"""Two ranks run it, and one process without a launcher: `python bread_ranks_script.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded
from gnomon.methods.optim.baselines.lomo import LOMO
from gnomon.methods.optim.bread import BlockOptimizer, preset

STEPS = 5
METHODS = ("bread-lora+", "bread-sgd", "lomo")
BLOCKS = [["0"], ["2"], ["4"]]


def build(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1))


def trained(method: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    model = build(0 if method == "lomo" else rank)  # ranks begin apart: the first one's weights must win
    optimizer: Any
    if method == "lomo":
        optimizer = LOMO(model, lr=0.05)
    else:
        expansion = preset(method, rank=2, lr_scale=5.0)
        generator = torch.Generator().manual_seed(rank)
        optimizer = BlockOptimizer(
            model, lr=0.01, blocks=BLOCKS, switch_every=2, expansion=expansion, generator=generator
        )
    for t in range(STEPS):
        optimizer.zero_grad()
        for part in torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(t)):  # two batches a step
            x = part[rank::world]
            ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
        optimizer.step()
    optimizer.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(folder: Path) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        torch.save({method: trained(method, 0, 1) for method in METHODS}, folder / "alone.pt")
        return
    dist.init_process_group("gloo")
    kept: dict[str, Any] = {method: trained(method, rank, world) for method in METHODS}
    model, wrapped = build(), nn.parallel.DistributedDataParallel(build())
    optimizer = BlockOptimizer(model, blocks=BLOCKS)
    kept["state's world"] = optimizer.state_dict()["bread"]["world"]
    kept["refusals"] = []
    for act in (lambda: BlockOptimizer(wrapped, blocks=BLOCKS), lambda: LOMO(wrapped)):
        try:
            act()
        except UsageError as error:
            kept["refusals"].append(str(error))
    for p in model.parameters():  # someone thaws and wraps the model behind the optimizer's back
        p.requires_grad_(True)
    try:
        nn.parallel.DistributedDataParallel(model)(torch.zeros(1, 6))
    except UsageError as error:
        kept["refusals"].append(str(error))
    torch.save(kept, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
