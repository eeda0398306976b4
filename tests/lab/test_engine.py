"""Stages, keys, resume and workers. Truth: a plain uninterrupted run, and files looked at by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnomon.core import files
from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.lab.engine import Lab
from gnomon.lab.pool import WorkerPool
from gnomon.lab.records import comparable, read_records
from gnomon.lab.stage import StageContext, StageStore, stage_key

TOY = Path(__file__).with_name("toy.py")


def log_lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_nothing_runs_while_declaring(make_lab, tmp_path):
    log = tmp_path / "log"
    lab = make_lab(log=str(log))
    assert not log_lines(log) and len(lab.stages) == 8
    lab.execute()
    assert len(log_lines(log)) == 8


def test_records_come_in_declaration_order_with_stage_and_exclusive(make_lab):
    lab = make_lab(steps=2)
    lab.execute()
    records = lab.records()
    assert [r["metric"] for r in records[:4]] == ["total", "total", "double", "double"]
    assert [r["exclusive"] for r in records].count(True) == 1
    assert {r["seed"] for r in records[:4]} == {0} and records[4]["seed"] == 1
    assert all(r["stage"] in lab.stages for r in records)


def test_a_done_stage_never_runs_again(make_lab, tmp_path):
    log = tmp_path / "log"
    make_lab(log=str(log)).execute()
    make_lab(log=str(log)).execute()
    assert len(log_lines(log)) == 8


def test_keys_depend_on_name_arguments_and_inputs_only(make_lab):
    # Source of truth: the definition in words, spelled out.
    assert stage_key("f", {"a": 1, "b": 2}) == stage_key("f", {"b": 2, "a": 1})
    assert len({stage_key("f", {"a": 1}), stage_key("g", {"a": 1}), stage_key("f", {"a": 2})}) == 3
    short, long = make_lab("a", steps=2), make_lab("b", steps=3)
    assert set(short.stages) & set(long.stages) == {k for k, s in short.stages.items() if s.name == "timing"}


def test_portable_arguments_make_keys_independent_of_where_files_lie(toy, tmp_path):
    keys = []
    for folder in ("here", "there"):
        path = str(tmp_path / folder / "corpus.txt")
        lab = Lab(toy.config(), tmp_path, reference=toy.reference, portable={path: "corpus.txt@sha256:12"})
        handle = lab.stage(sys.modules[toy.config.__module__].diverge, seed=0, text=path)
        assert handle.stage.arguments["text"] == path and handle.stage.shown["text"] == "corpus.txt@sha256:12"
        keys.append(handle.key)
    assert keys[0] == keys[1]


def test_value_forces_a_stage_and_its_inputs_only(make_lab, toy, tmp_path):
    log = tmp_path / "log"
    lab = make_lab(log=str(log))
    module = sys.modules[toy.config.__module__]
    handle = lab.stage(
        module.double, of=lab.stage(module.counter, seed=1, steps=3, log=str(log)), log=str(log)
    )
    value = handle.value
    assert log_lines(log) == ["counter 1", "double 1"]
    assert value == json.loads((handle.done.dir / "done.json").read_text())["value"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_numerical_failure_ends_its_stage_not_the_run(make_lab, jobs):
    lab = make_lab(fail="diverge", jobs=jobs)
    lab.execute()
    failed = {
        s.name: lab.store.done(k)["failed"] for k, s in lab.stages.items() if lab.store.done(k)["failed"]
    }
    assert failed["diverge"] == "loss is nan at step 3"
    assert failed["double"].startswith("its input diverge failed")
    assert not [r for r in lab.records() if r["metric"] == "loss"], (
        "records of a diverged stage reached the run"
    )
    assert len([r for r in lab.records() if r["metric"] == "double"]) == 6


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bug_ends_the_run_after_the_other_stages(make_lab, jobs):
    lab = make_lab(fail="crash", jobs=jobs)
    with pytest.raises((RuntimeError, GnomonError), match="a bug"):
        lab.execute()
    undone = [s.name for k, s in lab.stages.items() if lab.store.done(k) is None]
    assert undone == ["crash"]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("fail", ["exit", "pipe"])
def test_a_stage_that_ends_the_process_or_breaks_a_pipe_is_an_error(make_lab, fail, jobs):
    # Uncaught, `sys.exit(0)` would end the command with success, and so would a broken pipe (`gnomon | head`).
    with pytest.raises(GnomonError, match=f"Stage {fail}"):
        make_lab(fail=fail, jobs=jobs).execute()


def test_a_worker_that_died_while_idle_is_an_error(make_lab):
    lab = make_lab()
    with WorkerPool(lab._reference, StageStore(lab.folder / "stages"), 1) as pool:
        (lab.folder / "stages").mkdir(parents=True)
        worker = pool._idle()
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(GnomonError, match="died"):
            pool.run(list(lab.stages.values()), on_done=lambda stage: None)


def test_the_outcome_of_a_failed_stage_names_no_folder_of_this_machine(make_lab, toy):
    lab = make_lab()
    handle = lab.stage(sys.modules[toy.config.__module__].misplaced)
    lab.execute()
    assert lab.store.done(handle.key)["failed"] == f"{handle.key}/loss.txt holds nan"


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\x1cb", "a\nb", "\0"])
def test_any_text_in_a_record_comes_back(tmp_path, text):
    context = StageContext(tmp_path, 0)
    context.record(method="m", metric=text, value=1.0, item=text, tags={"token": text})
    assert read_records(tmp_path / "records.jsonl") == context.snapshot()


def test_figures_need_names_of_their_own(make_lab):
    lab = make_lab()
    for figure in (lambda records, done, path: None, lab.figures[0]):
        with pytest.raises(UsageError, match="a name of its own"):
            lab.figure(figure)


def test_jobs_do_not_change_the_records(make_lab):
    serial, parallel = make_lab("a"), make_lab("b", jobs=2)
    serial.execute()
    parallel.execute()
    assert comparable(serial.records()) == comparable(parallel.records())
    assert len(comparable(serial.records())) == len(serial.records()) - 1


def test_exclusive_stages_run_alone(make_lab, tmp_path):
    log = tmp_path / "log"
    lab = make_lab(jobs=2, log=str(log))
    lab.execute()
    began, ended = map(float, next(line for line in log_lines(log) if line.startswith("timing")).split()[1:])
    others = [s for s in lab.stages.values() if not s.exclusive]
    finished = [(lab.store.folder(s.key) / "done.json").stat().st_mtime for s in others]
    assert all(moment <= began or moment >= ended for moment in finished)


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"x": object()}, "JSON values and handles"), ({"x": {1, 2}}, "JSON values and handles")],
)
def test_arguments_that_are_not_json_are_refused(make_lab, toy, argument, message):
    with pytest.raises(UsageError, match=message):
        make_lab().stage(sys.modules[toy.config.__module__].diverge, **argument)


def test_a_lambda_is_refused(make_lab):
    with pytest.raises(UsageError, match="module-level"):
        make_lab().stage(lambda ctx: None)


def test_a_handle_of_another_run_is_refused(make_lab, toy):
    module = sys.modules[toy.config.__module__]
    foreign = make_lab("a").stage(module.diverge, seed=0)
    with pytest.raises(UsageError, match="another run"):
        make_lab("b").stage(module.double, of=foreign, log="")


def test_a_changed_records_file_is_noticed(make_lab):
    lab = make_lab()
    lab.execute()
    key = next(iter(lab.stages))
    file = lab.store.folder(key) / "records.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(GnomonError, match=r"holds 2 records, done.json counted 3"):
        lab.records()


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"function": "counter"}'])
def test_a_damaged_done_file_is_named(make_lab, content):
    make_lab("a").execute()
    again = make_lab("a")
    (again.store.folder(next(iter(again.stages))) / "done.json").write_text(content)
    with pytest.raises(GnomonError, match=r"done\.json is (damaged|not valid JSON)"):
        again.execute()


def test_stages_are_seeded_and_leave_global_state_alone(tmp_path):
    import numpy as np
    import torch

    store = StageStore(tmp_path)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    drawn = []
    from gnomon.core.seeding import seeded

    for _ in range(2):
        with seeded(5):
            drawn.append((torch.rand(1).item(), np.random.rand()))
    assert drawn[0] == drawn[1] and store.done("nothing") is None
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_nan_records_are_a_numerical_failure(tmp_path):
    with pytest.raises(NumericalFailure, match="loss is nan"):
        StageContext(tmp_path, 0).record(method="m", metric="loss", value=float("nan"))


# --- kill tests ----------------------------------------------------------------------------------------------


class Fault(BaseException):
    """Not an Exception, so that nothing may swallow it: as a kill would."""


def inject(monkeypatch, at: int) -> list[int]:
    """Let the `at`-th durable step (write, fsync or rename) of `core.files` raise; a write is cut in half."""
    count = [0]

    def guard(original, half=None):
        def step(*arguments):
            count[0] += 1
            if count[0] == at:
                if half is not None:
                    half(*arguments)
                raise Fault
            return original(*arguments)

        return step

    def cut(file, data):
        file.write(data[: len(data) // 2])
        file.flush()

    monkeypatch.setattr(files, "_write", guard(files._write, cut))
    monkeypatch.setattr(files, "_fsync", guard(files._fsync))
    monkeypatch.setattr(files, "_replace", guard(files._replace))
    return count


def test_a_fault_at_any_write_leaves_a_run_that_goes_on_to_equal_records(make_lab, monkeypatch, tmp_path):
    settings = {"steps": 2, "seeds": (0, 1)}
    straight = make_lab("straight", **settings)
    with monkeypatch.context() as patch:
        steps = inject(patch, at=-1)
        straight.execute()
    expected = comparable(straight.records())
    assert steps[0] > 60
    for at in range(1, steps[0] + 1):
        with monkeypatch.context() as patch:
            inject(patch, at)
            with pytest.raises(Fault):
                make_lab(f"fault{at}", **settings).execute()
        for done in (tmp_path / f"fault{at}" / "stages").glob("*/done.json"):
            json.loads(done.read_text())  # whole or absent
        again = make_lab(f"fault{at}", **settings)
        again.execute()
        assert comparable(again.records()) == expected, f"fault at step {at}"
        assert not list((tmp_path / f"fault{at}").rglob("*.tmp")), "a temporary file was left behind"


SCRIPT = """
import sys
from pathlib import Path
from gnomon.lab.engine import Lab
from gnomon.lab.run import find_study
toy = find_study(sys.argv[1])
config = toy.config.resolve("cpu", {"steps": 6, "log": sys.argv[3]})
lab = Lab(config, Path(sys.argv[2]), reference=toy.reference, jobs=int(sys.argv[4]))
config.run(lab)
lab.execute()
"""


def start_held(folder, log, *, jobs, seed):
    """The toy study in a process of its own, once its counter of `seed` hangs behind a checkpoint at step 4."""
    command = [sys.executable, "-c", SCRIPT, str(TOY), str(folder), str(log), str(jobs)]
    process = subprocess.Popen(command, env={**os.environ, "TOY_HOLD": str(seed)})
    while not any(held(file, seed) for file in folder.glob("stages/*/checkpoint/state.json")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    return process


def held(file, seed):
    records = json.loads(file.read_text())["records"]
    return len(records) == 4 and records[0]["seed"] == seed


@pytest.mark.parametrize(("jobs", "seed"), [(1, 0), (1, 2), (2, 1)])
def test_sigkill_and_the_same_command_again_give_equal_records(make_lab, tmp_path, jobs, seed):
    log = tmp_path / "log"
    straight = make_lab("straight", steps=6, log=str(log))
    straight.execute()
    log.unlink()
    process = start_held(tmp_path / "killed", log, jobs=jobs, seed=seed)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = make_lab("killed", steps=6, log=str(log), jobs=jobs)
    left = [stage for key, stage in again.stages.items() if again.store.done(key) is None]
    assert left, "nothing was left to do"
    again.execute()
    assert comparable(again.records()) == comparable(straight.records())
    assert f"resumed {seed} at 4" in log_lines(log), "the killed stage began anew"
    counters = [line for line in log_lines(log) if line.startswith("counter")]
    assert set(counters) == {"counter 0", "counter 1", "counter 2"}
    unfinished = {
        f"counter {stage.seed}" for stage in left if stage.name == "counter"
    }  # beside the held one too
    assert all(counters.count(one) == 1 for one in set(counters) - unfinished), "a finished stage ran twice"


def test_workers_die_with_their_parent(tmp_path):
    process = start_held(tmp_path / "run", tmp_path / "log", jobs=2, seed=0)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
