"""The parts of the sandbox that need no root: users, paths, options, scratch, groups, errors."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus.cli.host import run as run_verb
from primus.errors import HostError, InputError
from primus.sandbox import cgroups, channel, embedded, userns
from primus.sandbox.container import Command, RootFs, final_argv, host_name, image_env
from primus.sandbox.embedded import EmbeddedEngine
from primus.sandbox.engines import choose
from primus.sandbox.isolated import log_tail
from primus.sandbox.overlay import missing_program, resolve_inside
from primus.sandbox.scratch import scratch
from primus.sandbox.users import identity

PASSWD = """# comment
root:x:0:0:root:/root:/bin/sh
worker:x:1000:1000:w:/home/worker:/bin/sh
broken
42:x:7:8::/h:/s
"""
GROUP = "root:x:0:\nworker:x:1000:\nrender:x:109:worker,other\n"


@pytest.mark.parametrize(
    ("spec", "uid", "gid", "groups", "home"),
    [
        (None, 0, 0, (), "/root"),
        ("", 0, 0, (), "/root"),
        ("worker", 1000, 1000, (109,), "/home/worker"),
        ("1000", 1000, 1000, (109,), "/home/worker"),
        ("worker:render", 1000, 109, (), "/home/worker"),
        ("worker:5", 1000, 5, (), "/home/worker"),
        ("4321:8765", 4321, 8765, (), "/"),
        ("4321", 4321, 0, (), "/"),
        ("42", 7, 8, (), "/h"),
    ],
)
def test_identity(tmp_path, spec, uid, gid, groups, home):
    (tmp_path / "p").write_text(PASSWD)
    (tmp_path / "g").write_text(GROUP)
    who = identity(spec, tmp_path / "p", tmp_path / "g")
    assert (who.uid, who.gid, who.groups, who.home) == (uid, gid, groups, home)


@pytest.mark.parametrize("spec", ["nobody-here", "worker:nogroup", "99999999999", "²", "worker:²"])
def test_identity_refuses(tmp_path, spec):
    (tmp_path / "p").write_text(PASSWD)
    with pytest.raises(InputError):
        identity(spec, tmp_path / "p", tmp_path / "absent")


def test_links_stay_inside_the_root(tmp_path):
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "abs").symlink_to("/usr/lib")
    (tmp_path / "up").symlink_to("../../../../../etc/passwd")
    (tmp_path / "loop").symlink_to("loop")
    root = str(tmp_path)
    assert resolve_inside(root, "/lib/x") == f"{root}/usr/lib/x"
    assert resolve_inside(root, "abs/../../x") == f"{root}/x"
    assert resolve_inside(root, "/up") == f"{root}/etc/passwd"
    assert resolve_inside(root, "/../../etc") == f"{root}/etc"
    assert resolve_inside(root, "/new/place") == f"{root}/new/place"
    with pytest.raises(InputError, match="symbolic links"):
        resolve_inside(root, "/loop/x")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tool", None),
        ("/bin/tool", None),
        ("bin/tool", None),
        ("linked", None),
        ("binary", None),
        ("/mnt/anything", None),
        ("nothing", (127, "nothing: not found in the image")),
        ("/nothing", (127, "/nothing: not found in the image")),
        ("data", (126, "data: Permission denied")),
        ("folder", (126, "folder: Permission denied")),
        ("text", (126, "text: not a program for this machine, and no #! line")),
        ("orphan", (127, "orphan: its interpreter /bin/gone is not in the image")),
    ],
)
def test_what_can_be_started(tmp_path, name, said):
    (tmp_path / "bin/folder").mkdir(parents=True)
    for program, data in {
        "tool": b"#!/bin/binary -e\n",
        "binary": b"\x7fELF",
        "data": b"x",
        "text": b"hello",
        "orphan": b"#! /bin/gone\n",
    }.items():
        (tmp_path / "bin" / program).write_bytes(data)
        (tmp_path / "bin" / program).chmod(0o644 if program == "data" else 0o755)
    (tmp_path / "bin/linked").symlink_to("/bin/tool")
    assert missing_program(str(tmp_path), name, "/sbin:/bin", "/", ["/mnt"]) == said


def root_with(**settings: object) -> RootFs:
    return RootFs(layers=(), config={"config": settings}, blob=Path, cache=Path("c"), name="v1.2_cpu")


def test_entrypoint_and_cmd():
    root = root_with(Entrypoint=["e"], Cmd=["c"])
    assert final_argv(root, Command()) == ["e", "c"]
    assert final_argv(root, Command(argv=("a",))) == ["e", "a"]
    assert final_argv(root, Command(argv=("a",), entrypoint=False)) == ["a"]
    with pytest.raises(InputError, match="has no default command"):
        final_argv(root_with(), Command())


def test_environment_and_host_name():
    root = root_with(Env=["A=1", "B=x=y"])
    env = image_env(root, Command(env={"A": "2"}))
    assert env["A"] == "2"
    assert env["B"] == "x=y"
    assert "/usr/bin" in env["PATH"]
    assert set(env) == {"A", "B", "PATH"}
    assert host_name(root, Command()) == "v1-2-cpu"


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run_verb.add_arguments(parser)
    return parser.parse_args(list(words))


def test_run_verb():
    args = parsed("cpu", "-v", "/a:/b", "-e", "K=V", "--", "train", "-v", "--", "x")
    assert args.target == "cpu"
    assert args.volume == ["/a:/b"]
    assert args.command == ["train", "-v", "--", "x"]
    assert parsed("cpu").command == []
    assert parsed("-t", "cpu", "--no-entrypoint").entrypoint is False


def test_devices_and_gpus_of_the_verb():
    assert parsed("cpu").gpus == "none"
    args = parsed("cpu", "--gpus", "2", "--device", "/dev/null", "--device", "amd.com/gpu=0")
    assert (args.gpus, args.device) == ("2", ["/dev/null", "amd.com/gpu=0"])


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2g", 2 << 30), ("1.5GiB", 3 << 29), ("512M", 512 << 20), ("1048576", 1 << 20), ("64 mb", 64 << 20)],
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
    assert not run_verb._mount("/a:/b:rw").read_only
    for bad in ("/a", "/a:b", ":/b", "/a:/b:no", "a:b:/c:ro"):
        with pytest.raises(InputError, match="not a volume"):
            run_verb._mount(bad)


def test_scratch_removes_itself_and_the_dead_but_not_the_living(tmp_path):
    removed = []

    def remove(path: Path) -> bool:
        removed.append(path.name)
        if path.name == "busy":
            return False
        if path.exists():
            path.rmdir()
        return True

    for name in ("dead", "busy", "living"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.lock").touch()
    with (tmp_path / "living.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError), scratch(tmp_path, remove) as own:
            assert own.path.is_dir()
            raise RuntimeError
    assert sorted(removed) == sorted(["busy", "dead", own.name])
    assert sorted(path.name for path in tmp_path.glob("*")) == ["busy", "busy.lock", "living", "living.lock"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_scratch_where_nothing_may_be_written():
    with pytest.raises(HostError, match="cannot keep"), scratch(Path("/proc/x"), lambda _: None):
        pass


def test_errors_cross_processes():
    for error in (InputError("bad", hint="do"), HostError("gone")):
        read, write = os.pipe()
        channel.report(write, error)
        os.close(write)
        with pytest.raises(type(error)) as caught:
            channel.raise_reported(read)
        os.close(read)
        assert (caught.value.message, caught.value.hint) == (error.message, error.hint)


def test_log_tail(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100000)))
    tail = log_tail(log).splitlines()
    assert tail[0] == "line 99970"
    assert tail[-2:] == ["line 99999", f"full log: {log}"]
    assert len(tail) == 31


def test_no_subordinate_ids(tmp_path, monkeypatch):
    (tmp_path / "subuid").write_text("somebody:1:2\n\nme:100000:0\nme:x:y\n5000:200000:65536\n")
    assert userns._ranges(tmp_path / "subuid", "me", 1) == []
    assert userns._ranges(tmp_path / "subuid", "other", 5000) == [(200000, 65536)]
    assert userns._map([(200000, 10), (300000, 5)], 5000) == [
        *("0", "5000", "1"),
        *("1", "200000", "10"),
        *("11", "300000", "5"),
    ]


def test_unknown_engine():
    with pytest.raises(InputError, match="no engine 'podman'"):
        choose("podman")


def test_no_engine_is_one_sentence(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    monkeypatch.setattr("primus.sandbox.embedded.EmbeddedEngine._lack", lambda _: ("broken", "fix it"))
    with pytest.raises(HostError) as caught:
        choose("auto")
    text = str(caught.value)
    assert "embedded: broken (fix it)" in text
    assert "docker: no Docker engine answers: its socket does not exist" in text
    assert "\n" not in text


def test_no_runtime_is_a_sentence_unless_it_can_be_installed(monkeypatch):
    monkeypatch.setattr("primus.sandbox.tools.find", lambda _: None)
    monkeypatch.setattr("primus.sandbox.tools.installable", lambda: False)
    assert EmbeddedEngine().available() == "no OCI runtime is installed (as root: apt-get install runc)"
    asked: list[str] = []

    def need(tool: str, package: str, *, say: object) -> Path:
        asked.append(f"{tool} from {package}")
        raise HostError("no network")

    monkeypatch.setattr("primus.sandbox.tools.installable", lambda: True)
    monkeypatch.setattr("primus.sandbox.tools.need", need)
    monkeypatch.setattr("primus.sandbox.userns.missing", lambda: None)
    with pytest.raises(HostError, match="no network"):
        EmbeddedEngine().run(root_with(), Command(argv=("x",)))
    assert asked == ["runc from runc"]


def test_runc_comes_before_crun(monkeypatch):
    found = {"crun": Path("/usr/bin/crun")}
    monkeypatch.setattr("primus.sandbox.tools.find", found.get)
    words = embedded._runtime_command(embedded._runtime() or Path(), Path("/s"), "")
    assert (words[0], words[-1]) == ("/usr/bin/crun", "--cgroup-manager=disabled")
    found["runc"] = Path("/usr/sbin/runc")
    words = embedded._runtime_command(embedded._runtime() or Path(), Path("/s"), "")
    assert (words[0], words[-1]) == ("/usr/sbin/runc", "--rootless=true")
    # With a limit, a group that cannot be made is an error.
    assert embedded._runtime_command(Path("/usr/sbin/runc"), Path("/s"), "memory")[-1] == "--log-format=json"


def test_a_silent_engine_costs_two_seconds(monkeypatch, tmp_path):
    import socket
    import time

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 's'}")
        start = time.monotonic()
        with pytest.raises(HostError, match="silent"):
            choose("docker")
        assert time.monotonic() - start < 4


def test_groups_are_found_asked_and_removed(tmp_path):
    assert cgroups.groups_of(tmp_path / "nothing") == []
    first, second = tmp_path / "memory/primus-x", tmp_path / "unified/primus-x"
    state = tmp_path / "state/primus/state.json"
    for folder in (first, second, state.parent):
        folder.mkdir(parents=True)
    state.write_text(json.dumps({"cgroup_paths": {"memory": str(first), "": str(second), "pids": "/elsewhere"}}))
    groups = cgroups.groups_of(tmp_path / "state")
    assert groups == [first, second]
    assert cgroups.oom_kills(groups) == 0
    (second / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert cgroups.oom_kills(groups) == 2
    (second / "memory.events").unlink()
    assert cgroups.remove(groups)
    assert not first.exists()
    assert not second.exists()


def test_a_group_with_processes_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "_PATIENCE_S", 0.05)
    (tmp_path / "primus-x/process").mkdir(parents=True)
    assert not cgroups.remove([tmp_path / "primus-x"])


def test_a_damaged_state_names_no_group(tmp_path):
    state = tmp_path / "primus/state.json"
    state.parent.mkdir()
    for text in ("", "{", "[]", '{"cgroup_paths": []}', "null"):
        state.write_text(text)
        assert cgroups.groups_of(tmp_path) == []


def test_the_sandbox_imports_little():
    code = (
        "import sys, primus.sandbox.engines, primus.sandbox.isolated; "
        "heavy = ('docker', 'requests', 'rich', 'zstandard', 'primus.oci', 'primus.engine'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
