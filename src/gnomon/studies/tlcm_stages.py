"""Stages of the TLCM study: what is measured, each in a function that a worker process can run.

`correction` takes one pass over text (cosines of neighbouring contributions, their nulls, activations by token
type); `sweep` scales the preceding contribution by alpha; `jacobians` takes the eigenvalues of the correcting
layer's response; `steering` asks what the next layer leaves of an injected direction; `emergence` trains a small
model and measures it as it learns.

A *pair* i is layers i and i+1. Tokens for the causal stages are drawn at random by `correction`, one per
document, so that documents, tokens and clusters coincide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.lab import Done, StageContext

if TYPE_CHECKING:
    import torch

    from gnomon.core.models import Loaded
    from gnomon.methods.interpret.tlcm import Trace

ALPHAS = (*(round(-1 + 0.1 * k, 1) for k in range(21)), 1.5, 2.0, 2.5, 3.0)
"""The paper's grid, and beyond it, where the correction weakens."""
KINDS = ("layer", "attn", "mlp", "attn-mlp")
TOP = 50
"""Directions holding most of a contribution, whose eigenvalues are judged."""
EARLIEST = 8  # tokens drawn for the causal stages have at least this much context


# ------------------------------------------------------------------------------------------- what is there


def correction(
    ctx: StageContext,
    *,
    model: str,
    data: str,
    tokens: int,
    length: int,
    threshold: float,
    draws: int,
    seed: int,
    random: bool,
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
    running = {kind: tlcm.RunningSimilarity(kind) for kind in KINDS}
    positions: list[torch.Tensor] = []
    number: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    drawn: list[dict[str, Any]] = []
    counted = documents = 0
    for name, sequence in sequences(loaded, data, length):
        trace = tlcm.capture(loaded.model, sequence[None])
        for matrix in running.values():
            matrix.update(trace)
        cosines = tlcm.adjacent(trace)  # (pairs, tokens)
        n = cosines.shape[1]
        null = tlcm.null_cross_token(trace, pairs=4 * n, generator=generator)
        budget = {"tokens": n}
        for pair, (real, other) in enumerate(zip(cosines.double().mean(1), null.mean, strict=True)):
            shared = {"method": method, "item": name, "weight": n, "tags": {"pair": pair}, "budget": budget}
            ctx.record(metric="adjacent cosine", value=real, **shared)
            ctx.record(metric="cross-token cosine", value=other, **shared)
        active = tlcm.counts(trace, threshold)
        strict = tlcm.counts(trace, tlcm.sigma_threshold(trace.x.shape[-1]))
        for metric, value in (
            ("share of tokens with an activation", (active > 0).double().mean()),
            ("share of tokens with an activation at 4 sigma", (strict > 0).double().mean()),
            ("activations per token", active.double().mean()),
        ):
            ctx.record(method=method, metric=metric, value=value, item=name, weight=n, budget=budget)
        candidates = (trace.position[0] >= EARLIEST).nonzero().flatten().tolist()
        if len(candidates) and len(drawn) < draws:
            pick = candidates[int(torch.randint(len(candidates), (1,), generator=generator))]
            at = int(trace.counted[0, :pick].sum())  # its place among the counted tokens
            drawn.append({"document": name, "token": pick, "cosines": cosines[:, at].tolist()})
        positions.append(trace.select(trace.position).cpu())
        number.append(active.cpu())
        ids.append(trace.select(sequence[None]).cpu())
        counted, documents = counted + n, documents + 1
        if counted >= tokens:
            break
    matrices = {kind: matrix.result.mean.cpu().numpy() for kind, matrix in running.items()}
    np.savez(ctx.dir / "similarity.npz", allow_pickle=False, **matrices)
    np.savez(
        ctx.dir / "positions.npz", position=torch.cat(positions).numpy(), number=torch.cat(number).numpy()
    )
    _record_token_types(ctx, loaded, method, torch.cat(ids), torch.cat(number))
    record_text(ctx, method, data, counted)
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

    for identifier in sorted(set(ids.tolist())):
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


def sweep(
    ctx: StageContext, *, measured: Done, model: str, data: str, length: int, threshold: float, tokens: int
) -> None:
    """cos(a, b'(alpha a)) over alpha, at drawn tokens: correcting pairs active there against control pairs."""
    from gnomon.methods.interpret import tlcm

    loaded = load(model)
    correcting, control = bands(measured)
    curves: dict[str, list[np.ndarray]] = {"correcting": [], "control": []}
    alphas = np.array(ALPHAS)
    low = (alphas >= -1) & (alphas <= 0.5)
    for draw, trace in drawn_tokens(loaded, measured, data, length, tokens):
        active, quiet = split_pairs(draw, correcting, control, threshold)
        if not (active and quiet):
            continue  # a token without both kinds can't be paired
        for method, pairs in (("correcting", active), ("control", quiet)):
            cosines = np.stack(
                [tlcm.alpha_sweep(loaded.model, trace, i, draw["token"], ALPHAS).cpu() for i in pairs]
            )
            slopes = np.polyfit(alphas[low], cosines[:, low].T, 1)[0]
            for pair, slope in zip(pairs, slopes, strict=True):
                ctx.record(
                    method=method,
                    metric="slope over alpha",
                    value=slope,
                    item=draw["document"],
                    tags={"pair": pair},
                    budget={"calls": len(ALPHAS)},
                )
            for pair, curve in zip(pairs, cosines, strict=True):
                curves[method].append(np.concatenate([[pair], curve]))
    for method, rows in curves.items():
        ctx.record(method=method, metric="pairs swept", value=len({row[0] for row in rows}))
    named = {name: np.array(rows) for name, rows in curves.items()}
    np.savez(ctx.dir / "curves.npz", allow_pickle=False, alphas=alphas, **named)


def jacobians(
    ctx: StageContext,
    *,
    measured: Done,
    model: str,
    data: str,
    length: int,
    threshold: float,
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
        active, quiet = split_pairs(draw, correcting, control, threshold)
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
        for eigenvalue in every.eigenvalues[:TOP].tolist():
            ctx.record(metric="top eigenvalue", value=eigenvalue, **shared)
        spectra.append(every.eigenvalues.sort().values.cpu().numpy())
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
    held_out = windows(token_stream(parts.test, loaded.tokenizer), length)[:40].to(loaded.device)
    batches = Batches(stream, batch=batch, length=length, generator=torch.Generator().manual_seed(seed))

    def measure(step: int) -> None:
        for name, value, tags in pretraining_state(loaded.model, held_out):
            ctx.record(
                method="small model",
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
    record_text(ctx, "small model", data, result.tokens)
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


def record_text(ctx: StageContext, method: str, data: str, tokens: int) -> None:
    """How much of which text was read, with the hash of the text: the same recipe differs between Pythons."""
    from gnomon.core.data import corpus
    from gnomon.core.refs import portable

    tags = {"text": portable(data), "sha256": corpus(data).sha256[:16]}
    ctx.record(method=method, metric="tokens read", value=tokens, tags=tags)


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


def split_pairs(
    draw: dict[str, Any], correcting: list[int], control: list[int], threshold: float
) -> tuple[list[int], list[int]]:
    """Correcting pairs that are active at a drawn token, and control pairs that are not."""
    cosines = draw["cosines"]
    return [i for i in correcting if cosines[i] < threshold], [i for i in control if cosines[i] >= threshold]


def by_strength(measured: Done) -> list[int]:
    """Correcting pairs, the most negative mean cosine first."""
    real, _ = mean_cosines(measured)
    return sorted(bands(measured)[0], key=lambda pair: real[pair])
