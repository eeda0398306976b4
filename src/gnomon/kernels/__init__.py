"""Hot loops: per kernel a plain torch reference, C++ for CPUs, Triton for GPUs, and a chooser that says why."""

from __future__ import annotations

__all__ = ["chosen"]


def chosen(device: str = "cpu") -> dict[str, str]:
    """What runs for each kernel on such a device, and why: `gnomon doctor` and every result print it."""
    from . import bf16, cache_sim, mglu, nf12, sparse_decode

    choices = {
        "bf16": bf16.choice(device),
        "cache_sim": cache_sim.choice(device),
        "mglu": mglu.choice(device),
        "nf12": nf12.choice(device),
        "sparse_decode": sparse_decode.choice(device),
    }
    return {name: f"{choice.name} ({choice.reason})" for name, choice in choices.items()}
