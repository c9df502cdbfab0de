"""Faults of the surroundings and hostile files: each ends in one sentence and the right exit code,
never in a hang.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus_images.cli.image.recipes import ListOptions
from primus_images.cli.main import main

ROOT = Path(__file__).parents[2]
PRIMUS = f"{sys.executable} -m primus_images.cli.main"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **environment}
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, timeout=30, check=False
    )


@pytest.mark.parametrize("verb", ["--version", "--help", "list"])
def test_output_that_cannot_be_written_is_a_sentence(verb: str) -> None:
    done = shell(f"{PRIMUS} {verb} >/dev/full")
    assert done.returncode == 3
    assert b"the disk is full" in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    assert shell(f"set -o pipefail; {PRIMUS} {verb} | true").stderr == b""


@pytest.mark.parametrize("verb", ["show x", "frobnicate", "list >/dev/full"])
def test_the_exit_code_tells_what_happened_when_no_message_can_be_written(verb: str) -> None:
    with_message, without = shell(f"{PRIMUS} {verb}"), shell(f"{PRIMUS} {verb} 2>/dev/full")
    assert with_message.returncode == without.returncode
    assert without.returncode in (2, 3)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["--version", "list"])
def test_a_closed_standard_stream_is_as_the_empty_device(verb: str, closed: str) -> None:
    done = shell(f"{PRIMUS} {verb} {closed}")
    assert done.returncode == 0
    assert done.stderr == b""
    # No file that is opened later gets its number: programs would write into it.
    code = "import os; from primus_images.cli.main import main; main(['--version']); "
    code += "os._exit(os.open('/dev/zero', os.O_RDONLY))"
    assert shell(f'{sys.executable} -c "{code}" {closed}').returncode > 2


# An interrupt while a module is imported, and a second one.
@pytest.mark.parametrize(
    "module", ["primus_images.recipes.load", "primus_images.cli.image.recipes"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_during_start_up_is_a_sentence(module: str, times: int) -> None:
    program = f"""
import os, signal, sys
from primus_images.cli.main import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
if {times} == 2:
    class Slow:
        def write(self, text):
            os.kill(os.getpid(), signal.SIGINT)
        def flush(self):
            pass
    sys.stderr = Slow()
sys.exit(main(["list"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.count("\n") == 2 - times
    assert "interrupted" in done.stderr or times == 2


def test_output_is_utf_8_whatever_the_locale() -> None:
    done = shell(f"{PRIMUS} show llama3-proxy", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "×" in done.stdout.decode()


@pytest.mark.parametrize("verb", ["show llama3-proxy", "build cpu"])
def test_a_deleted_current_folder_is_a_sentence(verb: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(f"cd {gone} && rmdir {gone} && {PRIMUS} {verb}", PYTHONPATH=str(ROOT / "src"))
    assert done.returncode == 3
    assert b"the current folder no longer exists" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EACCES, "/srv belongs to root, and you"), (errno.EROFS, "choose a folder on a file")],
)
def test_a_file_that_cannot_be_used_comes_with_advice(
    number: int, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_options: ListOptions) -> int:
        raise OSError(number, os.strerror(number), "/srv/store/tmp")

    monkeypatch.setattr("primus_images.cli.image.recipes.list_recipes", refuse)
    assert main(["list"]) == 3
    assert f"(/srv/store/tmp)\n  → {hint}" in capsys.readouterr().err


def test_a_path_that_is_too_long_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "a" * 300 + ".yaml"]) == 2
    assert main(["show", "a/" * 3000 + "a.yaml"]) == 2
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"uses: [{'a' * 300}]\n")
    assert main(["show", str(recipe)]) == 2
    assert capsys.readouterr().err.count("too long") == 3


def test_validate_shows_its_jobs_without_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "mi355x", "--dry-run", "--json", "--project", str(ROOT)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 50
    assert {row["suite"] for row in rows} == {"standard", "quick"}
    assert all(row["jobs"][0].startswith("primus train ") for row in rows)
