"""What a target needs of versions.yaml: which pin it uses, and what its lock is asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.plan.channel import Choice, choose
from primus_images.plan.request import (
    build_root,
    extra_root,
    extras_of,
    inside_of,
    pins_of,
    request_of,
)
from primus_images.plan.target import Target
from primus_images.schema import WrongValue
from primus_images.versions.components import Base, Build, Component, Index, Pin, Versions
from primus_images.versions.lock import BaseRequest, Commit

COMMIT = "a" * 40
BASE = Base(
    suite="bookworm", python="3.11.2", packages=("libc6",), extras={"rdma": ("libibverbs1",)}
)
CHOICE = Choice("amd", "small", None, "")
WHEEL = Pin(wheel="torch", version="2.9", channel="amd")
OF_PYPI = Pin(wheel="torch", version="2.8", channel="pypi")
OF_TARGET = Pin(wheel="torch", version="2.7", channel="amd", targets=("mi300x",))
DEB = Pin(deb="libstdc++6", version="12.2", channel="debian")
GIT = Pin(
    git="https://example.org/a.git",
    commit=COMMIT,
    package="AITER_ops",
    version="1.0",
    channel="amd",
    build=Build(debs=("cmake",), wheels=("ninja==1.11",)),
)


def versions_of(**pins: tuple[Pin, ...]) -> Versions:
    return Versions(
        release="v26.11",
        created="2026-11-20",
        bases={"small": BASE},
        components={name: Component(name=name, pins=rows) for name, rows in pins.items()},
        indexes={"own": Index(channel="amd", url="https://example.org/simple")},
    )


def target_of(**fields: Any) -> Target:
    usual: dict[str, Any] = {"description": "", "channels": ("amd", "pypi"), "components": ()}
    return Target(**{**usual, **fields})


def place(*key: str | int) -> str:
    return str(key)


def refusal(act: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        act()
    return caught.value


@pytest.mark.parametrize(
    ("pins", "target", "sources", "version"),
    [
        ((OF_PYPI, WHEEL), "demo", ("amd", "pypi"), "2.9"),
        ((OF_PYPI, WHEEL), "demo", ("pypi",), "2.8"),
        ((WHEEL, OF_TARGET), "mi300x", ("amd",), "2.7"),
        ((WHEEL, OF_TARGET), "demo", ("amd",), "2.9"),
        ((OF_TARGET, OF_PYPI), "mi300x", ("pypi", "amd"), "2.8"),
    ],
)
def test_the_best_channel_comes_first_then_a_pin_that_names_the_target(
    pins: tuple[Pin, ...], target: str, sources: tuple[str, ...], version: str
) -> None:
    chosen = pins_of(versions_of(torch=pins), target, sources, None, {"torch": "p:1:1"})
    assert chosen["torch"].version == version
    assert pins[chosen["torch"].place].version == version


@pytest.mark.parametrize(
    ("component", "message", "hint"),
    [
        ("trch", "no component is called 'trch'", "did you mean 'torch'?"),
        ("numpy", "no component is called 'numpy'", "pin it in versions.yaml"),
        (
            "torch",
            "torch has no pin for demo from pypi, local",
            "add one to components.torch.pins in versions.yaml",
        ),
    ],
)
def test_a_component_without_a_pin_is_refused_at_its_line(
    component: str, message: str, hint: str
) -> None:
    versions = versions_of(torch=(WHEEL,))
    error = refusal(
        lambda: pins_of(versions, "demo", ("pypi", "local"), None, {component: "images/d.yaml:3:1"})
    )
    assert (error.message, error.where, error.hint) == (message, "images/d.yaml:3:1", hint)


def test_a_pin_for_one_architecture_needs_one() -> None:
    versions = versions_of(rocm=(Pin(wheel="rocm-{arch}", version="7", channel="amd"),))
    chosen = pins_of(versions, "demo", ("amd",), "gfx942", {"rocm": ""})
    assert chosen["rocm"].wheel == "rocm-gfx942"
    error = refusal(lambda: pins_of(versions, "demo", ("amd",), None, {"rocm": "i:1:1"}))
    assert error.where == "i:1:1"
    assert error.message.startswith("rocm: ")


@pytest.mark.parametrize(
    ("pin", "is_inside"),
    [
        (Pin(inside="torch", version="1", channel="amd"), True),
        (Pin(inside="other", version="1", channel="amd"), False),
        (Pin(inside="libc6", version="1", channel="debian"), True),
        (Pin(inside="torch", version="1", channel="debian"), False),
        (Pin(inside="torch", version="1", channel="amd", targets=("mi300x",)), False),
    ],
)
def test_what_is_inside_belongs_to_a_pin_or_to_a_package_of_the_base(
    pin: Pin, is_inside: bool
) -> None:
    versions = versions_of(torch=(WHEEL,), rccl=(pin,))
    contained = inside_of(versions, "demo", ("amd", "debian"), {"torch": WHEEL}, {"libc6"})
    assert list(contained) == (["rccl"] if is_inside else [])


def test_a_component_with_a_pin_of_its_own_is_not_inside() -> None:
    inside = Pin(inside="torch", version="1", channel="amd")
    versions = versions_of(rccl=(OF_PYPI, inside))
    assert inside_of(versions, "demo", ("amd",), {"rccl": OF_PYPI, "torch": WHEEL}, ()) == {}
    contained = inside_of(versions, "demo", ("amd",), {"torch": WHEEL}, ())
    assert contained["rccl"].place == 1


@pytest.mark.parametrize(
    ("extras", "message", "hint"),
    [
        ({"debian": ("rdma",)}, "extras: there is no channel 'debian' here", "its channels: amd"),
        ({"amd": ("rmda",)}, "base small has no extra 'rmda'", "did you mean 'rdma'?"),
        (
            {"amd": ("zebra",)},
            "base small has no extra 'zebra'",
            "define it under bases.small.extras in versions.yaml",
        ),
    ],
)
def test_an_extra_is_one_of_the_base(
    extras: Mapping[str, tuple[str, ...]], message: str, hint: str
) -> None:
    target = target_of(extras=extras)
    error = refusal(lambda: extras_of(versions_of(), target, CHOICE, place))
    assert error.message == message
    assert str(error.hint).startswith(hint)
    assert str(error.where).startswith("('extras', ")


def test_extras_are_those_of_the_channel() -> None:
    target = target_of(extras={"amd": ("rdma",)})
    assert extras_of(versions_of(), target, CHOICE, place) == ("rdma",)
    assert extras_of(versions_of(), target, CHOICE._replace(channel="pypi"), place) == ()
    error = refusal(lambda: extras_of(versions_of(), target, CHOICE._replace(base=None), place))
    assert error.message == "base None has no extra 'rdma'"


def test_a_request_names_what_each_kind_of_pin_needs() -> None:
    needs = ("numpy", "torch-x")
    flash = Pin(sdist="flash_attn", version="2", channel="amd", build=Build(), requires=needs)
    pins = {
        "torch": Pin(wheel="Torch_X", version="2.9", channel="amd"),
        "pure": Pin(wheel="einops", version="1", channel="pypi", pure=True),
        "sdist": flash,
        "cxx": DEB,
        "aiter": GIT,
        "parts": Pin(path="parts", to="/opt/parts", channel="local"),
    }
    request = request_of(versions_of(), "demo", CHOICE, pins, ["rdma"])
    assert (request.target, request.channel, request.python) == ("demo", "amd", "3.11")
    assert request.wheels == {"torch-x": "2.9", "einops": "1", "numpy": ""}
    assert request.pure == ("einops",)
    assert request.sdists == {"flash-attn": "2"}
    assert request.debs == {"libstdc++6": "12.2"}
    assert request.gits == {"aiter-ops": Commit("https://example.org/a.git", COMMIT, "1.0")}
    assert request.builds == {"aiter-ops build": ("ninja==1.11",)}
    assert request.indexes == {"own": "https://example.org/simple"}
    assert request.indexed == {"torch-x", "flash-attn"}
    assert request.bases == {
        "small": BaseRequest("bookworm", "3.11.2", ("libc6",)),
        "aiter-ops build": BaseRequest("bookworm", "3.11.2", ("libc6", "cmake")),
        "small rdma": BaseRequest("bookworm", "3.11.2", ("libc6", "libibverbs1"), over="small"),
    }


def test_a_channel_without_indexes_or_base_asks_for_neither() -> None:
    choice = Choice("pypi", None, None, "")
    request = request_of(versions_of(), "demo", choice, {"torch": OF_PYPI, "aiter": GIT})
    assert (request.indexes, request.indexed) == ({}, frozenset())
    assert (request.python, request.bases) == ("", {})
    error = refusal(lambda: request_of(versions_of(), "demo", choice._replace(base="noble"), {}))
    assert error.message == "demo: no base is called 'noble'"
    assert error.hint == "bases are defined in versions.yaml"


def test_names_in_a_lock() -> None:
    assert extra_root("small", "rdma") == "small rdma"
    assert build_root("AITER_ops") == "aiter-ops build"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channels": ()}, "channels must name at least one channel"),
        ({"channels": ("amd", "amd")}, "amd is listed twice in channels"),
        ({"components": ("a", "b", "a")}, "a is listed twice in components"),
        ({"recipes": ("a", "a")}, "a is listed twice in recipes"),
        ({"extras": {"amd": ("a", "a")}}, "a is listed twice in extras"),
    ],
)
def test_a_target_names_each_thing_once(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(WrongValue, match=message):
        target_of(**fields)


@pytest.mark.parametrize(
    ("channels", "requested", "locked", "channel", "reason"),
    [
        (("amd", "pypi"), "pypi", ("amd",), "pypi", "selected by --channel"),
        (("amd", "pypi"), None, (), "amd", "the best channel; none has a lock yet"),
        (("amd",), None, (), "amd", "the best channel; none has a lock yet"),
        (("amd",), None, ("amd",), "amd", "the only channel"),
        (("amd", "pypi"), None, ("amd", "pypi"), "amd", "the best channel with a lock"),
        (
            ("amd", "debian", "pypi"),
            None,
            ("pypi",),
            "pypi",
            "the best channel with a lock; amd, debian has none here "
            "(primus lock demo --channel amd)",
        ),
    ],
)
def test_the_best_channel_with_a_lock_is_chosen(
    channels: tuple[str, ...],
    requested: str | None,
    locked: tuple[str, ...],
    channel: str,
    reason: str,
) -> None:
    target = target_of(channels=channels, base="small", bases={"pypi": "other"})
    choice = choose("demo", target, requested, lambda name: name in locked)
    assert (choice.channel, choice.reason) == (channel, reason)
    assert choice.base == ("other" if channel == "pypi" else "small")


def test_a_channel_that_a_target_does_not_have_is_refused() -> None:
    error = refusal(lambda: choose("demo", target_of(), "debian", lambda name: True))
    assert error.message == "demo has no channel 'debian'"
    assert error.hint == "its channels: amd, pypi"


@pytest.mark.parametrize(
    ("channel", "preview", "sources", "suffix"),
    [
        ("local", None, ("local",), ""),
        ("pypi", "no GPU code", ("pypi", "local"), "-preview"),
        ("amd", None, ("amd", "pypi", "local"), ""),
    ],
)
def test_sources_and_suffix_of_a_channel(
    channel: str, preview: str | None, sources: tuple[str, ...], suffix: str
) -> None:
    choice = Choice(channel, None, preview, "")
    assert (choice.sources, choice.suffix) == (sources, suffix)
