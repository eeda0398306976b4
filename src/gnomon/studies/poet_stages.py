"""Stages of the POET study beside `pretrain`: what was trained, counts at full size, orders of losses, step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gnomon.lab import Done, StageContext, load_rival
from gnomon.studies.pretraining import budget, load

LLAMA_60M = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
SPECTRA = ("spectrum drift", "orthogonality error", "SVD entropy", "growth of the top singular value")


def measure(ctx: StageContext, *, of: Done, method: str, trials: int) -> None:
    """Loss, spectra and sizes of a trained model."""
    value = of.value
    values = {"loss": value["loss"], "trained numbers": value["trained numbers"]}
    values |= {"state bytes": value["state bytes"]}
    values |= {name: value[f"last {name}"] for name in SPECTRA if f"last {name}" in value}
    for metric, number in values.items():
        ctx.record(
            method=method,
            metric=metric,
            value=number,
            better="lower",
            tags={"lr": of.args["lr"]},
            budget=budget(of, trials),
        )


def spread(ctx: StageContext, *, of: Sequence[Done], method: str, trials: int) -> None:
    """Largest minus smallest loss over a grid of learning rates."""
    losses = [one.value["loss"] for one in of]
    ctx.record(
        method=method,
        metric="spread of loss over learning rates",
        value=max(losses) - min(losses),
        unit="nats",
        better="lower",
        tags={"rates": ", ".join(f"{one.args['lr']:g}" for one in of)},
        budget=budget(of[0], trials),
    )


def order(ctx: StageContext, *, of: Sequence[Done], names: Sequence[str], method: str, trials: int) -> None:
    """1 if each of several models has a lower loss than the one before, else 0; and their losses."""
    losses = [one.value["loss"] for one in of]
    for name, one in zip(names, of, strict=True):
        ctx.record(
            method=method,
            metric="loss by block size",
            value=one.value["loss"],
            better="lower",
            tags={"block size": name, "trained numbers": one.value["trained numbers"]},
            budget=budget(one, trials),
        )
    falls = all(b < a for a, b in pairwise(losses))
    ctx.record(method=method, metric="loss falls with block size", value=float(falls), better="higher")


def counts(ctx: StageContext) -> None:
    """Trained numbers of a 60M Llama at the paper's shapes, counted on a model without weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from gnomon.core.layers import linears
    from gnomon.methods.optim.poet import POETConfig, apply_poet

    def hidden(inner: int) -> Any:
        config = LlamaConfig(**LLAMA_60M, intermediate_size=inner, vocab_size=32_000)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    full = hidden(1376)
    ctx.record(
        method="adamw",
        metric="trained numbers of a 60M Llama",
        value=sum(p.numel() for layer in linears(full).values() for p in layer.parameters()),
    )
    for name, inner, settings in (
        ("poet-bs", 1280, {"variant": "bs", "block_size": 256}),
        ("poet-fs", 1376, {"variant": "fs", "fraction": 0.5}),
    ):
        report = apply_poet(hidden(inner), POETConfig(**settings))  # type: ignore[arg-type]
        ctx.record(method=name, metric="trained numbers of a 60M Llama", value=report.trainable)


def step_times(
    ctx: StageContext,
    *,
    model: str,
    scratch: bool,
    competitors: Mapping[str, Mapping[str, Any]],
    batch: int,
    length: int,
    repeats: int,
    seed: int,
) -> None:
    """Seconds of a training step, in turns; competitors are arguments of `pretrain` by name."""
    import time

    import torch

    from gnomon.core.train import next_token_loss

    generator = torch.Generator().manual_seed(seed)
    ready = {}
    for name, one in competitors.items():
        loaded = load(model, scratch=scratch, dtype="float32")
        entrant = load_rival(one["make"])(
            loaded.model, lr=1e-4, weight_decay=0.0, total_steps=repeats, **one.get("options", {})
        )
        loaded.model.train()
        ready[name] = (loaded.model, entrant.optimizer)
    device = next(iter(ready.values()))[0].device
    vocabulary = next(iter(ready.values()))[0].config.vocab_size
    for repeat in range(-1, repeats):
        ids = torch.randint(vocabulary, (batch, length), generator=generator).to(device)
        for name, (network, optimizer) in ready.items():
            began = time.perf_counter()
            next_token_loss(network, ids).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - began
            if repeat >= 0:  # the first one warms up
                ctx.record(
                    method=name,
                    metric="seconds of a step",
                    value=spent,
                    unit="s",
                    better="lower",
                    item=str(repeat),
                )
