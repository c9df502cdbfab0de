"""`primus prove`: its plan, and the folder that it reads."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.cli.host import prove as module
from primus_images.cli.main import main
from prove_kit import step_of, written
from stand_in_machine import make_machine


def test_only_the_visible_gpus_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_machine(tmp_path)
    command = ["prove", "mi300x", "--here", "--dry-run", "--json", "--root", str(tmp_path)]
    ranks = {}
    for visible in ("0,1,2,3,4,5,6,7", "5"):
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", visible)
        assert main(command) == 0
        steps = json.loads(capsys.readouterr().out)
        name = "llama3.1-8b-torchtitan-pretrain-bf16"
        words = next(row["command"] for row in steps if row["name"].startswith(name))
        ranks[visible] = words[words.index("--ranks") + 1]
    assert ranks["0,1,2,3,4,5,6,7"] == "8"
    assert ranks["5"] == "1"


def test_the_command_reads_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = step_of("bad", "raise ValueError('fault of a kernel')")
    record = written(tmp_path, [step_of("a", ""), bad], monkeypatch)
    assert main(["prove", "--read", str(record)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 steps passed" in printed
    assert "bad failed: exit code 1: ValueError: fault of a kernel" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a target"),
        (["cpu"], "is for no GPU"),
        (["--read", "nowhere"], "nowhere is not a folder"),
        (["mi300x", "--minutes", "0"], "must be a whole number"),
        (["mi400"], "no target is called 'mi400'"),
    ],
)
def test_what_cannot_be_proven_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "shown"), [(1.5, "cell: 1.5 GiB, 2 predicted"), (None, "cell: – GiB, 2 predicted")]
)
def test_figures_of_a_record_are_printed(
    memory: float | None,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = {"tokens_per_second": 12345.0, "tflops_non_causal": 4.0, "memory_gib": memory}
    text = json.dumps({"summary": summary})
    step = replace(step_of("cell", f"print({text!r})"), expected={"predicted_gib": 2.0})
    record = written(tmp_path, [step], monkeypatch)
    capsys.readouterr()
    assert main(["prove", "--read", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cell: 1.234e+04 tokens/s per GPU" in lines
    assert shown in lines


# Signs a statement by copying it.
COSIGN = """#!/bin/sh
[ "$1" = attest-blob ] || exit 0
while [ $# -gt 0 ]; do
    case $1 in
    --statement) statement=$2 ;;
    --bundle) bundle=$2 ;;
    esac
    shift
done
cp "$statement" "$bundle"
"""


@pytest.mark.parametrize("signed", [True, False])
def test_a_proof_is_signed_by_the_key_that_is_named(
    signed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_machine(tmp_path / "machine")
    (tmp_path / "cosign").write_text(COSIGN)
    (tmp_path / "cosign").chmod(0o755)
    (tmp_path / "my.key").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    steps = [step_of("good", ""), step_of("bad", "raise SystemExit(1)")]
    monkeypatch.setattr(module, "steps_of", lambda _: steps)
    words = ["--here", "--root", str(tmp_path / "machine"), "--output", str(tmp_path / "out")]
    if signed:
        words += ["--key", str(tmp_path / "my.key")]
    assert main(["prove", "mi300x", *words]) == 1
    record = tmp_path / "out/record"
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "1 of 2 steps passed",
        f"→ {record / 'index.html'}",
        f"send the folder {record}",
    ]
    assert "[2/2] step bad" in said.err
    statements = list(record.glob("*.sigstore.json"))
    assert len(statements) == signed
    for statement in statements:
        states = json.loads(statement.read_text())["predicate"]["states"]
        assert states == {"good": "passed", "bad": "failed"}


def test_a_plan_says_what_is_left_out_for_lack_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_machine(tmp_path)
    steps = [step_of("first", "", minutes=2), step_of("second", "", minutes=20)]
    monkeypatch.setattr(module, "steps_of", lambda _: steps)
    command = ["prove", "mi300x", "--here", "--dry-run", "--root", str(tmp_path), "--minutes", "10"]
    assert main(command) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["2", "step", "first"],
        ["20", "step", "second", "only", "if", "time", "is", "left"],
        ["1", "of", "2", "steps", "in", "about", "2", "min"],
    ]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["planned"] for row in document] == [True, False]
