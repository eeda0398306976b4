"""Worker processes for `--jobs N`: each imports the study afresh and runs one stage at a time.

Workers are started with `python -m gnomon.lab.worker`, so a script that calls `gnomon.run(jobs=2)` needs no
`if __name__ == "__main__"`. They die with their parent; a worker that dies takes down only its stage's run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gnomon.core.errors import GnomonError

from .stage import Stage, StageStore

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Worker:
    """One worker process and the pipe to it."""

    def __init__(self, reference: str, store: StageStore, log: Path) -> None:
        ours, theirs = socket.socketpair()
        threads = {name: str(store.threads) for name in THREAD_VARIABLES}
        path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
        command = [sys.executable, "-m", "gnomon.lab.worker", str(theirs.fileno()), str(os.getpid())]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, reference, str(store.root), str(store.threads)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.log = log
        self.stage: Stage | None = None

    def start(self, stage: Stage) -> None:
        self.stage = stage
        with suppress(
            ConnectionError
        ):  # it died while idle, which the pool finds when it waits for an answer
            self.connection.send(stage.as_json())

    def stop(self) -> None:
        self.connection.close()  # an idle worker ends at the closed pipe
        if self.stage is not None:
            self.process.kill()
        self.process.wait()


class WorkerPool:
    """Runs stages in up to `jobs` processes, inputs first, exclusive stages alone."""

    def __init__(self, reference: str, store: StageStore, jobs: int) -> None:
        self._reference = reference
        self._store = store
        self._jobs = jobs
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, stages: list[Stage], on_done: Callable[[Stage], None]) -> None:
        """Run all `stages`, given in an order in which inputs come first.

        A stage that raises lets the others finish what does not need it; then the first error is raised.

        Raises:
            GnomonError: with the worker's traceback, or saying that the worker died.
        """
        waiting, errors = list(stages), list[GnomonError]()
        unfinished = {stage.key for stage in stages}
        while waiting or self._busy():
            while (stage := self._next(waiting, unfinished)) is not None and (worker := self._idle()):
                waiting.remove(stage)
                worker.start(stage)
            busy = self._busy()
            if not busy:
                break  # what is left waits for a stage that raised
            for connection in wait([worker.connection for worker in busy]):
                worker = next(w for w in busy if w.connection is connection)
                finished, error = self._receive(worker)
                if error is None:
                    unfinished.discard(finished.key)
                    on_done(finished)
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.stage is not None]

    def _idle(self) -> Worker | None:
        for worker in self._workers:
            if worker.stage is None:
                return worker
        if len(self._workers) < self._jobs:
            log = self._store.root.parent / f"worker-{len(self._workers)}.log"
            self._workers.append(Worker(self._reference, self._store, log))
            return self._workers[-1]
        return None

    def _next(self, waiting: list[Stage], unfinished: set[str]) -> Stage | None:
        running = [worker.stage for worker in self._busy() if worker.stage is not None]
        if any(stage.exclusive for stage in running):
            return None
        for stage in waiting:
            if unfinished.isdisjoint(stage.inputs):
                if not stage.exclusive:
                    return stage
                if not running:
                    return stage
        return None

    def _receive(self, worker: Worker) -> tuple[Stage, GnomonError | None]:
        stage = worker.stage
        assert stage is not None
        worker.stage = None
        try:
            answer: dict[str, Any] = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._workers.remove(worker)
            worker.connection.close()
            code = worker.process.wait()
            return stage, GnomonError(
                f"The worker running stage {stage.name} died (exit code {code}; -9 often means out of memory). "
                f"Its output is in {worker.log}. Give the same command again to go on from the stages that are done."
            )
        if answer["error"] is None:
            return stage, None
        return stage, GnomonError(f"Stage {stage.name} {stage.shown} raised:\n{answer['error']}")
