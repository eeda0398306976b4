"""Figures of the Set-LLM study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.lab import Done
from gnomon.studies.set_llm_stages import LOGITS, RANDOM, SPREAD, VOTE, WORST

if TYPE_CHECKING:
    import pandas as pd


def spreads(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """How far log-probabilities of options lie apart over all orders, for each rung and precision.

    Largest over the questions; zero is drawn at 10⁻¹⁶.
    """
    import matplotlib.pyplot as plt

    rows = records[records.metric.isin([SPREAD, LOGITS])]
    largest = rows.groupby(["metric", "dtype", "method"], sort=False).value.max()
    methods = list(dict.fromkeys(rows.method))
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    kinds = [key for key in dict.fromkeys(zip(rows.metric, rows["dtype"], strict=True)) if key[0] == SPREAD]
    for k, (metric, dtype) in enumerate(kinds):
        values = [max(float(largest.get((metric, dtype, method), 0)), 1e-16) for method in methods]
        at = [i + 0.8 * (k - (len(kinds) - 1) / 2) / len(kinds) for i in range(len(methods))]
        ax.bar(at, values, 0.75 / len(kinds), bottom=0, label=str(dtype))
    ax.set_yscale("log")
    ax.set_xticks(range(len(methods)), methods, rotation=20)
    ax.set_ylabel("spread over orders, nats")
    ax.legend(frameon=False)
    fig.savefig(path)
    plt.close(fig)


def accuracies(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Accuracy over all orders, by vote of all orders, and in the order that is worst for each question."""
    import matplotlib.pyplot as plt

    rows = records[records.metric.isin([RANDOM, WORST, VOTE])]
    methods = list(dict.fromkeys(rows.method))
    fig, ax = plt.subplots(figsize=(7, 0.6 + 0.4 * len(methods)), layout="constrained")
    means = rows.groupby(["method", "metric", "seed"]).value.mean()
    for metric, marker in ((RANDOM, "o"), (VOTE, "|"), (WORST, "x")):
        for i, method in enumerate(methods):
            values = means.loc[(method, metric)]
            ax.plot(values, [i] * len(values), marker, color={RANDOM: "C0", VOTE: "0.4", WORST: "C3"}[metric],
                    label=metric if i == 0 else None, alpha=0.8)  # fmt: skip
    ax.set_yticks(range(len(methods)), methods)
    ax.invert_yaxis()
    ax.set_xlim(-0.02, 1.02)
    ax.set_xlabel("share of questions")
    ax.legend(frameon=False, loc="best")
    fig.savefig(path)
    plt.close(fig)


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss of the right option while adapters are trained."""
    import matplotlib.pyplot as plt

    rows = records[records.metric == "loss while training"]
    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for method, group in rows.groupby("method", sort=False):
        curve = group.groupby("step").value.mean()
        ax.plot(curve.index, curve.values, marker=".", label=str(method))
    ax.set_xlabel("step")
    ax.set_ylabel("nats a token")
    ax.legend(frameon=False)
    fig.savefig(path)
    plt.close(fig)
