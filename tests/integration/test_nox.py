"""nox from an environment that holds nothing else: the sessions bring the project."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from host_tools import needs

pytestmark = [pytest.mark.integration, needs("git")]

REPOSITORY = Path(__file__).parents[2]

# Added to the module of the verb `plan`, whose first step it replaces.
WAITING = """

def _planned(args):
    import time

    print("waiting", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files as they are, without its environment."""
    folder = tmp_path_factory.mktemp("nox") / "checkout"
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        if (source := REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
    return folder


def installed(version: str, folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "-q", f"nox=={version}"], check=True)
    return folder / "bin/nox"


@pytest.fixture(scope="module")
def nox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("2025.11.12", tmp_path_factory.mktemp("venv"))


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}


def run(nox: Path, checkout: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [nox, *words], cwd=checkout, env=environment(), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_first_session_makes_the_environment_and_the_next_ones_use_it(
    nox: Path, checkout: Path
) -> None:
    code, first = run(nox, checkout, "-s", "plan", "--", "cpu")
    assert code == 0, first
    assert first.count("Installing the project into .nox/primus-") == 1
    code, second = run(nox, checkout, "-s", "plan", "--", "cpu")
    assert code == 0, second
    assert "Installing" not in second
    assert "Encoding detection" not in first + second
    assert "uv binary" not in first + second


# The newest nox, above, runs the same sessions.
@pytest.mark.slow
def test_debians_nox_runs_a_session(checkout: Path, tmp_path: Path) -> None:
    code, said = run(
        installed("2022.11.21", tmp_path / "venv"), checkout, "-s", "plan", "--", "cpu"
    )
    assert code == 0, said
    assert "Encoding detection" not in said


def test_an_error_is_a_sentence_and_fails_the_session(nox: Path, checkout: Path) -> None:
    code, said = run(nox, checkout, "-s", "plan", "--", "cpuu")
    assert code == 1
    assert "did you mean 'cpu'?" in said
    assert "primus plan: the input is wrong" in said
    assert "Traceback" not in said


def test_an_interrupt_reaches_the_command(nox: Path, checkout: Path) -> None:
    module = checkout / "src/primus_images/cli/host/build.py"
    before = module.read_text()
    module.write_text(before + WAITING)
    process = subprocess.Popen(
        [nox, "-s", "plan", "--", "cpu"],
        cwd=checkout,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=50)[0]
    module.write_text(before)
    assert process.returncode == 130, said
    assert "primus plan: interrupted" in said
    assert "Traceback" not in said


def test_a_changed_pyproject_installs_again_and_a_failure_is_a_sentence(
    nox: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = checkout / "pyproject.toml"
    before = project.read_text()
    project.write_text(before + "# changed\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    code, said = run(nox, checkout, "-s", "plan", "--", "cpu")
    assert code == 1
    assert "Installing the project" in said
    assert "pip could not install the project" in said
    assert "Traceback" not in said
    project.write_text(before)
