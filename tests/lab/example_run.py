"""A finished run written by hand: all verdicts and grades, figures, many tagged metrics, and hostile text."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    '" onerror="alert(3)',
    "{{ 7 * 7 }}",
)

SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 290"
 font-family="sans-serif" font-size="13">
<style>*{{stroke-linecap:round}}</style><rect width="720" height="300" fill="{back}"/>{bars}
<line x1="40" x2="700" y1="150" y2="150" stroke="{ink}"/>
<text x="44" y="26" fill="{ink}">cosine of adjacent layers</text>
</svg>"""

COSINES = (
    0.277,
    0.376,
    0.064,
    -0.013,
    -0.078,
    -0.04,
    -0.068,
    0.004,
    0.082,
    -0.129,
    -0.053,
    -0.084,
    -0.113,
    -0.152,
    -0.074,
    -0.049,
    -0.055,
    -0.204,
    -0.061,
    -0.13,
    0.052,
    0.155,
    0.156,
    0.194,
    0.336,
    0.103,
    0.148,
    0.311,
    0.069,
)


def _metric(name: str, mean: float, half: float | None = None, **other: Any) -> dict[str, Any]:
    ends = (
        {"low": None, "high": None, "stderr": None}
        if half is None
        else {"low": mean - half, "high": mean + half, "stderr": half / 2}
    )
    row = {"metric": name, "tags": {}, "unit": "", "better": None, "mean": mean, "n": 24, "over": "item"}
    return {**row, **ends, **other}


def _part(verdict: str, grade: str | None, rule: str, **other: Any) -> dict[str, Any]:
    row = {"part": None, "text": "", "grade": grade, "rule": rule, "verdict": verdict}
    return {**row, "estimate": None, "interval": None, "n": None, "note": "", **other}


def _methods() -> list[dict[str, Any]]:
    layers = [_metric("adjacent_cosine", c, 0.02, tags={"layer": i}) for i, c in enumerate(COSINES)]
    null = [_metric("adjacent_cosine", 0.1 * c, 0.01, tags={"layer": i}) for i, c in enumerate(COSINES)]
    sweep = [
        _metric("opposition", -0.04 - 0.1 * a, 0.03, tags={"layer": layer, "alpha": a}, n=20)
        for layer in (12, 16, 17)
        for a in (-1.0, -0.5, 0.0, 0.5)
    ]
    return [
        {
            "name": "smollm2-135m",
            "budget": {"tokens": 12288, "seconds": 61.2},
            "metrics": [
                _metric("active_layers", 7.26, 0.31, unit="layers/token"),
                _metric("negative_share", 0.67, 0.04, better="higher", n=10),
                *layers,
                *sweep,
            ],
        },
        {
            "name": "cross-token null",
            "budget": {"tokens": 12288, "seconds": 4.5},
            "metrics": [
                _metric("active_layers", 0.62, 0.05, unit="layers/token"),
                _metric("negative_share", 0.55, 0.05, better="higher", n=10),
                *null,
            ],
        },
        {
            "name": "Gaussian null",
            "budget": {},
            "metrics": [_metric("active_layers", 0.24, unit="layers/token", n=1)],
        },
    ]


def example_result() -> dict[str, Any]:
    """A `full` result with every verdict."""
    tlcm_text = "Adjacent layers systematically counteract each other, and it emerges during pretraining."
    claims = [
        {
            "id": "tlcm.1",
            "text": tlcm_text,
            "verdict": "undecided",
            "grade": "R",
            "parts": [
                _part(
                    "holds",
                    "R",
                    "At least 3 adjacent pairs lie wholly below 0 and below both nulls, and the share of "
                    "tokens with an active layer lies wholly above 0.9 (bootstrap over documents).",
                    part="a",
                    text="In a pretrained model adjacent contributions oppose each other.",
                    estimate=0.981,
                    interval=[0.974, 0.988],
                    bound=0.9,
                    n=24,
                    note="11 pairs qualify: 4–6, 9–16, 18 and 19.",
                ),
                _part(
                    "undecided",
                    None,
                    "No band at step 0, then a band at the last checkpoint.",
                    part="b",
                    text="The band emerges while the model trains.",
                    estimate=-0.01,
                    interval=[-0.03, 0.012],
                    n=5,
                    note="Absent at step 0; after 3,000 steps the interval still reaches both sides.",
                ),
            ],
        },
        {
            "id": "tlcm.2",
            "text": "Most active at punctuation marks and numbers.",
            "verdict": "holds",
            "grade": "R",
            "parts": [
                _part(
                    "holds",
                    "R",
                    "Active layers per token, punctuation minus words, is above 0 (bootstrap over "
                    "token types).",
                    estimate=1.84,
                    interval=[1.32, 2.41],
                    n=212,
                )
            ],
        },
        {
            "id": "tlcm.3",
            "text": "The strength of the correction adapts to what the layer before wrote.",
            "verdict": "holds",
            "grade": "R",
            "parts": [
                _part(
                    "holds",
                    "R",
                    "Slope of the cosine over alpha is below 0 and below control pairs.",
                    estimate=-0.162,
                    interval=[-0.201, -0.121],
                    n=60,
                )
            ],
        },
        {
            "id": "tlcm.4",
            "text": "A few directions are pushed back while others are strengthened; ordinary layers "
            "show no such split.",
            "verdict": "fails",
            "grade": "R",
            "parts": [
                _part(
                    "fails",
                    "R",
                    "The dip test rejects one mode for correcting pairs and not for control pairs.",
                    estimate=0.41,
                    interval=None,
                    n=10,
                    bound=0.05,
                    note="p = 0.41: one mode suffices at this size.",
                )
            ],
        },
        {
            "id": "tlcm.5",
            "text": "Additivity is insufficient: layers propose and reject.",
            "verdict": "undecided",
            "grade": None,
            "parts": [
                _part(
                    "undecided",
                    None,
                    "Decided only at the paper's scale.",
                    part="interpretation",
                    text="It explains vague features and weak steering.",
                    note="Full scale only.",
                ),
                _part(
                    "undecided",
                    None,
                    "Loss of gain, corrected minus strengthened directions, is above 0.",
                    part="consequence",
                    text="Corrected directions lose more gain.",
                    estimate=0.08,
                    interval=[-0.02, 0.19],
                    n=20,
                ),
            ],
        },
    ]
    stages = [
        {
            "key": f"measure-{i:02x}a41c",
            "function": "measure",
            "args": {"model": "smollm2-135m", "document": i},
            "seconds": 3.1 + 0.2 * i,
            "failed": None,
        }
        for i in range(24)
    ]
    return {
        "schema_version": 1,
        "slug": "tlcm",
        "title": "TLCM",
        "profile": "full",
        "run_id": "9f2c41d07ab3",
        "created": "2026-11-02T08:15:04+00:00",
        "finished": "2026-11-02T09:41:55+00:00",
        "seconds": 5211.4,
        "command": "gnomon run tlcm --profile full --jobs 2",
        "python": "gnomon.run('tlcm', profile='full', jobs=2)",
        "settings": {
            "model": "smollm2-135m",
            "documents": 24,
            "tokens": 512,
            "threshold": -0.1,
            "seeds": [0, 1, 2],
            "alphas": [-1.0, -0.5, 0.0, 0.5],
            "emergence": True,
        },
        "seeds": [0, 1, 2],
        "code": {"hash": "c0ffee12", "commit": "4b1d6a0e7c55", "dirty": False, "accepted_changes": []},
        "environment": {
            "python": "3.12.7",
            "platform": "Linux x86_64",
            "processor": "Xeon",
            "cores": 2,
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "jobs": 2,
            "versions": {"torch": "2.13.0", "transformers": "5.19.0"},
            "kernels": {},
        },
        "methods": _methods(),
        "claims": claims,
        "figures": [
            {
                "name": "adjacent",
                "caption": "Mean cosine between the contributions of adjacent layers. Bars "
                "below the line: the second layer takes back part of what the first one wrote.",
            }
        ],
        "stages": stages,
        "models": ["SmolLM2-135M-Instruct (from Q4_1 weights)"],
    }


def hostile_result() -> dict[str, Any]:
    """The same with text in every free field that would run if it were ever taken for markup."""
    result = copy.deepcopy(example_result())
    script, close, attribute, template = HOSTILE
    result["profile"] = "smoke"
    result["title"] = script
    result["methods"][0]["name"] = attribute
    result["methods"][1]["name"] = script + "x" * 90
    result["methods"][0]["metrics"][0]["metric"] = close
    for metric in result["methods"][0]["metrics"][2:]:
        metric["tags"] = {attribute: close, **metric["tags"]}
    for claim in result["claims"]:
        claim["text"] = script + template
        for part in claim["parts"]:
            part.update(text=close, rule=attribute, note=close)
    result["claims"][0]["id"] = attribute
    result["figures"][0]["caption"] = close
    result["settings"] = {attribute: close, "items": script}
    result["stages"][0].update(failed=script, args={close: attribute})
    result["models"] = [close]
    result["command"] = script
    result["code"].update(dirty=True, commit=script)
    return result


def write_run(folder: Path, result: dict[str, Any]) -> Path:
    """Write `result` as a run folder with two records and the figure in both colours."""
    (folder / "figures").mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "records.jsonl").write_text('{"method": "a"}\n{"method": "b"}\n')
    for ending, back, ink in (("svg", "#ffffff", "#211f1b"), ("dark.svg", "#1e1d19", "#ece8df")):
        bars = "".join(
            f'<rect x="{48 + 22 * i}" y="{150 - max(c, 0) * 300:.1f}" width="15" height="{abs(c) * 300:.1f}" '
            f'fill="{"#9a6400" if c < 0 else "#7f8fa6"}"/>'
            for i, c in enumerate(COSINES)
        )
        (folder / "figures" / f"adjacent.{ending}").write_text(SVG.format(back=back, ink=ink, bars=bars))
    return folder
