"""The gate ``requirements``: what packages require of each other."""

import pytest

from primus_images.gates.contents import Stated, stated_in
from primus_images.gates.rules.requirements import unmet
from tables import text_of

METADATA = text_of("METADATA")


def wheel(name: str, version: str, *requires: str) -> tuple[str, Stated]:
    return "layer", Stated(
        kind="wheel", name=name, version=version, path=f"{name}/METADATA", requires=requires
    )


def test_requirements_come_from_the_metadata() -> None:
    (one,) = stated_in(
        "opt/venv/lib/python3.12/site-packages/amd_aiter-0.1.14.post1.dist-info/METADATA", METADATA
    )
    # A marker with `or` may hold without the extra.
    assert one.requires == (
        "flydsl==0.1.7",
        "einops",
        'psutil>=5; (sys_platform == "linux" or sys_platform == "darwin") and extra == \'test\'',
        'extra-dists; python_version >= "3.8"',
    )
    report = unmet(
        [("aiter", one), wheel("flydsl", "0.2.4"), wheel("extra-dists", "1")],
        others={},
        python="3.12.3",
    )
    assert [finding.message for finding in report.findings] == [
        "amd-aiter 0.1.14.post1 requires flydsl==0.1.7, the image has flydsl 0.2.4",
        "amd-aiter 0.1.14.post1 requires einops, which the image lacks",
    ]
    assert {finding.layer for finding in report.findings} == {"aiter"}
    # Those of an extra and of another Python are not counted.
    assert report.summary == "3 requirements of 3 packages"
    assert not report.passed


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("torch", True),
        ("torch==2.11.0", True),
        ("torch<2.11", False),
        ("Typing_Extensions>=4", True),
        ("triton>=3.7", True),
        ("triton>=3.8", False),
        ("pyyaml>=6", True),
        ("pyyaml>=7", False),
        ("odd>=3", True),
        ("tomli; python_version < '3.11'", True),
        ("tomli; python_full_version >= '3.12.3'", False),
        ("winpdb; sys_platform == 'win32'", True),
        ("winpdb; platform_machine == 'x86_64'", False),
        ("winpdb[all]; extra == 'gui'", True),
        ("winpdb @ https://localhost/winpdb.whl", False),
        ("not a requirement!", True),
    ],
)
def test_what_counts_as_met(requirement: str, met: bool) -> None:
    wheels = [
        wheel("torch", "2.11.0+rocm10.0.0"),
        wheel("triton", "3.7.1.dev3"),
        wheel("typing-extensions", "4.15.0"),
        wheel("package", "1", requirement),
    ]
    assert (
        unmet(wheels, others={"pyyaml": "6.0.2+dfsg", "odd": "1~really2"}, python="3.12.3").passed
        == met
    )
