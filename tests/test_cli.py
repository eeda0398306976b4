"""The command line against doubles of the functions it calls: what it passes on, prints and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnomon import cli
from gnomon.console import print_table, say
from gnomon.core.errors import GnomonError
from gnomon.systems import SYSTEMS

PLANNED = next(system.slug for system in SYSTEMS if system.status == "planned")
Call = tuple[tuple[Any, ...], dict[str, Any]]
Double = Callable[..., list[Call]]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    """`double("gnomon.lab.run", "run", returns=…)` replaces it and returns its calls."""

    def replace(
        module: str, function: str, returns: Any = None, raises: BaseException | None = None
    ) -> list[Call]:
        calls: list[Call] = []

        def fake(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            if raises is not None:
                raise raises
            return returns

        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: fake}))
        return calls

    return replace


CLAIM = {"id": "tlcm.1", "verdict": "fails", "text": "Adjacent layers counteract each other."}
RESULT = SimpleNamespace(
    dir=Path("runs/tlcm/abc"),
    report=Path("runs/tlcm/abc/report.html"),
    data={"claims": [CLAIM], "stages": [{"key": "capture-1", "failed": None}]},
)


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`gnomon ARGUMENTS` in a new process that reports on stderr whether torch was loaded."""
    code = (
        "import atexit, sys; from gnomon.cli import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


# -- help, misuse -------------------------------------------------------------------------------------


def test_help_is_quick_and_needs_no_torch() -> None:
    before = os.times()
    done = fresh("--help")
    after = os.times()
    assert (done.returncode, done.stderr.strip()) == (0, "False")
    assert all(command in done.stdout for command in cli.COMMANDS)
    computing = after.children_user - before.children_user + after.children_system - before.children_system
    assert computing < 1  # seconds on the processor: what it takes on a machine that does nothing else


def test_help_of_every_command_needs_no_torch() -> None:
    code = (
        "import sys; from gnomon import cli\n"
        "for name in cli.COMMANDS:\n"
        "    try: cli.main([name, '--help'])\n"
        "    except SystemExit as done: assert done.code == 0, name\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: gnomon") == len(cli.COMMANDS)


def test_python_m_gnomon_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gnomon", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gnomon ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu", "tlcm"], "Unknown command 'rnu'. Did you mean 'run'?"),
        (["run", "tclm"], "Unknown system 'tclm'. Did you mean 'tlcm'"),
        (["show", "numoun"], "Did you mean 'numuon'"),
        (["cp", "nf21"], "Did you mean 'nf12'"),
        (["run", "tlcm", "-o", "layers"], "-o takes FIELD=VALUE, got 'layers'."),
        (["run", "tlcm", "-o", "=3"], "-o takes FIELD=VALUE"),
        (["run", "tlcm", "-o", "a=1", "-o", "a=2"], "-o gives 'a' twice: '1' and '2'."),
        (["run", "tlcm", "--with", "mine"], "--with takes NAME=MODULE:FACTORY, got 'mine'."),
        (["run", "tlcm", "--jobs", "0"], "--jobs must be at least 1, got 0."),
        (["cp", PLANNED], f"{PLANNED} is planned and has no study yet."),
    ],
)
def test_misuse_says_what_is_wrong_and_exits_with_2(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # one that goes through after all must not write into this tree
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


@pytest.mark.parametrize(
    "words", [[], ["run"], ["run", "tlcm", "--job", "2"], ["run", "tlcm", "--jobs", "two"]]
)
def test_tyros_own_refusals_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(words)
    assert refusal.value.code == 2
    capsys.readouterr()


# -- ls -----------------------------------------------------------------------------------------------


def test_ls_in_a_pipe_is_one_tab_separated_line_per_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[2]) for line in lines] == [(s.slug, s.status) for s in SYSTEMS]
    assert {len(line) for line in lines} == {5}


def test_ls_json_holds_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["slug"] for row in rows] == [s.slug for s in SYSTEMS]
    assert {"name", "family", "status", "study", "apply", "extras"} <= set(rows[0])


def test_ls_on_a_terminal_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["ls"]) == 0
    out = capsys.readouterr().out
    assert out.split()[:2] == ["slug", "family"] and "\t" not in out


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m gnomon ls | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "0" and done.stderr == ""


# -- run ----------------------------------------------------------------------------------------------


def test_run_passes_every_option_on(double: Double, capsys: pytest.CaptureFixture[str]) -> None:
    calls = double("gnomon.lab.run", "run", RESULT)
    words = "run set_llm --model tiny:llama -p full -o note=a=b --option lr=-1e-3 -j 2 --runs out --again"
    words += " --accept-changed-code --with mine=my.module:make --with b=c:d"
    assert cli.main(words.split()) == 0
    [(args, kwargs)] = calls
    assert callable(kwargs.pop("progress"))
    assert args == ("set_llm",)
    assert kwargs == {
        "model": "tiny:llama",
        "profile": "full",
        "overrides": {"note": "a=b", "lr": "-1e-3"},
        "jobs": 2,
        "runs": Path("out"),
        "again": True,
        "accept_changed_code": True,
        "rivals": ("mine=my.module:make", "b=c:d"),
    }
    out, err = capsys.readouterr()
    assert "tlcm.1\tfails\tAdjacent layers" in out  # a claim that fails is printed like one that holds
    assert str(RESULT.dir) in out and str(RESULT.report) in out
    assert "; gnomon.run('set_llm', model='tiny:llama', profile='full', overrides={'note': 'a=b'" in err


def test_run_takes_a_file_and_prints_the_shortest_call(
    double: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = double("gnomon.lab.run", "run", RESULT)
    assert cli.main(["run", "./mine.py"]) == 0
    assert calls[0][0] == ("./mine.py",)
    assert "Python: import gnomon; gnomon.run('./mine.py')\n" in capsys.readouterr().err


def test_a_failed_stage_is_named_and_the_run_is_done(
    double: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"key": "train-1", "failed": "loss is nan"}, {"key": "train-2", "failed": None}]
    double(
        "gnomon.lab.run", "run", SimpleNamespace(**{**vars(RESULT), "data": {"claims": [], "stages": stages}})
    )
    assert cli.main(["run", "tlcm"]) == 0
    err = capsys.readouterr().err
    assert "Stage train-1 failed: loss is nan" in err and "train-2" not in err


@pytest.mark.parametrize("terminal", [True, False])
def test_what_files_say_does_not_steer_the_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hostile gnomon.json names a method with escape sequences; `gnomon check` prints its steps."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_table(("folder", "x"), [("steps", "\x1b[2J\x07nf12")])
    say("Error: \x1b[2Jbad")
    captured = capsys.readouterr()
    assert "[2Jnf12" in captured.out and "[2Jbad" in captured.err
    assert not {"\x1b", "\x07"} & set(
        captured.out.replace("\x1b[1m", "").replace("\x1b[0m", "") + captured.err
    )


def test_an_interrupted_run_says_how_to_go_on(double: Double, capsys: pytest.CaptureFixture[str]) -> None:
    double("gnomon.lab.run", "run", raises=KeyboardInterrupt())
    assert cli.main(["run", "tlcm", "-o", "note=two words"]) == 130
    assert "goes on from here: gnomon run tlcm -o 'note=two words'" in capsys.readouterr().err
    assert cli.main(["run", "tlcm", "--again"]) == 130
    assert capsys.readouterr().err.endswith("goes on from here: gnomon run tlcm\n")


def test_what_the_system_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    toy = str(Path(__file__).parent / "lab" / "toy.py")
    assert cli.main(["run", toy, "--runs", str(tmp_path / "file" / "runs")]) == 1
    error = capsys.readouterr().err
    assert "Error: [Errno" in error and "Traceback" not in error


@pytest.mark.parametrize("switch", ["--debug", "GNOMON_DEBUG"])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    switch: str, double: Double, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    double("gnomon.lab.run", "run", raises=GnomonError("the disk is full"))
    assert cli.main(["run", "tlcm"]) == 1
    assert capsys.readouterr().err.endswith("Error: the disk is full\n")
    if switch == "GNOMON_DEBUG":
        monkeypatch.setenv(switch, "1")
        words = ["run", "tlcm"]
    else:
        words = ["run", "tlcm", switch]
    assert cli.main(words) == 1
    assert "Traceback" in capsys.readouterr().err


# -- the other commands -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "module", "function", "call", "python"),
    [
        ("report runs/a", "gnomon.lab.check", "remake", ((Path("runs/a"), say), {}), "(Path('runs/a'))"),
        ("report runs/a --check", "gnomon.lab.check", "check", ((Path("runs/a"),), {}), "(Path('runs/a'))"),
        (
            "accept runs/a",
            "gnomon.lab.accept",
            "accept",
            ((Path("runs/a"),), {"into": None}),
            "(Path('runs/a'))",
        ),
        (
            "accept runs/a --into x",
            "gnomon.lab.accept",
            "accept",
            ((Path("runs/a"),), {"into": Path("x")}),
            "(Path('runs/a'), into=Path('x'))",
        ),
        ("board", "gnomon.lab.board", "build", ((Path("site"),), {}), "(Path('site'))"),
        (
            "fetch smollm2-135m --wheel w.whl",
            "gnomon.core.smollm2",
            "fetch",
            (("smollm2-135m",), {"wheel": Path("w.whl")}),
            "('smollm2-135m', wheel=Path('w.whl'))",
        ),
        (
            "compare a b",
            "gnomon.lab.compare",
            "compare",
            (([Path("a"), Path("b")],), {}),
            "([Path('a'), Path('b')])",
        ),
        ("show set_llm", "gnomon.lab.show", "show", (("set_llm",), {}), None),
    ],
)
def test_each_command_calls_its_function_and_prints_the_python_for_it(
    words: str,
    module: str,
    function: str,
    call: Call,
    python: str | None,
    double: Double,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = double(module, function, [{}] if function == "compare" else "")
    assert cli.main(words.split()) == 0
    assert calls == [call]
    if python is not None:
        imports = f"import {module}" + ("; from pathlib import Path" if "Path(" in python else "")
        assert f"Python: {imports}; {module}.{function}{python}\n" in capsys.readouterr().err


def test_report_check_lists_the_differences_and_fails(
    double: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    double("gnomon.lab.check", "check", ["tlcm.1: verdict is 'holds', records give 'fails'"])
    assert cli.main(["report", "runs/a", "--check"]) == 1
    assert "records give 'fails'" in capsys.readouterr().err


def test_compare_prints_its_rows(double: Double, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"metric": "loss", "cpu a": "1.8 [1.7, 1.9]"}, {"metric": "bytes", "cpu a": "269"}]
    double("gnomon.lab.compare", "compare", rows)
    assert cli.main(["compare", "a", "b"]) == 0
    assert capsys.readouterr().out == "metric\tcpu a\nloss\t1.8 [1.7, 1.9]\nbytes\t269\n"
    assert cli.main(["compare", "a", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_eval_passes_its_options_on_and_prints_the_report(
    double: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(
        rows=lambda: [("", "m", "n"), ("perplexity", "18.8", "20.1")], to_json=lambda: "{}\n"
    )
    calls = double("gnomon.core.evaluate", "eval", found)
    assert cli.main("eval m --against n --text f.txt --window 64".split()) == 0
    assert calls == [(("m",), {"against": "n", "text": "f.txt", "window": 64, "max_tokens": 8192})]
    out, err = capsys.readouterr()
    assert out == "\tm\tn\nperplexity\t18.8\t20.1\n"
    assert "gnomon.eval('m', against='n', text='f.txt', window=64, max_tokens=8192)" in err
    assert cli.main(["eval", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


# -- cp -----------------------------------------------------------------------------------------------


def test_cp_copies_the_study_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "somewhere"
    package.mkdir()
    (package / "toy_study.py").write_text("original = True\n")
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr("gnomon.systems.find", lambda slug: SimpleNamespace(slug=slug, study="toy_study"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cp", "toy", "."]) == 0
    assert "gnomon run toy_study.py" in capsys.readouterr().out
    copy = tmp_path / "toy_study.py"
    assert copy.read_text() == "original = True\n"
    copy.write_text("mine = True\n")
    assert cli.main(["cp", "toy", "."]) == 2
    assert "toy_study.py exists. Choose another name or pass --force" in capsys.readouterr().err
    assert copy.read_text() == "mine = True\n"
    assert cli.main(["cp", "toy", ".", "--force"]) == 0
    assert copy.read_text() == "original = True\n"
    assert cli.main(["cp", "toy", "new/other.py"]) == 0
    assert (tmp_path / "new/other.py").exists()
