"""Train a job with each silent fault, several side by side; write which checks named it.

    python every_fault.py OUT --seconds 600 --together 8

OUT gets one JSON line per fault as its run ends. Faults that OUT already holds are skipped. When the time is over, the
runs in progress are ended and not written.

Where no check named the fault, a run without it follows. If both have the same losses and weights to the last bit, the
fault changed nothing, and its line says ``inert``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from many import forked, prepare, train
from records import Row, arguments, record, rows, together
from silent_jobs import ESCAPED, SILENT, failed, job_of, write

from primus.training.job import Job


def one(name: str, out: Path, port: int) -> None:
    """Train and judge the job with the fault ``name``, and append its line to ``out``."""
    case = (SILENT | ESCAPED)[name]

    def judge(job: Job, _code: int) -> tuple[Row, bool]:
        found = failed(job)
        fine = bool(set(found) & set(case.names)) and "exit code" not in found
        facts = job.output / "facts.json"
        versions = json.loads(facts.read_text(encoding="utf-8"))["versions"] if facts.exists() else {}
        row = {"named_by": found, "ok": fine, "versions": versions}
        if not found:
            healthy = job_of(job.output.with_name("healthy"), case.backend, case.words)
            write(healthy)
            os.waitpid(forked(partial(train, healthy.output, "-", port)), 0)
            row["inert"] = _trained(healthy) == _trained(job)
        return row, fine

    record(
        {"name": name, "kind": case.kind, "backend": case.backend},
        name,
        lambda folder: job_of(folder, case.backend, case.words),
        judge,
        lambda sentence: {"named_by": [], "ok": False, "log": [sentence]},
        out,
        port,
    )


def _trained(job: Job) -> tuple[str, str]:
    """The losses and gradient norms of all steps, and the digest of the last weights."""
    facts = json.loads((job.output / "facts.json").read_text(encoding="utf-8"))
    return (job.output / "exact.jsonl").read_text(encoding="utf-8"), facts["weights_sha256"]


def main() -> None:
    parser = arguments(__doc__, "the name of the fault")
    parser.add_argument("--escaped", action="store_true", help="also the faults that are known to escape")
    options = parser.parse_args()
    prepare()
    known = SILENT | ESCAPED if options.escaped else SILENT
    done = {row["name"] for row in rows(options.out)}
    left = [name for name in known if name not in done and re.search(options.only, name)]
    print(f"{len(known)} faults, {len(left)} to run", flush=True)
    together([partial(one, name, options.out) for name in left], options.together, options.seconds)


if __name__ == "__main__":
    main()
