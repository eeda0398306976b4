"""Stages of the NuMuon study: an exact check of the update, pretraining, compression of what was trained.

`pretrain` trains one model and is what tuning tunes; its curves are records of their own metrics, which no claim
reads. `measure` and `compress` record what claims are judged on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext, load_rival

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.core.data import Split
    from gnomon.core.models import Loaded
    from gnomon.methods.optim.numuon import Spectrum

    Rows = Sequence[Tensor]
    """Batches of token ids, each (B, T)."""

EVALUATION_BATCH = 16
CURVE_WINDOWS = 64
"""Held-out windows for a point of a learning curve; the final loss takes all that the study asks for."""
CALIBRATION_BATCH = 8


# ----------------------------------------------------------------------------------------- the update itself


def exact_update(
    ctx: StageContext, *, model: str, scratch: bool, data: str, length: int, draws: int, seed: int
) -> None:
    """Gradients of the model under study: is the update what the paper says it is, for every back end?

    Args:
        draws: feasible random directions that are compared with the oracle's, per matrix.
    """
    import torch

    from gnomon.core.data import Batches
    from gnomon.core.train import next_token_loss
    from gnomon.methods.optim.numuon import BACK_ENDS, lmo_spectral_nuclear, split_muon_params, top_k

    loaded = load(model, scratch=scratch, dtype="float32")
    stream, _ = streams(loaded, data)
    generator = torch.Generator().manual_seed(seed)
    next_token_loss(
        loaded.model, next(Batches(stream, batch=8, length=length, generator=generator)).to(loaded.device)
    ).backward()  # type: ignore[no-untyped-call]
    hidden, _ = split_muon_params(loaded.model)
    distinct = {tuple(p.shape): (name, p) for name, p in hidden if p.grad is not None}  # one of each shape
    for name, p in distinct.values():
        m = p.grad.flatten(1).cpu()  # type: ignore[union-attr]
        for r in (0.25, 0.5):
            k = max(1, round(r * min(m.shape)))
            tags: dict[str, Any] = {"matrix": name, "r": r}
            for method in BACK_ENDS:
                factors = top_k(m, k, method=method, generator=generator)
                sigma = torch.linalg.svdvals(factors.direction.double())
                wanted = (torch.arange(len(sigma)) < len(factors.sigma)).double()
                ctx.record(
                    method="numuon",
                    metric="error of the update's singular values",
                    value=float((sigma - wanted).abs().max()),
                    better="lower",
                    tags={**tags, "back end": method},
                )
            tau = k - 0.5  # with a last, partial direction
            best = float((m.double() * lmo_spectral_nuclear(m.double(), 1.0, tau)).sum())
            lowest = min(float((m.double() * feasible(m, tau, generator)).sum()) for _ in range(draws))
            ctx.record(
                method="numuon",
                metric="how far a feasible draw beats the oracle",
                value=max(0.0, (best - lowest) / abs(best)),
                better="lower",
                tags=tags,
            )
    ctx.record(
        method="numuon",
        metric="difference from torch.optim.Muon at full rank",
        value=from_torch([p for _, p in distinct.values()]),
        better="lower",
    )


def feasible(m: Tensor, tau: float, generator: torch.Generator) -> Tensor:
    """A random direction with ‖Δ‖₂ ≤ 1 and ‖Δ‖_* ≤ τ: half of the time anywhere, else beside the best one."""
    import torch

    from gnomon.methods.optim.numuon import lmo_spectral_nuclear

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    noise = torch.randn(m.shape, generator=generator, dtype=torch.float64) / math.sqrt(m.numel())
    if uniform() < 0.5:
        noise = lmo_spectral_nuclear(m.double(), 1.0, tau) + 10 ** (-3 * uniform()) * noise
    u, s, vh = torch.linalg.svd(noise, full_matrices=False)
    d = s.clamp(max=1)
    drawn: Tensor = (u * (d * (tau / d.sum()).clamp(max=1))) @ vh
    return drawn


def from_torch(matrices: Sequence[nn.Parameter]) -> float:
    """Largest difference between a few steps of NuMuon at full rank in bfloat16 and of torch's Muon."""
    import torch

    from gnomon.methods.optim.numuon import NuMuon

    ours, theirs = ([torch.nn.Parameter(p.detach().cpu().clone()) for p in matrices] for _ in range(2))
    optimizers = (
        NuMuon(ours, lr=0.01, ns_dtype=torch.bfloat16),
        torch.optim.Muon(theirs, lr=0.01, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for optimizer, copies in zip(optimizers, (ours, theirs), strict=True):
            for copy, p in zip(copies, matrices, strict=True):
                copy.grad = p.grad.cpu()  # type: ignore[union-attr]
            optimizer.step()
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------------------------- pretraining


def pretrain(
    ctx: StageContext,
    *,
    method: str,
    make: str,
    seed: int,
    lr: float,
    summed_decay: float,
    model: str,
    scratch: bool,
    data: str,
    steps: int,
    batch: int,
    length: int,
    accumulate: int,
    warmup: float,
    cooldown: float,
    clip: float,
    points: int,
    windows: int,
) -> dict[str, float]:
    """Train a language model and keep it.

    Args:
        make: `module:factory` of the optimizer, see `numuon_optimizers`.
        lr: peak rate.
        summed_decay: Σ_t η_t λ, from which the decay λ follows.
        warmup, cooldown: shares of the run in which the rate rises and falls.
        clip: largest gradient norm; 0 never clips.
        points: of the learning curve, evenly spaced.
        windows: held-out windows for the final loss.

    Returns:
        final loss, λ and costs. The model lies in `model/`.
    """
    import torch

    from gnomon.core import data as texts
    from gnomon.core.models import save
    from gnomon.core.train import Step, TrainConfig, schedule_factor, train
    from gnomon.methods.optim.numuon import spectral_report

    loaded = load(model, scratch=scratch, dtype="float32")
    learnt, held_out = streams(loaded, data)
    config = TrainConfig(
        steps=steps,
        warmup=max(1, round(warmup * steps)),
        schedule="wsd",
        decay=cooldown,
        min_lr_ratio=0.01,
        clip=clip or None,
        accumulate=accumulate,
        checkpoint_every=max(1, steps // 10),
        autocast="bf16" if loaded.device.type == "cuda" else "none",
    )
    factors = sum(schedule_factor(config, t) for t in range(steps))
    decay = summed_decay / (lr * factors)
    optimizer = load_rival(make)(loaded.model, lr=lr, weight_decay=decay, total_steps=steps)
    batches = texts.Batches(learnt, batch=batch, length=length, generator=torch.Generator().manual_seed(seed))
    some = rows(held_out, length, CURVE_WINDOWS)
    at = {round(steps * i / points) for i in range(1, points + 1)}

    tags = {"lr": lr, "summed decay": summed_decay}

    def look(step: int) -> None:
        values = {
            "loss while training": loss_of(loaded.model, some),
            **averages(spectral_report(loaded.model).values(), " while training"),
        }
        for metric, value in values.items():
            ctx.record(method=method, metric=metric, value=value, tags={**tags, "step": step})

    def on_step(done: Step) -> None:
        if done.step in at and ctx.first:
            look(done.step)

    spent = train(loaded.model, batches, optimizer, config, resume=ctx, on_step=on_step)
    if ctx.first:
        save(loaded, ctx.dir / "model")
    return {
        "loss": loss_of(loaded.model, rows(held_out, length, windows)),
        "decay": decay,
        "tokens": spent.tokens,
        "seconds": spent.seconds,
    }


def measure(ctx: StageContext, *, of: Done, method: str, trials: int) -> None:
    """Loss and spectra of a trained model, and the spectra of Gaussian matrices of the same shapes."""
    import torch

    from gnomon.core.models import load as load_model
    from gnomon.methods.optim.numuon import spectral_report, spectrum

    found = spectral_report(load_model(str(of.dir / "model"), dtype="float32", device="cpu").model)
    generator = torch.Generator().manual_seed(ctx.seed)
    gaussian = {name: spectrum(torch.randn(s.shape, generator=generator)) for name, s in found.items()}
    (ctx.dir / "spectra.json").write_text(json.dumps({name: vars(s) for name, s in found.items()}))
    values = {
        "loss": of.value["loss"],
        **averages(found.values()),
        "stable rank over that of Gaussian matrices": mean(
            s.stable_rank / gaussian[name].stable_rank for name, s in found.items()
        ),
    }
    budget = {"tokens": of.value["tokens"], "steps": of.args["steps"], "trials": trials}
    budget["seconds"] = of.value["seconds"]
    tags = {"lr": of.args["lr"], "decay": of.value["decay"], "summed decay": of.args["summed_decay"]}
    for metric, value in values.items():
        ctx.record(method=method, metric=metric, value=value, better="lower", tags=tags, budget=budget)


def catch_up(ctx: StageContext, *, of: Done, reference: Done, method: str, to: str) -> None:
    """Steps after which a learning curve passes the end of another one; both took the same batches."""
    mine, theirs = (curve(done) for done in (of, reference))
    goal = theirs[max(theirs)]
    reached = next((step for step in sorted(mine) if mine[step] <= goal), None)
    ctx.record(
        method=method,
        metric=f"share of the steps to {to}'s final loss",
        value=1.0 if reached is None else reached / max(theirs),
        better="lower",
        tags={"reached": reached is not None},
    )


def curve(trained: Done) -> dict[int, float]:
    """Loss by step of a trained model."""
    lines = (trained.dir / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {int(r["tags"]["step"]): r["value"] for r in records if r["metric"] == "loss while training"}


# ---------------------------------------------------------------------------------------------- compression


def compress(
    ctx: StageContext,
    *,
    of: Done,
    method: str,
    pipeline: str,
    keeps: Sequence[float],
    data: str,
    length: int,
    windows: int,
    calibration: int,
    settings: dict[str, Any],
    trials: int,
) -> None:
    """Losses of a trained model after one pipeline, at several keep ratios.

    Args:
        calibration: windows of the training text that the pipeline sees.
        settings: of the pipeline, by field name.
    """
    import torch

    from gnomon.core.models import load as load_model
    from gnomon.methods.compress import lowrank

    loaded = load_model(str(of.dir / "model"), dtype="float32")
    learnt, held_out = streams(loaded, data)
    generator = torch.Generator().manual_seed(ctx.seed)
    seen = drawn_rows(learnt, length, calibration, generator, loaded.device)
    judged = rows(held_out, length, windows)
    dense = loss_of(loaded.model, judged)
    config = pipeline_config(pipeline, settings)
    for keep in keeps:
        small = lowrank.compress_lowrank(loaded.model, pipeline, keep=keep, calib=seen, config=config)
        loss = loss_of(small, judged)
        values = {"loss after compression": loss, "rise of loss": loss - dense}
        budget = {"tokens": of.value["tokens"], "steps": of.args["steps"], "trials": trials}
        tags = {"pipeline": pipeline, "keep": keep, "kept": lowrank.kept_share(small)}
        for metric, value in values.items():
            ctx.record(
                method=method,
                metric=metric,
                value=value,
                unit="nats",
                better="lower",
                tags=tags,
                budget=budget,
            )


def pipeline_config(pipeline: str, settings: Mapping[str, Any]) -> Any:
    """Settings of a pipeline from JSON values."""
    from gnomon.methods.compress import lowrank

    plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    if "update" in plain:
        plain["update"] = lowrank.LoraUpdate(**plain["update"])
    return lowrank.CONFIGS[pipeline](**plain)


# -------------------------------------------------------------------------------------------------- helpers


def load(model: str, *, scratch: bool, dtype: str | None = None) -> Loaded:
    """The model under study; with `scratch` its architecture with weights drawn from the stage's seed."""
    import dataclasses

    from gnomon.core.models import load as load_model

    loaded = load_model(model, dtype=dtype)
    if not scratch or model.startswith("tiny:"):
        return loaded
    fresh = type(loaded.model)(loaded.model.config).to(loaded.device, loaded.dtype).eval()
    return dataclasses.replace(loaded, model=fresh)


def parts(data: str) -> Split:
    """Documents to learn, to look at while training and to judge on."""
    from gnomon.core.data import corpus, split

    return split(corpus(data), valid=0.1, test=0.05, seed=0)


def streams(loaded: Loaded, data: str) -> tuple[Tensor, Tensor]:
    """Token ids to learn and to judge on; no document is in both."""
    from gnomon.core.data import token_stream

    whole = parts(data)
    return token_stream(whole.train, loaded.tokenizer), token_stream(whole.valid, loaded.tokenizer)


def rows(stream: Tensor, length: int, count: int) -> Rows:
    """Up to `count` windows, spread evenly over the stream, in batches."""
    import torch

    from gnomon.core.data import windows

    found = windows(stream, length)
    at = torch.linspace(0, len(found) - 1, min(count, len(found))).round().long()
    return list(torch.split(found[at], EVALUATION_BATCH))


def drawn_rows(
    stream: Tensor, length: int, count: int, generator: torch.Generator, device: torch.device
) -> Rows:
    """`count` windows at random places, in batches."""
    from gnomon.core.data import Batches

    batches = Batches(stream, batch=CALIBRATION_BATCH, length=length, generator=generator)
    return [next(batches).to(device) for _ in range(count // CALIBRATION_BATCH)]


def loss_of(model: nn.Module, batches: Rows) -> float:
    """Mean negative log-likelihood of a token, in nats."""
    import torch

    from gnomon.core.scoring import evaluating, token_nll

    device = next(model.parameters()).device
    with evaluating(model):
        return float(torch.cat([token_nll(model, ids.to(device)) for ids in batches]).mean())


def averages(found: Iterable[Spectrum], suffix: str = "") -> dict[str, float]:
    """Means over matrices. Ranks are those of matrices of different sizes, so they compare models of one shape."""
    spectra = list(found)
    return {
        f"stable rank{suffix}": mean(s.stable_rank for s in spectra),
        f"effective rank{suffix}": mean(s.effective_rank for s in spectra),
        f"rank of 95 % energy{suffix}": mean(float(s.rank_95) for s in spectra),
    }


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
