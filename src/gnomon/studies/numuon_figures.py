"""Figures of the NuMuon study. Each docstring's first paragraph is the caption in the report."""

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

CONTROL = ", Σηλ"
"""Part of the method's name in runs with another summed decay."""
PIPELINE_NAMES = {
    "svd": "SVD",
    "asvd": "ASVD",
    "svd_llm": "SVD-LLM",
    "svd_llm_lora": "SVD-LLM + LoRA",
    "dobi": "Dobi-SVD",
}
KEEP = 0.4
"""The smallest share at which every model still works."""


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss and rank while training. Left: loss on held-out text. Right: mean stable rank of the hidden matrices;
    the dashed line is that of Gaussian matrices of the same shapes. Lines are means over seeds, bands reach from the
    smallest to the largest.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.4))
    judged = judged_records(records)
    for ax, metric, label in (
        (left, "loss while training", "loss (nats per token)"),
        (right, "stable rank while training", "mean stable rank"),
    ):
        rows = judged[judged["metric"] == metric]
        for i, method in enumerate(methods(judged)):
            by_step = rows[rows["method"] == method].groupby("step")["value"]
            mean = by_step.mean()
            ax.plot(mean.index, mean, label=method, color=f"C{i}")
            ax.fill_between(mean.index, by_step.min(), by_step.max(), color=f"C{i}", alpha=0.2, linewidth=0)
        ax.set(xlabel="step", ylabel=label)
    ratio = judged[judged["metric"] == "stable rank over that of Gaussian matrices"]
    if len(ratio):
        rank = judged[judged["metric"] == "stable rank"]["value"].to_numpy()
        right.axhline(float(np.mean(rank / ratio["value"].to_numpy())), color="grey", linestyle="--")
    right.set_ylim(bottom=0)
    left.legend()
    fig.savefig(path)


def after_compression(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss after compression, by pipeline. Each panel is one pipeline; the axis is the share of the hidden matrices'
    numbers that is kept, 1 is the dense model. Means over seeds with 95 % intervals. All pipelines get the same text
    to calibrate on.
    """
    import matplotlib.pyplot as plt

    judged = judged_records(records)
    rows = judged[judged["metric"] == "loss after compression"]
    dense = judged[judged["metric"] == "loss"]
    found = [name for name in PIPELINE_NAMES if name in set(rows["pipeline"].dropna())]
    fig, axes = plt.subplots(1, len(found), figsize=(2.6 * len(found) + 1.2, 3.2), sharey=True, squeeze=False)
    for ax, pipeline in zip(axes[0], found, strict=True):
        part = rows[rows["pipeline"] == pipeline]
        for i, method in enumerate(methods(judged)):
            of_method = part[part["method"] == method]
            points = {1.0: dense[dense["method"] == method]["value"]}
            points |= {float(keep): group["value"] for keep, group in of_method.groupby("keep")}
            keeps = sorted(points)
            mean = [float(points[keep].mean()) for keep in keeps]
            ax.errorbar(
                keeps,
                mean,
                yerr=[half_width(points[keep]) for keep in keeps],
                color=f"C{i}",
                marker="o",
                markersize=3.5,
                capsize=2,
                label=method,
            )
        ax.set(title=PIPELINE_NAMES[pipeline], xlabel="share kept")
        ax.invert_xaxis()
    axes[0][0].set_ylabel("loss (nats per token)")
    axes[0][0].legend(fontsize=8)
    fig.savefig(path)


def trade_off(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What compressibility costs. Each point is a trained model (one seed): its loss when dense against its loss
    after SVD-LLM at 40 % of the numbers. Further left is better before compression, further down after it; on the
    dashed line compression costs nothing.
    """
    import matplotlib.pyplot as plt

    judged = judged_records(records)
    after = judged[
        (judged["metric"] == "loss after compression")
        & (judged["pipeline"] == "svd_llm")
        & np.isclose(judged["keep"], KEEP)
    ]
    dense = judged[judged["metric"] == "loss"]
    fig, ax = plt.subplots(figsize=(5.6, 3.8))
    for i, method in enumerate(methods(judged)):
        x = dense[dense["method"] == method].set_index("seed")["value"]
        y = after[after["method"] == method].set_index("seed")["value"]
        seeds = sorted(set(x.index) & set(y.index))
        ax.plot(x[seeds], y[seeds], "o", color=f"C{i}", label=method)
    low, high = ax.get_xlim()
    ax.plot([low, high], [low, high], color="grey", linestyle="--", linewidth=0.8)
    ax.set(xlabel="loss of the dense model", ylabel=f"loss at {KEEP:.0%} kept", xlim=(low, high))
    ax.legend(fontsize=8)
    fig.savefig(path)


def layers(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Which matrices are of low rank. Stable rank at the end of training, as a share of the smaller side, for each
    kind of matrix; points are the decoder layers of all seeds, bars their means.
    """
    import matplotlib.pyplot as plt

    names = methods(judged_records(records))
    spectra: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for one in done.get("measure", []):
        if (method := str(one.args["method"])) in spectra:
            for name, s in json.loads((one.dir / "spectra.json").read_text()).items():
                kind = name.removesuffix(".weight").rpartition(".")[2]
                spectra[method].setdefault(kind, []).append(s["stable_rank"] / min(s["shape"]))
    kinds = list(next(iter(spectra.values())))
    fig, ax = plt.subplots(figsize=(7.6, 3.2))
    width = 0.8 / len(names)
    for i, method in enumerate(names):
        for j, kind in enumerate(kinds):
            values = spectra[method].get(kind, [])
            x = j + (i - (len(names) - 1) / 2) * width
            ax.bar(x, np.mean(values), width, color=f"C{i}", alpha=0.5, label=method if j == 0 else None)
            ax.plot([x] * len(values), values, ".", color=f"C{i}", markersize=2)
    ax.set_xticks(range(len(kinds)), [re.sub("_proj$", "", kind) for kind in kinds])
    ax.set(ylabel="stable rank / smaller side")
    ax.legend(fontsize=8)
    fig.savefig(path)


def decay(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Weight decay decides whether the low rank shows. Σηλ is the sum over training of learning rate times decay: a
    share e^-Σηλ of the random start is left in a matrix. Left: loss of the dense model. Middle: mean stable rank.
    Right: how much the loss rises under SVD-LLM at 40 % of the numbers. Means over seeds with 95 % intervals.
    """
    import matplotlib.pyplot as plt

    base = records["method"].astype(str).str.replace(f"{CONTROL}.*", "", regex=True)
    table = records.assign(base=base)
    known = table[table["metric"] == "loss"]
    sums = {str(m): float(group["summed decay"].iloc[0]) for m, group in known.groupby("method")}
    with_controls = {str(m).partition(CONTROL)[0] for m in sums if CONTROL in str(m)}
    fig, axes = plt.subplots(1, 3, figsize=(9.6, 3.2))
    for ax, metric, label in zip(
        axes,
        ("loss", "stable rank", "rise of loss"),
        ("loss of the dense model", "mean stable rank", f"rise of loss at {KEEP:.0%} kept"),
        strict=True,
    ):
        rows = table[table["metric"] == metric]
        if metric == "rise of loss":
            rows = rows[(rows["pipeline"] == "svd_llm") & np.isclose(rows["keep"], KEEP)]
        for i, name in enumerate(methods(judged_records(records))):
            if name in with_controls:
                of_method = rows[rows["base"] == name]
                points = dict(list(of_method.groupby(of_method["method"].map(sums))["value"]))
                ax.errorbar(
                    list(points),
                    [float(values.mean()) for values in points.values()],
                    yerr=[half_width(values) for values in points.values()],
                    marker="o",
                    markersize=3.5,
                    capsize=2,
                    color=f"C{i}",
                    label=name,
                )
        ax.set(xlabel="Σηλ", ylabel=label, xscale="log")
        ax.set_xticks(sorted(set(sums.values())), [f"{x:g}" for x in sorted(set(sums.values()))])
        ax.minorticks_off()
    axes[0].legend(fontsize=8)
    fig.savefig(path)


def judged_records(records: pd.DataFrame) -> pd.DataFrame:
    """Without tuning and controls: of the seeds and methods that claims are judged on."""
    final = records[(records["metric"] == "loss") & ~records["method"].astype(str).str.contains(CONTROL)]
    wanted = set(zip(final["method"], final["seed"], final["summed decay"], strict=True))
    seeds, names = {seed for _, seed, _ in wanted}, {name for name, _, _ in wanted}
    sums = {name: total for name, _, total in wanted}
    rows = records[records["seed"].isin(seeds) & records["method"].isin(names)]
    own = rows["method"].map(sums)
    return rows[rows["summed decay"].isna() | np.isclose(rows["summed decay"].astype(float), own)]


def methods(records: pd.DataFrame) -> list[str]:
    """Competitors in the order of their records."""
    return [str(name) for name in records[records["metric"] == "loss"]["method"].unique()]


def half_width(values: Iterable[Any]) -> float:
    """Of the 95 % t interval of a mean; 0 for a single value."""
    from scipy import stats

    found = np.array([float(v) for v in values])
    if len(found) < 2:
        return 0.0
    return float(stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found)))
