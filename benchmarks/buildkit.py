"""Debian's BuildKit: a private docker.io daemon that runs only during the benchmark."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.measure import Finished, run
from primus_images.errors import HostError

# Docker of another release, unpacked from its Debian packages into this folder. The distribution's
# is found by an absolute path, because PATH may first lead to another client.
_ROOT = os.environ.get("PRIMUS_BENCH_DOCKER", "")
_CLIENT = f"{_ROOT}/usr/bin/docker"
_FOLDER = "sbin" if Path(f"{_ROOT}/usr/sbin/dockerd").exists() else "bin"  # Debian, Ubuntu
_DAEMON = f"{_ROOT}/usr/{_FOLDER}/dockerd"


@dataclass(frozen=True, kw_only=True)
class BuildKit:
    """Builds with the private daemon."""

    socket: Path
    daemon: int

    def build(
        self, context: Path, targets: Sequence[str], *, options: Sequence[str] = ()
    ) -> tuple[str, Finished]:
        """Build each target in turn. Returns the id of the last image, and the sum of all runs."""
        done = [run(self._build_command(context, t, options), env=self._env()) for t in targets]
        whole = Finished(
            seconds=sum(d.seconds for d in done),
            megabytes=max(d.megabytes for d in done),
            lines=done[-1].lines,
        )
        return whole.lines[-1], whole

    def forget(self) -> None:
        """Remove all images that are not in use, and the build cache."""
        images = self.ask("image", "ls", "-q", "--filter", "reference=bench*").split()
        if images:
            self.ask("image", "rm", "-f", *sorted(set(images)))
        # Images that lost their name to a later build.
        self.ask("image", "prune", "-f")
        self.ask("builder", "prune", "-af")

    def load_root(self, tar: IO[bytes] | None, name: str) -> None:
        """Create an image with one layer from the tar archive of a root file system."""
        done = subprocess.run(
            [_CLIENT, "import", "-", name],
            env={**os.environ, **self._env()},
            stdin=tar,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HostError(f"docker import: {done.stderr.strip()}")

    def ask(self, *arguments: str) -> str:
        """Run the Docker client and return its output."""
        done = subprocess.run(
            [_CLIENT, *arguments],
            env={**os.environ, **self._env()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HostError(f"docker {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    def _build_command(self, context: Path, target: str, options: Sequence[str]) -> list[str]:
        return [
            _CLIENT,
            "build",
            "-q",
            *options,
            "--target",
            target,
            "-t",
            f"bench-{target}",
            str(context),
        ]

    def _env(self) -> dict[str, str]:
        env = {"DOCKER_HOST": f"unix://{self.socket}", "DOCKER_BUILDKIT": "1", "DOCKER_CONTEXT": ""}
        return {**env, "DOCKER_CONFIG": str(self.socket.parent / "config")}


@contextmanager
def private_daemon(folder: Path) -> Iterator[BuildKit]:
    """Start a daemon that keeps all its files below ``folder``, without bridge and firewall rules.
    Ends it on exit.
    """
    _install()
    (folder / "config").mkdir(parents=True)
    plugins = {"cliPluginsExtraDirs": [f"{_ROOT}/usr/libexec/docker/cli-plugins"]}
    (folder / "config/config.json").write_text(json.dumps(plugins))
    socket = folder / "docker.sock"
    command = [
        _DAEMON,
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--data-root",
        str(folder / "data"),
    ]
    command += [
        "--exec-root",
        str(folder / "exec"),
        "--pidfile",
        str(folder / "pid"),
        "-H",
        f"unix://{socket}",
    ]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([f"{_ROOT}/usr/sbin", f"{_ROOT}/usr/bin", os.environ["PATH"]]),
    }
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    builder = BuildKit(socket=socket, daemon=daemon.pid)
    try:
        _wait(daemon, builder, folder / "log")
        yield builder
    finally:
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _wait(daemon: subprocess.Popen[bytes], builder: BuildKit, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if daemon.poll() is not None:
            break
        try:
            builder.ask("version", "--format", "{{.Server.Version}}")
            return
        except HostError:
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise HostError(
        f"the private dockerd did not come up:\n{tail}", hint="it needs root and overlayfs"
    )


def _install() -> None:
    if Path(_CLIENT).exists() and Path(_DAEMON).exists():
        return
    apt = shutil.which("apt-get")
    if os.geteuid() != 0 or apt is None:
        raise HostError("docker.io is not installed", hint="as root: apt-get install docker.io")
    print("docker.io is missing: installing it with apt-get", file=sys.stderr, flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (
        ["update", "-q"],
        ["install", "-y", "-q", "--no-install-recommends", "docker.io"],
    ):
        if subprocess.run([apt, *arguments], env=env, stdout=sys.stderr, check=False).returncode:
            raise HostError(f"apt-get {arguments[0]} failed; its own words are above")
