"""Training that dies and goes on: a competitor whose optimizer raises after some steps, and the stage around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gnomon.core.models import load
from gnomon.core.seeding import seeded
from gnomon.lab import StageContext, load_rival
from gnomon.studies.pretraining import CURVE, Entrant, pretrain

LEFT = [0]
"""Steps until `dying` raises; below 0 it never does."""
TINY = {
    "seed": 3,
    "lr": 0.01,
    "model": "tiny:llama-10k",
    "scratch": True,
    "data": "generated:60",
    "steps": 10,
    "batch": 2,
    "length": 16,
    "accumulate": 2,
    "schedule": "wsd",
    "warmup": 0.1,
    "cooldown": 0.2,
    "clip": 1.0,
    "points": 5,
    "windows": 8,
}


def dying(model: torch.nn.Module, *, inside: str, **options: Any) -> Entrant:
    """The competitor `inside`, whose process is interrupted after some steps."""
    made = load_rival(inside)(model, **options)
    entrant = made if isinstance(made, Entrant) else Entrant(made)

    def die(*_: object) -> None:
        LEFT[0] -= 1
        if LEFT[0] == 0:
            raise KeyboardInterrupt

    entrant.optimizer.register_step_post_hook(die)
    return entrant


def trained(folder: Path, make: str, **settings: Any) -> tuple[dict, list, dict]:
    """Value, records and weights of `pretrain` in a folder, which may hold a checkpoint."""
    folder.mkdir(exist_ok=True)
    arguments = {**TINY, **settings}
    with seeded(arguments["seed"]):
        context = StageContext(folder, seed=arguments["seed"])
        value = pretrain(context, method="m", make=make, **arguments)
    weights = load(str(folder / "model"), dtype="float32").model.state_dict()
    return value, context.snapshot(), weights


def killed_and_uncut(
    folder: Path,
    make: str,
    *,
    after: int,
    train: Callable[..., tuple[dict, list, dict]] = trained,
    **settings: Any,
) -> None:
    """Assert that a run killed after so many steps ends as one that wasn't: losses, curves and weights are equal.

    Args:
        train: :func:`trained` or one like it, for another stage of as many steps.
    """
    options = settings.pop("options", {})
    whole, curve, weights = train(folder / "whole", make, options=options, **settings)
    again = {"options": {**options, "inside": make}, **settings}
    LEFT[0] = after
    try:
        train(folder / "cut", f"{__name__}:dying", **again)
        raise AssertionError("it was not killed")
    except KeyboardInterrupt:
        pass
    assert not (folder / "cut" / "model").exists()
    LEFT[0] = -1
    value, curve_again, weights_again = train(folder / "cut", f"{__name__}:dying", **again)
    steps = -1 - LEFT[0]
    assert 0 < steps < TINY["steps"], f"{steps} steps were made after the kill"  # it went on, and wasn't done
    assert {**value, "seconds": 0} == {**whole, "seconds": 0}
    assert curve_again == curve and {r["metric"] for r in curve} >= {"loss" + CURVE}
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
