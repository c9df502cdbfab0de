"""The engine without a daemon: namespaces and overlayfs, as root or as an ordinary user."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from primus.errors import HostError
from primus.sandbox import cgroups, channel, relay, userns
from primus.sandbox.inside import FORWARDED
from primus.sandbox.model import (
    Command,
    LayerRef,
    RootFs,
    Stream,
    check_mounts,
    final_argv,
    host_name,
    image_env,
)
from primus.sandbox.scratch import scratch
from primus.sandbox.unpack import is_unpacked, layer_dir

__all__ = ["EmbeddedEngine", "unpacked_below"]


def unpacked_below(cache: Path) -> Path:
    """Where this user's unpacked layers are: owners differ between root and each user's namespace."""
    return cache / f"user-{os.geteuid()}" if userns.needed() else cache


class EmbeddedEngine:
    """Runs commands with the kernel alone. ``say`` gets one line when something takes long."""

    name = "embedded"

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda _: None)

    def available(self) -> str | None:
        """None when usable, else one sentence with what to do."""
        lack = self._lack()
        return f"{lack[0]} ({lack[1]})" if lack else None

    def _lack(self) -> tuple[str, str] | None:
        if platform.system() != "Linux":
            return f"this is {platform.system()}, not Linux", "use --engine docker"
        if userns.needed():
            return userns.missing()
        argv, env = userns.helper("primus.sandbox.probe")
        probe = subprocess.run(argv, env=env, capture_output=True, check=False)
        if probe.returncode:
            return (
                "this root may not make namespaces",
                "start the surrounding container with --privileged, or use --engine docker",
            )
        return None

    def prepare(self, root: RootFs) -> list[Path]:
        """Unpack what is not unpacked yet; returns the layer directories, bottom first."""
        cache = unpacked_below(root.cache)
        todo = [layer for layer in root.layers if not is_unpacked(cache, layer)]
        if todo:
            total = sum(layer.size for layer in todo)
            self._say(f"unpacking {len(todo)} layers ({total / 1e6:.0f} MB compressed) of {root.name}, once")
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
        """Run ``command``; see :class:`primus.sandbox.model.Engine`."""
        # Only what costs nothing to ask; the kernel's own refusal comes back from the helper as a sentence.
        lack = userns.missing() if userns.needed() else None
        if lack:
            raise HostError(f"the embedded engine cannot run here: {lack[0]}", hint=lack[1])
        job = _job(root, command, relay.wanted(command, stdin, stdout))
        lower = [str(path) for path in self.prepare(root)]
        with scratch(unpacked_below(root.cache.parent / "runs").absolute(), userns.remove) as own:
            groups = cgroups.limited(own.name, command.limits)
            try:
                own.remember(*groups.paths)
                job["view"].update(lower=lower, scratch=str(own.path))
                job["cgroup_procs"] = groups.procs
                code = _start(job, stdin, stdout, stderr)
                if groups.oom_kills():
                    amount = (command.limits.memory_bytes or 0) / (1 << 20)
                    _tell(
                        stderr,
                        f"primus: the kernel killed a process: over the memory limit of {amount:.0f} MiB\n",
                    )
            finally:
                groups.remove()
        return code


def _tell(stream: Stream, text: str) -> None:
    number = stream.fileno() if stream else 2
    with contextlib.suppress(OSError):
        os.write(number, text.encode())


def _job(root: RootFs, command: Command, terminal: bool) -> dict[str, Any]:
    settings = root.config.get("config") or {}
    check_mounts(command)
    return {
        "argv": final_argv(root, command),
        "env": image_env(root, command),
        "cwd": command.cwd or settings.get("WorkingDir") or "/",
        "user": command.user or settings.get("User") or None,
        "tty": terminal,
        "term": os.environ.get("TERM", "xterm"),
        "view": {
            "hostname": host_name(root, command),
            "network": command.network,
            "shm_bytes": command.shm_bytes,
            "read_only_root": command.read_only_root,
            "mounts": [(str(m.source.absolute()), m.target, not m.read_only) for m in command.mounts],
            "devices": [str(device) for device in command.devices],
            "user_namespace": userns.needed(),
        },
    }


def _start(job: dict[str, Any], stdin: Stream, stdout: Stream, stderr: Stream) -> int:
    job_fd = channel.pack(job)
    report_read, report_write = os.pipe()
    argv, env = userns.helper("primus.sandbox.inside", str(job_fd), str(report_write), str(os.getpid()))
    saved = relay.saved(0) if job["tty"] else None
    try:
        with userns.child(
            argv,
            pass_fds=(job_fd, report_write),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd="/",
        ) as process:
            os.close(report_write)
            report_write = -1
            with _forwarding(process):
                code = process.wait()
        channel.raise_reported(report_read)
        return 128 - code if code < 0 else code
    finally:
        relay.restore(0, saved)
        for number in (job_fd, report_read, report_write):
            if number >= 0:
                os.close(number)


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread gets signals; it calls running.stop_all when it is interrupted.
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
    job_fd = channel.pack({"cache": str(cache.absolute()), "layers": jobs, "user_namespace": userns.needed()})
    report_read, report_write = os.pipe()
    argv, env = userns.helper("primus.sandbox.unpack_helper", str(job_fd), str(report_write), str(os.getpid()))
    try:
        # A process of its own: Ctrl-C ends it at once, and the next run takes up what it left.
        with userns.child(
            argv,
            pass_fds=(job_fd, report_write),
            env=env,
            stdin=subprocess.DEVNULL,
            cwd="/",
        ) as process:
            os.close(report_write)
            report_write = -1
            code = process.wait()
        channel.raise_reported(report_read)
        if code:
            raise HostError(f"unpacking {root.name} ended with exit code {code}", hint="run it again")
    finally:
        for number in (job_fd, report_read, report_write):
            if number >= 0:
                os.close(number)
