"""Figures of the SAGA study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done
from gnomon.studies.saga_family import LOSS, SPARSE_LOSS, TASKS
from gnomon.studies.saga_stages import GUESS, MASS, PERPLEXITY, RECALL
from gnomon.studies.saga_stages import LOSS as DIVERGENCE
from gnomon.studies.saga_timing import BYTE_SHARE, DENSE, FASTER, STEP_TIME, TIME_SHARE

if TYPE_CHECKING:
    import pandas as pd

ATTENTION_FASTER = f"{FASTER}, attention alone"


def selectors(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Perplexity of the pretrained model (left) and probability that the kept positions hold (right), by the number
    of positions that every query row of every layer keeps. The dashed line is dense attention.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.0))
    named = records[records["selector"].notna()] if "selector" in records else records.iloc[:0]
    dense = named[(named["selector"] == "dense") & (named["metric"] == PERPLEXITY)]
    kinds = named[named["selector"] != "dense"]
    for i, (method, rows) in enumerate(kinds.groupby("method", sort=False)):
        look = {"color": f"C{i % 6}", "marker": "os^vD"[i // 6 % 5], "label": str(method), "linewidth": 1.2}
        for ax, metric in ((left, PERPLEXITY), (right, MASS)):
            means = rows[rows["metric"] == metric].groupby("n")["value"].mean()
            ax.plot(means.index, means, **look)
    if len(dense):
        left.axhline(float(dense["value"].iloc[0]), color="grey", linestyle="--")
    sizes = sorted(kinds["n"].unique())
    for ax, label in ((left, "perplexity"), (right, "kept probability mass")):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [f"{n:g}" for n in sizes])
        ax.minorticks_off()
        ax.set(xlabel="positions kept (N)", ylabel=label)
    left.set_yscale("log")
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    fig.savefig(path)
    plt.close(fig)


def recalls(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Share of the exact top-N that Atop-N finds, by N: in the pretrained model (lines; bands from the worst to the
    best layer), and on independent scores (crosses), which the formula (dashed) describes.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.5, 3.6))
    guessed = records[records["metric"] == GUESS]
    found = records[records["metric"] == RECALL]
    found = found[found["selector"] == "strided"] if len(found) else found
    counts = sorted({*guessed["oversample"].unique(), *(found["oversample"].unique() if len(found) else ())})
    for i, c in enumerate(counts):
        drawn = guessed[guessed["oversample"] == c].sort_values("n")
        ax.plot(drawn["n"], drawn["value"], "x", color=f"C{i}")
        ax.plot(drawn["n"], drawn["formula"], "--", color=f"C{i}", linewidth=1)
        if len(found):
            by_n = found[found["oversample"] == c].groupby("n")["value"]
            mean = by_n.mean()
            ax.plot(mean.index, mean, "o-", color=f"C{i}", label=f"c = {c:g}")
            ax.fill_between(mean.index, by_n.min(), by_n.max(), color=f"C{i}", alpha=0.15, linewidth=0)
    ax.set_xscale("log", base=2)
    sizes = sorted({*guessed["n"], *found["n"]} if len(found) else {*guessed["n"]})
    ax.set_xticks(sizes, [f"{n:g}" for n in sizes])
    ax.minorticks_off()
    ax.set(xlabel="positions kept (N)", ylabel="recall of the exact top-N")
    ax.legend(title="buckets per position")
    fig.savefig(path)
    plt.close(fig)


def conversion(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Converting the pretrained model. Left: divergence from the original while W_Q and W_K are distilled. Right:
    perplexity before and after, with dense attention (filled) and with Atop-N (open); the dashed line is the original.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6))
    curves = records[records["metric"] == DIVERGENCE]
    methods = list(dict.fromkeys(curves["method"]))
    for i, method in enumerate(methods):
        curve = curves[curves["method"] == method].groupby("step")["value"].mean()
        left.plot(curve.index, curve, ".-", color=f"C{i}", label=method)
    left.set(xlabel="step", ylabel="divergence (nats)", yscale="log")
    left.legend()
    rows = records[(records["metric"] == PERPLEXITY) & records["method"].isin(methods)]
    for i, method in enumerate(methods):
        for j, attention in enumerate(("dense", "sparse")):
            own = rows[(rows["method"] == method) & (rows["attention"] == attention)]
            means = own.groupby("when")["value"].mean()
            at = [i + 0.15 * j, i + 0.15 * j]
            right.plot(at, [means["before"], means["after"]], color=f"C{i}", linewidth=1)
            face = f"C{i}" if attention == "dense" else "none"
            right.plot(at[:1], [means["before"]], "v", color=f"C{i}", markerfacecolor=face)
            right.plot(at[:1], [means["after"]], "o", color=f"C{i}", markerfacecolor=face)
    if "selector" in records:
        dense = records[(records["metric"] == PERPLEXITY) & (records["selector"] == "dense")]
        if len(dense):
            right.axhline(float(dense["value"].iloc[0]), color="grey", linestyle="--")
    right.set_xticks(range(len(methods)), methods)
    right.set_xlim(-0.5, len(methods) - 0.5)
    right.set(ylabel="perplexity (▼ before, ● after)", yscale="log")
    fig.savefig(path)
    plt.close(fig)


def family(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Held-out loss of models trained from scratch, by numbers of query, key and value heads: with dense attention
    (dots, one for each seed) and with Atop-N (open rings).
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(TASKS), figsize=(9.0, 3.2))
    titles = {"recall": "recall task", "text": "byte text"}
    final = records[records["metric"].isin([LOSS, SPARSE_LOSS])]
    for ax, task in zip(axes, TASKS, strict=True):
        rows = final[final["task"] == task]
        methods = list(dict.fromkeys(rows["method"]))
        for i, method in enumerate(methods):
            for metric, face, shift in ((LOSS, f"C{i}", -0.1), (SPARSE_LOSS, "none", 0.1)):
                values = rows[(rows["method"] == method) & (rows["metric"] == metric)]["value"]
                ax.plot(
                    [i + shift] * len(values), values, "o", color=f"C{i}", markerfacecolor=face, alpha=0.8
                )
                ax.plot([i + shift - 0.08, i + shift + 0.08], [values.mean()] * 2, color=f"C{i}", linewidth=2)
        ax.set_xticks(range(len(methods)), [f"({method})" for method in methods])
        ax.set_xlim(-0.5, len(methods) - 0.5)
        ax.set(ylabel="nats per target", title=titles[task])
    fig.savefig(path)
    plt.close(fig)


def one_layer(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Attention of one layer with Atop-N, by context. Left: share of the query-key step in a step's time (solid) and in
    the bytes it reads (dotted). Right: times as fast as dense GQA, and what the formula allows (dotted).
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.8))
    gains = records[records["metric"] == ATTENTION_FASTER]
    for i, method in enumerate(dict.fromkeys(gains["method"])):
        for metric, line in ((TIME_SHARE, ".-"), (BYTE_SHARE, ":")):
            rows = records[(records["metric"] == metric) & (records["method"] == method)]
            left.plot(rows["length"], rows["value"], line, color=f"C{i}")
        rows = gains[gains["method"] == method]
        right.plot(rows["length"], rows["value"], ".-", color=f"C{i}", label=str(method))
        right.plot(rows["length"], rows["bytes allow"], ":", color=f"C{i}")
    left.axhline(0.9, color="grey", linewidth=0.8)
    right.axhline(1, color="grey", linewidth=0.8)
    left.set(xlabel="context", ylabel="share of the query-key step")
    right.set(xlabel="context", ylabel=f"times as fast as {DENSE}", yscale="log")
    ticks = [
        t
        for t in (0.5, 1, 2, 5, 10, 20)
        if t <= 1.2 * max([*gains["value"], *gains["bytes allow"]], default=1)
    ]
    right.set_yticks(ticks, [f"{t:g}" for t in ticks])
    _contexts([left, right], sorted(gains["length"].unique()))
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    fig.savefig(path)
    plt.close(fig)


def latency(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Decoding one token with a whole model. Above: milliseconds by context; below: times as fast as dense GQA, with
    what the bytes read would allow (dotted). Bands hold three fifths of the repeats.
    """
    import matplotlib.pyplot as plt

    timed = records[records["metric"] == STEP_TIME]
    sizes = list(dict.fromkeys(timed["size"]))
    handles: tuple[list[Any], list[Any]] = ([], [])
    fig, axes = plt.subplots(2, max(1, len(sizes)), figsize=(4.6 * max(1, len(sizes)), 6.0), squeeze=False)
    for column, size in enumerate(sizes):
        above, below = axes[:, column]
        rows = timed[timed["size"] == size]
        for i, method in enumerate(dict.fromkeys(rows["method"])):
            by_length = 1000 * rows[rows["method"] == method].set_index("length")["value"]
            groups = by_length.groupby(level=0)
            median = groups.median()
            label = (
                f"{'fewer' if i == 3 else 'all'} key heads, Atop-N"
                if "Atop-N" in str(method)
                else str(method)
            )
            above.plot(median.index, median, ".-", color=f"C{i}", label=label)
            above.fill_between(
                median.index,
                groups.quantile(0.2),
                groups.quantile(0.8),
                color=f"C{i}",
                alpha=0.2,
                linewidth=0,
            )
            gains = records[
                (records["metric"] == FASTER) & (records["method"] == method) & (records["size"] == size)
            ]
            if len(gains):
                below.plot(gains["length"], gains["value"], ".-", color=f"C{i}")
                below.plot(gains["length"], gains["bytes allow"], ":", color=f"C{i}")
        name, _, layers = str(size).partition(":")
        above.set(title=f"{name}, {layers} layers", ylabel="ms per token", yscale="log")
        below.axhline(1, color="grey", linewidth=0.8)
        below.set(xlabel="context", ylabel=f"times as fast as {DENSE}")
        _contexts([above, below], sorted(rows["length"].unique()))
        if column == 0:
            handles = above.get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=4, fontsize=8)
    fig.savefig(path)
    plt.close(fig)


def _contexts(axes: Iterable[object], lengths: list[float]) -> None:
    for ax in axes:
        ax.set_xscale("log", base=2)  # type: ignore[attr-defined]
        ticks = [f"{length / 1024:g}K" if length >= 1024 else f"{length:g}" for length in lengths]
        ax.set_xticks(lengths, ticks)  # type: ignore[attr-defined]
        ax.minorticks_off()  # type: ignore[attr-defined]


__all__ = ["conversion", "family", "latency", "one_layer", "recalls", "selectors"]
