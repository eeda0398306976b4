"""`gnomon accept`: make a run's result the one that README, `show` and the board speak of."""

from __future__ import annotations

from pathlib import Path

from gnomon import systems
from gnomon.core.errors import GnomonError
from gnomon.core.files import dump_json, write_atomic

from .check import check
from .provenance import PACKAGE, git
from .result import load_result
from .run import read_config


def accept(folder: Path, *, into: Path | None = None) -> Path:
    """Copy the result of a `full` run to `<slug>.json`.

    Args:
        folder: the run folder.
        into: where to write; by default `src/gnomon/results` of the tree the package was imported from.

    Raises:
        GnomonError: if the profile is not `full`, the run started from a dirty tree or without a commit, went
            on with changed code, its commit is not an ancestor of HEAD, or its verdicts don't follow from its
            records.
    """
    result = load_result(folder).data
    target = into or PACKAGE / "results"
    if not target.is_dir():
        raise GnomonError(f"{target} is not a folder.")
    about = read_config(folder)
    code, reasons = result["code"], list[str]()
    study = str(about["study"])
    told = {"profile": "profile", "run_id": "run_id", "settings": "portable_settings", "code": "code"}
    if differing := [name for name, source in told.items() if result[name] != about[source]]:
        reasons.append(f"result.json and config.yaml disagree about {', '.join(differing)}")
    if study not in {system.slug for system in systems.SYSTEMS}:
        reasons.append(f"it was made by {Path(study).name}, not by a study of this package")
    if result["profile"] != "full":
        reasons.append(f"its profile is {result['profile']!r}, not 'full'")
    if code["commit"] is None:
        reasons.append("it was not started from a commit")
    elif code["dirty"]:
        reasons.append("it was started from a tree with uncommitted changes")
    elif git("merge-base", "--is-ancestor", code["commit"], "HEAD", folder=target) is None:
        reasons.append(f"its commit {code['commit'][:12]} is not an ancestor of HEAD of {target}")
    if code["accepted_changes"]:
        reasons.append("it went on with changed code (--accept-changed-code)")
    if not reasons and (differences := check(folder)):
        reasons.append("its verdicts don't follow from its records: " + "; ".join(differences[:3]))
    if reasons:
        raise GnomonError(f"{folder} can't be accepted: {'; '.join(reasons)}.")
    path = target / f"{result['slug']}.json"
    write_atomic(path, dump_json(result))
    return path
