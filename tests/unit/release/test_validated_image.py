"""Validating an image: what each job gets, what is recorded, and what is not trained again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.gates.check import Outcome
from primus_images.gates.examined import Finding, GateReport
from primus_images.oci.store import digest_of
from primus_images.release import golden, validation as module
from primus_images.release.cells import cell_of
from primus_images.release.hardware import Hardware
from primus_images.release.records import image_folder
from primus_images.release.summary import Validated
from primus_images.release.validation import Options, validate
from primus_images.sandbox.container import Command, Devices
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import NO_GPU, RecordedImage
from project_kit import SOURCE

ROOT = SimpleNamespace(name="v26.11-demo", manifest=b"manifest", config_bytes=b"config")
IMAGE = RecordedImage(
    ref=ROOT.name, manifest=digest_of(ROOT.manifest), content=digest_of(ROOT.config_bytes)
)
CELL = cell_of("llama3-proxy")
FOLDER = "llama3-proxy"


class Engine:
    """An engine in whose containers every job ends at once, with ``code``."""

    name = "docker"

    def __init__(self) -> None:
        self.code = 3
        self.verified = 0
        self.commands: list[Command] = []

    def verify(self, root: Any) -> None:
        assert root is ROOT
        self.verified += 1

    def run(self, root: Any, command: Command, stdout: Any, stderr: Any) -> int:
        self.commands.append(command)
        stdout.write(b"printed")
        return self.code


def checked(*failed: str) -> Outcome:
    finding = Finding("error", "no code", path="lib/x.so")
    reports = [
        GateReport(gate=name, summary="1 file", findings=[finding] if name in failed else [])
        for name in ("coverage", "versions")
    ]
    return Outcome(target="demo", ref=ROOT.name, digest="sha256:1", reports=reports)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    found = Engine()
    monkeypatch.setattr(module, "choose", lambda name: found)
    monkeypatch.setattr(module, "root_of_image", lambda *_, **__: ROOT)
    monkeypatch.setattr(module, "examine", lambda *_: None)
    monkeypatch.setattr(module, "judge", lambda _: checked())
    (tmp_path / "recipes").symlink_to(SOURCE.parent / "recipes")
    return found


@pytest.fixture
def validated(engine: Engine, tmp_path: Path) -> Callable[..., list[Validated]]:
    def act(*levels: str, arch: str | None = None, **fields: Any) -> list[Validated]:
        choice = SimpleNamespace(suffix="")
        resolved = SimpleNamespace(
            name="demo", ref=ROOT.name, root=tmp_path, arch=arch, choice=choice
        )
        plan: Any = SimpleNamespace(resolved=resolved)
        workspace: Any = SimpleNamespace(store=None, unpacked=None)
        usual: dict[str, Any] = {"engine": "docker", "quiet": True, "hardware": Hardware()}
        options = Options(output=tmp_path / "out", **{**usual, **fields})
        cells = [(CELL, level) for level in levels or ("quick",)]
        return validate(plan, workspace, cells, options)

    return act


def test_a_job_gets_its_folder_its_time_and_no_banner(
    engine: Engine, validated: Callable[..., list[Validated]], tmp_path: Path
) -> None:
    (done,) = validated()
    folder = image_folder(tmp_path / "out/demo", IMAGE) / FOLDER
    assert (done.folder, done.earlier) == (folder, False)
    command = engine.commands[0]
    assert command.argv[:5] == ("timeout", "--kill-after=20", "900", "primus", "train")
    assert command.env == {"PRIMUS_NO_BANNER": "1"}
    (mount,) = command.mounts
    assert (mount.source, mount.target, mount.read_only) == (folder, "/out", False)
    assert command.devices == Devices()
    assert (folder / "base.console.txt").read_bytes() == b"printed"
    assert (folder / "base").is_dir()
    assert (folder / "report.html").read_text().startswith("<!")
    assert engine.verified == 1


def test_the_record_says_what_ran_where_and_what_did_not(
    engine: Engine,
    validated: Callable[..., list[Validated]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "judge", lambda _: checked("coverage"))
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    faults = [{"named_by": ["loss"]}, {"named_by": []}, {"named_by": ["x", "y"]}]
    runs = [{"failed": ["loss"]}, {"failed": []}]
    (results / "silent-faults.json").write_text(json.dumps({"faults": faults, "date": "d1"}))
    (results / "healthy-seeds.json").write_text(json.dumps({"runs": runs, "date": "d2"}))
    (done,) = validated(arch="gfx942", hardware=Hardware(why="--gpus none"))
    record = done.record
    assert json.loads((done.folder / "record.json").read_text()) == record.as_json()
    assert (record.target, record.image, record.gpu, record.engine) == (
        "demo",
        IMAGE,
        NO_GPU,
        "docker",
    )
    assert record.passed is False
    assert record.gates == checked("coverage").as_json()
    reasons = {verdict.name: (verdict.passed, verdict.reason) for verdict in record.verdicts}
    assert reasons["gate coverage"] == (False, "1 file; lib/x.so: no code")
    assert reasons["gate versions"] == (True, "1 file")
    assert any(
        "did not start (exit code 3); base.console.txt" in why for _, why in reasons.values()
    )
    rates = record.suite.rates
    assert rates
    assert (rates.faults, rates.named, rates.healthy, rates.refused) == (3, 2, 2, 1)
    assert rates.recorded == ("d1", "d2")
    assert record.not_run[0] == (
        "the GPU part (gfx942): the jobs ran on the CPU (--gpus none), which does not count as a "
        "pass for the GPU"
    )
    (results / "healthy-seeds.json").write_text("{}")
    (done,) = validated()
    assert done.record.suite.rates is None
    assert not any("the GPU part" in reason for reason in done.record.not_run)


def test_gpus_of_a_validation_are_in_its_record_and_its_folder(
    engine: Engine, validated: Callable[..., list[Validated]], tmp_path: Path
) -> None:
    devices = Devices(names=("/dev/kfd",))
    hardware = Hardware("mi300x", ("AMD",) * 8, "6.1", "9", devices)
    (done,) = validated(arch="gfx942", hardware=hardware)
    assert done.folder.name == f"{FOLDER}-mi300x"
    machine = done.record.machine
    assert (machine.gpus, machine.driver, machine.firmware) == (("AMD",) * 8, "6.1", "9")
    assert done.record.gpu == "mi300x"
    assert engine.commands[0].devices == devices
    assert not any("the GPU part" in reason for reason in done.record.not_run)
    assert "on the GPU" in {verdict.name for verdict in done.record.verdicts}


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_job_leaves_no_record(
    engine: Engine, validated: Callable[..., list[Validated]], tmp_path: Path, code: int
) -> None:
    engine.code = code
    with pytest.raises(KeyboardInterrupt):
        validated()
    assert not list((tmp_path / "out").rglob("record.json"))
    assert len(engine.commands) == 1


def test_files_of_an_interrupted_validation_are_removed(
    engine: Engine, validated: Callable[..., list[Validated]], tmp_path: Path
) -> None:
    old = image_folder(tmp_path / "out/demo", IMAGE) / FOLDER / "base/log.txt"
    old.parent.mkdir(parents=True)
    old.write_text("of before")
    validated()
    assert not old.exists()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every job pass: its verdict, and the record of it."""
    whole = module.suite.record

    def record(*words: Any) -> Any:
        made = whole(*words)
        ran = tuple(replace(job, ran=True) for job in made.jobs)
        return replace(made, jobs=ran, passed=all(v.passed for v in made.verdicts))

    monkeypatch.setattr(
        module.suite, "judge", lambda *_: [Verdict(name="loss falls", passed=True, reason="")]
    )
    monkeypatch.setattr(module.suite, "record", record)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    ("fields", "earlier"),
    [
        ({}, True),
        ({"again": True}, False),
        ({"recording": True}, False),
        ({"wrap": ("nice",)}, False),
        ({"hardware": Hardware("h200", ("H200",) * 2)}, False),
    ],
)
def test_what_passed_in_the_same_state_is_not_trained_again(
    engine: Engine,
    validated: Callable[..., list[Validated]],
    fields: dict[str, Any],
    earlier: bool,
) -> None:
    (first,) = validated()
    assert (first.earlier, first.record.passed) == (False, True)
    number = len(engine.commands)
    (second,) = validated(**fields)
    assert second.earlier is earlier
    assert (len(engine.commands) == number) is earlier
    if earlier:
        assert second.record == first.record


@pytest.mark.usefixtures("passing")
def test_an_image_whose_gates_changed_is_trained_again(
    engine: Engine, validated: Callable[..., list[Validated]], monkeypatch: pytest.MonkeyPatch
) -> None:
    validated()
    monkeypatch.setattr(module, "judge", lambda _: checked("versions"))
    (second,) = validated()
    assert second.earlier is False
    # The jobs of a preview passed, although a gate fails as before.
    (third,) = validated()
    assert (third.earlier, third.record.passed) == (True, False)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    ("compared", "passed", "not_run"),
    [
        ("no curve was recorded", True, True),
        (Verdict(name="golden curve", passed=False, reason="it differs"), False, False),
        (Verdict(name="golden curve", passed=True, reason="it is the same"), True, False),
    ],
)
def test_the_losses_are_compared_with_the_recorded_ones(
    validated: Callable[..., list[Validated]],
    compared: str | Verdict,
    passed: bool,
    not_run: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(golden, "name_of", lambda record: "one")
    monkeypatch.setattr(golden, "recorded", lambda root, name: {"demo": name})
    monkeypatch.setattr(golden, "compared", lambda recorded, record: compared)
    (done,) = validated()
    assert done.record.passed is passed
    assert (compared in done.record.not_run) is not_run
    assert (compared in done.record.verdicts) is not not_run
    (done,) = validated(recording=True)
    assert compared not in (*done.record.not_run, *done.record.verdicts)


@pytest.mark.usefixtures("passing")
def test_a_validation_tells_what_it_does(
    validated: Callable[..., list[Validated]], capsys: pytest.CaptureFixture[str]
) -> None:
    validated(quiet=False)
    lines = capsys.readouterr().err
    assert "▸ base: primus train llama3-proxy" in lines
    assert "[1/1]" not in lines
    validated("quick", "quick", quiet=False)
    lines = capsys.readouterr().err
    assert "✓ [1/2] llama3-proxy: already trained on 20" in lines
    assert "in this image; --again trains it again" in lines
    validated("quick", "quick", quiet=False, again=True)
    assert "▸ [2/2] llama3-proxy" in capsys.readouterr().err
    validated()
    assert capsys.readouterr().err == ""
