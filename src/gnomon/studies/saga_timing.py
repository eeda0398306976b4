"""Stages of the SAGA study that time a decoding step: one layer's attention, and whole models. They are exclusive.

Caches are drawn once, as long as the longest context, and shared by all contenders. A contender passes through all of
them: at shorter contexts by windows side by side, with fewer key heads by one group of heads after another. So each
repeat reads all keys, whatever is timed, and nothing is read twice from a cache of the processor.

Timings are seconds per step with the repeat's number as item; contenders take turns within a repeat.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import UsageError, unknown
from gnomon.lab import StageContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from gnomon.core.timing import Contender

STEP_TIME, ATTENTION_TIME = "time of a decoding step", "time of attention"
BYTE_SHARE, TIME_SHARE = "share of bytes that are keys", "share of time that is the query-key step"
FASTER = "times as fast as dense GQA"
DENSE, SDPA, READING = "dense GQA", "dense GQA, torch SDPA", "reading"
CHECKED = 1000
"""Positions at which contenders are compared before anything is timed."""
CLOSE = 5e-2
"""Relative error of bfloat16 logits that pass through some layers in two orders of summation."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    queries: int
    heads: int
    """Of keys and of values, in dense GQA."""
    width: int
    key_heads: int
    """Of SAGA."""


SHAPES = {
    "tiny": Shape(32, 48, 2, 64, 4, 2, 8, 1),
    "135m": Shape(576, 1536, 30, 49152, 9, 3, 64, 1),
    "1b": Shape(2048, 8192, 16, 128256, 32, 8, 64, 2),
}
"""`135m` is SmolLM2-135M's, `1b` that of Llama-3.2-1B; SAGA's key heads are a quarter of its value heads."""


def sized(size: str) -> tuple[Shape, int]:
    """`135m:15` -> the shape of that name, and how many of its layers are built.

    Raises:
        UsageError: no such shape; more layers than it has, or none.
    """
    name, _, layers = size.partition(":")
    if name not in SHAPES:
        raise unknown("size", name, SHAPES)
    whole = SHAPES[name].layers
    if not layers.isdigit() or not 1 <= int(layers) <= whole:
        raise UsageError(
            f"{size!r} must be a name and a number of layers up to {whole}, such as {name}:{whole}."
        )
    return SHAPES[name], int(layers)


def symmetric(shape: Shape) -> str:
    """Name of dense GQA's head counts with Atop-N."""
    return f"({shape.queries}, {shape.heads}, {shape.heads}) + Atop-N"


def saga(shape: Shape, key_heads: int | None = None) -> str:
    """Name of SAGA with Atop-N."""
    return f"({shape.queries}, {key_heads or shape.key_heads}, {shape.heads}) + Atop-N"


def scoring(name: str) -> str:
    """Name of a contender that reads keys alone."""
    return f"{name}, keys alone"


# -------------------------------------------------------------------------------------------------- one layer


def attention(
    ctx: StageContext,
    *,
    size: str,
    lengths: Sequence[int],
    n: int,
    threads: int,
    repeats: int,
    copies: int,
) -> dict[str, Any]:
    """Attention of one layer over contexts of several lengths: Atop-N as a whole, its pass over keys alone, and dense.

    "Keys alone" is the same kernel with the same buckets of which a single winner's value is read, so that the whole
    differs from it by the softmax over N positions and their values.

    Args:
        size: a shape of `SHAPES`, `name:layers`; the layers don't matter here.
        copies: of the caches; 0: as many as make four times the last-level cache.
    """
    import torch

    from gnomon.core.models import as_device
    from gnomon.core.timing import Contender, copies_for, interleaved, threads_set
    from gnomon.kernels import memory
    from gnomon.kernels.sparse_decode import choice, dense_decode, sparse_decode
    from gnomon.methods.layers.saga import cost_model

    shape, _ = sized(size)
    where = as_device(None)
    longest = max(lengths)
    generator = torch.Generator().manual_seed(ctx.seed)
    count = copies or copies_for(2 * shape.heads * longest * shape.width)
    stored = [
        [cache(shape.heads, longest, shape.width, generator).to(where) for _ in range(2)]
        for _ in range(count)
    ]
    q = torch.randn(1, shape.queries, shape.width, generator=generator).bfloat16().to(where)
    counts = sorted({1, shape.key_heads, shape.heads})
    some_k, some_v = (t[:, :, : min(CHECKED, longest)] for t in stored[0])
    check_attention(q, some_k, some_v, n)
    for length in lengths:
        kept = min(n, length)
        pairs = [
            (k[:, :, at : at + length], v[:, :, at : at + length])
            for k, v in stored
            for at in range(0, longest - length + 1, length)
        ]
        contenders = [turn(DENSE, [partial(dense_decode, q, k, v) for k, v in pairs], where)]
        for h in counts:
            split = [(k[:, g : g + h], v) for k, v in pairs for g in range(0, shape.heads, h)]
            name = saga(shape, h)
            whole = [partial(sparse_decode, q, k, v, n=kept) for k, v in split]
            keys = [partial(sparse_decode, q, k, v, n=1, oversample=kept) for k, v in split]
            contenders += [turn(name, whole, where), turn(scoring(name), keys, where)]
        if where.type == "cpu":
            contenders.append(Contender(name=READING, calls=[partial(memory.read, k) for k, _ in stored]))
        with threads_set(threads), torch.inference_mode():
            times = interleaved(contenders, repeats=repeats)
        tags: dict[str, Any] = {"size": size, "length": length, "threads": threads, "n": n}
        record_times(ctx, ATTENTION_TIME, times, tags)
        bandwidth = (
            2 * shape.heads * longest * shape.width / statistics.median(times.get(READING, [float("nan")]))
        )
        for h in counts:
            name = saga(shape, h)
            cost = cost_model(shape.queries, h, shape.heads, length, n, shape.width)
            ctx.record(
                method=name, metric=BYTE_SHARE, value=cost.keys / cost.reads, better="higher", tags=tags
            )
            shares = [a / b for a, b in zip(times[scoring(name)], times[name], strict=True)]
            ctx.record(
                method=name, metric=TIME_SHARE, value=statistics.median(shares), better="higher", tags=tags
            )
            gains = [a / b for a, b in zip(times[DENSE], times[name], strict=True)]
            seconds = statistics.median(times[name])
            allowed = {"bytes allow": cost.speedup}
            if READING in times:
                allowed["share of reading speed"] = 2 * cost.reads / seconds / bandwidth
            ctx.record(
                method=name,
                metric=f"{FASTER}, attention alone",
                value=statistics.median(gains),
                better="higher",
                tags={**tags, **allowed},
            )
    return {"kernel": choice(where.type).name, "copies": count}


def cache(heads: int, length: int, width: int, generator: torch.Generator) -> Tensor:
    """Random keys or values (1, heads, length, width) in bfloat16, drawn head by head to need little room."""
    import torch

    out = torch.empty(1, heads, length, width, dtype=torch.bfloat16)
    for head in range(heads):
        out[0, head] = torch.randn(length, width, generator=generator)
    return out


def turn(name: str, calls: Sequence[Callable[[], object]], where: torch.device) -> Contender:
    """A contender; on a GPU calls only begin, so the last one waits for all of them."""
    import torch

    from gnomon.core.timing import Contender

    if where.type != "cuda":
        return Contender(name=name, calls=calls)

    def last() -> None:
        calls[-1]()
        torch.cuda.synchronize()

    return Contender(name=name, calls=[*calls[:-1], last])


def record_times(ctx: StageContext, metric: str, times: dict[str, list[float]], tags: dict[str, Any]) -> None:
    """All repeats of all contenders."""
    for name, seconds in times.items():
        for repeat, value in enumerate(seconds):
            ctx.record(
                method=name, metric=metric, value=value, unit="s", better="lower", item=repeat, tags=tags
            )


def check_attention(q: Tensor, k: Tensor, v: Tensor, n: int) -> None:
    """Both kernels against float64.

    Raises:
        AssertionError: one is wrong; nothing is to be timed then.
    """
    from torch.nn import functional as F

    from gnomon.kernels.sparse_decode import dense_decode, reference, sparse_decode

    n = min(n, k.shape[2])
    wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
    dense = F.scaled_dot_product_attention(wide_q[:, :, None], wide_k, wide_v, enable_gqa=True)[:, :, 0]
    sparse, _ = reference.decode(wide_q, wide_k, wide_v, n, 1, q.shape[-1] ** -0.5)
    close("the dense kernel", dense_decode(q, k, v), dense, 1e-2)
    close("Atop-N", sparse_decode(q, k, v, n=n)[0], sparse, 1e-2)


def close(what: str, found: Tensor, right: Tensor, limit: float) -> None:
    """
    Raises:
        AssertionError: further apart than the limit.
    """
    error = float((found.double() - right.double()).norm() / right.double().norm())
    if not error < limit:
        raise AssertionError(f"{what} is off by {error:.1e}, more than {limit:g}; nothing was timed.")


# ------------------------------------------------------------------------------------------------ whole models


def decoding(
    ctx: StageContext, *, size: str, lengths: Sequence[int], n: int, threads: int, repeats: int
) -> dict[str, Any]:
    """One token through a whole decoder with random weights after contexts of several lengths, head included.

    Dense GQA runs by the kernel that Atop-N's loop over keys is taken from, and by torch's; Atop-N with all key heads
    and with SAGA's. A decoder with fewer layers than its shape has a vocabulary that is smaller by as much, so that
    attention, feed-forward layers and head keep their shares.
    """
    import torch

    from gnomon.core.models import as_device
    from gnomon.core.timing import interleaved, threads_set
    from gnomon.kernels.sparse_decode import choice
    from gnomon.methods.layers.saga import cost_model

    shape, layers = sized(size)
    where = as_device(None)
    longest = max(lengths)
    generator = torch.Generator().manual_seed(ctx.seed)
    models = contenders_of(shape, layers, longest, n)
    for model in models.values():
        model.to(where)
    stored = [
        [cache(shape.heads, longest, shape.width, generator).to(where) for _ in range(2)]
        for _ in range(layers)
    ]
    check_models(models, stored, n)
    token = torch.zeros(1, 1, dtype=torch.long, device=where)
    weights = 2 * (sum(p.numel() for p in models[DENSE].parameters()))  # the head's are the embedding's
    for length in lengths:
        starts = range(0, longest - length + 1, length)
        turns = []
        for name, model in models.items():
            h = model.config.num_key_heads if "Atop" in name else shape.heads
            calls = [
                partial(step, model, token, stored, at, length, g, h)
                for at in starts
                for g in range(0, shape.heads, h)
            ]
            turns.append(turn(name, calls, where))
        with threads_set(threads), torch.inference_mode():
            times = interleaved(turns, repeats=repeats)
        tags: dict[str, Any] = {
            "size": size,
            "length": length,
            "threads": threads,
            "n": n,
        }
        record_times(ctx, STEP_TIME, times, tags)
        for name, model in models.items():
            if "Atop" not in name:
                continue
            cost = cost_model(shape.queries, model.config.num_key_heads, shape.heads, length, n, shape.width)
            allowed = (weights + 2 * layers * cost.dense) / (weights + 2 * layers * cost.reads)
            gains = [a / b for a, b in zip(times[DENSE], times[name], strict=True)]
            ctx.record(
                method=name,
                metric=FASTER,
                value=statistics.median(gains),
                better="higher",
                tags={**tags, "bytes allow": allowed, "formula, attention alone": cost.speedup},
            )
    return {"kernel": choice(where.type).name, "layers": layers, "bytes of weights": weights}


def contenders_of(shape: Shape, layers: int, positions: int, n: int) -> dict[str, PreTrainedModel]:
    """Decoders by name, which share all weights but those of fewer key heads; dense ones by two implementations."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gnomon.kernels.bf16.module import fast_linears
    from gnomon.methods.layers.saga import SagaConfig, to_saga

    register_matched()
    config = LlamaConfig(
        vocab_size=max(16, shape.vocabulary * layers // shape.layers),
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.queries,
        num_key_value_heads=shape.heads,
        head_dim=shape.width,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dense: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)

    def again() -> Any:
        """The same weights in other modules."""
        twin = copy.deepcopy(dense, {id(p): p for p in dense.parameters()})
        twin.config = copy.deepcopy(dense.config)
        for module in twin.modules():
            if getattr(module, "config", None) is not None:
                module.config = twin.config
        return twin

    found = {DENSE: again(), SDPA: again()}
    found[DENSE].config._attn_implementation = MATCHED
    for heads, name in ((shape.heads, symmetric(shape)), (shape.key_heads, saga(shape))):
        settings = SagaConfig(num_key_heads=heads, num_value_heads=shape.heads, top_n=n)
        found[name] = to_saga(again(), settings, init="first", inplace=True)
    for model in found.values():
        fast_linears(model)
    return found


MATCHED = "gnomon_study_dense"


def register_matched() -> None:
    """Make Transformers know dense attention by the loop over keys that Atop-N's kernel has; for single steps."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(MATCHED, matched)
    AttentionMaskInterface.register(MATCHED, sdpa_mask)


def matched(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense attention (B, 1, Hq, d) of a single query row without a mask, in the form of the AttentionInterface."""
    from torch.nn import functional as F

    from gnomon.kernels.sparse_decode import choice, dense_decode

    assert query.shape[2] == 1 and attention_mask is None
    if choice(query.device.type).name == "reference":  # no such loop here: torch's is the fastest there is
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(1, 2), None
    return dense_decode(query[:, :, 0], key, value)[:, None], None


def step(
    model: Any, token: Tensor, stored: Sequence[Sequence[Tensor]], at: int, length: int, head: int, heads: int
) -> Tensor:
    """Logits of one token whose context is a window of the stored caches; its own key and value become the last.

    Args:
        at, length: the window.
        head, heads: the key heads that are used, from which on and how many.
    """
    from transformers import DynamicCache

    window = slice(at, at + length)
    past = DynamicCache()
    past.layers = [filled(k[:, head : head + heads, window], v[:, :, window]) for k, v in stored]
    out: Tensor = model(input_ids=token, past_key_values=past, use_cache=True).logits
    return out


@functools.cache
def filled_class() -> Any:
    """A cache layer whose last slot takes the new key and value: nothing is copied, and the step can be repeated."""
    from transformers.cache_utils import DynamicLayer

    class Filled(DynamicLayer):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.keys[:, :, -1:] = key_states
            self.values[:, :, -1:] = value_states
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return int(self.keys.shape[-2]) - 1

    return Filled


def filled(keys: Tensor, values: Tensor) -> Any:
    """The cache layer of these tensors."""
    layer = filled_class()()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer


def check_models(models: dict[str, PreTrainedModel], stored: Sequence[Sequence[Tensor]], n: int) -> None:
    """The two dense decoders against each other, Atop-N by the kernel against Atop-N in plain torch.

    Raises:
        AssertionError: they disagree; nothing is to be timed then.
    """
    import torch

    longest = stored[0][0].shape[2]
    length = min(CHECKED, longest)
    token = torch.zeros(1, 1, dtype=torch.long, device=stored[0][0].device)
    heads = stored[0][0].shape[1]
    with torch.inference_mode():
        dense = step(models[SDPA], token, stored, 0, length, 0, heads)
        close("dense GQA", step(models[DENSE], token, stored, 0, length, 0, heads), dense, CLOSE)
        for name, model in models.items():
            if "Atop" not in name:
                continue
            own = model.config.num_key_heads
            fast = step(model, token, stored, 0, length, 0, own)
            before = model.config._attn_implementation
            model.config._attn_implementation = "saga_eager"
            plain = step(model, token, stored, 0, length, 0, own)
            model.config._attn_implementation = before
            close(name, fast, plain, CLOSE)
            if length > n and torch.equal(plain, dense):
                raise AssertionError(f"{name} gives dense attention's logits; nothing was timed.")
