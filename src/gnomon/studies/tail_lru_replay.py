"""Stages of the Tail-LRU study on traces from files, and on a real model: what one would gain.

A trace is cut in two: capacity and threshold are chosen on one part and judged on the other. Conversations are dealt to
the parts in turn; requests with shared prefixes are cut by time, since their trees can't be taken apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnomon.lab import Done, StageContext
from gnomon.studies.tail_lru_policies import LRU, METHOD, make
from gnomon.studies.tail_lru_stages import LOWER, blocks, lowered, tails

if TYPE_CHECKING:
    from gnomon.methods.serve.tail_lru import PrefixTrace, Trace
    from gnomon.methods.serve.tail_lru.simulate import Measured

REPLAYED = "replay: "
"""Before the metrics of a trace from a file."""
OVER = {"P90": "turns above LRU's P90", "P95": "turns above LRU's P95", "violations": "turns above the SLO"}
"""Shares by conversation on the part that judges."""
CHOSEN = METHOD + ", chosen"
MEASURED, VIOLATED = "measured P95", "measured share above the target"
MARGIN = 0.75
"""ξ as a share of the target that is reported: trimmed turns land on ξ."""
OF_TREES = ("lru", "threshold-lru", "t-lru", "belady")
OF_TURNS = ("lru", "threshold-lru", "t-lru", "adaptive", "belady")


def trace_of(path: str, format: str, part: str, limit: int | None = None) -> Trace | PrefixTrace:
    """`choose`, `judge` or `all` of a trace from a file."""
    import numpy as np

    from gnomon.methods.serve.tail_lru import Trace, read_trace

    whole = read_trace(path, format, generator=np.random.default_rng(0), limit=limit, ties="keep", link=True)
    if part == "all":
        return whole
    if isinstance(whole, Trace):
        return whole.halves()[part == "judge"]
    return whole.half(part == "judge")


def served(
    trace: Trace | PrefixTrace, policy: str, share: float, xi_ms: float, alpha_ms: float, qhat: int
) -> tuple[Measured, int]:
    """(what turns cost, capacity in tokens) with room for a share of all that the trace ever holds."""
    from gnomon.methods.serve.tail_lru import LatencyModel, Trace, simulate, simulate_prefixes

    latency, xi = LatencyModel(alpha_ms / 1e3), blocks(xi_ms, alpha_ms)
    if isinstance(trace, Trace):
        capacity = max(1, round(share * int(trace.prompt.sum() + trace.response.sum())))
        return simulate(
            trace, make(policy, trace, capacity, xi, qhat, 0), capacity, latency=latency
        ), capacity
    size = trace.block_size
    capacity = max(1, round(share * len({block for ids in trace.blocks for block in ids})))
    found = simulate_prefixes(trace, policy, capacity, xi=xi // size, qhat=-(-qhat // size), latency=latency)
    return found, capacity * size


def replay(
    ctx: StageContext,
    *,
    trace: str,
    format: str,
    part: str,
    policy: str,
    share: float,
    xi_ms: float,
    slo_ms: float,
    alpha_ms: float,
    qhat: int,
    limit: int | None,
) -> dict[str, float]:
    """One policy, capacity and threshold on a part of the trace."""
    found, capacity = served(trace_of(trace, format, part, limit), policy, share, xi_ms, alpha_ms, qhat)
    shown = tails(found, slo_ms)
    tags = {
        "share": share,
        "capacity": capacity,
        "threshold": xi_ms if policy in (METHOD, "adaptive") else 0.0,
        "part": part,
    }
    for metric, value in shown.items():
        unit = "%" if metric == "violations" else "ms"
        ctx.record(method=policy, metric=REPLAYED + metric, value=value, unit=unit, better="lower", tags=tags)
    return {**shown, "capacity": float(capacity), "xi_ms": xi_ms, "share": share}


def choose(ctx: StageContext, *, of: list[Done], to: list[Done], what: str) -> dict[str, float]:
    """The setting with the largest gain against LRU of the same capacity, on the part that chooses."""
    plain = {done.value["share"]: done.value for done in to}
    gains = [
        {
            **lowered(done.value, plain[done.value["share"]]),
            **{k: done.value[k] for k in ("share", "xi_ms", "capacity")},
        }
        for done in of
    ]
    return max(gains, key=lambda row: row[what])


def verdict(
    ctx: StageContext,
    *,
    of: Done,
    what: str,
    trace: str,
    format: str,
    slo_ms: float,
    alpha_ms: float,
    qhat: int,
    limit: int | None,
) -> dict[str, Any]:
    """The chosen setting on the other part: its gain, and shares of slow turns by conversation to resample."""
    import numpy as np

    from gnomon.methods.serve.tail_lru import Trace

    setting = of.value
    judge = trace_of(trace, format, "judge", limit)
    mine, _ = served(judge, METHOD, setting["share"], setting["xi_ms"], alpha_ms, qhat)
    plain, capacity = served(judge, LRU, setting["share"], 0.0, alpha_ms, qhat)
    shown = lowered(tails(mine, slo_ms), tails(plain, slo_ms))
    tags = {"share": setting["share"], "threshold": setting["xi_ms"]}
    ctx.record(
        method=CHOSEN, metric=REPLAYED + LOWER[what], value=shown[what], unit="%", better="higher", tags=tags
    )
    bound = slo_ms / 1e3 if what == "violations" else plain.percentile(float(what[1:]))
    families = judge.conversation if isinstance(judge, Trace) else np.array(judge.families())
    budget = {"calls": len(judge)}
    for name, found in ((CHOSEN, mine), (LRU, plain)):
        slow = found.ttft > bound
        for family in np.unique(families):
            rows = families == family
            ctx.record(
                method=name, metric=OVER[what], value=float(slow[rows].mean()), item=str(family),
                weight=int(rows.sum()), better="lower", budget=budget,
            )  # fmt: skip
    told = {
        name: round(value, 2) for name, value in shown.items()
    }  # last: the setting has the other part's gains
    return {**setting, **told, "judged_capacity": capacity}


def measured(
    ctx: StageContext,
    *,
    model: str,
    policies: list[str],
    conversations: int,
    mean_prompt: float,
    tokens: int,
    room: float,
    quantile: float,
    threads: int,
    seed: int,
) -> dict[str, Any]:
    """Time to the first token of a real model, from a store with room for a share of all tokens. Exclusive.

    Conversations have the card's numbers of turns and its spread of prompt lengths. The latency model is fitted on
    prefills beforehand; ξ is the `quantile` of LRU's uncached lengths in a simulation of the same turns, so that
    nothing is tuned on what is measured. Which policy goes first alternates between seeds.
    """
    import math
    import time

    import numpy as np
    import torch

    from gnomon.core.errors import UsageError
    from gnomon.core.models import load
    from gnomon.core.timing import threads_set
    from gnomon.methods.serve.tail_lru import ConversationKVStore, LatencyModel, Trace, simulate, synthetic

    loaded = load(model, dtype="float32")
    rng = np.random.default_rng(seed)
    drawn = synthetic(
        12 * conversations, generator=rng, prompt_mean=mean_prompt, prompt_sigma=0.7, response_mu=np.log(tokens),
        response_sigma=0.0,
    )  # fmt: skip
    trace = drawn.select(drawn.conversation < conversations)
    trace = Trace(trace.time, trace.conversation, trace.prompt, np.full(len(trace), tokens), trace.names)
    positions = loaded.model.config.max_position_embeddings
    trace = trace.select(
        trace.history + trace.prompt + tokens <= positions
    )  # a conversation ends where the model does
    total = int(trace.prompt.sum() + trace.response.sum())
    capacity = max(1, round(room * total))
    vocabulary = min(loaded.model.config.vocab_size, 40_000)
    prompts = [rng.integers(10, vocabulary, int(q)).tolist() for q in trace.prompt]
    plain = simulate(trace, make(LRU, trace, capacity, 0, 0, seed), capacity).uncached
    xi, qhat = int(np.quantile(plain, quantile)), int(trace.prompt.mean())
    with threads_set(threads), torch.no_grad():
        fastest: dict[int, float] = {}  # of several rounds: other processes only ever slow a prefill down
        for length in (8, 32, 128, int(max(plain))) * 3:
            ids = torch.randint(10, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
            begin = time.perf_counter()
            loaded.model(input_ids=ids.to(loaded.device), logits_to_keep=1)
            fastest[length] = min(fastest.get(length, math.inf), time.perf_counter() - begin)
        try:
            latency = LatencyModel.fit(list(fastest), list(fastest.values()))
        except UsageError:  # a model so small that its times don't grow with the length: a line through 0
            latency = LatencyModel(fastest[max(fastest)] / max(fastest))
        target = latency.seconds(xi) / MARGIN
        times: dict[str, list[float]] = {}
        for name in policies if seed % 2 else policies[::-1]:
            store = ConversationKVStore(loaded.model, capacity, make(name, trace, capacity, xi, qhat, seed))
            answers = [
                store.serve(turn.conversation, prompt, tokens, now=turn.time)
                for turn, prompt in zip(trace, prompts, strict=True)
            ]
            times[name] = [answer.ttft_s for answer in answers]
            computed = [answer.uncached for answer in answers]
            tags = {"xi": xi, "capacity": capacity}
            budget = {"tokens": total, "calls": len(trace)}
            for metric, value, unit in (
                ("measured P50", 1e3 * np.percentile(times[name], 50), "ms"),
                ("measured P90", 1e3 * np.percentile(times[name], 90), "ms"),
                (MEASURED, 1e3 * np.percentile(times[name], 95), "ms"),
                ("measured P99", 1e3 * np.percentile(times[name], 99), "ms"),
                (VIOLATED, 100 * np.mean(np.array(times[name]) > target), "%"),
                ("computed tokens, P95", np.percentile(computed, 95), "tokens"),
                (
                    "computed tokens above the threshold",
                    np.maximum(np.array(computed) - xi, 0).sum(),
                    "tokens",
                ),
            ):
                ctx.record(
                    method=name,
                    metric=metric,
                    value=float(value),
                    unit=unit,
                    better="lower",
                    tags=tags,
                    budget=budget,
                )
    return {"alpha_ms": 1e3 * latency.alpha_s_per_block, "beta_ms": 1e3 * latency.beta_s, "turns": len(trace), "xi": xi,
            "capacity": capacity, "seconds": times}  # fmt: skip
