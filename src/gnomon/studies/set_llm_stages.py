"""Stages of the Set-LLM study: invariance of the rungs, fine-tuning, sensitivity to order, time of a step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError
from gnomon.lab import Done, StageContext
from gnomon.methods.layers.set_llm.items import questions

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gnomon.core.models import Loaded
    from gnomon.methods.layers.set_llm import OrderQuestion, SetCollator

RANK, ALPHA = 8, 1
"""Of LoRA (the paper's): a scale of 1/8, to which its high learning rate belongs."""
SPREAD, FLIPS, EXCHANGED = "spread of log-probabilities", "share of orders that change the choice", "exchange"
LOGITS = "spread of logits"
RANDOM, WORST, VOTE = "accuracy over orders", "accuracy in the worst order", "accuracy by vote"
LOST, FIRST = "accuracy lost to the worst order", "share of choices of the first place"
ADAPTER = "adapter.safetensors"


# -------------------------------------------------------------------------------------------- invariance


def invariance(
    ctx: StageContext, *, model: str, dtype: str, items: str, count: int, modes: Sequence[str]
) -> None:
    """How far the six rungs' logits and log-probabilities lie apart over all orders of untrained questions.

    Also the exchange trap: two sets that differ by tokens exchanged between their elements at equal positions. Who
    can't tell them apart sees a bag of words.
    """
    import torch

    from gnomon.core.models import load
    from gnomon.methods.layers.set_llm import Set, SetLLM, SetPrompt

    loaded = load(model, dtype=None if dtype == "float64" else dtype)
    network = loaded.model.double() if dtype == "float64" else loaded.model
    asked = questions(items, "test", count)
    swapped = [
        SetPrompt(["Cities:", Set([f" Paris is {one}", f" London is {two}"]), " So London is"])
        for one, two in (("great", "awful"), ("awful", "great"))
    ]
    for mode in modes:
        reader = SetLLM(network, loaded.tokenizer, mode=mode)
        for number, question in enumerate(asked):
            orders = list(itertools.permutations(range(len(question.options))))
            prompts = [question.prompt(order) for order in orders]
            scores = torch.tensor(reader.ask(question, orders))
            logits = torch.cat([reader.logits(prompts[i : i + 8]) for i in range(0, len(prompts), 8)])
            chosen = scores.argmax(-1)
            found = {
                LOGITS: float((logits - logits[0]).abs().max()),
                SPREAD: float((scores.amax(0) - scores.amin(0)).max()),
                FLIPS: float((chosen != chosen.mode().values).double().mean()),
            }
            for metric, value in found.items():
                ctx.record(method=mode, metric=metric, value=value, item=number, tags={"dtype": dtype})
        one, two = reader.score_many(swapped, [" great", " awful"])
        gap = float((one - two).abs().max())
        ctx.record(method=mode, metric=EXCHANGED, value=gap, unit="nats", tags={"dtype": dtype})


# ------------------------------------------------------------------------------------------------ training


class QuestionBatches:
    """Endless batches for `core.train`: all questions once in each epoch, options in a new order each time."""

    def __init__(
        self,
        asked: Sequence[OrderQuestion],
        collate: SetCollator,
        *,
        batch: int,
        generator: torch.Generator,
    ) -> None:
        if not 1 <= batch <= len(asked):
            raise UsageError(f"batch={batch} must lie in 1..{len(asked)}, the number of questions.")
        self.asked, self.collate, self.batch = asked, collate, batch
        self.generator = generator
        self.order: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        import torch

        items = []
        for _ in range(self.batch):
            if not self.order:
                self.order = torch.randperm(len(self.asked), generator=self.generator).tolist()
            question = self.asked[self.order.pop()]
            turn = torch.randperm(len(question.options), generator=self.generator).tolist()
            items.append({"prompt": question.prompt(turn), "response": question.options[question.answer]})
        return self.collate(items)

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to draw the same batches from here on."""
        return {"generator": self.generator.get_state(), "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = list(state["order"])


def adapted(loaded: Loaded) -> Loaded:
    """The model with LoRA on all linear maps of attention and MLP; nothing else is trained."""
    import peft

    from gnomon.core.layers import linears

    weights = {id(layer.weight) for layer in linears(loaded.model).values()}
    targets = {name for name, m in loaded.model.named_modules() if id(getattr(m, "weight", None)) in weights}
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
    return dataclasses.replace(loaded, model=peft.get_peft_model(loaded.model, config).get_base_model())


def trained_part(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def learn(
    ctx: StageContext,
    *,
    method: str,
    mode: str,
    canonical: bool,
    seed: int,
    lr: float,
    model: str,
    dtype: str,
    items: str,
    learnt: int,
    held_out: int,
    steps: int,
    batch: int,
    points: int,
) -> dict[str, Any]:
    """Fine-tune an adapter on questions in one mode; it lies in `adapter.safetensors`.

    Returns:
        loss of right options on questions to tune on, and costs.
    """
    import torch
    from safetensors.torch import save_file

    from gnomon.core.models import load
    from gnomon.core.train import TrainConfig
    from gnomon.methods.layers.set_llm import SetCollator
    from gnomon.studies.finetuning import answer_loss
    from gnomon.studies.pretraining import Entrant, Task, fit

    loaded = adapted(load(model, dtype=dtype))
    collate = SetCollator(loaded.tokenizer, model=loaded.model, mode=mode, canonical=canonical)
    generator = torch.Generator().manual_seed(seed)
    source = QuestionBatches(questions(items, "train", learnt), collate, batch=batch, generator=generator)
    judged = QuestionBatches(
        questions(items, "valid", held_out),
        collate,
        batch=min(batch, held_out),
        generator=torch.Generator().manual_seed(0),
    )
    rows = [next(judged) for _ in range(max(1, held_out // judged.batch))]
    own = list(trained_part(loaded.model).values())
    config = TrainConfig(
        steps=steps,
        warmup=max(1, steps // 10),
        schedule="linear",
        clip=1.0,
        checkpoint_every=max(1, steps // 2),
    )
    network, value = fit(
        ctx,
        loaded,
        Entrant(torch.optim.AdamW(own, lr=lr, weight_decay=0.0)),
        Task(source, glance=lambda m: answer_loss(m, rows[:2]), judge=lambda m: answer_loss(m, rows)),
        config,
        method=method,
        points=points,
        tags={"lr": lr},
        keep=False,
    )
    if ctx.first:
        tensors = {name: p.detach().cpu().contiguous() for name, p in trained_part(network).items()}
        save_file(tensors, ctx.dir / ADAPTER)
    return value


# -------------------------------------------------------------------------------------------- sensitivity


def sensitivity(
    ctx: StageContext,
    *,
    method: str,
    mode: str,
    canonical: bool,
    of: Done | None = None,
    model: str,
    dtype: str,
    items: str,
    count: int,
    permutations: str | int,
    trials: int = 0,
    seed: int = 0,
) -> None:
    """Accuracy over all orders of a question's options, per question that judges."""
    import torch
    from safetensors.torch import load_file

    from gnomon.core.models import load
    from gnomon.methods.layers.set_llm import SetLLM, order_sensitivity
    from gnomon.studies.pretraining import budget

    loaded = load(model, dtype=dtype)
    if of is not None:
        loaded = adapted(loaded)
        stored = load_file(of.dir / ADAPTER)
        with torch.no_grad():
            for name, parameter in trained_part(loaded.model).items():
                parameter.copy_(stored[name])
    reader = SetLLM(loaded.model, loaded.tokenizer, mode=mode, canonical=canonical)
    asked = questions(items, "test", count)
    found = order_sensitivity(reader.ask, asked, permutations)
    spent = None if of is None else budget(of, trials)
    for number, (question, row) in enumerate(zip(asked, found.per_question, strict=True)):
        values: Mapping[str, tuple[float, str | None]] = {
            RANDOM: (row["random"], "higher"),
            WORST: (row["adversarial"], "higher"),
            VOTE: (row["majority"], "higher"),
            FLIPS: (row["flips"], "lower"),
            LOST: (row["random"] - row["adversarial"], "lower"),
            # Over 1/k, so that questions with other numbers of options can be pooled.
            FIRST: (row["first place"] / len(question.options), None),
        }
        for metric, (value, better) in values.items():
            ctx.record(method=method, metric=metric, value=value, item=number, better=better, budget=spent)


# -------------------------------------------------------------------------------------------------- times


def step_times(ctx: StageContext, *, model: str, dtype: str, items: str, batch: int, repeats: int) -> None:
    """Seconds of a training step and of reading: the model as it is, and with the mask and positions of sets."""
    import torch

    from gnomon.core.models import load
    from gnomon.core.timing import Contender, interleaved
    from gnomon.methods.layers.set_llm import SetCollator

    loaded = adapted(load(model, dtype=dtype))
    network = loaded.model
    asked = questions(items, "train", batch)
    rows = [{"prompt": q.prompt(range(len(q.options))), "response": q.options[q.answer]} for q in asked]
    batches = {
        name: {
            k: v.to(loaded.device)
            for k, v in SetCollator(loaded.tokenizer, model=network, mode=mode)(rows).items()
        }
        for name, mode in (("causal+pe", "causal+pe"), ("setmask+setpe", "setmask+setpe"))
    }
    plain = batches["causal+pe"]
    for name in ("attention_mask", "position_ids"):  # what the model makes itself, on its fastest path
        plain.pop(name)

    def wait() -> None:
        if loaded.device.type == "cuda":
            torch.cuda.synchronize()

    def training(given: Mapping[str, Tensor]) -> None:
        network(**given, use_cache=False).loss.backward()
        network.zero_grad()
        wait()

    def reading(given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            network(**{k: v for k, v in given.items() if k != "labels"}, use_cache=False)
        wait()

    for metric, work in (("time of a training step", training), ("time of reading", reading)):
        turns = [Contender(name=name, calls=[partial(work, given)]) for name, given in batches.items()]
        for name, seconds in interleaved(turns, repeats=repeats).items():
            for repeat, value in enumerate(seconds):
                ctx.record(method=name, metric=metric, value=value, unit="s", better="lower", item=repeat)
