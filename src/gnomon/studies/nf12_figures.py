"""Figures of the NF12 study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.lab import Done

if TYPE_CHECKING:
    import pandas as pd


def sizes(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Bits a weight of the model's matrices: entropy-coded formats come closest to the entropy, NF12 gives up
    about a bit and a half for a length that is the same everywhere, so that any weight can be decoded by itself.
    """
    import matplotlib.pyplot as plt

    def whole(metric: str, method: str = "pretrained") -> float | None:
        rows = records[(records["metric"] == metric) & (records["method"] == method)]
        return None if rows.empty else float(rows["value"].mean())

    bars = {
        "BF16": 16.0,
        "zstd (file)": whole("bits a weight", "zstd"),
        "NF12": whole("NF12 bits, all matrices"),
        "Huffman on exponents": whole("Huffman bits, all matrices"),
        "ZipNN (file)": whole("bits a weight", "ZipNN"),
        "entropy": whole("joint entropy, all matrices"),
    }
    shown = {name: value for name, value in bars.items() if value is not None}
    fig, ax = plt.subplots(figsize=(7.2, 2.8))
    colours = ["C1" if name == "NF12" else "C0" for name in shown]
    ax.barh(list(shown), list(shown.values()), color=colours, height=0.6)
    for row, value in enumerate(shown.values()):
        ax.annotate(f"{value:.2f}", (value, row), xytext=(4, -3), textcoords="offset points", fontsize=9)
    ax.invert_yaxis()
    ax.set(xlabel="bits a weight", xlim=(0, 18))
    fig.savefig(path)


def windows(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What each matrix costs. Left: weights outside the best window of 16 exponents, as a share. Right: bits a
    weight, where a group of eight is stored verbatim if one of its weights lies outside. Each point is a matrix;
    the line is the claim (99.7 % inside), and exact zeros lie outside of every window.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    for colour, method in (("C0", "pretrained"), ("C1", "trained here")):
        table = records[(records["method"] == method) & records["item"].notna()]
        share = table[table["metric"] == "share in the window"].groupby("item")["value"].mean()
        bits = table[table["metric"] == "NF12 bits"].groupby("item")["value"].mean()
        size = table[table["metric"] == "NF12 bits"].groupby("item")["weight"].mean()
        left.scatter(
            size.loc[share.index], (1 - share).clip(lower=1e-7), s=10, color=colour, label=method, alpha=0.7
        )
        right.scatter(size.loc[bits.index], bits, s=10, color=colour, alpha=0.7)
    left.axhline(0.003, color="grey", linewidth=0.8, linestyle="--")
    left.set(xscale="log", yscale="log", xlabel="weights in the matrix", ylabel="share outside the window")
    right.set(xscale="log", xlabel="weights in the matrix", ylabel="bits a weight")
    right.axhline(12, color="grey", linewidth=0.8, linestyle="--")
    left.legend()
    fig.savefig(path)


def products_grid(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Time of one matrix-vector product, as a multiple of what reading NF12's bytes takes at the bandwidth measured
    beside it (1 = the byte bound of NF12; lower is better). Hollow diamonds: the time if all of the matrix
    were in a cache; where a diamond lies above 1, arithmetic and not memory limits that format here.
    """
    import matplotlib.pyplot as plt

    times = records[records["metric"] == "time"]
    cached = records[records["metric"] == "time at the speed of a cached matrix"]
    cells = list(times.groupby(["shape", "threads"], sort=False).groups)
    methods = ["NF12", "BF16, matched", "BF16, torch", "BF16, torch mv", "Huffman, then BF16"]
    fig, ax = plt.subplots(figsize=(8.4, 0.9 + 0.55 * len(cells) * 2))
    for row, (shape, threads) in enumerate(cells):
        here = times[(times["shape"] == shape) & (times["threads"] == threads)]
        bound = here[here["method"] == "NF12 byte bound"]["value"].median()
        for k, method in enumerate(methods):
            values = here[here["method"] == method]["value"] / bound
            if values.empty:
                continue
            y = row + (k - 2) * 0.16
            low, middle, high = values.quantile([0.2, 0.5, 0.8])
            ax.errorbar(middle, y, xerr=[[middle - low], [high - middle]], fmt="o", color=f"C{k}", markersize=4,
                        label=method if row == 0 else None)  # fmt: skip
            small = cached[
                (cached["shape"] == shape) & (cached["threads"] == threads) & (cached["method"] == method)
            ]
            if len(small):
                limit = small["value"].median() / bound
                ax.plot(limit, y, marker="D", markersize=5, markerfacecolor="none", color=f"C{k}")
    ax.axvline(1, color="grey", linewidth=0.8, linestyle="--")
    labels = [f"{shape}\n{threads:g} thread{'s' if threads > 1 else ''}" for shape, threads in cells]
    ax.set_yticks(range(len(cells)), labels)
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="time over NF12's byte bound")
    ax.legend(loc="upper right", fontsize=8)
    fig.savefig(path)


def bulk_decoding(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Decoding a whole matrix into memory: gigabytes of BF16 written per second, median and the middle three fifths
    of the repeats, against entropy-coded peers. A copy of the decoded matrix is what memory allows.
    """
    import matplotlib.pyplot as plt

    table = records[records["metric"] == "decoding time"]
    size = done["bulk"][0].value["bytes"] / 1e9
    threads = sorted(table["threads"].unique())
    methods = list(table["method"].unique())
    fig, ax = plt.subplots(figsize=(7.2, 0.8 + 0.45 * len(methods)))
    for k, count in enumerate(threads):
        for row, method in enumerate(methods):
            speed = size / table[(table["threads"] == count) & (table["method"] == method)]["value"]
            low, middle, high = speed.quantile([0.2, 0.5, 0.8])
            y = row + (k - (len(threads) - 1) / 2) * 0.35
            ax.barh(y, middle, height=0.32, color=f"C{k}",
                    label=f"{count:g} thread{'s' if count > 1 else ''}" if row == 0 else None)  # fmt: skip
            ax.plot([low, high], [y, y], color="grey", linewidth=1)
    ax.set_yticks(range(len(methods)), methods)
    ax.invert_yaxis()
    ax.set(xlabel="GB of BF16 per second")
    ax.legend()
    fig.savefig(path)


def cache_room(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Memory that becomes room for requests. Left: tokens whose keys and values fit beside the weights under one
    cap. Middle: tokens per second of a small server under that cap, one point per set of requests. Right: tokens
    per second of one sequence, median over repeats.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(10.0, 3.0), width_ratios=[1, 1, 1.6])
    order = ["BF16, matched", "NF12"]
    fits = records[records["metric"] == "cached tokens"].groupby("method")["value"].mean()
    axes[0].bar(order, [fits.get(name, 0) for name in order], color=["C0", "C1"], width=0.6)
    axes[0].set(ylabel="cached tokens")
    speed = records[records["metric"] == "tokens per second"]
    for _, rows in speed.groupby("seed"):
        values = rows.set_index("method")["value"]
        axes[1].plot(order, [values.get(name) for name in order], marker="o", color="C0", alpha=0.7)
    axes[1].set(ylabel="tokens per second, server", ylim=(0, None))
    axes[1].margins(x=0.3)
    alone = records[records["metric"] == "time per token"]
    kinds = ["FP32, torch", "BF16, torch", "BF16, matched", "NF12"]
    threads = sorted(alone["threads"].unique())
    for k, count in enumerate(threads):
        part = 1 / alone[alone["threads"] == count].groupby("method")["value"].median()
        at = [row + (k - (len(threads) - 1) / 2) * 0.35 for row in range(len(kinds))]
        axes[2].barh(at, [part.get(name, 0) for name in kinds], height=0.32, color=f"C{k}",
                     label=f"{count:g} thread{'s' if count > 1 else ''}")  # fmt: skip
    axes[2].set_yticks(range(len(kinds)), kinds)
    axes[2].set(xlabel="tokens per second, one sequence")
    axes[2].margins(y=0.2)  # room for the legend above the last bar
    axes[2].legend(fontsize=8, loc="upper left", ncols=2)
    fig.savefig(path)
