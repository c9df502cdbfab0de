"""The gate ``compilation``: what is compiled at the first step, and by what."""

import pytest

from gpu_files import image_with
from primus_images.gates.contents import Kind, Stated
from primus_images.gates.examined import LayerFacts
from primus_images.gates.rules.compilation import compiled, judge


def package(name: str, kind: Kind = "wheel") -> tuple[str, Stated]:
    return "layer", Stated(kind=kind, name=name, version="3.6.0", path=f"{name}/METADATA")


def debs(*names: str) -> list[tuple[str, Stated]]:
    return [package(name, "deb") for name in names]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_what_is_compiled_is_noted(compiler: str) -> None:
    image = [package("triton"), package("numpy"), *debs(compiler, "libpython3.12-dev")]
    report = compiled(image, python="3.12.3")
    assert report.passed
    assert report.summary == "compiled at the first step: kernels of 1 package"
    (finding,) = report.findings
    assert finding.severity == "note"
    assert finding.message == "triton 3.6.0 compiles kernels, and a C file for each"


@pytest.mark.parametrize(
    ("others", "lack"),
    [
        (("libpython3.12-dev",), "gcc or clang"),
        (("gcc",), "libpython3.12-dev"),
        (("gcc", "libpython3.11-dev"), "libpython3.12-dev"),
    ],
)
def test_a_compiler_or_a_header_that_is_not_there_is_an_error(
    others: tuple[str, ...], lack: str
) -> None:
    report = compiled([package("triton"), *debs(*others)], python="3.12.3")
    assert not report.passed
    assert report.findings[0].message.endswith(f"it needs {lack}, which the image lacks")


def test_a_debian_package_of_that_name_and_an_image_without_a_gpu_compile_nothing() -> None:
    assert not compiled(debs("triton"), python="3.12.3").findings
    report = judge(image_with({"one": LayerFacts(stated=[package("triton")[1]])}, None))
    assert report.passed
    assert not report.findings
