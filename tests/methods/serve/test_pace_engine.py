"""PackedBranchEngine. Truth: every branch decoded alone by the plain model, without a cache, mask by mask."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from family_models import tiny_family

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.serve.pace import (
    BranchSpec,
    LatencyPredictor,
    PaceConfig,
    PackedBranchEngine,
    Plan,
    build_groups,
    make_policy,
    stages_from_tags,
)
from gnomon.methods.serve.pace.admit import extras
from gnomon.methods.serve.pace.policies import AdmissionPolicy, plan_of

torch.set_num_threads(1)

B = BranchSpec
REQUESTS = [
    (
        (3, 4, 5, 6, 7),
        (
            (B((), 2),),
            (B((8, 9), 3), B((10,), 4), B((11, 12, 13), 2)),
            (B((14,), 2),),
            (B((15,), 1), B((16,), 3)),
            (B((17, 18), 2),),
        ),
    ),
    ((20, 21, 22), ((B((), 6),),)),
    ((23, 24), ((B((25,), 3), B((26, 27), 3)),)),
    ((28, 29, 30, 31), ((B((32,), 2),), (B((33,), 2), B((34,), 2, (35, 36))), (B((37,), 4),))),
]


def alone(model, prompt, stages):
    """The same by full recomputation: one row at a time, tokens laid out explicitly with positions and a mask."""
    tokens = list(prompt)
    positions = list(range(len(prompt)))
    seen = torch.tril(torch.ones(len(tokens), len(tokens), dtype=torch.bool))
    outputs = []

    def grown(tokens, positions, seen, token, position):
        size = len(tokens)
        wider = torch.zeros(size + 1, size + 1, dtype=torch.bool)
        wider[:size, :size] = seen
        wider[size] = True
        return [*tokens, token], [*positions, position], wider

    def following(tokens, positions, seen):
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.tensor([positions]),
                attention_mask=mask,
                use_cache=False,
            ).logits
        return int(logits[0, -1].argmax())

    for stage in stages:
        begin, at = len(tokens), positions[-1] + 1 if positions else 0
        if outputs:
            at = max(positions) + 1
        branches, outs = [], []
        for branch in stage:
            state = (list(tokens), list(positions), seen)
            position, out = at, []
            for token in branch.header:
                state = grown(*state, token, position)
                position += 1
            for k in range(branch.length):
                token = following(*state) if branch.script is None else branch.script[k]
                out.append(token)
                state = grown(*state, token, position)
                position += 1
            branches.append(state)
            outs.append(out)
        outputs.append(outs)
        # Lay the branches one behind another; none sees its siblings.
        merged = (list(tokens), list(positions), seen)
        owner = [-1] * begin
        for k, (own, own_positions, _) in enumerate(branches):
            for token, position in zip(own[begin:], own_positions[begin:], strict=True):
                merged = grown(*merged, token, position)
                row = merged[2][-1]
                for j, who in enumerate(owner):
                    row[j] = who in (-1, k)
                owner.append(k)
        tokens, positions, seen = merged
    return outputs


def submitted(model, requests=REQUESTS, **options):
    engine = PackedBranchEngine(model, **options)
    for prompt, stages in requests:
        engine.submit(prompt, stages)
    return engine


def random_policy(seed):
    class Random(AdmissionPolicy):
        name = "random"
        rng = np.random.default_rng(seed)

        def select(self, groups, predictor, config, now):
            x = extras(groups)
            chosen = np.flatnonzero(self.rng.random(len(x.place)) < 0.4)
            return plan_of(groups, x, chosen, predictor, float("inf"), now)

    return Random()


@pytest.mark.parametrize(
    ("family", "attn"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen2", "sdpa"),
        ("qwen3", "sdpa"),
        ("neox", "sdpa"),
        ("neox-parallel", "eager"),
        ("gpt2", "sdpa"),
        ("gemma2", "sdpa"),
    ],
)
def test_outputs_depend_on_no_schedule(family, attn):
    wide = {"sliding_window": 64} if family == "gemma2" else {}  # the oracle has no windows
    model = tiny_family(family, seed=2, attn=attn, **wide)
    wanted = {k: alone(model, *request) for k, request in enumerate(REQUESTS)}
    said = {token for stages in wanted.values() for stage in stages for out in stage for token in out}
    assert len(said) > 5  # the model doesn't repeat one token
    truth = LatencyPredictor(1e-3, 1e-3, 0)
    several = ("off", "eager", "cap:2", "pace", random_policy(0))
    for policy in several if family in ("llama", "qwen3") else several[-2:]:
        engine = submitted(model)
        report = engine.run(policy, predictor=truth, config=PaceConfig(tpot_slo_s=0.006), concurrency=3)
        assert engine.outputs == wanted, (policy, report)
        assert engine.pool.used == 0 and engine.pool.freed == engine.pool.allocated > 0


def test_a_leak_between_siblings_is_noticed(monkeypatch):
    """The oracle isn't blind: whole-request paths, or positions that go on over siblings, change the text."""
    model = tiny_family("llama", seed=2)
    wanted = {k: alone(model, *request) for k, request in enumerate(REQUESTS)}
    engine = submitted(model)
    seen = engine.pool.seen
    monkeypatch.setattr(
        engine.pool, "seen", lambda path, at, window=None: seen(np.ones_like(path), at, window=window)
    )
    engine.run("eager")
    assert engine.outputs != wanted
    engine = submitted(model)
    fork = engine._branch
    ids = itertools.count()

    def shifted(request, spec, path, position, prefix, context):
        return fork(request, spec, path, position + next(ids), prefix, context)

    monkeypatch.setattr(engine, "_branch", shifted)
    engine.run("eager")
    assert engine.outputs != wanted


def test_sliding_windows_look_back_so_many_positions():
    model = tiny_family("mistral", sliding_window=4)
    prompt = list(range(3, 15))
    engine = submitted(model, [(prompt, ((B((), 4),),))])
    engine.run("off")
    ids = torch.tensor([prompt])
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert engine.outputs[0] == [[generated[0, len(prompt) :].tolist()]]
    engine = submitted(tiny_family("mistral", sliding_window=64), [(prompt, ((B((), 4),),))])
    engine.run("off")
    assert engine.outputs[0] != [[generated[0, len(prompt) :].tolist()]]


def test_a_serial_request_is_plain_generation():
    model = tiny_family("llama")
    prompt = [5, 9, 3, 22]
    engine = submitted(model, [(prompt, ((B((), 12),),))])
    engine.run("eager")
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert engine.outputs == {0: [[ids[0, 4:].tolist()]]}


def test_sampling_has_a_stream_for_each_branch():
    model = tiny_family("llama")
    outputs = []
    for policy in ("off", "eager", random_policy(3)):
        engine = submitted(model, temperature=1.0, seed=5)
        engine.run(policy)
        outputs.append(engine.outputs)
    assert outputs[0] == outputs[1] == outputs[2]
    other = submitted(model, temperature=1.0, seed=6)
    other.run("off")
    assert other.outputs != outputs[0]


def test_deferral_takes_and_gives_no_memory():
    model = tiny_family("llama")
    engine = submitted(model, audit=True, block_size=4)
    engine.run(random_policy(2))
    assert len(engine.deferrals) > 5
    assert all((d.allocated, d.freed, d.moved) == (0, 0, 0) for d in engine.deferrals)
    assert sum(d.rows for d in engine.deferrals) > 8


def test_the_audit_sees_memory_that_is_given_back():
    model = tiny_family("llama")
    engine = submitted(model, REQUESTS[2:3], audit=True, block_size=1)
    engine.let_in()
    rows = engine.ready()
    forward = engine._forward

    def evicting(*arguments, **options):
        found = forward(*arguments, **options)
        engine.pool.drop([engine._rows[rows[1].index].id])
        return found

    engine._forward = evicting
    plan = Plan((rows[0].index,), (rows[1].index,), 0, 0, 0, 0, 0)
    engine.step(plan)
    [seen] = engine.deferrals
    assert seen.freed > 0 and seen.moved > 0


def test_a_fork_copies_nothing():
    model = tiny_family("llama")
    engine = submitted(model, [((3, 4, 5, 6), (tuple(B((7 + k,), 2) for k in range(9)),))])
    engine.let_in()
    assert engine.pool.used == 4  # one header token each is pending, so nothing but the prompt is stored
    assert len(engine.ready()) == 9
    assert {row.context_len for row in engine.ready()} == {5} and {
        row.prefix_len for row in engine.ready()
    } == {4}


def test_liveness_without_any_slack():
    """SLO 0.1 ms, four rows of one request, twelve steps: each advances three times."""
    engine = submitted(tiny_family("llama"), [((3, 4), (tuple(B((7 + k,), 9) for k in range(4)),))])
    engine.let_in()
    config, predictor = PaceConfig(tpot_slo_s=1e-4), LatencyPredictor(1, 1, 0)
    for _ in range(12):
        plan = make_policy("pace").select(build_groups(engine.ready()), predictor, config, engine.clock())
        assert len(plan.admitted) == 1
        engine.step(plan)
    assert [row.progress for row in engine.ready()] == [3, 3, 3, 3]


def test_report_of_a_run_counts_what_was_decoded():
    engine = submitted(tiny_family("llama"))
    predictor = LatencyPredictor(min_samples=5, window=50)
    report = engine.run("pace", predictor=predictor, config=PaceConfig(tpot_slo_s=10.0), concurrency=2)
    decoded = sum(b.length for _, stages in REQUESTS for stage in stages for b in stage)
    assert report.log.tokens.sum() == decoded == report.log.rows.sum()
    assert report.requests == {"all": 4, "serial": 1, "parallel": 3}
    assert predictor.calibrated and report.attainment["progress"]["all"] == 1
    assert report.goodput["effective"] == pytest.approx(decoded / report.seconds)
    longest = {0: 2 + 4 + 2 + 3 + 2, 1: 6, 2: 3, 3: 2 + 2 + 4}
    assert sorted(report.log.steps.tolist()) == sorted(longest.values())  # with time to spare all rows run


def test_stop_tokens_end_a_branch_early():
    model = tiny_family("llama")
    plain = submitted(model, REQUESTS[1:2])
    plain.run("off")
    out = plain.outputs[0][0][0]
    engine = submitted(model, REQUESTS[1:2], stop_ids=[out[4]])
    engine.run("off")
    assert engine.outputs[0][0][0] == out[: out.index(out[4]) + 1]


def test_bfloat16_runs():
    engine = submitted(tiny_family("llama", dtype=torch.bfloat16, attn="eager"))
    engine.run("eager")
    assert sorted(engine.outputs) == [0, 1, 2, 3]


def test_stages_from_tags():
    text = (
        "ab<Parallel><Goal>g</Goal><Path>1</Path>\n<Path>22</Path><Conclusion>c</Conclusion></Parallel> end"
    )
    stages = stages_from_tags(text, lambda piece: list(piece.encode()))
    assert [len(stage) for stage in stages] == [1, 2, 1]
    texts = [bytes([*b.header, *b.script]).decode() for stage in stages for b in stage]
    assert texts == [
        "ab<Parallel><Goal>g</Goal>",
        "<Path>1</Path>",
        "<Path>22</Path>",
        "<Conclusion>c</Conclusion></Parallel> end",
    ]
    for wrong, message in (
        ("<Parallel>x</Parallel>", "no <Path>"),
        ("a<Path>x</Path>", "outside"),
        ("<Parallel><Path>1</Path>", "missing"),
    ):
        with pytest.raises(UsageError, match=message):
            stages_from_tags(wrong, lambda piece: list(piece.encode()))


@pytest.mark.parametrize(
    ("prompt", "stages", "message"),
    [
        ((), ((B((), 1),),), "needs a prompt"),
        ((1,), (), "stages of at least one"),
        ((1,), ((B((), 0),),), "length 0"),
        ((1,), ((B((), 2, (1,)),),), "script of 1"),
        ((1,), ((B((), 2), B((3,), 1)),), "without a header"),
        ((1,), ((B((), 2),), (B((), 1),)), "without a header"),
    ],
)
def test_requests_that_make_no_sense_are_refused(prompt, stages, message):
    with pytest.raises(UsageError, match=message):
        PackedBranchEngine(tiny_family("llama")).submit(prompt, stages)


def test_bad_use_is_refused():
    model = tiny_family("llama")
    with pytest.raises(UsageError, match="Call submit first"):
        PackedBranchEngine(model).run("off")
    engine = submitted(model)
    engine.let_in()
    with pytest.raises(UsageError, match="Row 999 isn't ready"):
        engine.step(Plan((999,), (), 0, 0, 0, 0, 0))
    with pytest.raises(UsageError, match="temperature=-1"):
        PackedBranchEngine(model, temperature=-1)
    with pytest.raises(UsageError, match="no language model"):
        PackedBranchEngine(torch.nn.Linear(2, 2))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UsageError, match="flex_attention"):
        PackedBranchEngine(model)
    broken = tiny_family("llama")
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(NumericalFailure, match="aren't numbers"):
        submitted(broken).run("off")
