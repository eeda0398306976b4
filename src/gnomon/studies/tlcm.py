"""TLCM: do the layers of a real model undo what the layer before wrote, where, and how?

Stages: `correction` (one pass over text: cosines of neighbouring contributions, their nulls, activations by
token type), on the model and on the same architecture with random weights; `sweep` (the preceding
contribution scaled by alpha); `jacobians` (eigenvalues of the correcting layer's response); `steering` (what
the next layer leaves of an injected direction); `emergence` (a small model trained here, measured as it learns).

A *pair* i is layers i and i+1. Tokens are drawn at random, one per document, so that documents, tokens and
clusters coincide; the tokens that later stages use are drawn by `correction` and named in its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.lab import Done, StageContext

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from gnomon.core.models import Loaded
    from gnomon.methods.interpret.tlcm import Trace

ALPHAS = tuple(round(-1 + 0.1 * k, 1) for k in range(21)) + (1.5, 2.0, 2.5, 3.0)
"""The paper's grid, and beyond it, where the correction weakens."""
TOP = 50
"""Directions holding most of a contribution, whose eigenvalues are judged."""
EARLIEST = 8  # tokens drawn for the causal stages have at least this much context


# ------------------------------------------------------------------------------------------- what is there


def correction(
    ctx: StageContext, *, model: str, data: str, tokens: int, length: int, draws: int, seed: int, random: bool
) -> dict[str, Any]:
    """Cosines between neighbouring layers' contributions, per document, with both nulls.

    Args:
        tokens: documents are added until this many tokens are counted.
        length: tokens a document is cut to.
        draws: tokens drawn for the causal stages, one per document.
        random: measure the same architecture with random weights instead (the untrained baseline).
    """
    import torch

    from gnomon.methods.interpret import tlcm

    loaded = load(model, random=random)
    method = "random weights" if random else "model"
    generator = torch.Generator().manual_seed(seed)
    running = {kind: tlcm.RunningSimilarity(kind) for kind in tlcm.KINDS}
    positions, number, ids, drawn = [], [], [], []
    counted = documents = 0
    for name, sequence in sequences(loaded, data, length):
        trace = tlcm.capture(loaded.model, sequence[None])
        for similarity in running.values():
            similarity.update(trace)
        cosines = tlcm.adjacent(trace)  # (pairs, tokens)
        n = cosines.shape[1]
        null = tlcm.null_cross_token(trace, pairs=4 * n, generator=generator)
        budget = {"tokens": n}
        for pair, (real, other) in enumerate(zip(cosines.double().mean(1), null.mean, strict=True)):
            shared = {"method": method, "item": name, "weight": n, "tags": {"pair": pair}, "budget": budget}
            ctx.record(metric="adjacent cosine", value=real, **shared)
            ctx.record(metric="cross-token cosine", value=other, **shared)
        active = tlcm.counts(trace)
        strict = tlcm.counts(trace, tlcm.sigma_threshold(trace.x.shape[-1]))
        for metric, value in (
            ("share of tokens with an activation", (active > 0).double().mean()),
            ("share of tokens with an activation at 4 sigma", (strict > 0).double().mean()),
            ("activations per token", active.double().mean()),
        ):
            ctx.record(method=method, metric=metric, value=value, item=name, weight=n, budget=budget)
        candidates = (trace.position[0] >= EARLIEST).nonzero().flatten()
        if len(candidates) and len(drawn) < draws:
            pick = int(candidates[torch.randint(len(candidates), (1,), generator=generator)])
            at = trace.select(torch.arange(sequence.shape[0])[None]).tolist().index(pick)
            drawn.append({"document": name, "token": pick, "cosines": cosines[:, at].tolist()})
        positions.append(trace.select(trace.position))
        number.append(active)
        ids.append(trace.select(sequence[None]))
        counted, documents = counted + n, documents + 1
        if counted >= tokens:
            break
    matrices = {kind: similarity.result.mean.numpy() for kind, similarity in running.items()}
    np.savez(ctx.dir / "similarity.npz", **matrices)
    np.savez(
        ctx.dir / "positions.npz", position=torch.cat(positions).numpy(), number=torch.cat(number).numpy()
    )
    _record_token_types(ctx, loaded, method, torch.cat(ids), torch.cat(number))
    return {
        "layers": len(matrices["layer"]),
        "width": int(trace.x.shape[-1]),
        "tokens": counted,
        "documents": documents,
        "drawn": drawn,
    }


def _record_token_types(
    ctx: StageContext, loaded: Loaded, method: str, ids: torch.Tensor, number: torch.Tensor
) -> None:
    """Mean activations of every token type (its text is the item, its occurrences the weight)."""
    from gnomon.methods.interpret.tlcm import token_class

    for identifier in ids.unique().tolist():
        here = ids == identifier
        text = str(loaded.tokenizer.decode([identifier]))
        ctx.record(
            method=method,
            metric="activations by class",
            value=number[here].double().mean(),
            item=f"{identifier} {text!r}",
            weight=int(here.sum()),
            tags={"class": token_class(text)},
            budget={"tokens": len(ids)},
        )


# ------------------------------------------------------------------------------------------- how it answers


def sweep(ctx: StageContext, *, measured: Done, model: str, data: str, length: int, tokens: int) -> None:
    """cos(a, b'(alpha a)) over alpha, at drawn tokens: correcting pairs active there against control pairs."""
    from gnomon.methods.interpret import tlcm

    loaded = load(model)
    correcting, control = bands(measured)
    curves: dict[str, list[np.ndarray]] = {"correcting": [], "control": []}
    alphas = np.array(ALPHAS)
    low = (alphas >= -1) & (alphas <= 0.5)
    for draw, trace in drawn_tokens(loaded, measured, data, length, tokens):
        quiet = [i for i in control if draw["cosines"][i] >= tlcm.THRESHOLD]
        active = [i for i in correcting if draw["cosines"][i] < tlcm.THRESHOLD]
        if not (active and quiet):
            continue  # a token without both kinds can't be paired
        for method, pairs in (("correcting", active), ("control", quiet)):
            cosines = np.stack(
                [tlcm.alpha_sweep(loaded.model, trace, i, draw["token"], ALPHAS) for i in pairs]
            )
            slopes = np.polyfit(alphas[low], cosines[:, low].T, 1)[0]
            ctx.record(
                method=method,
                metric="slope over alpha",
                value=slopes.mean(),
                item=draw["document"],
                budget={"calls": len(pairs) * len(ALPHAS)},
            )
            for pair, curve in zip(pairs, cosines, strict=True):
                curves[method].append(np.concatenate([[pair], curve]))
    np.savez(ctx.dir / "curves.npz", alphas=alphas, **{name: np.array(rows) for name, rows in curves.items()})


def jacobians(
    ctx: StageContext,
    *,
    measured: Done,
    model: str,
    data: str,
    length: int,
    tokens: int,
    kind: str,
    seed: int,
) -> None:
    """Eigenvalues of the next layer's response at drawn tokens, one pair each.

    Args:
        kind: "correcting" takes a random correcting pair that is active at the token, "control" a random
            pair without a correction.
    """
    import torch

    from gnomon.methods.interpret import tlcm

    loaded = load(model)
    correcting, control = bands(measured)
    generator = torch.Generator().manual_seed(seed)
    spectra = []
    for draw, trace in drawn_tokens(loaded, measured, data, length, tokens):
        active = [i for i in correcting if draw["cosines"][i] < tlcm.THRESHOLD]
        quiet = [i for i in control if draw["cosines"][i] >= tlcm.THRESHOLD]
        if not (active and quiet):
            continue
        pairs = active if kind == "correcting" else quiet
        pair = pairs[int(torch.randint(len(pairs), (1,), generator=generator))]
        token = draw["token"]
        jacobian = tlcm.layer_jacobian(loaded.model, trace, pair, token)
        a = trace.contribution[pair, 0, token]
        every = tlcm.decompose(jacobian, a, top=len(a))
        energy = float(every.weights.sum())  # |a|^2
        shared = {"method": kind, "item": draw["document"], "budget": {"calls": 1}}
        for metric, value in (
            ("negative share of eigenvalues", (every.eigenvalues < 0).double().mean()),
            ("rayleigh quotient of a", every.strength.sum() / energy),
            ("energy in top directions", every.weights[:TOP].sum() / energy),
            (
                "linearization error at 0.05",
                tlcm.linearity_error(loaded.model, trace, pair, token, jacobian, [0.05])[0],
            ),
        ):
            ctx.record(metric=metric, value=value, **shared)
        for rank, eigenvalue in enumerate(every.eigenvalues[:TOP].tolist()):
            ctx.record(metric="top eigenvalue", value=eigenvalue, tags={"rank": rank, "pair": pair}, **shared)
        spectra.append(every.eigenvalues.sort().values.numpy())
    np.savez(ctx.dir / "spectra.npz", spectra=np.array(spectra))


def steering(
    ctx: StageContext,
    *,
    measured: Done,
    model: str,
    data: str,
    length: int,
    rank: int,
    tokens: int,
    vectors: int,
    strengths: Sequence[float],
    seed: int,
) -> dict[str, int]:
    """What the next layer leaves of vectors from the two eigenspaces of its mean response.

    The mean Jacobian is taken at one half of the drawn tokens, the vectors are injected at the other half, so
    that the answer is about the layer and not about the tokens it was read from.

    Args:
        rank: which correcting pair, 0 = the one with the most negative mean cosine.
        vectors: Gaussian draws; each gives one vector per eigenspace and one as it is, compared pairwise.
        strengths: length of the push as a share of the residual stream's norm.
    """
    import torch

    from gnomon.methods.interpret import tlcm

    loaded = load(model)
    pairs = by_strength(measured)
    if rank >= len(pairs):
        return {}  # fewer correcting pairs than asked for: the claim's rule counts the vectors
    pair = pairs[rank]
    visits = list(drawn_tokens(loaded, measured, data, length, 2 * tokens))
    fit, test = visits[: len(visits) // 2], visits[len(visits) // 2 :]
    stack = torch.stack([tlcm.layer_jacobian(loaded.model, t, pair, d["token"]).cpu() for d, t in fit])
    values, basis = tlcm.symmetric_spectrum(stack)
    draws = torch.randn(
        vectors, len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    spaces = {"negative": basis[:, values < 0], "positive": basis[:, values > 0]}
    directions = {name: draws @ space @ space.T for name, space in spaces.items()} | {"any direction": draws}
    for method, v in directions.items():
        for strength in strengths:
            gains = torch.cat(
                [
                    tlcm.surviving_gain(loaded.model, t, pair, v, strength=strength, tokens=[d["token"]])
                    for d, t in test
                ],
                dim=1,
            )  # (vectors, test tokens)
            for index, gain in enumerate(gains.double().mean(1).tolist()):
                ctx.record(
                    method=method,
                    metric="gain lost in the next layer",
                    value=1 - gain,
                    item=f"{pair}:{index}",
                    weight=1,
                    tags={"strength": strength},
                    budget={"calls": len(test)},
                )
    return {"pair": pair}


# ------------------------------------------------------------------------------------------ how it comes about


def emergence(
    ctx: StageContext,
    *,
    small: str,
    data: str,
    at: Sequence[int],
    batch: int,
    length: int,
    lr: float,
    seed: int,
) -> dict[str, Any]:
    """Train a small model from scratch and measure its neighbouring layers as it learns.

    Args:
        small: a `tiny:` model.
        data: corpus; measured on documents it is not trained on.
        at: optimizer steps after which it is measured; the last is the end of training. 0 is always measured.
    """
    import torch

    from gnomon.core.data import Batches, corpus, split, token_stream, windows
    from gnomon.core.models import load as load_model
    from gnomon.core.train import Step, TrainConfig, train

    loaded = load_model(small)  # initialised from the stage's seed
    parts = split(corpus(data), valid=0.1, test=0.1, seed=0)
    stream = token_stream(parts.train, loaded.tokenizer)
    held_out = windows(token_stream(parts.test, loaded.tokenizer), length)[:40]
    batches = Batches(stream, batch=batch, length=length, generator=torch.Generator().manual_seed(seed))

    def measure(step: int) -> None:
        for name, value, tags in pretraining_state(loaded.model, held_out):
            label = "small model" if step else "small model before training"
            ctx.record(
                method=label,
                metric=name,
                value=value,
                tags={"step": step, **tags},
                budget={"tokens": step * batch * length, "steps": step},
            )

    def on_step(done: Step) -> None:
        if done.step in at:
            measure(done.step)

    measure(0)  # on resume the records so far, with this one, are restored by `train`
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    settings = TrainConfig(steps=max(at), lr=lr, warmup=max(at) // 20, min_lr_ratio=0.1, checkpoint_every=50)
    result = train(loaded.model, batches, optimizer, settings, resume=ctx, on_step=on_step)
    return {"tokens": result.tokens, "loss": result.losses[-1]}


def pretraining_state(model: Any, held_out: torch.Tensor) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(metric, value, tags) of a model in training on held-out windows (each window a cluster).

    `deepest correction` is the smallest over pairs of max(mean cosine, mean cosine - cross-token null), which is
    negative only where a pair lies below 0 and below its null. `pairs beyond chance` counts pairs for which it
    lies below -3/sqrt(d): random weights shared by all tokens give means of that order, however many tokens
    are counted.
    """
    import torch

    from gnomon.core.scoring import token_nll
    from gnomon.methods.interpret import tlcm

    model.eval()
    trace = tlcm.capture(model, held_out)
    real = tlcm.adjacent(trace).double().mean(1)
    null = tlcm.null_cross_token(
        trace, pairs=20_000, generator=torch.Generator().manual_seed(0)
    ).mean.double()
    excess = torch.maximum(real, real - null)
    with torch.no_grad():
        yield "held-out loss", float(token_nll(model, held_out).mean()), {}
    yield "deepest correction", float(excess.min()), {}
    yield "pairs beyond chance", float((excess < -3 / trace.x.shape[-1] ** 0.5).sum()), {}
    for pair, value in enumerate(real.tolist()):
        yield "adjacent cosine", value, {"pair": pair}


# --------------------------------------------------------------------------------------------------- helpers


def load(model: str, *, random: bool = False) -> Loaded:
    """The model under study, or the same architecture with random weights drawn from the stage's seed."""
    import dataclasses

    from gnomon.core.models import load as load_model

    loaded = load_model(model)
    if not random:
        return loaded
    fresh = type(loaded.model)(loaded.model.config).to(loaded.device, loaded.dtype).eval()
    return dataclasses.replace(loaded, model=fresh)


def sequences(loaded: Loaded, data: str, length: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, token ids) of each document, cut to `length`; a BOS goes first if the tokenizer has one of its own."""
    import torch

    from gnomon.core.data import corpus

    tokenizer = loaded.tokenizer
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for document in corpus(data).documents:
        ids = first + tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > 2 * EARLIEST:
            yield document.name, torch.tensor(ids[:length], device=loaded.device)


def drawn_tokens(
    loaded: Loaded, measured: Done, data: str, length: int, tokens: int
) -> Iterator[tuple[dict[str, Any], Trace]]:
    """The first `tokens` tokens that `correction` drew, each with the trace of its document up to it."""
    from gnomon.methods.interpret import tlcm

    drawn = {draw["document"]: draw for draw in measured.value["drawn"][:tokens]}
    for name, sequence in sequences(loaded, data, length):
        if draw := drawn.pop(name, None):
            yield draw, tlcm.capture(loaded.model, sequence[None, : draw["token"] + 1])
        if not drawn:
            return


def mean_cosines(measured: Done) -> tuple[np.ndarray, np.ndarray]:
    """Token-weighted means of the adjacent cosine and of its cross-token null, per pair."""
    from gnomon.lab.records import frame, read_records

    table = frame(read_records(measured.dir / "records.jsonl"))
    table = table.assign(total=table["value"] * table["weight"])
    sums = table.groupby(["metric", "pair"])[["total", "weight"]].sum()
    means = sums["total"] / sums["weight"]
    return means["adjacent cosine"].to_numpy(), means["cross-token cosine"].to_numpy()


def bands(measured: Done) -> tuple[list[int], list[int]]:
    """Pairs that correct and control pairs.

    A pair corrects if its mean cosine lies below 0 and below its cross-token null; a control pair has a mean of
    0 or more. The rest is neither.
    """
    real, null = mean_cosines(measured)
    return np.flatnonzero((real < 0) & (real < null)).tolist(), np.flatnonzero(real >= 0).tolist()


def by_strength(measured: Done) -> list[int]:
    """Correcting pairs, the most negative mean cosine first."""
    real, _ = mean_cosines(measured)
    return sorted(bands(measured)[0], key=lambda pair: real[pair])


# ---------------------------------------------------------------------------------------------------- figures


def band(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """Which layers undo the one before. Each point is the mean cosine between what two neighbouring layers
    add to the residual stream at the same token (95 % interval over documents); below zero, the later layer
    takes back part of what the earlier one wrote. The grey line takes the two contributions from different
    tokens: what a shared, token-independent direction alone would give. Random weights show no such band.
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
    agrees, red opposes. The correction sits beside the diagonal of the whole layers and is mostly the
    work of the MLPs; attention layers agree with each other. Last panel: attention (rows) against MLP (columns).
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
    for row, (name, group) in enumerate(groups):
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
    before the next layer reads it: at alpha = -1 it is gone, at 1 doubled. In correcting pairs the next
    layer's output turns against a as a grows; in control pairs it hardly cares. Thin lines are single pairs.
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
        ax.hist(values, bins=edges, density=True, histtype="stepfilled", alpha=0.35, color=colour, label=kind)
        ax.hist(values, bins=edges, density=True, histtype="step", color=colour)
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set(xlabel="eigenvalue", ylabel="density")
    ax.legend()
    fig.savefig(path)


def steering_gain(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """What survives of a push. A vector is added to the residual stream after a correcting layer's first half;
    plotted is the share of the push along itself that the next layer takes away (below 0: it adds to it). Vectors
    from the negative eigenspace are resisted, those from the positive one are not.
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
    ax.set(xlabel="length of the push / norm of the residual stream", ylabel="share lost")
    ax.legend()
    fig.savefig(path)


def learning(records: pd.DataFrame, done: dict[str, list[Done]], path: Path) -> None:
    """How it comes about. A small model is trained from scratch, one line per seed. Left: the most negative
    mean cosine of neighbouring layers (below its null as well); right: all pairs of the first seed.
    """
    import matplotlib.pyplot as plt

    small = records[records["method"].str.startswith("small model")]
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
