"""Ranks of a launcher (`accelerate launch`, `torchrun`) that share one run.

All ranks call the same stages at the same time, so that a stage may train across them; rank 0 alone writes.
Whether a stage still has to run is decided by rank 0 and broadcast, because another rank could otherwise see
the `done.json` that rank 0 has just written and skip what rank 0 is waiting in.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Self, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks; the default is a single process."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls) -> Self:
        """Read RANK and WORLD_SIZE and join the process group if there is more than one rank."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(_leave)  # threads of a group that is left open can abort the process as it ends
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Return when every rank is here."""
        self.agree(None)
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
