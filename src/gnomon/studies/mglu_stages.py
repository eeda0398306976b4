"""Stages of the MGLU study beside `pretrain`: what files hold, what trained masks look like, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext, load_rival
from gnomon.studies.pretraining import CURVE_WINDOWS, budget, load, loss_of, parts, rows

if TYPE_CHECKING:
    from gnomon.methods.layers.mglu import SwiMGLUMLP

INPUTS = 8
"""Rows of x on which gate and value are added up."""


def masked(n: int) -> str:
    """Name of SwiMGLU with n masks."""
    return f"swimglu-{n}"


def packed_files(ctx: StageContext, *, model: str, scratch: bool, masks: Sequence[int]) -> None:
    """Bits a weight of the intermediate projection, counted in saved files: a GLU's two matrices, and one with masks.

    Weights don't matter here, so they are drawn anew; files are written in bfloat16, as they are deployed.
    """
    import torch

    from gnomon.methods.layers.mglu import MGLUConfig, freeze_masks, mglu_layers, replace_mlp

    dense = load(model, scratch=scratch, dtype="float32").model.to(torch.bfloat16)
    glu, whole_glu = _bits(ctx.dir, dense, (".gate_proj.weight", ".up_proj.weight"))
    _record_bits(ctx, "swiglu", stored=glu, whole=whole_glu, glu=glu, whole_glu=whole_glu)
    for n in masks:
        packed = load(model, scratch=scratch, dtype="float32").model
        packed = freeze_masks(replace_mlp(packed, MGLUConfig(n_masks=n)).to(torch.bfloat16))
        stored, whole = _bits(ctx.dir, packed, (".proj.weight", ".proj.mask_planes"))
        _record_bits(ctx, masked(n), stored=stored, whole=whole, glu=glu, whole_glu=whole_glu)
        for name, mlp in mglu_layers(packed).items():
            handed = mlp.proj.weight.nbytes + mlp.proj.planes.nbytes  # type: ignore[operator]
            read = 8 * handed / mlp.proj.weight.numel()
            ctx.record(method=masked(n), metric="bits read a weight", value=read, item=name, better="lower")


def _bits(folder: Path, model: Any, inner: Sequence[str]) -> tuple[dict[str, float], float]:
    """Bits for each weight of the first of the `inner` tensors, from the files of a model.

    Args:
        inner: ends of the names of what the intermediate projection of an MLP holds.

    Returns:
        those of the intermediate projection by MLP, and those of all MLPs with their output projections.
    """
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    numbers: dict[str, int] = {}
    with TemporaryDirectory(dir=folder, prefix="saved-") as saved:
        model.save_pretrained(saved)
        for shard in sorted(Path(saved).glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    sizes[name], numbers[name] = tensor.nbytes, tensor.numel()
    mlps = {name.removesuffix(inner[0]): count for name, count in numbers.items() if name.endswith(inner[0])}
    stored = {name: sum(sizes[name + end] for end in inner) for name in mlps}
    whole = sum(size + sizes[f"{name}.down_proj.weight"] for name, size in stored.items())
    return {name: 8 * size / mlps[name] for name, size in stored.items()}, 8 * whole / sum(mlps.values())


def _record_bits(
    ctx: StageContext,
    method: str,
    *,
    stored: Mapping[str, float],
    whole: float,
    glu: Mapping[str, float],
    whole_glu: float,
) -> None:
    for name, bits in stored.items():
        ctx.record(method=method, metric="bits stored a weight", value=bits, item=name, better="lower")
        saved = 1 - bits / glu[name]
        ctx.record(method=method, metric="saving against a GLU", value=saved, item=name, better="higher")
    saved = 1 - whole / whole_glu
    ctx.record(method=method, metric="saving, whole feed-forward layer", value=saved, better="higher")


def footprints(
    ctx: StageContext, *, model: str, scratch: bool, competitors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Bytes of the feed-forward layers as deployed, and trained numbers; competitors are arguments of `pretrain`."""
    from gnomon.studies.mglu_entrants import feed_forward_bits

    for name, one in competitors.items():
        network = load(model, scratch=scratch, dtype="float32").model
        load_rival(one["make"])(network, lr=1e-3, weight_decay=0.0, total_steps=1, **one.get("options", {}))
        values = {
            "bytes of the feed-forward layers": feed_forward_bits(network) / 8,
            "trained numbers": sum(p.numel() for p in network.parameters() if p.requires_grad),
        }
        for metric, value in values.items():
            ctx.record(method=name, metric=metric, value=value, better="lower")


def bytes_per_token(ctx: StageContext, *, model: str, data: str) -> float:
    """Of the held-out text, where the end of a document counts as a byte: 1 with a byte-level tokenizer."""
    from gnomon.core.data import token_stream

    held_out = parts(data).valid
    tokens = len(token_stream(held_out, load(model, scratch=False).tokenizer))
    return sum(len(document.text.encode()) + 1 for document in held_out.documents) / tokens


def measure(ctx: StageContext, *, of: Done, text: Done, method: str, trials: int) -> None:
    """Bits per byte of a trained model."""
    ctx.record(
        method=method,
        metric="bits per byte",
        value=of.value["loss"] / math.log(2) / text.value,
        unit="bits",
        better="lower",
        tags={"lr": of.args["lr"]},
        budget=budget(of, trials),
    )


def masks(ctx: StageContext, *, of: Done, method: str, data: str, length: int, windows: int) -> None:
    """What training made of the masks, and whether packing them keeps the model.

    Gate and value come from the packed bits, each as a product of its own, so that their sum proves something.

    Args:
        data, length, windows: the held-out text on which the model is compared with itself packed.
    """
    import torch

    from gnomon.core.data import token_stream
    from gnomon.core.models import load as load_model
    from gnomon.methods.layers.mglu import freeze_masks, mask_stats, mglu_layers

    folder = str(of.dir / "model")
    network = load_model(folder, dtype="float32").model
    found = mask_stats(network)
    for depth, (name, one) in enumerate(found.items()):
        tags = {"depth": depth}
        ctx.record(method=method, metric="gate share", value=one.gate_ratio, item=name, tags=tags)
        ctx.record(method=method, metric="constant rows", value=one.constant_rows, item=name, tags=tags)
    freeze_masks(network)
    for name, mlp in mglu_layers(network).items():
        ctx.record(
            method=method,
            metric="relative error of gate + value",
            value=identity_error(mlp, seed=ctx.seed),
            item=name,
            better="lower",
        )
    loaded = load_model(folder, dtype=torch.bfloat16)
    stream = token_stream(parts(data).valid, loaded.tokenizer)
    held_out = rows(stream, length, min(CURVE_WINDOWS, windows))
    unpacked = loaded.model
    before = loss_of(unpacked, held_out)
    after = loss_of(freeze_masks(unpacked), held_out)
    ctx.record(
        method=method, metric="loss of the packed model minus the other", value=after - before, unit="nats"
    )


def identity_error(mlp: SwiMGLUMLP, *, seed: int) -> float:
    """The largest |gate_i + value_i - xW| / |xW| over the masks i of a frozen layer, in its dtype."""
    import torch

    from gnomon.kernels.mglu.planes import unpack
    from gnomon.kernels.mglu.reference import linear

    weight: torch.Tensor = mlp.proj.weight
    x = torch.randn(INPUTS, mlp.hidden_size, generator=torch.Generator().manual_seed(seed)).to(weight)
    full = linear(x, weight)
    errors = []
    for mask in unpack(mlp.proj.planes, mlp.hidden_size):  # type: ignore[arg-type]
        both = linear(x, weight.masked_fill(~mask, 0)) + linear(x, weight.masked_fill(mask, 0))
        errors.append(float((both - full).norm() / full.norm()))
    return max(errors)


__all__ = ["bytes_per_token", "footprints", "identity_error", "masked", "masks", "measure", "packed_files"]
