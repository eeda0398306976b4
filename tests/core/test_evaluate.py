"""The comparison of two models against perplexity of its own, brute force in float64 and hand values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from gnomon.core import evaluate
from gnomon.core.data import Corpus, Document
from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.evaluate import EvalReport, kl_and_agreement, weight_bytes
from gnomon.core.models import Loaded
from gnomon.core.scoring import perplexity, text_stream, windows

TEXT = "abc de: fgh. " * 5


@pytest.fixture(autouse=True)
def short_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "DECODE_TOKENS", 2)


@pytest.fixture
def loaded(tiny_lm: Any, letter_tokenizer: Any) -> Any:
    def make(name: str, seed: int = 0, tokenizer: Any = None, **changes: Any) -> Loaded:
        model = tiny_lm(seed=seed, **changes)
        return Loaded(
            model, tokenizer or letter_tokenizer(), name, torch.float32, torch.device("cpu"), "sdpa"
        )

    return make


def text(*documents: str) -> Corpus:
    return Corpus("given", tuple(Document(f"d{i}", content) for i, content in enumerate(documents)))


def test_report_equals_brute_force(loaded: Any) -> None:
    m, n = loaded("M", 0), loaded("N", 1)
    report = evaluate.eval(m, against=n, text=text(TEXT), window=16)
    stream = text_stream(TEXT, m.tokenizer)
    kl, agreed = [], []
    with torch.no_grad():
        for start, first, stop in windows(len(stream), window=16, stride=8):
            for t in range(first, stop):
                p, q = (
                    one.model.double()(input_ids=stream[None, start:t]).logits[0, -1].softmax(-1)
                    for one in (n, m)
                )
                kl.append(sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True)))
                agreed.append(bool(p.argmax() == q.argmax()))
    assert report.kl == pytest.approx(sum(kl) / len(kl), rel=1e-5)
    assert report.agreement == pytest.approx(sum(agreed) / len(agreed))
    assert report.tokens == len(stream) - 1 == len(kl)
    for one, got in ((m, report.model), (n, report.against)):
        own = perplexity(one.model.float(), TEXT, tokenizer=one.tokenizer, window=16, stride=8)
        assert got.nll_per_token == pytest.approx(own.nll_per_token, rel=1e-6)
        assert got.perplexity == pytest.approx(own.perplexity, rel=1e-5)
        assert got.bits_per_byte == pytest.approx(own.bits_per_byte, rel=1e-6)
    swapped = evaluate.eval(n, against=m, text=text(TEXT), window=16)
    assert swapped.kl != pytest.approx(report.kl, rel=1e-3)  # KL has a direction


def test_a_model_agrees_with_itself(loaded: Any) -> None:
    report = evaluate.eval(loaded("M"), against=loaded("M"), text=text(TEXT), window=16)
    assert (report.kl, report.agreement) == (0.0, 1.0)


def test_kl_and_agreement_by_hand() -> None:
    """N = (1/2, 1/2, 0), M = (1/4, 1/2, 1/4): KL(N || M) = ln(2) / 2; a ruled-out token costs infinity."""
    n, m = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    kl, same = kl_and_agreement(m, n)
    assert kl.item() == pytest.approx(math.log(2) / 2)
    assert same.item() == 0  # N's first likeliest token is 0, M's is 1
    assert kl_and_agreement(n, m)[0].item() == math.inf


def test_weight_bytes_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight  # tied
    model.register_buffer("scratch", torch.zeros(100), persistent=False)
    assert (
        weight_bytes(model) == 4 * (15 + 2 + 2 + 2 + 2) + 8
    )  # weight, bias, mean, variance; an int64 counter


def test_report_alone_and_its_forms(loaded: Any) -> None:
    m = loaded("M")
    alone = evaluate.eval(m, text=text("ab", "cd"), window=8)
    assert (alone.against, alone.kl, alone.agreement) == (None, None, None)
    assert alone.tokens == 4  # joined by an empty line, which this tokenizer has no token for
    assert alone.model.tokens_per_second > 0
    assert alone.model.weight_bytes == 4 * alone.model.parameters
    assert [len(row) for row in alone.rows()] == [2] * 6
    both = evaluate.eval(m, against=loaded("N", 1), text=text("ab"), window=8)
    assert [len(row) for row in both.rows()] == [3] * 8
    assert both.rows()[0] == ("", "M", "N")
    data = json.loads(both.to_json())
    assert data["against"]["name"] == "N"
    assert data["text_sha256"] == both.text_sha256
    assert isinstance(both, EvalReport)


def test_text_is_cut_between_characters(loaded: Any) -> None:
    from gnomon.core.tiny import byte_tokenizer

    m = loaded("M", tokenizer=byte_tokenizer(), vocabulary=259)
    report = evaluate.eval(m, text=text("aé" * 9), window=8, max_tokens=5)  # a é(2) a | half of é
    assert report.tokens == 4
    same = evaluate.eval(m, text=text("aéa"), window=8)
    assert report.text_sha256 == same.text_sha256
    assert report.model.nll_per_token == same.model.nll_per_token


def test_names_and_the_default_text() -> None:
    report = evaluate.eval("tiny:llama-10k", against="tiny:llama-10k", window=64, max_tokens=100)
    assert report.text == "mixed"
    assert 90 <= report.tokens <= 100
    assert report.model.name == "tiny:llama-10k"


def test_pairs_that_cannot_be_compared_are_refused(loaded: Any, letter_tokenizer: Any) -> None:
    m = loaded("M")
    with pytest.raises(
        UsageError, match=r"M predicts 40 tokens and N 41: different vocabularies.*bits per byte"
    ):
        evaluate.eval(m, against=loaded("N", vocabulary=41), text=text("ab"), window=8)
    other = loaded("N", tokenizer=letter_tokenizer((("a", "b"),)))
    with pytest.raises(UsageError, match="M and N have different tokenizers"):
        evaluate.eval(m, against=other, text=text("ab"), window=8)
    with pytest.raises(UsageError, match="window=129 exceeds the 128 positions of M"):
        evaluate.eval(m, text=text("ab"), window=129)
    with pytest.raises(UsageError, match="window=1 must be at least 2"):
        evaluate.eval(m, text=text("ab"), window=1)
    with torch.no_grad():
        m.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(NumericalFailure, match="loss over 2 tokens is nan"):
        evaluate.eval(m, text=text("ab"), window=8)
