"""`primus run` and `primus load`: what the engine is asked for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.host import run as of_run
from primus_images.cli.main import main
from primus_images.oci.store import digest_of
from primus_images.sandbox.container import Command, Mount
from project_kit import make_project

GIB = 2**30


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that an engine is given, in a project whose image ``demo`` is there."""
    given: list[Command] = []

    def engine(name: str) -> Any:
        def act(root: object, command: Command) -> int:
            given.append(command)
            return 7

        return SimpleNamespace(run=act)

    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    monkeypatch.setattr(of_run, "choose", engine)
    root = SimpleNamespace(name="v26.11-demo", manifest=b"{}")
    monkeypatch.setattr(of_run, "root_of_image", lambda *words, **more: root)
    return given


def test_a_command_is_run_as_it_is_told(
    commands: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "a=b")
    words = ["-e", "A=1=2", "-e", "MINE", "-e", "EMPTY=", "-v", "/data:/in:ro", "-v", "~/x:/out"]
    words += ["--memory", "1.5g", "--shm-size", "512MiB", "--user", "1:2", "--network", "host"]
    assert main(["run", "demo", *words, "--no-entrypoint", "--", "echo", "-v"]) == 7
    (command,) = commands
    assert command.argv == ("echo", "-v")
    assert command.env == {"A": "1=2", "MINE": "a=b", "EMPTY": ""}
    assert command.mounts == (
        Mount(source=Path("/data"), target="/in", read_only=True),
        Mount(source=Path("~/x").expanduser(), target="/out", read_only=False),
    )
    assert (command.memory_bytes, command.shm_bytes) == (3 * GIB // 2, GIB // 2)
    assert (command.user, command.network, command.entrypoint) == ("1:2", True, False)


def test_a_withdrawn_release_is_run_with_a_warning(
    commands: list[Command], capsys: pytest.CaptureFixture[str]
) -> None:
    versions = Path("versions.yaml")
    versions.write_text(
        versions.read_text().replace(
            "created: 2026-11-20", "created: 2026-11-20\nsupported_until: 2999-01-01"
        )
    )
    assert main(["run", "demo"]) == 7
    # How long it is supported is no warning.
    assert capsys.readouterr().err == ""
    row = "v26.11-demo: {reason: wrong, date: '2026-11-29'}\n"
    Path("withdrawn.yaml").write_text(row)
    assert main(["run", "demo"]) == 7
    assert capsys.readouterr().err == "! v26.11-demo was withdrawn on 2026-11-29: wrong\n"


def test_a_command_has_no_limit_and_8_gib_to_share_unless_it_is_told(
    commands: list[Command],
) -> None:
    assert main(["run", "demo"]) == 7
    (command,) = commands
    assert (command.argv, command.env, command.mounts) == ((), {}, ())
    assert (command.memory_bytes, command.shm_bytes) == (None, 8 * GIB)
    assert (command.user, command.network, command.entrypoint) == (None, False, True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1m", 1 << 20),
        ("1048576", 1 << 20),
        (" 2 GB ", 2 * GIB),
        ("3k", None),
        ("4096k", 4 << 20),
        ("1t", 1 << 40),
        ("1024t", 1 << 50),
        ("1025t", None),
        ("0.5m", None),
        ("m", None),
        ("-1g", None),
    ],
)
def test_a_size_has_a_unit(
    commands: list[Command], capsys: pytest.CaptureFixture[str], text: str, size: int | None
) -> None:
    for option, field in (("--memory", "memory_bytes"), ("--shm-size", "shm_bytes")):
        code = main(["run", "demo", f"{option}={text}"])
        if size is None:
            assert code == 2
            assert "is not a size from 1m to 1024t" in capsys.readouterr().err
        else:
            assert code == 7
            assert getattr(commands[-1], field) == size


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-v", "/data"], "-v '/data' is not a volume"),
        (["-v", "/data:in"], "is not a volume"),
        (["-v", ":/in"], "is not a volume"),
        (["-v", "/a:/b:rx"], "is not a volume"),
        (["-v", "/a:ro"], "is not a volume"),
        (["-e", "=1"], "-e '=1' is not a variable"),
        (["--user="], "--user"),
        (["--", ""], "the command is empty"),
    ],
)
def test_what_is_no_volume_variable_or_command_is_refused(
    commands: list[Command],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    assert main(["run", "demo", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert commands == []


def test_a_variable_that_is_not_set_is_said(
    commands: list[Command], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    assert main(["run", "demo", "-e", "ABSENT"]) == 7
    said = " ".join(capsys.readouterr().err.split())
    assert "-e ABSENT: your environment has no such variable" in said
    assert commands[0].env == {}


@pytest.mark.parametrize(
    ("sent", "said"),
    [(0, "the engine already has it, nothing sent"), (2_500_000, "sent 2.5 MB")],
)
@pytest.mark.usefixtures("commands")
def test_a_loaded_image_says_its_name_and_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sent: int, said: str
) -> None:
    loaded = []

    def load_image(root: Any, tag: str, progress: Any) -> tuple[str, int]:
        loaded.append(tag)
        return "sha256:1", sent

    monkeypatch.setattr(of_run, "load_image", load_image)
    assert main(["load", "demo"]) == 0
    out, err = capsys.readouterr()
    assert out == "sha256:1\n"
    assert f"rocm/primus:v26.11-demo: {said}" in err
    assert main(["load", "demo", "--json"]) == 0
    document = capsys.readouterr().out
    assert f'"bytes_sent": {sent}' in document
    assert f'"manifest": "{digest_of(b"{}")}"' in document
    assert loaded == ["rocm/primus:v26.11-demo"] * 2
