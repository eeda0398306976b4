"""The MAGE study. Truth: reads counted by formula, positions by their definition, and constructed records."""

import json
from pathlib import Path

import jsonschema
import matplotlib
import pytest
import torch

import gnomon
from gnomon.core.errors import UsageError
from gnomon.core.models import load
from gnomon.lab import Lab
from gnomon.lab.records import frame, make_record
from gnomon.methods.layers.mage import (
    BlockDiffusionConfig,
    Mage,
    Quest,
    SparseD,
    Window,
    exact_reads,
    mage_reads,
)
from gnomon.studies import mage_figures, mage_timing
from gnomon.studies.mage import LONG, LONGEST, MageStudy
from gnomon.studies.mage_stages import (
    ACTIVE,
    EXACT,
    LEAD,
    LOSS,
    MAGE,
    PASSES,
    SELECTORS,
    SHARING,
    Pieces,
    over,
)

SHAPE = {"layers": 2, "heads": 4, "key_heads": 2, "width": 16}
FIGURES = {"learning", "recalls", "sharing", "alignment", "quality", "times"}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return gnomon.run("mage", profile="smoke", runs=folder), folder


def test_smoke_run_has_every_claim_figure_and_selector(smoke):
    result, _ = smoke
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert set(result.verdicts) == {f"mage.{i}" for i in range(1, 5)}
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    assert set(SELECTORS) <= set(table[table["metric"] == "recall"]["method"])
    assert set(SELECTORS) <= set(table[table["metric"] == PASSES]["method"])
    assert set(table[table["metric"] == "recall"]["state"]) == {"trained", "untrained"}
    # Small prefixes are no evidence for claims about long ones.
    assert {result.verdicts["mage.3"], result.verdicts["mage.4"]} == {"undecided"}


def test_what_must_be_equal_is(smoke):
    table = smoke[0].frame()

    def values(metric, method):
        return table[(table["metric"] == metric) & (table["method"] == method)]["value"]

    for metric in ("recall", "mass"):
        assert (values(metric, "oracle") == 1).all()
        assert all((values(metric, name) <= 1 + 1e-9).all() for name in SELECTORS)
    assert (values("tokens equal to exact decoding", EXACT) == 1).all()
    assert (values(ACTIVE, EXACT) == 0).all() and (values(ACTIVE, MAGE) == 1).all()
    assert (values("KV tokens read", MAGE) < values("KV tokens read", EXACT).min()).all()


def test_the_model_before_training_is_kept(smoke):
    _, folder = smoke
    (start,) = folder.rglob("start")
    before, after = (
        dict(load(str(path)).model.named_parameters()) for path in (start, start.parent / "model")
    )
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert load(str(start)).model.config.max_position_embeddings >= 144


# ------------------------------------------------------------------------------------------------ training


def pieces(seed=0, **more):
    cfg = BlockDiffusionConfig(block_size=4, mask_token_id=999)
    given = {"batch": 8, "length": 16, "reach": 64, **more}
    return Pieces(torch.arange(500), cfg, **given, generator=torch.Generator().manual_seed(seed))


def test_pieces_stand_at_their_true_positions():
    source, gaps, furthest = pieces(), 0, 0
    for _ in range(20):
        batch = next(source)
        at, ids = batch["position_ids"], batch["input_ids"]
        start = ids[:, 0] - at[:, 0]  # the stream's token is its own place
        assert torch.equal(ids - at, start[:, None].expand_as(ids))
        assert (at >= 0).all() and (at < 64).all() and (at[:, ::4] % 4 == 0).all()
        steps = at.diff(dim=1)
        assert (steps[:, [i for i in range(15) if i != 7]] == 1).all() and (steps > 0).all()
        gaps += int((steps[:, 7] > 1).sum())
        furthest = max(furthest, int(at.max()))
    assert 40 < gaps < 100 and furthest == 63  # about every second row of 160; the last position is reached


def test_pieces_go_on_where_they_stopped():
    one, two = pieces(3), pieces(4)
    next(one)
    two.load_state_dict(one.state_dict())
    a, b = next(one), next(two)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("wrong", [{"length": 12}, {"reach": 62}, {"reach": 12}, {"reach": 504}])
def test_pieces_that_are_refused(wrong):
    with pytest.raises(UsageError, match="length="):
        pieces(**wrong)


# -------------------------------------------------------------------------------------------------- timing


def test_reads_are_those_of_the_formulas():
    n, block, passes, k = 256, 8, 4, 64
    with torch.inference_mode(), mage_timing.behind(n, block, passes, **SHAPE) as decoder:
        before = [layer.keys.clone() for layer in decoder.cache.layers]
        found = {
            name: mage_timing.counted(decoder, policy, n)
            for name, policy in {
                "exact": None,
                "mage": Mage(k, 0),
                "quest": Quest(k, dense_layers=0),
                "sparsed": SparseD(0.2, 0.25, 64, dense_layers=0),
                "window": Window(k, dense_layers=0),
            }.items()
        }
        assert decoder.committed == n
        assert all(
            torch.equal(a[:, :, :n], layer.keys[:, :, :n])
            for a, layer in zip(before, decoder.cache.layers, strict=True)
        )
    assert found["exact"] == exact_reads(n, block, passes) + (n + block)  # the commit reads all, too
    assert found["mage"] == mage_reads(n, block, passes, k) + (k + block)
    assert found["window"] == (passes + 1) * (k + block)
    assert found["quest"] == (passes + 1) * (k + block) + passes * n / 16
    assert found["sparsed"] == (n + block) + passes * (64 + block)


def test_a_wrong_gather_is_not_timed(monkeypatch):
    with torch.inference_mode(), mage_timing.behind(64, 8, 4, **SHAPE) as decoder:
        mage_timing.agree(decoder, 64)
        good = mage_timing.Everything.select
        monkeypatch.setattr(mage_timing.Everything, "select", lambda *x: good(*x)[..., ::2])
        with pytest.raises(AssertionError, match="nothing was timed"):
            mage_timing.agree(decoder, 64)


# -------------------------------------------------------------------------------------------------- claims


def rules(tmp_path, **settings):
    study = MageStudy(**settings)
    lab = Lab(study, tmp_path, reference="gnomon.studies.mage")
    study._claims(lab)
    return {(claim.id, claim.part): claim.rule for claim in lab.claims}


def records(metrics, tags, seeds=3, budget=None):
    """A value for each (metric, method), a little apart between seeds."""
    return [
        make_record(
            method=method, metric=metric, value=value * (1 + 0.01 * seed), seed=seed, item=0, tags=tags,
            better="lower", budget=budget or {"tokens": 5},
        )
        for (metric, method), value in metrics.items()
        for seed in range(seeds)
    ]  # fmt: skip


def test_sharing_must_cost_both_estimators_at_every_size(tmp_path):
    rule = rules(tmp_path)["mage.1", None]

    def judged(quest):
        rows = []
        for k in MageStudy().budgets:
            tags = {"state": "trained", "context": 2048, "k": k}
            rows += records(
                {(SHARING, "Quest"): quest if k == 32 else 0.2, (SHARING, "average query"): 0.1}, tags
            )
        return rule.judge(frame(rows)).verdict

    assert judged(0.2) == "holds" and judged(-0.2) == "fails"


def leads(cosine, recall):
    return {(LEAD, MAGE): cosine, **{(over(name), MAGE): recall for name in ("Quest", "window", "random")}}


def test_alignment_and_its_emergence_need_every_lead(tmp_path):
    both = rules(tmp_path)
    tags = {"context": 2048, "k": 128}

    def judged(part, after, before):
        rows = records(leads(*after), {**tags, "state": "trained"})
        rows += records(leads(*before), {**tags, "state": "untrained"}, budget={"tokens": 0})
        return both["mage.2", part].judge(frame(rows)).verdict

    assert judged("a", (0.1, 0.2), (0.0, 0.0)) == "holds"
    assert judged("a", (-0.1, 0.2), (0.0, 0.0)) == "fails"
    assert judged("b", (0.1, 0.2), (0.05, 0.1)) == "holds"
    assert judged("b", (0.1, 0.2), (0.05, 0.3)) == "fails"  # an untrained model that is aligned already


def test_lossless_needs_loss_passes_and_active_selection(tmp_path):
    rule = rules(tmp_path)["mage.3", None]

    def judged(loss=1.0, passes=10.0, active=1.0, context=LONG, chance=1.1):
        values = {(LOSS, MAGE): loss, (LOSS, EXACT): 1.0, (PASSES, MAGE): passes, (PASSES, EXACT): 10.0}
        values[LOSS, "random"] = chance
        tags = {"context": context, "k": 512}
        rows = records(values, tags)
        rows += [
            make_record(method=MAGE, metric=ACTIVE, value=active, seed=s, item=0, tags=tags) for s in range(3)
        ]
        return rule.judge(frame(rows)).verdict

    assert judged() == "holds" and judged(loss=1.02) == "fails" and judged(passes=11.0) == "fails"
    assert judged(active=0.5) == "undecided" and judged(context=4096) == "undecided"
    assert judged(chance=1.0) == "undecided"  # a model that doesn't need its prompt


def test_speed_is_judged_behind_the_longest_prefix_alone(tmp_path):
    part = rules(tmp_path)

    def judged(name, context=LONGEST, seconds=1.0, repeats=15):
        rows = []
        for method, value in (("exact", 5.0), (MAGE, seconds), ("Quest", 4.0), ("SparseD", 3.0)):
            for item in range(repeats):
                row = make_record(
                    method=method, metric="time of a block", value=value * (1 + 0.01 * (item % 3)), seed=0,
                    item=item, better="lower", tags={"context": context, "k": 512, "passes": 32},
                )  # fmt: skip
                rows.append({**row, "exclusive": True})
        return part["mage.4", name].judge(frame(rows)).verdict

    assert judged("a, direction") == "holds" and judged("a, number") == "fails"
    assert judged("b, number") == "holds" and judged("c, number") == "holds"
    assert judged("c, direction", seconds=3.5) == "fails"
    assert judged("a, direction", context=32_768) == "undecided" == judged("a, direction", repeats=6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"passes": 1},
        {"passes": 17},
        {"length": 48},
        {"context": 2047},
        {"budgets": ()},
        {"budgets": (4096,)},
        {"long_k": 8192},
        {"timed_contexts": (512,)},
        {"timed_contexts": (8200,)},
        {"lr": 0.0},
        {"threshold": 1.5},
        {"data": "nothing"},
    ],
)
def test_settings_that_are_refused(wrong):
    with pytest.raises(UsageError):
        MageStudy(**wrong).check()


def test_the_full_profile_asks_for_what_the_claims_need():
    full = MageStudy(**MageStudy.profiles["full"])
    assert len(full.seeds) >= 3 and full.long_context >= LONG and full.long_k == 512 and full.repeats >= 15
    assert LONGEST in full.timed_contexts and full.timed_block == full.timed_passes == 32
    assert full.reach >= full.long_context + full.long_blocks * full.block
    assert full.steps >= 1000


def test_the_quality_figure_draws_all_seeds_where_a_method_lacks_a_metric(tmp_path):
    names = (EXACT, MAGE, "random", "exact, short prefix")
    losses = {(LOSS, name): 2.0 for name in names}
    rest = {
        (metric, name): 1.0 for metric in (PASSES, "tokens equal to exact decoding") for name in names[:3]
    }
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        mage_figures.quality(frame(records(losses | rest, {})), {}, tmp_path / "quality.svg")
    drawn = (tmp_path / "quality.svg").read_text()
    assert all(name in drawn for name in names[1:]) and "masked loss, % above exact" in drawn
