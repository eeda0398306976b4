"""Figures of the TLCM study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.lab import Done

if TYPE_CHECKING:
    import pandas as pd


def band(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Which layers undo the one before. Each point is the mean cosine between what two neighbouring layers
    add to the residual stream at the same token (95 % interval over documents); below zero, the later layer
    takes back part of what the earlier one wrote. The grey line takes the two contributions from different
    tokens: what a shared, token-independent direction alone would give. The yellow one has random weights.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 3.6))
    ax.axhline(0, color="grey", linewidth=0.8)
    for method, metric, label, look in (
        ("random weights", "adjacent cosine", "random weights", {"color": "C4", "alpha": 0.8}),
        ("model", "cross-token cosine", "different tokens (null)", {"color": "grey", "linestyle": "--"}),
        ("model", "adjacent cosine", "the model", {"color": "C0", "marker": "o", "markersize": 3.5}),
    ):
        mean, low, high = by_pair(records, method, metric)
        ax.plot(mean.index, mean, label=label, **look)
        ax.fill_between(mean.index, low, high, color=look["color"], alpha=0.2, linewidth=0)
    ax.set(xlabel="pair of layers (i, i+1)", ylabel="mean cosine")
    ax.legend(ncols=3, loc="upper center")
    ax.margins(y=0.2)
    fig.savefig(path)


def similarity(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Every layer against every other. Mean cosine of contributions of layer i (rows) and j (columns); blue
    agrees, red opposes. A correction shows beside the diagonal of the whole layers; the other panels tell which
    part of the layer does it. Last panel: attention (rows) against MLP (columns).
    """
    import matplotlib.pyplot as plt

    matrices = np.load(measured_model(done).dir / "similarity.npz")
    fig, axes = plt.subplots(1, 4, figsize=(10.5, 3.0), sharey=True)
    titles = {"layer": "whole layers", "attn": "attention", "mlp": "MLP", "attn-mlp": "attention / MLP"}
    for ax, (kind, title) in zip(axes, titles.items(), strict=True):
        shown = matrices[kind].copy()
        if kind != "attn-mlp":
            np.fill_diagonal(shown, np.nan)
        image = ax.imshow(shown, cmap="RdBu", vmin=-0.2, vmax=0.2)
        ax.set(title=title, xlabel="layer j")
    axes[0].set_ylabel("layer i")
    fig.colorbar(image, ax=axes, shrink=0.8, extend="both")
    fig.savefig(path)


def token_kinds(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Which tokens are corrected most. Left: activations per token (pairs of layers with a cosine below -0.1),
    by kind of token, with 95 % intervals over token types. Right: against the position in the document.
    """
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), width_ratios=[3, 2])
    table = records[(records["metric"] == "activations by class") & (records["method"] == "model")]
    groups = [(name, group) for name, group in table.groupby("class") if group["weight"].sum() >= 20]
    groups.sort(key=lambda pair: np.average(pair[1]["value"], weights=pair[1]["weight"]))
    for row, (_, group) in enumerate(groups):
        mean, low, high = weighted_interval(group["value"], group["weight"])
        left.errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", color="C0", capsize=3)
        left.annotate(f"{int(group['weight'].sum()):,} tokens", (high, row), xytext=(6, -3), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    left.set_yticks(range(len(groups)), [name for name, _ in groups])
    left.set(xlabel="activations per token", ylim=(-0.6, len(groups) - 0.4))
    left.margins(x=0.25)
    stored = np.load(measured_model(done).dir / "positions.npz")
    edges = np.linspace(0, stored["position"].max() + 1, 17)
    bins = np.digitize(stored["position"], edges) - 1
    means = [stored["number"][bins == b].mean() for b in range(16) if (bins == b).any()]
    centres = [edges[b : b + 2].mean() for b in range(16) if (bins == b).any()]
    right.plot(centres, means, marker="o", markersize=3)
    right.set(xlabel="position in the document", ylabel="activations per token")
    fig.savefig(path)


def adaptivity(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """The correction answers what was written. The contribution a of the earlier layer is scaled by 1 + alpha
    before the next layer reads it: at alpha = -1 it is gone, at 1 doubled. A curve that falls says that the next
    layer turns against a the more there is of it; below 0 it opposes a. Thin lines are single pairs.
    """
    import matplotlib.pyplot as plt

    curves = np.load(done["sweep"][0].dir / "curves.npz")
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    for ax, kind, colour in zip(axes, ("correcting", "control"), ("C1", "C0"), strict=True):
        rows = curves[kind]
        ax.axhline(0, color="grey", linewidth=0.8)
        for pair in np.unique(rows[:, 0]) if rows.size else ():
            ax.plot(
                curves["alphas"],
                rows[rows[:, 0] == pair, 1:].mean(0),
                color=colour,
                alpha=0.25,
                linewidth=0.8,
            )
        if rows.size:
            ax.plot(curves["alphas"], rows[:, 1:].mean(0), color=colour, linewidth=2.2)
        ax.set(title=f"{kind} pairs", xlabel="alpha")
    axes[0].set_ylabel("cosine of a and the next layer's output")
    fig.savefig(path)


def eigenvalues(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What happens to each direction. Eigenvalues of the next layer's (symmetric) response, for the directions
    that hold most of a: -1 undoes a direction completely, above 0 strengthens it. The paper sees two
    humps, near -1 and +0.5, in an 8-billion-parameter model; control pairs have one, at 0.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.4, 3.2))
    table = records[records["metric"] == "top eigenvalue"]
    edges = np.linspace(-2, 2, 61)
    for kind, colour in (("control", "C0"), ("correcting", "C1")):
        values = table.loc[table["method"] == kind, "value"].clip(-2, 2)
        if values.empty:
            continue
        ax.hist(values, bins=edges, density=True, histtype="stepfilled", alpha=0.35, color=colour, label=kind)
        ax.hist(values, bins=edges, density=True, histtype="step", color=colour)
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set(xlabel="eigenvalue", ylabel="density")
    ax.legend()
    fig.savefig(path)


def steering_gain(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What survives of a push. A vector is added to the residual stream between the two layers of a correcting pair;
    plotted is the share of the push along itself that the next layer takes away (below 0: it adds to it), for
    vectors from the negative and the positive eigenspace of its mean response, and for any direction.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.4, 3.2))
    table = records[records["metric"] == "gain lost in the next layer"]
    ax.axhline(0, color="grey", linewidth=0.8)
    for method, colour in (("negative", "C1"), ("any direction", "grey"), ("positive", "C0")):
        groups = table[table["method"] == method].groupby("strength")["value"]
        if not len(groups):
            continue
        mean, error = groups.mean(), 1.96 * groups.std() / groups.count() ** 0.5
        ax.errorbar(
            mean.index, mean, yerr=error, marker="o", markersize=4, color=colour, label=method, capsize=3
        )
    ax.set_xscale("log")
    strengths = sorted(table["strength"].unique()) if len(table) else []
    ax.set_xticks(strengths, [f"{strength:g}" for strength in strengths])
    ax.minorticks_off()
    ax.set(xlabel="length of the push / norm of the residual stream", ylabel="share lost")
    ax.legend()
    fig.savefig(path)


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """How it comes about. A small model is trained from scratch, one line per seed. Left: the most negative
    mean cosine of neighbouring layers (below its null as well); right: all pairs of the first seed.
    """
    import matplotlib.pyplot as plt

    small = records[records["method"] == "small model"]
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    for _, group in small[small["metric"] == "deepest correction"].groupby("seed"):
        left.plot(group["step"], group["value"], marker="o", markersize=3, color="C0", alpha=0.7)
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(xlabel="training step", ylabel="deepest mean cosine")
    pairs = small[(small["metric"] == "adjacent cosine") & (small["seed"] == small["seed"].min())]
    for pair, group in pairs.groupby("pair"):
        right.plot(group["step"], group["value"], marker="o", markersize=3, label=f"pair {int(pair)}")
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(xlabel="training step", ylabel="mean cosine")
    right.legend(fontsize=8)
    for ax in (left, right):
        ax.set_xscale("symlog", linthresh=10)
    fig.savefig(path)


def measured_model(done: dict[str, list[Done]]) -> Done:
    """The `correction` stage of the model itself, not of its random twin."""
    return next(stage for stage in done["correction"] if not stage.args["random"])


def weighted_interval(values: Any, weights: Any) -> tuple[float, float, float]:
    """Mean with the interval that verdicts over items use."""
    from gnomon.core.stats import cluster_bootstrap

    found = cluster_bootstrap(
        np.asarray(values), np.asarray(weights), rng=np.random.default_rng(0), draws=2000
    )
    assert found.value is not None
    low, high = found.interval or (found.value, found.value)
    return found.value, low, high


def by_pair(records: pd.DataFrame, method: str, metric: str) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Mean and interval over documents of a metric, by pair of layers."""
    import pandas as pd

    table = records[(records["method"] == method) & (records["metric"] == metric)]
    rows = {int(p): weighted_interval(g["value"], g["weight"]) for p, g in table.groupby("pair")}
    whole = pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "low", "high"])
    return whole["mean"], whole["low"], whole["high"]
