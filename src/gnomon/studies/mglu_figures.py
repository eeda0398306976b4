"""Figures of the MGLU study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.lab import Done
from gnomon.studies.mglu_timing import MATCHED, TORCH

if TYPE_CHECKING:
    import pandas as pd

MAIN = ("gelu", "swiglu", "swiglu-shared", "swiglu-bytes", "swimglu-4")
"""Competitors whose curves are drawn; the others would hide them."""


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Bits per byte while training, on held-out text: means over seeds, bands from the smallest to the largest."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 3.6))
    final = records[records["metric"] == "bits per byte"]
    wanted = set(zip(final["method"], final["seed"], final["lr"], strict=True))
    curves = records[records["metric"] == "loss while training"]
    keys = zip(curves["method"], curves["seed"], curves["lr"], strict=True)
    curves = curves[[key in wanted for key in keys]]
    per_nat = 1 / math.log(2) / done["bytes_per_token"][0].value
    for i, name in enumerate(one for one in MAIN if one in set(final["method"])):
        by_step = curves[curves["method"] == name].groupby("step")["value"]
        mean, low, high = (per_nat * part for part in (by_step.mean(), by_step.min(), by_step.max()))
        ax.plot(mean.index, mean, color=f"C{i}", marker="." if len(mean) == 1 else None, label=name)
        ax.fill_between(mean.index, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
    ax.set(xlabel="step", ylabel="bits per byte")
    ax.legend(fontsize=8)
    fig.savefig(path)


def quality_by_bytes(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Final bits per byte against what the feed-forward layers weigh in memory, at 16 bits a weight and 1 bit an
    element of a mask. Large points are means over seeds, small ones the seeds; further left and lower is better.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.6, 4.0))
    sizes = records[records["metric"] == "bytes of the feed-forward layers"].set_index("method")["value"]
    final = records[records["metric"] == "bits per byte"]
    unit, scale = ("MB", 1e6) if sizes.max() >= 1e6 else ("kB", 1e3)
    for i, (name, rows) in enumerate(final.groupby("method", sort=False)):
        at = sizes[name] / scale
        ax.plot([at] * len(rows), rows["value"], ".", markersize=3, color=f"C{i % 10}", alpha=0.6)
        marker = "s" if str(name).startswith("swimglu") else "o" if i < 10 else "^"
        mean = rows["value"].mean()
        ax.plot(at, mean, marker, markersize=6, color=f"C{i % 10}", label=str(name))
    ax.set(xlabel=f"{unit} of the feed-forward layers", ylabel="bits per byte")
    ax.margins(x=0.1, y=0.1)
    ax.legend(fontsize=7, ncols=2)
    fig.savefig(path)


def times(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Time of one projection for one row of x, by the number of masks: median and middle three fifths of the repeats,
    over the time of torch's GLU (the line at 1). Dotted: what reading the bytes takes at the bandwidth measured beside
    it. The paper's are .66, .68, .71 and .87 for its kernel on the first shape, on another machine.
    """
    import matplotlib.pyplot as plt

    table = records[(records["metric"] == "time") & (records["seed"] == 1)]
    cells = list(table.groupby(["shape", "threads"], sort=False))
    fig, axes = plt.subplots(1, len(cells), figsize=(1.6 + 3.0 * len(cells), 3.6), sharey=True, squeeze=False)
    for ax, ((shape, threads), rows) in zip(axes[0], cells, strict=True):
        per_glu = rows[rows["method"] == TORCH]["value"].median()
        for i, (kind, style) in enumerate((("FlashMGLU", "o-"), ("naive", "s-"), ("byte bound", ":"))):
            part = rows[rows["method"].str.startswith(kind)]
            if part.empty:
                continue
            spread = part.groupby("masks")["value"].quantile([0.2, 0.5, 0.8]).unstack() / per_glu
            ax.plot(spread.index, spread[0.5], style, color=f"C{i}", markersize=4, label=kind)
            ax.fill_between(spread.index, spread[0.2], spread[0.8], color=f"C{i}", alpha=0.2, linewidth=0)
        matched = rows[rows["method"] == MATCHED]["value"].median() / per_glu
        ax.axhline(matched, color="C3", linewidth=1, label=MATCHED)
        ax.axhline(1, color="grey", linestyle="--", linewidth=1, label=TORCH)
        ticks = sorted(int(n) for n in part["masks"].unique()) if len(part) else [1, 2, 4, 8]
        ax.set_yscale("log")
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.set_title(f"{shape}, {threads:g} thread{'s' if threads > 1 else ''}", fontsize=9)
        ax.set(xlabel="masks")
    axes[0][0].set(ylabel="time over torch's GLU")
    axes[0][0].legend(fontsize=7)
    fig.savefig(path)


def gates(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Which part of the shared matrix gates, by layer; each line is one seed. The band is what the paper finds, 45 to
    55 %; half of each mask are ones before training.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.4, 3.2))
    table = records[records["metric"] == "gate share"]
    for i, (name, rows) in enumerate(table.groupby("method", sort=False)):
        for k, (_, one) in enumerate(rows.groupby("seed")):
            line = one.sort_values("depth")
            label = str(name) if k == 0 else None
            ax.plot(line["depth"], line["value"], "o-", color=f"C{i}", markersize=3, alpha=0.7, label=label)
    ax.axhspan(0.45, 0.55, color="grey", alpha=0.15, linewidth=0)
    depths = sorted(int(depth) for depth in table["depth"].unique())
    if len(depths) <= 16:
        ax.set_xticks(depths)
    ax.set(xlabel="layer", ylabel="share of ones in the masks")
    ax.legend(fontsize=8)
    fig.savefig(path)
