"""What the engines are told, and what is refused before one is started: all without root."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images import programs
from primus_images.cli.host import run as run_verb
from primus_images.cli.verb import parser_of
from primus_images.engine.workshop import log_tail
from primus_images.errors import HostError, InputError
from primus_images.progress import Progress
from primus_images.sandbox import docker, engine, podman
from primus_images.sandbox.container import Command, Mount, RootFs, check_mounts, with_settings
from primus_images.sandbox.docker import Docker
from primus_images.sandbox.engine import Client, Engine
from primus_images.sandbox.engines import choose
from primus_images.sandbox.podman import Podman
from primus_images.sandbox.state import State
from project_kit import alive, until


def root_with(tmp_path: Path, **settings: object) -> RootFs:
    return RootFs(
        name="v1.2_cpu",
        manifest=json.dumps(
            {"layers": [{"digest": "sha256:aa", "size": 3, "mediaType": "tar+zstd"}]}
        ).encode(),
        config_bytes=json.dumps(
            {"config": settings, "rootfs": {"diff_ids": ["sha256:bb"]}}
        ).encode(),
        tar=lambda _: iter([b"tar"]),
        cache=tmp_path / "cache",
    )


def test_settings_of_the_image(tmp_path):
    root = root_with(
        tmp_path, Entrypoint=["e"], Cmd=["c"], Env=["A=1=2", "B=3"], WorkingDir="/w", User=""
    )
    assert with_settings(root, Command()) == Command(
        argv=("e", "c"), env={"A": "1=2", "B": "3"}, cwd="/w", user=""
    )
    command = with_settings(root, Command(argv=("a",), env={"B": "4"}, cwd="/", user="0"))
    assert command == Command(argv=("e", "a"), env={"A": "1=2", "B": "4"}, cwd="/", user="0")
    assert with_settings(root, Command(argv=("a",), entrypoint=False)).argv == ("a",)
    with pytest.raises(InputError, match="has no default command"):
        with_settings(root_with(tmp_path), Command())
    with pytest.raises(InputError, match="not UTF-8"):
        with_settings(root, Command(argv=(os.fsdecode(b"\xff"),)))


@pytest.mark.parametrize(
    "target",
    ["relative", "/", "/proc", "/dev/", "/../../..", "/a/../..", "/a/..", "/./", "//proc/.", "/.."],
)
def test_a_mount_needs_a_place(tmp_path, target):
    with pytest.raises(InputError, match="cannot be the target of a mount"):
        check_mounts(Command(mounts=(Mount(source=tmp_path, target=target),)))


def test_a_mount_needs_a_source(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        check_mounts(Command(mounts=(Mount(source=tmp_path / "no", target="/x"),)))


def test_no_value_of_a_variable_is_an_argument():
    options, values = engine.variable_options(
        Command(env={"HF_TOKEN": "secret", "PATH": "/bin", "A": "1\n2"}), False
    )
    assert options == ["--env=HF_TOKEN", "--env=PATH=/bin", "--env=A"]
    assert values == {"HF_TOKEN": "secret", "A": "1\n2"}


def test_a_terminal_is_named_to_a_command_that_has_one(monkeypatch):
    monkeypatch.setenv("TERM", "screen")
    assert engine.variable_options(Command(), False)[0] == []
    assert engine.variable_options(Command(), True)[0] == ["--env=TERM=screen"]
    own = Command(env={"TERM": "dumb"})
    assert engine.variable_options(own, True)[0] == ["--env=TERM=dumb"]
    monkeypatch.delenv("TERM")
    assert engine.variable_options(Command(), True)[0] == ["--env=TERM=xterm"]


def test_clients_do_not_get_our_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("DOCKER_HOST", "tcp://x")
    assert "HF_TOKEN" not in docker._environment()
    assert docker._environment()["DOCKER_HOST"] == "tcp://x"
    assert engine.client_environment().keys().isdisjoint({"HF_TOKEN", "DOCKER_HOST"})


def test_limits_are_options():
    options = engine.general_options(Command(memory_bytes=1 << 20), False)
    assert options[-2:] == ["--memory=1048576", "--memory-swap=1048576"]
    assert not [word for word in engine.general_options(Command(), False) if "memory" in word]


def test_no_engine_is_one_sentence(monkeypatch):
    monkeypatch.setattr(programs, "find", lambda _: None)
    monkeypatch.setattr(programs, "installable", lambda: False)
    with pytest.raises(HostError) as caught:
        choose("auto")
    assert "install podman catatonit runc); docker: Docker's client is not installed" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_what_podman_needs_is_named_unless_it_can_be_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "find", lambda _: None)
    monkeypatch.setattr(programs, "installable", lambda: False)
    with pytest.raises(HostError) as caught:
        Podman().require()
    assert str(caught.value) == (
        "podman and catatonit and runc missing\n  → as root: apt-get install podman catatonit runc"
    )
    installed: list[str] = []
    monkeypatch.setattr(programs, "install", lambda packages: installed.extend(packages.values()))
    with pytest.raises(FileNotFoundError):
        Podman().prepare_host(tmp_path)
    assert installed == ["podman", "catatonit", "runc"]


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "Error: OCI runtime error: crun: the requested controller `pids` is not available",
            "apt-get install runc",
        ),
        (
            "Error response from daemon: OCI runtime create failed: crun: mount",
            "--runtime runc",
        ),
        ("Error: runc: permission denied", "None"),
    ],
)
def test_the_remedy_of_a_refusal_follows_from_its_message(message, hint, tmp_path, monkeypatch):
    refused = subprocess.CompletedProcess([], 1, "", message)
    monkeypatch.setattr(engine, "captured", lambda *_, **__: refused)
    client = Client(words=[], env={}, container="name", image=[])
    with pytest.raises(HostError) as caught:
        Docker()._check_result(125, root_with(tmp_path), Command(), client, [])
    assert hint in str(caught.value.hint)


def test_a_silent_engine_costs_three_seconds(monkeypatch):
    def silent(*_: str, timeout: float | None = None) -> None:
        raise subprocess.TimeoutExpired("docker", timeout or 0)

    monkeypatch.setattr(docker, "docker", silent)
    with pytest.raises(HostError, match="no Docker engine answers: it is silent for 3 s"):
        Docker().require()


def test_a_user_without_subordinate_ids(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    monkeypatch.setattr(programs, "find", lambda _: Path("/bin/x"))
    problem = programs.lacks_ids()
    assert problem is not None
    assert problem[0] == "user 4000000 has no subordinate ids in /etc/subuid and /etc/subgid"
    monkeypatch.setattr(programs, "find", lambda _: None)
    assert programs.lacks_ids() == (
        "not installed: newuidmap and newgidmap",
        "as root: apt-get install uidmap",
    )


def parsed(*words: str) -> argparse.Namespace:
    return parser_of("run").parse_args(list(words))


def test_run_options():
    args = parsed(
        "cpu",
        "-v",
        "/a:/b",
        "-e",
        "K=V",
        "--gpus",
        "2",
        "--device",
        "/dev/null",
        "--",
        "train",
        "-v",
        "--",
    )
    assert (args.target, args.volume, args.gpus, args.device) == (
        "cpu",
        ["/a:/b"],
        "2",
        ["/dev/null"],
    )
    assert args.command == ["train", "-v", "--"]
    assert (parsed("cpu").command, parsed("cpu").gpus) == ([], "none")
    assert parsed("cpu", "--no-entrypoint").entrypoint is False


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2g", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("512M", 512 << 20),
        ("1048576", 1 << 20),
        ("64 mb", 64 << 20),
    ],
)
def test_sizes(text, amount):
    assert run_verb._bytes("--memory", text) == amount


@pytest.mark.parametrize("text", ["", "2x", "-1g", "12", "g", "1e9"])
def test_bad_sizes(text):
    with pytest.raises(InputError, match="--memory"):
        run_verb._bytes("--memory", text)


def test_volumes():
    assert run_verb._mount("/a:/b:ro").read_only
    assert not run_verb._mount("/a:/b").read_only
    for bad in ("/a", "/a:b", ":/b", "/a:/b:no", "a:b:/c:ro"):
        with pytest.raises(InputError, match="not a volume"):
            run_verb._mount(bad)


def test_log_tail(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100000)))
    tail = log_tail(log).splitlines()
    assert tail[0] == "line 99970"
    assert tail[-2:] == ["line 99999", f"full log: {log}"]
    assert len(tail) == 31


def test_options_of_a_container(tmp_path):
    mounts = (
        Mount(source=tmp_path, target="/in"),
        Mount(source=tmp_path, target="/out", read_only=False),
    )
    command = Command(mounts=mounts, cwd="/w", user="me", hostname="h", shm_bytes=5)
    options = engine.general_options(command, True)
    assert f"--volume={tmp_path}:/in:ro" in options
    assert f"--volume={tmp_path}:/out:rw" in options
    assert {"--tty", "--workdir=/w", "--user=me", "--shm-size=5", "--init"} <= set(options)
    assert options[options.index("--network=none") + 1] == "--hostname=h"
    named = (Mount(source=Path("/a:b,c"), target="/in", read_only=False),)
    options = engine.general_options(Command(mounts=named, hostname="h"), False)
    assert '--mount=type=bind,"source=/a:b,c",target=/in' in options
    named = (replace(named[0], read_only=True),)
    options = engine.general_options(Command(mounts=named, hostname="h"), False)
    assert '--mount=type=bind,"source=/a:b,c",target=/in,readonly' in options
    alone = engine.general_options(Command(network=True, hostname="h"), False)
    assert "--network=host" in alone
    assert not any(word.startswith(("--hostname", "--tty", "--user")) for word in alone)


class Shell(Engine):
    """An engine whose client is a shell script, which gets the container's arguments."""

    name = "shell"

    def __init__(self, script: str) -> None:
        self.script = script

    @contextlib.contextmanager
    def _container(self, root, name):
        words = ["sh", "-c", self.script, "sh"]
        yield Client(words=words, env=dict(os.environ), container=name, image=["IMAGE"])

    def _own_options(self, command):
        return []


def refusal(script: str, folder: Path) -> str:
    """Return why an engine whose client is ``script`` runs no command."""
    root = root_with(folder, Cmd=["true"])
    with Path(os.devnull).open("rb") as nothing, pytest.raises(HostError) as caught:
        Shell(script).run(root, Command(), stdin=nothing, stdout=nothing)
    return caught.value.message


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_exit_code_is_that_of_the_command(script, code, tmp_path):
    root = root_with(tmp_path, Cmd=["true"])
    with Path(os.devnull).open("rb") as nothing:
        assert Shell(script).run(root, Command(), stdin=nothing, stdout=nothing) == code


def test_a_command_that_its_memory_limit_killed_is_told_so(tmp_path, capfd):
    root = root_with(tmp_path, Cmd=["true"])
    with Path(os.devnull).open("rb") as nothing:
        command = Command(memory_bytes=5 << 20)
        assert Shell("exit 137").run(root, command, stdin=nothing, stdout=nothing) == 137
    assert "over the memory limit of 5 MiB" in capfd.readouterr().err


def test_a_container_that_did_not_start_says_why(tmp_path):
    script = "[ $1 = run ] && exit 125; echo Error: no space >&2; exit 1"
    assert refusal(script, tmp_path) == "shell cannot run v1.2_cpu: no space"
    root = root_with(tmp_path, Cmd=["true"])
    started = "[ $1 = run ] && exit 127; echo 127 2026-11-29"
    with Path(os.devnull).open("rb") as nothing:
        assert Shell(started).run(root, Command(), stdin=nothing, stdout=nothing) == 127


@pytest.mark.parametrize("code", [1, 2, 125, 127])
def test_an_exit_code_that_the_engine_lost_is_not_that_of_the_command(code, tmp_path):
    # As podman ends with 127 if the monitor of a running container was killed.
    script = f"[ $1 = run ] && exit {code}; echo 0 2026-11-29"
    assert refusal(script, tmp_path) == "shell lost the result of the command in v1.2_cpu"


def test_an_engine_that_gets_too_little_memory_says_so(tmp_path):
    script = "printf 'fatal error: cannot reserve memory\n\nruntime.rt0_go()\n' >&2; exit 2"
    assert (
        refusal(script, tmp_path) == "shell cannot run v1.2_cpu: fatal error: cannot reserve memory"
    )


def test_the_reason_of_a_refusal_is_asked_without_a_registry(tmp_path):
    script = "[ $1 = run ] && exit 125; echo Error: $1 $2 >&2; exit 1"
    assert refusal(script, tmp_path) == "shell cannot run v1.2_cpu: create --pull=never"


def test_a_container_that_was_made_is_started_again_for_its_reason(tmp_path):
    made = "[ $1 = container ] && echo 0 0001-01-01T00:00:00Z && exit"
    script = f"[ $1 = run ] && exit 126; {made}; echo Error: $1 is refused >&2; exit 1"
    assert refusal(script, tmp_path) == "shell cannot run v1.2_cpu: start is refused"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "it gives no reason"),
        ("a warning\nError response from daemon: no room\nsee --help", "no room"),
        ("a warning\nError: no room", "no room"),
        ("first\nlast", "last"),
    ],
)
def test_the_reason_of_a_client_is_its_error_or_its_last_line(said, reason):
    assert engine.error_of(subprocess.CompletedProcess([], 1, "", said)) == reason


def test_a_user_that_the_image_does_not_have_is_the_users_mistake(tmp_path):
    script = "[ $1 = run ] && exit 126; echo Error: unable to find user me >&2; exit 1"
    root = root_with(tmp_path, Cmd=["true"])
    with Path(os.devnull).open("rb") as nothing:
        with pytest.raises(InputError, match="the image has no user 'me'"):
            Shell(script).run(root, Command(user="me"), stdin=nothing, stdout=nothing)
        # An image that names a user of its own lacks it; nobody asked for one.
        with pytest.raises(HostError, match="unable to find user me"):
            Shell(script).run(root, Command(), stdin=nothing, stdout=nothing)


@pytest.mark.parametrize(
    ("name", "host"),
    [("v1.2_cpu", "v1-2-cpu"), ("_", "primus"), ("a" * 80, "a" * 63)],
)
def test_a_container_is_called_as_its_image(name, host, tmp_path):
    root = replace(root_with(tmp_path, Cmd=["true"]), name=name)
    output = tmp_path / "output"
    with Path(os.devnull).open("rb") as nothing, output.open("wb") as stream:
        Shell('echo "$@"').run(root, Command(), stdin=nothing, stdout=stream)
    assert f"--hostname={host} " in output.read_text()


def test_what_was_written_before_a_command_comes_before_its_output(tmp_path):
    root = root_with(tmp_path, Cmd=["true"])
    output = tmp_path / "output"
    with Path(os.devnull).open("rb") as nothing, output.open("w") as stream:
        stream.write("before\n")
        script = "echo out; echo error >&2"
        Shell(script).run(root, Command(), stdin=nothing, stdout=stream, stderr=stream)
    assert output.read_text() == "before\nout\nerror\n"


def test_a_message_about_a_killed_command_is_among_its_errors(tmp_path, capfd):
    root = root_with(tmp_path, Cmd=["true"])
    errors = tmp_path / "errors"
    for limit in (5 << 20, None):
        with Path(os.devnull).open("rb") as nothing, errors.open("w") as stream:
            command = Command(memory_bytes=limit)
            Shell("exit 137").run(root, command, stdin=nothing, stdout=nothing, stderr=stream)
        assert bool(errors.read_text()) is (limit is not None)
    assert capfd.readouterr().err == ""


# A container that runs a while after its client started, and says what it gets.
SIGNALLED = """
trap 'echo window >> {folder}/said' WINCH
case $1 in
run)
    echo $$ > {folder}/client
    while [ ! -e {folder}/ended ]; do sleep 0.02; done
    exit 5
    ;;
kill)
    [ -e {folder}/runs ] || {{ echo > {folder}/early; exit 1; }}
    echo "$3" >> {folder}/said
    echo > {folder}/ended
    ;;
esac
"""
RUN = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_engines import Shell, root_with
from primus_images.sandbox.container import Command

with open("/dev/null", "rb") as nothing:
    root = root_with(Path({folder!r}), Cmd=["true"])
    sys.exit(Shell({script!r}).run(root, Command(), stdin=nothing, stdout=nothing))
"""


def test_signals_reach_a_container_as_soon_as_it_runs(tmp_path: Path) -> None:
    script = SIGNALLED.format(folder=tmp_path)
    text = RUN.format(here=str(Path(__file__).parent), folder=str(tmp_path), script=script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", text], env=environment)
    said = tmp_path / "said"
    try:
        assert until((tmp_path / "client").exists, 20)
        process.send_signal(signal.SIGWINCH)
        assert until(said.exists, 20)
        process.send_signal(signal.SIGTERM)
        assert until((tmp_path / "early").exists, 20)
        (tmp_path / "runs").touch()
        assert process.wait(20) == 5
    finally:
        process.kill()
    assert said.read_text().split() == ["window", "--signal=15"]


@pytest.mark.parametrize(
    ("file_system", "words"),
    [
        ("copy", "--remove-destination low/. top/. ../containers/c/root"),
        ("overlay", "lowerdir=top:low,upperdir=../containers/c/upper"),
    ],
)
def test_layers_are_joined_with_the_top_over_the_others(file_system, words, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(podman, "captured", lambda argv, *_, **__: commands.append(argv))
    monkeypatch.setattr(podman, "finally_run", lambda *_: contextlib.nullcontext())
    made = State(workspace=tmp_path, place=tmp_path, file_system=file_system)
    with podman._mounted(made, ["top", "low"], "c"):
        pass
    assert words in " ".join(commands[0])


def test_an_image_of_an_engine_is_the_same_by_its_layers_and_settings(tmp_path):
    root = root_with(tmp_path, Cmd=["c"])
    image = {"RootFS": {"Layers": ["sha256:bb"]}, "Config": {"Cmd": ["c"], "User": ""}}
    assert docker._has_contents_of(root, image)
    assert not docker._has_contents_of(root, {**image, "RootFS": {"Layers": ["sha256:cc"]}})
    assert not docker._has_contents_of(root, {**image, "Config": {"Cmd": ["d"]}})


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what Docker's client says about the engine that it chooses."""
    said = tmp_path / "endpoint"
    said.write_text("unix:///var/run/docker.sock\n")
    client = tmp_path / "bin/docker"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\n[ "$1 $2" = "context inspect" ] && exec cat {said}\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    return said


def test_a_container_of_docker_outlives_a_command_that_has_ended(endpoint: Path) -> None:
    mine = docker._this_command()
    assert not docker._has_ended(mine)
    machine, _, process = mine.rpartition("/")[0].rpartition("/")
    # The number belongs to another process now, or to none.
    assert docker._has_ended(f"{machine}/{process}/1")
    assert docker._has_ended(f"{machine}/4194304/1")
    assert docker._has_ended("another-boot/4026531836/1/1")
    # Whether a process of another namespace has ended is not known here.
    boot = machine.partition("/")[0]
    assert not docker._has_ended(f"{boot}/1/1/1")


@pytest.mark.parametrize("text", ["tcp://elsewhere:2376", "ssh://me@elsewhere", ""])
def test_containers_of_other_machines_stay_in_an_engine_that_is_shared(
    text: str, endpoint: Path
) -> None:
    endpoint.write_text(text)
    assert not docker._has_ended("another-boot/4026531836/1/1")


# A client whose engine has no image, and reads one for as long as it is sent.
DOCKER = """#!/bin/sh
case "$*" in
version*) echo 28 ;;
"image inspect"*) exit 1 ;;
load*) echo $$ > {folder}/load; cat > {folder}/archive; exec sleep 60 ;;
esac
"""
LOAD = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from test_engines import root_with
from dataclasses import replace
from primus_images.sandbox.docker import load_image

def slowly(_):
    for _ in range(600):
        yield b"tar"
        time.sleep({pause})

try:
    load_image(replace(root_with(Path({folder!r})), tar=slowly), "a:b")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("pause", [0.1, 0])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_nothing_stays_of_an_interrupted_load(
    number: int, code: int, pause: float, tmp_path: Path
) -> None:
    (tmp_path / "docker").write_text(DOCKER.format(folder=tmp_path))
    (tmp_path / "docker").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    text = LOAD.format(here=str(Path(__file__).parent), folder=str(tmp_path), pause=pause)
    process = subprocess.Popen(
        [sys.executable, "-c", text], env=environment, start_new_session=True
    )
    client = tmp_path / "load"
    assert until(lambda: client.exists() and client.read_text().strip(), 20)
    time.sleep(0.3)
    # A terminal sends it to the whole group.
    os.killpg(process.pid, number)
    assert process.wait(20) == code
    number_of_client = int(client.read_text())
    assert until(lambda: not alive(number_of_client), 5)


def test_a_client_that_ends_early_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = DOCKER.replace(
        "echo $$ > {folder}/load; cat > {folder}/archive; exec sleep 60", "{end}"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "docker").touch(0o755)
    for end, reason in (
        ("echo no room >&2; exit 1", "no room"),
        ("exit 1", "exit code 1"),
        ("cat > /dev/null; echo unpacking >&2; echo bad layer >&2; exit 1", "bad layer"),
    ):
        (tmp_path / "docker").write_text(program.format(end=end))
        with pytest.raises(HostError, match=f"the Docker engine refuses v1.2_cpu: {reason}"):
            docker.load_image(root_with(tmp_path), "a:b")


# An engine without containers. It lists an archive that it was sent as the text of `loaded`.
ENGINE = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$1 $2" in
version*)
    [ -e {folder}/refused ] && cat {folder}/refused >&2 && exit 1
    echo 28
    ;;
"image inspect") cat {folder}/images/$3 ;;
load*)
    cat > {folder}/archive
    [ -e {folder}/full ] && cat {folder}/full >&2 && exit 1
    cp {folder}/loaded {folder}/images/a:b
    ;;
ps*) cat {folder}/containers ;;
run*) exit 7 ;;
esac
"""


@pytest.fixture
def engine_of_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an engine that Docker's client finds, with what it was asked."""
    folder = tmp_path / "engine"
    (folder / "images").mkdir(parents=True)
    for name in ("calls", "containers"):
        (folder / name).touch()
    (folder / "docker").write_text(ENGINE.format(folder=folder))
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def list_image(folder: Path, name: str, **fields: object) -> None:
    (folder / name).write_text(json.dumps([fields]))


class Amounts(Progress):
    """Notes the amount of a task, and adds what it reports."""

    def __init__(self) -> None:
        super().__init__()
        self.total: int | None = None
        self.done = 0

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        self.total = total

    def advance(self, key: str, amount: int) -> None:
        self.done += amount


def test_an_image_is_sent_as_docker_saves_one(engine_of_docker: Path, tmp_path: Path) -> None:
    root = root_with(tmp_path, Cmd=["c"])
    list_image(engine_of_docker, "loaded", Id=f"sha256:{root.id}")
    progress = Amounts()
    identity, sent = docker.load_image(root, "a:b", progress)
    assert identity == f"sha256:{root.id}"
    archive = engine_of_docker / "archive"
    assert sent > 0
    assert archive.stat().st_size >= sent
    with tarfile.open(archive) as image:
        files = {name: image.extractfile(name).read() for name in image.getnames()}  # type: ignore[union-attr]
    assert files == {
        f"{root.id}.json": root.config_bytes,
        "manifest.json": json.dumps(
            [{"Config": f"{root.id}.json", "RepoTags": ["a:b"], "Layers": ["bb/layer.tar"]}]
        ).encode(),
        "bb/layer.tar": b"tar",
    }
    assert (progress.total, progress.done) == (3, 3)


def test_nothing_is_sent_if_the_engine_has_the_image(
    engine_of_docker: Path, tmp_path: Path
) -> None:
    root = root_with(tmp_path, Cmd=["c"])
    list_image(engine_of_docker, f"images/{root.id}", Id=f"sha256:{root.id}")
    # Another image has the tag.
    list_image(engine_of_docker, "images/a:b", Id="sha256:other")
    assert docker.load_image(root, "a:b") == (f"sha256:{root.id}", 0)
    calls = (engine_of_docker / "calls").read_text().splitlines()
    assert calls[-1] == f"tag sha256:{root.id} a:b"
    assert not any(call.startswith("load") for call in calls)


def test_an_engine_that_writes_manifests_anew_has_an_image_by_its_contents(
    engine_of_docker: Path, tmp_path: Path
) -> None:
    root = root_with(tmp_path, Cmd=["c"])
    contents = {"RootFS": {"Layers": ["sha256:bb"]}, "Config": {"Cmd": ["c"]}}
    list_image(engine_of_docker, "images/a:b", Id="sha256:new", Descriptor={}, **contents)
    assert docker.load_image(root, "a:b") == ("sha256:new", 0)


def test_an_image_that_an_engine_took_and_does_not_list_is_named(
    engine_of_docker: Path, tmp_path: Path
) -> None:
    list_image(engine_of_docker, "loaded", Id="sha256:other")
    with pytest.raises(HostError) as caught:
        docker.load_image(root_with(tmp_path), "a:b")
    assert caught.value.message == (
        "the Docker engine accepted v1.2_cpu, but does not list it as a:b"
    )


def test_a_blob_that_cannot_be_read_loads_no_image(engine_of_docker: Path, tmp_path: Path) -> None:
    def damaged(_: object) -> Iterator[bytes]:
        yield b"tar"
        raise HostError("a blob is damaged")

    root = replace(root_with(tmp_path), tar=damaged)
    with pytest.raises(HostError, match="a blob is damaged"):
        docker.load_image(root, "a:b")
    assert not list((engine_of_docker / "images").iterdir())


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("write /var/lib: no space left on device", "primus clean, docker system df"),
        ("bad layer", "None"),
    ],
)
def test_an_engine_without_space_says_how_to_free_some(
    said: str, hint: str, engine_of_docker: Path, tmp_path: Path
) -> None:
    (engine_of_docker / "full").write_text(said)
    with pytest.raises(HostError, match=f"refuses v1.2_cpu: {said}") as caught:
        docker.load_image(root_with(tmp_path), "a:b")
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("said", "reason", "hint"),
    [
        ("", "no reason is given", "systemctl start docker"),
        ("a\nCannot connect to it\n", "Cannot connect to it", "systemctl start docker"),
        ("dial: permission denied", "you may not use its socket", "usermod -aG docker USER"),
    ],
)
def test_an_engine_that_refuses_is_named_with_the_remedy(
    said: str, reason: str, hint: str, engine_of_docker: Path
) -> None:
    Docker().require()
    (engine_of_docker / "refused").write_text(said or "\n")
    with pytest.raises(HostError) as caught:
        Docker().require()
    assert caught.value.message == f"no Docker engine answers: {reason}"
    assert hint in str(caught.value.hint)


def test_a_container_of_docker_is_removed_with_those_of_killed_commands(
    engine_of_docker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = root_with(tmp_path, Cmd=["c"])
    list_image(engine_of_docker, f"images/{root.id}", Id=f"sha256:{root.id}")
    mine = docker._this_command()
    ended = f"{mine.rpartition('/')[0]}/1"
    (engine_of_docker / "containers").write_text(f"running {mine}\nlost {ended}\n")
    with Path(os.devnull).open("rb") as nothing:
        assert Docker().run(root, Command(), stdin=nothing, stdout=nothing) == 7
    calls = (engine_of_docker / "calls").read_text().splitlines()
    (run,) = [call for call in calls if call.startswith("run ")]
    name = run.partition("--name=")[2].split()[0]
    assert f"--label=org.primus-images.command={mine}" in run
    assert "--add-host=v1-2-cpu:127.0.0.1" in run
    removed = [call for call in calls if call.startswith("rm ")]
    assert removed == ["rm --force lost", f"rm --force {name}"]
    said = capsys.readouterr().err
    assert said == "removed container lost of a command that was killed\n"


def test_a_command_with_the_hosts_network_has_its_names() -> None:
    options = Docker()._own_options(Command(network=True, hostname="h"))
    assert not any("--add-host" in option for option in options)
