"""The engine without a daemon: an OCI runtime on an overlay of unpacked layers, as root or as a regular user."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from primus.errors import HostError
from primus.sandbox import cgroups, channel, relay, tools, userns
from primus.sandbox.container import Command, LayerRef, RootFs, Stream, check_mounts, merged
from primus.sandbox.inside import FORWARDED
from primus.sandbox.scratch import Scratch, scratch
from primus.sandbox.spec import configuration
from primus.sandbox.unpack import is_unpacked, layer_dir
from primus.terminal import counted


def unpacked_below(cache: Path) -> Path:
    """Return this user's folder of unpacked layers. Owners differ between root and each user's namespace."""
    return cache / f"user-{os.geteuid()}" if userns.needed() else cache


class EmbeddedEngine:
    """Runs commands with runc (or crun). ``say`` is called with a line if something takes long."""

    name = "embedded"

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda _: None)

    def available(self) -> str | None:
        """Return None if the engine is usable, else one sentence with the remedy."""
        lack = self._lack()
        return f"{lack[0]} ({lack[1]})" if lack else None

    def _lack(self) -> tuple[str, str] | None:
        if platform.system() != "Linux":
            return f"this is {platform.system()}, not Linux", "use --engine docker"
        if not (_runtime() or tools.installable()):
            return "no OCI runtime is installed", "as root: apt-get install runc"
        if userns.needed():
            return userns.missing()
        probe = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "true"]
        if shutil.which(probe[0]) and subprocess.run(probe, capture_output=True, check=False).returncode:
            return (
                "this root may not make namespaces",
                "start the surrounding container with --privileged, or use --engine docker",
            )
        return None

    def prepare_host(self) -> None:
        """Install runc if there is no OCI runtime."""
        self._runtime()

    def _runtime(self) -> Path:
        return _runtime() or tools.need("runc", "runc", say=self._say)

    def prepare(self, root: RootFs) -> list[Path]:
        """Unpack the layers that are not unpacked yet. Returns the layer folders, bottom first."""
        cache = unpacked_below(root.cache)
        todo = [layer for layer in root.layers if not is_unpacked(cache, layer)]
        if todo:
            total = sum(layer.size for layer in todo)
            self._say(f"unpacking {counted(len(todo), 'layer')} ({total / 1e6:.0f} MB compressed) of {root.name}, once")
            _unpack(root, cache, {layer.diff_id: layer for layer in todo})
        return [layer_dir(cache, layer).absolute() for layer in root.layers]

    def run(
        self,
        root: RootFs,
        command: Command,
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> int:
        """Run ``command``; see :class:`primus.sandbox.container.Engine`."""
        # Check only what is fast. The helper reports the kernel's own refusals.
        lack = userns.missing() if userns.needed() else None
        if lack:
            raise HostError(f"the embedded engine cannot run here: {lack[0]}", hint=lack[1])
        runtime = self._runtime()
        lower = [str(path) for path in self.prepare(root)]
        with scratch(unpacked_below(root.cache.parent / "runs").absolute(), _remove) as own:
            wanted = relay.wants_terminal(command, stdin, stdout)
            job = _job(root, command, relay.window_size(stdin.fileno() if stdin else 0) if wanted else None, own)
            job.update(lower=lower, runtime=_runtime_command(runtime, own.path, job["limits"]))
            return _start(job, stdin, stdout, stderr)


def _runtime() -> Path | None:
    """Return the OCI runtime of this machine: runc, or else crun."""
    return tools.find("runc") or tools.find("crun")


def _runtime_command(runtime: Path, scratch: Path, limits: str) -> list[str]:
    words = [str(runtime), "--root", str(scratch / "state"), "--log", str(scratch / "runtime.log"), "--log-format=json"]
    if limits:
        return words
    # If there is no limit to enforce, it does not matter that this user cannot create control groups.
    return [*words, "--cgroup-manager=disabled"] if runtime.name == "crun" else [*words, "--rootless=true"]


def _remove(path: Path) -> bool:
    """Remove a run's control groups, then its files, which name them. Returns False if a group is still in use."""
    if not cgroups.remove(cgroups.groups_of(path / "state")):
        return False
    userns.remove(path)
    return True


def _job(root: RootFs, command: Command, terminal: tuple[int, int] | None, own: Scratch) -> dict[str, Any]:
    check_mounts(command)
    settings = root.config.get("config") or {}
    limits = {"memory": command.limits.memory_bytes, "cpu": command.limits.cpus}
    return {
        "config": configuration(root, command, terminal=terminal, user_namespace=userns.needed()),
        "container": f"primus-{own.name}",
        "scratch": str(own.path),
        "user": command.user or settings.get("User") or None,
        "groups": merged(command.devices).groups,
        "tty": terminal is not None,
        "term": os.environ.get("TERM", "xterm"),
        "network": command.network,
        "limits": " or ".join(name for name, value in limits.items() if value is not None),
        "user_namespace": userns.needed(),
        # A device often needs a group of the user, such as render.
        "keep_groups": bool(merged(command.devices).nodes),
    }


def _start(job: dict[str, Any], stdin: Stream, stdout: Stream, stderr: Stream) -> int:
    saved = relay.saved(0) if job["tty"] else None
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    try:
        code = _helper("inside", job, _forwarding, keep_groups=job["keep_groups"], **streams)
        return 128 - code if code < 0 else code
    finally:
        relay.restore(0, saved)


def _helper(
    name: str,
    job: dict[str, Any],
    during: Callable[[subprocess.Popen[bytes]], contextlib.AbstractContextManager[Any]],
    **options: Any,
) -> int:
    """Run a helper module with ``job`` in its own process. Returns its exit code, or raises its error."""
    job_fd = channel.pack(job)
    report_read, report_write = os.pipe()
    argv, env = userns.helper(f"primus.sandbox.{name}", str(job_fd), str(report_write), str(os.getpid()))
    try:
        with userns.child(argv, pass_fds=(job_fd, report_write), env=env, cwd="/", **options) as process:
            os.close(report_write)
            report_write = -1
            with during(process):
                code = process.wait()
        channel.raise_reported(report_read)
        return code
    finally:
        for number in (job_fd, report_read, report_write):
            if number >= 0:
                os.close(number)


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals; it calls running.stop_all when it is interrupted.
        yield
        return
    before = {number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unpack(root: RootFs, cache: Path, layers: Mapping[str, LayerRef]) -> None:
    jobs = [
        {"layer": dataclasses.asdict(layer), "blob": str(root.blob(layer.digest).absolute())}
        for layer in layers.values()
    ]
    job = {"cache": str(cache.absolute()), "layers": jobs, "user_namespace": userns.needed()}
    # In its own process, so that Ctrl-C ends it at once. The next run continues from what it finished.
    if code := _helper("unpack_helper", job, contextlib.nullcontext, stdin=subprocess.DEVNULL):
        raise HostError(f"unpacking {root.name} ended with exit code {code}", hint="run it again")
