"""A resolved target: its names, what its lock says of it, and the places of its pins."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.gpus.table import environment
from primus_images.plan import resolve as module
from primus_images.plan.project import Project
from primus_images.plan.resolve import ResolvedTarget, lock_target, resolve, save_lock, with_lock
from primus_images.system.issues import Issue
from primus_images.versions import relock
from primus_images.versions.lock import Kind, Lock, LockedFile, load
from project_kit import Kit

VERSIONS = """\
release: v26.11
created: 2026-11-20
bases:
  small:
    suite: bookworm
    python: 3.11.2
    packages: [python3.11-minimal]
    extras:
      rdma: [libibverbs1]
      debug: [gdb]
  ready: {suite: noble, python: 3.12.3, packages: [libc6], image: docker.io/rocm/dev@sha256:IMAGE}
components:
  torch:
    name: PyTorch
    pins:
      - {wheel: torch, version: 2.9.0, channel: pypi}
  vision:
    name: Vision
    pins:
      - {sdist: Torch_Vision, version: 0.24.0, channel: pypi, build: {wheels: [ninja==1.11]}}
  aiter:
    name: AITER
    pins:
      - {git: https://example.org/ROCm/Aiter.git/, commit: COMMIT, package: amd-aiter,
         version: 1.0, channel: pypi, build: {}}
  nccl:
    name: NCCL
    pins:
      - {inside: torch, version: 2.27, channel: pypi}
  uv:
    name: uv
    tool: installs packages
    pins:
      - {wheel: uv, version: 0.9, channel: pypi}
  notes: {name: Notes, pins: [{path: notes, to: /opt/notes, channel: local}]}
""".replace("COMMIT", "a" * 40).replace("IMAGE", "b" * 64)

TARGET = """\
description: d
base: small
channels: [pypi]
components: [torch, vision, aiter, uv, notes]
extras: {pypi: [rdma]}
budget_gb: 9
"""


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = Kit(tmp_path)
    kit.write("versions.yaml", VERSIONS)
    kit.write("images/demo.yaml", TARGET)
    kit.write("notes/file", "one")
    return kit


def resolved(kit: Kit, channel: str | None = None) -> ResolvedTarget:
    return resolve(Project(kit.root, channel=channel), "demo")


def file_of(kind: Kind, name: str, version: str = "1", base: str | None = None) -> LockedFile:
    return LockedFile(
        kind=kind,
        name=name,
        version=version,
        file=f"{name}-{version}.{kind}",
        size=1,
        sha256="1" * 64,
        base=base,
    )


def with_files(target: ResolvedTarget, *files: LockedFile) -> ResolvedTarget:
    lock = Lock(
        target="demo", channel=target.choice.channel, pins=target.request.flat(), files=files
    )
    return replace(target, lock=lock)


@pytest.mark.parametrize(
    ("change", "ref", "budget", "command"),
    [
        ("", "v26.11-demo", 9, "primus lock demo"),
        ("budgets_gb: {pypi: 4}\n", "v26.11-demo", 4, "primus lock demo"),
        ("budgets_gb: {debian: 4}\n", "v26.11-demo", 9, "primus lock demo"),
        ("previews: {pypi: no GPU code}\n", "v26.11-demo-preview", 9, "primus lock demo"),
    ],
)
def test_names_and_budget_of_an_image(
    kit: Kit, change: str, ref: str, budget: float, command: str
) -> None:
    kit.write("images/demo.yaml", TARGET + change)
    target = resolved(kit)
    assert (target.ref, target.budget_gb, target.lock_command) == (ref, budget, command)
    assert target.lock_name == "images/locks/pypi/demo.json"


def test_the_command_that_locks_names_a_channel_where_there_are_several(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "[pypi]\ncomp", "[local, pypi]\ncomp")
    assert resolved(kit, "pypi").lock_command == "primus lock demo --channel pypi"


@pytest.mark.parametrize(
    ("base", "system"),
    [
        ("suite: bookworm", "debian-12"),
        ("suite: trixie", "debian-13"),
        ("suite: jammy", "ubuntu-22.04"),
        ("suite: noble", "ubuntu-24.04"),
        ("suite: plucky", ""),
    ],
)
def test_package_urls_name_the_distribution_of_the_base(kit: Kit, base: str, system: str) -> None:
    kit.edit("versions.yaml", "suite: bookworm", base)
    assert resolved(kit).system == system


def test_an_image_without_a_base_has_no_distribution_and_no_packages(kit: Kit) -> None:
    kit.write("images/demo.yaml", "description: d\nchannels: [local]\ncomponents: [notes]\n")
    target = resolved(kit)
    assert (target.system, target.roots, target.debs, target.stale) == ("", (), (), ())
    assert (target.arch, target.gpu, target.budget_gb) == (None, None, None)
    assert with_lock(target) is target


def test_the_packages_of_the_image_are_those_of_the_base_and_its_extras(kit: Kit) -> None:
    mine = [file_of("deb", "python3.11-minimal", base="small")]
    mine.append(file_of("deb", "libibverbs1", base="small rdma"))
    build = file_of("deb", "cmake", base="small build")
    target = resolved(kit)
    assert target.debs == ()
    assert target.roots == ("small", "small rdma")
    assert with_files(target, build, *mine).debs == tuple(mine)


def test_the_environment_is_that_of_the_gpu_with_the_words_of_the_target(kit: Kit) -> None:
    baked = environment("mi300x")
    named = baked[0].name
    kit.write(
        "images/demo.yaml",
        f"{TARGET}gpu: mi300x\nenvironment:\n  - {{name: {named}, value: mine, why: w}}\n"
        "  - {name: OWN, value: '1', why: w}\n",
    )
    target = resolved(kit)
    assert target.arch == "gfx942"
    expected = {variable.name: variable.value or "" for variable in baked}
    assert target.environment == {**expected, named: "mine", "OWN": "1"}


def test_an_unknown_gpu_is_refused_at_its_line(kit: Kit) -> None:
    kit.write("images/demo.yaml", TARGET + "gpu: mi300\n")
    with pytest.raises(InputError, match="mi300") as caught:
        resolved(kit)
    assert caught.value.where == "images/demo.yaml:7:1"


def test_more_components_of_a_channel_follow_and_have_their_places(kit: Kit) -> None:
    kit.write(
        "images/demo.yaml",
        "description: d\nbase: small\nchannels: [pypi]\ncomponents: [torch]\n"
        "more:\n  pypi: [uv]\n  debian: [vision]\n",
    )
    assert list(resolved(kit).pins) == ["torch", "uv"]
    kit.edit("images/demo.yaml", "pypi: [uv]", "pypi: [uv, absent]")
    with pytest.raises(InputError, match="'absent'") as caught:
        resolved(kit)
    assert caught.value.where == "images/demo.yaml:6:14"


def test_training_loads_the_packages_of_all_components_but_tools_and_folders(kit: Kit) -> None:
    assert resolved(kit).trained_with == {
        "torch": "torch",
        "vision": "torch-vision",
        "aiter": "amd-aiter",
        "nccl": "libnccl",
    }


@pytest.mark.parametrize(
    ("about", "component", "line"),
    [
        ("torch", "torch", 16),
        ("torch 2.9.0", "torch", 16),
        ("torch-2.9.0-cp311-linux_x86_64.whl", "torch", 16),
        ("torch_vision-0.24.0.tar.gz", "vision", 20),
        ("Torch.Vision", "vision", 20),
        ("amd-aiter", "aiter", 24),
        ("aiter", "aiter", 24),
        ("ninja", "build of vision", 20),
        ("ninja-1.11-py3-none-any.whl", "build of vision", 20),
        ("numpy", "", None),
        ("docker.io/rocm/dev", "", None),
    ],
)
def test_what_a_source_names_is_found_at_its_pin(
    kit: Kit, about: str, component: str, line: int | None
) -> None:
    place = f"versions.yaml:{line}:9" if line else ""
    assert resolved(kit).pin_of(about) == (component, place)


@pytest.mark.parametrize(
    ("about", "component"),
    [
        ("docker.io/rocm/dev@sha256:" + "b" * 64, "base ready"),
        ("docker.io/rocm/dev", "base ready"),
        ("docker.io/rocm/other@sha256:" + "b" * 64, ""),
    ],
)
def test_an_image_that_is_a_base_is_found_at_its_line(kit: Kit, about: str, component: str) -> None:
    kit.edit("images/demo.yaml", "base: small", "base: ready")
    kit.edit("images/demo.yaml", "extras: {pypi: [rdma]}\n", "")
    place = "versions.yaml:11:60" if component else ""
    assert resolved(kit).pin_of(about) == (component, place)


@pytest.mark.parametrize(
    ("pin", "component", "place"),
    [
        ("wheel torch", "torch", "versions.yaml:16:9"),
        ("wheel numpy", "", "versions.yaml"),
        ("build torch wheels", "", "versions.yaml:16:9"),
        ("base small python", "", "versions.yaml:6:5"),
        ("base small rdma packages", "", "versions.yaml:9:7"),
        # An extra that the target does not have drifts with its base.
        ("base small debug packages", "", "versions.yaml:7:5"),
        ("base absent suite", "", "versions.yaml"),
    ],
)
def test_a_pin_of_the_lock_is_found_in_the_file(
    kit: Kit, pin: str, component: str, place: str
) -> None:
    assert resolved(kit).drift_place(pin) == (component, place)


def test_an_error_about_a_package_gets_the_line_of_its_pin(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolved(kit)
    nothing: Any = None
    for about, where, expected in (
        ("torch", None, "versions.yaml:16:9"),
        ("torch", "elsewhere", "elsewhere"),
        ("numpy", None, None),
        (None, None, None),
    ):
        error = InputError("no file fits", where=where)
        error.about = about

        def refuse(*_: object, error: InputError = error) -> Lock:
            raise error

        monkeypatch.setattr(relock, "resolve", refuse)
        with pytest.raises(InputError) as caught:
            lock_target(target, nothing, nothing)
        assert caught.value.where == expected, about


def test_a_lock_is_written_only_if_it_changed(kit: Kit) -> None:
    target = resolved(kit)
    lock = Lock(target="demo", channel="pypi", pins={}, files=())
    save_lock(replace(target, lock=lock), lock)
    assert not target.lock_path.exists()
    save_lock(target, lock)
    assert load(target.lock_path) == lock


def test_a_target_without_a_lock_is_refused_with_the_command_that_makes_it(kit: Kit) -> None:
    with pytest.raises(InputError, match="demo has no lock yet") as caught:
        with_lock(resolved(kit))
    assert caught.value.hint == "primus lock demo, and commit the result"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("wheel torch",), "wheel torch: locked 0, wanted 2.9.0"),
        (("a", "b", "c", "d", "e"), "e: locked 0, wanted nothing"),
        (("a", "b", "c", "d", "e", "f"), "e: locked 0, wanted nothing; and 1 more"),
        (("a", "b", "c", "d", "e", "f", "g"), "e: locked 0, wanted nothing; and 2 more"),
    ],
)
def test_a_stale_lock_is_refused_with_its_first_five_differences(
    kit: Kit, changed: Sequence[str], said: str
) -> None:
    kit.write(
        "images/demo.yaml", "description: d\nchannels: [pypi]\nbase: small\ncomponents: [torch]\n"
    )
    target = resolved(kit)
    files = (file_of("deb", "python3.11-minimal", base="small"), file_of("wheel", "torch", "2.9.0"))
    pins = {**target.request.flat(), **dict.fromkeys(changed, "0")}
    lock = Lock(target="demo", channel="pypi", pins=pins, files=files)
    with pytest.raises(InputError) as caught:
        with_lock(replace(target, lock=lock))
    assert caught.value.message.startswith(f"the lock of demo is stale: {changed[0]}: locked 0")
    assert caught.value.message.endswith(said)
    place = "versions.yaml:16:9" if changed == ("wheel torch",) else None
    assert caught.value.where == place
    assert caught.value.hint == "primus lock demo, and commit the result"


def test_issues_are_of_pins_and_of_what_the_image_contains(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def issues(versions: object, gpus: object) -> list[Issue]:
        asked.append((versions, gpus))
        return []

    monkeypatch.setattr(module, "issues", issues)
    target = with_files(
        resolved(kit),
        file_of("wheel", "torch", "2.9.0+local"),
        file_of("wheel", "numpy", "2.3"),
        file_of("deb", "gcc", "12", base="small build"),
        file_of("deb", "libibverbs1", "44", base="small rdma"),
    )
    assert target.known_issues == []
    versions = {"numpy": "2.3", "libibverbs1": "44", "torch": "2.9.0", "vision": "0.24.0"}
    versions |= {"aiter": "1.0", "uv": "0.9", "notes": None, "nccl": "2.27"}  # type: ignore[dict-item]
    assert asked == [(versions, ["demo"])]


@pytest.mark.parametrize(
    ("severity", "component", "where"),
    [("note", "torch", None), ("refuse", "torch", "versions.yaml:16:9"), ("refuse", "gcc", None)],
)
def test_an_image_with_a_refused_version_is_refused_at_its_pin(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, severity: Any, component: str, where: str | None
) -> None:
    issue = Issue(
        component=component, versions="*", symptom="s", source="x", until=None, severity=severity
    )
    monkeypatch.setattr(module, "issues", lambda *_: [issue])
    kit.write(
        "images/demo.yaml", "description: d\nchannels: [pypi]\nbase: small\ncomponents: [torch]\n"
    )
    torch = file_of("wheel", "torch", "2.9.0")
    target = with_files(resolved(kit), file_of("deb", "libc6", base="small"), torch)
    if severity == "note":
        assert with_lock(target) is target
        return
    with pytest.raises(InputError, match="demo would be wrong: ") as caught:
        with_lock(target)
    assert (caught.value.where, caught.value.hint) == (where, "pin another version")
