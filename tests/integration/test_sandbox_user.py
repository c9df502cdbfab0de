"""Everything works for an ordinary user, and where it cannot, one sentence says why."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_kit import needs_busybox

from host_tools import needs

pytestmark = [
    pytest.mark.integration,
    needs_busybox,
    pytest.mark.skipif(os.geteuid() != 0, reason="making users needs root"),
    needs("newuidmap"),
]

SCRIPT = """
import json, os, sys
from pathlib import Path
from primus.errors import PrimusError
from primus.sandbox.engines import choose, remove_tree
from primus.engine.isolated import run_isolated
from primus.sandbox.container import Command, Mount
from sandbox_kit import Entry, directory, image

place = Path(sys.argv[1])
root = image(place, [directory("srv"), directory("srv/full"), Entry(name="srv/full/low", data=b""),
                     Entry(name="srv/gone", data=b""), Entry(name="srv/w", data=b"", uid=1000, gid=109)],
             [directory("srv"), Entry(name="srv/.wh.gone"), directory("srv/full"),
              Entry(name="srv/full/.wh..wh..opq"), Entry(name="srv/full/high", data=b"")])
try:
    engine = choose("podman")
    exec(sys.argv[2])
except PrimusError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def a_user(name: str, *options: str) -> Iterator[str]:
    subprocess.run(["userdel", "-r", name], check=False, capture_output=True)
    subprocess.run(["useradd", "--create-home", *options, name], check=True)
    try:
        yield name
    finally:
        # A process of podman keeps the user's namespace.
        subprocess.run(["runuser", "-u", name, "--", "kill", "-KILL", "-1"], check=False, capture_output=True)
        subprocess.run(["userdel", "-r", name], check=True, capture_output=True)


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    with a_user("primus-t1", "--key", "SUB_UID_COUNT=65536") as name:
        yield name


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import tempfile

    # pytest's own directories are closed to other users.
    path = Path(tempfile.mkdtemp(prefix="primus-t-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def run(user: str, place: Path, code: str) -> tuple[int, str]:
    # Root's interpreter may lie where others may not look.
    python = next(
        p
        for p in (sys.executable, "/usr/bin/python3")
        if subprocess.run(
            ["runuser", "-u", user, "--", p, "-c", "import sys; assert sys.version_info >= (3, 11)"],
            check=False,
            capture_output=True,
            cwd="/",
        ).returncode
        == 0
    )
    kit = place / "kit"
    kit.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("sandbox_kit.py"), kit)
    paths = [str(kit), *(p for p in sys.path if p and "python311.zip" not in p and not p.startswith("/root"))]
    done = subprocess.run(
        ["runuser", "-u", user, "--", python, "-c", SCRIPT, str(place / "img"), code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "HOME": f"/home/{user}"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


SH = "sys.exit(engine.run(root, Command(argv=('sh', '-c', {!r}), {})))"


def test_runs_as_root_inside(user, place):
    script = "id -u; ls /srv /srv/full; stat -c '%u %g' /srv/w /home/worker; ip -o link | wc -l; exit 9"
    code, out = run(user, place, SH.format(script, ""))
    assert out == "0\n/srv:\nfull\nw\n\n/srv/full:\nhigh\n1000 109\n1000 1000\n1\n"
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


def test_isolated_build(user, place):
    code = (
        "print(run_isolated(root, ['sh', '-c', 'id -u > /out/f; echo $HOME; hostname'], inputs={}, "
        "outputs=place / 'out', env={}, log=place / 'log'))\n"
        "print((place / 'out/f').read_text() + (place / 'log').read_text())\n"
        "print((place / 'out/f').stat().st_uid == os.getuid())\n"
    )
    assert run(user, place, code) == (0, "0\n0\n/tmp/home\nbuild\n\nTrue\n")


def test_the_storage_can_be_removed(user, place):
    code = (
        "engine.run(root, Command(argv=('true',)))\n"
        "print([path.name for path in root.cache.iterdir()] == [f'user-{os.getuid()}'])\n"
        "remove_tree(root.cache)\n"
        "print(root.cache.exists())\n"
    )
    assert run(user, place, code) == (0, "True\nFalse\n")


@pytest.mark.skipif(Path("/sys/fs/cgroup/cgroup.controllers").exists(), reason="control groups of version 1 only")
def test_a_limit_that_cannot_be_enforced_is_refused(user, place):
    code, out = run(user, place, SH.format("echo ran", "memory_bytes=1 << 30"))
    assert code == 3
    assert "control groups of version 1 let only root set a limit" in out
    assert "ran" not in out


def test_a_damaged_blob(user, place):
    code = (
        "path = root.blob(root.layers[0].digest); data = bytearray(path.read_bytes()); data[500] ^= 1\n"
        "path.write_bytes(data)\n"
        "engine.run(root, Command(argv=('true',)))\n"
    )
    status, out = run(user, place, code)
    assert status == 3
    assert "is damaged" in out
    assert "Traceback" not in out


def test_no_subordinate_ids(place):
    with a_user("primus-t2", "--key", "SUB_UID_COUNT=0", "--key", "SUB_GID_COUNT=0") as name:
        code, out = run(name, place, SH.format("true", ""))
    assert code == 3
    assert "user primus-t2 has no subordinate ids in /etc/subuid and /etc/subgid" in out
    assert "usermod --add-subuids" in out
    assert "Traceback" not in out
