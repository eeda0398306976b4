"""The POET study. Truth: constructed losses, the paper's counts, and an uncut training run."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from killing import killed_and_uncut, trained

import gnomon
from gnomon.core.errors import UsageError
from gnomon.core.layers import linears
from gnomon.core.models import load
from gnomon.core.seeding import seeded
from gnomon.lab import StageContext
from gnomon.lab.stage import Done
from gnomon.studies.poet import POETStudy
from gnomon.studies.poet_entrants import ENTRANTS, adamw_normalized, lora, watch_spectra
from gnomon.studies.poet_stages import counts, order, spread

FIGURES = {"learning", "spectra", "rates", "sizes"}
BS = {"variant": "bs", "block_size": 4, "merge_interval": 4}


def test_smoke_run_has_every_claim_figure_and_competitor(tmp_path):
    result = gnomon.run("poet", profile="smoke", runs=tmp_path)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert set(result.verdicts) == {"poet.1", "poet.2", "poet.3"}
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    final = table[table["metric"] == "loss"].set_index("method")
    forms = {"poet-bs", "poet-bs-exact", "poet-bs-k2", "poet-fs"}
    assert set(final.index) == (set(ENTRANTS) - {"poet"}) | forms
    assert final["value"].nunique() == len(final)  # no two competitors are the same computation
    assert set(final["budget.tokens"]) == {5 * 4 * 32}
    parts = {p["part"]: p for c in result.data["claims"] if c["id"] == "poet.3" for p in c["parts"]}
    assert parts["numbers"]["verdict"] == "holds"


@pytest.mark.parametrize("after", [3, 6])  # inside the first interval, and inside the second
def test_training_that_was_killed_between_merges_goes_on_as_if_uncut(tmp_path, after):
    killed_and_uncut(tmp_path, ENTRANTS["poet"], after=after, options=BS)


def test_merging_is_what_pretrain_keeps(tmp_path):
    value, curve, weights = trained(tmp_path, ENTRANTS["poet"], options=BS, lr=0.001)
    assert not [name for name in weights if "q_in" in name or "perm" in name]
    assert value["last spectrum drift"] < 0.05 and value["trained numbers"] > 0
    drift = [r["value"] for r in curve if r["metric"].startswith("spectrum drift")]
    assert len(drift) == 5 and drift[-1] == value["last spectrum drift"]


def test_adamw_does_change_spectra(tmp_path):
    value, _, _ = trained(tmp_path, ENTRANTS["adamw"])
    assert value["last spectrum drift"] > 0.05  # the instrument sees it where nothing prevents it


def test_the_control_has_rows_of_length_one():
    with seeded(0):
        model = load("tiny:llama-10k", dtype="float32").model
        adamw_normalized(model, lr=1e-3, weight_decay=0.0, total_steps=1)
    for layer in linears(model).values():
        torch.testing.assert_close(layer.weight.norm(dim=1), torch.ones(len(layer.weight)))


def test_adapters_leave_the_frozen_weights_and_are_merged_at_the_end():
    with seeded(0):
        model = load("tiny:llama-10k", dtype="float32").model
        before = {name: layer.weight.clone() for name, layer in linears(model).items()}
        entrant = lora(model, lr=0.1, weight_decay=0.0, total_steps=1, rank=2, alpha=4.0)
    ids = torch.arange(24).view(1, 24)
    for _ in range(2):  # the first step only moves the zero factor
        model(ids, labels=ids).loss.backward()
        entrant.optimizer.step()
        entrant.optimizer.zero_grad()
    frozen = {
        name: layer.base_layer.weight for name, layer in model.named_modules() if hasattr(layer, "base_layer")
    }
    assert len(frozen) == len(before)
    assert all(torch.equal(frozen[name], weight) for name, weight in before.items())
    with torch.no_grad():
        adapted = model(ids).logits
        merged = entrant.finish(model)
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)
    assert all(not torch.equal(merged.get_submodule(name).weight, w) for name, w in before.items())


def done(folder, loss, lr=0.1):
    return Done(
        folder, {"loss": loss, "tokens": 8, "seconds": 1.0, "trained numbers": 5}, {"steps": 2, "lr": lr}
    )


def recorded(tmp_path, stage, **arguments):
    context = StageContext(tmp_path, seed=0)
    stage(context, **arguments)
    return {record["metric"]: record["value"] for record in context.snapshot()}


def test_spread_and_order_by_hand(tmp_path):
    grid = [done(tmp_path, 2.0), done(tmp_path, 1.5), done(tmp_path, 4.0)]
    found = recorded(tmp_path, spread, of=grid, method="m", trials=1)
    assert found == {"spread of loss over learning rates": 2.5}
    for losses, falls in (((3, 2, 1), 1.0), ((3, 1, 2), 0.0), ((3, 3, 1), 0.0)):
        (folder := tmp_path / str(losses)).mkdir()
        models = [done(folder, float(loss)) for loss in losses]
        found = recorded(folder, order, of=models, names=["8", "16", "32"], method="m", trials=1)
        assert found["loss falls with block size"] == falls


def test_counts_need_no_weights(tmp_path):
    context = StageContext(tmp_path, seed=0)
    counts(context)
    found = {record["method"]: record["value"] for record in context.snapshot()}
    assert found == {"adamw": 25_296_896, "poet-bs": 9_661_440, "poet-fs": 8_544_192}  # the paper's


def test_watching_sees_a_stretched_matrix():
    model = load("tiny:llama-10k", dtype="float32").model
    watch = watch_spectra(model)
    assert watch(model)["spectrum drift"] == 0 and watch(model)["growth of the top singular value"] == 1
    with torch.no_grad():
        for layer in linears(model).values():
            layer.weight.mul_(1.5)
    found = watch(model)
    assert found["spectrum drift"] == pytest.approx(0.5, rel=1e-5)
    assert found["growth of the top singular value"] == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rivals_run": "adamw"}, "adamw-normalized must be among"),
        ({"rivals_run": "adamw,adamw-normalised"}, "Did you mean 'adamw-normalized'"),
        ({"variants": "poet-bs"}, "poet-bs-exact must be among"),
        ({"blocks": "32"}, "two sizes or more"),
        ({"blocks": "32,16"}, "smallest first"),
        ({"spread_factor": "1"}, "above 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        POETStudy.resolve("cpu", setting)
