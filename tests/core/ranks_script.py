"""Run by test_train_ranks.py, alone and under torchrun: trains a small model, saves what each rank ended with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded
from gnomon.core.train import TrainConfig, train


class Bigram(nn.Module):
    """A next-token model with Transformers' face, so that this script need not import Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        logits = self.table(input_ids)[:, :-1].flatten(0, 1)
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
        )


class Padded:
    """Batches of four rows of very unequal length."""

    def __init__(self, rows: int = 4) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(0)

    def __next__(self) -> dict[str, Tensor]:
        ids = torch.randint(11, (self.rows, 9), generator=self.generator)
        lengths = torch.randint(2, 10, (self.rows, 1), generator=self.generator)
        return {"input_ids": ids, "attention_mask": (torch.arange(9) < lengths).long()}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Owner:
    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder

    def snapshot(self) -> list[dict[str, Any]]:
        return []

    def restore(self, records: list[dict[str, Any]]) -> None:
        pass


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "alone")
    with seeded(1):
        model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # unlike Adam, feels the scale of a gradient
    config = TrainConfig(steps=5, warmup=2, accumulate=2, clip=None, checkpoint_every=2)
    result = train(model, Padded(), optimizer, config, resume=Owner(out / f"checkpoints-{rank}"))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    refusal = ""
    try:
        train(model, Padded(rows=3), optimizer, TrainConfig(steps=1))
    except UsageError as error:
        refusal = str(error)
    end = {
        "weights": weights,
        "losses": result.losses,
        "tokens": result.tokens,
        "refusal": refusal,
    }
    torch.save(end, out / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
