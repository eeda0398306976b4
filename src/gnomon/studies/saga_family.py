"""The SAGA study's family of head counts, trained from scratch: its models, the recall task, and the training stage.

Models are Llama decoders with their own numbers of query, key and value heads. All of a task see the same batches and
schedule, and are judged twice by one held-out set: with dense attention, as they were trained, and with Atop-N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Done, StageContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

RECALL_TASK, TEXT_TASK = "recall", "text"
TASKS = (RECALL_TASK, TEXT_TASK)
LOSS, SPARSE_LOSS, ACCURACY = "loss", "loss with Atop-N", "accuracy"
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
BYTES = 259
"""Tokens of the byte-level tokenizer."""


def heads_of(name: str) -> tuple[int, int, int]:
    """`(8, 1, 4)` or `8,1,4` -> numbers of query, key and value heads.

    Raises:
        UsageError: not three counts of which the second and third divide the first.
    """
    try:
        queries, keys, values = (int(part) for part in name.strip("() ").split(","))
    except ValueError:
        raise UsageError(f"{name!r} is not of the form 8,1,4: query, key and value heads.") from None
    if min(queries, keys, values) < 1 or queries % keys or queries % values:
        raise UsageError(f"{name}: key heads and value heads must divide the query heads.")
    if keys % values and values % keys:
        raise UsageError(f"{name}: neither of key heads and value heads divides the other.")
    return queries, keys, values


def decoder(
    name: str, *, layers: int, hidden: int, inner: int, vocabulary: int, n: int, positions: int
) -> PreTrainedModel:
    """A float32 Llama decoder with these head counts, dense, its weights from the ambient random state.

    Args:
        name: of :func:`heads_of`.
        n: positions that Atop-N keeps once it is switched on.

    Raises:
        UsageError: a width that the query heads don't divide into even parts.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from gnomon.methods.layers.saga import hf

    queries, keys, values = heads_of(name)
    if hidden % (2 * queries):
        raise UsageError(
            f"hidden={hidden} must be a multiple of {2 * queries}: {queries} heads of even width."
        )
    config = hf.config_class(LlamaConfig)(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=queries,
        num_key_value_heads=values,
        num_key_heads=keys,
        max_position_embeddings=positions,
        saga={
            "top_n": n,
            "selector": "dense",
            "sparse_prefill": True,
            "allow_fewer_values": values < keys,
        },
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return hf.model_class(LlamaForCausalLM)(config).eval()


def require_room(pairs: int, length: int, symbols: int) -> None:
    """
    Raises:
        UsageError: more pairs than there are keys, or no room for a question behind them.
    """
    if not 1 <= pairs <= symbols or length < pairs + 2:
        raise UsageError(
            f"pairs={pairs} of symbols={symbols} and a question don't fit into length={length} tokens. Take at most as "
            "many pairs as symbols, and two tokens more than pairs."
        )


class RecallBatches:
    """Endless batches of key-value recall for `core.train`.

    A row names `pairs` pairs, one token each, then asks for keys, each of which is followed by its value: only these
    values are targets. To find one takes a single look, at the pair that holds the key, whose value is then read: keys
    address, values are the content. Pairs are drawn anew for each row, so nothing can be learnt by heart.

    Tokens of keys come first, then those of values, then those of pairs (key x symbols + value).
    """

    def __init__(
        self, *, batch: int, pairs: int, length: int, symbols: int, generator: torch.Generator
    ) -> None:
        """
        Args:
            pairs: of different keys, in a row.
            length: tokens of a row: pairs, then as many questions and answers as fit.
            symbols: keys that there are, and values.

        Raises:
            UsageError: no room for a question, more pairs than keys.
        """
        require_room(pairs, length, symbols)
        self.batch, self.pairs, self.length, self.symbols = batch, pairs, length, symbols
        self.generator = generator

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        import torch

        g, rows, symbols = self.generator, self.batch, self.symbols
        keys = torch.rand(rows, symbols, generator=g).argsort(-1)[:, : self.pairs]
        values = torch.randint(symbols, (rows, self.pairs), generator=g)
        asked = torch.randint(self.pairs, (rows, (self.length - self.pairs) // 2), generator=g)
        questions = torch.stack([keys.gather(1, asked), symbols + values.gather(1, asked)], -1).flatten(1)
        ids = torch.cat([2 * symbols + keys * symbols + values, questions], 1)
        labels = ids.clone()
        labels[:, : self.pairs] = -100
        labels[:, self.pairs :: 2] = -100
        return {"input_ids": ids, "labels": labels}

    def state_dict(self) -> dict[str, Tensor]:
        """What :meth:`load_state_dict` needs to draw the same batches from here on."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


def target_loss(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """(mean loss of a target in nats, share of targets that are the likeliest token)."""
    import torch

    from gnomon.core.scoring import evaluating

    device = next(model.parameters()).device
    total = right = count = 0.0
    with evaluating(model):
        for batch in batches:
            goal = batch["labels"][:, 1:].to(device)
            real = goal != -100
            logits = (
                model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1][real].float()
            )
            total += float(torch.nn.functional.cross_entropy(logits, goal[real], reduction="sum"))
            right += float((logits.argmax(-1) == goal[real]).sum())
            count += int(real.sum())
    return total / count, right / count


def learn(
    ctx: StageContext,
    *,
    heads: str,
    task: str,
    seed: int,
    lr: float,
    data: str,
    layers: int,
    hidden: int,
    inner: int,
    steps: int,
    batch: int,
    length: int,
    pairs: int,
    symbols: int,
    n: int,
    points: int,
    windows: int,
) -> dict[str, float]:
    """Train one layout on one task; returns its losses, dense and with Atop-N, and its costs.

    Args:
        heads: of :func:`heads_of`.
        task: one of `TASKS`.
        data, windows: text of that task; held-out windows (or rows of the recall task) that losses are measured on.
        pairs, symbols: of the recall task.
        n: positions that Atop-N keeps.
    """
    import torch

    from gnomon.core import data as corpora
    from gnomon.core.models import Loaded, as_device
    from gnomon.core.tiny import byte_tokenizer
    from gnomon.core.train import TrainConfig
    from gnomon.methods.layers.saga import configure
    from gnomon.studies.pretraining import Entrant, Task, adamw, fit, parts, rows

    if task not in TASKS:
        raise unknown("task", task, TASKS)
    recalls = task == RECALL_TASK
    where, tokenizer = as_device(None), byte_tokenizer()
    network = decoder(
        heads,
        layers=layers,
        hidden=hidden,
        inner=inner,
        vocabulary=symbols * (symbols + 2) if recalls else BYTES,
        n=n,
        positions=length,
    ).to(where)
    generator = torch.Generator().manual_seed(seed)
    source: Any
    if recalls:
        shape: dict[str, int] = {"pairs": pairs, "length": length, "symbols": symbols}
        source = RecallBatches(batch=batch, generator=generator, **shape)
        fixed = RecallBatches(
            batch=min(windows, 64), generator=torch.Generator().manual_seed(HELD_OUT), **shape
        )
        held_out = [next(fixed) for _ in range(-(-windows // fixed.batch))]
    else:
        whole = parts(data)
        source = corpora.Batches(
            corpora.token_stream(whole.train, tokenizer), batch=batch, length=length, generator=generator
        )
        read = rows(corpora.token_stream(whole.valid, tokenizer), length, windows)
        held_out = [{"input_ids": ids, "labels": ids} for ids in read]
    model, value = fit(
        ctx,
        Loaded(network, tokenizer, heads, torch.float32, where, "sdpa"),
        Entrant(adamw(network, lr=lr, weight_decay=WEIGHT_DECAY, betas=BETAS)),
        Task(
            source,
            glance=lambda m: target_loss(m, held_out[:2])[0],
            judge=lambda m: target_loss(m, held_out)[0],
        ),
        TrainConfig(
            steps=steps,
            warmup=max(1, steps // 20),
            schedule="wsd",
            decay=0.3,
            checkpoint_every=max(1, steps // 4),
        ),
        method=heads,
        points=points,
        tags={"lr": lr, "task": task},
        keep=False,
    )
    accuracy = target_loss(model, held_out)[1]
    configure(model, selector="strided")
    sparse, sparse_accuracy = target_loss(model, held_out)
    return {**value, "accuracy": accuracy, "sparse loss": sparse, "sparse accuracy": sparse_accuracy}


HELD_OUT = 2**40
"""Seed of the recall task's held-out rows: no training seed is as large."""


def measure(ctx: StageContext, *, of: Done, heads: str, task: str, trials: int) -> None:
    """Losses of a trained layout, with what they cost."""
    from gnomon.studies.pretraining import budget

    spent, tags = budget(of, trials), {"task": task, "lr": of.args["lr"]}
    for metric, key, better in (
        (LOSS, "loss", "lower"),
        (SPARSE_LOSS, "sparse loss", "lower"),
        (ACCURACY, "accuracy", "higher"),
        (f"{ACCURACY} with Atop-N", "sparse accuracy", "higher"),
        ("trained numbers", "trained numbers", "lower"),
    ):
        ctx.record(method=heads, metric=metric, value=of.value[key], better=better, tags=tags, budget=spent)
