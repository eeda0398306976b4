"""The engine of `gnomon apply`, with toy methods: what may be written, what is kept, what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from gnomon.core.applying import DENSE, ModelMethod, NoSettings, Source, TensorMethod, apply_method, recorded
from gnomon.core.checking import check_folder
from gnomon.core.checkpoints import Checkpoint, open_checkpoint
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.forms import Form
from gnomon.core.manifest import read_manifest
from gnomon.core.safe_files import Entry

WEIGHTS = {
    "odd": torch.arange(3, dtype=torch.float32).bfloat16(),
    "w": torch.arange(12, dtype=torch.float32).view(3, 4),
    "wide": torch.tensor([1, 2, 3]),
    "byte": torch.tensor([7], dtype=torch.uint8),
}


@dataclass(frozen=True)
class Factor:
    by: float = 2.0


def scale(checkpoint: Checkpoint, settings: Factor) -> Any:
    return lambda name, tensor: {name: tensor * settings.by} if tensor.is_floating_point() else None


def split(checkpoint: Checkpoint, settings: NoSettings) -> Any:
    """Matrices as two halves, under names of their own."""

    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        return {f"{name}.top": tensor[:1], f"{name}.rest": tensor[1:]} if tensor.ndim == 2 else None

    return convert


def own_name(stored: str) -> str:
    return stored.removesuffix(".top").removesuffix(".rest")


def group(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(checkpoint.entries, reverse=True):
        found[own_name(name)] = (*found.get(own_name(name), ()), name)
    return found


def join(name: str, stored: Any) -> torch.Tensor:
    return stored[name] if name in stored else torch.cat([stored[f"{name}.top"], stored[f"{name}.rest"]])


HALVES = Form(
    name="halves",
    group=group,
    decode=join,
    own_name=own_name,
    parts=2,
    config={"quantization_config": {"a": 1}},
)
SCALE = TensorMethod(name="scale", settings=Factor, prepare=scale)
SPLIT = TensorMethod(name="split", prepare=split, form=HALVES)


def write(folder: Path, weights: dict[str, torch.Tensor], *, shards: int = 1, **config: Any) -> Path:
    folder.mkdir(parents=True)
    content = json.dumps({"dtype": "bfloat16", "model_type": "llama", **config}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(content + "\n")
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, places = sorted(weights), {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = names[k::shards]
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_parameters": 19, "total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def source(folder: Path, form: Form | None = None) -> Source:
    checkpoint = open_checkpoint(folder)
    return Source(folder.name, checkpoint, form) if form else Source(folder.name, checkpoint)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", WEIGHTS)


def test_a_dense_method_changes_what_it_says_and_keeps_the_rest(model: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    done = apply_method(SCALE, source(model), tmp_path / "out", Factor(by=3.0))
    out = load_file(tmp_path / "out/model.safetensors")
    assert same(out, {k: v * 3 if v.is_floating_point() else v for k, v in WEIGHTS.items()})
    assert (tmp_path / "out/config.json").read_bytes() == before["config.json"]
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert (done.weights, done.tensors, done.converted) == (19, 4, 2)
    assert done.bytes_before == done.bytes_after == 79
    [step] = read_manifest(tmp_path / "out").steps
    assert (step.method, step.settings, step.input_name) == ("scale", {"by": 3.0}, "model")
    assert check_folder(source(tmp_path / "out")).tensors == 4
    with pytest.raises(GnomonError, match=r"odd: SHA-256 .* here, .* in model"):
        check_folder(source(tmp_path / "out"), against=source(model))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("shards", [1, 3])
def test_there_and_back_again(shards: int, tmp_path: Path) -> None:
    model = write(tmp_path / "model", WEIGHTS, shards=shards)
    apply_method(SPLIT, source(model), tmp_path / "halves", NoSettings())
    config = json.loads((tmp_path / "halves/config.json").read_text())
    weights = "gnomon.safetensors" if shards == 1 else "gnomon.safetensors.index.json"
    assert config == {
        "dtype": "bfloat16",
        "model_type": "gnomon_halves",
        "base_model_type": "llama",
        "gnomon_weights": weights,
        "quantization_config": {"a": 1},
    }
    assert not list((tmp_path / "halves").glob("model*"))
    stored = open_checkpoint(tmp_path / "halves")
    assert stored.entries.keys() == {"odd", "wide", "byte", "w.top", "w.rest"}
    back = apply_method(DENSE, source(tmp_path / "halves", HALVES), tmp_path / "back", NoSettings())
    assert [step.method for step in back.steps] == ["split", "dense"]
    assert back.steps[0].input_sha256 == back.steps[1].input_sha256  # the same weights, however stored
    for path in model.glob("*"):
        ours = tmp_path / "back" / path.name
        if path.suffix == ".safetensors":
            assert same(load_file(ours), load_file(path))
        elif "index" not in path.name:
            assert ours.read_bytes() == path.read_bytes()
    if shards > 1:
        index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
        places = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
        assert index == {"metadata": {"total_parameters": 19, "total_size": 79}, "weight_map": places}
    found = check_folder(source(tmp_path / "halves", HALVES), against=source(tmp_path / "back"))
    assert (found.tensors, found.converted, found.weights) == (4, 1, 19)


def test_tensors_lie_aligned(tmp_path: Path) -> None:
    """A reader maps them where they lie; one of an odd size in front of wide numbers would shift those."""
    weights = {name: torch.ones(3, dtype=torch.bfloat16) for name in "ac"} | {
        "b": torch.ones(2, 2).bfloat16()
    }
    form = Form(name="wide", group=group, decode=lambda name, stored: stored[name].bfloat16())
    method = TensorMethod(
        name="wide",
        form=form,
        prepare=lambda *_: lambda name, tensor: {"b": tensor.float()} if name == "b" else None,
    )
    apply_method(method, source(write(tmp_path / "model", weights)), tmp_path / "out", NoSettings())
    entries = open_checkpoint(tmp_path / "out").entries.values()
    assert [entry.name for entry in entries] == ["b", "a", "c"]
    assert all(entry.offset % entry.itemsize == 0 for entry in entries)


def test_float32_comes_back_from_a_form_that_holds_bfloat16(tmp_path: Path) -> None:
    narrow = Form(
        name="narrow",
        group=lambda checkpoint: {name.removesuffix(".n"): (name,) for name in checkpoint.entries},
        decode=lambda name, stored: next(iter(stored.values())),
    )
    method = TensorMethod(
        name="narrow", form=narrow, prepare=lambda *_: lambda name, tensor: {f"{name}.n": tensor.bfloat16()}
    )
    weights = {"w": torch.tensor([[1.5, -2.0]])}
    apply_method(method, source(write(tmp_path / "m", weights)), tmp_path / "n", NoSettings())
    check_folder(source(tmp_path / "n", narrow))
    apply_method(DENSE, source(tmp_path / "n", narrow), tmp_path / "back", NoSettings())
    assert same(load_file(tmp_path / "back/model.safetensors"), weights)


# -- chains and targets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "method", "form", "message"),
    [
        (
            {"model_type": "gnomon_halves"},
            SPLIT,
            HALVES,
            "split takes ordinary .* gnomon apply dense --model m",
        ),
        ({"model_type": "gnomon_x"}, SPLIT, None, "gnomon_x already, .* Use the model that it was made from"),
        ({"quantization_config": {"quant_method": "fp8"}}, SPLIT, HALVES, r"m is quantized \(fp8\)"),
        ({"quantization_config": 5}, SPLIT, HALVES, r"m is quantized \(\?\)"),
        ({}, DENSE, HALVES, "m is an ordinary checkpoint already"),
        ({"model_type": "gnomon_x"}, DENSE, None, "the model itself was changed"),
    ],
)
def test_wrong_chains_are_refused_before_anything_is_read(
    config: dict[str, Any], method: Any, form: Form | None, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", WEIGHTS, **config)
    shutil.copyfile(folder / "model.safetensors", folder / "gnomon.safetensors")
    with pytest.raises(UsageError, match=message):
        apply_method(method, Source("m", open_checkpoint(folder), form), tmp_path / "out", NoSettings())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("model", "is the folder of the model"),
        ("model/inside", "lies inside the folder of the model"),
        ("model/../model/x", "lies inside"),
        (".", "holds the folder of the model"),
        ("link", "is the folder of the model"),
        ("file", "is a file, but the result is a folder"),
        ("file/below/out", r"file is a file, so .*below/out can't lie in it"),
        ("loop", "loop is no place to write to"),
    ],
)
def test_places_that_are_never_written(out: str, message: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine")
    for force in (False, True):
        with pytest.raises(UsageError, match=message):
            apply_method(SCALE, source(model), tmp_path / out, Factor(), force=force)
    assert same(load_file(model / "model.safetensors"), WEIGHTS)
    assert (tmp_path / "file").read_text() == "mine"


def test_force_replaces_models_and_gnomons_own_only(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # empty: no need to ask
    apply_method(SCALE, source(model), out, Factor())
    (out / "extra").touch()
    with pytest.raises(UsageError, match=r"not empty. Choose another folder or pass --force"):
        apply_method(SCALE, source(model), out, Factor())
    apply_method(SCALE, source(model), out, Factor(by=5.0), force=True)
    assert not (out / "extra").exists()
    assert read_manifest(out).steps[0].settings == {"by": 5.0}
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.tex").write_text("years of work")
    with pytest.raises(UsageError, match="neither a model folder nor one that Gnomon wrote"):
        apply_method(SCALE, source(model), mine, Factor(), force=True)
    assert (mine / "chapter1.tex").exists()


def test_a_full_disk_is_seen_beforehand(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(GnomonError, match="MB free, but 16 MB are needed"):
        apply_method(SCALE, source(model), tmp_path / "new/out", Factor())
    assert not (tmp_path / "new").exists()


# -- crashes and memory -------------------------------------------------------------------------------


def test_an_error_in_the_middle_leaves_what_was_there(model: Path, tmp_path: Path) -> None:
    apply_method(SCALE, source(model), tmp_path / "out", Factor())

    def fail(checkpoint: Checkpoint, settings: NoSettings) -> Callable[..., None]:
        def convert(name: str, tensor: torch.Tensor) -> None:
            if name == "odd":
                raise GnomonError("no such bits")

        return convert

    broken = TensorMethod(name="broken", prepare=fail)
    with pytest.raises(GnomonError, match="no such bits"):
        apply_method(broken, source(model), tmp_path / "out", NoSettings(), force=True)
    assert read_manifest(tmp_path / "out").steps[0].method == "scale"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_kill_in_the_middle_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from gnomon.core.applying import *\n"
        "from gnomon.core.checkpoints import open_checkpoint\n"
        "def kill(name, tensor):\n"
        "    if name == 'odd': os.kill(os.getpid(), signal.SIGKILL)\n"
        "method = TensorMethod(name='kill', prepare=lambda c, s: kill)\n"
        "source = Source('m', open_checkpoint(Path(sys.argv[1])))\n"
        "apply_method(method, source, Path(sys.argv[2]), NoSettings())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model), str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    left = list(tmp_path.glob(".out.*.tmp"))
    assert len(left) == 1  # the half-written one, under a name that nobody reads
    apply_method(SCALE, source(model), tmp_path / "out", Factor())
    assert not left[0].exists()  # and that the next attempt clears away


def test_a_folder_put_back_after_a_kill_is_not_replaced_without_force(model: Path, tmp_path: Path) -> None:
    apply_method(SCALE, source(model), tmp_path / "out", Factor())
    (tmp_path / "out").rename(tmp_path / ".out.replaced")  # as a kill during --force may leave it
    with pytest.raises(GnomonError, match=r"not empty\. Choose another folder or pass --force"):
        apply_method(SCALE, source(model), tmp_path / "out", Factor(by=5.0))
    assert read_manifest(tmp_path / "out").steps[0].settings == {"by": Factor().by}


def test_one_tensor_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, no memory of an earlier one is held any more: neither as read nor as converted."""
    folder = source(
        write(tmp_path / "model", {f"w{k}": torch.full((9, k + 1), k) for k in range(8)}, shards=2)
    )
    held: list[StorageWeakRef] = []
    read = Entry.read

    def counted(entry: Entry) -> torch.Tensor:
        assert all(one.expired() for one in held)
        tensor = read(entry)
        held.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def convert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        doubled = tensor * 2
        held.append(StorageWeakRef(doubled.untyped_storage()))
        return {name: doubled}

    monkeypatch.setattr(Entry, "read", counted)
    method = TensorMethod(name="double", prepare=lambda checkpoint, settings: convert)
    apply_method(method, folder, tmp_path / "out", NoSettings())
    assert len(held) == 16


def test_two_writers_of_one_folder(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def wait(checkpoint: Checkpoint, settings: NoSettings) -> Any:
        def convert(name: str, tensor: torch.Tensor) -> None:
            with pytest.raises(UsageError, match=r"Another process is writing .*out. Wait for it"):
                apply_method(SCALE, source(model), out, Factor())

        return convert

    apply_method(TensorMethod(name="wait", prepare=wait), source(model), out, NoSettings())
    assert read_manifest(out).steps[0].method == "wait"


# -- whole models and files ---------------------------------------------------------------------------


def double(given: Source, out: Path, settings: Factor) -> None:
    weights = load_file(given.folder / "model.safetensors")
    save_file({"w": weights["w"] * settings.by, "new": torch.ones(1)}, out / "model.safetensors")
    shutil.copyfile(given.folder / "config.json", out / "config.json")


def test_a_whole_model_method(model: Path, tmp_path: Path) -> None:
    method = ModelMethod(name="double", settings=Factor, run=double)
    apply_method(SCALE, source(model), tmp_path / "scaled", Factor())
    done = apply_method(method, source(tmp_path / "scaled"), tmp_path / "out", Factor(by=0.5))
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], WEIGHTS["w"])
    assert (tmp_path / "out/tokenizer.json").exists()
    assert [step.method for step in done.steps] == ["scale", "double"]
    assert read_manifest(tmp_path / "out").steps == done.steps
    assert check_folder(source(tmp_path / "out")).tensors == 2


CHANGED = Form(
    name="changed",
    group=lambda checkpoint: {name: (name,) for name in checkpoint.entries},
    decode=lambda name, stored: stored[name],
    describe=lambda name, stored: {"rows": 1.0} if name == "new" else {},
    instead="Call undo(D).",
)


def change(given: Source, out: Path, settings: Factor) -> None:
    weights = load_file(given.folder / "model.safetensors")
    save_file({"w": weights["w"] * settings.by, "new": torch.ones(1)}, out / "gnomon.safetensors")
    config = json.loads((given.folder / "config.json").read_text()) | {"model_type": "gnomon_changed"}
    (out / "config.json").write_text(json.dumps(config))


def test_a_method_that_changes_the_model_itself(model: Path, tmp_path: Path) -> None:
    method = ModelMethod(name="change", settings=Factor, run=change, form=CHANGED)
    done = apply_method(method, source(model), tmp_path / "out", Factor())
    assert (done.bytes_after, done.converted) == (52, 4)
    assert read_manifest(tmp_path / "out").form == "changed"
    changed = source(tmp_path / "out", CHANGED)
    found = check_folder(changed)
    assert (found.form, found.tensors, found.converted) == ("changed", 2, 1)
    assert ("changed rows", "1 to 1, median 1") in found.rows()
    for unlike in (source(tmp_path / "out", HALVES), source(tmp_path / "out")):
        with pytest.raises(GnomonError, match=r"but gnomon\.json says 'changed'"):
            check_folder(unlike)
    with pytest.raises(
        UsageError, match=r"the model itself was changed, .* was applied to\. Call undo\(D\)\."
    ):
        apply_method(DENSE, changed, tmp_path / "back", NoSettings())
    with pytest.raises(UsageError, match=r"gnomon_changed already, .* Use the model that it was made from"):
        apply_method(method, changed, tmp_path / "twice", Factor())


def test_a_method_that_looks_before_it_reads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it refuses costs no read; what it finds out is recorded beside the settings."""

    def prepare(checkpoint: Checkpoint, settings: Factor) -> dict[str, Any]:
        if settings.by < 0:
            raise UsageError("by is negative")
        return {"seen": sorted(checkpoint.entries)}

    method = ModelMethod(name="double", settings=Factor, prepare=prepare, run=double)
    apply_method(method, source(model), tmp_path / "out", Factor(by=0.5))
    [step] = read_manifest(tmp_path / "out").steps
    assert step.settings == {"by": 0.5, "seen": ["byte", "odd", "w", "wide"]}
    monkeypatch.setattr(Entry, "read", lambda entry: pytest.fail("read"))
    with pytest.raises(UsageError, match="by is negative"):
        apply_method(method, source(model), tmp_path / "new", Factor(by=-1.0))
    assert not (tmp_path / "new").exists()


def test_a_method_that_writes_a_file(model: Path, tmp_path: Path) -> None:
    def measure(given: Source, out: Path, settings: NoSettings) -> None:
        out.write_text(given.name)

    method = ModelMethod(name="measure", run=measure, gives="file", takes="any")
    out = tmp_path / "new/result.json"
    done = apply_method(method, source(model), out, NoSettings())
    assert (out.read_text(), done.bytes_after, [*out.parent.iterdir()]) == ("model", 5, [out])
    with pytest.raises(UsageError, match=r"result.json exists. Choose another name or pass --force"):
        apply_method(method, source(model), out, NoSettings())
    apply_method(method, source(model), out, NoSettings(), force=True)
    with pytest.raises(UsageError, match="is a folder, but the result is a file"):
        apply_method(method, source(model), out.parent, NoSettings(), force=True)


# -- checking -----------------------------------------------------------------------------------------


@pytest.fixture
def made(model: Path, tmp_path: Path) -> Path:
    apply_method(SPLIT, source(model), tmp_path / "made", NoSettings())
    return tmp_path / "made"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / "gnomon.json").read_text())
    change(content)
    (folder / "gnomon.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["tensors"].pop("w"), "w: not in gnomon.json"),
        (lambda c: c["tensors"].update(x=c["tensors"]["w"]), "x: in gnomon.json, but not here"),
        (
            lambda c: c["tensors"]["w"].update(sha256="0" * 64),
            r"w: SHA-256 .* here, 000000000000… in gnomon.json",
        ),
        (
            lambda c: c["tensors"]["w"].update(shape=[4, 3]),
            r"w: F32 \[3, 4\] here, F32 \[4, 3\] in gnomon.json",
        ),
        (lambda c: c["tensors"]["w"].update(shape=[-4, 3]), "not as documented"),
        (lambda c: c["tensors"]["w"].update(shape=[2**62] * 32), "not as documented .*beyond any memory"),
        (lambda c: c.update(form="other"), "stored as halves, but gnomon.json says 'other'"),
        (lambda c: c["tensors"]["w"].update(sha256="../x"), r"not as documented .*no SHA-256"),
        (lambda c: c["tensors"]["w"].update(dtype="F4"), "not as documented .*unknown dtype"),
        (lambda c: c.update(tensors=[1]), "not as documented"),
        (lambda c: c.update(steps=[{}]), "not as documented"),
        (lambda c: c.update(steps=None), "not as documented"),
        (lambda c: c["steps"][0].update(settings=5), "not as documented"),
        (lambda c: c["steps"][0].update(version=5), "not as documented"),
        (lambda c: c.update(format_version=2), "has format version 2, this Gnomon reads 1"),
    ],
)
def test_a_manifest_that_does_not_hold(
    change: Callable[[dict[str, Any]], Any], message: str, made: Path
) -> None:
    edit(made, change)
    with pytest.raises(GnomonError, match=message):
        check_folder(source(made, HALVES))


def test_one_flipped_bit_is_found(made: Path) -> None:
    file = made / "gnomon.safetensors"
    data = bytearray(file.read_bytes())
    data[open_checkpoint(made).entries["w.rest"].offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(GnomonError, match=r"made is not what it should be:\n  w: SHA-256"):
        check_folder(source(made, HALVES))


def test_a_folder_without_a_manifest(model: Path) -> None:
    with pytest.raises(GnomonError, match=r"holds no gnomon.json, so `gnomon apply` did not write it"):
        check_folder(source(model))


def test_settings_are_recorded_by_content(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Sources:
        prompts: Path = tmp_path / "prompts.txt"
        reference: str = str(tmp_path / "prompts.txt")
        hub: str = "owner/name"
        keep: tuple[float, ...] = (0.5, 1.0)

    (tmp_path / "prompts.txt").write_text("x")
    name = "prompts.txt@sha256:2d711642b726b044"  # the first half of sha256sum of "x"
    assert recorded(Sources()) == {
        "prompts": name,
        "reference": name,
        "hub": "owner/name",
        "keep": [0.5, 1.0],
    }


def test_no_path_or_user_name_is_recorded(made: Path, tmp_path: Path) -> None:
    text = (made / "gnomon.json").read_text()
    assert str(tmp_path) not in text and os.sep not in text
