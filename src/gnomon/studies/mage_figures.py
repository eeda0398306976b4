"""Figures of the MAGE study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done
from gnomon.studies.mage_stages import (
    BY_PASS,
    COSINE,
    EQUAL,
    EXACT,
    LEARNING,
    LOSS,
    MAGE,
    MASS,
    PASSES,
    QUEST,
    RECALL,
    SELECTORS,
    SHARING,
    SHORT,
    SPARSED,
    TRAINED,
    UNTRAINED,
)
from gnomon.studies.mage_timing import GAIN, TIME

if TYPE_CHECKING:
    import pandas as pd

COLOURS = {name: f"C{i}" for i, name in enumerate(name for name in SELECTORS if name != "oracle")}
COLOURS |= {EXACT: "0.4", "oracle": "0.4"}


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss of masked tokens of held-out text while the models are trained, a line for each seed. Noise levels are those
    of training, so about half of the tokens are masked.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"] == LEARNING]
    fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for seed, group in rows.groupby("seed"):
        curve = group.sort_values("step")
        ax.plot(curve["step"], curve["value"], marker=".", label=f"seed {seed}")
    ax.set(xlabel="step", ylabel="nats a masked token")
    ax.legend(frameon=False)
    fig.savefig(path)
    plt.close(fig)


def recalls(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Recall and mass of every selector's sets against the best set of the same pass. Left and middle: mean over the
    passes of a block from the second on, filled after training, hollow before, a mark for each seed. Right: recall by
    pass, after training. SparseD reads more tokens than the others, and is exact in its first passes.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        1, 3, figsize=(10.5, 3.4), layout="constrained", gridspec_kw={"width_ratios": [1, 1, 1.3]}
    )
    k = _table_size(records)
    rows = records[records["metric"].isin([RECALL, MASS, BY_PASS]) & (records["k"] == k)]
    names = [name for name in SELECTORS if name in set(rows["method"])]
    for ax, metric in zip(axes, (RECALL, MASS), strict=False):
        means = rows[rows["metric"] == metric].groupby(["state", "method", "seed"])["value"].mean()
        for i, name in enumerate(names):
            for state, fill in ((TRAINED, COLOURS[name]), (UNTRAINED, "none")):
                values = _at(means, (state, name))
                ax.plot(values, [i] * len(values), "o", markeredgecolor=COLOURS[name], markerfacecolor=fill)
        ax.set(xlabel=metric, xlim=(-0.03, 1.03))
        ax.set_yticks(range(len(names)), names if ax is axes[0] else [""] * len(names))
        ax.invert_yaxis()
    steps = rows[(rows["metric"] == BY_PASS) & (rows["state"] == TRAINED)]
    for name in names:
        curve = steps[steps["method"] == name].groupby("step")["value"].mean()
        axes[2].plot(curve.index, curve, marker=".", color=COLOURS[name], label=name)
    axes[2].set(xlabel="pass of the block", ylabel=RECALL, ylim=(-0.03, 1.03))
    axes[2].legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    fig.savefig(path)
    plt.close(fig)


def sharing(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What it costs that the queries of a block share one set: recall of each query's own best tokens, with a set for
    each query less with one for all. The oracle's loss is the least that any shared set has. Means over seeds after
    training, bars from the smallest seed to the largest.
    """
    import matplotlib.pyplot as plt

    rows = records[(records["metric"] == SHARING) & (records["state"] == TRAINED)]
    means = rows.groupby(["method", "k", "seed"])["value"].mean()
    fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name in (QUEST, "average query", "oracle"):
        of = means.loc[name].groupby("k") if name in means.index.get_level_values(0) else None
        if of is None:
            continue
        mean = of.mean()
        ax.errorbar(
            mean.index, mean, yerr=[mean - of.min(), of.max() - mean], marker="o", capsize=3,
            color=COLOURS[name], label=name,
        )  # fmt: skip
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xscale("log", base=2)
    sizes = sorted(set(rows["k"]))
    ax.set_xticks(sizes, [f"{int(size)}" for size in sizes])
    ax.set(xlabel="tokens of a set", ylabel="recall lost")
    ax.legend(frameon=False)
    fig.savefig(path)
    plt.close(fig)


def alignment(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Cosine of queries in later passes with those of the block's first pass: of the mean over the block and the heads
    of a group, and of single queries. A mark for each seed.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"] == COSINE]
    means = rows.groupby(["state", "method", "seed"])["value"].mean()
    fig, ax = plt.subplots(figsize=(6, 1.9), layout="constrained")
    labels: list[str] = []
    for state in (TRAINED, UNTRAINED):
        for name in ("block average", "single query"):
            values = _at(means, (state, name))
            ax.plot(values, [len(labels)] * len(values), "o", color="C0" if name == "block average" else "C1")
            labels.append(f"{name}, {state}")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set_xlabel("cosine")
    fig.savefig(path)
    plt.close(fig)


def quality(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Decoding behind long prompts with each selector against exact decoding of the same model. Left: how much higher
    the loss of masked tokens is, in per cent. Middle: share of equal tokens. Right: forward passes over those of exact
    decoding. A mark for each seed. "exact, short prefix" sees only the last 256 tokens, which shows what the long
    prompt is worth to the model.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"].isin([LOSS, EQUAL, PASSES])]
    means = rows.groupby(["metric", "method", "seed"])["value"].mean()
    names = [name for name in dict.fromkeys(rows["method"]) if name != EXACT]
    names = [name for name in names if name != SHORT] + [SHORT]
    fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.6), layout="constrained")
    for ax, metric, label in zip(
        axes,
        (LOSS, EQUAL, PASSES),
        ("masked loss, % above exact", "tokens equal to exact", "forward passes / exact"),
        strict=True,
    ):
        exact = _at(means, (metric, EXACT))
        for i, name in enumerate(names):
            values = _at(means, (metric, name))
            if not len(values):
                continue
            if metric == LOSS:
                values = 100 * (values / exact - 1)
            elif metric == PASSES:
                values = values / exact
            ax.plot(values, [i] * len(values), "o", color=COLOURS.get(name, "C0"))
        ax.axvline({LOSS: 0.0, EQUAL: 1.0, PASSES: 1.0}[metric], color="0.6", linewidth=0.8)
        ax.set_xlabel(label)
        ax.set_yticks(range(len(names)), names if ax is axes[0] else [""] * len(names))
        ax.set_ylim(len(names) - 0.5, -0.5)
    fig.savefig(path)
    plt.close(fig)


def times(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """A block behind made-up prefixes, all passes, choice of sets and commit included. Left: seconds, median and outer
    fifths. Right: how many times as fast MAGE is (filled), and what counted reads would allow (hollow, dotted).
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    rows = records[records["metric"] == TIME]
    for name in (EXACT, SPARSED, QUEST, MAGE):
        of = rows[rows["method"] == name].groupby("context")["value"]
        middle, low, high = of.median(), of.quantile(0.2), of.quantile(0.8)
        left.errorbar(
            middle.index, middle, yerr=[middle - low, high - middle], marker="o", capsize=3,
            color=COLOURS[name], label=name,
        )  # fmt: skip
    for rival in (EXACT, QUEST, SPARSED):
        found = records[records["metric"] == GAIN + rival].sort_values("context")
        right.plot(found["context"], found["value"], marker="o", color=COLOURS[rival], label=f"than {rival}")
        right.plot(
            found["context"],
            found["reads allow"],
            marker="o",
            markerfacecolor="none",
            linestyle=":",
            color=COLOURS[rival],
        )
    right.axhline(1, color="0.6", linewidth=0.8)
    for ax, label in ((left, "seconds a block"), (right, "times as fast")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        contexts = sorted(set(rows["context"]))
        ax.set_xticks(contexts, [f"{int(n) // 1024}k" if n >= 1024 else f"{int(n)}" for n in contexts])
        ax.minorticks_off()
        ax.set(xlabel="tokens of the prefix", ylabel=label)
        ax.legend(frameon=False)
    right.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    left.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    fig.savefig(path)
    plt.close(fig)


def _table_size(records: pd.DataFrame) -> float:
    """k of the table of all selectors: the one that chance was measured at."""
    return float(records[(records["metric"] == RECALL) & (records["method"] == "random")]["k"].iloc[0])


def _at(means: Any, key: tuple[str, str]) -> Any:
    """Values by seed; empty where nothing was measured."""
    import numpy as np

    return means.loc[key].to_numpy() if key in means.index.droplevel(-1) else np.array([])
