"""What follows from the gates: a release that fails gets no name, a preview says what failed."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import CheckFailed
from primus_images.gates import check
from primus_images.gates.examined import Finding, GateReport

SOUND = GateReport(summary="2 wheels", gate="versions")
WARNED = GateReport(
    summary="3 files", findings=[Finding("warning", "a key", "facts", "a.pem")], gate="contents"
)
FAILED = GateReport(
    summary="4 requirements",
    findings=[
        Finding("note", "no pin says which"),
        Finding("error", "torch is missing", "venv", "opt/torch"),
        Finding("error", "triton is missing"),
    ],
    gate="requirements",
)


def admitted(
    reports: Sequence[GateReport], preview: str | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    outcome = check.Outcome("demo", "v1-demo", "sha256:1", reports)
    monkeypatch.setattr(check, "judge", lambda examined: outcome)
    resolved = SimpleNamespace(choice=SimpleNamespace(preview=preview))
    plan = SimpleNamespace(ref="v1-demo", resolved=resolved)
    examined: Any = SimpleNamespace(image=SimpleNamespace(plan=plan))
    return check.admit(examined)


@pytest.mark.parametrize(
    ("layer", "path", "place"),
    [
        ("", "", ""),
        ("torch", "", "torch: "),
        ("", "versions.yaml:3:5", "versions.yaml:3:5: "),
        ("torch", "opt/a", "torch /opt/a: "),
    ],
)
def test_a_finding_is_shown_with_what_is_known_of_its_place(
    layer: str, path: str, place: str
) -> None:
    report = GateReport(summary="1 file", findings=[Finding("error", "bad", layer, path)], gate="g")
    text = check.outcome_text(check.Outcome("demo", "v1-demo", "sha256:1", [report]))
    assert text.splitlines()[-1] == f"      ✗ {place}bad"


@pytest.mark.parametrize("preview", [None, "it lacks a GPU build"])
def test_an_image_without_errors_is_admitted_in_silence(
    preview: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admitted([SOUND, WARNED], preview, monkeypatch) == ()


def test_a_release_that_fails_a_gate_is_refused_with_all_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckFailed, match="v1-demo fails a gate") as caught:
        admitted([SOUND, FAILED], None, monkeypatch)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["✓", "✗", "·", "✗", "✗"]
    assert "venv /opt/torch: torch is missing" in str(caught.value)


def test_a_preview_that_fails_a_gate_says_the_first_error_and_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert admitted([SOUND, WARNED, FAILED], "it lacks a GPU build", monkeypatch) == (
        "requirements: 4 requirements; opt/torch: torch is missing (and 1 more)",
    )
