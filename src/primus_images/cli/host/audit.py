"""`primus audit`: known vulnerabilities of an image's packages."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from primus_images.cli.host.common import SingleOptions, SourceOptions
from primus_images.cli.host.sbom import contents_of_target
from primus_images.cli.verb import Options, answer, note
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


@dataclass(frozen=True, kw_only=True)
class AuditOptions(SourceOptions, Options):
    """The options of ``audit``."""

    what: str
    osv: Path
    accepted: Path | None
    vex: Path | None


def audit(options: AuditOptions) -> int:
    """Look up the packages of an image in OSV data of PyPI and Debian, without a network."""
    file = Path(options.what)
    if file.is_file():
        bill = _read_bill(file)
    else:
        bill = spdx(contents_of_target(_of_target(options)))
    findings, unseen = look_up(bill, options.osv, load_accepted(options.accepted))
    if file.is_file() and not re.search('"pkg:(pypi|deb)/', json.dumps(bill).lower()):
        unseen.append("no package of PyPI or Debian is named by its purl, so nothing was looked up")
    for sentence in unseen:
        note(options, f"! {options.osv}: {sentence}")
    now = datetime.now(tz=UTC)
    if options.vex:
        _write_vex(options.vex, findings, str(bill.get("name", "image")), now)
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
    return answer(options, document, lines, passed=not unsafe)


def _of_target(options: AuditOptions) -> SingleOptions:
    """Return the options that name the target to audit."""
    return SingleOptions(
        target=options.what,
        project=options.project,
        store=options.store,
        channel=options.channel,
        json=options.json,
    )


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
