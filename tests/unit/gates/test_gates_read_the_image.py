"""What the gates on versions, requirements and compilation read of an image, and what not."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from primus_images import __version__
from primus_images.gates.contents import Stated
from primus_images.gates.examined import Examined, GateReport, LayerFacts
from primus_images.gates.rules import compilation, requirements, versions


def stated(kind: Any, name: str, version: str, *requires: str) -> Stated:
    return Stated(kind=kind, name=name, version=version, path=f"{name}/file", requires=requires)


def package(name: str, version: str) -> Any:
    return SimpleNamespace(name=name, version=version)


def image(
    layers: Mapping[str, Sequence[Stated]],
    *,
    wheels: Sequence[Any] = (),
    debs: Sequence[Any] = (),
    imported: Sequence[str] = (),
    pins: Mapping[str, Any] | None = None,
    base: str | None = "bookworm",
    arch: str | None = None,
) -> Examined:
    """An image as gates see it. Its base has Python 3.12, and the machine that plans it 3.9."""
    bases = {"bookworm": SimpleNamespace(python="3.12.3")}
    resolved = SimpleNamespace(
        lock=SimpleNamespace(python_packages=wheels) if wheels else None,
        debs=debs,
        pins=pins or {},
        inside={},
        arch=arch,
        choice=SimpleNamespace(base=base),
        request=SimpleNamespace(python="3.9.2", bases=bases),
    )
    actions = [
        SimpleNamespace(name=name, kind="image" if name in imported else "wheels")
        for name in layers
    ]
    facts = {name: LayerFacts(stated=list(rows)) for name, rows in layers.items()}
    plan = SimpleNamespace(resolved=resolved, layers=actions)
    composed: Any = SimpleNamespace(plan=plan)
    workspace: Any = None
    return Examined(composed, facts, workspace)


def messages(report: GateReport) -> list[str]:
    return [f"{finding.layer} {finding.message}" for finding in report.findings]


def test_wheels_and_debs_are_compared_with_the_lock() -> None:
    layers = {
        "base": [stated("deb", "libc6", "2.36")],
        "torch": [stated("wheel", "torch", "2.10")],
    }
    lock = [package("torch", "2.11"), package("einops", "0.8")]
    report = versions.judge(image(layers, wheels=lock, debs=[package("libc6", "2.37")]))
    assert messages(report) == [
        "base libc6 is 2.36 in the image, 2.37 in the lock",
        "torch torch is 2.10 in the image, 2.11 in the lock",
        " einops 0.8 is in the lock, the image has no such wheel",
    ]


def test_packages_of_an_imported_image_are_locked_as_its_layers() -> None:
    layers = {"rocm": [stated("deb", "libc6", "2.36")], "own": [stated("deb", "zlib1g", "1")]}
    report = versions.judge(image(layers, imported=["rocm"]))
    assert messages(report) == ["own zlib1g 1 is in the image, the lock has no such deb"]


def test_this_project_itself_has_the_version_that_builds_it() -> None:
    pins = {"primus": SimpleNamespace(version=None)}
    for version, passed in ((__version__, True), ("0", False)):
        layers = {"primus": [stated("wheel", "primus-images", version)]}
        assert versions.judge(image(layers, pins=pins)).passed == passed


def test_requirements_are_those_of_the_images_python() -> None:
    wheel = stated(
        "wheel",
        "foo",
        "1",
        "tomli; python_version < '3.11'",
        "new; python_version >= '3.12'",
        "pyyaml>=6",
    )
    layers = {"venv": [wheel, stated("deb", "new", "1")]}
    debs = [package("python3-pyyaml", "6.0.2+dfsg-1"), package("new", "1")]
    report = requirements.judge(image(layers, debs=debs))
    assert messages(report) == ["venv foo 1 requires new, which the image lacks"]
    assert report.summary == "2 requirements of 1 package"
    other = requirements.judge(image(layers, debs=debs, base=None))
    assert messages(other) == ["venv foo 1 requires tomli, which the image lacks"]


def test_nothing_compiles_kernels_in_an_image_for_no_gpu() -> None:
    layers = {"venv": [stated("wheel", name, "1") for name in compilation._COMPILING]}
    assert compilation.judge(image(layers)).findings == ()
    assert compilation.judge(image(layers, arch="gfx942")).findings != ()
