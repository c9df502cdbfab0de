"""`--version` says which code this is, and help fits a terminal of 80 columns."""

import json
import subprocess
from pathlib import Path

import pytest

from gits import git
from primus_images import __version__
from primus_images.cli.main import main
from primus_images.cli.verb import VERBS, parser_of
from primus_images.cli.version import version_text
from proof_kit import finished_run

LEAST_COMMIT = 12


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "versions.yaml").write_text("# pins\nrelease: v26.11\n", encoding="utf-8")
    return tmp_path


def test_a_checkout_has_a_release_and_a_commit(checkout: Path) -> None:
    assert version_text(checkout, checkout / "none") == (
        f"primus-images {__version__} (release v26.11)"
    )
    for words in (("init", "-q"), ("add", "versions.yaml"), ("commit", "-q", "-m", "pins")):
        git(checkout, *words)
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout[:LEAST_COMMIT]
    text = version_text(checkout, checkout / "none")
    assert text == f"primus-images {__version__} (release v26.11, commit {commit})"


def test_an_image_has_its_own_release_and_name(tmp_path: Path) -> None:
    facts = tmp_path / "image.json"
    facts.write_text(
        json.dumps({"release": "v26.12", "target": "mi300x", "preview": "computes on the CPU"})
    )
    text = version_text(tmp_path, facts)
    assert text == f"primus-images {__version__} (release v26.12, image mi300x, preview)"


def test_code_without_a_checkout_has_its_version_alone(tmp_path: Path) -> None:
    assert version_text(tmp_path, tmp_path / "none") == f"primus-images {__version__}"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"primus-images {__version__}")


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_help_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = 0
    for name in VERBS:
        for line in parser_of(name).format_help().splitlines():
            # A path or an address is never broken.
            if " " in line.strip():
                widest = max(widest, len(line))
                assert len(line) <= columns, f"{name}: {line}"
    assert widest > columns - 10


@pytest.mark.parametrize("words", [["--help"], []])
def test_help_in_a_pipe_has_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(words) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_report_in_a_pipe_has_120_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    runs = [str(finished_run(tmp_path / f"{number}-{'long' * 20}")) for number in range(6)]
    assert main(["report", *runs, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "→" not in line) <= 120


def test_an_example_of_two_lines_is_the_same_command() -> None:
    for name, verb in VERBS.items():
        shown = parser_of(name).format_help().partition("example: ")[2]
        joined = " ".join(shown.replace("\\\n", " ").split())
        assert joined == " ".join(verb.example.replace("\\\n", " ").split())
