"""Figures of the Pace study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnomon.lab import Done
from gnomon.studies.pace_stages import ACCUMULATED, CAUSES, EAGER, OFF, PACE

if TYPE_CHECKING:
    import pandas as pd

MAIN = (OFF, EAGER, PACE, ACCUMULATED)


def goodputs(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Goodput of each policy on each load, by both definitions of TPOT; a bar's end is the mean over seeds.

    Effective TPOT counts tokens of all branches, progress counts steps in which the request advanced.
    """
    import matplotlib.pyplot as plt

    rows = records[records.metric.str.startswith("goodput, ") & _main(records)]
    loads, methods = list(dict.fromkeys(rows["load"])), list(dict.fromkeys(rows.method))
    fig, axes = plt.subplots(
        len(loads), 1, figsize=(7, 0.5 + 0.33 * len(loads) * len(methods)), layout="constrained", sharex=True
    )
    means = rows.groupby(["load", "method", "metric"]).value.mean()
    for ax, load in zip(np.atleast_1d(axes), loads, strict=True):
        for k, definition in enumerate(("effective", "progress")):
            at = np.arange(len(methods)) + 0.2 * (2 * k - 1)
            values = [means.get((load, method, f"goodput, {definition}"), 0.0) for method in methods]
            ax.barh(at, values, 0.38, label=definition)
        ax.set_yticks(range(len(methods)), methods, fontsize=8)
        ax.invert_yaxis()
        ax.set_title(load)
    np.atleast_1d(axes)[0].legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    np.atleast_1d(axes)[-1].set_xlabel("tokens a second of requests that meet the SLO")
    fig.savefig(path)
    plt.close(fig)


def attainments(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Share of requests that keep the SLO, serial ones and branching ones, by progress TPOT."""
    import matplotlib.pyplot as plt

    kinds = ("serial", "parallel")
    rows = records[records.metric.isin([f"attainment, progress, {kind}" for kind in kinds]) & _main(records)]
    loads, methods = list(dict.fromkeys(rows["load"])), list(dict.fromkeys(rows.method))
    fig, axes = plt.subplots(
        1, 2, figsize=(7.4, 0.9 + 0.32 * len(methods)), layout="constrained", sharey=True
    )
    means = rows.groupby(["load", "method", "metric"]).value.mean()
    for ax, kind in zip(axes, kinds, strict=True):
        table = np.array(
            [
                [means.get((load, m, f"attainment, progress, {kind}"), np.nan) for load in loads]
                for m in methods
            ]
        )
        ax.imshow(table, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for (i, j), value in np.ndenumerate(table):
            if np.isfinite(value):
                ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=8,
                        color="black" if value > 0.55 else "white")  # fmt: skip
        ax.set_xticks(range(len(loads)), loads, rotation=25)
        ax.set_yticks(range(len(methods)), methods)
        ax.set_title(f"{kind} requests, %")
    fig.savefig(path)
    plt.close(fig)


def step_times(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Measured time of packed steps of the real model against their rows, with the fitted predictor."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for one in done.get("calibrate", []):
        n, context, seconds = np.array(one.value["steps"]).T
        points = ax.scatter(n, 1e3 * seconds, c=context / n, s=14, cmap="cividis", label="steps")
        fig.colorbar(points, ax=ax, label="tokens of context a row")
        sizes = np.unique(n)
        each = np.array([context[n == size].mean() for size in sizes])
        line = one.value["a"] + one.value["b"] * sizes + one.value["c"] * each
        ax.plot(sizes, 1e3 * line, color="C1", label="a + b n + c L")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("rows of the step")
    ax.set_ylabel("milliseconds")
    ax.legend()
    fig.savefig(path)
    plt.close(fig)


def widths(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Rows a branching request in steps that the budget limited, against what the safe width depends on."""
    import matplotlib.pyplot as plt

    names = {
        "batch": "requests in the step",
        "context": "tokens of context a row",
        "slack": "slack, ms",
    }
    fig, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained", sharey=True)
    for one in done.get("safe_width", []):
        for ax, cause in zip(axes, CAUSES, strict=True):
            values = np.array(one.value[cause]) * (1e3 if cause == "slack" else 1)
            ax.plot(values, one.value["width"], ".", ms=3, alpha=0.4, color="C0")
    for ax, cause in zip(axes, CAUSES, strict=True):
        ax.set_xlabel(names[cause])
    axes[0].set_ylabel("rows a branching request")
    if not any(one.value["width"] for one in done.get("safe_width", [])):
        axes[1].text(0.5, 0.5, "no step reached its budget", ha="center", transform=axes[1].transAxes)
    fig.savefig(path)
    plt.close(fig)


def ablations(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Goodput by progress TPOT as a multiple of off's, for Pace and for Pace with a part left out or wrong.

    One dot is one seed.
    """
    import matplotlib.pyplot as plt

    rows = records[records.metric.eq("goodput, progress") & records.method.str.startswith((PACE, OFF, EAGER))]
    loads = [load for load in dict.fromkeys(rows["load"]) if rows[rows["load"] == load].method.nunique() > 4]
    table = rows[rows["load"].isin(loads)].pivot_table(
        index=["load", "seed"], columns="method", values="value"
    )
    methods = [m for m in dict.fromkeys(rows.method) if m in table and m != OFF]
    fig, ax = plt.subplots(figsize=(7, 0.9 + 0.33 * len(methods)), layout="constrained")
    for k, load in enumerate(loads):
        for i, method in enumerate(methods):
            values = (table.loc[load, method] / table.loc[load, OFF]).to_numpy()
            at = np.full(len(values), i + 0.6 * (k - (len(loads) - 1) / 2) / max(len(loads), 2))
            ax.plot(values, at, "o", ms=3, color=f"C{k % 6}", label=load if i == 0 else None)
    ax.axvline(1, color="0.6", lw=0.8)
    ax.set_yticks(range(len(methods)), methods)
    ax.invert_yaxis()
    ax.set_xlabel("goodput over off's, progress TPOT")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    fig.savefig(path)
    plt.close(fig)


def _main(records: pd.DataFrame) -> pd.Series[bool]:
    found: pd.Series[bool] = records.method.isin(MAIN) | records.method.str.startswith("cap:")
    return found
