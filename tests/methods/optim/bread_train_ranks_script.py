"""Two ranks run it, and one process without a launcher: `python bread_train_ranks_script.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.core.train import TrainConfig, train
from gnomon.methods.optim.baselines.lomo import LOMO
from gnomon.methods.optim.bread import BlockOptimizer, preset

STEPS = 5
METHODS = ("bread-lora+", "bread-sgd", "lomo")


class Batches:
    """Four rows of random tokens, the same on every rank, which keeps its share."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __next__(self) -> torch.Tensor:
        return torch.randint(0, 259, (4, 8), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(method: str, rank: int) -> dict[str, torch.Tensor]:
    with seeded(0 if method == "lomo" else rank):  # ranks begin apart: the first one's weights must win
        model = build("tiny:llama-10k")
    optimizer: Any
    if method == "lomo":
        optimizer = LOMO(model, lr=0.05)
    else:
        optimizer = BlockOptimizer(
            model,
            lr=3e-3,
            switch_every=2,
            expansion=preset(method, rank=2, lr_scale=10.0),
            generator=torch.Generator().manual_seed(rank),
        )
    train(model, Batches(), optimizer, TrainConfig(steps=STEPS, clip=1.0, accumulate=2))
    optimizer.close()
    return weights(model)


def main(folder: Path) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kept: dict[str, Any] = {method: trained(method, rank) for method in METHODS}
    torch.save(kept, folder / ("alone.pt" if world == 1 else f"{rank}.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
