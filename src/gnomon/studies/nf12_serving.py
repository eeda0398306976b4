"""Stages of the NF12 study on a whole model: generation, and memory that becomes room for the cache.

A small server runs under a cap on the bytes of weights and cache together, with either kind of weights and the
same kernels for both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.lab import StageContext
from gnomon.studies.nf12_timing import SIGMA

if TYPE_CHECKING:
    from torch import Tensor

QWEN3_32B = {"layers": 64, "hidden": 5120, "inner": 25600, "queries": 8192, "kv": 1024, "vocabulary": 151_936}
CARD_BYTES, FREE_SHARE = 80e9, 0.88  # the card's reading of "4.5 times": an 80 GB card at this utilisation


def generation(
    ctx: StageContext,
    *,
    model: str,
    data: str,
    prompt: int,
    new: int,
    min_elements: int,
    threads: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Greedy generation, one sequence: tokens per second before and after, and whether the tokens agree."""
    import torch

    from gnomon.core.timing import Contender, interleaved, threads_set

    ids = prompts(model, data, 1, prompt, seed)
    kinds = {
        kind: model_in(kind, model, min_elements)
        for kind in ("BF16, torch", "BF16, matched", "NF12", "FP32, torch")
    }
    made: dict[str, Tensor] = {}

    def run(kind: str) -> None:
        made[kind] = greedy(kinds[kind], ids, new)[0]

    with threads_set(threads), torch.inference_mode():
        contenders = [Contender(name=kind, calls=[partial(run, kind)]) for kind in kinds]
        times = interleaved(contenders, repeats=repeats)
    for kind, seconds in times.items():
        for repeat, value in enumerate(seconds):
            ctx.record(
                method=kind,
                metric="time per token",
                value=value / new,
                unit="s",
                better="lower",
                item=repeat,
                tags={"threads": threads},
                budget={"tokens": new},
            )
    for kind, tokens in made.items():
        differ = int((tokens != made["BF16, matched"]).sum())
        ctx.record(
            method=kind, metric="tokens unlike BF16's", value=differ, tags={"threads": threads}, item="one"
        )
    return {"new": new}


def qwen3_memory(ctx: StageContext) -> dict[str, Any]:
    """Arithmetic on the published model: bytes that 12 bits a weight free, and what 4.5 times asks for."""
    from gnomon.methods.compress.nf12 import gaussian_exceptions

    q = QWEN3_32B
    attention = q["hidden"] * (2 * q["queries"] + 2 * q["kv"])
    layer = attention + 3 * q["hidden"] * q["inner"]
    matrices = q["layers"] * layer + 2 * q["vocabulary"] * q["hidden"]
    bits = 12 + 16 * gaussian_exceptions(SIGMA, 108)
    before = 2 * matrices
    freed = before - bits * matrices / 8
    room = CARD_BYTES * FREE_SHARE - before
    for metric, value in {
        "freed": freed / 1e9,
        "free before, for 4.5 times": freed / (4.5 - 1) / 1e9,
        "free before, on an 80 GB card": room / 1e9,
    }.items():
        ctx.record(method="arithmetic", metric=metric, value=value, unit="GB")
    ctx.record(method="arithmetic", metric="times the room, on an 80 GB card", value=(room + freed) / room)
    return {"matrices": matrices}


def server(
    ctx: StageContext,
    *,
    model: str,
    data: str,
    requests: int,
    prompt: int,
    new: int,
    free_share: float,
    min_elements: int,
    threads: int,
    seed: int,
) -> dict[str, Any]:
    """A server whose weights and key-value cache share a fixed number of bytes, with either kind of weights.

    As many sequences run at a time as the cache has room for; both servers answer the same requests with the
    same kernels. The cap leaves the BF16 server `free_share` of its weights' bytes, the paper's proportion.
    """
    import time

    import torch

    from gnomon.core.evaluate import weight_bytes
    from gnomon.core.timing import threads_set

    ids = prompts(model, data, requests, prompt, seed)
    models = {kind: model_in(kind, model, min_elements) for kind in ("BF16, matched", "NF12")}
    per_token = bytes_per_token(models["NF12"].config)
    resident = {kind: weight_bytes(m) for kind, m in models.items()}
    cap = int(resident["BF16, matched"] * (1 + free_share))
    answers: dict[str, Tensor] = {}
    slots: dict[str, int] = {}
    with threads_set(threads), torch.inference_mode():
        for kind, served in models.items():
            room = (cap - resident[kind]) // per_token
            slots[kind] = min(requests, room // (prompt + new))
            if slots[kind] < 1:
                # No record: the claim then stays undecided for want of one.
                return {"too small": f"{room} tokens of room, {prompt + new} are needed"}
            start = time.perf_counter()
            made = []
            for first in range(0, requests, slots[kind]):
                tokens, held = greedy(served, ids[first : first + slots[kind]], new)
                made.append(tokens)
                if resident[kind] + held > cap:
                    raise AssertionError(f"{kind}: {held} bytes of cache broke the cap of {cap}.")
            seconds = time.perf_counter() - start
            answers[kind] = torch.cat(made)
            budget = {"tokens": requests * new, "seconds": seconds}
            ctx.record(
                method=kind,
                metric="tokens per second",
                value=requests * new / seconds,
                unit="1/s",
                better="higher",
                budget=budget,
            )
        # Equal batches, or rounding in another batch size could be taken for a difference of the weights.
        batch = slots["NF12"]
        same = answers["NF12"][:batch] == greedy(models["BF16, matched"], ids[:batch], new)[0]
    ctx.record(method="NF12", metric="tokens unlike BF16's", value=int((~same).sum()), item="batch")
    agree = (answers["NF12"] == answers["BF16, matched"]).float().mean()
    ctx.record(
        method="NF12", metric="tokens agreeing across batch sizes", value=float(agree), better="higher"
    )
    return {"cap": cap, "resident": resident, "slots": slots, "bytes per token": per_token}


def capacity(ctx: StageContext, *, model: str, free_share: float, min_elements: int) -> dict[str, Any]:
    """How many tokens the cache of either server holds, by filling it, against what the sizes predict."""
    import torch

    from gnomon.core.evaluate import weight_bytes

    models = {kind: model_in(kind, model, min_elements) for kind in ("BF16, matched", "NF12")}
    resident = {kind: weight_bytes(m) for kind, m in models.items()}
    cap = int(resident["BF16, matched"] * (1 + free_share))
    for kind, served in models.items():
        room = cap - resident[kind]
        with torch.inference_mode():
            fits = cached_tokens(served, room)
        predicted = room // bytes_per_token(served.config)
        ctx.record(method=kind, metric="cached tokens", value=fits, better="higher")
        ctx.record(method=kind, metric="cached tokens, measured over predicted", value=fits / predicted)
    return {"cap": cap, "resident": resident}


def bytes_per_token(config: Any) -> int:
    """Keys and values of one token in all layers, two bytes a number."""
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * 2)


def cached_tokens(model: Any, room: int) -> int:
    """Tokens whose keys and values this model's own cache holds in `room` bytes: fed until they exceed it."""
    import torch
    from transformers import DynamicCache

    cache, fits, step = DynamicCache(config=model.config), 0, 256
    while step:
        ids = torch.zeros(1, step, dtype=torch.long)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cache_bytes(cache) <= room:
            fits = cache.get_seq_length()
        else:
            cache.crop(-step)  # a negative number is how many tokens to drop
            step //= 2
    return fits


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a Transformers cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


def greedy(model: Any, ids: Tensor, new: int) -> tuple[Tensor, int]:
    """(B, new) tokens after prompts (B, T), without stopping, and the bytes the cache had in the end."""
    import torch
    from transformers import DynamicCache

    cache, made = DynamicCache(config=model.config), []
    step = ids
    for _ in range(new):
        logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        step = logits[:, -1].argmax(-1, keepdim=True)
        made.append(step)
    return torch.cat(made, dim=1), cache_bytes(cache)


# ------------------------------------------------------------------------------------------------- helpers


def model_in(kind: str, name: str, min_elements: int = 1 << 16) -> Any:
    """The model with one kind of weights and layers."""
    import torch

    from gnomon.core.models import load
    from gnomon.core.seeding import seeded
    from gnomon.kernels.bf16.module import fast_linears
    from gnomon.methods.compress.nf12 import NF12Config, compress_model

    with seeded(0):  # a `tiny:` model draws its weights when it is loaded; all kinds must be one model
        model = load(name, dtype="float32" if kind.startswith("FP32") else "bfloat16").model
    if kind == "NF12":
        compress_model(model, config=NF12Config(min_elements=min_elements))
    plain = any(type(module) is torch.nn.Linear for module in model.modules())
    if kind == "BF16, matched" or (kind == "NF12" and plain):  # matrices that stayed raw run alike in both
        fast_linears(model)
    return model


def prompts(model: str, data: str, count: int, length: int, seed: int) -> Tensor:
    """Prompts (count, length) cut from a text."""
    import torch

    from gnomon.core.data import corpus, token_stream, windows
    from gnomon.core.models import load

    found = windows(token_stream(corpus(data), load(model).tokenizer), length)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    return found[order.repeat(-(-count // len(found)))[:count]]
