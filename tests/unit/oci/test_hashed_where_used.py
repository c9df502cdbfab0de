"""Every input is hashed as it streams into a layer: an edit during the build never hides under the
old key.
"""

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from project_kit import Kit, make_project


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


def build_with_edit(kit: Kit, edit: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Build, and ``edit`` when everything is planned and nothing of the layer alpha is read yet."""
    # The build takes a lock called after the key before it reads anything.
    actions = kit.root.parent / "other-store/actions"
    (key,) = [path.stem for path in actions.iterdir() if b'"name":"alpha"' in path.read_bytes()]
    locks = kit.root / ".primus/store/locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / key).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        inode = os.fstat(held.fileno()).st_ino
        process = subprocess.Popen(
            kit.command("build", "demo"),
            cwd=kit.root,
            env=kit.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 20
        while not re.search(rf"-> FLOCK .*:{inode} ", Path("/proc/locks").read_text()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        edit()
    out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def same_size_same_time(path: Path, data: bytes) -> None:
    status = path.stat()
    assert len(data) == status.st_size
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def prepared(kit: Kit) -> str:
    """The digest of the project as it is, from a store elsewhere; this one gets its layout, and
    nothing in it.
    """
    return kit.build("demo", "--store", str(kit.root.parent / "other-store")).digest


def test_an_edit_of_the_same_size_and_time_is_found(kit: Kit) -> None:
    blob = kit.root / "parts/alpha/blob"
    old = blob.read_bytes()
    clean = prepared(kit)
    done = build_with_edit(kit, lambda: same_size_same_time(blob, b"x" * len(old)))
    assert done.returncode == 1, done.stderr
    assert "parts/alpha/blob changed" in done.stderr
    assert "Traceback" not in done.stderr
    changed = kit.build().digest
    assert changed != clean
    same_size_same_time(blob, old)
    assert kit.build().digest == clean
    assert kit.build("demo", "--rehash").digest == clean


@pytest.mark.parametrize("what", ["gone", "shorter", "longer", "pipe", "link", "folder"])
def test_a_file_that_becomes_something_else_is_found(kit: Kit, what: str) -> None:
    blob = kit.root / "parts/alpha/blob"
    old = blob.read_bytes()
    clean = prepared(kit)

    def edit() -> None:
        blob.unlink()
        if what == "pipe":
            os.mkfifo(blob)
        elif what == "link":
            (kit.root / "same").write_bytes(old)
            blob.symlink_to("../../same")
        elif what == "folder":
            blob.mkdir()
        elif what != "gone":
            blob.write_bytes(old[:-1] if what == "shorter" else old + b"x")

    done = build_with_edit(kit, edit)
    assert done.returncode == 1, done.stderr
    assert "parts/alpha/blob changed" in done.stderr
    assert "Traceback" not in done.stderr
    if blob.is_dir():
        blob.rmdir()
    else:
        blob.unlink(missing_ok=True)
    blob.write_bytes(old)
    assert kit.build().digest == clean


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def test_rehash_walks_from_the_index_to_every_blob(kit: Kit) -> None:
    clean, other = kit.build().digest, kit.build("other").digest
    blobs = sorted((kit.root / ".primus/store/blobs/sha256").iterdir())
    sound = {path.name: path.read_bytes() for path in blobs}
    # All of them at once, and some alone: what a damaged manifest names cannot be found through it.
    for group in (blobs, blobs[:1], blobs[len(blobs) // 2 :][:1]):
        for path in group:
            damage(path)
        result = kit.build("demo", "--rehash")
        assert result.digest == clean
        assert "is damaged" in result.err
        assert kit.build("other").digest == other
        assert {p.name: p.read_bytes() for p in blobs[0].parent.iterdir()} == sound
