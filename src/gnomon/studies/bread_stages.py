"""Stages of the BREAD study beside `pretrain` and `finetune`: counts, bytes, the constructed case, what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import Done, StageContext
from gnomon.studies.pretraining import budget

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gnomon.methods.optim.bread import BlockOptimizer

SHAPES = {
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
    },
    "70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128_256,
    },
}
"""Of Llama 3.1."""
LIMITS_GB = {"8B": 24, "70B": 300}
"""What the abstract says is enough."""
FORMULA_METHODS = ("adamw", "lora", "badam", "bread-lora", "bread-sgd")
STATE = ("masters", "moments", "adapter_moments")
"""Kinds of the estimate that an optimizer's state consists of."""
WIDTHS = {"float32": 4, "bfloat16": 2}


# ------------------------------------------------------------------------------------------ backward passes


def idle(ctx: StageContext, *, model: str, length: int, rank: int, forms: Sequence[str]) -> None:
    """Input-gradient work that serves no update, by active block; one turn of each block.

    Args:
        model: a name for `core.models.load`, or one of `SHAPES`, of which nothing but shapes is made.
        forms: of block descent, by name.
    """
    import torch

    from gnomon.core.models import load
    from gnomon.methods.optim.bread import backward_work

    for form in forms:
        if shape := model in SHAPES:
            network = skeleton(model)
        else:
            network = load(model, dtype="float32").model
        device = next(network.parameters()).device
        ids = torch.zeros(1, length, dtype=torch.long, device=device)
        # A mask of four axes is taken as it is; making one would look at values, which shapes don't have.
        mask = torch.zeros(1, 1, length, length, dtype=torch.bool, device=device) if shape else None
        optimizer = optimizer_of(network, form, rank=rank)
        turns = backward_work(
            optimizer, partial(network, input_ids=ids, attention_mask=mask, use_cache=False)
        )
        optimizer.close(merge=False)
        tags: dict[str, Any] = {"model": model}
        for i, turn in enumerate(turns):
            ctx.record(
                method=form,
                metric="idle share of input gradients",
                value=turn.idle_share,
                better="lower",
                item=str(i),
                tags=tags,
            )
        deeper = [turn for turn in turns if turn.idle] if len(turns) > 1 else []
        ctx.record(
            method=form,
            metric="turns with idle work, of those below other blocks",
            value=len(deeper) / max(1, len(turns) - 1),
            better="lower",
            tags=tags,
        )
        spent = sum(turn.input_gradients for turn in turns)
        ctx.record(
            method=form,
            metric="idle share of input gradients over a block-epoch",
            value=sum(turn.idle for turn in turns) / spent,
            better="lower",
            tags=tags,
        )


def one_pass(ctx: StageContext, *, model: str, rank: int, forms: Sequence[str], seed: int) -> None:
    """One training step: how often the loss is differentiated, and what has moved outside the active block."""
    import torch

    from gnomon.core.data import Batches
    from gnomon.core.models import load
    from gnomon.core.seeding import seeded
    from gnomon.core.train import TrainConfig, next_token_loss, train

    for form in forms:
        with seeded(seed):
            network = load(model, dtype="float32").model
            stream = torch.randint(network.config.vocab_size, (256,))
        optimizer = optimizer_of(network, form, rank=rank, lr=1e-2)
        active = {*optimizer.active_block().parameters}
        inactive = [
            name
            for block in optimizer.blocks
            for name in block.parameters
            if name not in active and network.get_parameter(name).ndim > 1
        ]
        before = {name: whole(network, name) for name in inactive}
        passes = [0]

        def counted(runner: nn.Module, batch: Tensor, passes: list[int] = passes) -> Tensor:
            loss = next_token_loss(runner, batch)

            def count(_: Tensor) -> None:
                passes[0] += 1

            loss.register_hook(count)  # type: ignore[no-untyped-call]
            return loss

        batches = Batches(stream, batch=2, length=16, generator=torch.Generator().manual_seed(seed))
        steps = 2
        train(network, batches, optimizer, TrainConfig(steps=steps, clip=None), loss_fn=counted)
        moved = [name for name in inactive if not torch.equal(before[name], whole(network, name))]
        ctx.record(method=form, metric="backward passes a step", value=passes[0] / steps, better="lower")
        ctx.record(
            method=form,
            metric="inactive matrices that the pass updates",
            value=len(moved) / len(inactive),
            better="higher",
        )


def whole(network: nn.Module, name: str) -> Tensor:
    """A copy of W_j + C_j."""
    module = network.get_submodule(name.rpartition(".")[0])
    weight: Tensor = network.get_parameter(name).detach().clone()
    u, v, scale = (getattr(module, name, None) for name in ("bread_u", "bread_v", "bread_scale"))
    if u is None or v is None or scale is None:
        return weight
    product: Tensor = scale * (u.detach() @ v.detach())
    return weight + product


def optimizer_of(
    network: nn.Module, form: str, *, rank: int, lr: float = 1e-3, **options: Any
) -> BlockOptimizer:
    """Block descent by the name of its form, for stages that look at it without training."""
    from gnomon.methods.optim.bread import BlockOptimizer, preset
    from gnomon.studies.bread_entrants import PARTIAL

    expansion = preset(form.removesuffix(PARTIAL), rank=rank)
    scope: Any = None if expansion is None else "partial" if form.endswith(PARTIAL) else "all"
    return BlockOptimizer(network, lr=lr, expansion=expansion, scope=scope, **options)


# ------------------------------------------------------------------------------------- the constructed case


def constructed(ctx: StageContext, *, draws: int, seed: int) -> None:
    """Prop. 3.1 and 4.1 for regression: the least loss with W₃ frozen, and after a rank-1 expansion of it.

    The first case is W₃ = [[1, 2], [0, 1]], y = (3, −1); the others are drawn with a full column rank and a y that
    some z* with an entry of −1/2 or less fits exactly, so that only the sign of z keeps the loss from zero.
    """
    import torch

    from gnomon.methods.optim.bread import frozen_optimum, rank_one_expansion

    generator = torch.Generator().manual_seed(seed)
    cases = [(torch.tensor([[1.0, 2.0], [0.0, 1.0]]).double(), torch.tensor([3.0, -1.0]).double())]
    for _ in range(draws):
        n = int(torch.randint(2, 7, (), generator=generator))
        m = n + int(torch.randint(0, 4, (), generator=generator))
        w3 = torch.randn(m, n, generator=generator, dtype=torch.float64)
        z = torch.randn(n, generator=generator, dtype=torch.float64)
        z[int(torch.randint(n, (), generator=generator))] = -0.5 - float(torch.rand((), generator=generator))
        cases.append((w3, w3 @ z))
    for i, (w3, y) in enumerate(cases):
        _, frozen = frozen_optimum(w3, y)
        c, e1 = rank_one_expansion(w3, y)
        if not (bool((e1 >= 0).all()) and int(torch.linalg.matrix_rank(c)) <= 1):
            raise AssertionError("the expansion isn't of rank 1, or its z isn't what a ReLU can give")
        expanded = float(((w3 + c) @ e1 - y).square().sum())
        for metric, value in (
            ("best loss with a frozen head", frozen),
            ("loss after a rank-1 expansion", expanded),
        ):
            ctx.record(method="head", metric=metric, value=value, better="lower", item=str(i))


# ------------------------------------------------------------------------------------------------- memory


def formula(ctx: StageContext, *, ranks: int) -> None:
    """Bytes at 8B and 70B by kind, in bfloat16, from the shapes alone; activations come on top.

    Args:
        ranks: of adapters.
    """
    from gnomon.methods.optim.bread import estimate_memory

    for size, limit in LIMITS_GB.items():
        network = skeleton(size)
        for method in FORMULA_METHODS:
            found = estimate_memory(network, method, rank=ranks)
            for kind, held in found.items():
                if kind != "total":
                    ctx.record(
                        method=method,
                        metric="GB by formula",
                        value=held / 1e9,
                        unit="GB",
                        better="lower",
                        tags={"size": size, "kind": kind},
                    )
            ctx.record(
                method=method,
                metric="GB before activations",
                value=found["total"] / 1e9,
                unit="GB",
                better="lower",
                tags={"size": size, "claimed": limit},
            )


def state_sizes(
    ctx: StageContext,
    *,
    of: Done | None = None,
    model: str | None = None,
    base: str,
    blocks: Sequence[str],
    dtypes: Sequence[str],
    rank: int,
    seed: int,
) -> dict[str, int]:
    """Peak bytes of optimizer state over a block-epoch of short turns, and what the formula says.

    Args:
        blocks: granularities, which give several numbers of blocks.
        dtypes: of the weights.

    Returns:
        the bytes of BREAD-LoRA with the first of each, and the ranks at which LoRA and GaLore take as much.
    """
    import torch

    from gnomon.core.models import load
    from gnomon.core.train import next_token_loss
    from gnomon.methods.optim.bread import estimate_memory, measure_peak
    from gnomon.studies.bread_entrants import everything, galore_rank, lora_rank

    name = str(of.dir / "model") if of is not None else str(model)
    first: dict[str, int] = {}
    for dtype in dtypes:
        adam = 0
        for kind in blocks:
            for method in ("adamw", "badam", "bread-lora"):
                if method == "adamw" and (adam or dtype != "float32"):
                    continue  # AdamW has no blocks; with narrow weights it is block descent with a single one
                network = load(name, dtype=dtype).model
                optimizer: Any
                if method == "adamw":
                    optimizer = everything(network, lr=1e-4, weight_decay=0.0, total_steps=1).optimizer
                else:
                    optimizer = optimizer_of(network, method, rank=rank, lr=1e-4, blocks=kind, switch_every=1)
                count = 1 if method == "adamw" else len(optimizer.blocks)
                generator = torch.Generator().manual_seed(seed)
                ids = torch.randint(network.config.vocab_size, (1, 8), generator=generator)
                with measure_peak(network, optimizer) as peak:
                    for _ in range(count):
                        next_token_loss(network, ids.to(next(network.parameters()).device)).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                parts = estimate_memory(
                    network.config,
                    method,
                    rank,
                    getattr(torch, dtype),
                    blocks=kind,  # type: ignore[arg-type]
                )
                expected = sum(parts[part] for part in STATE)
                adam = adam or peak.state
                tags = {
                    "base": base,
                    "blocks": "none" if method == "adamw" else kind,
                    "count": count,
                    "dtype": dtype,
                }
                values = {
                    "state bytes in a block-epoch": float(peak.state),
                    "state bytes by formula": float(expected),
                    "error of the formula": peak.state / expected - 1,
                }
                if dtype == "float32":
                    values["state bytes over AdamW's"] = peak.state / adam
                for metric, value in values.items():
                    ctx.record(method=method, metric=metric, value=value, better="lower", tags=tags)
                if method == "bread-lora" and not first:
                    optimizer.close()
                    width = WIDTHS[dtype]
                    first = {
                        "bytes": peak.state,
                        "lora": lora_rank(network, peak.state),
                        "galore": galore_rank(network, peak.state, width),
                    }
    return first


def skeleton(size: str) -> nn.Module:
    """A Llama of one of `SHAPES`, without storage."""
    from transformers import LlamaConfig

    from gnomon.methods.optim.bread.memory import skeleton as without_storage

    if size not in SHAPES:
        raise unknown("size", size, SHAPES)
    return without_storage(LlamaConfig(**SHAPES[size], tie_word_embeddings=False))


# ------------------------------------------------------------------------------------------ what was trained


def measure(ctx: StageContext, *, of: Done, method: str, base: str, trials: int) -> None:
    """Loss, exact match and bytes of a fine-tuned model."""
    better = {"exact match": "higher"}
    names = (
        "loss",
        "exact match",
        "peak state bytes",
        "peak gradient bytes",
        "peak device bytes",
        "trained numbers",
    )
    for metric in names:
        if of.value[metric] is not None:
            ctx.record(
                method=method,
                metric=metric,
                value=of.value[metric],
                better=better.get(metric, "lower"),
                tags={"lr": of.args["lr"], "base": base},
                budget=budget(of, trials),
            )


def gap(ctx: StageContext, *, of: Done, low: Done, high: Done, method: str, base: str) -> None:
    """Share of the gap from `low` (BAdam) to `high` (AdamW) that a competitor closes; none where there is no gap."""
    if of.args["steps"] != low.args["steps"] or of.args["steps"] != high.args["steps"]:
        raise UsageError("The three models were trained for different numbers of steps.")
    whole_gap = low.value["loss"] - high.value["loss"]
    if whole_gap > 0:
        ctx.record(
            method=method,
            metric="share of the gap to AdamW closed",
            value=(low.value["loss"] - of.value["loss"]) / whole_gap,
            better="higher",
            tags={"base": base},
        )
