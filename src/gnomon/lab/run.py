"""`gnomon run`: find the study, settle its settings, run what is left, judge, report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from gnomon import systems
from gnomon.core.errors import GnomonError, UsageError, unknown
from gnomon.core.files import canonical_json, dump_json, require_space, write_atomic

from .cards import load_card
from .config import StudyConfig, run_id
from .engine import Lab, Progress
from .figures import draw
from .provenance import code_hash, commit_state, environment
from .ranks import Ranks
from .report import write_report
from .result import Result, judge, load_result, summarise
from .rivals import load_rival, source_file
from .schema import SCHEMA_VERSION, check_version
from .stage import load_study_module


@dataclass(frozen=True)
class Study:
    """A study class and how every process finds it again."""

    name: str
    """Folder under `runs/`: the slug, or the stem of the user's own file."""
    reference: str
    """Module name or path of the file."""
    config: type[StudyConfig]

    @property
    def file(self) -> Path | None:
        return Path(self.reference) if self.reference.endswith(".py") else None

    @property
    def title(self) -> str:
        try:
            return systems.find(self.config.slug).title
        except KeyError:
            return (self.config.__doc__ or self.name).strip().splitlines()[0]

    def texts(self) -> dict[tuple[str, str | None], str]:
        """Texts of the claims from the card; a study without a system has none."""
        try:
            systems.find(self.config.slug)
        except KeyError:
            return {}
        return load_card(self.config.slug).texts()


def find_study(name: str) -> Study:
    """The study of a slug, or of a `.py` file that defines one.

    Raises:
        UsageError: unknown slug (nearest offered), planned system, or a file without exactly one study.
    """
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"{name} does not exist. `gnomon cp SLUG .` copies a study to start from.")
        return Study(path.stem, str(path.resolve()), _study_class(str(path.resolve())))
    try:
        system = systems.find(name)
    except KeyError:
        raise unknown("system", name, [s.slug for s in systems.SYSTEMS]) from None
    if not system.study:
        raise UsageError(f"{system.slug} is planned: it has no study yet. `gnomon ls` shows what works.")
    return Study(system.slug, system.study, _study_class(system.study))


def _study_class(reference: str) -> type[StudyConfig]:
    try:
        module = load_study_module(reference)
    except (SyntaxError, TypeError, ValueError) as error:  # TypeError: a dataclass field without a default
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{reference}{where} can't be read as a study: {error}.") from error
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, StudyConfig) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(c.__name__ for c in found) or "none"
        raise UsageError(f"{reference} must define exactly one StudyConfig subclass, found: {names}.")
    return found[0]


def run(
    study: str,
    *,
    model: str | None = None,
    profile: str = "cpu",
    overrides: Mapping[str, Any] | None = None,
    jobs: int = 1,
    runs: Path | str = "runs",
    again: bool = False,
    accept_changed_code: bool = False,
    rivals: Sequence[str] = (),
    progress: Progress | None = None,
) -> Result:
    """Run a study, or go on with it where it stopped; a finished run is returned as it is.

    Args:
        study: a slug of `gnomon ls` or the path of a study file.
        model: short for `overrides={"model": model}`.
        profile: "smoke", "cpu", "full", "gpu" or one of the study's own.
        overrides: settings by field name (values, or strings as after `-o`).
        jobs: worker processes.
        runs: folder for run folders.
        again: make a new run although one with these settings exists.
        accept_changed_code: go on although the code changed since the run began (recorded in the result).
        rivals: competitors to add, each `name=module:factory`.
        progress: called with a line per finished stage.

    Returns:
        The result; `result.dir` is the run folder, `result.report` its report.

    Raises:
        UsageError: for anything wrong with the request, before any work.
        GnomonError: if another process writes this run, a stage raised, or the code changed.
    """
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}.")
    found = find_study(study)
    overrides = dict(overrides or {})
    if model is not None:
        if "model" not in found.config.__dataclass_fields__:
            raise UsageError(f"Study {found.name} has no setting `model`.")
        overrides["model"] = model
    if rivals:
        overrides["rivals"] = tuple(rivals)
    config = found.config.resolve(profile, overrides)
    settings, mapping = config.portable()
    name = run_name(found, profile, settings)
    ranks = Ranks.from_environment()
    folder = ranks.agree(_attempt(Path(runs).absolute() / found.name, name, again=again))
    tell = progress or (lambda line: None)
    if ranks.agree(
        _finished(folder)
    ):  # a late rank would see what the first has just finished, and leave it alone
        if not _same_code(read_config(folder), current_code(found, config)):
            tell(f"{folder} was made by other code than the present one. --again runs the present one.")
        return load_result(folder)
    for target in config.rival_targets.values():
        load_rival(target)
    found.texts()  # a damaged card is found now, not after the stages
    config.check()

    with writer(folder, ranks):
        about = _about(folder, found, profile, config, settings, accept_changed_code, write=ranks.first)
        lab = Lab(
            config,
            folder,
            reference=found.reference,
            portable=mapping,
            card=claim_keys(found.texts()),
            jobs=jobs,
            ranks=ranks,
            progress=tell if ranks.first else (lambda line: None),
        )
        config.run(lab)
        _check_claims(found, lab)
        lab.execute()
        if ranks.first:
            about["environment"] = environment(threads=config.threads, jobs=jobs)
            about["models"] = [mapping.get(m, m) for m in config.models]
            about["command"], about["python"] = _calls(study, profile, overrides, mapping, found)
            _conclude(lab, found, about, tell)
        ranks.wait()
    return load_result(folder)


def run_name(found: Study, profile: str, settings: Mapping[str, Any]) -> str:
    """The run's id. The copy of a study is another study: it must not be given the original's results."""
    return run_id(found.file.name if found.file else found.name, profile, settings)


def reopen(folder: Path) -> tuple[Lab, Study, dict[str, Any]]:
    """A finished run's declarations, made again by the present code; nothing is executed.

    Raises:
        GnomonError: if the folder is not a run, is of another version, or the study has changed.
    """
    about = read_config(folder)
    found = find_study(about["study"])
    config = found.config.resolve(about["profile"], about["settings"])
    mapping = about["portable"]
    lab = Lab(config, folder, reference=found.reference, portable=mapping, execute=False)
    config.run(lab)
    lab.execute()
    return lab, found, about


def read_config(folder: Path) -> dict[str, Any]:
    """`config.yaml` of a run folder.

    Raises:
        GnomonError: if it is missing, damaged or of another version.
    """
    file = folder / "config.yaml"
    if not file.exists():
        raise GnomonError(
            f"{folder} is not a run folder: it has no config.yaml. Runs lie under runs/<slug>/<id>."
        )
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GnomonError(f"{file} is damaged: {error}") from None
    check_version(data, file)
    needed = {"study", "profile", "settings", "portable", "portable_settings", "run_id", "created", "code"}
    if missing := sorted(needed - data.keys()):
        raise GnomonError(f"{file} is damaged: it lacks {', '.join(missing)}. Start afresh with --again.")
    return dict(data)


def _conclude(lab: Lab, found: Study, about: dict[str, Any], progress: Progress) -> None:
    """Write records, figures, result and report of a lab whose stages are done."""
    records = lab.records()
    folder = lab.folder
    write_atomic(folder / "records.jsonl", "".join(canonical_json(record) + "\n" for record in records))
    figures = draw(lab.figures, records, lab.finished(), folder / "figures", progress)
    outcomes = {key: data for key in lab.stages if (data := lab.store.done(key))}
    result = {
        "schema_version": SCHEMA_VERSION,
        "slug": found.config.slug or found.name,
        "title": found.title,
        "profile": about["profile"],
        "run_id": about["run_id"],
        "created": about["created"],
        "finished": _now(),
        "seconds": round(sum(data["seconds"] for data in outcomes.values()), 1),
        "command": about["command"],
        "python": about["python"],
        "settings": about["portable_settings"],
        "seeds": list(lab.seeds),
        "models": about["models"],
        "code": about["code"],
        "environment": about["environment"],
        "methods": summarise(records),
        "claims": judge(lab.claims, records, found.texts()),
        "figures": figures,
        "stages": [
            {
                "key": key,
                "function": stage.name,
                "args": stage.shown,
                "seconds": outcomes[key]["seconds"],
                "failed": outcomes[key]["failed"],
            }
            for key, stage in lab.stages.items()
        ],
    }
    write_atomic(folder / "result.json", dump_json(result))
    write_report(folder)


def claim_keys(texts: Mapping[tuple[str, str | None], str]) -> set[tuple[str, str | None]]:
    """What a study must judge: each part of a row that has parts, the row itself where it has none."""
    split = {id for id, part in texts if part is not None}
    return {(id, part) for id, part in texts if (part is not None) == (id in split)}


def _check_claims(found: Study, lab: Lab) -> None:
    """Every row and part of the card is judged; that nothing else is, `Lab.claim` has seen to."""
    unjudged = claim_keys(found.texts()) - {(claim.id, claim.part) for claim in lab.claims}
    if unjudged:
        rows = sorted(" ".join(filter(None, row)) for row in unjudged)
        raise GnomonError(f"Study {found.name} has no rule for what its card claims: {', '.join(rows)}.")


def _attempt(base: Path, name: str, *, again: bool) -> Path:
    """The newest run folder of these settings, or the next one with `again`."""
    number = 1
    while (base / _numbered(name, number + 1)).exists():
        number += 1
    newest = base / _numbered(name, number)
    if again and newest.exists():
        return base / _numbered(name, number + 1)
    return newest


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _finished(folder: Path) -> bool:
    return (folder / "result.json").exists() and (folder / "report.html").exists()


def current_code(found: Study, config: StudyConfig) -> str:
    """Hash of the code that a run of this study executes: the package, the study's file, the rivals' files."""
    return code_hash(found.file, *(source_file(target) for target in config.rival_targets.values()))


def _same_code(about: Mapping[str, Any], current: str) -> bool:
    """Whether a run that `config.yaml` tells of began with, or was last accepted for, the code `current`."""
    return current in (about["code"]["hash"], *about["code"]["accepted_changes"][-1:])


@contextmanager
def writer(folder: Path, ranks: Ranks | None = None) -> Iterator[None]:
    """Hold the run folder against a second writer."""
    if ranks is not None and not ranks.first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise GnomonError(
            f"Another process is writing {folder}. Wait for it, or start a separate run with --again."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _about(
    folder: Path,
    found: Study,
    profile: str,
    config: StudyConfig,
    settings: dict[str, Any],
    accept_changed_code: bool,
    *,
    write: bool,
) -> dict[str, Any]:
    """The run's `config.yaml`: written on the first call, checked against the present code on later ones."""
    current = current_code(found, config)
    file = folder / "config.yaml"
    if file.exists():
        about = read_config(folder)
        if not accept_changed_code:
            _require_same_code(about, current, folder)
        elif not _same_code(about, current):
            about["code"]["accepted_changes"] = [*about["code"]["accepted_changes"], current]
            if write:
                write_atomic(file, yaml.safe_dump(about, sort_keys=False))
        return about
    if write:
        require_space(folder, config.disk_bytes)
    _, mapping = config.portable()
    about = {
        "schema_version": SCHEMA_VERSION,
        "study": found.reference if found.file else found.name,
        "profile": profile,
        "run_id": folder.name,
        "created": _now(),
        "settings": config.settings(),
        "portable_settings": settings,
        "portable": mapping,
        "code": {"hash": current, **commit_state(), "accepted_changes": []},
    }
    if write:
        write_atomic(file, yaml.safe_dump(about, sort_keys=False))
    return about


def _require_same_code(about: Mapping[str, Any], current: str, folder: Path) -> None:
    """Refuse to go on with other code than a run began with."""
    if not _same_code(about, current):
        raise GnomonError(
            f"The code changed since {folder} began (was {about['code']['hash']}, is {current}). "
            "Go back to that code, start afresh with --again, or pass --accept-changed-code, "
            "which the result will say."
        )


def _calls(
    study: str, profile: str, overrides: Mapping[str, Any], mapping: Mapping[str, str], found: Study
) -> tuple[str, str]:
    """The command and the Python call that make this run again, in portable form."""
    name = found.name if found.file is None else f"./{found.file.name}"
    command, call = [f"gnomon run {name}"], [repr(name)]
    if profile != "cpu":
        command.append(f"--profile {profile}")
        call.append(f"profile={profile!r}")
    shown: dict[str, Any] = {}
    for field, value in overrides.items():
        plain = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        if plain not in mapping:  # several paths, perhaps
            plain = ",".join(mapping.get(part.strip(), part) for part in plain.split(","))
        plain = mapping.get(plain, plain)
        if field == "model":
            command.append(f"--model {shlex.quote(plain)}")
            call.append(f"model={plain!r}")
        elif field == "rivals":
            command += [f"--with {rival}" for rival in value]
            call.append(f"rivals={tuple(value)!r}")
        else:
            command.append(f"-o {shlex.quote(f'{field}={plain}')}")
            shown[field] = plain
    if shown:
        call.append(f"overrides={shown!r}")
    return " ".join(command), f"gnomon.run({', '.join(call)})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
