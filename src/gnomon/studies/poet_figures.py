"""Figures of the POET study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnomon.lab import Done

if TYPE_CHECKING:
    import pandas as pd

MAIN = ("adamw", "adamw-normalized", "poet-bs", "poet-fs")
"""Competitors whose curves are drawn; the others would hide them."""


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss while training, and at its end. Left: means over seeds, bands from the smallest to the largest. Right: each
    point is one seed of one competitor, by trained numbers.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), width_ratios=[3, 2])
    final = records[records["metric"] == "loss"]
    curves = of_judged(records, "loss while training")
    for i, name in enumerate(n for n in MAIN if n in set(final["method"])):
        by_step = curves[curves["method"] == name].groupby("step")["value"]
        left.plot(by_step.mean().index, by_step.mean(), color=f"C{i}", label=name)
        left.fill_between(
            by_step.mean().index, by_step.min(), by_step.max(), color=f"C{i}", alpha=0.2, linewidth=0
        )
    left.set(xlabel="step", ylabel="loss (nats per token)")
    left.legend(fontsize=8)
    numbers = records[records["metric"] == "trained numbers"].groupby("method")["value"].mean()
    for i, (name, rows) in enumerate(final.groupby("method", sort=False)):
        apart = numbers[name] * 1.02 ** (
            i % 5 - 2
        )  # competitors that train equally many numbers lie side by side
        right.plot([apart] * len(rows), rows["value"], "osDv^"[i % 5], markersize=4, color=f"C{i}", alpha=0.8,
                   label=str(name))  # fmt: skip
    right.set(xlabel="trained numbers", ylabel="final loss", xscale="log")
    right.xaxis.set_minor_formatter("")
    right.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    fig.savefig(path, bbox_inches="tight")


def spectra(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What training does to spectra. Left: SVD entropy of the hidden matrices (1: equal singular values). Middle:
    growth of the largest singular value, mean over matrices. Right: largest drift of a singular value in any matrix;
    the dashed line is the limit of the claim for the Neumann form, 0.03.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(10.2, 3.2))
    panels = (
        ("SVD entropy", ("adamw", "adamw-normalized", "poet-bs", "poet-fs")),
        ("growth of the top singular value", ("adamw", "adamw-normalized", "poet-bs", "poet-fs")),
        ("spectrum drift", ("poet-bs", "poet-bs-k2", "poet-bs-exact", "poet-fs")),
    )
    for ax, (metric, names) in zip(axes, panels, strict=True):
        rows = of_judged(records, f"{metric} while training")
        for i, name in enumerate(names):
            by_step = rows[rows["method"] == name].groupby("step")["value"].mean()
            if len(by_step):
                ax.plot(by_step.index, by_step, label=name, color=f"C{i}")
        ax.set(xlabel="step", title=metric)
        ax.legend(fontsize=7)
    axes[2].set_yscale("log")
    axes[2].axhline(0.03, color="grey", linestyle="--", linewidth=0.8)
    fig.savefig(path)


def rates(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """How much the learning rate matters. Loss at the tuned rate and a factor above and below it; each line is one
    seed.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(5.6, 3.4))
    names = list(records[records["metric"] == "spread of loss over learning rates"]["method"].unique())
    seeds = set(records[records["metric"] == "loss"]["seed"])
    for i, name in enumerate(names):
        options = next(one.args["options"] for one in done["pretrain"] if one.args["method"] == name)
        for seed in seeds:
            points = sorted(
                (one.args["lr"], one.value["loss"])
                for one in done["pretrain"]
                if (one.args["method"], one.args["seed"], one.args["options"]) == (name, seed, options)
            )
            label = name if seed == min(seeds) else None
            ax.plot(*zip(*points, strict=True), "o-", color=f"C{i}", markersize=3, alpha=0.7, label=label)
    ax.set(xlabel="learning rate", ylabel="loss (nats per token)", xscale="log")
    ax.legend(fontsize=8)
    fig.savefig(path)


def sizes(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss by block size, and what a step costs. Left: each line is one seed. Right: seconds of a training step,
    median and middle 60 %, in turns on this machine.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.2))
    rows = records[records["metric"] == "loss by block size"]
    for seed, group in rows.groupby("seed"):
        left.plot(
            group["block size"].astype(int), group["value"], "o-", markersize=3, label=f"seed {int(seed)}"
        )
    left.set(xlabel="block size", ylabel="loss (nats per token)", xscale="log")
    left.set_xticks(sorted(rows["block size"].astype(int).unique()))
    left.xaxis.set_major_formatter("{x:.0f}")
    left.xaxis.set_minor_formatter("")
    times = records[records["metric"] == "seconds of a step"]
    for i, (_, group) in enumerate(times.groupby("method", sort=False)):
        low, middle, high = np.quantile(group["value"], (0.2, 0.5, 0.8))
        right.errorbar(middle, i, xerr=[[middle - low], [high - middle]], fmt="o", capsize=3, color=f"C{i}")
    right.set_yticks(range(times["method"].nunique()), list(times["method"].unique()))
    right.set(xlabel="seconds of a step")
    right.set_xlim(left=0)
    fig.savefig(path)


def of_judged(records: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Curves at the seeds and learning rates that final losses were measured at."""
    final = records[records["metric"] == "loss"]
    wanted = set(zip(final["method"], final["seed"], final["lr"], strict=True))
    rows = records[records["metric"] == metric]
    keys = zip(rows["method"], rows["seed"], rows["lr"], strict=True)
    return rows[[key in wanted for key in keys]]
