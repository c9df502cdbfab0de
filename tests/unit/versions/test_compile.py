"""What uv is asked for, and what its answer becomes: locked wheels, or a sentence."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from primus_images.errors import HostError, InputError
from primus_images.versions import wheels as module
from primus_images.versions.indexes import Indexes, Offer
from primus_images.versions.lock import BaseRequest, LockedFile, Request
from primus_images.versions.wheels import (
    NoSolutionError,
    failure,
    fits_together,
    resolve_build,
    resolve_sdists,
    resolve_wheels,
)

SHA = "a" * 64
PLACE = "https://public.example/simple"


def request_of(**fields: Any) -> Request:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=())
    usual: dict[str, Any] = {"target": "demo", "channel": "pypi", "python": "3.11"}
    return Request(**{**usual, "bases": {"small": base}, "wheels": {"torch": "2.9.0"}, **fields})


class Uv:
    """A stand-in for uv: what it is given, and what it answers."""

    def __init__(self) -> None:
        self.packages: dict[str, str] = {"torch": "2.9.0", "numpy": "2.3"}
        self.code = 0
        self.log = ""
        self.command: list[str] = []
        self.files: dict[str, str] = {}
        self.provided: list[str] = []

    def run(self, command: Any, places: str, what: str, cwd: Path, env: Any) -> Any:
        self.command = [*command, places, what]
        for path in cwd.iterdir():
            if path.is_file():
                self.files[path.name] = path.read_text()
        self.provided = sorted(path.name for path in (cwd / "provided").iterdir())
        for path in (cwd / "provided").iterdir():
            with zipfile.ZipFile(path) as wheel:
                assert len(wheel.namelist()) == 3
        rows = []
        for name, version in self.packages.items():
            file = f"{name}-{version}-py3-none-any.whl"
            wheel_row = f'{{url = "https://f/{file}", hashes = {{sha256 = "{SHA}"}}, size = 5}}'
            rows.append(
                f'[[packages]]\nname = "{name}"\nversion = "{version}"\nwheels = [{wheel_row}]'
            )
        (cwd / "pylock.toml").write_text("\n".join(rows))
        return subprocess.CompletedProcess(command, self.code, "", self.log)


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch) -> Uv:
    found = Uv()
    indexes = Indexes(urls=(PLACE,), own={})
    monkeypatch.setattr(module, "run_tool", found.run)
    monkeypatch.setattr(module, "find_uv_bin", lambda: "uv")
    monkeypatch.setattr(Indexes, "of_host", lambda own: indexes)
    return found


def rows(files: tuple[LockedFile, ...]) -> list[tuple[str, str, str | None]]:
    return [(file.name, file.version, file.base) for file in files]


def test_wheels_are_pinned_exactly_for_the_python_and_glibc_of_the_base(uv: Uv) -> None:
    request = request_of(wheels={"torch": "2.9.0", "einops": ""})
    files = resolve_wheels(request, {"numpy": "2.2"})
    assert rows(files) == [("torch", "2.9.0", None), ("numpy", "2.3", None)]
    assert (files[0].sha256, files[0].size) == (SHA, 5)
    assert uv.files["pins.in"].splitlines() == ["torch===2.9.0", "einops"]
    assert uv.files["constraints.txt"] == ""
    kept = '[[packages]]\nname = "numpy"\nversion = "2.2"'
    assert uv.files["pylock.toml"].endswith(kept)
    words = dict(zip(uv.command, uv.command[1:], strict=False))
    assert words["--python-version"] == "3.11.2"
    assert words["--python-platform"] == "x86_64-manylinux_2_36"
    assert uv.command[-2:] == [PLACE, "compile torch on"]


def test_what_is_built_or_of_the_base_is_provided_and_not_locked(uv: Uv) -> None:
    request = request_of(sdists={"aiter-ops": "1.0"}, debs={"python3-numpy": "1.24"})
    uv.packages = {"torch": "2.9.0", "numpy": "1.24+debian", "aiter-ops": "1.0+built"}
    assert rows(resolve_wheels(request, {})) == [("torch", "2.9.0", None)]
    pins = uv.files["pins.in"].splitlines()
    assert pins == ["torch===2.9.0", "numpy==1.24+debian", "aiter-ops==1.0+built"]
    assert uv.provided == [
        "aiter_ops-1.0+built-py3-none-any.whl",
        "numpy-1.24+debian-py3-none-any.whl",
    ]
    assert "pylock.toml" not in uv.files


def test_another_version_than_the_pinned_one_is_refused(uv: Uv) -> None:
    uv.packages = {"torch": "2.9.0+cpu"}
    with pytest.raises(InputError) as caught:
        resolve_wheels(request_of(), {})
    assert caught.value.message == "torch is pinned to 2.9.0, but the index offers 2.9.0+cpu"
    assert caught.value.hint == "pin 2.9.0+cpu if that is the intended version"
    assert resolve_wheels(request_of(wheels={"torch": ""}), {})[0].version == "2.9.0+cpu"


def test_a_build_has_the_versions_of_the_image_unless_it_names_one(uv: Uv) -> None:
    image = {"torch": "2.9.0", "setuptools": "80", "numpy": "2.3"}
    files = resolve_build(
        request_of(), "small build", ["Torch", "setuptools==75", "torch"], image, {}
    )
    assert {file.base for file in files} == {"small build"}
    assert uv.files["pins.in"].splitlines() == ["torch===2.9.0", "setuptools===75"]
    assert uv.files["constraints.txt"] == "numpy===2.3"
    with pytest.raises(InputError) as caught:
        resolve_build(request_of(), "small build", ["ninja"], image, {})
    assert caught.value.message == "small build: the image has no ninja"
    assert caught.value.hint == "name a version: ninja==VERSION"


def test_newer_versions_fit_together_or_they_do_not(
    uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(wheels={"torch": "2.9.0", "vision": "0.24", "einops": ""})
    assert fits_together(request, ["vision"], ["a<2"]) == uv.packages
    assert uv.files["pins.in"].splitlines() == ["torch===2.9.0", "vision>=0.24", "einops"]
    assert uv.files["constraints.txt"] == "a<2"
    assert 'name = "vision"' in uv.files["pylock.toml"]
    uv.code = 1
    uv.log = "error: x\n  cause: No solution found: because"
    monkeypatch.setattr(Indexes, "offers", lambda *_: [])
    assert fits_together(request, ["vision"], []) is None
    uv.log = "error: odd"
    with pytest.raises(InputError, match="uv cannot resolve the Python packages: odd"):
        fits_together(request, [], [])


INDEXES = Indexes(urls=(PLACE,), own={})


@pytest.mark.parametrize(
    ("log", "kind", "said"),
    [
        ("", InputError, "uv cannot resolve the Python packages: no reason given"),
        (
            "error: one\nerror: two\n  cause: three  four\n",
            InputError,
            "uv cannot resolve the Python packages: one two three four",
        ),
        (
            "error: No solution found\n"
            "  cause: Because you require torch===2.9 and there is no torch, we can conclude that "
            "your requirements are unsatisfiable.\n",
            NoSolutionError,
            f"the pins do not fit the Python indexes of this host ({PLACE}): you require "
            "torch==2.9 and there is no torch",
        ),
        (
            f"error: Failed to fetch: `{PLACE}/torch/`\n  cause: timed out for url (x)\n",
            HostError,
            "timed out",
        ),
    ],
)
def test_what_uv_says_becomes_one_sentence(log: str, kind: type, said: str) -> None:
    error = failure(log, INDEXES)
    assert type(error) is kind
    if kind is HostError:
        assert said in error.message
        assert " for url " not in error.message
    else:
        assert error.message == said
    if kind is NoSolutionError:
        assert error.about == "torch"


def test_an_archive_of_sources_is_of_the_pinned_version(
    uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = [
        Offer(file=f"aiter-{version}.tar.gz", url="u", sha256=SHA, size=3)
        for version in ("0.9", "1.0", "1.1")
    ]
    monkeypatch.setattr(Indexes, "offers", lambda *_: offers)
    (file,) = resolve_sdists(request_of(sdists={"aiter": "1.0"}))
    assert (file.kind, file.file, file.size) == ("sdist", "aiter-1.0.tar.gz", 3)
    with pytest.raises(NoSolutionError, match=r"there is no source archive of aiter==1\.2"):
        resolve_sdists(request_of(sdists={"aiter": "1.2"}))
    yanked = [Offer(file="aiter-2.0.tar.gz", url="u", yanked=True), *offers]
    monkeypatch.setattr(Indexes, "offers", lambda *_: yanked)
    found = module.offered("aiter", request_of(), "sdist")
    assert found == {Version("0.9"), Version("1.0"), Version("1.1")}


def test_wheels_need_a_base_whose_glibc_is_known(uv: Uv) -> None:
    with pytest.raises(InputError, match="target demo has Python packages, but no base"):
        resolve_wheels(request_of(bases={}), {})
    odd = BaseRequest(suite="plucky", python="3.13.0", packages=())
    with pytest.raises(InputError, match="no glibc version is known for suite 'plucky'"):
        resolve_wheels(request_of(bases={"odd": odd}), {})
