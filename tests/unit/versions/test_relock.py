from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from primus_images.cli.host.lock import Change, compare
from primus_images.errors import InputError
from primus_images.progress import Progress, choose_progress
from primus_images.versions import relock, wheels
from primus_images.versions.lock import BaseRequest, Commit, Lock, LockedFile, Request


def _request(torch: str = "2", suite: str = "bookworm", python: str = "3.11") -> Request:
    base = BaseRequest(suite=suite, python="3.11.2", packages=("bash",))
    return Request(
        target="cpu", channel="pypi", python=python, bases={"b": base}, wheels={"torch": torch}
    )


def _file(kind: Any, name: str, version: str = "1", base: str | None = None) -> LockedFile:
    return LockedFile(
        kind=kind, name=name, version=version, file=name, size=1, sha256="0" * 64, base=base
    )


def _lock(request: Request) -> Lock:
    files = (
        _file("deb", "bash", base="b"),
        _file("wheel", "numpy"),
        _file("wheel", "torch", request.wheels["torch"]),
    )
    return Lock(target="cpu", channel="pypi", pins=request.flat(), files=files)


def test_what_each_change_makes_stale() -> None:
    lock = _lock(_request())
    assert relock.stale(_request(), None) == {"wheels", "sdists", "gits", "base b"}
    assert relock.stale(_request(), lock) == set()
    assert relock.stale(_request(torch="3"), lock) == {"wheels"}
    from_debs = Request(**vars(_request()) | {"debs": {"python3-torch": "2"}})
    assert relock.stale(from_debs, lock) == {"wheels"}, "pip must not bring what the base does"
    assert relock.stale(_request(suite="trixie"), lock) == {"wheels", "base b"}
    exact = Request(
        **vars(_request())
        | {"bases": {"b": BaseRequest(suite="bookworm", python="3.11.4", packages=("bash",))}}
    )
    assert relock.stale(exact, lock) == {"wheels", "base b"}
    assert relock.stale(_request(python="3.12"), lock) == {"wheels", "sdists", "gits", "base b"}
    built = Request(
        **vars(_request())
        | {"gits": {"turbo": Commit(url="https://a", commit="0" * 40, version="1")}}
    )
    assert relock.stale(built, lock) == {"wheels", "gits"}, (
        "what the wheels need may be built here now"
    )
    over = {
        "b": BaseRequest(
            suite="bookworm", python="3.11.2", packages=("bash",), image="a@sha256:" + "0" * 64
        )
    }
    assert relock.stale(Request(**vars(_request()) | {"bases": over}), lock) == {"base b"}
    assert relock.stale(_request(), lock, gone=[_file("deb", "bash", base="b")]) == {"base b"}
    assert relock.stale(_request(), lock, gone=[_file("wheel", "numpy")]) == {"wheels"}


def _with_build(request: Request, *wheels: str) -> Request:
    return Request(**vars(request) | {"builds": {"x build": wheels}})


def test_a_build_is_resolved_anew_with_what_it_copies_from() -> None:
    lock = _lock(_with_build(_request(), "torch", "ninja==1"))
    wheels = (_file("wheel", name, base="x build") for name in ("torch", "ninja"))
    lock = replace(lock, files=(*lock.files, *wheels))
    assert relock.stale(_with_build(_request(), "torch", "ninja==1"), lock) == set()
    assert relock.stale(_with_build(_request(), "torch", "ninja==2"), lock) == {"build x build"}
    both = {"wheels", "build x build"}
    assert relock.stale(_with_build(_request(torch="3"), "torch", "ninja==1"), lock) == both, (
        "it has the image's torch"
    )
    gone = [_file("wheel", "ninja", base="x build")]
    assert relock.stale(_with_build(_request(), "torch", "ninja==1"), lock, gone=gone) == {
        "build x build"
    }


def test_what_a_built_wheel_requires_is_a_pin_of_the_lock() -> None:
    lock = _lock(_request())
    wanted = Request(**vars(_request()) | {"wheels": {"torch": "2", "onnx": ""}})
    assert relock.stale(wanted, lock) == {"wheels"}
    assert wanted.flat()["wheel onnx"] == "what fits"


def test_a_builds_wheels_are_not_the_images() -> None:
    lock = Lock(
        target="cpu",
        channel="pypi",
        pins={},
        files=(
            _file("wheel", "torch"),
            _file("wheel", "ninja", base="x build"),
            _file("deb", "gcc", base="x build"),
        ),
    )
    assert [f.name for f in lock.of("wheel")] == ["torch"]
    assert [f.name for f in lock.of("wheel", "x build")] == ["ninja"]
    assert [f.name for f in lock.of("deb", "x build")] == ["gcc"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def wheels(request: Request, keep: Mapping[str, str]) -> tuple[LockedFile, ...]:
        seen.append(("wheels", dict(keep)))
        return (_file("wheel", "numpy", "9"), _file("wheel", "torch", request.wheels["torch"]))

    def debs(name: str, base: BaseRequest, status: str) -> tuple[LockedFile, ...]:
        seen.append(("debs", name))
        more = (
            (_file("deb", "tool", "adduser" if "adduser" in status else "none", base=name),)
            if base.over
            else ()
        )
        return (_file("deb", "bash", "9", base=name), *more)

    def build(
        request: Request, root: str, wheels: tuple[str, ...], *_: object
    ) -> tuple[LockedFile, ...]:
        seen.append((root, wheels))
        return (
            _file("wheel", "ninja", base=root),
            *(_file("wheel", name, base=root) for name in wheels),
        )

    monkeypatch.setattr(relock, "resolve_build", build)
    monkeypatch.setattr(relock, "resolve_wheels", wheels)
    monkeypatch.setattr(relock, "resolve_debs", debs)
    return seen


def test_a_fresh_lock_makes_no_request(calls: list[Any]) -> None:
    lock = _lock(_request())
    assert relock.resolve(_request(), lock, {}, Progress()) == lock
    assert calls == []


def test_a_changed_wheel_keeps_the_debs_and_offers_the_old_versions(calls: list[Any]) -> None:
    new = relock.resolve(_request(torch="3"), _lock(_request()), {}, Progress())
    assert calls == [("wheels", {"numpy": "1", "torch": "2"})]
    assert new.of("deb", "b")[0].version == "1"
    assert new.pins["wheel torch"] == "3"


def test_a_gone_wheel_is_not_held(calls: list[Any]) -> None:
    relock.resolve(_request(), _lock(_request()), {}, Progress(), [_file("wheel", "numpy")])
    assert calls == [("wheels", {"torch": "2"})]


def test_a_base_no_longer_asked_for_leaves_the_lock(calls: list[Any]) -> None:
    request = Request(target="cpu", channel="pypi", python="3.11", wheels={"torch": "2"})
    assert relock.resolve(request, _lock(_request()), {}, Progress()).of("deb", "b") == ()


def test_compare_names_old_and_new() -> None:
    old, new = _lock(_request()), _lock(_request(torch="3"))
    assert compare(old, new) == (Change(kind="wheel", name="torch", old="2", new="3"),)
    assert compare(old, old) == ()
    assert [c.old for c in compare(None, old)] == [None] * 3


def test_an_extra_and_its_base_are_locked_together() -> None:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("bash",))
    more = BaseRequest(suite="bookworm", python="3.11.2", packages=("bash", "tool"), over="b")
    wanted = Request(target="cpu", channel="pypi", python="3.11", bases={"b": base, "b rdma": more})
    files = (_file("deb", "bash", base="b"), _file("deb", "tool", base="b rdma"))
    lock = Lock(target="cpu", channel="pypi", pins=wanted.flat(), files=files)
    assert relock.stale(wanted, lock) == set()
    both = {"base b", "base b rdma"}
    assert relock.stale(wanted, lock, gone=files[:1]) == both, (
        "the extra must have the base's versions"
    )
    assert relock.stale(wanted, lock, gone=files[1:]) == both
    without = Request(target="cpu", channel="pypi", python="3.11", bases={"b": base})
    assert not {"base b"} & relock.stale(without, lock), "the base stays as it is without the extra"


def test_an_extra_is_locked_without_what_its_base_has_and_what_only_scripts_call(
    calls: list[Any],
) -> None:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("bash",))
    more = BaseRequest(suite="bookworm", python="3.11.2", packages=("bash", "tool"), over="b")
    wanted = Request(
        target="cpu",
        channel="pypi",
        python="3.11",
        wheels={"torch": "2"},
        bases={"b": base, "b rdma": more},
    )
    files = [f for f in relock.resolve(wanted, None, {}, Progress()).files if f.kind == "deb"]
    assert {(f.base, f.name, f.version) for f in files} == {
        ("b", "bash", "9"),
        ("b rdma", "tool", "adduser"),
    }


def test_an_extra_that_needs_another_version_than_the_base_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def debs(name: str, base: BaseRequest, status: str) -> tuple[LockedFile, ...]:
        file = _file("deb", "bash", "10" if base.over else "9", base=name)
        return (replace(file, sha256="1" * 64 if base.over else "0" * 64),)

    monkeypatch.setattr(relock, "resolve_debs", debs)
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("bash",))
    bases = {"b": base, "b rdma": base._replace(over="b")}
    wanted = Request(target="cpu", channel="pypi", python="3.11", bases=bases)
    with pytest.raises(InputError, match="b rdma needs bash 10, and base b has 9"):
        relock.resolve(wanted, None, {}, Progress())


def test_packages_of_a_base_over_an_image_are_resolved_with_what_the_image_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def image(name: str, image: str) -> tuple[tuple[LockedFile, ...], str]:
        return (_file("layer", image, base=name),), "Package: libc6\n"

    def debs(name: str, base: BaseRequest, status: str) -> tuple[LockedFile, ...]:
        return (_file("deb", "tool", version=status.strip() or "none", base=name),)

    monkeypatch.setattr(relock, "resolve_image", image)
    monkeypatch.setattr(relock, "resolve_debs", debs)
    suite = BaseRequest(suite="bookworm", python="3.11.2", packages=())
    bases = {
        "image": suite._replace(image="vendor"),
        "more": suite._replace(image="vendor", packages=("tool",)),
        "suite": suite,
    }
    wanted = Request(target="cpu", channel="pypi", python="3.11", bases=bases)
    files = relock.resolve(wanted, None, {}, Progress()).files
    assert {(file.base, file.name, file.version) for file in files} == {
        ("image", "vendor", "1"),
        ("more", "vendor", "1"),
        ("more", "tool", "Package: libc6"),
        ("suite", "tool", "none"),
    }


def test_each_part_is_told_with_its_number_of_files(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with choose_progress() as progress:
        relock.resolve(_with_build(_request(), "torch"), None, {}, progress)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "✓ resolve packages of b  1 package",
        "✓ resolve wheels  2 wheels",
        "✓ resolve wheels of x build  2 wheels",
    ]


def test_targets_that_are_locked_together_resolve_a_base_once(calls: list[Any]) -> None:
    shared: Any = {}
    for _ in range(2):
        relock.resolve(_request(), None, shared, Progress())
    assert [call for call in calls if call[0] == "debs"] == [("debs", "b")]


def test_a_builds_wheels_have_the_images_versions_unless_they_name_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def locked(request: Request, wanted: Any) -> tuple[LockedFile, ...]:
        asked.append(wanted)
        return ()

    monkeypatch.setattr(wheels, "_locked", locked)
    image = {"torch": "2", "ninja": "1", "numpy": "3"}
    wheels.resolve_build(_request(), "x build", ("Torch", "ninja==9"), image, {})
    assert asked[0].pins == ["torch===2", "ninja===9"]
    assert asked[0].constraints == ["numpy===3"]
    with pytest.raises(InputError, match="x build: the image has no gcc"):
        wheels.resolve_build(_request(), "x build", ("gcc",), image, {})
