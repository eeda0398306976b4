"""The MGLU study. Truth: bytes by hand, the paper's widths, plain SwiGLU, and an uncut training run."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from killing import TINY, killed_and_uncut, trained

import gnomon
from gnomon.core.errors import UsageError
from gnomon.core.models import load
from gnomon.core.seeding import seeded
from gnomon.kernels import mglu as kernels
from gnomon.lab import StageContext
from gnomon.lab.cards import load_card
from gnomon.lab.records import frame
from gnomon.lab.stage import Done
from gnomon.methods.layers.mglu import MGLUConfig, SwiMGLUMLP, freeze_masks, mglu_layers, replace_mlp
from gnomon.studies import mglu_stages, mglu_timing
from gnomon.studies.mglu import FORMS, MGLUStudy
from gnomon.studies.mglu_entrants import (
    ENTRANTS,
    equal_bytes_width,
    feed_forward_bits,
    gelu,
    swiglu_bytes,
    swiglu_shared,
    watch_masks,
)

FIGURES = {"learning", "quality_by_bytes", "times", "gates"}
NO_STEPS = {"lr": 1e-3, "weight_decay": 0.0, "total_steps": 1}
H, D, LAYERS = 16, 24, 3  # of tiny:llama-10k


def tiny():
    with seeded(0):
        return load("tiny:llama-10k", dtype="float32").model


def records_of(ctx):
    return frame([json.loads(line) for line in (ctx.dir / "records.jsonl").read_text().splitlines()])


@pytest.fixture
def ctx(tmp_path):
    return StageContext(tmp_path, 0)


@pytest.mark.slow
def test_smoke_run_has_every_claim_figure_and_competitor(tmp_path):
    # In a process of its own: Triton compiles from source, which the run-time type checks here rewrite.
    command = [sys.executable, "-m", "gnomon", "run", "mglu", "--profile", "smoke", "--runs", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (folder,) = (tmp_path / "mglu").iterdir()
    result = gnomon.load_result(folder)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    judged = {(c["id"], part["part"]) for c in result.data["claims"] for part in c["parts"]}
    assert judged == {(claim.id, part.part) for claim in load_card("mglu").claims for part in claim.parts}
    assert result.verdicts["mglu.1"] == "holds"  # exact at any size
    assert {result.verdicts[f"mglu.{k}"] for k in (2, 3, 4)} == {"undecided"}
    table = result.frame()
    final = table[table["metric"] == "bits per byte"].set_index("method")
    assert set(final.index) == set(FORMS)
    assert final["value"].nunique() == len(final)  # no two competitors are the same computation
    assert set(final["budget.tokens"]) == {3 * 2 * 32} and set(final["budget.trials"]) == {2}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"competitors": "gelu,swiglu,swiglu-shared"}, "swimglu-4 must be among"),
        ({"competitors": "gelu,swigluu"}, "Did you mean 'swiglu'"),
        ({"shapes": "8192"}, "no shape"),
        ({"masks": "1,2,4"}, "1 and 8 among them"),
        ({"masks": "1,8,32"}, "from 1 to 16"),
        ({"cores": "0"}, "from 1 on"),
        ({"repeats": "0"}, "at least 1"),
        ({"copies": "-1"}, "or more"),
        ({"mask_init_std": "0"}, "positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        MGLUStudy.resolve("cpu", setting)


# ------------------------------------------------------------------------------------------------- competitors


def test_gelu_is_one_matrix_and_an_activation():
    model = tiny()
    old = [layer.mlp for layer in model.model.layers]
    gates = [mlp.gate_proj.weight.clone() for mlp in old]
    gelu(model, **NO_STEPS)
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(0))
    for layer, gate, mlp in zip(model.model.layers, gates, old, strict=True):
        expected = torch.nn.functional.gelu(x @ gate.T) @ mlp.down_proj.weight.T
        torch.testing.assert_close(layer.mlp(x), expected)
    assert sum(p.numel() for p in model.model.layers[0].mlp.parameters()) == 2 * H * D


def test_shared_is_swiglu_whose_two_matrices_are_equal():
    model, plain, ids = tiny(), tiny(), torch.arange(32).view(2, 16)
    swiglu_shared(model, **NO_STEPS)
    with torch.no_grad():
        for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
            for matrix in (other.mlp.gate_proj, other.mlp.up_proj):
                matrix.weight.copy_(layer.mlp.proj.weight)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_equal_bytes_are_equal_and_the_model_can_be_loaded_again(tmp_path):
    assert equal_bytes_width(3072, 4) == 2304 and equal_bytes_width(8192, 1) == 5632  # 33/48 of 8192
    narrow, masked = tiny(), replace_mlp(tiny(), MGLUConfig(n_masks=4))
    swiglu_bytes(narrow, **NO_STEPS, n_masks=4)
    assert feed_forward_bits(narrow) == feed_forward_bits(masked) == LAYERS * H * D * (32 + 4)
    assert feed_forward_bits(tiny()) == LAYERS * H * D * 48
    narrow.save_pretrained(tmp_path)
    again = type(narrow).from_pretrained(tmp_path)
    ids = torch.arange(32).view(2, 16)
    assert torch.equal(again(ids).logits, narrow(ids).logits)


def test_bits_count_what_a_forward_pass_reads():
    """By the packed layers' own tensors, router included."""
    for settings in ({"n_masks": 2}, {"n_masks": 4, "top_k": 2}):
        model = replace_mlp(tiny(), MGLUConfig(**settings)).bfloat16()
        counted = feed_forward_bits(model)
        packed = freeze_masks(model)
        held = [t for mlp in mglu_layers(packed).values() for t in (*mlp.parameters(), *mlp.buffers())]
        assert counted == 8 * sum(t.nbytes for t in held)


def test_an_mlp_without_a_gate_is_refused():
    model = load("tiny:gpt2-10k", dtype="float32").model
    with pytest.raises(UsageError, match="gate_proj"):
        gelu(model, **NO_STEPS)


def test_watching_sees_bits_that_flip():
    model = replace_mlp(tiny(), MGLUConfig(n_masks=2))
    watch = watch_masks(model)
    before = watch(model)
    assert before["mask bits that changed"] == 0 and 0.4 < before["gate share"] < 0.6
    with torch.no_grad():
        for mlp in mglu_layers(model).values():
            mlp.proj.mask_logits[0].neg_()
    assert watch(model)["mask bits that changed"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("settings", [{"n_masks": 2}, {"n_masks": 2, "learned": False}])
def test_training_that_was_killed_goes_on_as_if_uncut(tmp_path, settings):
    killed_and_uncut(tmp_path, ENTRANTS["swimglu"], after=4, options=settings)


def test_a_model_that_no_class_can_load_is_not_saved(tmp_path):
    from gnomon.studies.pretraining import pretrain

    with seeded(0):
        value = pretrain(StageContext(tmp_path, 0), method="m", make=ENTRANTS["gelu"], **TINY)
    assert value["loss"] > 0 and not (tmp_path / "model").exists()


# ------------------------------------------------------------------------------------------------- stages


def test_files_hold_sixteen_bits_and_one_a_mask(ctx):
    mglu_stages.packed_files(ctx, model="tiny:llama-10k", scratch=True, masks=(1, 4))
    table = records_of(ctx)
    means = table.groupby(["method", "metric"])["value"].agg(["min", "max"])
    for method, bits, saving, whole in (
        ("swiglu", 32, 0, 0),
        ("swimglu-1", 17, 0.46875, 15 / 48),
        ("swimglu-4", 20, 0.375, 12 / 48),
    ):
        assert tuple(means.loc[method, "bits stored a weight"]) == (bits, bits)
        assert tuple(means.loc[method, "saving against a GLU"]) == (saving, saving)
        assert means.loc[(method, "saving, whole feed-forward layer"), "min"] == pytest.approx(whole)
    assert tuple(means.loc["swimglu-4", "bits read a weight"]) == (20, 20)
    assert len(table[table["metric"] == "bits stored a weight"]) == 3 * LAYERS
    assert not list(ctx.dir.glob("saved-*"))  # gigabytes at full size


def test_bits_per_byte_by_hand(ctx, tmp_path):
    of = Done(tmp_path, {"loss": 1.3862943611198906, "tokens": 8, "seconds": 1.0}, {"steps": 2, "lr": 0.1})
    mglu_stages.measure(ctx, of=of, text=Done(tmp_path, 4.0, {}), method="m", trials=1)
    assert records_of(ctx)["value"].item() == pytest.approx(0.5)  # 2 bits a token of 4 bytes


def test_a_token_of_the_tiny_models_is_a_byte(ctx):
    assert mglu_stages.bytes_per_token(ctx, model="tiny:llama-10k", data="generated:20") == 1


def test_masks_of_a_trained_model(tmp_path):
    value, _, _ = trained(tmp_path / "of", ENTRANTS["swimglu"], options={"n_masks": 2})
    (folder := tmp_path / "masks").mkdir()
    ctx = StageContext(folder, 0)
    text = {name: TINY[name] for name in ("data", "length", "windows")}
    mglu_stages.masks(ctx, of=Done(tmp_path / "of", value, {}), method="swimglu-2", **text)
    table = records_of(ctx)
    shares = table[table["metric"] == "gate share"].sort_values("depth")["value"]
    assert len(shares) == LAYERS and shares.between(0.3, 0.7).all()
    assert shares.mean() == pytest.approx(value["last gate share"])
    assert table[table["metric"] == "relative error of gate + value"]["value"].max() < 1e-5
    change = table[table["metric"] == "loss of the packed model minus the other"]["value"].item()
    assert abs(change) < 0.02  # other roundings in bfloat16


def test_the_identity_notices_a_mask_that_is_no_complement(monkeypatch):
    with seeded(0):
        mlp = SwiMGLUMLP(H, D, MGLUConfig(n_masks=2))
    mlp.freeze()
    assert mglu_stages.identity_error(mlp, seed=0) < 1e-6
    monkeypatch.setattr(kernels.reference, "linear", lambda x, w: x @ (w + 1e-3).T)
    assert mglu_stages.identity_error(mlp, seed=0) > 1e-5


TIMED = {"rows": 40, "columns": 24, "masks": (1, 8), "threads": 1, "repeats": 2, "copies": 2, "seed": 0}


def test_every_contender_is_timed(ctx):
    mglu_timing.products(ctx, **TIMED)
    table = records_of(ctx)
    times = table[table["metric"] == "time"]
    assert (times["value"] > 0).all() and set(times["shape"]) == {"40 x 24"}
    expected = {
        f"{kind}, {n}" for kind in ("FlashMGLU", "naive", "byte bound") for n in ("1 mask", "8 masks")
    }
    assert set(times["method"]) == expected | {"GLU, torch", "GLU, same kernel", "reading"}
    assert (times.groupby("method").size() == 2).all()
    allowed = table[table["metric"] == "times as fast as GLU, torch"].set_index("masks")["bytes allow"]
    assert allowed.round(2).to_dict() == {1: 1.88, 8: 1.33}  # the card's


@pytest.mark.parametrize("wrong", ["flash_mglu", "glu"])
def test_a_wrong_kernel_is_not_timed(ctx, monkeypatch, wrong):
    right = getattr(kernels, wrong)
    monkeypatch.setattr(kernels, wrong, lambda *args: right(*args) * 1.01)
    with pytest.raises(AssertionError, match="nothing was timed"):
        mglu_timing.products(ctx, **TIMED)


def test_operands_that_may_lie_in_a_cache_give_no_verdict():
    for copies, kinds in (("0", {"UpTo", "AllOf", "Ratio"}), ("3", {"Withheld"})):
        rules = MGLUStudy.resolve("cpu", {"copies": copies}).speed_rules()
        assert {type(rule).__name__ for rule in rules.values()} == kinds
