"""One behaviour, both engines: with ``--slow``, every test here runs on each engine this machine
has.
"""

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_engine import private_dockerd
from sandbox_kit import Entry, directory, image, needs_busybox

from primus_images.errors import HostError, InputError
from primus_images.sandbox.container import Command, Devices, Mount, RootFs, devices_named
from primus_images.sandbox.engine import Engine
from primus_images.sandbox.engines import choose
from project_kit import until

pytestmark = [pytest.mark.integration, needs_busybox]

# Another dockerd than the distribution's, if there is one.
CURRENT = os.environ.get("PRIMUS_TEST_DOCKERD", "")
# The options are those of podman. By default, test_native_build.py builds in Docker.
DOCKERS = ("docker", *(["docker-current"] if CURRENT else []))


@pytest.fixture(
    scope="session",
    params=["podman", *(pytest.param(name, marks=pytest.mark.slow) for name in DOCKERS)],
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    if request.param == "podman":
        auto = choose("auto")
        assert auto.name == "podman"
        yield auto
        return
    binary = CURRENT if request.param == "docker-current" else ""
    with private_dockerd(tmp_path_factory.mktemp(request.param), binary) as host:
        former = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = host
        yield choose("docker")
        if former is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = former


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RootFs:
    files = [directory("srv"), Entry(name="srv/a", data=b"one")]
    return image(
        tmp_path_factory.mktemp("tiny"), files, WorkingDir="/srv", Cmd=["echo", "the", "cmd"]
    )


def sh(
    engine: Engine,
    root: RootFs,
    script: str,
    tmp_path: Path,
    argv: tuple[str, ...] | None = None,
    **options: object,
) -> tuple[int, str, str]:
    """Exit code, output and errors of ``script``, or of ``argv``."""
    out, err = tmp_path / "out", tmp_path / "err"
    command = Command(argv=("sh", "-c", script) if argv is None else argv, **options)  # type: ignore[arg-type]
    with out.open("wb") as o, err.open("wb") as e, Path(os.devnull).open("rb") as nothing:
        code = engine.run(root, command, stdin=nothing, stdout=o, stderr=e)
    return code, out.read_text(), err.read_text()


def test_exit_code_and_streams(engine, tiny, tmp_path):
    assert sh(engine, tiny, "echo out; echo err >&2; exit 7", tmp_path) == (7, "out\n", "err\n")
    assert sh(engine, tiny, "kill -KILL $$", tmp_path)[0] == 137, "128 + the number of a signal"


@pytest.mark.parametrize(("name", "code"), [("no-such-tool", 127), ("/etc/not-a-program", 126)])
def test_what_cannot_start(engine, tiny, tmp_path, name, code):
    ended, out, err = sh(engine, tiny, "", tmp_path, (name,))
    assert ended == code
    assert name in out + err


def test_the_images_own_settings(engine, tiny, tmp_path):
    assert sh(engine, tiny, "", tmp_path, ())[:2] == (0, "the cmd\n")
    assert (
        sh(engine, tiny, "pwd; echo $FROM_IMAGE-$MINE", tmp_path, env={"MINE": "a b"})[1]
        == "/srv\nyes-a b\n"
    )
    assert sh(engine, tiny, "pwd", tmp_path, cwd="/home")[1] == "/home\n"


def test_changes_are_thrown_away(engine, tiny, tmp_path):
    assert sh(engine, tiny, "echo x > /srv/a; cat a", tmp_path)[1] == "x\n"
    assert sh(engine, tiny, "cat /srv/a", tmp_path)[1] == "one"


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("worker", "1000 1000 1000 109 /home/worker\n"),
        ("1000:109", "1000 109 109 /home/worker\n"),
        ("4321", "4321 0 0"),
        (None, "0 0 0 /root\n"),
    ],
)
def test_users(engine, tiny, tmp_path, user, expected):
    code, out, _ = sh(engine, tiny, "echo $(id -u) $(id -g) $(id -G) $HOME", tmp_path, user=user)
    assert code == 0
    # Engines differ in whether root gets the supplementary groups of its own group.
    assert out.startswith(expected)


def test_mounts(engine, tiny, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "f").write_text("hello")
    (tmp_path / "rw").mkdir()
    mounts = (
        Mount(source=tmp_path / "in", target="/data"),
        Mount(source=tmp_path / "in" / "f", target="/etc/one-file"),
        Mount(source=tmp_path / "rw", target="/new/deep/rw", read_only=False),
    )
    script = "cat /data/f /etc/one-file; echo kept > /new/deep/rw/g; echo no > /data/f"
    code, out, err = sh(engine, tiny, script, tmp_path, mounts=mounts)
    assert code == 1
    assert out == "hellohello"
    assert "Read-only" in err
    assert (tmp_path / "rw" / "g").read_text() == "kept\n"
    assert (tmp_path / "in" / "f").read_text() == "hello"
    with pytest.raises(InputError, match="does not exist"):
        sh(engine, tiny, "true", tmp_path, mounts=(Mount(source=tmp_path / "no", target="/x"),))


def test_no_network_but_loopback(engine, tiny, tmp_path):
    code, out, _ = sh(
        engine, tiny, "ip -o link | wc -l; ping -c1 -W1 127.0.0.1 >/dev/null && echo up", tmp_path
    )
    assert (code, out) == (0, "1\nup\n")
    code, out, _ = sh(engine, tiny, "ping -c1 -W1 $(hostname) >/dev/null && echo up", tmp_path)
    assert out == "up\n"


def test_host_network(engine, tiny, tmp_path):
    mine = str(Path("/proc/self/ns/net").readlink())
    assert sh(engine, tiny, "readlink /proc/self/ns/net", tmp_path, network=True)[1].strip() == mine
    assert sh(engine, tiny, "readlink /proc/self/ns/net", tmp_path)[1].strip() != mine


def test_memory_limit(engine, tiny, tmp_path):
    script = "exec dd if=/dev/zero of=/dev/null bs=300M count=1"
    assert sh(engine, tiny, script, tmp_path)[0] == 0
    code, _, err = sh(engine, tiny, script, tmp_path, memory_bytes=64 << 20)
    assert code == 137
    assert "memory limit of 64 MiB" in err
    assert not Path("oom").exists()


def test_root_cannot_raise_its_memory_limit(engine, tiny, tmp_path):
    """In namespaces of its own, by a mount of its own, or by the files that it has."""
    versions = ("-t cgroup -o memory x", "-t cgroup2 x")
    mounts = "; ".join(f"busybox mount {options} /tmp && echo mounted" for options in versions)
    files = "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max"
    write = "[ -e $file ] && echo 9999999999 > $file && echo raised"
    script = (
        f"{mounts}; busybox unshare -r -m sh -c '{mounts}'; "
        f"for file in {files}; do {write}; done; true"
    )
    code, out, _ = sh(engine, tiny, script, tmp_path, memory_bytes=64 << 20)
    assert (code, out) == (0, "")


def test_a_context_of_dockers_client_names_the_engine(engine, tiny, tmp_path, monkeypatch):
    if engine.name != "docker":
        pytest.skip("podman has no contexts")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    make = ["docker", "context", "create", "mine", "--docker", f"host={os.environ['DOCKER_HOST']}"]
    subprocess.run(make, check=True, capture_output=True)
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    assert sh(engine, tiny, "exit 7", tmp_path)[0] == 7
    monkeypatch.delenv("DOCKER_CONTEXT")
    subprocess.run(["docker", "context", "use", "mine"], check=True, capture_output=True)
    assert sh(engine, tiny, "exit 7", tmp_path)[0] == 7
    monkeypatch.setenv("DOCKER_CONTEXT", "missing")
    with pytest.raises(HostError, match="no Docker engine answers"):
        sh(engine, tiny, "true", tmp_path)


def test_nobody_makes_a_device(engine, tiny, tmp_path):
    # The device of this machine's root file system, say.
    script = (
        "busybox mknod /dev/disk b 254 0 2>/dev/null && echo made; busybox mkfifo "
        "/dev/fifo && echo fifo"
    )
    assert sh(engine, tiny, script, tmp_path)[1] == "fifo\n"


@pytest.fixture
def node() -> Iterator[Path]:
    """A device that acts like /dev/null, for root and one group."""
    if os.geteuid() != 0:
        pytest.skip("making a device needs root")
    path = Path(f"/dev/primus-test-{random.randrange(10**9)}")
    os.mknod(path, 0o660 | stat.S_IFCHR, os.makedev(1, 3))
    path.chmod(0o660)
    os.chown(path, 0, 4321)
    yield path
    path.unlink()


def test_a_device_node_for_a_user_of_its_group(engine, tiny, tmp_path, node):
    script = f"echo x > {node} && stat -c '%t %T' {node}; ls /dev | grep -c primus-test"
    devices = devices_named([str(node)])
    assert sh(engine, tiny, script, tmp_path, devices=devices, user="worker")[:2] == (0, "1 3\n1\n")
    assert sh(engine, tiny, f"test -e {node}", tmp_path)[0] == 1


def test_a_device_of_a_cdi_specification(engine, tiny, tmp_path, node):
    device = {
        "name": "0",
        "containerEdits": {"env": ["KIND=test"], "deviceNodes": [{"path": str(node)}]},
    }
    specification = Path(f"/etc/cdi/{node.name}.json")
    specification.parent.mkdir(exist_ok=True)
    specification.write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "primus.test/gpu", "devices": [device]})
    )
    try:
        devices = devices_named(["primus.test/gpu=0"])
        if engine.name == "docker" and not CURRENT:
            with pytest.raises(HostError, match="docker cannot run"):
                sh(engine, tiny, "true", tmp_path, devices=devices)
            return
        assert sh(engine, tiny, f"echo x > {node} && echo $KIND", tmp_path, devices=devices)[
            :2
        ] == (0, "test\n")
    finally:
        specification.unlink()


def test_what_the_engine_refuses_is_an_error(engine, tiny, tmp_path):
    with pytest.raises(InputError, match="the image has no user 'nobody-here'"):
        sh(engine, tiny, "true", tmp_path, user="nobody-here")
    with pytest.raises(HostError, match=f"{engine.name} cannot run tiny: .*no-such-device"):
        sh(engine, tiny, "true", tmp_path, devices=Devices(names=("/dev/no-such-device",)))


def test_values_of_variables_are_in_no_command_line(engine, tmp_path, monkeypatch):
    secret = f"secret-{random.randrange(10**9)}"
    monkeypatch.setenv("MINE", secret)
    with runner(
        engine, tmp_path, "test -n $MINE && echo ready; exec sleep 60", stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        assert not alive(secret)
        process.terminate()


def test_an_endless_command_ends_with_the_reader_of_its_output(engine, tmp_path):
    with runner(
        engine, tmp_path, "yes", stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(20) != 0


def test_shared_memory_size(engine, tiny, tmp_path):
    out = sh(
        engine, tiny, "df -k /dev/shm | tail -n1 | awk '{print $2}'", tmp_path, shm_bytes=3 << 30
    )[1]
    assert int(out) == 3 << 20


def test_stdin_passes_through(engine, tiny, tmp_path):
    (tmp_path / "in").write_bytes(bytes(range(256)) * 4096)
    with (tmp_path / "in").open("rb") as i, (tmp_path / "out").open("wb") as o:
        assert engine.run(tiny, Command(argv=("cat",)), stdin=i, stdout=o) == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


def test_descendants_end_with_the_command(engine, tiny, tmp_path):
    words = str(random.randrange(10**6, 10**9))
    sh(engine, tiny, f"sleep {words} & true", tmp_path)
    assert not alive(f"sleep\0{words}")


def alive(words: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue
            if words in text:
                found.append(int(entry.name))
    return found


RUNNER = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from sandbox_kit import image
from primus_images.sandbox.engines import choose
from primus_images.sandbox.container import Command
root = image(Path({place!r}))
env = {{"MINE": os.environ.get("MINE", "")}}
sys.exit(choose({engine!r}).run(root, Command(argv=("sh", "-c", {script!r}), env=env)))
"""


@contextlib.contextmanager
def runner(
    engine: Engine, place: Path, script: str, **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    code = RUNNER.format(
        here=str(Path(__file__).parent), place=str(place), engine=engine.name, script=script
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            # A failed assertion must not wait for a command that never ends.
            process.kill()
            # What podman removes must still be there.
            until(lambda: not alive(str(place)), 10)


# SIGINT comes from a terminal, too: test_ctrl_c_arrives_once.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_command(engine, tmp_path, number):
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got; exit 42' {name}; echo ready; while true; do sleep 0.1; done"
    with runner(
        engine, tmp_path, script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.read() == b"got\n"
        assert process.wait() == 42


def test_ctrl_c_arrives_once(engine, tmp_path):
    # A terminal sends it to the whole foreground group, and the runner passes it on.
    script = (
        "trap 'echo got' INT; echo ready; i=0; while [ $i -lt 10 ]; do sleep 0.1; i=$((i+1)); done"
    )
    options = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with runner(engine, tmp_path, script, **options) as process:
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.read() == b"got\n"
        assert process.wait() == 0


def test_sigterm_ends_a_command_without_handler(engine, tmp_path):
    script = "echo ready; exec sleep 60"
    with runner(
        engine, tmp_path, script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(10) == 143


@pytest.mark.parametrize("delay", [0, 0.03, 0.06, 0.09, 0.12])
def test_signals_while_it_starts_end_it(engine, tmp_path, delay):
    # The kernel drops one for an init that handles none yet, so they are repeated, as an impatient
    # user does.
    with runner(
        engine, tmp_path, "exec sleep 300", stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        while not alive("\0run\0--pull=never"):
            time.sleep(0.01)
        time.sleep(delay)
        for _ in range(100):
            process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                break
        # The last of them may meet this process after the command.
        assert process.returncode in (128 + signal.SIGUSR1, -signal.SIGUSR1)


def test_killed_runner_leaves_nothing(engine, tmp_path):
    one, two = (str(random.randrange(10**6, 10**9)) for _ in "ab")
    # busybox of Ubuntu has a sleep inside its shell.
    script = f"echo ready; /bin/sleep {one} & /bin/sleep {two}"
    with runner(
        engine, tmp_path, script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        assert until(lambda: alive(f"sleep\0{one}"), 5)
        process.kill()
    assert until(lambda: not alive(f"sleep\0{one}") and not alive(f"sleep\0{two}"), 5)


def test_terminal(engine, tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    # Docker engines before 23 set the size only once the command runs.
    script = (
        "i=0; while [ $i -lt 50 -a \"$(stty size)\" != '33 99' ]; do i=$((i+1)); sleep 0.1; done; "
    )
    script += (
        "test -t 0 && test -t 1 && tty; stty size; read x; echo got:$x; trap 'echo int; "
        "exit 5' INT; "
    )
    script += (
        "i=0; while [ $i -lt 50 -a \"$(stty size)\" != '44 111' ]; do i=$((i+1)); sleep 0.1; done; "
    )
    script += "stty size; "
    script += "echo more; while true; do sleep 0.1; done"
    image(tmp_path)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    before = termios.tcgetattr(slave)
    with runner(engine, tmp_path, script, stdin=slave, stdout=slave, stderr=slave) as process:
        seen = b""

        def until(text: bytes) -> None:
            nonlocal seen
            end = time.time() + 30
            while text not in seen and time.time() < end:
                seen += os.read(master, 4096)
            assert text in seen

        until(b"33 99")
        os.write(master, b"hello\r")
        until(b"got:hello")
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 111, 0, 0))
        process.send_signal(signal.SIGWINCH)
        until(b"44 111")
        until(b"more")
        os.write(master, b"\x03")
        until(b"int")
        assert process.wait(20) == 5
    assert b"/dev/pts/" in seen or b"/dev/console" in seen
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_the_hosts_files_keep_their_owner(engine, tiny, tmp_path):
    assert sh(engine, tiny, "echo hi", tmp_path, user="worker")[:2] == (0, "hi\n")
    assert (tmp_path / "out").stat().st_uid == os.geteuid()
