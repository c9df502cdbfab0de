"""Check this machine before a job: GPUs, rights, driver, memory, disk, limits and network.

Each problem comes with what to do about it. --quick reads only the kernel's files; without it, the speed of the output
folder is measured, too. Exit code 0: nothing was found; 1: a job would fail, or run slower than it could.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

from primus.errors import InputError
from primus.system.finding import Finding, Host
from primus.system.preflight import disk_speed, preflight
from primus.terminal import Screen

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "primus preflight --quick"
_MARKS = {"ok": "✓", "failed": "✗", "slow": "!", "skipped": "–"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--quick", action="store_true", help="read the kernel's files only")
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="folder of the machine's files")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="where jobs write (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Check and report. Returns 0 or 1; raises InputError."""
    if not options.root.is_dir():
        raise InputError(f"{options.root} is not a folder", hint="--root takes the root folder of a machine")
    host = Host(root=options.root, output=options.output.absolute())
    findings = preflight(host)
    if not options.quick and options.root == Path("/"):
        folder = next(path for path in (host.output, *host.output.parents) if path.is_dir())
        findings.append(disk_speed(folder))
    passed = not any(one.level in ("failed", "slow") for one in findings)
    if options.json:
        document = {
            "passed": passed,
            "node": platform.node(),
            "gpus": list(host.gpus.names),
            "driver": host.gpus.driver,
            "findings": [asdict(one) for one in findings],
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(findings)))
        problems = sum(one.level in ("failed", "slow") for one in findings)
        print(f"{platform.node()}: " + ("ready" if passed else f"{problems} problem{'s' * (problems != 1)}"))
    return 0 if passed else 1


def _lines(findings: list[Finding]) -> list[str]:
    screen = Screen.of()
    rows = []
    for one in findings:
        rows += screen.wrap(f"{_MARKS[one.level]} {one.check}: {one.said}", hanging="  ")
        if one.remedy:
            rows += screen.wrap(f"→ {one.remedy}", indent="  ", hanging="    ")
    return rows
