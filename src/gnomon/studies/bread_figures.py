"""Figures of the BREAD study. Each docstring's first paragraph is the caption in the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.lab import Done

if TYPE_CHECKING:
    import pandas as pd

DRAWN = ("adamw", "bread-lora", "bread-lora-partial", "bread-sgd", "badam", "lora", "galore")
"""Competitors whose curves are drawn; the others would hide them."""
KINDS = (
    "weights",
    "masters",
    "gradients",
    "moments",
    "adapters",
    "adapter_gradients",
    "adapter_moments",
    "stray_gradient",
)


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Loss of held-out answers while fine-tuning, each competitor at its best rate; means over seeds, bands from the
    smallest to the largest. BAdam lies above AdamW where frozen blocks hold the active one back.
    """
    import matplotlib.pyplot as plt

    bases = _bases(records)
    fig, axes = plt.subplots(1, len(bases), figsize=(5.6 * len(bases), 3.6), squeeze=False)
    final = records[records["metric"] == "loss"]
    wanted = set(zip(final["method"], final["seed"], final["lr"], final["base"], strict=True))
    rows = records[records["metric"] == "loss while training"]
    rows = rows[rows["base"].notna()]
    keys = zip(rows["method"], rows["seed"], rows["lr"], rows["base"], strict=True)
    rows = rows[[key in wanted for key in keys]]
    for ax, base in zip(axes[0], bases, strict=True):
        here = rows[rows["base"] == base]
        for i, name in enumerate(n for n in DRAWN if n in set(here["method"])):
            by_step = here[here["method"] == name].groupby("step")["value"]
            ax.plot(by_step.mean().index, by_step.mean(), color=f"C{i}", label=name, linewidth=1.2)
            ax.fill_between(
                by_step.mean().index, by_step.min(), by_step.max(), color=f"C{i}", alpha=0.15, linewidth=0
            )
        ax.set(xlabel="step", ylabel="loss (nats per answer token)", title=f"model: {base}")
        ax.legend(fontsize=7)
    fig.savefig(path)


def bytes_and_loss(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What the optimizer keeps, and what comes out. Each point is one seed of one competitor: final loss of held-out
    answers by the peak bytes of its state. LoRA and GaLore have the ranks at which they keep as much as BREAD-LoRA.
    """
    import matplotlib.pyplot as plt

    bases = _bases(records)
    fig, axes = plt.subplots(1, len(bases), figsize=(5.6 * len(bases), 3.8), squeeze=False)
    for ax, base in zip(axes[0], bases, strict=True):
        here = records[records["base"] == base]
        held = here[here["metric"] == "peak state bytes"].groupby("method")["value"].mean()
        losses = here[here["metric"] == "loss"].groupby("method", sort=False)["value"]
        for i, (name, values) in enumerate(losses):
            x, mark = held[name] / 1e6, "os^"[i % 3]
            ax.plot([x] * len(values), values, mark, markersize=4, color=f"C{i % 10}", label=str(name))
        ax.set(xlabel="peak optimizer state (MB)", ylabel="final loss", title=f"model: {base}")
        ax.set_xscale("symlog", linthresh=1e-2)
        ax.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    fig.savefig(path)


def idle_work(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Share of a backward pass's input-gradient work that serves no update, by the depth of the active block (0: the
    first layer, 1: the last). With BREAD, which updates the layers on the way, it is zero.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"] == "idle share of input gradients"]
    fig, ax = plt.subplots(figsize=(6.0, 3.2))
    for i, ((name, model), group) in enumerate(rows.groupby(["method", "model"], sort=False)):
        depth = group["item"].astype(int)
        ax.plot(depth / max(1, depth.max()), group["value"], "o-", markersize=3, color=f"C{i % 10}",
                label=f"{name}, {model}")  # fmt: skip
    ax.set(xlabel="depth of the active block", ylabel="share without use", ylim=(-0.03, 1))
    ax.legend(fontsize=7)
    fig.savefig(path)


def memory(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Memory at 8B and 70B by the formula, in GB before activations: bfloat16 weights, and what each method adds to
    them. The dashed line is what the abstract says is enough. A bar that leaves the axis has its total beside it.
    """
    import matplotlib.pyplot as plt

    rows = records[records["metric"] == "GB by formula"]
    limits = records[records["metric"] == "GB before activations"].groupby("size", sort=False)["claimed"]
    fig, axes = plt.subplots(
        1, limits.ngroups, figsize=(4.8 * limits.ngroups, 3.0), squeeze=False, sharey=True
    )
    for ax, (size, claimed) in zip(axes[0], limits, strict=True):
        limit = float(claimed.iloc[0])
        table = rows[rows["size"] == size].pivot_table(
            index="method", columns="kind", values="value", sort=False
        )
        left = table.iloc[:, 0] * 0
        for i, kind in enumerate(k for k in KINDS if k in table):
            ax.barh(table.index, table[kind], left=left, color=f"C{i}", label=kind.replace("_", " "))
            left = left + table[kind]
        for y, total in enumerate(left):
            if total > 1.4 * limit:
                ax.annotate(f"{total:,.0f}", (1.38 * limit, y), ha="right", va="center", fontsize=8)
        ax.axvline(limit, color="grey", linestyle="--", linewidth=0.8)
        ax.set(xlabel="GB", title=size, xlim=(0, 1.4 * limit))
    axes[0][0].invert_yaxis()  # shared: the methods in their order from above
    axes[0][0].legend(fontsize=6, loc="lower right")
    fig.savefig(path)


def _bases(records: pd.DataFrame) -> list[str]:
    """Names of the models that were fine-tuned, in the order of the records."""
    return list(records[records["metric"] == "loss"]["base"].dropna().unique())
