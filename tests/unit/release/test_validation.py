"""The summary of a validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.release.validation import Validated, table


def cell(name: str, *failed: str) -> Validated:
    verdicts = [{"name": check, "passed": check not in failed} for check in ("base: finite", "gate coverage")]
    record = {"passed": not failed, "verdicts": verdicts, "jobs": [{"name": "base"}], "recipe": {"precision": "fp32"}}
    return Validated(record=record, folder=Path("out") / name)


@pytest.mark.parametrize(
    ("second", "summary"),
    [
        ((), "FAILED: 1 of 2 passed; every job passed, but the image fails gate coverage"),
        (("gate coverage",), "FAILED: 0 of 2 passed; every job passed, but the image fails gate coverage"),
        (("gate coverage", "base: finite"), "FAILED: 0 of 2 passed"),
    ],
)
def test_a_failed_gate_does_not_hide_that_every_job_passed(second: tuple[str, ...], summary: str) -> None:
    assert table([cell("one", "gate coverage"), cell("two", *second)]).splitlines()[-1] == summary


def test_all_passed() -> None:
    assert table([cell("one")]).splitlines()[-1] == "passed: 1 of 1 passed"
