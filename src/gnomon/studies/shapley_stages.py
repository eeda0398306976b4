"""Stages of the Model Shapley study on trained models: correlation, deletion, fine-tuning on a new domain, GPTQ."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError
from gnomon.lab import Done, StageContext, load_rival
from gnomon.studies.pretraining import (
    CURVE_WINDOWS,
    Entrant,
    Task,
    fit,
    load,
    loss_of,
    rows,
    streams,
)
from gnomon.studies.shapley_entrants import RELEASED
from gnomon.studies.shapley_games import left_out, neuron_game, players_of, rank_correlation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gnomon.methods.compress.shapley import ShapleyScores, UnitMasks

BRUTE, LEFT_OUT, HALVES = (
    "rank correlation with brute force",
    "rank correlation with leave-one-out",
    "split-half rank correlation",
)
RISE, REAL_RISE = "rise of loss without units", "rise of loss without units, real model"
ADAPTED = "loss on the new domain"
QUANTISED, BY_QUANTISING = "loss after quantisation", "rise of loss by quantisation"
PROBE_BATCH = 8
NEURONS, GROUPS = "neurons", "groups of neurons"
ALL_ROWS, BOTTOM = "all weights", "shapley, lowest rows"
GPTQ, GUIDED, ROUNDED, OBD = "GPTQ", "Shapley-guided GPTQ", "round to nearest", "OBD"


# ------------------------------------------------------------------------------------------------ texts, scores


def tokens(ctx: StageContext, *, model: str, data: str, domain: str) -> dict[str, int]:
    """Token ids of both texts, learnt and held out, made once for all other stages."""
    from safetensors.torch import save_file

    loaded = load(model, scratch=False, dtype="float32")
    found: dict[str, Tensor] = {}
    for name, recipe in (("data", data), ("domain", domain)):
        learnt, held_out = streams(loaded, recipe)
        found |= {f"{name} learnt": learnt.int(), f"{name} held out": held_out.int()}
    save_file(found, ctx.dir / "tokens.safetensors")
    return {name: len(ids) for name, ids in found.items()}


def stream(texts: Done, name: str) -> Tensor:
    """One of the token streams."""
    from safetensors import safe_open

    with safe_open(texts.dir / "tokens.safetensors", framework="pt") as file:
        ids: Tensor = file.get_tensor(name).long()
    return ids


def drawn(ids: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Windows at random places, (count, length)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length + 1, (count, 1), generator=generator)
    return ids[starts + torch.arange(length)]


def base_model(of: Done) -> Any:
    """A trained model, in evaluation mode."""
    from gnomon.core.models import load as load_model

    return load_model(str(of.dir / "model"), dtype="float32")


def scored(
    makes: Mapping[str, str], network: nn.Module, ids: Tensor, units: Any, seed: int
) -> dict[str, ShapleyScores]:
    """The scores of all competitors on the same probe windows."""
    import torch

    batches = list(torch.split(ids.to(next(network.parameters()).device), PROBE_BATCH))
    return {
        name: load_rival(make)(
            network, batches, units=units, generator=torch.Generator().manual_seed(1_000_003 * (seed + 1))
        )
        for name, make in makes.items()
    }


# ------------------------------------------------------------------------- correlation with games, deletion curves


def brute_force(
    ctx: StageContext,
    *,
    of: Done,
    texts: Done,
    makes: Mapping[str, str],
    players: int,
    probes: int,
    length: int,
    groups: bool,
    seed: int,
) -> None:
    """Exact Shapley values of a few neurons by all coalitions; and of all neurons in as many groups.

    Args:
        players: units of each game.
        probes: windows that are both the game's and the scores'.
        groups: also the game whose players are random groups that hold all neurons.
    """
    import torch

    from gnomon.methods.compress.shapley import exact_shapley, layout_of

    network = base_model(of).model
    device = next(network.parameters()).device
    ids = drawn(stream(texts, "data learnt"), probes, length, seed).to(device)
    layout = layout_of(network, "mlp_neuron")
    every = [(k, i) for k, group in enumerate(layout.groups) for i in range(group.size)]
    generator = torch.Generator().manual_seed(seed)
    order = [every[i] for i in torch.randperm(len(every), generator=generator).tolist()]
    games: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
        NEURONS: (order[:players], list(range(players)))
    }
    if groups:
        games[GROUPS] = (order, [i % players for i in range(len(order))])
    for name, (choice, owners) in games.items():
        units = players_of(layout, choice, owners)
        exact = exact_shapley(neuron_game(network, units, ids), players, at_once=1 << players)
        # the same game for all: its players, its windows
        for method, scores in scored(makes, network, ids, lambda _, units=units: units, seed).items():
            ctx.record(
                method=method,
                metric=BRUTE,
                value=rank_correlation(scores.flat().cpu(), exact),
                better="higher",
                tags={"game": name},
                budget={"tokens": ids.numel()},
            )


def deletion(
    ctx: StageContext,
    *,
    of: Done,
    texts: Done,
    makes: Mapping[str, str],
    probes: int,
    length: int,
    windows: int,
    left: int,
    shares: Sequence[float],
    seed: int,
) -> dict[str, float]:
    """Leave-one-out and split-half correlation of the scores, and losses without the lowest neurons of all layers.

    Args:
        probes: windows of the training text that are scored on.
        left: neurons that are left out one at a time.
        shares: of the neurons that are dropped.
    """
    import torch

    from gnomon.methods.compress.shapley import deactivate, layout_of, select_top

    network = base_model(of).model
    device = next(network.parameters()).device
    ids = drawn(stream(texts, "data learnt"), probes, length, seed)
    judged = rows(stream(texts, "data held out"), length, windows)
    budget = {"tokens": ids.numel()}
    layout = layout_of(network, "mlp_neuron")
    every = [(k, i) for k, group in enumerate(layout.groups) for i in range(group.size)]
    at = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:left]
    units = players_of(layout, [every[i] for i in at.tolist()], list(range(len(at))))
    game = neuron_game(network, units, torch.cat(list(judged)).to(device))
    effect = left_out(game, len(at))
    whole = scored(makes, network, ids, "mlp_neuron", seed)
    halves = [
        scored(makes, network, half, "mlp_neuron", seed + k) for k, half in enumerate((ids[::2], ids[1::2]))
    ]
    dense = loss_of(network, judged)
    for method, scores in whole.items():
        phi = scores.flat().cpu()
        values = {
            LEFT_OUT: rank_correlation(phi[at], effect),
            HALVES: rank_correlation(*(half[method].flat().cpu() for half in halves)),
        }
        for metric, value in values.items():
            ctx.record(method=method, metric=metric, value=value, better="higher", budget=budget)
        for share in shares:
            masks = select_top(scores, 1 - share, per="global", by="signed")
            with deactivate(network, masks):
                value = loss_of(network, judged) - dense
            ctx.record(
                method=method,
                metric=RISE,
                value=value,
                unit="nats",
                better="lower",
                tags={"dropped": share, "kept": masks.share},
                budget=budget,
            )
    return {"loss": dense}


def real_deletion(
    ctx: StageContext,
    *,
    model: str,
    data: str,
    makes: Mapping[str, str],
    probes: int,
    length: int,
    windows: int,
    shares: Sequence[float],
    seed: int,
) -> dict[str, float]:
    """Deletion curves on a pretrained model; shown, not judged."""
    from gnomon.methods.compress.shapley import deactivate, select_top

    loaded = load(model, scratch=False, dtype="float32")
    learnt, held_out = streams(loaded, data)
    ids = drawn(learnt, probes, length, seed)
    judged = rows(held_out, length, windows)
    dense = loss_of(loaded.model, judged)
    for method, scores in scored(makes, loaded.model, ids, "mlp_neuron", seed).items():
        for share in shares:
            masks = select_top(scores, 1 - share, per="global", by="signed")
            with deactivate(loaded.model, masks):
                value = loss_of(loaded.model, judged) - dense
            ctx.record(
                method=method,
                metric=REAL_RISE,
                value=value,
                unit="nats",
                better="lower",
                tags={"dropped": share, "kept": masks.share, "model": model},
                budget={"tokens": ids.numel()},
            )
    return {"loss": dense}


# ------------------------------------------------------------------------------------------ a new domain


def adapt(
    ctx: StageContext,
    *,
    of: Done,
    texts: Done,
    method: str,
    make: str,
    lowest: bool,
    ratio: float,
    lr: float,
    steps: int,
    batch: int,
    length: int,
    probes: int,
    windows: int,
    warmup: float,
    points: int,
    seed: int,
) -> dict[str, float]:
    """Train the chosen rows of a trained model on another text; all else stays as it is.

    Args:
        make: the score; "" trains all weights.
        lowest: train the rows with the lowest scores instead of the highest.
        ratio: share of each layer's rows.
        probes: windows of the new text's training part that rows are scored on.
    """
    import torch

    from gnomon.core import data as corpora
    from gnomon.core.train import TrainConfig
    from gnomon.methods.compress.shapley import MaskedTraining

    loaded = base_model(of)
    learnt, held_out = (stream(texts, f"domain {part}") for part in ("learnt", "held out"))
    numbers = sum(p.numel() for p in loaded.model.parameters())
    probe = drawn(learnt, probes, length, seed)
    training = None
    if make:
        scores = scored({method: make}, loaded.model, probe, "row", seed)[method]
        masks = chosen(scores, ratio, lowest=lowest)
        training = MaskedTraining(loaded.model, masks, freeze="released" if method == RELEASED else "all")
        numbers = training.trained
    optimizer = torch.optim.AdamW(
        [p for p in loaded.model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
    )
    if training is not None:
        training.watch(optimizer)
    some, judged = (rows(held_out, length, count) for count in (CURVE_WINDOWS, windows))
    task = Task(
        corpora.Batches(learnt, batch=batch, length=length, generator=torch.Generator().manual_seed(seed)),
        glance=lambda network: loss_of(network, some),
        judge=lambda network: loss_of(network, judged),
    )
    config = TrainConfig(
        steps=steps,
        warmup=max(1, round(warmup * steps)),
        schedule="linear",
        checkpoint_every=max(1, steps // 5),
    )
    before = loss_of(loaded.model, judged)
    _, value = fit(
        ctx,
        loaded,
        Entrant(optimizer, numbers=numbers, keep=False),
        task,
        config,
        method=method,
        points=points,
        tags={"lr": lr},
        keep=False,
    )
    return {**value, "before": before, "probe tokens": probe.numel() if make else 0}


def chosen(scores: ShapleyScores, ratio: float, *, lowest: bool) -> UnitMasks:
    """The highest or lowest rows of each layer."""
    from dataclasses import replace

    from gnomon.methods.compress.shapley import select_top

    if lowest:
        scores = replace(scores, phi={name: -phi for name, phi in scores.phi.items()})
    return select_top(scores, ratio, per="layer", by="signed")


def measure_adapted(ctx: StageContext, *, of: Done, method: str, trials: int) -> None:
    """The loss of an adapted model, with what it cost."""
    ctx.record(
        method=method,
        metric=ADAPTED,
        value=of.value["loss"],
        unit="nats",
        better="lower",
        tags={
            "lr": of.args["lr"],
            "trained": of.value["trained numbers"],
            "before": of.value["before"],
            "state bytes": of.value["state bytes"],
        },
        budget={"tokens": of.value["tokens"], "steps": of.args["steps"], "trials": trials},
    )


# ---------------------------------------------------------------------------------------------- quantisation


def quantise(
    ctx: StageContext,
    *,
    of: Done,
    texts: Done,
    bits: int,
    hessian: str,
    beta: float,
    damping: float,
    probes: int,
    length: int,
    windows: int,
    seed: int,
) -> dict[str, float]:
    """Held-out losses after and before GPTQ of all linear maps of the decoder layers, one scale a row.

    Args:
        hessian: as in `GPTQConfig`.
        beta: share of the Shapley correction of H's diagonal; 0 is plain GPTQ.
        probes: windows that are calibrated on.
        seed: of these.
    """
    import torch

    from gnomon.methods.compress.gptq import GPTQConfig, quantise_model
    from gnomon.methods.compress.shapley import shapley_gptq_hessian

    if hessian not in ("full", "diagonal", "none"):
        raise UsageError(f"hessian={hessian!r} must be 'full', 'diagonal' or 'none'.")
    network = base_model(of).model
    calib = torch.split(drawn(stream(texts, "data learnt"), probes, length, seed), PROBE_BATCH)
    config = GPTQConfig(bits=bits, damping=damping, hessian=hessian)  # type: ignore[arg-type]
    reweigh = functools.partial(shapley_gptq_hessian, beta=beta) if beta else None
    judged = rows(stream(texts, "data held out"), length, windows)
    dense = loss_of(network, judged)
    quantise_model(network, list(calib), config, reweigh=reweigh)
    return {"loss": loss_of(network, judged), "dense": dense}


def measure_quantised(ctx: StageContext, *, of: Done, method: str, trials: int) -> None:
    """The loss of a quantised model; the tuned setting stands in the tags."""
    args = of.args
    for metric, value in (
        (QUANTISED, of.value["loss"]),
        (BY_QUANTISING, of.value["loss"] - of.value["dense"]),
    ):
        ctx.record(
            method=method,
            metric=metric,
            value=value,
            unit="nats",
            better="lower",
            tags={"bits": args["bits"], "beta": args["beta"], "damping": args["damping"]},
            budget={"tokens": args["probes"] * args["length"], "trials": trials},
        )
