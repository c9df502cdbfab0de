"""Containers of an ordinary user. That builds give root's digest, test_native_build.py shows."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_kit import needs_busybox

from host_tools import needs
from project_kit import SOURCE

NEEDS_USERS = (
    pytest.mark.skipif(os.geteuid() != 0, reason="making users needs root"),
    needs("newuidmap"),
)
pytestmark = [pytest.mark.integration, needs_busybox, *NEEDS_USERS]


@contextlib.contextmanager
def a_user(name: str, *options: str) -> Iterator[str]:
    subprocess.run(["userdel", "-r", name], check=False, capture_output=True)
    subprocess.run(["useradd", "--create-home", *options, name], check=True)
    try:
        yield name
    finally:
        # A process of podman keeps the user's name space, and one that was killed takes a while to
        # end.
        end = time.monotonic() + 60
        while subprocess.run(
            ["userdel", "-r", name], check=time.monotonic() > end, capture_output=True
        ).returncode:
            subprocess.run(
                ["runuser", "-u", name, "--", "kill", "-KILL", "-1"],
                check=False,
                capture_output=True,
            )


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    with a_user("primus-t1", "--key", "SUB_UID_COUNT=65536") as name:
        yield name


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # pytest's own directories are closed to other users.
    path = Path(tempfile.mkdtemp(prefix="primus-t-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def as_user(user: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SOURCE), *(p for p in sys.path if "site-packages" in p)]
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("HOME", "USER", "XDG_RUNTIME_DIR", "TMPDIR")
    }
    return subprocess.run(
        ["runuser", "-u", user, "--", _python(user), "-m", "primus_images.cli.main", *words],
        cwd=folder,
        env={**env, "PYTHONPATH": os.pathsep.join(paths), "HOME": f"/home/{user}", "USER": user},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        umask=0o077,
    )


def _python(user: str) -> str:
    """An interpreter that the user may start and that sees this environment's packages."""
    code = "import sys, zstandard; assert sys.version_info[:2] == " + repr(
        tuple(sys.version_info[:2])
    )
    paths = os.pathsep.join(p for p in sys.path if "site-packages" in p)
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = ["runuser", "-u", user, "--", "env", f"PYTHONPATH={paths}", python, "-c", code]
        if subprocess.run(command, capture_output=True, cwd="/", check=False).returncode == 0:
            return python
    pytest.skip("no Python that an ordinary user may start has this environment's packages")


SCRIPT = """
import json, os, sys
from pathlib import Path
from primus_images.errors import PrimusError
from primus_images.sandbox import layers, podman
from primus_images.sandbox.engines import choose
from primus_images.sandbox.state import remove_tree
from primus_images.sandbox.container import Command, Mount
from sandbox_kit import Entry, directory, image

place = Path(sys.argv[1])
root = image(place, [directory("srv"), directory("srv/full"), Entry(name="srv/full/low", data=b""),
                     Entry(name="srv/w", data=b"", uid=1000, gid=109)],
             [directory("srv"), directory("srv/full"), Entry(name="srv/full/high", data=b"")])
try:
    podman.say = layers.say = lambda _: None
    engine = choose("podman")
    exec(sys.argv[2])
except PrimusError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def run(user: str, place: Path, code: str) -> tuple[int, str]:
    kit = place / "kit"
    kit.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("sandbox_kit.py"), kit)
    paths = [
        str(kit),
        *(p for p in sys.path if p and "python311.zip" not in p and not p.startswith("/root")),
    ]
    done = subprocess.run(
        ["runuser", "-u", user, "--", _python(user), "-c", SCRIPT, str(place / "img"), code],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(paths),
            "HOME": f"/home/{user}",
        },
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        umask=0o077,
    )
    return done.returncode, done.stdout


SH = "sys.exit(engine.run(root, Command(argv=('sh', '-c', {!r}), {})))"


def test_runs_as_root_inside(user, place):
    script = (
        "id -u; ls /srv /srv/full; stat -c '%u %g' /srv/w /home/worker; ip -o link | wc -l; exit 9"
    )
    code, out = run(user, place, SH.format(script, ""))
    assert out == "0\n/srv:\nfull\nw\n\n/srv/full:\nhigh\nlow\n1000 109\n1000 1000\n1\n"
    assert code == 9


def test_other_users_inside(user, place):
    script = "id -u; id -G; touch /tmp/x; stat -c %u /tmp/x"
    assert run(user, place, SH.format(script, "user='worker'")) == (0, "1000\n1000 109\n1000\n")
    code, out = run(user, place, SH.format("true", "user='70000'"))
    assert code == 3
    assert "podman cannot run tiny" in out


def test_mounts_belong_to_the_user(user, place):
    code = (
        "(place / 'rw').mkdir(); (place / 'ro').mkdir()\n"
        "mounts = (Mount(source=place / 'rw', target='/rw', read_only=False), "
        "Mount(source=place / 'ro', target='/ro'))\n"
        "script = 'touch /rw/f; touch /ro/f 2>/dev/null && echo bad; stat -c %u /rw/f'\n"
        "engine.run(root, Command(argv=('sh', '-c', script), mounts=mounts))\n"
        "print((place / 'rw/f').stat().st_uid == os.getuid())\n"
    )
    assert run(user, place, code) == (0, "0\nTrue\n")


def test_the_users_own_settings_of_podman_do_not_count(user, place):
    folder = Path(f"/home/{user}/.config/containers")
    folder.mkdir(parents=True)
    (folder / "storage.conf").write_text("damaged = [\n")
    subprocess.run(["chown", "-R", user, f"/home/{user}/.config"], check=True)
    assert run(user, place, SH.format("exit 7", "network=False")) == (7, "")


def test_the_storage_can_be_removed(user, place):
    code = (
        "engine.run(root, Command(argv=('true',)))\n"
        "print([path.name for path in root.cache.iterdir()] == [f'user-{os.getuid()}'])\n"
        "remove_tree(root.cache)\n"
        "print(root.cache.exists())\n"
    )
    assert run(user, place, code) == (0, "True\nFalse\n")


@pytest.mark.skipif(
    Path("/sys/fs/cgroup/cgroup.controllers").exists(), reason="control groups of version 1 only"
)
def test_a_limit_that_cannot_be_enforced_is_refused(user, place):
    code, out = run(user, place, SH.format("echo ran", "memory_bytes=1 << 30"))
    assert code == 3
    assert "control groups of version 1 let only root set a limit" in out
    assert "ran" not in out
