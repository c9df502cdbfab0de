"""Known vulnerabilities: OSV's rules for versions, what is accepted until when, and OpenVEX."""

import json
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from primus_images.release.vulnerabilities import Accepted, Vulnerability, audit
from project_kit import Kit

FIXTURES = Path(__file__).parents[2] / "fixtures"


def package(name: str, version: str, purl: str, **more: str) -> dict[str, Any]:
    references = [
        {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
    ]
    return {
        "SPDXID": f"SPDXRef-{name}",
        "name": name,
        "versionInfo": version,
        "externalRefs": references,
        **more,
    }


def bill(version: str, deb: str = "1.0-1") -> dict[str, Any]:
    tool = package("tool", "1.0", "pkg:pypi/tool@1.0")
    relation = {
        "spdxElementId": "SPDXRef-tool",
        "relationshipType": "BUILD_TOOL_OF",
        "relatedSpdxElement": "x",
    }
    library = package(
        "libdemo1", "9", "pkg:deb/debian/libdemo1@9", sourceInfo=f"source package demo {deb}"
    )
    small = [
        package(name, version, f"pkg:pypi/{name}@{version}") for name in ("small", "small-tool-kit")
    ]
    base = package(
        "base-files", "12.4+deb12u15", "pkg:deb/debian/base-files@12.4%2Bdeb12u15?arch=amd64"
    )
    return {
        "name": "v26.11-cpu",
        "packages": [*small, library, tool, base],
        "relationships": [relation],
    }


def entry(
    name: str, ecosystem: str = "PyPI", *, versions: tuple[str, ...] = (), **events: str
) -> dict[str, Any]:
    ranges = [
        {"type": "ECOSYSTEM", "events": [{kind: at} if at else {} for kind, at in events.items()]}
    ]
    affected = {
        "package": {"name": name, "ecosystem": ecosystem},
        "ranges": ranges,
        "versions": list(versions),
    }
    names = {"id": "GHSA-1", "aliases": ["CVE-2026-1"], "upstream": ["CVE-2026-1"]}
    return {**names, "summary": "It breaks", "affected": [affected]}


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


def test_a_finding_fails_until_it_is_accepted_and_again_when_its_review_is_late(
    tmp_path: Path,
) -> None:
    kit = Kit(tmp_path)
    kit.write("bill.json", json.dumps(bill("1.0")))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("a.json", json.dumps(entry("small", introduced="0", fixed="2.0")))
    words = ("audit", "bill.json", "--osv", "all.zip")
    bad = kit.primus(*words, "--vex", "bad.json")
    assert (bad.code, "small 1.0: GHSA-1, CVE-2026-1: It breaks (2.0 mends it)" in bad.out) == (
        1,
        True,
    )
    said = statement(tmp_path / "bad.json")
    assert (said["status"], said["action_statement"]) == ("affected", "update to 2.0")
    assert said["vulnerability"]["aliases"] == ["CVE-2026-1"]
    for day, code in (("2999-01-01", 0), ("2020-01-01", 1)):
        kit.write(
            "accepted.yaml",
            f"accepted:\n  - {{id: CVE-2026-1, reason: it is never called, review: {day}}}\n",
        )
        vex = f"vex-{code}.json"
        assert kit.primus(*words, "--accepted", "accepted.yaml", "--vex", vex).code == code
        said = statement(tmp_path / vex)
        assert (said["status"], said["products"]) == (
            "not_affected",
            [{"@id": "pkg:pypi/small@1.0"}],
        )
    kit.write("none.json", json.dumps(entry("large", introduced="0")))
    none = kit.primus("audit", "bill.json", "--osv", "none.json", "--vex", "no-vex.json")
    assert (none.code, "OpenVEX needs a statement" in none.err) == (0, True)
    assert not (tmp_path / "no-vex.json").exists()
    assert "! none.json: no entry is about Debian: 2 packages not looked up" in none.err


def test_a_bill_is_looked_up_whatever_the_case_of_its_addresses_and_says_if_nothing_is(
    tmp_path: Path,
) -> None:
    kit = Kit(tmp_path)
    kit.write("osv.json", json.dumps(entry("small", introduced="0", fixed="2.0")))
    for purl, code in (("pkg:PyPI/Small@1.0", 1), ("pkg:npm/small@1.0", 0), ("", 0)):
        document = {"name": "x", "packages": [package("small", "1.0", purl)], "relationships": []}
        kit.write("bill.json", json.dumps(document))
        answer = kit.primus("audit", "bill.json", "--osv", "osv.json")
        assert (answer.code, "so nothing was looked up" in answer.err) == (code, not code), (
            answer.err
        )
    rows = "".join(
        f"  - {{id: CVE-2026-1, reason: {reason}, review: 2999-01-01}}\n"
        for reason in ("it is never called", "it is called once")
    )
    kit.write("accepted.yaml", f"accepted:\n{rows}")
    twice = kit.primus("audit", "bill.json", "--osv", "osv.json", "--accepted", "accepted.yaml")
    assert (twice.code, "CVE-2026-1 is judged twice for every package" in twice.err) == (2, True), (
        twice.err
    )


def statement(path: Path) -> Any:
    """The statement of a valid OpenVEX document with one."""
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(
        yaml.safe_load((FIXTURES / "openvex.yaml").read_text())
    ).validate(document)
    (only,) = document["statements"]
    return only


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
