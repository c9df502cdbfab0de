"""Podman's own files and the unpacked layers: proven before they are kept, and healed."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_kit import Entry, directory, image, needs_busybox

from host_tools import needs
from primus_images.errors import HostError
from primus_images.sandbox import layers, podman, state
from primus_images.sandbox.container import Command, RootFs
from primus_images.sandbox.podman import Podman, sweep
from project_kit import until

pytestmark = [pytest.mark.integration, needs_busybox, needs("podman")]

CONTENTS = [
    directory("srv"),
    Entry(name="srv/a", data=b"one"),
    Entry(name="srv/b", data=b"two"),
    # Python takes this character for the end of a line.
    Entry(name="a\u2028b", data=b"three"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RootFs:
    root = image(tmp_path_factory.mktemp("tiny"), CONTENTS)
    assert run(root, "true") == 0
    return root


def run(root: RootFs, script: str, tmp_path: Path | None = None) -> int:
    out = Path(os.devnull) if tmp_path is None else tmp_path / "out"
    command = Command(argv=("sh", "-c", script))
    with out.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        return Podman().run(root, command, stdin=nothing, stdout=output, stderr=output)


def place_of(root: RootFs) -> Path:
    known = state.known(state.workspace_of(root.cache))
    assert known is not None
    return known.place


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_state_that_fails_is_not_kept(tiny, tmp_path, monkeypatch):
    program(tmp_path / "bin/runc", "exit 1")
    program(tmp_path / "bin/crun", "exit 1")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        with pytest.raises(HostError, match="cannot run a container here"):
            run(tiny, "true")
    assert run(tiny, "exit 7") == 7


def test_a_disk_without_room_for_the_first_container_is_named(tmp_path, monkeypatch):
    def full(path: object, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    root = image(tmp_path, CONTENTS)
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run(root, "true")
    assert caught.value.filename == str(state.workspace_of(root.cache) / "probe/init")


def test_other_spellings_of_a_path_are_the_same_programs(tiny, monkeypatch):
    before = place_of(tiny)
    monkeypatch.setenv("PATH", "/usr/../usr/sbin:/usr/../usr/bin:/usr/local/bin:/sbin:/bin")
    assert place_of(tiny) == before


def test_podmans_own_failure_is_not_that_of_the_command(tiny, tmp_path, monkeypatch):
    podmans = podman.programs.find("podman")
    refuses = 'case "$*" in *primus-*) echo "it has no configuration" >&2; exit 1;; esac'
    program(tmp_path / "bin/podman", f'{refuses}\nexec {podmans} "$@"')
    assert run(tiny, "exit 1") == 1
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(HostError, match="podman cannot run tiny: it has no configuration"):
        run(tiny, "true")


def test_settings_of_docker_do_not_reach_podman(tiny, tmp_path, monkeypatch):
    # Podman would read the logins there, and fail without the file.
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert run(tiny, "exit 7") == 7


RUNNER = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from sandbox_kit import image
from test_podman_state import CONTENTS
from primus_images.sandbox.container import Command
from primus_images.sandbox.podman import Podman
root = image(Path({place!r}), CONTENTS)
sys.exit(Podman().run(root, Command(argv=("sh", "-c", {script!r}))))
"""


@contextlib.contextmanager
def runner(root: RootFs, script: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a script in a container, by a command of its own, once it says ``ready``."""
    code = RUNNER.format(
        here=str(Path(__file__).parent),
        place=str(root.cache.parent),
        script=f"echo ready; {script}",
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_other_programs_do_not_disturb_a_running_container(tiny, tmp_path, monkeypatch):
    program(tmp_path / "bin/crun", f'exec {podman.programs.find("runc")} "$@"')
    with runner(tiny, "while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 7") as process:
        before = place_of(tiny)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        assert run(tiny, "true") == 0
        assert place_of(tiny) != before
        monkeypatch.undo()
        (name,) = [path.stem for path in _locks(tiny)]
        (state.workspace_of(tiny.cache) / "containers" / name / "root/tmp/go").touch()
        assert process.wait(20) == 7


def _locks(root: RootFs) -> list[Path]:
    return list((state.workspace_of(root.cache) / "containers").glob("*.lock"))


def _spoil(path: Path, how: str) -> None:
    if how in ("missing", "folder"):
        path.unlink()
        if how == "folder":
            path.mkdir()
            (path / "file").touch()
        return
    data = path.read_bytes()
    replaced = {"empty": b"", "half": data[: len(data) // 2], "zeros": bytes(4096) + data[4096:]}
    path.write_bytes(replaced[how])


@pytest.mark.parametrize("how", ["empty", "half", "missing", "zeros", "folder"])
def test_damaged_files_of_podman_heal(tiny, how):
    place = place_of(tiny)
    workspace = state.workspace_of(tiny.cache)
    # A note that is lost lets the next command write the probe again.
    paths = [*workspace.glob("layers/*.listing"), workspace / "probe/init"]
    paths += [place / "containers.conf", place.parent / "compared", *place.parent.glob("*.json")]
    paths += [*(place / "storage/libpod").glob("*.db"), *(place / "storage").glob("*.sql")]
    assert len(paths) >= 3
    for path in paths:
        if path.exists():
            _spoil(path, how)
            assert run(tiny, "exit 7") == 7, path
    assert run(tiny, "exit 7") == 7


def _unpacked(root: RootFs, name: str) -> Path:
    paths = state.workspace_of(root.cache).glob(f"layers/*/{name}")
    (path,) = [path for path in paths if layers.PARTIAL not in str(path)]
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"0ne"),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o777),
        lambda path: path.with_name("added").write_bytes(b"new"),
        lambda path: path.with_name("b\nadded").write_bytes(b"new"),
    ],
)
def test_a_changed_layer_is_unpacked_again_before_a_container_reads_it(tiny, tmp_path, change):
    change(_unpacked(tiny, "srv/a"))
    script = "cat /srv/a; stat -c %a /srv/a; ls /srv"
    assert run(tiny, script, tmp_path) == 0
    assert (tmp_path / "out").read_text() == "one644\na\nb\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"0ne"),
        lambda path: path.with_name("added").write_bytes(b"new"),
        lambda path: path.with_name("a\nsrv").write_bytes(b"new"),
        lambda path: path.chmod(0o4755),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
)
def test_evidence_is_about_the_bytes_of_the_image(tiny, change, capsys):
    path = _unpacked(tiny, "srv/a")
    times = path.stat()
    change(path)
    if path.exists():
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    # Somebody also changes what was noted about the layer.
    workspace = state.workspace_of(tiny.cache)
    known = state.known(workspace)
    assert known is not None
    name = path.parents[1].name
    listing = layers._listings([name], known)[name]
    layers._listing_path(name, known).write_text(listing)
    Podman().verify(tiny)
    assert "differs from its blob" in capsys.readouterr().err
    assert _unpacked(tiny, "srv/a").read_bytes() == b"one"
    Podman().verify(tiny)
    assert "differs" not in capsys.readouterr().err


def test_a_container_that_outlived_its_command_is_removed(tiny, capsys):
    word = str(random.randrange(10**6, 10**9))
    with runner(tiny, f"exec /bin/sleep {word}") as process:
        assert until(lambda: _alive(f"sleep\0{word}"), 10)
        (lock,) = _locks(tiny)
        process.send_signal(signal.SIGSTOP)
        for number in _alive(lock.stem):
            # All but the container: its monitor is in a group of its own, as under systemd.
            with contextlib.suppress(OSError):
                if "conmon" not in Path(f"/proc/{number}/comm").read_text():
                    os.kill(number, signal.SIGKILL)
        process.kill()
        process.wait()
    time.sleep(0.2)
    assert _alive(f"sleep\0{word}")
    sweep(tiny.cache)
    assert "removed 1 container of commands that were killed" in capsys.readouterr().err
    assert until(lambda: not _alive(f"sleep\0{word}"), 10)
    assert not any((state.workspace_of(tiny.cache) / "containers").iterdir())


def _alive(words: str) -> list[int]:
    numbers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if words in (entry / "cmdline").read_text(errors="replace"):
                    numbers.append(int(entry.name))
    return numbers


def test_a_living_container_is_not_swept(tiny, capsys):
    with runner(tiny, "while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 7") as process:
        sweep(tiny.cache)
        assert capsys.readouterr().err == ""
        (lock,) = _locks(tiny)
        lock.with_suffix("").joinpath("root/tmp/go").touch()
        assert process.wait(20) == 7


def test_bytes_are_compared_once_while_nothing_changes(tiny, monkeypatch):
    compared = []
    difference = layers._difference

    def counted(root, made, name, layer):
        compared.append(name)
        return difference(root, made, name, layer)

    monkeypatch.setattr(layers, "_difference", counted)
    Podman().verify(tiny)
    compared.clear()
    Podman().verify(tiny)
    assert compared == []
    # The machine has started anew.
    known = state.known(state.workspace_of(tiny.cache))
    assert known is not None
    layers._compared_path(known).unlink()
    Podman().verify(tiny)
    assert len(compared) == len(tiny.layers)
