"""Cosine statistics and nulls: the worked example of the card, plain loops in float64, hand values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.interpret.tlcm import (
    RunningSimilarity,
    Trace,
    adjacent,
    counts,
    null_cross_token,
    null_gaussian,
    position_curve,
    sigma_threshold,
    similarity,
    token_class,
    token_table,
)


def hand_trace(attn: Tensor, mlp: Tensor) -> Trace:
    start = torch.zeros_like(attn[:1])
    return Trace.of(torch.cat([start, (attn + mlp).cumsum(0)]), attn, mlp)


def random_trace(seed: int, n: int = 4, batch: int = 2, length: int = 6, d: int = 5) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, n, batch, length, d, generator=generator, dtype=torch.float64)
    return hand_trace(*parts)


def example_a() -> Trace:
    x = torch.tensor(
        [[0, 0, 0, 0], [1, 2, 0, 0], [0.5, 1.5, 1, 0], [0.75, 1.75, 0.5, 1]], dtype=torch.float64
    )
    x = x[:, None, None]
    return Trace.of(x, torch.zeros_like(x[1:]), x.diff(dim=0))


def cos(u: Tensor, v: Tensor) -> float:
    return sum(a * b for a, b in zip(u.tolist(), v.tolist(), strict=True)) / math.hypot(*u) / math.hypot(*v)


def test_example_a() -> None:
    matrix = similarity(example_a())
    expected = {(0, 1): -0.547723, (1, 2): -0.522233, (0, 2): 0.286039}
    for (i, j), value in expected.items():
        assert matrix.mean[i, j] == pytest.approx(value, abs=1e-6)
    assert matrix.adjacent.tolist() == pytest.approx([-0.547723, -0.522233], abs=1e-6)
    assert counts(example_a()).tolist() == [2]
    assert counts(example_a(), threshold=-0.53).tolist() == [1]


@pytest.mark.parametrize("kind", ["layer", "attn", "mlp", "attn-mlp"])
def test_streaming_mean_is_the_mean_over_all_tokens(kind: str) -> None:
    traces = [random_trace(0), random_trace(1, batch=1, length=600), random_trace(2)]
    matrix = similarity((trace for trace in traces), kind)
    rows, columns = {"layer": ("contribution",) * 2, "attn-mlp": ("attn", "mlp")}.get(kind, (kind, kind))
    for i, j in itertools.product(range(4), repeat=2):
        values = torch.tensor(
            [
                cos(u, v)
                for trace in traces
                for u, v in zip(
                    getattr(trace, rows)[i].flatten(0, 1),
                    getattr(trace, columns)[j].flatten(0, 1),
                    strict=True,
                )
            ],
            dtype=torch.float64,
        )
        assert matrix.mean[i, j] == pytest.approx(float(values.mean()), abs=1e-12)
        assert matrix.std[i, j] == pytest.approx(float(values.std(correction=0)), abs=1e-7)
        assert matrix.count[i, j] == 624
    if kind == "attn-mlp":
        assert not torch.allclose(matrix.mean, matrix.mean.T, atol=1e-3)
    else:  # invariant 2
        assert torch.allclose(matrix.mean, matrix.mean.T, atol=1e-14)
        assert torch.allclose(matrix.mean.diagonal(), torch.ones(4, dtype=torch.float64))
    assert matrix.mean.abs().max() <= 1


def test_average_of_cosines_is_not_the_cosine_of_averages() -> None:
    """One token with a huge norm must not decide: cosines +1 and -1 average to 0 whatever the lengths."""
    a = torch.tensor([[[[100.0, 0], [1, 0]]], [[[100.0, 0], [-1, 0]]]])
    assert similarity(hand_trace(a, torch.zeros_like(a))).mean[0, 1] == 0


def test_only_counted_tokens_enter() -> None:
    trace = random_trace(3)
    counted = trace.counted.clone()
    counted[0, 0] = counted[1, 4:] = False
    fewer = Trace(x=trace.x, attn=trace.attn, mlp=trace.mlp, position=trace.position, counted=counted)
    assert adjacent(fewer).shape == (3, 9)
    assert torch.equal(adjacent(fewer), adjacent(trace)[:, counted.flatten()])
    assert similarity(fewer).count[0, 0] == 9


def test_silent_layer_has_no_direction() -> None:
    trace = random_trace(4)
    attn, mlp = trace.attn.clone(), trace.mlp.clone()
    attn[1, 0, 2] = mlp[1, 0, 2] = 0
    silent = hand_trace(attn, mlp)
    assert similarity(silent).count.tolist()[1] == [11, 11, 11, 11]
    assert similarity(silent).count[0, 2] == 12
    assert adjacent(silent)[:, 2].isnan().tolist() == [True, True, False]
    assert null_cross_token(silent).count.tolist() == [12 * 11 - 11, 12 * 11 - 11, 12 * 11]
    attn[:] = mlp[:] = 0
    assert similarity(hand_trace(attn, mlp)).mean.isnan().all()


def test_thresholds() -> None:
    assert sigma_threshold(576) == pytest.approx(-1 / 6)
    assert sigma_threshold(4096) == -0.1
    for bad in (0.0, 0.1, -1.5, math.nan):
        with pytest.raises(UsageError, match=r"must lie in \[-1, 0\)"):
            counts(example_a(), bad)


def test_gaussian_null_of_the_card() -> None:
    wide, narrow = null_gaussian(4096), null_gaussian(576)
    assert wide.sigmas == pytest.approx(6.4)
    assert wide.normal_tail == pytest.approx(7.8e-11, rel=0.01)
    assert narrow.sigmas == pytest.approx(2.4)
    assert narrow.normal_tail == pytest.approx(0.0082, abs=5e-5)
    assert narrow.std == pytest.approx(1 / 24)


@pytest.mark.parametrize(
    ("d", "tail"), [(2, math.acos(0.1) / math.pi), (3, 0.45)]
)  # a circle's arc; on a sphere each coordinate is uniform (Archimedes)
def test_gaussian_null_in_few_dimensions(d: int, tail: float) -> None:
    assert null_gaussian(d).tail == pytest.approx(tail, abs=1e-12)


def test_cross_token_null_by_plain_loops() -> None:
    traces = [random_trace(5), random_trace(6, length=3)]
    null = null_cross_token(iter(traces), layers=[0, 2])
    for place, i in enumerate([0, 2]):
        values = []
        for trace in traces:
            a, b = trace.contribution[i].flatten(0, 1), trace.contribution[i + 1].flatten(0, 1)
            values += [cos(a[s], b[t]) for s in range(len(a)) for t in range(len(a)) if s != t]
        expected = torch.tensor(values, dtype=torch.float64)
        assert null.count[place] == len(values) == 12 * 11 + 6 * 5
        assert null.mean[place] == pytest.approx(float(expected.mean()), abs=1e-12)
        assert null.std[place] == pytest.approx(float(expected.std(correction=0)), abs=1e-12)
        assert null.below[place] == pytest.approx(float((expected < -0.1).double().mean()))


def test_correction_at_the_same_token_is_not_in_the_null() -> None:
    """Every layer reverses the one before; different tokens are orthogonal, so the null is exactly 0."""
    attn = torch.eye(8)[None, None] * torch.tensor([1.0, -1, 1])[:, None, None, None]
    trace = hand_trace(attn, torch.zeros_like(attn))
    assert torch.equal(adjacent(trace), -torch.ones(2, 8))
    for null in (null_cross_token(trace), null_cross_token(trace, pairs=50, generator=torch.Generator())):
        assert torch.equal(null.mean, torch.zeros(2, dtype=torch.float64))


def test_sampled_null_agrees_with_all_pairs() -> None:
    trace = random_trace(7, batch=1, length=700)  # more than one block
    every = null_cross_token(trace)
    drawn = null_cross_token(trace, pairs=20_000, generator=torch.Generator().manual_seed(1))
    assert every.count.tolist() == [700 * 699] * 3
    # 4.5 standard errors: a right method fails one seed in 50,000
    assert ((drawn.mean - every.mean).abs() < 4.5 * every.std / math.sqrt(20_000)).all()
    assert ((drawn.below - every.below).abs() < 4.5 * 0.5 / math.sqrt(20_000)).all()


def test_position_curve() -> None:
    """Tokens 0..2 of two sequences: activations rise by exactly one per position."""
    steps = torch.tensor([[1.0, 0], [-1, 0]])
    attn = torch.stack([steps[[0, 0, 0]], steps[[0, 1, 1]], steps[[0, 1, 0]]])[:, None].repeat(1, 2, 1, 1)
    curve = position_curve(hand_trace(attn, torch.zeros_like(attn)), width=1)
    assert curve.start.tolist() == [0, 1, 2]
    assert curve.mean.tolist() == [0, 1, 2]
    assert curve.count.tolist() == [2, 2, 2]
    assert curve.per_thousand == pytest.approx(1000)
    wide = position_curve(hand_trace(attn, torch.zeros_like(attn)), width=2)
    assert (wide.start.tolist(), wide.mean.tolist()) == ([0, 2], [0.5, 2])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n", "newline"), ("]\n", "newline"), ("\r\n", "newline"),
        ("202", "digits"), (" 26", "digits"), ("٣", "digits"),
        (",", "punctuation"), (" (", "punctuation"), ("+=", "punctuation"),
        ("。", "punctuation"), ("-", "punctuation"),
        (" the", "word"), ("don't", "word"), ("é", "word"), ("न्य", "word"), ("well-known", "word"),
        ("3rd", "other"), ("   ", "other"), ("", "other"), ("<|im_end|>", "other"),
        ("'s", "other"), ("a_b", "other"),
    ],
)  # fmt: skip
def test_token_class(text: str, kind: str) -> None:
    assert token_class(text) == kind


def test_token_table() -> None:
    ids = torch.tensor([4] * 3 + [7] * 2 + [9])
    table = token_table(
        ids, torch.tensor([1, 2, 3, 9, 9, 50]), {4: " a", 7: ",", 9: "1"}.__getitem__, minimum=2
    )
    assert table["token"].tolist() == [",", " a"]
    assert table["kind"].tolist() == ["punctuation", "word"]
    assert table["count"].tolist() == [2, 3]
    assert table["mean"].tolist() == [9, 2]
    assert table["std"].tolist() == [0, 1]
    assert table["stderr"].tolist() == pytest.approx([0, 1 / math.sqrt(3)])


def test_errors() -> None:
    trace = random_trace(8)
    with pytest.raises(UsageError, match=r"Unknown kind of similarity 'atn'.*'attn'"):
        similarity(trace, "atn")
    with pytest.raises(UsageError, match="No trace"):
        similarity([])
    with pytest.raises(UsageError, match="3 layers can't be added to one of 4"):
        similarity([trace, random_trace(0, n=3)])
    with pytest.raises(UsageError, match=r"pairs=5 draws at random. Pass a torch.Generator"):
        null_cross_token(trace, pairs=5)
    with pytest.raises(UsageError, match=r"layers=\[3\] must name layers between 0 and 2"):
        null_cross_token(trace, layers=[3])
    with pytest.raises(UsageError, match="needs 2"):
        null_cross_token(random_trace(0, batch=1, length=1))
    with pytest.raises(UsageError, match="at least 2 dimensions"):
        null_gaussian(1)
    with pytest.raises(UsageError, match="2 token ids but 3"):
        token_table(torch.tensor([1, 2]), torch.tensor([1, 2, 3]), str)
    trace.attn[0, 0, 0, 0] = math.inf
    for measure in (similarity, adjacent, RunningSimilarity().update):
        with pytest.raises(NumericalFailure, match="not finite"):
            measure(trace)
