"""Stages of the SAGA study on a pretrained model and on random scores: selectors, counted bytes, conversion.

Text is judged by documents: the first window of each, so that the units of an interval come from different texts. No
document is both learnt or calibrated on and judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError
from gnomon.lab import StageContext

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from gnomon.core.data import Split

NLL = "nats per token"
PERPLEXITY, MASS, RECALL = "perplexity", "kept mass", "recall of the exact top-N"
GUESS, GUESSED = "recall on random scores", "recall on random scores minus the formula"
BYTES, OVER_MODEL, SPEED = "elements read", "elements read over the formula", "speed by the formula"
ENERGY, LOSS = "energy that the merged keys keep", "divergence while distilling"
SINKS = 4
"""First positions that the window keeps."""
FORMULA = {"(32, 8, 8)": 1.969, "(32, 2, 8)": 7.529, "(32, 1, 8)": 14.222}
"""Speed over dense GQA with 8 heads by head counts (queries, keys, values), at L = 131072, N = 512: the card's."""


def texts(data: str) -> Split:
    """Documents to learn from, to judge on, and to leave alone.

    Raises:
        UsageError: no such text, or too few documents.
    """
    from gnomon.core.data import corpus, split

    return split(corpus(data), valid=0.3, test=0.05, seed=0)


def openings(
    data: str, tokenizer: PreTrainedTokenizerBase, count: int, length: int
) -> list[tuple[str, Tensor]]:
    """(name, first `length` tokens (1, length)) of up to `count` held-out documents that have so many.

    Raises:
        UsageError: none is as long.
    """
    import torch

    found = []
    for document in texts(data).valid.documents:
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            found.append((document.name, torch.tensor(ids[:length])[None]))
        if len(found) == count:
            break
    if not found:
        raise UsageError(
            f"No held-out document of {data} has {length} tokens. Give longer ones, or a smaller window."
        )
    return found


def losses(model: nn.Module, documents: Sequence[tuple[str, Tensor]]) -> dict[str, float]:
    """Mean negative log-likelihood of each document's tokens, in nats."""
    from gnomon.core.scoring import evaluating, token_nll

    device = next(model.parameters()).device
    with evaluating(model):
        return {name: float(token_nll(model, ids.to(device)).mean()) for name, ids in documents}


def record_losses(
    ctx: StageContext,
    method: str,
    found: dict[str, float],
    *,
    tags: dict[str, Any],
    budget: dict[str, float] | None = None,
) -> None:
    """The loss of each document, and their perplexity together."""
    import math

    for name, value in found.items():
        ctx.record(
            method=method, metric=NLL, value=value, item=name, unit="nats", better="lower", tags=tags,
            budget=budget,
        )  # fmt: skip
    mean = sum(found.values()) / len(found)
    ctx.record(
        method=method, metric=PERPLEXITY, value=math.exp(mean), better="lower", tags=tags, budget=budget
    )


# ------------------------------------------------------------------------------------------------ selectors


def selection(
    ctx: StageContext,
    *,
    method: str,
    model: str,
    data: str,
    documents: int,
    window: int,
    selector: str,
    n: int,
    oversample: int,
) -> None:
    """Loss of a pretrained model whose every query row keeps n positions; kept mass and recall by layer.

    Args:
        selector: one of `methods.layers.saga.SELECTORS`.
    """
    from gnomon.core.models import load
    from gnomon.methods.layers.saga import SagaConfig, selection_stats, to_saga

    loaded = load(model, dtype="float32")
    held = loaded.model.config.num_key_value_heads
    config = SagaConfig(
        num_key_heads=held,
        num_value_heads=held,
        top_n=n,
        oversample=oversample,
        selector=selector,
        always_keep=(min(SINKS, n - 1), 0) if selector == "window" else (0, 0),
        sparse_prefill=True,
    )
    sparse = to_saga(loaded.model, config, inplace=True)
    read = openings(data, loaded.tokenizer, documents, window)
    tags = {"n": n, "oversample": oversample, "selector": selector}
    if selector == "dense":
        tags |= {"when": "original", "attention": "dense"}
        record_losses(ctx, method, losses(sparse, read), tags=tags)
        return
    with selection_stats(sparse, skip=window // 2) as stats:
        record_losses(ctx, method, losses(sparse, read), tags=tags)
    for depth, layer in stats.items():
        for metric, value in ((MASS, layer.mass), (RECALL, layer.recall)):
            ctx.record(
                method=method,
                metric=metric,
                value=value,
                item=f"layer {depth}",
                better="higher",
                tags={**tags, "depth": depth},
            )


def random_scores(
    ctx: StageContext, *, sizes: Sequence[int], oversamples: Sequence[int], rows: int, seed: int
) -> None:
    """Recall of strided buckets on independent scores, 64 per kept position, against the formula."""
    import torch

    from gnomon.methods.layers.saga import expected_recall, recall, select

    generator = torch.Generator().manual_seed(seed)
    for n in sizes:
        for c in oversamples:
            scores = torch.randn(rows, 64 * n, generator=generator)
            found = float(recall(scores, select(scores, n, c), n).double().mean())
            formula = expected_recall(n, c)
            tags = {"n": n, "oversample": c, "formula": formula}
            name = f"Atop-N, c = {c}"
            ctx.record(method=name, metric=GUESS, value=found, better="higher", tags=tags)
            ctx.record(method=name, metric=GUESSED, value=found - formula, tags=tags)


# --------------------------------------------------------------------------------------------------- traffic


def traffic(
    ctx: StageContext, *, query_heads: int, heads: int, length: int, n: int, width: int, seed: int
) -> None:
    """Elements of keys and values that one step reads, counted while it runs, for all divisors as head counts.

    Also the speed that the formula states for the head counts of the card.
    """
    import torch

    from gnomon.kernels.sparse_decode import reference
    from gnomon.methods.layers.saga import cost_model

    generator = torch.Generator().manual_seed(seed)
    divisors = [h for h in range(1, heads + 1) if heads % h == 0]
    for key_heads in divisors:
        for value_heads in divisors:
            q = torch.randn(1, query_heads, width, generator=generator)
            k = torch.randn(1, key_heads, length, width, generator=generator)
            v = torch.randn(1, value_heads, length, width, generator=generator)
            with counting(k, v) as reads:
                reference.decode(q, k, v, n, 1, width**-0.5)
            told = cost_model(query_heads, key_heads, value_heads, length, n, width, dense_heads=heads)
            tags = {"key heads": key_heads, "value heads": value_heads}
            method = f"({query_heads}, {key_heads}, {value_heads})"
            for metric, value in (
                (f"{BYTES}, keys", reads.keys),
                (f"{BYTES}, values", reads.values),
                (f"{OVER_MODEL}, keys", reads.keys / told.keys),
                (f"{OVER_MODEL}, values", reads.values / told.values),
            ):
                ctx.record(method=method, metric=metric, value=value, better="lower", tags=tags)
    for name in FORMULA:
        h_q, h_k, h_v = (int(part) for part in name.strip("()").split(","))
        cost = cost_model(h_q, h_k, h_v, 131072, 512, 128, dense_heads=8)
        ctx.record(method=name, metric=SPEED, value=cost.speedup, better="higher")


@dataclass
class Reads:
    """Elements of two tensors that products and gathers read."""

    keys: int = 0
    values: int = 0


PRODUCTS = ("aten::bmm", "aten::mm", "aten::matmul")
VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias")


@contextmanager
def counting(k: Tensor, v: Tensor) -> Iterator[Reads]:
    """Counts what happens to the memory of k and v inside the block: operands of products, results of gathers.

    Raises:
        AssertionError: an operation reads them in a way that isn't known here, so that nothing goes uncounted.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    reads = Reads()
    names = {k.untyped_storage().data_ptr(): "keys", v.untyped_storage().data_ptr(): "values"}
    base: Any = TorchDispatchMode

    class Counter(base):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            kind = function._schema.name
            if function.is_view or kind in VIEWS:
                return out
            for operand in args:
                if not isinstance(operand, torch.Tensor):
                    continue
                name = names.get(operand.untyped_storage().data_ptr())
                if name is None:
                    continue
                if kind not in (*PRODUCTS, "aten::gather"):
                    raise AssertionError(f"{kind} reads {name}, which isn't counted.")
                count = out.numel() if kind == "aten::gather" else operand.numel()
                setattr(reads, name, getattr(reads, name) + count)
            return out

    with Counter():
        yield reads


# ------------------------------------------------------------------------------------------------ conversion


def convert(
    ctx: StageContext,
    *,
    method: str,
    init: str,
    model: str,
    data: str,
    key_heads: int,
    seed: int,
    lr: float,
    steps: int,
    batch: int,
    length: int,
    calibration: int,
    documents: int,
    window: int,
    n: int,
    autocast: str,
) -> None:
    """Merge a pretrained model's key heads, distil W_Q and W_K from the original; losses before and after.

    Args:
        init: one of `methods.layers.saga.INITS`.
        lr, steps, batch, length: of the distillation: peak rate with cosine decay, windows a step, tokens a window.
        calibration: windows that the alignment looks at.
        documents, window: held-out documents and their tokens, on which losses are measured.
        n: positions kept where attention is sparse.
        autocast: precision of the passes while distilling, one of `core.train.AUTOCASTS`.
    """
    import torch

    from gnomon.core.data import Batches, token_stream
    from gnomon.core.models import load
    from gnomon.core.train import Step, TrainConfig, train
    from gnomon.methods.layers.saga import SagaConfig, align_model, configure, to_saga
    from gnomon.methods.layers.saga.distill import divergence, only_trainable

    loaded = load(model, dtype="float32")
    teacher = loaded.model
    read = openings(data, loaded.tokenizer, documents, window)
    stream = token_stream(texts(data).train, loaded.tokenizer)

    def drawn(rows: int, seed: int) -> Batches:
        return Batches(stream, batch=rows, length=length, generator=torch.Generator().manual_seed(seed))

    config = SagaConfig(
        num_key_heads=key_heads,
        num_value_heads=teacher.config.num_key_value_heads,
        top_n=n,
        selector="dense",
        sparse_prefill=True,
    )
    alignment = None
    if init == "aligned":
        windows = next(drawn(calibration, seed)).to(loaded.device)
        alignment = align_model(teacher, key_heads, list(torch.split(windows, 4)))
        for depth, kept in enumerate(alignment.energy):
            ctx.record(
                method=method, metric=ENERGY, value=kept, item=f"layer {depth}", tags={"depth": depth},
                better="higher",
            )  # fmt: skip
    student = to_saga(teacher, config, alignment, init)

    def judge(when: str, budget: dict[str, float]) -> None:
        for attention, selector in (("dense", "dense"), ("sparse", "strided")):
            configure(student, selector=selector)
            tags = {"when": when, "attention": attention}
            record_losses(ctx, method, losses(student, read), tags=tags, budget=budget)
        configure(student, selector="dense")

    def loss(network: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(input_ids=ids, use_cache=False).logits
        own = network(input_ids=ids, use_cache=False).logits
        return divergence(own, goal, torch.ones_like(ids, dtype=torch.bool))

    at = {1, *(round(steps * i / 20) for i in range(1, 21))}

    def on_step(done: Step) -> None:
        if done.step in at:
            ctx.record(method=method, metric=LOSS, value=done.loss, unit="nats", tags={"step": done.step})

    judge("before", {"tokens": 0, "steps": 0, "trials": 0})
    with only_trainable(student, ("q_proj", "k_proj")):
        learnt = [p for p in student.parameters() if p.requires_grad]
        spent = train(
            student,
            drawn(batch, seed + 1),
            torch.optim.AdamW(learnt, lr=lr, weight_decay=0.0),
            TrainConfig(
                steps=steps,
                warmup=max(1, steps // 20),
                checkpoint_every=max(1, steps // 4),
                autocast=autocast,
            ),
            resume=ctx,
            on_step=on_step,
            loss_fn=loss,
        )
    judge("after", {"tokens": spent.tokens, "steps": steps, "trials": 0, "seconds": spent.seconds})
