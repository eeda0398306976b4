"""Figures of the Lua-LLM study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.lab import Done

if TYPE_CHECKING:
    import pandas as pd

JUDGED = ("magnitude", "wanda", "wanda + owl", "wanda + alpha", "sparsegpt", "lua")
"""What the first claim is about, in the order of legends."""
PRUNERS, ALLOCATIONS = ("magnitude", "wanda", "sparsegpt"), ("uniform", "owl", "alpha", "atp", "lua")
TITLES = {"small": "model trained here", "pretrained": "pretrained model"}


def losses(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss on held-out text at equal achieved sparsity. The dashed line is the dense model; means over seeds with 95 %
    intervals.
    """
    import matplotlib.pyplot as plt

    places = _places(records)
    fig, axes = plt.subplots(1, len(places), figsize=(4.6 * len(places), 3.4), squeeze=False)
    for ax, on in zip(axes[0], places, strict=True):
        rows = records[(records["metric"] == "loss") & (records["on"] == on)]
        for i, method in enumerate(JUDGED):
            points = {float(p): g["value"] for p, g in rows[rows["method"] == method].groupby("sparsity")}
            if points:
                means = [float(v.mean()) for v in points.values()]
                bars = [half_width(v) for v in points.values()]
                ax.errorbar(
                    list(points),
                    means,
                    yerr=bars,
                    marker="o",
                    markersize=3.5,
                    capsize=2,
                    color=f"C{i}",
                    label=method,
                )
        ax.axhline(float(rows[rows["method"] == "dense"]["value"].mean()), color="grey", linestyle="--")
        ax.set(xlabel="share of weights removed", ylabel="loss (nats per token)", title=TITLES[on])
    axes[0][0].legend(fontsize=8)
    fig.savefig(path)


def pairs(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """All pruners with all allocations: how far the loss lies above the dense model's, in nats, means over seeds.
    Darker is worse, the scale is each panel's own. The row "lua" is the learnt masks themselves.
    """
    import matplotlib.pyplot as plt

    found = records[records["metric"] == "loss"]
    cells = [
        (on, float(p))
        for on in _places(records)
        for p in sorted(found[found["on"] == on]["sparsity"].unique())
        if p
    ]
    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    fig, axes = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.9 * lines), squeeze=False)
    for ax in axes.flat[len(cells) :]:
        ax.axis("off")
    for ax, (on, p) in zip(axes.flat, cells, strict=False):
        here = found[(found["on"] == on) & (found["sparsity"] == p)].groupby("method")["value"].mean()
        dense = float(found[(found["on"] == on) & (found["method"] == "dense")]["value"].mean())
        table = np.full((len(PRUNERS) + 1, len(ALLOCATIONS)), np.nan)
        for i, pruner in enumerate(PRUNERS):
            for j, allocation in enumerate(ALLOCATIONS):
                name = pruner if allocation == "uniform" else f"{pruner} + {allocation}"
                table[i, j] = here.get(name, np.nan) - dense
        table[-1, -1] = here.get("lua", np.nan) - dense
        ax.imshow(table, cmap="Greys", aspect="auto")
        for (i, j), value in np.ndenumerate(table):
            if np.isfinite(value):
                dark = value > np.nanmin(table) + 0.6 * (np.nanmax(table) - np.nanmin(table))
                ax.text(
                    j, i, f"{value:.3f}", ha="center", va="center", fontsize=7, color="w" if dark else "k"
                )
        ax.set_xticks(range(len(ALLOCATIONS)), ALLOCATIONS, fontsize=7)
        ax.set_yticks(range(len(PRUNERS) + 1), [*PRUNERS, "lua"], fontsize=7)
        ax.set_title(f"{TITLES[on]}, {p:.0%}", fontsize=8)
    fig.savefig(path)


def pattern(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What was learnt: the share removed of each matrix, by depth and kind, with one threshold per row. Numbers in the
    cells are the 10 % and 90 % quantiles of its rows. One panel for each model, at the sparsity nearest 70 %, mean over
    seeds.
    """
    import matplotlib.pyplot as plt

    learnt = [one for one in done.get("learnt", []) if one.args["method"] == "lua"]
    places = [on for on in TITLES if any(one.args["on"] == on for one in learnt)]
    fig, axes = plt.subplots(1, len(places), figsize=(5.4 * len(places), 4.2), squeeze=False)
    for ax, on in zip(axes[0], places, strict=True):
        of_model = [one for one in learnt if one.args["on"] == on]
        nearest = min((abs(one.args["sparsity"] - 0.7), one.args["sparsity"]) for one in of_model)[1]
        found = [
            json.loads((one.dir / "pattern.json").read_text())
            for one in of_model
            if one.args["sparsity"] == nearest
        ]
        names = list(found[0])
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        depth = list(dict.fromkeys(_layer(name) for name in names))
        table = np.full((len(depth), len(kinds)), np.nan)
        low, high = table.copy(), table.copy()
        for name in names:
            i, j = depth.index(_layer(name)), kinds.index(name.rpartition(".")[2])
            table[i, j] = np.mean([one[name]["share"] for one in found])
            low[i, j], _, high[i, j] = np.mean([one[name]["rows"] for one in found], axis=0)
        image = ax.imshow(table, cmap="viridis", aspect="auto")
        if len(depth) <= 8:
            for (i, j), value in np.ndenumerate(low):
                if np.isfinite(value):
                    text = f"{value:.2f}–{high[i, j]:.2f}"
                    ax.text(j, i, text, ha="center", va="center", fontsize=6, color="w")
        ax.set_xticks(range(len(kinds)), [re.sub("_proj$", "", kind) for kind in kinds], fontsize=8)
        ax.set(ylabel="decoder layer", title=f"{TITLES[on]}, {nearest:.0%} removed")
        fig.colorbar(image, ax=ax, label="share removed")
    fig.savefig(path)


def gap(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """The model that is trained and the one that is kept. Left: loss with hard masks minus loss with soft ones, before
    the offset that makes the budget exact, and after it. Right: how far the thresholds as trained miss the budget.
    Points are seeds and models.
    """
    import matplotlib.pyplot as plt

    of_lua = records[records["method"] == "lua"]
    keys = ["on", "sparsity", "seed"]
    by = {
        metric: of_lua[of_lua["metric"] == metric].set_index(keys)["value"]
        for metric in ("soft loss", "hard loss before the offset", "loss", "raw sparsity minus p")
    }
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    for k, (metric, label) in enumerate((("hard loss before the offset", "hard"), ("loss", "exact budget"))):
        difference = (by[metric] - by["soft loss"]).dropna().reset_index()
        left.plot(
            difference["sparsity"] + 0.006 * (k - 0.5), difference["value"], "o", markersize=4, label=label
        )
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(xlabel="share of weights removed", ylabel="loss minus soft loss (nats)")
    left.legend(fontsize=8)
    missed = by["raw sparsity minus p"].reset_index()
    for i, on in enumerate(_places(records)):
        rows = missed[missed["on"] == on]
        right.plot(rows["sparsity"], rows["value"], "o", markersize=4, color=f"C{i}", label=TITLES[on])
    for bound in (-1e-3, 1e-3):
        right.axhline(bound, color="grey", linestyle="--", linewidth=0.8)
    right.set(xlabel="share of weights removed", ylabel="trained sparsity minus p")
    right.legend(fontsize=8)
    fig.savefig(path)


def cost(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What it costs. Seconds of pruning, text statistics and training included, against the loss reached at the
    sparsity nearest 60 %; means over seeds. Zeros themselves save neither time nor memory without a kernel for them.
    """
    import matplotlib.pyplot as plt

    places = _places(records)
    fig, axes = plt.subplots(1, len(places), figsize=(4.8 * len(places), 3.4), squeeze=False)
    for ax, on in zip(axes[0], places, strict=True):
        rows = records[(records["metric"] == "loss") & (records["on"] == on) & (records["sparsity"] > 0)]
        levels = rows["sparsity"].unique()
        rows = rows[rows["sparsity"] == min(levels, key=lambda p: (abs(p - 0.6), p))]
        for i, (method, of_method) in enumerate(rows.groupby("method", sort=False)):
            x, y = of_method["budget.seconds"].mean(), of_method["value"].mean()
            ax.plot(x, y, "o", color=f"C{i % 10}", markersize=4)
            ax.annotate(str(method), (x, y), fontsize=6, xytext=(3, 2), textcoords="offset points")
        ax.set(xlabel="seconds", ylabel="loss (nats per token)", xscale="log", title=TITLES[on])
    fig.savefig(path)


def _places(records: pd.DataFrame) -> list[str]:
    return [on for on in TITLES if on in set(records["on"].dropna())]


def _layer(name: str) -> int:
    return int(next(part for part in name.split(".") if part.isdigit()))


def half_width(values: Iterable[Any]) -> float:
    """Of the 95 % t interval of a mean; 0 for a single value."""
    from scipy import stats

    found = np.array([float(v) for v in values])
    if len(found) < 2:
        return 0.0
    return float(stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found)))
