"""Stages of the NF12 study: what weights hold, what the format does to them, and how fast it is.

`weights` and `trained` count the bits of a pretrained model and of one trained here; `patterns` decodes every
pattern under every base; `instructions` counts those of compiled loops. What times is in `nf12_timing.py`, what
runs a whole model in `nf12_serving.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gnomon.lab import StageContext
from gnomon.studies.nf12_peers import peers

if TYPE_CHECKING:
    pass


# ------------------------------------------------------------------------------------ what weights hold


def weights(ctx: StageContext, *, model: str, min_elements: int) -> dict[str, Any]:
    """Entropy, window, size and losslessness of every matrix of a pretrained model."""
    from gnomon.core.models import load

    loaded = load(model, dtype="bfloat16")
    return count_bits(ctx, loaded.model, "pretrained", min_elements)


def trained(
    ctx: StageContext,
    *,
    small: str,
    data: str,
    steps: int,
    batch: int,
    length: int,
    lr: float,
    min_elements: int,
    seed: int,
) -> dict[str, Any]:
    """The same of a small model trained here, with float32 master weights, and stored in bfloat16."""
    import torch

    from gnomon.core.data import Batches, corpus, split, token_stream
    from gnomon.core.models import load
    from gnomon.core.train import TrainConfig, train

    loaded = load(small)  # initialised from the stage's seed
    parts = split(corpus(data), valid=0.1, test=0.1, seed=0)
    batches = Batches(
        token_stream(parts.train, loaded.tokenizer),
        batch=batch,
        length=length,
        generator=torch.Generator().manual_seed(seed),
    )
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    settings = TrainConfig(steps=steps, lr=lr, warmup=steps // 20, min_lr_ratio=0.1, checkpoint_every=50)
    done = train(loaded.model, batches, optimizer, settings, resume=ctx)
    ctx.record(
        method="trained here",
        metric="training loss",
        value=done.losses[-1],
        unit="nats",
        better="lower",
        budget={"tokens": done.tokens, "steps": steps},
    )
    return count_bits(ctx, loaded.model.to(torch.bfloat16), "trained here", min_elements)


def count_bits(ctx: StageContext, model: Any, method: str, min_elements: int) -> dict[str, Any]:
    """Records per matrix (item, weighted by its size) and, weighted over all of them, per model."""
    import torch

    from gnomon.methods.compress.nf12 import NF12Config, Patterns, choose, encode

    config = NF12Config(min_elements=min_elements)
    sums: dict[str, float] = {}
    total = raw = 0
    bits = 0.0
    for name, parameter in model.named_parameters():  # each shared one once
        w = parameter.detach()
        bits += 16 * w.numel()
        if w.dim() != 2 or w.numel() < min_elements:
            raw += w.numel()
            continue
        planes = encode(w)
        share = planes.exceptions / planes.ex.numel()
        chosen, _ = choose(w, config)
        bits -= 0 if chosen is None else 16 * w.numel() - 8 * planes.nbytes
        found = Patterns.of(w)
        columns = w.shape[1]
        measured = {
            "joint entropy": found.joint.corrected,
            "exponent entropy": found.exponent.corrected,
            "share in the window": found.in_window(planes.base),
            "exceptional groups": share,
            "NF12 bits": planes.bits_per_weight,
            "Huffman bits": found.huffman_bits,
        }
        same = planes.decode().view(torch.int16) == w.view(torch.int16)
        checks = {
            "weights that differ": float((~same).sum()),
            "bits beyond 12 + 16 f": planes.bits_per_weight
            - (12 + 16 * share) * (-(-columns // 8) * 8 / columns),
        }
        for metric, value in {**measured, **checks}.items():
            ctx.record(
                method=method, metric=metric, value=value, item=name, weight=w.numel(), tags={"rows": len(w)}
            )
        for metric, value in measured.items():
            sums[metric] = sums.get(metric, 0.0) + value * w.numel()
        total += w.numel()
    for metric, value in sums.items():
        ctx.record(method=method, metric=f"{metric}, all matrices", value=value / total, unit="")
    ctx.record(method=method, metric="bits a weight, whole model", value=bits / (total + raw), unit="bits")
    return {"matrices": total, "raw": raw}


def file_sizes(ctx: StageContext, *, model: str) -> dict[str, Any]:
    """Bits a weight of general file compressors on the model's matrices, where they are installed."""
    import torch

    from gnomon.core.models import load

    whole = torch.cat(
        [p.detach().flatten() for p in load(model, dtype="bfloat16").model.parameters() if p.dim() == 2]
    )
    found, left_out = peers(whole, torch.get_num_threads())
    for peer in found:
        size = sum(map(len, peer.coded))
        ctx.record(method=peer.name, metric="bits a weight", value=8 * size / whole.numel(), unit="bits")
    return {"left out": left_out}


# --------------------------------------------------------------------------------------- what the format does


def patterns(ctx: StageContext, *, bases: Sequence[int]) -> dict[str, Any]:
    """All 65,536 patterns in three orders through every implementation that runs here, for each base."""
    import torch

    from gnomon.kernels import native
    from gnomon.kernels import nf12 as kernels
    from gnomon.methods.compress.nf12 import encode

    numeric = torch.arange(65536, dtype=torch.int32)
    orders = {
        "numeric": numeric,
        "permuted": numeric[torch.randperm(65536, generator=torch.Generator().manual_seed(ctx.seed))],
        "repeated": numeric.repeat_interleave(8),  # groups of one pattern
    }
    implementations = ["reference", *(isa for isa in native.ISAS if native.why_not(isa) is None)]
    for order, values in orders.items():
        w = values.to(torch.int16).view(-1, 256).view(torch.bfloat16)
        wrong = dict.fromkeys(implementations, 0)
        beyond = 0.0
        groups: set[int] = set()
        for base in bases:
            planes = encode(w, base=base)
            exceptions = planes.exceptions
            groups.add(exceptions)
            beyond = max(beyond, abs(planes.bits_per_weight - (12 + 16 * exceptions / planes.ex.numel())))
            arguments = (planes.sm, planes.ex, planes.esc, planes.base, 256)
            for name in implementations:
                decoded = kernels.decode(*arguments, impl=name)
                wrong[name] += int((decoded.view(torch.int16) != w.view(torch.int16)).sum())
        for name, count in wrong.items():
            ctx.record(method=name, metric="patterns that differ", value=count, item=order)
        ctx.record(method="format", metric="bits beyond 12 + 16 f", value=beyond, item=order)
        if order == "numeric":
            for count in groups:
                ctx.record(method="format", metric="exceptional groups, numeric order", value=count)
    return {"bases": len(bases), "implementations": implementations}


def instructions(ctx: StageContext) -> dict[str, Any]:
    """Instructions per group of eight weights in compiled decoders: whole CPU loops, and NVIDIA's arithmetic.

    The CPU's count is of everything in the way round the hot loop, loads, stores and flag test too. The GPU's
    leaves out loads, stores and addresses (`kernels.nf12.instructions` has the rule); no GPU is needed.
    """
    from gnomon.core.errors import GnomonError
    from gnomon.kernels import native
    from gnomon.kernels import nf12 as kernels
    from gnomon.kernels.nf12.instructions import cpu_loop, gpu_decode

    left_out: dict[str, str] = {}
    here = kernels.choice("cpu").name
    for isa in native.ISAS:
        if native.problem():
            left_out[isa] = native.problem()
            continue
        try:
            loop = cpu_loop(native.library()._name, f"gnomon_nf12_loop_{isa}")
        except GnomonError as error:
            left_out[isa] = str(error)
            continue
        # Groups of one way round: what it stores, 16 bytes a group.
        stored = sum(
            {"x": 16, "y": 32, "z": 64}[match.group(1)]
            for i in loop
            if i.mnemonic.startswith(("vmov", "mov"))
            and (match := re.match(r"%([xyz])mm\d+,.*\)", i.operands))
        )
        if not stored:
            left_out[isa] = "its loop stores no vector registers, so it can't be counted in groups"
            continue
        ctx.record(
            method=isa,
            metric="instructions per group",
            value=len(loop) * 16 / stored,
            tags={"chosen": isa == here},
        )
    try:
        for stage, cost in gpu_decode(90).items():
            ctx.record(
                method="sm_90",
                metric="instructions per group" if stage == "decode" else f"instructions per group, {stage}",
                value=sum(cost.sass.values()),
                tags={"chosen": True},
            )
    except GnomonError as error:
        left_out["sm_90"] = str(error)
    return {"left out": left_out}
