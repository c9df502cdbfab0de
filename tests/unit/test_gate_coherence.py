"""One ROCm version, one GPU."""

from __future__ import annotations

import pytest

from primus.gates.coherence import Package, RocmVersion, coherence, rocm_version

TRAIN = {
    "rocm": "10.1.0",
    "rocm-sdk-core": "10.1.0",
    "rocm-sdk-libraries": "10.1.0",
    "rocm-sdk-device-gfx942": "10.1.0",
    "rocm-bootstrap": "0.3.0",
    "rocm-bindings-hip": "10.0.0.0.1.2",
    "torch": "2.14.0+rocm10.1.0",
    "amd-torch-device-gfx942": "2.14.0+rocm10.1.0",
    "triton": "3.8.0+git669b31ac.rocm10.1.0",
    "transformer-engine-rocm10": "2.17.0+rocm10.1.0",
    "numpy": "2.4.6",
}


def messages(change: dict[str, str] | None = None, arch: str | None = "gfx942") -> list[str]:
    packages = {**TRAIN, **(change or {})}
    report = coherence(
        [Package(name=n, version=v, where=f"versions.yaml:{i}:9") for i, (n, v) in enumerate(packages.items(), 10)],
        arch,
    )
    assert report.passed is not bool(report.findings)
    return [f"{f.path} {f.message}" for f in report.findings]


@pytest.mark.parametrize(
    ("name", "version", "rocm"),
    [
        ("rocm", "10.1.0", "10.1.0"),
        ("rocm-sdk-device-gfx950", "7.15.0a20260720", "7.15.0a20260720"),
        ("torch", "2.14.0+rocm10.1", "10.1"),
        ("triton", "3.8.0+git669b31ac.rocm10.1.0", "10.1.0"),
        ("torch", "2.7.0+rocm7.0.2.lw.git698b58a9", "7.0.2"),
        ("torch", "2.12.0+rocmsdk20260720", "20260720"),
        ("rocm-bootstrap", "0.3.0", None),
        ("rocm-bindings-core", "10.0.0.0.1.2", None),
        ("torch", "2.13.0+cpu", None),
        ("numpy", "2.4.6", None),
    ],
)
def test_rocm_version_of_a_package(name: str, version: str, rocm: str | None) -> None:
    found = rocm_version(name, version)
    assert (str(found) if found else None) == rocm


def test_versions_compare_by_numbers_and_not_as_text() -> None:
    def v(text: str) -> RocmVersion:
        found = rocm_version("rocm", text)
        assert found
        return found

    ordered = ["7.2", "7.15.0a20260720", "7.15.0", "10.0.0", "10.1"]
    assert sorted(map(v, reversed(ordered))) == list(map(v, ordered))
    assert max(v("7.15"), v("10.1")) == v("10.1")
    assert v("10.1").agrees(v("10.1.0"))
    assert not v("10.1.0").agrees(v("10.1.2"))
    assert not v("7.15.0a20260720").agrees(v("7.15.0"))


def test_a_whole_train_passes() -> None:
    assert messages() == []


def test_the_odd_one_out_is_named_with_its_line() -> None:
    (found,) = messages({"triton": "3.8.0+git669b31ac.rocm7.15.0"})
    assert found.startswith("versions.yaml:18:9 triton 3.8.0+git669b31ac.rocm7.15.0 is of ROCm 7.15.0, rocm, ")
    assert found.endswith(" of 10.1.0")
    (found,) = messages({"rocm-sdk-core": "10.1.1"})
    assert found.startswith("versions.yaml:11:9 rocm-sdk-core 10.1.1 is of ROCm 10.1.1")


def test_with_two_against_two_rocm_itself_is_right() -> None:
    report = coherence(
        [
            Package(name="torch", version="2.14.0+rocm7.15.0"),
            Package(name="rocm", version="10.1.0"),
            Package(name="apex", version="1.14.0+rocm7.15.0"),
            Package(name="rocm-sdk-core", version="10.1.0"),
        ],
        "gfx942",
    )
    assert sorted(f.message.split()[0] for f in report.findings) == ["apex", "torch"]


def test_a_package_for_another_major_version() -> None:
    packages = {n: v.replace("10.1.0", "7.15.0") for n, v in TRAIN.items()}
    assert [m.split(" ", 1)[1] for m in messages(packages)] == [
        "transformer-engine-rocm10 is made for ROCm 10, the image has 7.15.0"
    ]


def test_device_packages_of_another_gpu() -> None:
    found = messages({"rocm-sdk-device-gfx950": "10.1.0"})
    assert found == ["versions.yaml:21:9 rocm-sdk-device-gfx950 10.1.0 is for gfx950, the target for gfx942"]
    assert len(messages(arch="gfx950")) == 2
    assert any("the target names no GPU architecture" in m for m in messages(arch=None))


@pytest.mark.parametrize(
    ("version", "arch", "message"),
    [
        ("2.13.0+cpu", "gfx942", "torch 2.13.0+cpu is built for cpu, the target for gfx942"),
        ("2.13.0+cu130", "gfx942", "torch 2.13.0+cu130 is built for cu130, the target for gfx942"),
        ("2.13.0+rocm10.1", "sm_90", "torch 2.13.0+rocm10.1 is built for rocm, the target for sm_90"),
        ("2.13.0+cu130", None, "torch 2.13.0+cu130 is built for cu130, the target for no GPU"),
        ("2.13.0+cu130", "sm_90", None),
        ("2.13.0+cpu", None, None),
        ("2.13.0", "sm_90", None),
    ],
)
def test_a_build_for_another_kind_of_gpu(version: str, arch: str | None, message: str | None) -> None:
    report = coherence([Package(name="torch", version=version)], arch)
    assert [f.message for f in report.findings] == ([message] if message else [])
