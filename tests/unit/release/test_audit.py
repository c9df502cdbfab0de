"""Known vulnerabilities: OSV's rules for versions, what is accepted until when, and OpenVEX."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from osv_kit import bill, entry
from primus_images.release.vulnerabilities import Accepted, Vulnerability, audit

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize(
    ("upstream", "aliases"),
    [
        ([], ()),
        (["CVE-2026-1"], ("CVE-2026-1",)),
        # An advisory for two is neither of them: what accepts one does not accept the other.
        (["CVE-2026-1", "CVE-2026-2"], ()),
    ],
)
def test_only_an_advisory_for_one_vulnerability_has_its_name(
    tmp_path: Path, upstream: list[str], aliases: tuple[str, ...]
) -> None:
    advisory = entry("small", introduced="0") | {"aliases": [], "upstream": upstream}
    (tmp_path / "one.json").write_text(json.dumps(advisory))
    rule = Accepted(id="CVE-2026-1", reason="no job calls it", review="2099-01-01")
    ((found,), _) = audit(bill("1.0"), tmp_path, (rule,))
    assert found.aliases == aliases
    assert (found.accepted is rule) == bool(aliases)


CASES: dict[str, tuple[dict[str, Any], str, str, str | None]] = yaml.safe_load(
    (FIXTURES / "osv.yaml").read_text()
)


@pytest.mark.parametrize("name", CASES)
def test_a_version_is_affected_as_osv_says(tmp_path: Path, name: str) -> None:
    content, version, deb, fixed = CASES[name]
    (tmp_path / "one.json").write_text(json.dumps(content))
    assert [one.fixed for one in audit(bill(version, deb), tmp_path, ())[0]] == (
        [] if fixed is None else [fixed]
    )


def test_on_the_day_of_its_review_a_finding_is_still_accepted() -> None:
    accepted = Accepted(id="CVE-2026-1", reason="it is never called", review="2026-11-20")
    finding = Vulnerability(
        id="CVE-2026-1",
        aliases=(),
        summary="It breaks",
        package="small",
        version="1.0",
        purl="",
        fixed="",
        accepted=accepted,
    )
    assert not finding.is_open(date(2026, 11, 20))
    assert finding.is_open(date(2026, 11, 21))
    assert "it was accepted until 2026-11-20: review it" in finding.sentence(date(2026, 11, 21))
    assert finding.sentence(date(2026, 11, 20)).endswith(
        "small 1.0: CVE-2026-1: It breaks (no version is known to mend it); accepted until "
        "2026-11-20: it is never called"
    )
