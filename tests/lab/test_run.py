"""`gnomon.run` end to end on the toy study: resume, locks, refusals, report --check, accept, compare."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from filelock import FileLock

import gnomon
from gnomon.core import files
from gnomon.core.errors import GnomonError, UsageError
from gnomon.lab import accept as accepting
from gnomon.lab.accept import accept
from gnomon.lab.check import check, remake
from gnomon.lab.compare import compare
from gnomon.lab.provenance import own_sources
from gnomon.lab.records import comparable, read_records
from gnomon.lab.result import load_result
from gnomon.lab.run import find_study, run_name
from gnomon.systems import SYSTEMS

TOY = str(Path(__file__).with_name("toy.py"))
PLANNED = next(system.slug for system in SYSTEMS if system.status == "planned")


@pytest.fixture
def run(tmp_path):
    return lambda **kwargs: gnomon.run(TOY, runs=tmp_path / "runs", **kwargs)


def test_a_run_leaves_a_complete_folder(run):
    result = run()
    folder = result.dir
    assert {p.name for p in folder.iterdir()} >= {
        "config.yaml", "stages", "records.jsonl", "result.json", "figures", "report.html",
    }  # fmt: skip
    assert {p.name for p in (folder / "figures").iterdir()} == {"totals.svg", "totals.dark.svg"}
    assert result.data["figures"][0]["caption"] == "Totals per step: the toy's only figure."
    assert not list(folder.glob("stages/*/checkpoint"))
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)


def test_the_verdict_follows_from_the_records(run):
    # toy doubles by construction exceed the baseline by 1, 1.01 and 1.02 in the three seeds.
    claim = run().data["claims"][0]
    assert (claim["id"], claim["verdict"], claim["grade"]) == ("toy.1", "holds", "T")
    assert claim["parts"][0]["estimate"] == pytest.approx(1.01) and claim["parts"][0]["n"] == 3


def test_the_same_command_prints_the_finished_run(run, tmp_path):
    log = tmp_path / "log"
    first = run(overrides={"log": str(log)})
    lines = log.read_text()
    assert run(overrides={"log": str(log)}).data == first.data
    assert log.read_text() == lines


def test_again_makes_a_new_run_and_is_then_the_newest(run):
    first, second = run(), run(again=True)
    assert second.dir.name == f"{first.dir.name}-2"
    assert run().dir == second.dir
    assert comparable(read_records(first.dir / "records.jsonl")) == comparable(
        read_records(second.dir / "records.jsonl")
    )


def test_a_second_writer_is_refused(run):
    folder = run().dir
    (folder / "report.html").unlink()
    with FileLock(folder / ".lock"), pytest.raises(GnomonError, match="Another process is writing"):
        run()


def test_a_changed_study_stops_unless_accepted_and_then_says_so(tmp_path):
    study = tmp_path / "mine.py"
    study.write_text(Path(TOY).read_text())
    arguments = {"runs": tmp_path / "runs"}
    folder = gnomon.run(str(study), **arguments).dir
    (folder / "report.html").unlink()
    study.write_text(study.read_text() + "\n# changed\n")
    with pytest.raises(GnomonError, match="--accept-changed-code"):
        gnomon.run(str(study), **arguments)
    result = gnomon.run(str(study), **arguments, accept_changed_code=True)
    assert len(result.data["code"]["accepted_changes"]) == 1


def test_a_finished_run_of_other_code_is_shown_and_says_so(tmp_path):
    study = tmp_path / "mine.py"
    study.write_text("import helper\n" + Path(TOY).read_text())
    (tmp_path / "helper.py").write_text("CONSTANT = 1\n")
    told = []
    first = gnomon.run(str(study), runs=tmp_path / "runs", progress=told.append)
    told.clear()
    gnomon.run(str(study), runs=tmp_path / "runs", progress=told.append)
    assert told == []
    (tmp_path / "helper.py").write_text("CONSTANT = 2\n")
    assert gnomon.run(str(study), runs=tmp_path / "runs", progress=told.append).data == first.data
    assert len(told) == 1 and "--again runs the present one" in told[0]


def test_the_copy_of_a_study_has_runs_of_its_own(tmp_path):
    # `gnomon cp tlcm .` gives a file of the same name with the same settings.
    package, own = find_study("tlcm"), tmp_path / "tlcm.py"
    own.write_text((Path(gnomon.__file__).parent / "studies" / "tlcm.py").read_text())
    names = {run_name(study, "cpu", {}) for study in (package, find_study(str(own)))}
    assert len(names) == 2


def test_own_sources_are_the_study_and_what_it_imports_beside_it(tmp_path):
    (tmp_path / "kit").mkdir()
    for name, text in {
        "study.py": "import os, one\nfrom kit import two\nfrom kit.three import x\n",
        "one.py": "def f():\n    import four\n",
        "four.py": "import study\n",
        "kit/__init__.py": "",
        "kit/two.py": "from . import five\n",
        "kit/three.py": "",
        "kit/five.py": "",
        "unused.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    found = {path.relative_to(tmp_path).as_posix() for path in own_sources(tmp_path / "study.py")}
    assert found == {
        "study.py", "one.py", "four.py", "kit/__init__.py", "kit/two.py", "kit/three.py", "kit/five.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("study", "arguments", "message"),
    [
        ("tlcmm", {}, "'tlcm'"),
        (PLANNED, {}, "planned"),
        ("no/such.py", {}, "does not exist"),
        (TOY, {"profile": "smok"}, "'smoke'"),
        (TOY, {"overrides": {"step": "3"}}, "'steps'"),
        (TOY, {"model": "x"}, "no setting `model`"),
        (TOY, {"jobs": 0}, "at least 1"),
        (TOY, {"rivals": ("a=b:c",)}, "no interchangeable"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_written(tmp_path, study, arguments, message):
    with pytest.raises(UsageError, match=message):
        gnomon.run(study, runs=tmp_path / "runs", **arguments)
    assert not list((tmp_path / "runs").rglob("*.yaml"))


def test_no_disk_space_is_said_before_work(run, monkeypatch, tmp_path):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    with pytest.raises(GnomonError, match="MB free"):
        run()
    assert not list((tmp_path / "runs").rglob("config.yaml"))


def test_a_run_folder_of_another_version_is_refused(run):
    folder = run().dir
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "schema_version": 99}))
    (folder / "report.html").unlink()
    with pytest.raises(GnomonError, match="schema_version 99"):
        run()
    data = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**data, "schema_version": 99}))
    with pytest.raises(GnomonError, match="schema_version 99"):
        load_result(folder)


def test_check_agrees_and_notices_a_doctored_verdict_and_record(run):
    folder = run().dir
    assert check(folder) == []
    data = json.loads((folder / "result.json").read_text())
    data["claims"][0]["verdict"] = "fails"
    (folder / "result.json").write_text(json.dumps(data))
    assert any("claims[0].verdict" in line for line in check(folder))
    data["claims"][0]["verdict"] = "holds"
    (folder / "result.json").write_text(json.dumps(data))
    records = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(records.replace('"seed":2', '"seed":3'))
    assert any("records.jsonl" in line for line in check(folder))


def test_remake_draws_again_and_leaves_the_numbers(run):
    folder = run().dir
    before = load_result(folder).data
    (folder / "figures" / "totals.svg").unlink()
    remake(folder)
    assert (folder / "figures" / "totals.svg").exists() and load_result(folder).data == before


def test_no_path_reaches_records_or_results(tmp_path):
    file = tmp_path / "private" / "corpus.txt"
    file.parent.mkdir()
    file.write_text("text")
    folder = gnomon.run(TOY, runs=tmp_path / "runs", overrides={"data": str(file)}).dir
    for name in ("records.jsonl", "result.json", "report.html"):
        assert "private" not in (folder / name).read_text(), name
    assert "private" in (folder / "config.yaml").read_text()


def test_accept_refuses_what_is_not_evidence(run, tmp_path, monkeypatch):
    with pytest.raises(GnomonError, match=r"not by a study of this package.*profile is 'cpu'"):
        accept(run().dir, into=tmp_path)
    folder = run(profile="full").dir
    config = yaml.safe_load((folder / "config.yaml").read_text())
    data = json.loads((folder / "result.json").read_text())

    def as_system(folder):
        """The run's own config, as if a study of the package had made it."""
        return {**config, "study": "tlcm", "code": load_result(folder).data["code"]}

    monkeypatch.setattr(accepting, "read_config", as_system)
    monkeypatch.setattr(accepting, "check", lambda folder: [])
    head = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    clean = {"hash": "0", "commit": head, "dirty": False, "accepted_changes": []}
    for change, message in (
        ({"dirty": True}, "uncommitted changes"),
        ({"commit": None}, "not started from a commit"),
        ({"commit": "0" * 40}, "not an ancestor"),
        ({"accepted_changes": ["1"]}, "changed code"),
    ):
        (folder / "result.json").write_text(json.dumps({**data, "code": {**clean, **change}}))
        with pytest.raises(GnomonError, match=message):
            accept(folder, into=Path(__file__).parent)
    if head:
        (folder / "result.json").write_text(json.dumps({**data, "code": clean}))
        monkeypatch.setattr(accepting, "git", lambda *arguments, folder: "")
        assert json.loads(accept(folder, into=tmp_path).read_text())["code"] == clean


def test_compare_marks_unequal_budgets(run):
    rows = compare([run().dir, run(overrides={"steps": "5"}).dir])
    double = next(row for row in rows if row["metric"] == "double" and row["method"] == "base")
    assert double["note"] == "" and len([k for k in double if k.startswith("cpu ")]) == 2
    assert next(row for row in rows if row["method"] == "toy")["note"] == ""
    with pytest.raises(UsageError, match="at least two"):
        compare([run().dir])


def test_compare_tells_runs_of_equal_settings_apart(run, tmp_path):
    first = run()
    other = tmp_path / "elsewhere"
    shutil.copytree(first.dir, other)
    result = json.loads((other / "result.json").read_text())
    result["methods"][0]["metrics"][0]["mean"] = 77.0
    (other / "result.json").write_text(json.dumps(result))
    row = compare([first.dir, other])[0]
    assert list(row)[:4] == ["method", "metric", "tags", "unit"]
    numbers = [text for name, text in row.items() if name.startswith("cpu ")]
    assert len(numbers) == 2 and sum(text.startswith("77") for text in numbers) == 1
    with pytest.raises(UsageError, match="twice"):
        compare([first.dir, first.dir])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result.json", b'{"schema_version": 1}', "lacks"),
        ("config.yaml", b"schema_version: 1\n", "lacks"),
        ("config.yaml", b"\xff", "damaged"),
    ],
)
def test_a_damaged_file_is_named(run, file, content, message):
    folder = run().dir
    (folder / file).write_bytes(content)
    with pytest.raises(GnomonError, match=rf"{file}.*{message}"):
        check(folder)


def test_the_command_to_repeat_a_run_is_quoted_and_holds_no_path(run, tmp_path):
    text = tmp_path / "it's here.txt"
    text.write_text("words")
    result = run(overrides={"data": str(text), "log": ""})
    words = shlex.split(result.data["command"])
    assert words[:2] == ["gnomon", "run"] and words[4].startswith("data=it's here.txt@sha256:")
    assert str(tmp_path) not in result.data["command"]


@pytest.mark.parametrize("instead", ["raise ValueError('no')", "raise SystemExit", "return"])
def test_a_figure_that_fails_does_not_cost_the_run(tmp_path, instead):
    study = tmp_path / "mine.py"
    text = Path(TOY).read_text()
    study.write_text(text.replace("import matplotlib.pyplot as plt\n\n    fig", f"{instead}\n    fig"))
    lines = []
    result = gnomon.run(str(study), runs=tmp_path / "runs", progress=lines.append)
    assert result.data["figures"] == [] and any("totals could not be drawn" in line for line in lines)


RANKED = """
import os, sys, time, gnomon, gnomon.lab.run as run
from gnomon.lab.ranks import Ranks

late, finished = int(os.environ["RANK"]), run._finished
run._finished = lambda folder: (time.sleep(late), finished(folder))[1]
result = gnomon.run(sys.argv[1], runs=sys.argv[2])
Ranks.from_environment().wait()  # until the other one has read its result, too
if not late:
    (result.dir / "result.json").unlink()  # as after a kill before the last step: all that is left takes no time
Ranks.from_environment().wait()
result = gnomon.run(sys.argv[1], runs=sys.argv[2])
print(end="verdict " + result.data["claims"][0]["verdict"] + ";")
"""


def test_ranks_of_a_launcher_share_one_run(run, tmp_path):
    """One rank looks late whether the run is finished, as on a busy machine: it must not leave the other alone."""
    script = tmp_path / "ranked.py"
    script.write_text(RANKED)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script), TOY, str(tmp_path / "ranked")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("verdict holds;") == 2
    (folder,) = (tmp_path / "ranked" / "toy").iterdir()
    assert comparable(read_records(folder / "records.jsonl")) == comparable(
        read_records(run().dir / "records.jsonl")
    )


RIVAL = """
def triple(value):
    return 3 * value
"""


def with_rivals(tmp_path):
    """A copy of the toy study that takes rivals, and a module that offers one."""
    text = Path(TOY).read_text()
    text = text.replace(
        "    disk_bytes:", '    rival_protocol: ClassVar[str] = "factory(value) -> value"\n    disk_bytes:'
    )
    text = text.replace(
        "        lab.stage(timing",
        "        for name, target in self.rival_targets.items():\n"
        "            lab.stage(outside, name=name, target=target)\n"
        "        lab.stage(timing",
    )
    text += """

def outside(ctx, *, name, target):
    from gnomon.lab import load_rival

    ctx.record(method=name, metric="double", value=load_rival(target)(2.0))
"""
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "my_rival.py").write_text(RIVAL)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_rival_competes_and_its_source_counts_as_code(tmp_path, monkeypatch, jobs):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rival", raising=False)
    study = with_rivals(tmp_path)
    result = gnomon.run(study, runs=tmp_path / "runs", jobs=jobs, rivals=("mine=my_rival:triple",))
    table = result.frame()
    assert table[table.method == "mine"].value.tolist() == [6.0]
    assert "--with mine=my_rival:triple" in result.data["command"]
    (result.dir / "report.html").unlink()
    (tmp_path / "my_rival.py").write_text(RIVAL + "# changed")
    with pytest.raises(GnomonError, match="The code changed"):
        gnomon.run(study, runs=tmp_path / "runs", rivals=("mine=my_rival:triple",))


@pytest.mark.parametrize(
    ("rival", "message"),
    [("mine", "name=module:factory"), ("mine=nowhere:f", "can't be imported"), ("mine=json:lods", "'loads'")],
)
def test_a_rival_that_is_not_there_is_refused_before_work(tmp_path, rival, message):
    with pytest.raises(UsageError, match=message):
        gnomon.run(with_rivals(tmp_path), runs=tmp_path / "runs", rivals=(rival,))
    assert not (tmp_path / "runs").exists()


def test_accept_notices_a_result_that_its_own_config_contradicts(run, tmp_path):
    folder = run(profile="full").dir
    data = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**data, "profile": "gpu", "settings": {}}))
    with pytest.raises(GnomonError, match=r"config\.yaml disagree about profile, settings"):
        accept(folder, into=tmp_path)


def test_a_study_with_a_syntax_error_is_named_with_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UsageError, match=r"broken\.py, line 2 can't be read as a study"):
        gnomon.run(str(tmp_path / "broken.py"), runs=tmp_path / "runs")


def test_a_report_is_not_made_while_the_run_is_written(run):
    folder = run().dir
    with FileLock(folder / ".lock"), pytest.raises(GnomonError, match="Another process is writing"):
        remake(folder)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ('lab.claim("tlcm.9", rule=rule, grade="T")', r"'tlcm\.9'.*Did you mean"),
        ('lab.claim("tlcm.1", rule=rule, grade="T")', r"'tlcm\.1'.*'tlcm\.1 a'"),  # the row has parts
        (
            'lab.claim("tlcm.2", rule=rule, grade="T")',
            r"no rule for what its card claims: tlcm\.1 a, tlcm\.1 b",
        ),
    ],
)
def test_a_study_judges_what_its_card_claims_and_nothing_else(tmp_path, claims, message):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from gnomon.lab import StudyConfig\nfrom gnomon.lab.claims import FullScale\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(StudyConfig):\n"
        "    slug: ClassVar[str] = 'tlcm'\n\n"
        f"    def run(self, lab):\n        rule = FullScale('no')\n        {claims}\n"
    )
    with pytest.raises(GnomonError, match=message):
        gnomon.run(str(tmp_path / "mine.py"), runs=tmp_path / "runs")
