"""Figures of the Model Shapley study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.lab import Done

if TYPE_CHECKING:
    import pandas as pd

COLOURS = {
    "shapley": "C0",
    "gradient trace": "C1",
    "gradient": "C2",
    "random": "C7",
    "wanda": "C4",
    "printed sign": "C3",
    "released code": "C5",
}


def signs(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """The sign of the quadratic part. Left: values of players by formula against exact Shapley values, on random
    quadratic losses; with the derived plus they lie on the line, with the minus that the paper's algorithm prints they
    don't. Right: rank correlation with the exact values where the loss is not quadratic, a logistic regression; points
    are seeds.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6))
    values = records[records["metric"] == "value by formula"]
    for method, colour in (("shapley", "C0"), ("printed sign", "C3")):
        part = values[values["method"] == method]
        left.plot(part["exact"], part["value"], ".", color=colour, label=method, markersize=4)
    if len(values):
        ends = [float(values["exact"].min()), float(values["exact"].max())]
        left.plot(ends, ends, color="grey", linewidth=0.8)
    left.set(xlabel="exact Shapley value", ylabel="by formula")
    left.legend(fontsize=8)
    rows = records[records["metric"] == "rank correlation with brute force, logistic loss"]
    names = list(dict.fromkeys(rows["method"].astype(str)))
    for i, name in enumerate(names):
        part = rows[rows["method"] == name]["value"]
        right.plot(part, [i] * len(part), "o", color="C3" if "printed" in name else "C0", alpha=0.7)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.axvline(0, color="grey", linewidth=0.8)
    right.set(xlabel="rank correlation, logistic regression")
    fig.savefig(path)


def correlations(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """How well scores order neurons. Rank correlation with exact Shapley values of a game over a few neurons, with the
    loss when a neuron alone is left out, and between scores from the two halves of the probe text (dashed: 0.8). Each
    point is a trained model, bars are means.
    """
    import matplotlib.pyplot as plt

    kinds = (
        ("rank correlation with brute force", "brute force, neurons"),
        ("rank correlation with leave-one-out", "leave-one-out"),
        ("split-half rank correlation", "halves of the probe text"),
    )
    fig, axes = plt.subplots(1, 3, figsize=(10.5, 4.2), sharey=True)
    names = order(records, kinds[1][0])
    for ax, (metric, label) in zip(axes, kinds, strict=True):
        rows = records[records["metric"] == metric]
        if "game" in rows and metric == kinds[0][0]:
            rows = rows[rows["game"] == "neurons"]
        for i, name in enumerate(names):
            values = rows[rows["method"] == name]["value"].to_numpy(dtype=float)
            colour = COLOURS.get(name, "C8")
            if len(values):
                ax.barh(i, values.mean(), color=colour, alpha=0.45)
                ax.plot(values, [i] * len(values), ".", color=colour)
        ax.axvline(0, color="grey", linewidth=0.8)
        ax.set(xlabel=label)
    axes[2].axvline(0.8, color="grey", linestyle="--", linewidth=0.8)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    fig.savefig(path)


def deletion_curves(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss without the neurons that each score ranks lowest. Rise of the loss on held-out text over the share of the
    model's neurons that is dropped; lower is better. Lines are means over trained models, bars reach from the smallest
    to the largest. Where a pretrained model was measured too, it is on the right.
    """
    import matplotlib.pyplot as plt

    kinds = [("rise of loss without units", "trained here")]
    if (records["metric"] == "rise of loss without units, real model").any():
        kinds.append(("rise of loss without units, real model", "pretrained"))
    fig, axes = plt.subplots(1, len(kinds), figsize=(5.4 * len(kinds) + 1.6, 4.0), squeeze=False)
    for ax, (metric, label) in zip(axes[0], kinds, strict=True):
        rows = records[records["metric"] == metric]
        for i, name in enumerate(order(records, metric)):
            by_share = rows[rows["method"] == name].groupby("dropped")["value"]
            mean = by_share.mean()
            bars = np.array([mean - by_share.min(), by_share.max() - mean])
            ax.errorbar(
                mean.index * 100,
                mean,
                yerr=bars,
                label=name,
                color=COLOURS.get(name),
                linestyle="-" if name in COLOURS else ":",
                marker=".",
                capsize=2,
                linewidth=1.6 if name == "shapley" else 1.0,
                zorder=10 if name == "shapley" else i / 10,
            )
        ax.set(xlabel="neurons dropped (%)", ylabel="rise of loss (nats per token)", title=label)
        ax.set_yscale("symlog", linthresh=0.01)
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    fig.savefig(path)


def new_domain(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Training a tenth of the rows on a new text. Loss on its held-out part after equal steps, each way at its best
    learning rate of one grid; points of one colour are one trained model, crosses are means. On the right how many of
    the model's numbers train.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"] == "loss on the new domain"]
    names = list(dict.fromkeys(rows["method"].astype(str)))
    fig, (ax, small) = plt.subplots(1, 2, figsize=(8.6, 3.8), sharey=True, width_ratios=(3, 1))
    for i, name in enumerate(names):
        part = rows[rows["method"] == name]
        for seed, value in zip(part["seed"], part["value"], strict=True):
            ax.plot(value, i, ".", color=f"C{int(seed) % 10}")
        ax.plot(part["value"].mean(), i, "x", color="black")
        small.barh(i, float(part["trained"].mean()) / 1e3, color="C7")
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="loss on the new text (nats per token)")
    small.set(xlabel="numbers trained (thousands)")
    fig.savefig(path)


def quantised(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss that quantising costs. Rise over the unquantised model on held-out text, one scale for each row; plain GPTQ
    at its best damping, the Shapley-guided one at its best share β, both from equally long grids. Points are trained
    models.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"] == "rise of loss by quantisation"]
    names = list(dict.fromkeys(rows["method"].astype(str)))
    found: Sequence[Any] = sorted(rows["bits"].unique()) if len(rows) else []
    fig, axes = plt.subplots(1, max(len(found), 1), figsize=(4.6 * max(len(found), 1), 2.9), squeeze=False)
    for ax, bits in zip(axes[0], found, strict=False):
        for i, name in enumerate(names):
            values = rows[(rows["method"] == name) & (rows["bits"] == bits)]["value"]
            ax.plot(values, [i] * len(values), "o", alpha=0.6)
            ax.plot(values.mean(), i, "x", color="black")
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.invert_yaxis()
        ax.axvline(0, color="grey", linewidth=0.8)
        ax.set(title=f"INT{bits:g}", xlabel="rise of loss (nats per token)")
    fig.savefig(path)


def order(records: pd.DataFrame, metric: str) -> list[str]:
    """Methods that recorded a metric, in the order of their records."""
    return list(dict.fromkeys(records[records["metric"] == metric]["method"].astype(str)))
