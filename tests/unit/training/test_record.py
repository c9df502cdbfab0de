"""The record of a validation: the same JSON after reading, and a sentence for what is none."""

import json
from dataclasses import replace
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.training.judge.record import Machine, Rates, Record, RecordedJob
from records import jobs, record, verdicts


def whole() -> Record:
    """A record with every field."""
    ran = RecordedJob(
        name="base",
        command=("primus", "train"),
        ran=True,
        argv=("python",),
        exit_code=1,
        cause="rank 1 failed",
        seconds=2.5,
        exact=True,
        series=({"step": 1, "loss": None},),
    )
    made = record(
        wrap="nsys",
        jobs=(ran, *jobs("resume", without="resume")),
        verdicts=verdicts("loss falls", "exit code", failed=("exit code",)),
        machine=Machine(gpus=("AMD Instinct MI300X",), driver="6.12", firmware="1"),
        engine="podman",
        gates={"passed": True},
        not_run=("the GPU part",),
    )
    rates = Rates(faults=3, named=2, healthy=5, refused=1, recorded=("2026-11-01",))
    return replace(made, suite=replace(made.suite, rates=rates))


@pytest.mark.parametrize("made", [whole(), record()], ids=["whole", "small"])
def test_a_record_is_read_as_it_was_written(made: Record) -> None:
    text = json.dumps(made.as_json())
    assert json.loads(text) == made.as_json()
    assert Record.of(json.loads(text)) == made
    assert json.dumps(Record.of(json.loads(text)).as_json()) == text


def test_what_did_not_happen_is_left_out() -> None:
    content = whole().as_json()
    assert content["wrap"] == "nsys"
    assert content["jobs"][1] == {"name": "resume", "command": [], "ran": False}
    assert "wrap" not in record().as_json()
    assert record().as_json()["suite"]["rates"] is None


def test_what_failed_and_what_ran() -> None:
    assert [verdict.name for verdict in whole().failed] == ["exit code"]
    assert whole().ran == ("base",)
    assert whole().jobs[1].steps == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"recipe": "x"}, "recipe must be a mapping"),
        ({"jobs": 5}, "jobs must be a list"),
        ({"jobs": [None]}, "jobs must be a mapping"),
        ({"jobs": [{"name": "base", "ran": True, "command": 3}]}, "command must be a list"),
        ({"passed": "yes"}, "passed must be"),
        ({"made": None}, "made must be"),
        ({"verdict": []}, "unknown key 'verdict'"),
    ],
)
def test_what_is_no_record_is_a_sentence(change: dict[str, Any], reason: str) -> None:
    content = json.loads(json.dumps(record().as_json()))
    with pytest.raises(InputError, match=reason):
        Record.of({**content, **change})
    with pytest.raises(InputError, match="'format' is missing here"):
        Record.of({})
