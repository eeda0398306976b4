"""The Set-LLM study. Truth: constructed scores, counted words, and files written here."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch

import gnomon
from gnomon.core.errors import UsageError
from gnomon.core.models import load
from gnomon.core.seeding import seeded
from gnomon.lab import Lab, StageContext
from gnomon.lab.records import frame, make_record
from gnomon.methods.layers.set_llm import SetCollator
from gnomon.methods.layers.set_llm.items import PARTS, WORDS, _words, questions, read
from gnomon.studies.set_llm import MODES, SetLLMStudy
from gnomon.studies.set_llm_stages import QuestionBatches, adapted, sensitivity, trained_part

TINY = "tiny:llama-10k"


def test_smoke_run_has_every_claim_figure_and_rung(tmp_path):
    result = gnomon.run("set-llm", profile="smoke", runs=tmp_path)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == {"spreads", "accuracies", "learning"}
    assert set(result.verdicts) == {"set-llm.1", "set-llm.2", "set-llm.3"}
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    trained = set(table[table["budget.steps"].notna()]["method"])
    assert trained == {*MODES, "causal+pe, sorted"}
    judged = table[(table["metric"] == "accuracy over orders") & table["budget.steps"].notna()]
    assert judged["budget.tokens"].nunique() == 1  # equal budgets, whatever the mask
    spread = table[(table["metric"] == "spread of log-probabilities") & (table["dtype"] == "float64")]
    largest = spread.groupby("method")["value"].max()
    assert set(largest[largest < 1e-10].index) == {"prefix+nope", "prefix+setpe", "setmask+setpe"}


def test_words_of_a_part_are_seen_in_no_other():
    seen = {part: {word for kind in WORDS for word in _words(kind)[part]} for part in PARTS}
    assert not (seen["train"] & seen["test"] or seen["train"] & seen["valid"] or seen["valid"] & seen["test"])
    assert all(len(set(WORDS[kind].split())) == 20 for kind in WORDS)
    every = [word for kind in WORDS for word in WORDS[kind].split()]
    assert len(every) == len(set(every))  # or an option could be right twice
    for part in PARTS:
        for question in questions("words", part, 50):
            words = [option.strip() for option in question.options]
            assert set(words) <= seen[part]
            kind = next(k for k in WORDS if f" {k}" in question.before)
            assert [word in WORDS[kind].split() for word in words].index(True) == question.answer


def test_right_options_stand_anywhere():
    answers = [question.answer for question in questions("words", "test", 200)]
    assert all(30 < answers.count(i) < 70 for i in range(4))
    assert questions("words", "test", 3) == questions("words", "test", 9)[:3]


def test_questions_from_files(tmp_path):
    file = tmp_path / "q.jsonl"
    rows = [{"question": f"Q{i}?", "choices": ["a", "b", "c"], "answer": i % 3} for i in range(10)]
    rows[1]["answer"] = "b"
    rows[2] = {
        "question": "Q2?",
        "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = read(str(file))
    assert [q.answer for q in found] == [i % 3 for i in range(10)] and found[0].options == (" a", " b", " c")
    sizes = [len(questions(str(file), part, 100)) for part in PARTS]
    assert sizes == [6, 2, 2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no", "is no JSON"),
        ("[]", "needs a `question`"),
        ('{"question": "a", "choices": "b"}', "needs a `question`"),
        ('{"question": "a", "choices": ["b", "c"]}', "needs an `answer`"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "needs an `answer`"),
        ('{"question": "a", "choices": ["b", "c"], "answer": true}', "needs an `answer`"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "two options"),
    ],
)
def test_files_that_are_refused(tmp_path, line, words):
    file = tmp_path / "q.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match=words):
        read(str(file))
    with pytest.raises(UsageError, match=r"no \.jsonl file"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="questions"):
        read("wordz")


def test_batches_go_on_where_they_stopped():
    loaded = load(TINY)

    def source():
        return QuestionBatches(
            questions("words", "train", 7), SetCollator(loaded.tokenizer), batch=3,
            generator=torch.Generator().manual_seed(5),
        )  # fmt: skip

    one, two = source(), source()
    for _ in range(4):
        next(one)
    two.load_state_dict(one.state_dict())
    for _ in range(3):
        a, b = next(one), next(two)
        assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(UsageError, match="batch=8"):
        QuestionBatches(one.asked, one.collate, batch=8, generator=one.generator)


def test_adapters_are_all_that_is_trained():
    with seeded(0):
        loaded = adapted(load(TINY, dtype="float32"))
    names = list(trained_part(loaded.model))
    assert names and all("lora_" in name for name in names)
    layers = len(loaded.model.model.layers)
    assert len(names) == 2 * 7 * layers


def frame_of(flip, drop, first, n=12):
    rows = []
    for item in range(n):
        for metric, value in (
            ("share of orders that change the choice", flip),
            ("accuracy lost to the worst order", drop),
            ("share of choices of the first place", first),
        ):
            found = value + 0.01 * (item % 3)
            rows.append(
                make_record(method="pretrained, causal+pe", metric=metric, value=found, item=item, seed=0)
            )
    return frame(rows)


def test_the_first_claim_needs_all_three_signs(tmp_path):
    lab = Lab(SetLLMStudy(), tmp_path, reference="gnomon.studies.set_llm")
    SetLLMStudy()._claims(lab)
    rule = next(claim.rule for claim in lab.claims if claim.id == "set-llm.1")
    assert rule.judge(frame_of(0.3, 0.4, 0.4)).verdict == "holds"
    assert rule.judge(frame_of(0.3, 0.4, 0.1)).verdict == "fails"
    assert rule.judge(frame_of(-0.01, -0.01, 0.24)).verdict != "holds"  # one that is blind to order


def test_a_model_that_reads_no_order_has_no_flips(tmp_path):
    with seeded(0):
        ctx = StageContext(tmp_path, 0)
        sensitivity(ctx, method="m", mode="setmask+setpe", canonical=False, model=TINY, dtype="float32",
                    items="words", count=3, permutations="all")  # fmt: skip
    found = {(r["metric"], r["item"]): r["value"] for r in ctx.snapshot()}
    assert all(found["share of orders that change the choice", i] == 0 for i in range(3))
    assert all(found["accuracy over orders", i] == found["accuracy in the worst order", i] for i in range(3))
    assert sum(found["share of choices of the first place", i] for i in range(3)) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "settings",
    [{"modes": ("causal+pe",)}, {"modes": ("causal",)}, {"rates": ()}, {"steps": 0}, {"data": "nothing"}],
)
def test_settings_that_are_refused(settings):
    with pytest.raises(UsageError):
        SetLLMStudy(**settings).check()
