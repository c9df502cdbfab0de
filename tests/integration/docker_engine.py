"""A Docker engine of our own for tests: private directories, no network set-up, ended with the
test.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from host_tools import dockerd, missing


@contextlib.contextmanager
def private_dockerd(tmp_path: Path, binary: str = "") -> Iterator[str]:
    """Start ``binary``, or the distribution's dockerd, below ``tmp_path`` and yield its
    DOCKER_HOST.

    Skips where it cannot run. Tools beside ``binary`` (containerd, runc) win over the machine's.
    """
    binary = binary or dockerd()
    if os.geteuid() != 0:
        pytest.skip("a private Docker engine needs root")
    if not Path(binary).exists():
        pytest.skip(missing("dockerd") or f"{binary} does not exist")
    # A socket's path must be short, and pytest's are not.
    run = Path(tempfile.mkdtemp(prefix="dockerd-"))
    tmp_path.mkdir(parents=True, exist_ok=True)
    log = tmp_path / "dockerd.log"
    argv = [
        binary,
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        f"--data-root={tmp_path / 'data'}",
        f"--exec-root={run / 'exec'}",
        f"--pidfile={run / 'pid'}",
        f"-Hunix://{run / 'docker.sock'}",
    ]
    env = {**os.environ, "PATH": f"{Path(binary).parent}:{os.environ['PATH']}"}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        _wait(process, run / "docker.sock", log)
        yield f"unix://{run / 'docker.sock'}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for place in (tmp_path / "data", run):
            _unmount_below(place)
            # In C, because unpacked images have many files.
            subprocess.run(["rm", "-rf", place], check=False)


def _wait(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    for _ in range(300):
        if process.poll() is not None:
            pytest.fail(f"dockerd ended at once: {log.read_text()[-2000:]}")
        # Not through the SDK: it leaves a socket open each time nobody answers.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(2)
            probe.connect(str(path))
            probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            if b" 200 " in probe.recv(64):
                return
        time.sleep(0.1)
    pytest.fail(f"dockerd does not answer: {log.read_text()[-2000:]}")


def _unmount_below(place: Path) -> None:
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        target = line.split(" ")[1]
        if target.startswith(f"{place}/"):
            subprocess.run(["umount", "-l", target], check=False)
