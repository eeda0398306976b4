"""The NuMuon study. Truth: constructed directions and records, and an uncut training run."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from killing import TINY, killed_and_uncut, trained

import gnomon
from gnomon.core.errors import UsageError
from gnomon.core.models import load
from gnomon.lab import StageContext
from gnomon.lab.records import frame, make_record
from gnomon.lab.stage import Done
from gnomon.methods.optim.numuon import NuMuon, lmo_spectral_nuclear
from gnomon.studies.numuon import METHOD, MUON, WATCH, NuMuonStudy
from gnomon.studies.numuon_figures import CONTROL, judged_records
from gnomon.studies.numuon_optimizers import LOWEST, OPTIMIZERS, numuon_cosine
from gnomon.studies.numuon_stages import feasible, from_torch, pipeline_config
from gnomon.studies.pretraining import catch_up, streams

FIGURES = {"learning", "after_compression", "trade_off", "layers", "decay"}


def test_smoke_run_has_every_claim_figure_and_competitor(tmp_path):
    result = gnomon.run("numuon", profile="smoke", runs=tmp_path)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert set(result.verdicts) == {f"numuon.{i}" for i in range(1, 5)}
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    compressed = table[table["metric"] == "loss after compression"]
    assert set(OPTIMIZERS) <= set(compressed["method"])
    assert set(compressed["pipeline"]) == {"svd", "asvd", "svd_llm", "svd_llm_lora", "dobi"}
    of_muon = compressed[compressed["method"] == MUON].set_index(["pipeline", "keep"])["value"]
    assert of_muon.nunique() == len(of_muon)  # no two cells are the same computation
    trials = {r["budget.trials"] for _, r in compressed.iterrows()}
    assert trials == {2}
    update = next(c for c in result.data["claims"] if c["id"] == "numuon.2")["parts"]
    assert next(p for p in update if p["part"] == "update")["verdict"] == "holds"  # exact at any size


def test_training_that_was_killed_goes_on_as_if_uncut(tmp_path):
    killed_and_uncut(tmp_path, OPTIMIZERS[METHOD], after=6, summed_decay=2.0, watch=WATCH)


def test_the_summed_decay_is_what_was_asked_for(tmp_path, monkeypatch):
    spent = []

    def watched(model, **options):
        optimizer = numuon_cosine(model, **options)
        hidden = optimizer.param_groups[0]
        optimizer.register_step_pre_hook(lambda *_: spent.append(hidden["lr"] * hidden["weight_decay"]))
        return optimizer

    monkeypatch.setitem(globals(), "watched", watched)
    value, _, _ = trained(tmp_path, f"{__name__}:watched", summed_decay=2.0)
    assert sum(spent) == pytest.approx(2.0) and len(spent) == TINY["steps"]
    assert value["tokens"] == TINY["steps"] * TINY["batch"] * TINY["length"] * TINY["accumulate"]


@pytest.mark.parametrize("shape", [(6, 4), (3, 9), (5, 5)])
def test_random_directions_are_feasible_and_never_beat_the_oracle(shape):
    generator = torch.Generator().manual_seed(0)
    m, tau = torch.randn(shape, generator=generator), 2.5
    best = (m.double() * lmo_spectral_nuclear(m.double(), 1.0, tau)).sum()
    values = []
    for _ in range(200):
        direction = feasible(m, tau, generator)
        sigma = torch.linalg.svdvals(direction)
        assert sigma[0] <= 1 + 1e-12 and sigma.sum() <= tau + 1e-9
        values.append((m.double() * direction).sum())
    assert (
        best <= min(values) < 0.98 * best < 0.5 * best < max(values)
    )  # near it, so the comparison has teeth


def test_another_optimizer_is_not_torchs_muon():
    matrices = [torch.nn.Parameter(torch.randn(8, 6)) for _ in range(2)]
    for p in matrices:
        p.grad = torch.randn_like(p)
    assert from_torch(matrices) == 0
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in matrices]
    optimizer = torch.optim.Muon(theirs, lr=0.01, nesterov=True, adjust_lr_fn="match_rms_adamw")
    ours = NuMuon(matrices, lr=0.01, ns_dtype=torch.bfloat16)
    for copy, p in zip(theirs, matrices, strict=True):
        copy.grad = p.grad.clone()
    for one in (optimizer, ours):
        one.step()
    assert not torch.equal(theirs[0], matrices[0])


def test_catching_up_reads_both_curves(tmp_path):
    def model(name, losses):
        folder = tmp_path / name
        folder.mkdir()
        records = [
            make_record(method=name, metric="loss while training", value=v, tags={"step": 10 * i + 10})
            for i, v in enumerate(losses)
        ]
        (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return Done(folder, {}, {})

    slow, quick = model("adamw", (5, 4, 3, 2)), model("muon", (4, 2, 1.5, 1))
    never = model("bad", (5, 5, 5, 5))
    (tmp_path / "out").mkdir()
    for one, share, reached in ((quick, 0.5, True), (slow, 1.0, True), (never, 1.0, False)):
        context = StageContext(tmp_path / "out", seed=0)
        catch_up(context, of=one, reference=slow, method="m", to="adamw")
        (record,) = context.snapshot()
        assert (record["value"], record["tags"]["reached"]) == (share, reached)


def test_figures_leave_out_tuning_and_controls():
    def record(metric, method, seed, total):
        tags = {"summed decay": total}
        return {**make_record(method=method, metric=metric, value=1.0, tags=tags), "seed": seed}

    rows = [
        record("loss", "muon", 0, 2.0),
        record("loss", f"muon{CONTROL} = 6", 0, 6.0),
        record("loss while training", "muon", 0, 2.0),
        record("loss while training", "muon", 0, 6.0),  # the control's curve goes by the same name
        record("loss while training", "muon", 1000, 2.0),  # tuning
    ]
    kept = judged_records(frame(rows))
    assert len(kept) == 2 and set(kept["summed decay"]) == {2.0} and set(kept["seed"]) == {0}


def test_held_out_text_is_not_learnt():
    learnt, held_out = streams(load("tiny:llama-10k"), "generated:60")
    window = held_out[:200]
    windows = learnt.unfold(0, 200, 1)
    assert not (windows == window).all(dim=1).any() and len(learnt) > 3 * len(held_out)


def test_pipeline_settings_survive_json():
    config = pipeline_config("svd_llm_lora", json.loads(json.dumps({"update": {"lr": 0.5, "epochs": 3}})))
    assert (config.update.lr, config.update.epochs) == (0.5, 3)
    assert pipeline_config("asvd", {"candidates": [0.2, 0.5]}).candidates == (0.2, 0.5)
    assert LOWEST == 0.25


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimizers": "adamw,muon"}, "must hold numuon-cosine"),
        ({"optimizers": "adamw,muon,numuon-cosin"}, "Did you mean 'numuon-cosine'"),
        ({"pipelines": "svdllm"}, "Did you mean 'svd_llm'"),
        ({"keeps": "1.0"}, r"shares in \(0, 1\)"),
        ({"rates": "0"}, "positive learning rates"),
        ({"summed_decay": "-1"}, "can't be negative"),
        ({"steps": "1"}, "at least 2"),
        ({"calibration": "12"}, "multiple of 8"),
        ({"warmup": "0.9"}, "at most 1"),
        ({"control_seeds": "7"}, "must be among seeds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        NuMuonStudy.resolve("cpu", setting)
