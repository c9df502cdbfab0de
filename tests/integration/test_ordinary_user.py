"""The whole chain as root and as an ordinary user: lock, base, wheels, bytecode, image, run; the same digest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_native_build import lend_files
from test_sandbox_user import a_user

from host_tools import needs
from project_kit import SOURCE, Kit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="making users needs root"),
    needs("newuidmap"),
]

VERSIONS = """\
release: v26.11
created: 2026-11-20
bases:
  bookworm:
    suite: bookworm
    python: 3.11.2
    packages: [libpython3.11-stdlib, python3.11-minimal]
components:
  pyyaml:
    name: PyYAML
    pins:
      - {wheel: pyyaml, version: 6.0.3, channel: pypi}
"""
TARGET = """\
description: One package on a small base
base: bookworm
channels: [pypi]
components: [pyyaml]
command: [sh]
"""


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    """A project that root has built, in a place that other users may enter."""
    place = Path(tempfile.mkdtemp(prefix="primus-u-"))
    place.chmod(0o755)
    kit = Kit(place / "project")
    kit.write("versions.yaml", VERSIONS)
    kit.write("images/small.yaml", TARGET)
    lend_files(kit)
    kit.build("small")
    yield kit
    shutil.rmtree(place, ignore_errors=True)


def as_user(user: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SOURCE), *(p for p in sys.path if "site-packages" in p)]
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "USER", "XDG_RUNTIME_DIR", "TMPDIR")}
    return subprocess.run(
        ["runuser", "-u", user, "--", _python(user), "-m", "primus.cli.main", *words],
        cwd=folder,
        env={**env, "PYTHONPATH": os.pathsep.join(paths), "HOME": f"/home/{user}", "USER": user},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _python(user: str) -> str:
    """An interpreter that the user may start and that sees this environment's packages."""
    code = "import sys, zstandard; assert sys.version_info[:2] == " + repr(tuple(sys.version_info[:2]))
    paths = os.pathsep.join(p for p in sys.path if "site-packages" in p)
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = ["runuser", "-u", user, "--", "env", f"PYTHONPATH={paths}", python, "-c", code]
        if subprocess.run(command, capture_output=True, cwd="/", check=False).returncode == 0:
            return python
    pytest.skip("no Python that an ordinary user may start has this environment's packages")


def lend_project(kit: Kit, user: str) -> Path:
    """The project and the files its lock names, as the user's own."""
    folder = kit.root.parent / user
    shutil.copytree(kit.root / "images", folder / "images")
    shutil.copy(kit.root / "versions.yaml", folder)
    files = folder / ".primus/files/sha256"
    files.mkdir(parents=True)
    for file in json.loads((kit.root / "images/locks/pypi/small.json").read_text())["files"]:
        shutil.copy(kit.root / ".primus/files/sha256" / file["sha256"], files)
    subprocess.run(["chown", "-R", user, folder], check=True)
    return folder


def test_ordinary_user_gets_the_same_digest_and_can_run(kit: Kit) -> None:
    want = kit.build("small").digest
    with a_user("primus-t2", "--key", "SUB_UID_COUNT=65536") as user:
        folder = lend_project(kit, user)
        built = as_user(user, folder, "build", "small", "--locked", "--offline")
        assert built.returncode == 0, built.stderr
        assert built.stdout.splitlines()[-1] == want
        code = "import os, yaml; print(os.getuid(), yaml.safe_load('a: [1]'))"
        ran = as_user(user, folder, "run", "small", "--", "python3", "-c", code)
        assert (ran.returncode, ran.stdout) == (0, "0 {'a': [1]}\n"), ran.stderr
        subprocess.run(["rm", "-rf", folder], check=True)


def test_user_without_a_range_of_ids_is_told_the_command(kit: Kit) -> None:
    with a_user("primus-t3", "--key", "SUB_UID_COUNT=0", "--key", "SUB_GID_COUNT=0") as user:
        folder = lend_project(kit, user)
        built = as_user(user, folder, "build", "small", "--locked", "--offline")
        assert built.returncode == 3, built.stderr
        assert "usermod --add-subuids" in built.stderr
        assert "Traceback" not in built.stderr
        subprocess.run(["rm", "-rf", folder], check=True)
