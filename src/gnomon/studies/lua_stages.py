"""Stages of the Lua-LLM study: the soft mask itself, models pruned by rule, models pruned by learnt thresholds.

Every pruner and allocator may read the same text: `samples` windows of the training part. Statistics take one pass
over it, Lua's training goes round it as often as its steps need. Losses are measured on documents that none has read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext
from gnomon.studies.lua_choices import Items, accuracy, items, store_items, stored_items
from gnomon.studies.pretraining import loss_of, parts, rows, streams

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.core.models import Loaded
    from gnomon.methods.compress.lua import LuaAllocator
    from gnomon.methods.compress.pruning import Allocation

    Rows = Sequence[Tensor]

LUA = "lua"
AT_PATTERN = " at "
"""Joins a metric and an N:M pattern: such models are compared among themselves."""


# -------------------------------------------------------------------------------------- the mask itself


def operator(ctx: StageContext, *, widths: Sequence[int], cuts: Sequence[float], seed: int) -> None:
    """Does a soft top-k mask count what a hard one does, and how wide is its border?"""
    import torch

    from gnomon.methods.compress.lua import soft_mask, uniform_scores

    generator = torch.Generator().manual_seed(seed)
    for width in widths:
        scores = uniform_scores(torch.randperm(width, generator=generator).float()[None])
        for cut in cuts:
            soft = soft_mask(scores, torch.full((1, 1), cut)).double()
            tags = {"width": width, "cut": cut}
            ctx.record(
                method=LUA,
                metric="soft sum minus (1 - t) C - 1/2",
                value=float(soft.sum()) - (1 - cut) * width - 0.5,
                tags=tags,
            )
            border = int(((soft > 0.02) & (soft < 0.98)).sum())
            ctx.record(method=LUA, metric="fractional ranks on each side", value=border / 2, tags=tags)


def prepared(ctx: StageContext, *, model: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Texts in the model's tokens and the questions, once for all stages that need them.

    Args:
        text: data, other, samples, batch, length, windows, questions, items, dtype: of whatever reads this stage.
    """
    import numpy as np

    from gnomon.core.data import corpus, token_stream
    from gnomon.core.models import load

    loaded = load(model)
    learnt_text, judged = streams(loaded, text["data"])
    found = {"learnt": learnt_text, "judged": judged}
    if text["other"]:
        found["other"] = token_stream(corpus(text["other"]), loaded.tokenizer)
    np.savez(
        ctx.dir / "texts.npz", allow_pickle=False, **{k: v.numpy().astype(np.int32) for k, v in found.items()}
    )
    split = parts(text["data"])
    store_items(items(text["questions"], split.valid, text["items"]), ctx.dir / "questions.json")
    return {"read": split.train.sha256, "judged": split.valid.sha256} | {k: len(v) for k, v in found.items()}


def adamw(model: nn.Module, *, lr: float, weight_decay: float, total_steps: int) -> torch.optim.Optimizer:
    """The optimizer of the small dense models."""
    from gnomon.studies import pretraining

    return pretraining.adamw(model, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95))


# ------------------------------------------------------------------------------------------ dense, by rule


def dense(
    ctx: StageContext, *, of: Done | None, model: str, on: str, texts: Done, seed: int
) -> dict[str, float]:
    """The model before pruning."""
    bench = Bench(ctx, of, model, on, texts, seed)
    return bench.judge("dense", 0.0, budget={})


def pruned(
    ctx: StageContext,
    *,
    of: Done | None,
    model: str,
    on: str,
    texts: Done,
    pruner: str,
    allocation: str,
    sparsity: float,
    seed: int,
) -> dict[str, float]:
    """Prune by a rule: any pruner with any allocation but a learnt one."""
    from gnomon.methods.compress.pruning import prune

    bench = Bench(ctx, of, model, on, texts, seed)
    began = time.perf_counter()
    report = prune(bench.loaded.model, pruner, sparsity, allocation=allocation, calib=bench.calib)
    budget = bench.budget(seconds=time.perf_counter() - began)
    return bench.judge(name_of(pruner, allocation), sparsity, budget, beyond=report.off)


def patterned(
    ctx: StageContext,
    *,
    of: Done | None,
    model: str,
    on: str,
    texts: Done,
    pruner: str,
    pattern: str,
    steps: int,
    lr: float,
    seed: int,
) -> None:
    """Prune to an N:M pattern; steps and rate are MaskLLM's."""
    from gnomon.methods.compress.pruning import MaskLLMConfig, Pattern, PruneConfig, prune

    bench = Bench(ctx, of, model, on, texts, seed)
    learns = pruner == "maskllm"
    config = PruneConfig(maskllm=MaskLLMConfig(steps=steps, lr=lr, seed=seed))
    began = time.perf_counter()
    prune(bench.loaded.model, pruner, pattern=pattern, calib=bench.calib, config=config)
    budget = bench.budget(seconds=time.perf_counter() - began, steps=steps if learns else 0)
    bench.judge(pruner, Pattern.parse(pattern).sparsity, budget, suffix=AT_PATTERN + pattern)


# ------------------------------------------------------------------------------------------------- learnt


def learnt(
    ctx: StageContext,
    *,
    of: Done | None,
    model: str,
    on: str,
    texts: Done,
    method: str,
    sparsity: float,
    granularity: str,
    reg: str,
    importance: str,
    feeds: Sequence[str],
    steps: int,
    lr: float,
    group: int,
    seed: int,
) -> dict[str, float]:
    """Train thresholds, measure the model with soft, hard and exact masks, and feed the shares to other pruners.

    Args:
        method: what the records call it.
        feeds: pruners that get the learnt allocation.
        group: columns of SparseGPT's blocks, each with a share of its own.
    """
    from gnomon.methods.compress.lua import LuaAllocator, collect_importance
    from gnomon.methods.compress.pruning import prune

    bench = Bench(ctx, of, model, on, texts, seed)
    net = bench.loaded.model
    before = fingerprints(net)
    began = time.perf_counter()
    scores = collect_importance(net, bench.calib, metric=importance)
    alloc = LuaAllocator(net, scores, sparsity, granularity=granularity, reg=reg)
    fit = alloc.fit(bench.calib, steps=steps, lr=lr, resume=ctx, checkpoint_every=max(1, steps // 5))
    masks = alloc.harden()
    budget = bench.budget(seconds=time.perf_counter() - began, steps=steps)
    tags = {"on": on, "sparsity": sparsity}
    units = {"row": 0, "column": 1}
    shapes = [mask.shape for mask in masks.values()]
    expected = sum(shape[units[granularity]] for shape in shapes) if granularity in units else len(shapes)
    learning = sum(p.numel() for p in net.parameters() if p.requires_grad)
    soft = loss_of(net, bench.held_out)
    with alloc.hard():
        hard = loss_of(net, bench.held_out)
    ranks_and_masks = sum(one.rank.nbytes for one in alloc.masks)  # type: ignore[misc]
    ranks_and_masks += sum(mask.numel() for mask in masks.values()) * bench.loaded.dtype.itemsize
    for metric, value, better in (
        ("raw sparsity minus p", fit.sparsity - sparsity, None),
        ("trained numbers beyond the thresholds", learning - expected, None),
        ("soft loss", soft, "lower"),
        ("hard loss before the offset", hard, "lower"),
        ("bytes beside the weights", ranks_and_masks + 12 * alloc.trained_numbers, "lower"),
    ):
        ctx.record(method=method, metric=metric, value=value, better=better, tags=tags, budget=budget)
    spread(ctx, alloc, method, tags)
    keep_pattern(ctx, alloc)
    given: dict[str, Allocation] = {
        pruner: alloc.allocation("column", group=group) if pruner == "sparsegpt" else alloc.allocation()
        for pruner in feeds
    }
    alloc.unparametrize()
    changed = sum(now != was for now, was in zip(fingerprints(net), before, strict=True))
    ctx.record(method=method, metric="matrices changed before apply", value=changed, tags=tags)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()} if feeds else {}
    for pruner, allocation in given.items():
        began = time.perf_counter()
        report = prune(net, pruner, sparsity, allocation=allocation, calib=bench.calib)
        more = bench.budget(seconds=budget["seconds"] + time.perf_counter() - began, steps=steps)
        bench.judge(name_of(pruner, method), sparsity, more, beyond=report.off)
        net.load_state_dict(state)
    dense_weights = dict(net.named_parameters())
    kept = {name: dense_weights[f"{name}.weight"].detach().clone() for name in masks}
    final = alloc.apply()
    strange = sum(
        int(((now := dense_weights[f"{name}.weight"]) != kept[name]).logical_and(now != 0).sum())
        for name in masks
    )
    ctx.record(method=method, metric="weights neither kept nor zero", value=strange, tags=tags)
    found = bench.judge(method, sparsity, budget, beyond=final.removed - alloc.removed)
    return {
        **found,
        "soft loss": soft,
        "hard loss": hard,
        "sparsity": fit.sparsity,
        "seconds": budget["seconds"],
    }


def spread(ctx: StageContext, alloc: LuaAllocator, method: str, tags: Mapping[str, Any]) -> None:
    """How far learnt shares differ, as standard deviations: between decoder layers, and between rows of a matrix."""
    import torch

    report = alloc.sparsity_report(exact=True)
    layers = torch.tensor(list(report.per_layer.values()), dtype=torch.float64)
    inside = [float(row.std(correction=0)) for row in report.rows.values()]
    for metric, value in (
        ("spread of sparsity between layers", float(layers.std(correction=0))),
        ("spread of sparsity inside matrices", sum(inside) / len(inside)),
    ):
        ctx.record(method=method, metric=metric, value=value, tags=dict(tags), budget={"trials": 1})


def keep_pattern(ctx: StageContext, alloc: LuaAllocator) -> None:
    """Write the learnt shares for the figure: of each matrix, and quantiles of its rows."""
    import torch

    report = alloc.sparsity_report(exact=True)
    at = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    shares = {
        name: {"share": share, "rows": torch.quantile(report.rows[name], at).tolist()}
        for name, share in report.per_matrix.items()
    }
    (ctx.dir / "pattern.json").write_text(json.dumps(shares, indent=1) + "\n")


def fingerprints(model: nn.Module) -> list[str]:
    """A hash of each matrix of the decoder layers, in the model's order; masks that are installed don't show."""
    import torch

    from gnomon.core.layers import linears

    found = []
    for layer in linears(model).values():
        holder: Any = getattr(layer, "parametrizations", None)
        weight: Any = layer.weight if holder is None else holder["weight"].original
        raw = weight.detach().contiguous().view(torch.uint8).cpu().numpy()
        found.append(hashlib.blake2b(memoryview(raw).cast("B")).hexdigest())
    return found


def name_of(pruner: str, allocation: str) -> str:
    """A pair in records: a pruner alone is uniform."""
    return pruner if allocation == "uniform" else f"{pruner} + {allocation}"


# -------------------------------------------------------------------------------------- the test bench


class Bench:
    """One model with its texts, and the way it is judged."""

    def __init__(
        self, ctx: StageContext, of: Done | None, model: str, on: str, texts: Done, seed: int
    ) -> None:
        """
        Args:
            of: a stage that trained the model; None loads `model` by name.
            on: "small" or "pretrained", for the records.
            texts: the stage :func:`prepared` of this model's tokenizer.
            seed: of the windows that pruners may read.
        """
        import numpy as np
        import torch

        from gnomon.core.data import Batches
        from gnomon.core.models import load

        self.ctx, self.on = ctx, on
        text = texts.args["text"]
        self.loaded: Loaded = load(model if of is None else str(of.dir / "model"), dtype=text["dtype"])
        with np.load(texts.dir / "texts.npz", allow_pickle=False) as stored:
            found = {name: torch.from_numpy(stored[name].astype(np.int64)) for name in stored.files}
        source = Batches(
            found["learnt"],
            batch=text["batch"],
            length=text["length"],
            generator=torch.Generator().manual_seed(seed),
        )
        self.calib: list[Tensor] = [next(source) for _ in range(max(1, text["samples"] // text["batch"]))]
        self.held_out: Rows = rows(found["judged"], text["length"], text["windows"])
        self.other: Rows = rows(found["other"], text["length"], text["windows"]) if "other" in found else ()
        self.questions: Items = stored_items(texts.dir / "questions.json")

    def budget(self, *, seconds: float, steps: int = 0) -> dict[str, float]:
        """Text that was to be read (distinct tokens), training steps, seconds; nothing is tuned here."""
        tokens = sum(batch.numel() for batch in self.calib)
        return {"tokens": tokens, "steps": steps, "trials": 1, "seconds": seconds}

    def judge(
        self,
        method: str,
        sparsity: float,
        budget: Mapping[str, float],
        *,
        beyond: int | None = None,
        suffix: str = "",
    ) -> dict[str, float]:
        """Record losses, accuracy and the zeros that are really there."""
        from gnomon.core.layers import linears

        net = self.loaded.model
        weights: list[Any] = [layer.weight for layer in linears(net).values()]
        zeros = sum(int((weight == 0).sum()) for weight in weights)
        total = sum(weight.numel() for weight in weights)
        measured: list[tuple[str, float, str | None]] = [
            ("loss", loss_of(net, self.held_out), "lower"),
            ("accuracy", accuracy(self.loaded, self.questions), "higher"),
            ("achieved sparsity", zeros / total, None),
            ("bytes as bitmap and values", total / 8 + (total - zeros) * self.loaded.dtype.itemsize, "lower"),
        ]
        if self.other:
            measured.append(("loss on other text", loss_of(net, self.other), "lower"))
        if beyond is not None:
            measured.append(("zeros beyond the budget", float(beyond), None))
        for metric, value, better in measured:
            self.ctx.record(
                method=method,
                metric=metric + suffix,
                value=value,
                better=better,
                tags={"on": self.on, "sparsity": sparsity},
                budget=budget,
            )
        return {metric: value for metric, value, _ in measured}


__all__ = ["Bench", "adamw", "dense", "learnt", "operator", "patterned", "prepared", "pruned"]
