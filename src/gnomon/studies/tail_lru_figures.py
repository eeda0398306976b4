"""Figures of the Tail-LRU study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done
from gnomon.studies.tail_lru_policies import LRU, METHOD, THRESHOLDED
from gnomon.studies.tail_lru_replay import REPLAYED
from gnomon.studies.tail_lru_stages import ABOVE_BEST

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "lru": ("0.45", "-"), "threshold-lru": ("0.45", ":"), "t-lru": ("C0", "-"), "adaptive": ("C9", "--"),
    "et-lru": ("C2", "-"), "end-aware": ("C1", "-"), "tail-belady": ("C3", "-"), "belady": ("C3", ":"),
}  # fmt: skip
"""Colour and line of the policies that lines are drawn of."""


def _reference(rows: pd.DataFrame, done: dict[str, list[Done]]) -> pd.DataFrame:
    """Records at the threshold that all policies share."""
    sweeps = done.get("sweep", [])
    at = sweeps[0].args["reference_ms"] if sweeps else 0.0
    return rows[~rows["method"].isin(THRESHOLDED) | (rows["threshold"] == at)]


def _shade(k: int) -> Any:
    """Light enough for dark pages: the k-th of a few ordered lines."""
    import matplotlib.pyplot as plt

    return plt.cm.viridis(min(0.95, 0.3 + 0.13 * k))


def _legend(fig: Any, ax: Any) -> None:
    """One legend for all panels, below them."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False, fontsize=7)


def _lines(ax: Any, rows: pd.DataFrame, x: str) -> None:
    for method, (color, style) in SHOWN.items():
        own = rows[rows["method"] == method]
        if len(own):
            mean = own.groupby(x)["value"].mean()
            ax.plot(mean.index, mean.to_numpy(), style, color=color, marker=".", label=method)


def tails_by_capacity(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Time to the first token by capacity: percentiles and share of turns above the SLO, mean over seeds.

    Policies with a threshold are shown at the reference one. Simulated.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(9, 3), layout="constrained", sharex=True)
    for ax, metric in zip(axes, ("P50", "P90", "P95", "violations"), strict=True):
        rows = _reference(records[records["metric"] == metric], done)
        _lines(ax, rows, "capacity")
        ax.set(title=metric, xlabel="capacity, tokens", ylabel="%" if metric == "violations" else "ms")
        ax.set_ylim(bottom=0)
        ax.tick_params(axis="x", rotation=45)
    _legend(fig, axes[0])
    fig.savefig(path)
    plt.close(fig)


def gains(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """By how many per cent T-LRU's tails lie below LRU's, for each capacity and threshold, mean over seeds.

    Below zero it is worse: thresholds far above the percentile in question do harm, beyond what is drawn. Simulated.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    for ax, metric in zip(axes, ("P90", "P95", "violations"), strict=True):
        rows = records[records["metric"] == metric]
        plain = rows[rows["method"] == LRU].set_index(["capacity", "seed"])["value"]
        mine = rows[rows["method"] == METHOD]
        for k, (capacity, own) in enumerate(mine.groupby("capacity")):
            other = plain.reindex(zip(own["capacity"], own["seed"], strict=True)).to_numpy()
            lower = 100 * (1 - own["value"].to_numpy() / other)
            mean = own.assign(lower=lower).groupby("threshold")["lower"].mean()
            ax.plot(
                mean.index,
                mean.to_numpy(),
                marker=".",
                color=_shade(k),
                label=f"{capacity:g} tokens",
            )
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.set(title=f"{metric}, % below LRU", xlabel="threshold, ms")
        ax.set_ylim(bottom=max(ax.get_ylim()[0], -100))
    _legend(fig, axes[0])
    fig.savefig(path)
    plt.close(fig)


def excess(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Tail excess beyond the hindsight optimum, by policy and capacity, mean over seeds.

    Policies with a threshold have the reference one, at which the excess is counted. Tail-Belady is the optimum.
    """
    import matplotlib.pyplot as plt

    rows = _reference(records[records["metric"] == ABOVE_BEST], done)
    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    table = rows.pivot_table(index="method", columns="capacity", values="value").sort_values(
        rows["capacity"].max()
    )
    wide = 0.8 / len(table.columns)
    for k, capacity in enumerate(table.columns):
        at = [i + wide * (k - (len(table.columns) - 1) / 2) for i in range(len(table))]
        ax.barh(at, table[capacity] / 1e3, wide, label=f"{capacity:g} tokens", color=_shade(k))
    ax.set_yticks(range(len(table)), list(table.index))
    ax.invert_yaxis()
    ax.set_xlabel("excess beyond the optimum, thousand tokens")
    ax.legend(frameon=False, fontsize=7)
    fig.savefig(path)
    plt.close(fig)


def measured_tails(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Measured time to the first token on a real model: share of turns that took longer, all seeds together."""
    import matplotlib.pyplot as plt
    import numpy as np

    fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
    pooled: dict[str, list[float]] = {}
    for one in done.get("measured", []):
        for name, seconds in one.value["seconds"].items():
            pooled.setdefault(name, []).extend(seconds)
    for name in sorted(pooled):
        times = np.sort(pooled[name])
        color, style = SHOWN.get(name, ("C4", "-"))
        ax.step(
            1e3 * times, 1 - np.arange(len(times)) / len(times), style, color=color, where="post", label=name
        )
    ax.set(xlabel="time to the first token, ms", ylabel="share of turns that took longer", yscale="log")
    if pooled:
        ax.legend(frameon=False)
    fig.savefig(path)
    plt.close(fig)


def own_tails(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """The trace from the file: time to the first token by the cache's share of all that the trace holds.

    With each threshold of T-LRU, on the part that chooses. Simulated on recorded arrivals.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(9.5, 3.2), layout="constrained", sharex=True)
    for ax, metric in zip(axes, ("P50", "P90", "P95", "violations"), strict=True):
        rows = records[records["metric"] == REPLAYED + metric]
        _lines(ax, rows[~rows["method"].isin(THRESHOLDED)], "share")
        mine = rows[rows["method"] == METHOD]
        for k, (threshold, own) in enumerate(mine.groupby("threshold")):
            mean = own.groupby("share")["value"].mean()
            ax.plot(
                mean.index,
                mean.to_numpy(),
                marker=".",
                color=_shade(k),
                label=f"t-lru {threshold:g} ms",
            )
        ax.set(
            title=metric,
            xlabel="room, share of all",
            ylabel="%" if metric == "violations" else "ms",
        )
    _legend(fig, axes[0])
    fig.savefig(path)
    plt.close(fig)


def own_gains(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """The trace from the file: the setting chosen on one part, and by how much it lowers tails on the other.

    One row for each quantity it was chosen by; the gain against LRU of the same capacity, in per cent.
    """
    import matplotlib.pyplot as plt

    found = [(one.args["what"], one.value) for one in done.get("verdict", [])]
    fig, ax = plt.subplots(figsize=(7, 0.9 + 0.9 * max(1, len(found))), layout="constrained")
    wide = 0.25
    for k, metric in enumerate(("P90", "P95", "violations")):
        at = [i + wide * (k - 1) for i in range(len(found))]
        ax.barh(at, [value[metric] for _, value in found], wide, label=metric, color=f"C{k}")
    names = [
        f"chosen by {what}:\n{value['share']:.0%} of the blocks, threshold {value['xi_ms']:g} ms"
        for what, value in found
    ]
    ax.set_yticks(range(len(found)), names)
    ax.invert_yaxis()
    ax.axvline(0, color="0.5", linewidth=0.8)
    ax.set_xlabel("% below LRU, on the part that didn't choose")
    ax.legend(frameon=False, fontsize=7)
    fig.savefig(path)
    plt.close(fig)
