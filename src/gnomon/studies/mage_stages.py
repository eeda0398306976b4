"""Stages of the MAGE study: a small block-diffusion model, what selectors would choose in it, what choosing costs.

The model reads bytes. Long contexts are learnt from short rows: pieces of a long window at their true positions, the
text between them left out. So every distance up to `reach` is seen in training, though never so many keys at once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError
from gnomon.lab import Done, StageContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gnomon.core.models import Loaded
    from gnomon.methods.layers.mage import BlockDiffusionConfig, SparsePolicy

MAGE, QUEST, SPARSED = "MAGE", "Quest", "SparseD"
AVERAGE, ORACLE, WINDOW, RANDOM = "average query", "oracle", "window", "random"
SELECTORS = (MAGE, QUEST, SPARSED, AVERAGE, ORACLE, WINDOW, RANDOM)
EXACT, SHORT = "exact", "exact, short prefix"
FIRST_DENSE, EXACT_COMMIT = "MAGE, two layers dense", "MAGE, exact commit"
RECALL, MASS, TOKENS = "recall", "mass", "tokens of a set"
OWN, SHARED, SHARING = "recall of a set a query", "recall of a shared set", "recall that sharing costs"
COSINE, LEAD = "cosine with the first pass", "lead of the block average in cosine"
LOSS, PASSES, EQUAL = "masked loss", "forward passes", "tokens equal to exact decoding"
ACTIVE, READ = "share of blocks with active selection", "KV tokens read"
LEARNING, BY_PASS = "masked loss while training", "recall by pass"
TRAINED, UNTRAINED = "trained", "untrained"
SKIP, RATIO = 0.2, 0.3
"""SparseD's own: share of passes that stay exact, share of tiles that is kept at long contexts."""
SHORT_PREFIX = 256
"""Tokens that the exact model sees where it is asked what long contexts are worth to it."""


def over(rival: str) -> str:
    """Metric: by how much MAGE's recall is higher."""
    return f"lead in recall over {rival}"


def selectors(k: int, dense_layers: int, *, tile: int, seed: int = 0) -> dict[str, SparsePolicy]:
    """All policies with k tokens (SparseD: its own share), by name."""
    from gnomon.methods.layers import mage

    return {
        MAGE: mage.Mage(k, dense_layers),
        QUEST: mage.Quest(k, dense_layers=dense_layers),
        SPARSED: mage.SparseD(SKIP, RATIO, tile, dense_layers=dense_layers),
        AVERAGE: mage.AvgQuery(k, dense_layers=dense_layers),
        ORACLE: mage.Oracle(k, dense_layers=dense_layers),
        WINDOW: mage.Window(k, dense_layers=dense_layers),
        RANDOM: mage.Random(k, seed=seed, dense_layers=dense_layers),
    }


# ------------------------------------------------------------------------------------------------ the model


class Pieces:
    """Endless noised batches of rows of `length` tokens with positions up to `reach`.

    A row is cut from a window of `reach` tokens: one half of it from anywhere, the other half from anywhere later.
    Every second row, on average, has no gap. Pieces and positions are whole blocks.
    """

    def __init__(
        self,
        stream: Tensor,
        cfg: BlockDiffusionConfig,
        *,
        batch: int,
        length: int,
        reach: int,
        generator: torch.Generator,
    ) -> None:
        """
        Raises:
            UsageError: rows longer than windows, windows longer than the text, halves that aren't whole blocks.
        """
        if length % (2 * cfg.block_size) or reach % cfg.block_size or not length <= reach <= len(stream):
            raise UsageError(
                f"length={length} must be a multiple of {2 * cfg.block_size}, reach={reach} of {cfg.block_size}, and "
                f"length <= reach <= {len(stream)}, the tokens of the text."
            )
        self.stream, self.cfg, self.batch = stream, cfg, batch
        self.length, self.reach, self.generator = length, reach, generator

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        import torch

        from gnomon.methods.layers.block_diffusion import noised_batch

        starts = torch.randint(len(self.stream) - self.reach + 1, (self.batch,), generator=self.generator)
        at = torch.stack([self._positions() for _ in range(self.batch)])  # (R, L)
        batch = noised_batch(self.stream[starts[:, None] + at], self.cfg, self.generator)
        return {**batch, "position_ids": at}

    def _positions(self) -> Tensor:
        import torch

        size, half = self.cfg.block_size, self.length // 2

        def draw(first: int, last: int) -> int:
            blocks = (last - first) // size
            return first + size * int(torch.randint(blocks + 1, (), generator=self.generator))

        one = draw(0, self.reach - self.length)
        apart = bool(torch.rand((), generator=self.generator) < 0.5)
        two = draw(one + half, self.reach - half) if apart else one + half
        return torch.cat([one + torch.arange(half), two + torch.arange(half)])

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to draw the same batches from here on."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def roomy(name: str, *, scratch: bool, reach: int) -> Loaded:
    """The architecture with positions for `reach` tokens and weights drawn anew, or a model as it is."""
    from gnomon.core.models import load

    loaded = load(name, dtype="float32" if scratch else None)
    if not scratch:
        return loaded
    config = copy.deepcopy(loaded.model.config)
    config.max_position_embeddings = max(config.max_position_embeddings, reach)
    fresh = type(loaded.model)(config).to(loaded.device, loaded.dtype).eval()
    return dataclasses.replace(loaded, model=fresh)


def settings(model: Any, block: int, *, passes: int | None, strategy: str = "static") -> BlockDiffusionConfig:
    """The mask token is the last row of the embedding, which no text holds."""
    from gnomon.methods.layers.mage import BlockDiffusionConfig

    rows = model.get_input_embeddings().weight.shape[0]
    return BlockDiffusionConfig(block_size=block, mask_token_id=rows - 1, steps=passes, strategy=strategy)


def learn(
    ctx: StageContext,
    *,
    seed: int,
    lr: float,
    model: str,
    scratch: bool,
    data: str,
    block: int,
    steps: int,
    batch: int,
    length: int,
    reach: int,
    points: int,
    batches: int,
) -> dict[str, float]:
    """Train a block-diffusion model and keep it, as it was before (`start/`) and after (`model/`).

    Args:
        points: of the learning curve.
        batches: of held-out text, with noise of their own, that its loss is measured on.

    Returns:
        loss of masked tokens of held-out text before and after, and costs.
    """
    import torch

    from gnomon.core.models import save
    from gnomon.core.scoring import evaluating
    from gnomon.core.train import Step, TrainConfig, train
    from gnomon.methods.layers.block_diffusion import DiffusionLoss, declare
    from gnomon.studies.pretraining import streams

    loaded = roomy(model, scratch=scratch, reach=reach)
    cfg = settings(loaded.model, block, passes=None)
    if ctx.first:
        save(loaded, ctx.dir / "start")
    learnt, held_out = streams(loaded, data)
    shape = {"batch": batch, "length": length, "reach": reach}
    source = Pieces(learnt, cfg, **shape, generator=torch.Generator().manual_seed(seed))
    judged = Pieces(held_out, cfg, **shape, generator=torch.Generator().manual_seed(0))
    rows = [next(judged) for _ in range(batches)]
    loss_fn = DiffusionLoss(cfg)

    def glance() -> float:
        with evaluating(loaded.model), torch.no_grad():
            terms = [
                loss_fn.terms(loaded.model, {k: v.to(loaded.device) for k, v in row.items()}) for row in rows
            ]
        return sum(float(t.masked_nll) * t.masked for t in terms) / sum(t.masked for t in terms)

    before = glance()
    at = {round(steps * i / points) for i in range(1, points + 1)}

    def on_step(done: Step) -> None:
        if done.step in at and ctx.first:
            ctx.record(method="model", metric=LEARNING, value=glance(), unit="nats", tags={"step": done.step})

    spent = train(
        loaded.model,
        source,
        torch.optim.AdamW(loaded.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        TrainConfig(
            steps=steps,
            warmup=max(1, steps // 20),
            schedule="cosine",
            min_lr_ratio=0.05,
            checkpoint_every=max(1, steps // 10),
            autocast="bf16" if loaded.device.type == "cuda" else "none",
        ),
        resume=ctx,
        on_step=on_step,
        loss_fn=loss_fn,
    )
    declare(loaded.model, cfg)
    if ctx.first:
        save(loaded, ctx.dir / "model")
    return {
        "loss before": before,
        "loss": glance(),
        "tokens": spent.tokens,
        "seconds": spent.seconds,
        "trained numbers": sum(p.numel() for p in loaded.model.parameters()),
    }


def reload(of: Done, state: str = TRAINED) -> Loaded:
    """The model of :func:`learn`, after or before training."""
    from gnomon.core.models import load

    return load(str(of.dir / ("model" if state == TRAINED else "start")))


def excerpts(loaded: Loaded, data: str, length: int, count: int) -> Tensor:
    """(count, length) tokens of held-out text, spread evenly; documents follow one another."""
    import torch

    from gnomon.core.data import windows
    from gnomon.studies.pretraining import streams

    found = windows(streams(loaded, data)[1], length)
    at = torch.linspace(0, len(found) - 1, min(count, len(found))).round().long()
    return found[at].to(loaded.device)


def spent_on(of: Done) -> dict[str, float]:
    """The model's cost, for records."""
    return {"tokens": of.value["tokens"], "steps": of.args["steps"], "seconds": of.value["seconds"]}


# ---------------------------------------------------------------------------------------- what they would choose


def sets(
    ctx: StageContext,
    *,
    of: Done,
    state: str,
    data: str,
    passes: int,
    context: int,
    budgets: list[int],
    k: int,
    tile: int,
    dense_layers: int,
    prompts: int,
    blocks: int,
) -> None:
    """Sets of every selector beside exact decoding, over later passes of a block than its first; a prompt an item.

    Args:
        state: of the model, trained or untrained.
        budgets: sizes at which Quest's and the average query's shared sets are compared with sets of single queries.
        k: size for the table of all selectors.
    """
    from gnomon.methods.layers.mage import observe

    loaded = reload(of, state)
    block = of.args["block"]
    cfg = settings(loaded.model, block, passes=passes)
    policies = {(name, k): policy for name, policy in selectors(k, dense_layers, tile=tile).items()}
    for budget in budgets:
        some = selectors(budget, dense_layers, tile=tile)
        policies |= {(name, budget): some[name] for name in (QUEST, AVERAGE, ORACLE)}
    named = {f"{name}|{size}": policy for (name, size), policy in policies.items()}
    spent = spent_on(of)
    for item, ids in enumerate(excerpts(loaded, data, context, prompts)):
        seen = observe(loaded.model, ids[None], cfg, named, max_new_tokens=blocks * block, force=True)
        shared: dict[str, Any] = {"item": item, "budget": spent}
        table = seen.table()
        for label, row in table.items():
            name, _, size = label.partition("|")
            tags = {"state": state, "context": context, "k": int(size)}
            found = {RECALL: row["recall"], MASS: row["mass"], TOKENS: row["tokens"]}
            if "own_recall" in row:
                found |= {OWN: row["own_recall"], SHARED: row["shared_recall"]}
                found[SHARING] = row["own_recall"] - row["shared_recall"]
            for metric, value in found.items():
                ctx.record(method=name, metric=metric, value=value, tags=tags, **shared)
            if int(size) != k:
                continue
            if name in (QUEST, WINDOW, RANDOM):
                lead = table[f"{MAGE}|{k}"]["recall"] - row["recall"]
                ctx.record(method=MAGE, metric=over(name), value=lead, tags=tags, **shared)
            for step in range(2, passes + 1):
                recalls = [one.recall for one in seen.seen if (one.selector, one.step) == (label, step)]
                if recalls:
                    mean = sum(recalls) / len(recalls)
                    ctx.record(method=name, metric=BY_PASS, value=mean, tags={**tags, "step": step}, **shared)
        average, single = seen.alignment()
        tags = {"state": state, "context": context, "k": k}
        for name, value in (("block average", average), ("single query", single)):
            ctx.record(method=name, metric=COSINE, value=value, item=item, budget=spent, tags=tags)
        ctx.record(method=MAGE, metric=LEAD, value=average - single, item=item, budget=spent, tags=tags)


# ----------------------------------------------------------------------------------------- what choosing costs


def against_exact(
    ctx: StageContext,
    *,
    of: Done,
    data: str,
    passes: int,
    context: int,
    k: int,
    tile: int,
    dense_layers: int,
    prompts: int,
    blocks: int,
    threshold: float,
) -> None:
    """Decoding with each selector beside exact decoding: loss of a known block, own tokens, forward passes.

    The loss is that of the text's next block, its tokens revealed in one random order for all. Tokens and passes are
    those of `blocks` blocks that the model writes with a dynamic threshold, the selector's commits included.
    """
    import torch

    from gnomon.methods.layers.mage import Mage, generate, trajectory_nll

    loaded = reload(of)
    block = of.args["block"]
    static = settings(loaded.model, block, passes=passes)
    free = dataclasses.replace(static, steps=None, strategy="dynamic", threshold=threshold)
    entrants: dict[str, SparsePolicy | None] = {
        EXACT: None,
        **selectors(k, dense_layers, tile=tile, seed=ctx.seed),
    }
    if not dense_layers:
        entrants[FIRST_DENSE] = Mage(k, 2)
    entrants[EXACT_COMMIT] = Mage(k, dense_layers, commit="exact")
    spent = spent_on(of)
    tags = {"context": context, "k": k}
    for item, ids in enumerate(excerpts(loaded, data, context + block, prompts)):
        order = torch.randperm(block, generator=torch.Generator().manual_seed(item))[None]
        short = trajectory_nll(
            loaded.model, ids[None, -(min(SHORT_PREFIX, context) + block) :], static, None, order
        )[0]
        ctx.record(method=SHORT, metric=LOSS, value=float(short.mean()), unit="nats", better="lower", item=item,
                   budget=spent, tags=tags)  # fmt: skip
        exact = None
        for name, policy in entrants.items():
            losses, _ = trajectory_nll(loaded.model, ids[None], static, policy, order)
            tokens, stats = generate(
                loaded.model, ids[None, :context], free, policy, max_new_tokens=blocks * block
            )
            new = tokens[:, context:]
            exact = new if exact is None else exact
            found: dict[str, tuple[float, str | None]] = {
                LOSS: (float(losses.mean()), "lower"),
                PASSES: (stats.nfe, "lower"),
                EQUAL: (float((new == exact).double().mean()), "higher"),
                ACTIVE: (stats.active, None),
                READ: (stats.kv_read + stats.kv_read_commit + stats.kv_read_selecting, "lower"),
            }
            for metric, (value, better) in found.items():
                ctx.record(
                    method=name, metric=metric, value=value, better=better, item=item, budget=spent, tags=tags
                )
