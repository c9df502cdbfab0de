"""Train a job with each silent fault, several side by side; write which checks named it.

    python every_fault.py OUT --seconds 600 --together 8

OUT gets one JSON line per fault as its run ends. Faults that OUT already holds are skipped. When the time is over, the
runs in progress are ended and not written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from healthy import together
from many import forked, prepare, train
from silent_jobs import SILENT, failed, job_of, write


def one(name: str, out: Path, port: int) -> None:
    """Train and judge the job with the fault ``name``, and append its line to ``out``."""
    case = SILENT[name]
    row: dict[str, Any] = {"name": name, "kind": case.kind, "backend": case.backend}
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    log = folder / "reference.txt"
    try:
        job = job_of(folder / "job", case.backend, case.words)
        write(job)
        with log.open("w") as file:
            child = forked(partial(train, job.output, name, port), file.fileno())
        os.waitpid(child, 0)
        found = failed(job)
        row |= {"named_by": found, "ok": bool(set(found) & set(case.names)) and "exit code" not in found}
        facts = job.output / "facts.json"
        row["versions"] = json.loads(facts.read_text(encoding="utf-8"))["versions"] if facts.exists() else {}
        if not row["ok"]:
            logs = (log, job.output / "log.txt")
            row["log"] = [file.read_text(errors="replace")[-2000:] for file in logs if file.exists()]
    except Exception as error:  # noqa: BLE001 - a run that breaks is a result
        row |= {"named_by": [], "ok": False, "log": [f"the harness failed: {type(error).__name__}: {error}"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--together", type=int, default=1, help="runs side by side; each has two processes")
    parser.add_argument("--only", default="", help="regular expression on the name of the fault")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    prepare()
    done = set()
    if options.out.exists():
        done = {json.loads(line)["name"] for line in options.out.read_text(encoding="utf-8").splitlines()}
    left = [name for name in SILENT if name not in done and re.search(options.only, name)]
    print(f"{len(SILENT)} faults, {len(left)} to run", flush=True)
    together([partial(one, name, options.out) for name in left], options.together, until)


if __name__ == "__main__":
    main()
