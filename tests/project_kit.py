"""A small project on disk, and the `primus` command line on it."""

import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

import primus_images
from primus_images.cli.main import main
from primus_images.cli.verb import VERBS
from primus_images.plan.action import ImagePlan
from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.versions.lock import Lock
from tables import FIXTURES

SOURCE = Path(primus_images.__file__).parents[1]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def digest(self) -> str:
        """The last line of a build."""
        return self.out.splitlines()[-1]


@dataclass(frozen=True)
class Kit:
    root: Path

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        path.write_text(text.replace(old, new))

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "primus_images.cli.main", *words]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(SOURCE)}

    def primus(self, *words: str, timeout: int = 900, stdin: str = "") -> Result:
        """Run a command in a fork of this process, which has its modules already."""
        importlib.import_module(
            f"primus_images.cli.{VERBS[words[0]].call.rpartition('.')[0]}"
            if words[0] in VERBS
            else "primus_images.cli.main"
        )
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(stdin.encode())
            given.seek(0)
            with warnings.catch_warnings(
                action="ignore"
            ):  # of threads, which the child does without
                child = os.fork()
            if not child:
                self._become(words, (given, out, err), timeout)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            streams = []
            for stream in (out, err):
                stream.seek(0)
                streams.append(stream.read().decode())
        result = Result(code, *streams)
        assert "Traceback" not in result.err, result.err
        return result

    def _become(
        self, words: Sequence[str], streams: tuple[IO[bytes], ...], timeout: int
    ) -> NoReturn:
        code = 70
        try:
            for number, stream in enumerate(streams):
                os.dup2(stream.fileno(), number)
            sys.stdin = os.fdopen(0)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
            warnings.resetwarnings()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(timeout)
            os.chdir(self.root)
            environment = self.env
            os.environ.clear()
            os.environ.update(environment)
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:  # noqa: BLE001 - the parent reads it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def locked(self, target: str, package: str, channel: str = "pypi") -> str:
        """The version of a wheel in the lock of ``target``."""
        lock = json.loads((self.root / f"images/locks/{channel}/{target}.json").read_text())
        (version,) = {
            one["version"]
            for one in lock["files"]
            if (one["kind"], one["name"]) == ("wheel", package)
        }
        return str(version)

    def build(self, *words: str) -> Result:
        result = self.primus("build", *(words or ("demo",)))
        assert result.code == 0, result.err
        return result

    def layers(self, *words: str) -> dict[str, bool]:
        """Layer → whether this build made it."""
        result = json.loads(self.build(*(words or ("demo",)), "--json").out)
        return {line["name"]: line["built"] for line in result["images"][0]["layers"]}


def until(true: Callable[[], object], seconds: float = 60) -> bool:
    """Whether ``true()`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (fulfilled := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(fulfilled)


def alive(pid: int) -> bool:
    """Whether a process runs. One that ended stays as a zombie until its parent asks for it, which
    the first process of some containers does late.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plan_over(root: Path, name: str, lock: Lock | None) -> ImagePlan:
    """The plan of a target over a lock that is not on disk."""
    project = Project(root)
    return plan_image(replace(resolve(project, name), lock=lock), project.workspace.stats)


def copied(root: Path, name: str) -> Kit:
    """A copy of the project ``name`` of ``fixtures``."""
    shutil.copytree(FIXTURES / "projects" / name, root, dirs_exist_ok=True)
    return Kit(root)


def make_project(root: Path, *, size: int = 1000) -> Kit:
    """Three components from local folders, two targets."""
    kit = copied(root, "small")
    for part in ("alpha", "beta"):
        kit.write(f"parts/{part}/blob", (part * (size // 4 + 1)).encode()[:size])
        kit.write(f"parts/{part}/sub/run", "#!/bin/sh\n").chmod(0o755)
        (root / f"parts/{part}/link").symlink_to("sub/run")
    return kit


def add_shell(kit: Kit, busybox: str, applets: Sequence[str], *targets: str) -> None:
    """Add busybox to images of the small project, as a component of its own."""
    programs = kit.root / "parts/shell"
    programs.mkdir()
    shutil.copy(busybox, programs / "busybox")
    for applet in applets:
        (programs / applet).symlink_to("busybox")
    pin = "      - {path: parts/shell, to: /bin, channel: local}\n"
    versions = (kit.root / "versions.yaml").read_text()
    kit.write("versions.yaml", f"{versions}  shell:\n    name: Shell\n    pins:\n{pin}")
    for name in targets:
        kit.edit(f"images/{name}.yaml", "beta, recipes", "beta, recipes, shell")


def lock(kit: Kit) -> None:
    """Lock all targets. Files that the repository's own builds fetched already are not fetched
    twice.
    """
    own = SOURCE.parent / ".primus/files/sha256"
    here = kit.root / ".primus/files/sha256"
    here.mkdir(parents=True)
    for path in own.glob("*") if own.is_dir() else ():
        if not path.name.endswith(".part"):
            try:
                os.link(path, here / path.name)
            except OSError:
                break
    result = kit.primus("lock")
    assert result.code == 0, result.err
