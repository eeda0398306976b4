"""Run by `torch.distributed.run` on two ranks, and once without a launcher: `python numuon_ranks_script.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gnomon.core.errors import NumericalFailure
from gnomon.core.seeding import seeded
from gnomon.methods.optim.numuon import MuonWithAdamW, RankSchedule

STEPS = 5


def build() -> nn.Sequential:
    with seeded(3):
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))


def optimizer_of(model: nn.Module) -> MuonWithAdamW:
    ranks = RankSchedule.piecewise([(0, 0.5), (0.6, 0.25)], total_steps=STEPS)
    return MuonWithAdamW(model, lr=0.02, rank_fraction=ranks, topk="lowrank", oversample=1)


def train(model: nn.Module, rank: int, world: int) -> MuonWithAdamW:
    optimizer = optimizer_of(model)
    for t in range(STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t))[rank::world]
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        torch.manual_seed(1000 * rank + t)  # ranks differ in what they would draw globally
        optimizer.step()
    return optimizer


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in model.named_parameters():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        found[name.removeprefix("module.")] = full.detach().clone()
    return found


def main(folder: Path) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kept: dict[str, Any] = {"begin": weights(build())}
    if world == 1:
        model = build()
        train(model, 0, 1)
        torch.save(kept | {"parallel": weights(model)}, folder / "alone.pt")
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(build())
    train(model, rank, world)
    kept["parallel"] = weights(model)
    sharded = build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    optimizer = train(sharded, rank, world)
    kept["sharded"] = weights(sharded)
    rows = torch.tensor([sharded[0].weight.to_local().shape[0]])
    all_rows = [torch.zeros_like(rows) for _ in range(world)]
    dist.all_gather(all_rows, rows)
    kept["local rows"] = [int(one) for one in all_rows]
    if rank == 0:  # only one rank's part of the gradient is bad: both must refuse
        sharded[0].weight.grad.to_local()[0] = float("nan")
    try:
        optimizer.step()
    except NumericalFailure as error:
        kept["refusal"] = str(error)
    torch.save(kept, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
