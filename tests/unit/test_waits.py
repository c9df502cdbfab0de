"""A wait of more than 2 s says for what, who causes it and how to go on, whoever holds the lock."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from primus_images import waits
from primus_images.errors import HostError
from primus_images.release import registry, transport
from primus_images.versions import indexes
from primus_images.versions.traffic import run_tool
from project_kit import Kit, make_project

HOLD = """
import fcntl, os, sys, time
locks = [open(name, "a") for name in sys.argv[2:]]
for lock in locks:
    fcntl.flock(lock, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holder(*paths: Path, state: str = "stopped") -> Iterator[int]:
    """A process that holds the locks, running or stopped."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-c", HOLD, state, *map(str, paths)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        if state == "stopped":
            os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = make_project(tmp_path_factory.mktemp("waits") / "project")
    kit.build()
    return kit


COMMANDS = [
    ("in-use", words)
    for words in (
        "plan demo",
        "build demo",
        "explain demo",
        "check demo",
        "publish demo --to localhost:9/x --dry-run",
        "validate demo",
        "clean",
        "verify demo",
        "load demo",
        "sbom demo",
        "run demo -- true",
    )
] + [("tmp", "build demo --rehash"), ("index", "build demo")]


IMPATIENT = (
    "from primus_images import waits; from primus_images.cli.main import main; "
    "waits._PATIENCE_S = 0.05; main()"
)


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_every_command_that_locks_names_a_stopped_holder(kit: Kit, name: str, words: str) -> None:
    if name == "index":
        kit.write("parts/beta/blob", b"new")
    command = [sys.executable, "-c", IMPATIENT, *words.split()]
    with (
        holder(kit.root / f".primus/store/locks/{name}") as pid,
        subprocess.Popen(
            command, cwd=kit.root, env=kit.env, stderr=subprocess.PIPE, text=True
        ) as waiting,
    ):
        assert waiting.stderr
        line = next((line for line in waiting.stderr if line.startswith("… waiting")), "it ended")
        waiting.kill()
    assert f"process {pid} (`" in line
    assert f"holds it (to end it: kill {pid})" in line


def test_a_pipe_instead_of_a_lock_does_not_block(kit: Kit) -> None:
    os.mkfifo(pipe := kit.root / ".primus/in-use.pipe")
    pipe.rename(kit.root / ".primus/in-use")
    assert kit.primus("plan", "demo", timeout=20).code == 0


def test_a_holder_is_named_until_it_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lock"
    with holder(path, state="running") as pid, path.open("a") as file:
        sentence = waits.holders(file.fileno(), path)
        assert f"process {pid} (`{sys.executable} -c" in sentence
        assert sentence.endswith(f"holds it (to end it: kill {pid})")
        threading.Timer(2.5, os.kill, (pid, signal.SIGKILL)).start()
        waits.lock(file.fileno(), "the test", path)
    assert capfd.readouterr().err == f"… waiting for the test: {sentence}\n"


def test_a_thread_that_waits_for_another_is_not_told_to_end_this_command(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open() as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert waits.holders(second.fileno(), path) == "another part of this command holds it"


def test_a_lock_is_tried_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    (tmp_path / "link").symlink_to(path)
    with path.open("w") as first, path.open() as second:
        assert waits.is_unlocked(path)
        assert waits.try_lock(first.fileno(), shared=True)
        assert waits.try_lock(second.fileno(), shared=True)
        assert not waits.try_lock(second.fileno())
        assert not waits.is_unlocked(path)
    assert waits.is_unlocked(path)
    assert waits.is_unlocked(tmp_path)
    assert not waits.is_unlocked(tmp_path / "link")
    assert not waits.is_unlocked(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(
    ("folder", "verbs"),
    [
        (".primus", ["clean", "plan demo", "explain demo", "check demo"]),
        (".primus/store", ["clean", "plan demo", "explain demo", "check demo"]),
        (".primus/store/blobs", ["clean", "plan demo", "explain demo", "check demo"]),
        (".primus/store/actions", ["clean", "plan demo", "explain demo", "check demo"]),
        ("images", ["plan demo"]),
        ("recipes", ["plan demo"]),
        ("parts/alpha/sub", ["plan demo"]),
    ],
)
def test_the_store_of_another_user_is_neither_empty_nor_damaged(
    folder: str, verbs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = make_project(tmp_path / "project")
    kit.build()
    (kit.root / folder).chmod(0o700)
    for parent in (tmp_path, *tmp_path.parents):
        # Each worker of the tests has a folder of its own between the root of all and this one.
        if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o711)
    monkeypatch.setattr(
        os, "chdir", lambda path, chdir=os.chdir: (chdir(path), os.setgid(65534), os.setuid(65534))
    )
    for verb in verbs:
        result = kit.primus(*verb.split())
        assert result.code in (2, 3)
        assert re.search(
            "(?s)(you may not read|[Pp]ermission denied).*belongs to root, and you are nobody",
            result.err,
        )


ANSWERS = {
    "registry": lambda host: registry.Repository(f"{host}/a").digest("v1"),
    "index": lambda host: indexes.Indexes(urls=()).offers("p", f"http://me:secret@{host}"),
    "tool": lambda host: run_tool(
        ["sh", "-c", "sleep 0.5; exit 1", "sh"], f"http://me:secret@{host}/?key=secret", "copy"
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_silent_source_is_named_without_its_login(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "_PATIENCE_S", 0.05)
    for module in (transport, indexes):
        monkeypatch.setattr(module, "_TIMEOUT", (0.5, 0.5))
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.suppress(HostError):
            ANSWERS[name](host)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("… ")]
    assert len(lines) == 1
    assert host in lines[0]
    assert "(Ctrl-C ends this command; finished work is kept)" in lines[0]
    assert "secret" not in lines[0]


def test_what_arrives_in_time_is_no_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "_PATIENCE_S", 0.2)
    size = 0
    with waits.answer_of("a slow server", lambda: size):
        for _ in range(20):
            time.sleep(0.05)
            size += 1
    assert capfd.readouterr().err == ""


def test_threads_that_wait_for_the_same_print_one_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "_PATIENCE_S", 0.02)

    def wait(_: int) -> None:
        with waits.answer_of("one signer"):
            time.sleep(0.2)

    for again, least, most in ((60.0, 1, 1), (0.1, 2, 5)):
        monkeypatch.setattr(waits, "_AGAIN_S", again)
        with ThreadPool(8) as pool:
            pool.map(wait, range(16), 1)
        assert least <= capfd.readouterr().err.count("… waiting for one signer") <= most
