"""The NF12 study. Truth: byte counts by hand, the card's numbers, and a run at toy size."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

import gnomon
from gnomon.core.errors import UsageError
from gnomon.core.evaluate import weight_bytes
from gnomon.lab.cards import load_card
from gnomon.lab.records import frame
from gnomon.lab.stage import StageContext
from gnomon.studies import nf12_serving, nf12_stages
from gnomon.studies.nf12 import BASES, NF12Study

FIGURES = {"sizes", "windows", "products_grid", "bulk_decoding", "cache_room"}


def records_of(ctx):
    return frame([json.loads(line) for line in (ctx.dir / "records.jsonl").read_text().splitlines()])


@pytest.fixture
def ctx(tmp_path):
    return StageContext(tmp_path, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"shapes": "12,8x8"}, "no shape"), ({"shapes": "8x8"}, "1 shapes and 2 zeros"), ({"repeats": 0}, "at least 1"),
     ({"bases": "0,5"}, "1 … 239"), ({"cores": "0"}, "from 1 on"), ({"free_share": 0}, "positive share"),
     ({"zeros": "0,1.5"}, r"\[0, 1\)")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        NF12Study.resolve("smoke", setting)


def test_full_decodes_under_every_base():
    assert NF12Study.profiles["full"]["bases"] == BASES == tuple(range(1, 240))


def test_bits_of_a_model_by_hand(ctx):
    """One matrix of +-0.125 costs 12 bits, one of zeros stays at 16; a vector isn't a matrix."""
    model = torch.nn.Module()
    signs = torch.where(torch.rand(64, 64) < 0.5, -0.125, 0.125)
    model.signs = torch.nn.Parameter(signs.bfloat16())
    model.zeros = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    model.norm = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    nf12_stages.count_bits(ctx, model, "m", min_elements=1024)
    table = records_of(ctx)
    whole = table[table["metric"] == "bits a weight, whole model"]["value"].item()
    assert whole == pytest.approx((12 * 4096 + 16 * 4096 + 16 * 64) / (2 * 4096 + 64))
    each = table[table["item"] == "zeros"].set_index("metric")["value"]
    assert (each["NF12 bits"], each["exceptional groups"], each["share in the window"]) == (28, 1, 0)
    entropy = table[(table["item"] == "signs") & (table["metric"] == "joint entropy")]["value"].item()
    assert entropy == pytest.approx(1, abs=0.01)
    assert table[table["metric"] == "weights that differ"]["value"].sum() == 0


def test_every_pattern_is_counted_and_a_wrong_decoder_is_noticed(ctx, monkeypatch):
    nf12_stages.patterns(ctx, bases=(112,))
    table = records_of(ctx)
    assert (table[table["metric"] == "patterns that differ"]["value"] == 0).all()
    groups = table[table["metric"] == "exceptional groups, numeric order"]["value"]
    assert groups.tolist() == [7712]  # the card's
    from gnomon.kernels import nf12

    monkeypatch.setattr(nf12, "decode", lambda sm, *rest, **kw: torch.zeros_like(sm, dtype=torch.bfloat16))
    other = StageContext(ctx.dir / "other", 0)
    other.dir.mkdir()
    nf12_stages.patterns(other, bases=(112,))
    wrong = records_of(other)
    assert (wrong[wrong["metric"] == "patterns that differ"]["value"] >= 65535).all()


def test_memory_of_the_published_model_is_the_cards(ctx):
    nf12_serving.qwen3_memory(ctx)
    value = records_of(ctx).set_index("metric")["value"]
    assert value["freed"] == pytest.approx(16.4, abs=0.1)
    assert value["free before, for 4.5 times"] == pytest.approx(4.7, abs=0.1)
    assert 4 < value["times the room, on an 80 GB card"] < 5


def test_a_cache_is_filled_to_the_last_token():
    model = nf12_serving.model_in("BF16, matched", "tiny:llama-10k")
    token = nf12_serving.bytes_per_token(model.config)
    for tokens in (1, 63, 300):
        assert nf12_serving.cached_tokens(model, tokens * token) == tokens
        assert nf12_serving.cached_tokens(model, tokens * token - 1) == tokens - 1


def test_kinds_of_weights_are_one_model_and_equal_in_bits():
    ids = nf12_serving.prompts("tiny:llama-0.5m", "generated:12", 20, 8, seed=0)
    kinds = {
        k: nf12_serving.model_in(k, "tiny:llama-0.5m", min_elements=1024) for k in ("BF16, matched", "NF12")
    }
    with torch.inference_mode():
        for rows in (1, 3, 20):
            one, other = (kinds[k](input_ids=ids[:rows]).logits for k in kinds)
            assert torch.equal(one, other)
    saved = weight_bytes(kinds["NF12"]) / weight_bytes(kinds["BF16, matched"])
    assert 0.75 < saved < 0.78


def test_greedy_is_generates(ctx):
    """Our own loop against Transformers' `generate`."""
    model = nf12_serving.model_in("BF16, torch", "tiny:llama-0.5m")
    ids = nf12_serving.prompts("tiny:llama-0.5m", "generated:12", 2, 8, seed=0)
    ours, _ = nf12_serving.greedy(model, ids, 6)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, 8:]
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_smoke_run_has_every_claim_and_figure(tmp_path):
    # In a process of its own: Triton compiles from source, which the run-time type checks here rewrite.
    command = [sys.executable, "-m", "gnomon", "run", "nf12", "--profile", "smoke", "--runs", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (folder,) = (tmp_path / "nf12").iterdir()
    result = gnomon.load_result(folder)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    judged = {(c["id"], part["part"]) for c in result.data["claims"] for part in c["parts"]}
    assert judged == {(claim.id, part.part) for claim in load_card("nf12").claims for part in claim.parts}
    verdicts = result.verdicts
    assert verdicts["nf12.2"] == "holds"  # exact at any size
    assert {verdicts[f"nf12.{k}"] for k in (1, 3, 4)} == {"undecided"}
