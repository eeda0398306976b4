"""A worker process: `python -m gnomon.lab.worker FD PARENT REFERENCE STAGES THREADS`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from gnomon.core.errors import GnomonError

from .stage import Stage, StageStore, load_study_module

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, however the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(0.5)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it ended before the line above took effect
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Serve stages until the pipe closes."""
    fd, parent, reference, root, threads = arguments
    die_with_parent(int(parent))
    connection = Connection(int(fd))
    store = StageStore(Path(root), threads=int(threads))
    load_study_module(reference)
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        error = None
        try:
            store.execute(Stage.from_json(request))
        except GnomonError as known:
            error = str(known)
        except (Exception, SystemExit):
            error = traceback.format_exc()
        connection.send({"error": error})


if __name__ == "__main__":
    main(sys.argv[1:])
