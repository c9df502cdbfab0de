"""`primus audit`: what it says of findings, and when it fails."""

import json
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from osv_kit import bill, entry, package
from project_kit import Kit

FIXTURES = Path(__file__).parents[2] / "fixtures"


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
