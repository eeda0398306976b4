"""The TLCM study. Truth: tables of records written by hand, for which the row's rule has one answer."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import gnomon
from gnomon.core.errors import UsageError
from gnomon.lab.records import frame, make_record
from gnomon.lab.stage import Done
from gnomon.studies.tlcm import CorrectionBand, TLCMStudy
from gnomon.studies.tlcm_stages import ALPHAS, bands, by_strength, split_pairs

FIGURES = {"band", "similarity", "token_kinds", "adaptivity", "eigenvalues", "steering_gain", "learning"}


def measured(means, nulls, *, documents=10, weight=600):
    """Records of `correction`: document d deviates from every mean by the same small amount."""
    wobble = np.linspace(-0.01, 0.01, documents)
    return [
        make_record(
            method="model",
            metric=metric,
            value=value + wobble[d] * (1 + d % 3),
            item=f"doc{d}",
            weight=weight,
            tags={"pair": pair},
        )
        for d in range(documents)
        for metric, values in (("adjacent cosine", means), ("cross-token cosine", nulls))
        for pair, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("means", "nulls", "weight", "verdict"),
    [
        ((-0.2, -0.1, -0.1, 0.3), (0, 0, 0, 0), 600, "holds"),
        ((-0.2, -0.1, 0.1, 0.3), (0, 0, 0, 0), 600, "undecided"),  # two of three pairs
        ((0.2, 0.1, 0.1, 0.3), (0, 0, 0, 0), 600, "fails"),
        ((-0.2, -0.1, -0.1, 0.3), (-0.3, -0.3, -0.3, 0), 600, "fails"),  # anisotropy, not correction
        ((0.0, 0.0, 0.0, 0.0), (0, 0, 0, 0), 600, "fails"),  # a part that does nothing
        ((-0.2, -0.1, -0.1, 0.3), (0, 0, 0, 0), 100, "undecided"),  # 1,000 tokens
    ],
)
def test_the_band_needs_three_pairs_below_zero_and_below_other_tokens(means, nulls, weight, verdict):
    judged = CorrectionBand().judge(frame(measured(means, nulls, weight=weight)))
    assert judged.verdict == verdict, judged.note


def test_bands_and_order_of_strength(tmp_path):
    records = measured((-0.1, -0.2, 0.2, -0.05, 0.0), (0, 0, 0, -0.1, 0))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    done = Done(tmp_path, {}, {})
    correcting, control = bands(done)
    assert correcting == [0, 1] and 2 in control and 3 not in correcting + control
    assert by_strength(done) == [1, 0]
    cosines = {"cosines": [-0.05, -0.3, 0.1, -0.5, -0.2]}
    assert split_pairs(cosines, [0, 1], [2, 4], -0.1) == ([1], [2])


def test_the_grid_of_alphas_is_the_papers_and_beyond():
    assert ALPHAS[:21] == tuple(np.round(np.arange(-1, 1.01, 0.1), 1)) and max(ALPHAS) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"threshold": "0.1"}, "negative cosine"), ({"tokens": 0}, "at least 1"), ({"at": "0,5"}, "from 1 on"),
     ({"strengths": "0"}, "positive")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        TLCMStudy.resolve("smoke", setting)


def test_smoke_run_has_every_claim_and_figure_and_gives_no_verdict_on_random_weights(tmp_path):
    result = gnomon.run("tlcm", profile="smoke", runs=tmp_path)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert set(result.verdicts.values()) == {"undecided"} and len(result.verdicts) == 5
    table = result.frame()
    assert {"model", "random weights", "correcting", "control", "small model", "negative", "positive"} <= set(
        table["method"]
    )
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    # At alpha = 0 a sweep is the adjacent cosine of its token: two stages that share no code path agree.
    (sweep,) = result.dir.glob("stages/*/curves.npz")
    values = [json.loads(file.read_text())["value"] for file in result.dir.glob("stages/*/done.json")]
    drawn = next(value["drawn"] for value in values if value and value.get("drawn"))
    curves = np.load(sweep)
    zero = list(curves["alphas"]).index(0)
    at_zero = {
        (int(row[0]), round(float(row[1 + zero]), 3))
        for kind in ("correcting", "control")
        for row in curves[kind]
    }
    known = {(i, round(c, 3)) for draw in drawn for i, c in enumerate(draw["cosines"])}
    assert at_zero and at_zero <= known
