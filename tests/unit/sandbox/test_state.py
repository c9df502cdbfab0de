"""Where podman's own files are, and by what a proven state is known."""

import errno
import json
import os
from pathlib import Path

import pytest

from primus_images import programs
from primus_images.errors import HostError
from primus_images.sandbox import state
from primus_images.sandbox.state import Mode

MODE = Mode("overlay", "/usr/bin/runc", "enabled")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose /run and /tmp are below this folder, for a regular user."""
    me = os.geteuid() or 1234
    monkeypatch.setattr(state, "_RUN", tmp_path / "run")
    monkeypatch.setattr(state, "_TMP", tmp_path / "tmp")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(state.os, "geteuid", lambda: me)
    real = state._is_private

    def private(path: Path) -> bool:
        # Files of this test belong to the user that runs it.
        with monkeypatch.context() as patched:
            patched.setattr(state.os, "geteuid", os.getuid)
            return real(path)

    monkeypatch.setattr(state, "_is_private", private)
    return tmp_path


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_change_is_not_used(run, mode):
    name = f"primus-{state.os.geteuid()}"
    (run / "tmp" / name).mkdir()
    (run / "tmp" / name).chmod(mode)
    runs = state._runs(Path("/workspace"))
    assert runs.parent == run / "tmp" / f"{name}-1"
    for folder in (runs.parent, runs):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_or_a_file_of_another_is_not_used(run):
    name = f"primus-{state.os.geteuid()}"
    (run / "elsewhere").mkdir(mode=0o700)
    (run / "tmp" / name).symlink_to(run / "elsewhere")
    (run / "tmp" / f"{name}-1").write_text("")
    assert state._runs(Path("/workspace")).parent.name == f"{name}-2"


def test_no_private_folder_is_one_sentence(run):
    for number in range(10):
        suffix = f"-{number}" if number else ""
        (run / "tmp" / f"primus-{state.os.geteuid()}{suffix}").write_text("")
    with pytest.raises(HostError, match="no private folder") as caught:
        state._runs(Path("/workspace"))
    assert "set XDG_RUNTIME_DIR" in str(caught.value)


def test_roots_folder_is_named_with_its_remedy(run, monkeypatch):
    (run / "run/primus").mkdir(parents=True)
    (run / "run/primus").chmod(0o777)
    monkeypatch.setattr(state.os, "geteuid", lambda: 0)
    with pytest.raises(HostError) as caught:
        state._runs(Path("/workspace"))
    folder = run / "run/primus"
    assert f"{folder} is not a folder that you alone may change\n  → remove {folder}" in str(
        caught.value
    )


def test_a_read_only_run_folder_is_named_with_its_remedy(run, monkeypatch):
    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(state.os, "geteuid", lambda: 0)
    with pytest.raises(HostError) as caught:
        state._runs(Path("/workspace"))
    text = str(caught.value)
    assert f"{run / 'run/primus'} cannot be made: Read-only file system\n" in text
    assert f"→ make {run / 'run'} writable" in text


@pytest.mark.parametrize("spoil", [Path.touch, lambda path: path.symlink_to("/")])
def test_what_lies_in_place_of_a_private_folder_is_replaced(run, spoil):
    runs = state._runs(Path("/workspace"))
    runs.rmdir()
    spoil(runs)
    assert state._runs(Path("/workspace")) == runs
    assert runs.is_dir()
    assert not runs.is_symlink()


def test_the_folder_of_a_session_comes_first_if_it_is_private_and_short(monkeypatch):
    monkeypatch.setattr(state, "_is_private", lambda _: True)
    monkeypatch.setattr(state.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/mine")
    first, second, *_ = state._candidates()
    assert (str(first), str(second)) == ("/run/mine/primus", "/run/user/1000/primus")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/a/path/that/is/too/long/for/podman")
    assert str(next(state._candidates())) == "/run/user/1000/primus"


@pytest.fixture
def tools(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with podman, catatonit and runc."""
    folder = run / "bin"
    folder.mkdir()
    for name in ("podman", "catatonit", "runc"):
        (folder / name).write_text("")
    monkeypatch.setattr(programs, "find", lambda name: _found(folder / name))
    return folder


def _found(path: Path) -> Path | None:
    return path if path.exists() else None


def test_a_state_is_known_once_it_is_kept(tools, run):
    workspace = run / "workspace"
    made = state.new(workspace, MODE)
    assert state.known(workspace) is None
    state.keep(made, MODE)
    assert state.known(workspace) == made
    state.forget(made)
    assert state.known(workspace) is None


def test_a_state_is_that_of_its_programs(tools, run, monkeypatch):
    workspace = run / "workspace"
    made = state.new(workspace, MODE)
    state.keep(made, MODE)
    (run / "sbin").symlink_to(tools)
    monkeypatch.setattr(programs, "find", lambda name: _found(run / "sbin" / name))
    assert state.known(workspace) == made
    (tools / "runc").write_text("another one")
    assert state.known(workspace) is None
    (tools / "runc").write_text("")
    (tools / "crun").write_text("")
    assert state.known(workspace) is None


def test_another_boot_proves_its_own_state(tools, run, monkeypatch):
    workspace = run / "workspace"
    state.keep(state.new(workspace, MODE), MODE)
    monkeypatch.setattr(state, "text_if_readable", lambda _: "another boot")
    assert state.known(workspace) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"place": 1}', '{"mode": {}}', '{"place": "../x", "mode": %s}'],
)
def test_a_damaged_note_is_none(tools, run, content):
    workspace = run / "workspace"
    state.keep(state.new(workspace, MODE), MODE)
    (note,) = state._runs(workspace).glob("*.json")
    note.write_text(content.replace("%s", json.dumps(MODE._asdict())))
    assert state.known(workspace) is None


@pytest.mark.parametrize("content", [None, "", "[engine]\nhooks_dir = ['/x']", "folder"])
def test_a_damaged_configuration_is_written_again(tools, run, content):
    workspace = run / "workspace"
    made = state.new(workspace, MODE)
    state.keep(made, MODE)
    path = made.place / "containers.conf"
    text = path.read_text()
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    assert state.known(workspace) == made
    assert path.read_text() == text


def test_states_that_none_knows_are_removed_unless_used(tools, run):
    workspace = run / "workspace"
    lost = state.new(workspace, MODE)
    used = state.new(workspace, MODE)
    with used.in_use():
        state.keep(state.new(workspace, MODE), MODE)
        assert not lost.place.exists()
        assert used.place.exists()
    state.keep(state.new(workspace, MODE), MODE)
    assert not used.place.exists()


def test_a_container_may_not_mount(tools, run, monkeypatch):
    rules = [
        {"names": ["read", "mount", "move_mount"], "action": "SCMP_ACT_ALLOW", "includes": {}},
        {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["mount"], "action": "SCMP_ACT_ERRNO", "includes": {}},
    ]
    (run / "seccomp.json").write_text(json.dumps({"syscalls": rules}))
    monkeypatch.setattr(state, "_SYSTEM_CALLS", run / "seccomp.json")
    made = state.new(run / "workspace", MODE)
    profile = json.loads((made.place / "seccomp.json").read_text())
    assert [rule["names"] for rule in profile["syscalls"]] == [["read"], ["mount"], ["mount"]]
    line = f'seccomp_profile = "{made.place}/seccomp.json"\n[engine]\n'
    assert line in (made.place / "containers.conf").read_text()
    (run / "seccomp.json").unlink()
    assert "seccomp" not in (state.new(run / "w", MODE).place / "containers.conf").read_text()


NO_NAMES = '{"syscalls": [{"names": null, "action": "SCMP_ACT_ALLOW"}]}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"syscalls": 3}', NO_NAMES])
def test_a_damaged_list_of_system_calls_is_named(tools, run, monkeypatch, content):
    (run / "seccomp.json").write_text(content)
    monkeypatch.setattr(state, "_SYSTEM_CALLS", run / "seccomp.json")
    with pytest.raises(HostError, match="not a list of system calls") as caught:
        state.new(run / "workspace", MODE)
    assert caught.value.where == str(run / "seccomp.json")


def test_podman_warns_of_no_control_groups_in_the_output_of_a_command(tools, run):
    # Podman 5 does, where they are of version 1.
    made = state.new(run / "workspace", MODE)
    assert made.environment()["PODMAN_IGNORE_CGROUPSV1_WARNING"]


def test_a_link_in_place_of_a_folder_is_removed_alone(run):
    (run / "elsewhere").mkdir()
    (run / "link").symlink_to(run / "elsewhere")
    state.remove_tree(run / "link")
    assert not os.path.lexists(run / "link")
    assert (run / "elsewhere").is_dir()


def test_a_workspace_is_the_same_by_a_link(run):
    (run / "project").mkdir()
    (run / "link").symlink_to(run / "project")
    real = state.workspace_of(run / "project/.primus/unpacked")
    assert state.workspace_of(run / "link/.primus/unpacked") == real


@pytest.mark.parametrize(("user", "name"), [(0, "root"), (1000, "user-1000")])
def test_users_of_one_checkout_have_a_workspace_each(run, monkeypatch, user, name):
    monkeypatch.setattr(state.os, "geteuid", lambda: user)
    assert state.workspace_of(run) == run / name


def test_a_regular_user_prepares_the_workspace_in_podmans_namespaces(tools, run, monkeypatch):
    made = state.new(run / "workspace", MODE)
    monkeypatch.setattr(state.os, "geteuid", lambda: 1000)
    assert made.inside() == [*made.podman(), "unshare"]
    monkeypatch.setattr(state.os, "geteuid", lambda: 0)
    assert made.inside() == ["env", f"--chdir={run / 'workspace'}"]
