"""What decides a built wheel is in its build's key, and nothing else is."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.plan import layers as plan
from primus_images.plan.action import Action
from primus_images.versions.lock import Lock, LockedFile
from project_kit import Kit, plan_over
from tables import text_of

VERSIONS = text_of("versions/build_root.yaml")
TARGET = "description: d\nbase: bookworm\nchannels: [pypi]\ncomponents: [torch, native]\n"


def _file(kind: str, name: str, version: str, base: str | None = None) -> LockedFile:
    sha256 = f"{name}{version}".encode().hex().ljust(64, "0")
    file = LockedFile(
        kind="wheel",
        name=name,
        version=version,
        file=f"{name}.whl",
        size=9,
        sha256=sha256,
        base=base,
    )
    return replace(file, kind=kind)  # type: ignore[arg-type]


LOCK = Lock(
    target="demo",
    channel="pypi",
    pins={},
    files=(
        _file("deb", "python3.11-minimal", "3.11.2", "bookworm"),
        _file("deb", "python3.11-minimal", "3.11.2", "native build"),
        _file("deb", "gcc", "12", "native build"),
        _file("sdist", "native", "1.0"),
        _file("wheel", "torch", "2.0"),
        _file("wheel", "torch", "2.0", "native build"),
    ),
)


def _build(
    root: Path, *, lock: Lock = LOCK, versions: str = VERSIONS, target: str = TARGET
) -> Action:
    kit = Kit(root)
    kit.write("versions.yaml", versions)
    kit.write("images/demo.yaml", target)
    (action,) = [a for a in plan_over(root, "demo", lock).actions() if a.kind == "build"]
    return action


def _other(name: str, base: str | None) -> Lock:
    files = tuple(
        replace(f, sha256="f" * 64) if (f.name, f.base) == (name, base) else f for f in LOCK.files
    )
    assert files != LOCK.files
    return replace(LOCK, files=files)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: _build(root, lock=_other("gcc", "native build")),
        lambda root: _build(root, lock=_other("torch", "native build")),
        lambda root: _build(root, lock=_other("native", None)),
        lambda root: _build(root, versions=VERSIONS.replace("FLAGS: fast", "FLAGS: slow")),
    ],
)
def test_what_the_build_sees_decides_its_key(
    tmp_path: Path, change: Callable[[Path], Action]
) -> None:
    assert change(tmp_path / "b").key != _build(tmp_path / "a").key


def test_what_changes_no_byte_of_the_wheel_builds_nothing_anew(tmp_path: Path) -> None:
    other = _build(tmp_path / "b", lock=_other("python3.11-minimal", "bookworm"))
    assert other.key == _build(tmp_path / "a").key


def test_the_root_is_the_base_with_more_and_shares_the_images_layers(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.write("versions.yaml", VERSIONS)
    kit.write("images/demo.yaml", TARGET)
    image = plan_over(tmp_path, "demo", LOCK)
    build = next(a for a in image.actions() if a.kind == "build")
    assert [a.name for a in build.tools] == [
        "base native build",
        "environment",
        "wheels of native build",
    ]
    torch = next(a for a in image.layers if a.name == "torch")
    assert torch.key in {a.key for a in build.tools}, "the same wheel is laid out once"
    assert "base native build" not in {a.name for a in image.layers}


def test_a_build_sees_the_layers_of_components_that_it_names(tmp_path: Path) -> None:
    versions = VERSIONS.replace("debs: [gcc]", "debs: [gcc], built: [torch]")
    build = _build(tmp_path, versions=versions.replace("wheels: [torch], ", ""))
    assert [action.name for action in build.tools][-1] == "torch"


def test_a_component_that_a_build_needs_must_be_in_the_image(tmp_path: Path) -> None:
    versions = VERSIONS.replace("debs: [gcc]", "debs: [gcc], built: [torch]")
    target = TARGET.replace("torch, ", "")
    with pytest.raises(InputError) as caught:
        _build(tmp_path, versions=versions.replace("wheels: [torch], ", ""), target=target)
    assert caught.value.message == (
        "native 1.0 is built with torch, which demo lacks or builds with other packages"
    )
    assert str(caught.value.where).startswith("versions.yaml:")


def test_a_builds_python_lists_folders_sorted(tmp_path: Path) -> None:
    """As `sitecustomize`, where os.walk, glob and pathlib are what a build's setup.py uses."""
    folder, order = tmp_path / "folder", tmp_path / "order"
    folder.mkdir()
    order.mkdir()
    shutil.copy(Path(plan.__file__).with_name("sorted_folders.py"), order / "sitecustomize.py")
    for number in range(60):
        (folder / f"{number * 37 % 60:02}.cpp").touch()
    code = (
        "import glob, os, pathlib, sys; f = sys.argv[1]; (_, _, walked), = os.walk(f);"
        "print(walked == sorted(walked), glob.glob('*', root_dir=f) == walked,"
        " [p.name for p in pathlib.Path(f).iterdir()] == walked, os.listdir(f) == walked, "
        "len(walked))"
    )
    env = {**os.environ, "PYTHONPATH": str(order)}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4 + ["60"]
    plain = subprocess.run(
        [sys.executable, "-I", *command[1:]], capture_output=True, text=True, check=True
    )
    assert plain.stdout.startswith("False"), (
        "this disk lists sorted on its own: the test shows nothing"
    )


@pytest.mark.parametrize(
    ("pin", "kind", "version"),
    [
        ("sdist: native", "sdist", None),
        (
            f"git: https://localhost/native\n        commit: {'a' * 40}\n        package: native",
            "git",
            "1.0",
        ),
    ],
)
def test_a_build_from_git_gets_the_version_that_no_history_tells(
    pin: str, kind: str, version: str | None, tmp_path: Path
) -> None:
    files = [file for file in LOCK.files if file.kind != "sdist"]
    lock = replace(LOCK, files=(*files, _file(kind, "native", "1.0")))
    build = _build(tmp_path, lock=lock, versions=VERSIONS.replace("sdist: native", pin))
    environment = build.spec["environment"]
    assert isinstance(environment, dict)
    assert environment.get("SETUPTOOLS_SCM_PRETEND_VERSION") == version
    assert environment["FLAGS"] == "fast"


@pytest.mark.parametrize("image", [None, f"debian@sha256:{'1' * 64}"])
def test_packages_are_laid_over_an_image_or_into_an_empty_root(
    image: str | None, tmp_path: Path
) -> None:
    base = "  bookworm: {suite: bookworm,"
    versions = VERSIONS
    if image:
        versions = VERSIONS.replace(base, f"{base} image: '{image}',")
    kit = Kit(tmp_path)
    kit.write("versions.yaml", versions)
    kit.write("images/demo.yaml", TARGET)
    packages = next(
        a for a in plan_over(tmp_path, "demo", LOCK).layers if a.name == "base bookworm"
    )
    assert packages.spec.get("over") == image
    assert ("variant" in {row.name for row in packages.inputs}) == (image is None)
