import ast
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from primus_images.plan.skeleton import own_command
from primus_images.schema import build
from primus_images.system import banner
from primus_images.versions.components import Versions
from primus_images.yamlfile import read

SRC = Path(__file__).resolve().parents[3] / "src"


def test_when_to_greet() -> None:
    assert banner.wanted(["bash"], {}, terminal=False)
    assert banner.wanted(["/bin/sh"], {"PRIMUS_NO_BANNER": "0"}, terminal=False)
    assert banner.wanted(["python3", "x.py"], {}, terminal=True)
    assert not banner.wanted(["python3", "x.py"], {}, terminal=False)
    assert not banner.wanted(["bash", "-c", "true"], {}, terminal=False)
    assert not banner.wanted(["bash"], {"PRIMUS_NO_BANNER": "1"}, terminal=True)


def test_the_greeting() -> None:
    components = {"PyTorch": "2.13.0", "Triton": "3.6.0"}
    image = {
        "release": "v26.11",
        "target": "cpu",
        "channel": "pypi",
        "preview": "a test",
        "supported_until": "2027-05-20",
        "components": components,
    }
    assert banner.compose(image, "none found", date(2026, 11, 30)).splitlines() == [
        "Primus v26.11 cpu (pypi channel)",
        "  PREVIEW, no release: a test",
        "  supported until 2027-05-20",
        "  PyTorch  2.13.0",
        "  Triton   3.6.0",
        "  GPU: none found",
        "  start: primus train llama3-proxy    help: primus --help",
    ]
    late = banner.compose(image, "none found", date(2027, 5, 21))
    assert "  support ended on 2027-05-20: use a later release" in late.splitlines()
    assert banner.compose({}, "x", date(2026, 11, 30)).startswith("Primus unnamed build\n")


def greet(
    *command: str, image: str | None = None, tmp_path: Path
) -> subprocess.CompletedProcess[str]:
    """Run the banner as the image does, with another image file."""
    file = tmp_path / "image.json"
    if image is not None:
        file.write_text(image)
    code = (
        "import sys; from pathlib import Path; from primus_images.system import banner; "
        f"banner.IMAGE_FILE = Path({str(file)!r}); sys.exit(banner.main(sys.argv[1:]))"
    )
    environment = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    words = [sys.executable, "-c", code, *command]
    return subprocess.run(
        words, env=environment, input="", capture_output=True, text=True, check=False
    )


def test_the_command_replaces_the_banner(tmp_path: Path) -> None:
    ended = greet("sh", "-c", "echo out; exit 9", tmp_path=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (9, "out\n", "")


def test_a_shell_is_greeted_on_standard_error_only(tmp_path: Path) -> None:
    ended = greet("sh", image=json.dumps({"release": "v26.11", "target": "cpu"}), tmp_path=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.startswith("Primus v26.11 cpu\n")


@pytest.mark.parametrize(
    "image", [None, "", "{broken", "[]", '{"components": 5}', '{"components": {"a": null}}']
)
def test_a_broken_image_file_never_stops_the_command(image: str | None, tmp_path: Path) -> None:
    assert greet("sh", image=image, tmp_path=tmp_path).returncode == 0


def test_a_missing_command_is_127_as_in_a_shell(tmp_path: Path) -> None:
    ended = greet("no-such-command", tmp_path=tmp_path)
    assert ended.returncode == 127
    assert "'no-such-command' cannot be run: No such file" in ended.stderr
    assert greet(str(tmp_path), tmp_path=tmp_path).returncode == 126


def test_what_ships_imports_only_what_ships() -> None:
    """Imports inside functions count, too: they fail when a user gets there."""
    root = Path(__file__).parents[3]
    (pin,) = build(Versions, read(root / "versions.yaml")).components["primus"].pins
    shipped = {
        file
        for word in pin.include
        for file in [SRC / "primus_images" / word, *(SRC / "primus_images" / word).rglob("*.py")]
    }
    wanted = {}
    for file in (file for file in shipped if file.suffix == ".py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            wanted |= {name: file.name for name in names if name.startswith("primus_images.")}
    missing = {
        name: file
        for name, file in wanted.items()
        if not shipped
        & {SRC / f"{name.replace('.', '/')}.py", SRC / name.replace(".", "/") / "__init__.py"}
    }
    assert missing == {}


@pytest.mark.parametrize(
    ("command", "added"),
    [
        (["bash"], True),
        (["/bin/bash", "-ic", "true"], True),
        (["bash", "--rcfile", "mine"], False),
        (["bash", "--norc"], False),
        (["sh"], False),
        (["primus", "train", "bash"], False),
    ],
)
def test_bash_gets_the_images_start_up_file(
    command: list[str], added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banner, "BASHRC", tmp_path / "bashrc")
    assert banner.with_bashrc(command) == command, "an image without the file"
    (tmp_path / "bashrc").touch()
    wanted = [command[0], "--rcfile", str(tmp_path / "bashrc"), *command[1:]] if added else command
    assert banner.with_bashrc(command) == wanted


def test_a_login_shell_finds_primus_and_loads_its_completion_at_the_first_tab(
    tmp_path: Path,
) -> None:
    profile = own_command("opt/venv/lib/python3.11/site-packages/primus_images")[
        "etc/profile.d/primus.sh"
    ]["text"]
    (tmp_path / "primus.sh").write_text(str(profile))
    tool = tmp_path / "register-python-argcomplete"
    tool.write_text('#!/bin/sh\necho "complete -W words $1"\n')
    tool.chmod(0o755)
    script = (
        '. ./primus.sh; . ./primus.sh; echo "$PATH"; _primus_first_tab; echo "$?"; '
        "complete -p primus"
    )
    ended = subprocess.run(
        [
            "bash",
            "--noprofile",
            "--norc",
            "-eu",
            "-c",
            script.replace("_tab;", "_tab || echo again;"),
        ],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split("\n")[:2] == [
        f"/opt/primus/bin:/opt/venv/bin:{tmp_path}:/usr/bin:/bin:/workspace/bin",
        "again",
    ]
    assert "complete -W 'words' primus" in ended.stdout
    # Other shells read the file, too.
    subprocess.run(["dash", "-eu", str(tmp_path / "primus.sh")], env={"PATH": "/bin"}, check=True)


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "primus_images.files":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import primus_images.system.banner
"""


def test_ctrl_c_before_the_command_is_no_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_the_command_of_amds_wheel_does_not_come_first(tmp_path: Path) -> None:
    files = own_command("opt/venv/lib/python3.11/site-packages/primus_images")
    for path, content in files.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(str(content["text"]).replace("/opt/", f"{tmp_path}/opt/"))
        target.chmod(0o755)
    # What pip writes for the wheel.
    amds = tmp_path / "opt/venv/bin/primus"
    amds.write_text("#!/bin/sh\necho AMD\n")
    done = subprocess.run(
        ["sh", "-c", '. "$0"; command -v primus', str(tmp_path / "etc/profile.d/primus.sh")],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{tmp_path}/opt/primus/bin/primus\n"
    assert "primus_images.cli.main" in (tmp_path / "opt/primus/bin/primus").read_text()


def test_amds_wheel_beside_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert banner.beside_amds() == ""
    monkeypatch.setattr(banner, "version", {"primus": "26.9"}.__getitem__)
    assert "AMD's primus 26.9 is installed, too: `primus-cli`" in banner.beside_amds()
