"""What podman is told, and what stays of its containers: by a stand-in that runs commands here."""

import hashlib
import io
import json
import os
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from primus_images.errors import HostError
from primus_images.sandbox import podman, state
from primus_images.sandbox.container import Command, Devices, RootFs
from primus_images.sandbox.engine import CRUN_HINT
from primus_images.sandbox.podman import Podman, sweep
from primus_images.sandbox.state import workspace_of

# Podman without containers: a command runs in the folder that would be its root. The file `broken`
# has the reason for which no container starts, `refused` that for which none but a trial starts,
# and `damaged` of podman's own files that for which none starts with them.
PODMAN = """#!/bin/sh
while [ "${{1#--}}" != "$1" ]; do shift; done
echo "$@" >> {folder}/calls
refuse() {{ [ -e "$1" ] && cat "$1" >&2 && exit 125; }}
case $1 in
unshare) shift; exec "$@" ;;
run | create)
    refuse {folder}/broken
    refuse "${{CONTAINERS_CONF%/*}}/damaged"
    while [ "$1" != --rootfs ]; do shift; done
    cd "$2" || exit 125
    shift 2
    [ "$1" = /init ] && exit 0
    refuse {folder}/refused
    exec sh "$@"
    ;;
container) exit 1 ;;
esac
"""
# An overlay whose folders are copied, the lowest first.
MOUNT = """#!/bin/sh
if [ -e {folder}/no-overlay ]; then
    echo "mount: unknown filesystem type" >&2
    exit 32
fi
options=$4
shift 5
lower=${{options#*lowerdir=}}
order=
IFS=:
for layer in ${{lower%%,*}}; do order="$layer:$order"; done
for layer in $order; do cp -a "$layer/." "$1"; done
"""


@dataclass(frozen=True)
class Machine:
    folder: Path

    @property
    def workspace(self) -> Path:
        return workspace_of(self.folder / "cache")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(folder=self.folder))
        path.chmod(0o755)

    def calls(self, verb: str) -> list[str]:
        """The calls of podman with this verb."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.partition(" ")[0] == verb]

    def probes(self) -> int:
        """How often it was tried whether a container starts."""
        return sum(call.endswith("/init -V") for call in self.calls("run"))

    def run(self, script: str, *layers: dict[str, str]) -> tuple[int, str]:
        """Run a shell script in an image; return its exit code and its output."""
        root = self.image(*(layers or ({"file": "text"},)))
        command = Command(argv=("sh", "-c", script))
        output = self.folder / "output"
        with output.open("wb") as stream, Path(os.devnull).open("rb") as nothing:
            code = Podman().run(root, command, stdin=nothing, stdout=stream)
        return code, output.read_text()

    def image(self, *layers: dict[str, str]) -> RootFs:
        archives = {}
        for files in layers:
            archive = tar_of(files)
            archives["sha256:" + hashlib.sha256(archive).hexdigest()] = archive
        descriptors = [
            {"digest": digest, "size": len(archive), "mediaType": "tar"}
            for digest, archive in archives.items()
        ]
        return RootFs(
            name="v1-demo",
            manifest=json.dumps({"layers": descriptors}).encode(),
            config_bytes=json.dumps({"rootfs": {"diff_ids": list(archives)}}).encode(),
            tar=lambda layer: iter([archives[layer.digest]]),
            cache=self.folder / "cache",
        )

    def left(self) -> list[str]:
        """What is in the folder of the containers."""
        return sorted(path.name for path in (self.workspace / "containers").iterdir())


def tar_of(files: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            member.uid = os.geteuid()
            member.gid = os.getegid()
            archive.addfile(member, io.BytesIO(text.encode()))
    return stream.getvalue()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    machine.write("bin/podman", PODMAN)
    machine.write("bin/mount", MOUNT)
    for name in ("umount", "catatonit", "runc", "crun"):
        machine.write(f"bin/{name}", "#!/bin/sh\n")
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(state, "_RUN", tmp_path / "run")
    monkeypatch.setattr(state, "_TMP", tmp_path / "tmp")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return machine


def test_a_command_sees_the_files_of_all_layers_and_nothing_of_its_container_stays(
    machine: Machine,
) -> None:
    layers = ({"one": "low", "two": "low"}, {"two": "top"})
    assert machine.run("cat one two; exit 3", *layers) == (3, "lowtop")
    assert machine.left() == []
    (run,) = [call for call in machine.calls("run") if "/init" not in call]
    name = run.partition("--name=")[2].split()[0]
    assert f"rm --force --ignore --time=0 {name}" in machine.calls("rm")


def test_a_container_is_tried_once_for_all_commands(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.run("cat file") == (0, "text")
    assert machine.run("cat file") == (0, "text")
    assert machine.probes() == 1
    said = capsys.readouterr().err
    assert said.count("unpacking") == 1
    assert "copied" not in said


def test_without_overlays_each_container_is_a_copy(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.write("no-overlay", "")
    layers = ({"one": "low", "two": "low"}, {"two": "top"})
    assert machine.run("cat one two; echo more > one", *layers) == (0, "lowtop")
    assert machine.run("cat one two", *layers) == (0, "lowtop")
    said = capsys.readouterr().err
    expected = f"whole file systems are copied: there are no overlays in {machine.workspace}"
    assert said.count(expected) == 1


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("runc: operation not permitted", "--privileged; else use --engine docker"),
        ("crun: writing cgroup.procs", CRUN_HINT),
    ],
)
def test_a_machine_on_which_no_container_starts_is_refused_with_the_reason(
    reason: str, hint: str, machine: Machine
) -> None:
    machine.write("no-overlay", "")
    machine.write("broken", f"Error: OCI runtime error: {reason}\n")
    with pytest.raises(HostError) as caught:
        Podman().prepare_host(machine.folder / "cache")
    assert caught.value.message == (
        f"podman cannot run a container here: OCI runtime error: {reason}"
    )
    assert str(caught.value.hint).endswith(hint)
    # Each runtime, and crun without control groups. None of what was tried stays.
    assert machine.probes() == 3
    assert not list((machine.folder / "run").rglob("s-*"))
    assert not list((machine.folder / "tmp").rglob("s-*"))


def test_a_command_that_podman_refuses_keeps_files_that_are_sound(machine: Machine) -> None:
    machine.run("true")
    before = state.all_states(machine.workspace)
    machine.write("refused", "Error: no such device\n")
    with pytest.raises(HostError, match="podman cannot run v1-demo: no such device"):
        machine.run("true")
    assert state.all_states(machine.workspace) == before
    # Whether they are sound was tried again.
    assert machine.probes() == 2
    assert machine.left() == []


def test_damaged_files_of_podman_are_made_again(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.run("true")
    (damaged,) = state.all_states(machine.workspace)
    (damaged.place / "damaged").write_text("Error: no database\n")
    capsys.readouterr()
    assert machine.run("cat file") == (0, "text")
    assert "podman's own files were damaged, and were made again" in capsys.readouterr().err
    assert not damaged.place.exists()


def test_what_outlived_a_killed_command_is_removed_by_the_next(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.run("true")
    containers = machine.workspace / "containers"
    for name in ("first", "second"):
        (containers / name / "root").mkdir(parents=True)
    # One was killed before it had a folder, one after its lock file was removed.
    (containers / "first.lock").touch()
    (containers / "third.lock").touch()
    aside = machine.workspace / "layers/abc-0123.tmp"
    aside.mkdir()
    capsys.readouterr()
    sweep(machine.folder / "cache")
    assert machine.left() == []
    assert not aside.exists()
    assert "removed 3 containers of commands that were killed" in capsys.readouterr().err
    assert [call.split()[-1] for call in machine.calls("rm")][-3:] == ["first", "third", "second"]
    sweep(machine.folder / "cache")
    assert capsys.readouterr().err == ""


def test_a_container_that_cannot_be_removed_is_kept_for_the_next_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.run("true")
    (machine.workspace / "containers/first").mkdir()
    (machine.workspace / "containers/first.lock").touch()
    capsys.readouterr()
    with monkeypatch.context() as busy:
        busy.setattr(podman, "remove_tree", lambda _: None)
        busy.setattr(podman, "_UNMOUNT", "false")
        sweep(machine.folder / "cache")
    assert machine.left() == ["first", "first.lock"]
    assert capsys.readouterr().err == ""
    sweep(machine.folder / "cache")
    assert machine.left() == []


def test_a_container_whose_command_runs_is_left_alone(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.run("true")
    (machine.workspace / "containers/first").mkdir()
    aside = machine.workspace / "layers/abc-0123.tmp"
    aside.mkdir()
    capsys.readouterr()
    with podman._held(machine.workspace / "containers/first.lock"):
        sweep(machine.folder / "cache")
    assert machine.left() == ["first", "first.lock"]
    # It may use a layer that was set aside.
    assert aside.exists()
    assert capsys.readouterr().err == ""


def test_the_bytes_of_an_image_are_compared_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(podman, "compare", lambda root, _: compared.append(root.id))
    engine = Podman()
    image = machine.image({"file": "text"})
    other = replace(image, config_bytes=b"{}")
    for root in (image, image, other):
        engine.verify(root)
    assert compared == [image.id, other.id]


@pytest.mark.parametrize(("user", "groups"), [(0, ["--group-add=109"]), (1000, ["keep-groups"])])
def test_a_container_has_the_groups_of_its_devices(
    user: int, groups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    options = Podman()._own_options(Command())
    assert options == ["--security-opt=label=disable"]
    devices = Devices(names=("/dev/kfd",), groups=(109,))
    options = Podman()._own_options(Command(devices=devices, network=True))
    assert "--volume=/etc/hosts:/etc/hosts:ro" in options
    assert options[-1].endswith(groups[0])


def test_podman_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podman.platform, "system", lambda: "Darwin")
    with pytest.raises(HostError, match="this is Darwin, not Linux") as caught:
        Podman().require()
    assert caught.value.hint == "use --engine docker"
