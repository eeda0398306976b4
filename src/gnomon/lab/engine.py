"""The lab: what a study declares its stages, claims and figures to, and what runs them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gnomon.core.errors import GnomonError, UsageError, unknown

from .config import StudyConfig
from .pool import WorkerPool
from .ranks import Ranks
from .records import Record, read_records
from .stage import Done, Stage, StageFunction, StageStore, stage_key

if TYPE_CHECKING:
    import pandas as pd

    from .claims import Rule

Grade = Literal["X", "R", "T", "S"]
FigureFunction = Callable[["pd.DataFrame", dict[str, list[Done]], Path], None]
Progress = Callable[[str], None]


class Handle:
    """A declared stage. Pass it to other stages as an argument; `value` forces it to run now."""

    def __init__(self, lab: Lab, stage: Stage) -> None:
        self._lab = lab
        self.key = stage.key
        self.stage = stage

    @property
    def value(self) -> Any:
        """What the stage returned.

        Raises:
            NumericalFailure: if the stage failed numerically.
        """
        return self.done.value

    @property
    def done(self) -> Done:
        """The finished stage with its folder; forces it to run."""
        self._lab.compute([self])
        return self._lab.store.result(self.key)


@dataclass(frozen=True)
class Claim:
    """One judged part of a row of `claims.md`."""

    id: str
    part: str | None
    rule: Rule
    grade: Grade


class Lab:
    """Collects declarations while `StudyConfig.run` runs, then runs what is left.

    Args:
        config: the study's settings.
        folder: the run folder.
        portable: real string -> portable form of settings that name files (see `StudyConfig.portable`).
        reference: module name or file path the workers import the study from.
        card: ids and parts of claims that the card has; empty: any.
        execute: False while a report is re-made: then nothing runs and missing stages are an error.
    """

    def __init__(
        self,
        config: StudyConfig,
        folder: Path,
        *,
        reference: str,
        portable: dict[str, str] | None = None,
        jobs: int = 1,
        card: Collection[tuple[str, str | None]] = (),
        execute: bool = True,
        ranks: Ranks | None = None,
        progress: Progress = lambda line: None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.seeds = config.seeds
        self.ranks = ranks or Ranks()
        self.jobs = 1 if self.ranks.world > 1 else jobs
        self.store = StageStore(folder / "stages", threads=config.threads)
        self.stages: dict[str, Stage] = {}
        self.claims: list[Claim] = []
        self.figures: list[FigureFunction] = []
        self._portable = portable or {}
        self._reference = reference
        self._card = card
        self._execute = execute
        self._progress = progress

    # --- declarations -------------------------------------------------------------------------------

    def stage(self, function: StageFunction, *, exclusive: bool = False, **arguments: Any) -> Handle:
        """Declare a stage; nothing runs yet. Declaring the same stage twice gives the same stage.

        Args:
            function: module-level `f(ctx, *, ...)`.
            exclusive: run it alone on the machine; required for any timing.
            arguments: JSON values or handles, also nested in lists and dicts.

        Raises:
            UsageError: if the function is not importable by name or an argument is not JSON.
        """
        if "<" in function.__qualname__ or "." in function.__qualname__:
            raise UsageError(
                f"Stage {function.__qualname__} must be a module-level function (workers import it)."
            )
        inputs: dict[str, None] = {}
        raw = {name: self._encode(value, inputs, function.__name__) for name, value in arguments.items()}
        shown = {name: self._portably(value) for name, value in raw.items()}
        key = stage_key(function.__name__, shown)
        seed = arguments.get("seed")
        if seed is None:
            seed = self.stages[next(iter(inputs))].seed if inputs else 0
        known = self.stages.get(key)
        if known is not None and known.function is not function:
            raise UsageError(
                f"Two stage functions are called {function.__name__!r}; their results would collide."
            )
        if known is None:
            known = Stage(function, raw, shown, key, tuple(inputs), int(seed), exclusive)
            self.stages[key] = known
        return Handle(self, known)

    def claim(self, id: str, *, part: str | None = None, rule: Rule, grade: Grade) -> None:
        """Declare how one part of a row of claims is judged; `part` is its letter, None for a row without."""
        if any((claim.id, claim.part) == (id, part) for claim in self.claims):
            raise UsageError(f"Claim {id} part {part} is declared twice.")
        if self._card and (id, part) not in self._card:
            known = [" ".join(filter(None, row)) for row in self._card]
            raise unknown("claim (the card's rows and parts count):", f"{id} {part or ''}".strip(), known)
        self.claims.append(Claim(id, part, rule, grade))

    def figure(self, function: FigureFunction) -> None:
        """Declare a figure: `f(records, done, path)` draws it; its docstring's first paragraph is the caption.

        Raises:
            UsageError: if its name, which names its file, is not one of a module-level function or is taken.
        """
        name = function.__name__
        if not name.isidentifier() or any(known.__name__ == name for known in self.figures):
            raise UsageError(
                f"Figure {name!r} needs a name of its own, since it becomes a file's: give a function by def."
            )
        self.figures.append(function)

    def _encode(self, value: Any, inputs: dict[str, None], name: str) -> Any:
        if isinstance(value, Handle):
            if value._lab is not self:
                raise UsageError(f"Stage {name} was given a handle of another run.")
            inputs[value.key] = None
            return {"$stage": value.key}
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, list | tuple):
            return [self._encode(v, inputs, name) for v in value]
        if isinstance(value, dict):
            return {str(k): self._encode(v, inputs, name) for k, v in value.items()}
        if value is None or isinstance(value, str | int | float | bool):
            return value
        raise UsageError(
            f"Stage {name} takes JSON values and handles, got {type(value).__name__}: {value!r}."
        )

    def _portably(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._portable.get(value, value)
        if isinstance(value, list):
            return [self._portably(v) for v in value]
        if isinstance(value, dict):
            return {k: self._portably(v) for k, v in value.items()}
        return value

    # --- running ------------------------------------------------------------------------------------

    def compute(self, handles: Iterable[Handle]) -> None:
        """Run these stages and what they need now, in `jobs` processes if there are several."""
        wanted: set[str] = set()
        waiting = [handle.key for handle in handles]
        while waiting:
            key = waiting.pop()
            if key not in wanted:
                wanted.add(key)
                waiting += self.stages[key].inputs
        self._run_all([stage for stage in self.stages.values() if stage.key in wanted])

    def execute(self) -> None:
        """Run every declared stage that is not done: in declaration order, or in `jobs` worker processes."""
        self._run_all(list(self.stages.values()))

    def _run_all(self, stages: list[Stage]) -> None:
        todo = [stage for stage in stages if self.store.done(stage.key) is None]
        if not self._execute and todo:
            names = ", ".join(sorted({stage.name for stage in todo}))
            raise GnomonError(
                f"{self.folder} has no finished stage for: {names}. The study has changed since, or the run "
                "was interrupted: give the run's own command again."
            )
        if self.jobs > 1 and len(todo) > 1:
            self.store.root.mkdir(parents=True, exist_ok=True)
            with WorkerPool(self._reference, self.store, self.jobs) as pool:
                pool.run(todo, on_done=self._report)
        else:
            for stage in stages:
                self._run_one(stage)

    def _run_one(self, stage: Stage) -> None:
        if not self.ranks.agree(self.store.done(stage.key) is None):
            return
        self.store.root.mkdir(parents=True, exist_ok=True)
        try:
            self.store.execute(stage, writes=self.ranks.first)
        except GnomonError:
            raise
        except (Exception, SystemExit) as error:  # one that ends the process must not look like success
            raise GnomonError(
                f"Stage {stage.name} {stage.shown} raised:\n{traceback.format_exc().rstrip()}"
            ) from error
        self.ranks.wait()
        self._report(stage)

    def _report(self, stage: Stage) -> None:
        data = self.store.done(stage.key)
        count = sum(self.store.done(key) is not None for key in self.stages)
        outcome = (
            f"failed: {data['failed']}"
            if data and data["failed"]
            else f"{data['seconds']:.1f} s"
            if data
            else ""
        )
        told = " ".join(f"{k}={v}" for k, v in stage.shown.items() if isinstance(v, str | int | float))
        self._progress(f"[{count}/{len(self.stages)}] {stage.name} {told} ({outcome})")

    # --- what is there afterwards -------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Records of all done stages in declaration order, each with its stage's key.

        Raises:
            GnomonError: if a stage's file does not hold the records its `done.json` counted.
        """
        collected: list[Record] = []
        for key, stage in self.stages.items():
            data = self.store.done(key)
            if data is None:
                continue
            records = read_records(self.store.folder(key) / "records.jsonl")
            if len(records) != data["records"]:
                raise GnomonError(
                    f"{self.store.folder(key)} holds {len(records)} records, done.json counted {data['records']}. "
                    "The folder was changed by hand; remove it and give the run's command again."
                )
            collected += [{**record, "stage": key, "exclusive": stage.exclusive} for record in records]
        return collected

    def finished(self) -> dict[str, list[Done]]:
        """Stages that finished without failing, by function name, in declaration order (for figures)."""
        found: dict[str, list[Done]] = {}
        for key, stage in self.stages.items():
            data = self.store.done(key)
            if data is not None and not data["failed"]:
                found.setdefault(stage.name, []).append(self.store.result(key))
        return found
