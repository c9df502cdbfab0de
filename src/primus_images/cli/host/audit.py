"""`primus audit`: known vulnerabilities of an image's packages."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from primus_images.cli.host.sbom import contents_of_target
from primus_images.cli.verb import answer, note
from primus_images.errors import InputError
from primus_images.release.bills import spdx
from primus_images.release.vulnerabilities import (
    Vulnerability,
    audit as look_up,
    load_accepted,
    openvex,
)
from primus_images.schema import read_json
from primus_images.terminal import counted


def audit(args: argparse.Namespace) -> int:
    """Look up the packages of an image in OSV data of PyPI and Debian, without a network."""
    file = Path(args.what)
    if file.is_file():
        bill = _read_bill(file)
    else:
        args.target = args.what
        bill = spdx(contents_of_target(args))
    findings, unseen = look_up(bill, args.osv, load_accepted(args.accepted))
    if file.is_file() and not re.search('"pkg:(pypi|deb)/', json.dumps(bill).lower()):
        unseen.append("no package of PyPI or Debian is named by its purl, so nothing was looked up")
    for sentence in unseen:
        note(args, f"! {args.osv}: {sentence}")
    now = datetime.now(tz=UTC)
    if args.vex:
        _write_vex(args.vex, findings, str(bill.get("name", "image")), now)
    today = now.date()
    unsafe = [finding for finding in findings if finding.is_open(today)]
    lines = []
    for finding in findings:
        sign = "✗" if finding in unsafe else "–"
        lines.append(f"{sign} {finding.sentence(today)}")
    verdict = "FAILED" if unsafe else "passed"
    accepted = len(findings) - len(unsafe)
    lines.append(f"{verdict}: {counted(len(unsafe), 'finding')} to act on, {accepted} accepted")
    document = {
        "findings": [asdict(finding) for finding in findings],
        "passed": not unsafe,
        "not_looked_up": unseen,
    }
    return answer(args, document, lines, passed=not unsafe)


def _read_bill(file: Path) -> Any:
    try:
        return read_json(file).data
    except InputError as error:
        raise InputError(
            f"not an SPDX document in JSON: {error.message}",
            where=error.where,
            hint="name a target, or a file that `primus sbom TARGET --json` wrote",
        ) from None


def _write_vex(path: Path, findings: Sequence[Vulnerability], name: str, now: datetime) -> None:
    if findings:
        vex = openvex(findings, name, now.strftime("%Y-%m-%dT%H:%M:%SZ"))
        path.write_text(json.dumps(vex, indent=1) + "\n", encoding="utf-8")
    else:
        print(
            "! no vulnerability, so no VEX is written: OpenVEX needs a statement", file=sys.stderr
        )
