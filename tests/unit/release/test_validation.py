"""The summary of a validation."""

from pathlib import Path
from threading import Barrier, Event

import pytest

from primus_images.cli.main import main
from primus_images.release.summary import Validated, outcome_text, table
from primus_images.release.validation import _each, _no_run
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import RecordedJob
from primus_images.training.run import outcome
from records import jobs, record, verdicts


def cell(name: str, *failed: str) -> Validated:
    found = record(
        passed=not failed,
        verdicts=verdicts("base: finite", "gate coverage", failed=failed),
        jobs=jobs("base"),
    )
    return Validated(record=found, folder=Path("out") / name)


@pytest.mark.parametrize(
    ("second", "summary"),
    [
        ((), "FAILED: 1 of 2 passed; every job passed, but the image fails gate coverage"),
        (
            ("gate coverage",),
            "FAILED: 0 of 2 passed; every job passed, but the image fails gate coverage",
        ),
        (("gate coverage", "base: finite"), "FAILED: 0 of 2 passed"),
    ],
)
def test_a_failed_gate_does_not_hide_that_every_job_passed(
    second: tuple[str, ...], summary: str
) -> None:
    assert table([cell("one", "gate coverage"), cell("two", *second)]).splitlines()[-1] == summary


def test_all_passed() -> None:
    assert table([cell("one")]).splitlines()[-1] == "passed: 1 of 1 passed"


def test_one_cell_is_told_with_causes_first_and_what_was_skipped_last(tmp_path: Path) -> None:
    found = record(
        passed=False,
        verdicts=(
            Verdict("base: finite", True, "it is"),
            Verdict("base: loss falls", True, "it does"),
            Verdict("repeat: exit code", False, "out of memory"),
            Verdict("resume", False, "repeat failed", skipped=True),
            Verdict("gate budget", False, "too large"),
        ),
        jobs=(
            RecordedJob(name="base", ran=True, series=({"loss": 7.0}, {"loss": 3.0})),
            *jobs("repeat"),
        ),
        not_run=("the GPU part",),
    )
    lines = outcome_text(found, tmp_path).splitlines()
    assert lines[:-1] == [
        "  ✗ repeat failed: out of memory",
        "  ✓ base: finite, loss falls",
        "  ✗ gate budget: too large",
        "  – repeat failed: resume",
        "  – not run: the GPU part",
        "  loss 7.0000 → 3.0000 over 2 steps  █▁",
        "FAILED: 2 checks passed, 2 failed, 1 skipped",
    ]
    assert outcome_text(record(), tmp_path).splitlines()[:-1] == [
        "  ✓ loss falls: why",
        "passed: 1 checks passed, 0 failed",
    ]


def test_two_cells_are_validated_at_the_same_time_and_listed_in_their_order(tmp_path: Path) -> None:
    both = Barrier(2, timeout=10)

    def one(number: int, _jobs: object) -> Validated:
        both.wait()  # raises if the other cell does not run meanwhile
        return Validated(record=record(made=str(number)), folder=tmp_path)

    found = _each(one, [(), (), (), ()], 2, Event())
    assert [each.record.made for each in found] == ["1", "2", "3", "4"]


def test_an_interrupt_stops_the_cells_that_run_and_starts_no_other(tmp_path: Path) -> None:
    stopped, started = Event(), list[int]()

    def one(number: int, _jobs: object) -> Validated:
        started.append(number)
        if number == 1:
            raise KeyboardInterrupt
        assert stopped.wait(10)
        return Validated(record=record(), folder=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        _each(one, [(), (), (), ()], 2, stopped)
    assert 4 not in started


def test_a_refused_job_says_why_in_its_folder(tmp_path: Path) -> None:
    refused, running = tmp_path / "refused", tmp_path / "running"
    assert main(["train", "llama3-proxy", "--output", str(refused), "model.layer=1"]) == 2
    assert not refused.exists()
    refused.mkdir()
    assert main(["train", "llama3-proxy", "--output", str(refused), "model.layer=1"]) == 2
    assert _no_run(2, refused, "") == outcome.read_result(refused).refused
    assert "model.layer" in _no_run(2, refused, "")
    running.mkdir()
    (running / "log.txt").touch()
    assert main(["train", "llama3-proxy", "--output", str(running), "model.layer=1"]) == 2
    assert [path.name for path in running.iterdir()] == ["log.txt"]
    assert _no_run(2, running, "") == ""


def test_a_job_without_a_readable_result_did_not_start(tmp_path: Path) -> None:
    assert (
        _no_run(127, tmp_path, "base.txt")
        == "the job did not start (exit code 127); base.txt has what it printed"
    )
    (tmp_path / "result.json").write_text('{"exit_code": "1"}')
    assert (
        _no_run(127, tmp_path, "base.txt")
        == "the job did not start (exit code 127); base.txt has what it printed"
    )
    assert _no_run(124, tmp_path, "") == "the job did not end within 900 s"


def test_a_job_that_ended_without_a_log_says_why(tmp_path: Path) -> None:
    assert _no_run(0, tmp_path, "console") == ""
    assert _no_run(124, tmp_path, "console").startswith("the job did not end within ")
    said = "the job did not start (exit code 1); console has what it printed"
    assert _no_run(1, tmp_path, "console") == said
    (tmp_path / "log.txt").touch()
    assert _no_run(1, tmp_path, "console") == ""
