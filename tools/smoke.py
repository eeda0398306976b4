"""Run the `smoke` profile of every working study anew, check its verdicts, and say how long each took.

Exits with 1 after the last one if any failed. `make smoke`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GNOMON = (sys.executable, "-m", "gnomon")


def smoke(slug: str, runs: Path) -> bool:
    """Run one study and check its report; True if both went well."""
    start = time.perf_counter()
    code = subprocess.run(
        [*GNOMON, "run", slug, "--profile", "smoke", "--runs", str(runs)], check=False
    ).returncode
    seconds = time.perf_counter() - start
    if code == 0:
        results = list(runs.glob("*/*/result.json"))
        code = subprocess.run([*GNOMON, "report", str(results[0].parent), "--check"], check=False).returncode
    print(f"smoke: {slug} {'passed' if code == 0 else 'FAILED'} in {seconds:.1f} s", flush=True)
    return code == 0


def main() -> int:
    """Run them all."""
    listed = subprocess.run([*GNOMON, "ls", "--json"], check=True, capture_output=True, text=True).stdout
    slugs = [system["slug"] for system in json.loads(listed) if system["status"] == "works"]
    failed = []
    for slug in slugs:
        with tempfile.TemporaryDirectory(prefix="gnomon-smoke-") as runs:
            if not smoke(slug, Path(runs)):
                failed.append(slug)
    print(
        f"smoke: {len(slugs) - len(failed)} of {len(slugs)} studies passed"
        + (f"; failed: {failed}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
