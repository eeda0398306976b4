"""Stages of the NuMuon study: an exact check of the update, spectra and compression of what was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext
from gnomon.studies.pretraining import budget, load, loss_of, rows, streams

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.methods.optim.numuon import Spectrum

    Rows = Sequence[Tensor]
    """Batches of token ids, each (B, T)."""

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


# ------------------------------------------------------------------------------------- what was trained


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
    tags = {"lr": of.args["lr"], "decay": of.value["decay"], "summed decay": of.args["summed_decay"]}
    for metric, value in values.items():
        ctx.record(
            method=method, metric=metric, value=value, better="lower", tags=tags, budget=budget(of, trials)
        )


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
        tags = {"pipeline": pipeline, "keep": keep, "kept": lowrank.kept_share(small)}
        for metric, value in values.items():
            ctx.record(
                method=method,
                metric=metric,
                value=value,
                unit="nats",
                better="lower",
                tags=tags,
                budget=budget(of, trials),
            )


def pipeline_config(pipeline: str, settings: Mapping[str, Any]) -> Any:
    """Settings of a pipeline from JSON values."""
    from gnomon.methods.compress import lowrank

    plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    if "update" in plain:
        plain["update"] = lowrank.LoraUpdate(**plain["update"])
    return lowrank.CONFIGS[pipeline](**plain)


# -------------------------------------------------------------------------------------------------- helpers


def drawn_rows(
    stream: Tensor, length: int, count: int, generator: torch.Generator, device: torch.device
) -> Rows:
    """`count` windows at random places, in batches."""
    from gnomon.core.data import Batches

    batches = Batches(stream, batch=CALIBRATION_BATCH, length=length, generator=generator)
    return [next(batches).to(device) for _ in range(count // CALIBRATION_BATCH)]


def spectra(model: nn.Module) -> dict[str, float]:
    """Mean ranks of the hidden matrices, to be watched while training."""
    from gnomon.methods.optim.numuon import spectral_report

    return averages(spectral_report(model).values())


def averages(found: Iterable[Spectrum]) -> dict[str, float]:
    """Means over matrices. Ranks are those of matrices of different sizes, so they compare models of one shape."""
    spectra = list(found)
    return {
        "stable rank": mean(s.stable_rank for s in spectra),
        "effective rank": mean(s.effective_rank for s in spectra),
        "rank of 95 % energy": mean(float(s.rank_95) for s in spectra),
    }


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
