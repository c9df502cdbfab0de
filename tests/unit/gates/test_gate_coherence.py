"""One ROCm version, one GPU."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from primus_images.errors import CheckFailed
from primus_images.files import write_file
from primus_images.gates.rules.coherence import (
    Package,
    agree,
    check_pins,
    coherence,
    pinned_packages,
    rocm_version,
)
from primus_images.plan.project import Project
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.versions.lock import Lock, LockedFile, dumps
from project_kit import Kit
from tables import text_of

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
        [
            Package(name=n, version=v, where=f"versions.yaml:{i}:9")
            for i, (n, v) in enumerate(packages.items(), 10)
        ],
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
        ("hip-python", "10.0.0.0.1.2", "10.0.0"),
        ("hip-python", "7.2.2.562.43", "7.2.2"),
        ("torch", "2.13.0+cpu", None),
        ("numpy", "2.4.6", None),
    ],
)
def test_rocm_version_of_a_package(name: str, version: str, rocm: str | None) -> None:
    parsed = rocm_version(name, version)
    assert (str(parsed) if parsed else None) == rocm


def test_a_version_may_leave_the_patch_open() -> None:
    assert agree(Version("10.1"), Version("10.1.0"))
    assert not agree(Version("10.1.0"), Version("10.1.2"))
    assert not agree(Version("7.15.0a20260720"), Version("7.15.0"))


def test_the_odd_one_out_is_named_with_its_line() -> None:
    assert messages() == []
    (message,) = messages({"triton": "3.8.0+git669b31ac.rocm7.15.0"})
    assert message.startswith(
        "versions.yaml:18:9 triton 3.8.0+git669b31ac.rocm7.15.0 is of ROCm 7.15.0, rocm, "
    )
    assert message.endswith(" of 10.1.0")


def test_with_two_against_two_rocm_itself_is_right() -> None:
    rows = {
        "torch": "2.14.0+rocm7.15.0",
        "rocm": "10.1.0",
        "apex": "1.14.0+rocm7.15.0",
        "rocm-sdk-core": "10.1.0",
    }
    report = coherence(
        [Package(name=name, version=version) for name, version in rows.items()], "gfx942"
    )
    assert sorted(f.message.split()[0] for f in report.findings) == ["apex", "torch"]


def test_a_package_for_another_major_version() -> None:
    packages = {n: v.replace("10.1.0", "7.15.0") for n, v in TRAIN.items()}
    assert [m.split(" ", 1)[1] for m in messages(packages)] == [
        "transformer-engine-rocm10 is made for ROCm 10, the image has 7.15.0"
    ]


def test_device_packages_of_another_gpu() -> None:
    assert messages({"rocm-sdk-device-gfx950": "10.1.0"}) == [
        "versions.yaml:21:9 rocm-sdk-device-gfx950 10.1.0 is for gfx950, the target for gfx942"
    ]
    assert len(messages(arch="gfx950")) == 2
    assert any("the target names no GPU architecture" in m for m in messages(arch=None))


@pytest.mark.parametrize(
    ("version", "arch", "message"),
    [
        ("2.13.0+cpu", "gfx942", "torch 2.13.0+cpu is built for cpu, the target for gfx942"),
        ("2.13.0+cu130", "gfx942", "torch 2.13.0+cu130 is built for cu130, the target for gfx942"),
        (
            "2.13.0+rocm10.1",
            "sm_90",
            "torch 2.13.0+rocm10.1 is built for rocm, the target for sm_90",
        ),
        ("2.13.0+cu130", None, "torch 2.13.0+cu130 is built for cu130, the target for no GPU"),
        ("2.13.0+cu130", "sm_90", None),
        ("2.13.0+cpu", None, None),
        ("2.13.0", "sm_90", None),
    ],
)
def test_a_build_for_another_kind_of_gpu(
    version: str, arch: str | None, message: str | None
) -> None:
    report = coherence([Package(name="torch", version=version)], arch)
    assert [f.message for f in report.findings] == ([message] if message else [])


DEBS = {
    "libamdhip64-7": "7.2.4-1~exp2",
    "libamd-comgr3": "7.2.4+dfsg-1~exp1",
    "libhiprtc-builtins7": "7.2.4-1~exp2",
    "libhsa-runtime64-1": "7.2.4+dfsg-1~exp1",
    "librocblas5": "7.2.4-1~exp1",
    "librocm-smi64-7": "7.2.4-1~exp1",
    "libroctx64-4": "7.2.4-1~exp1",
    "librocsolver0": "7.2.4-1~exp1+b1",
    "rocm-device-libs-22": "7.2.4+dfsg-1~exp1",
    "rocminfo": "7.2.4-1",
}


def test_debian_packages_are_of_the_train() -> None:
    others = {"libllvm22": "1:22.1.8-3", "libdrm-amdgpu1": "2.4.134-3", "libhippocrates1": "1.0-1"}

    def debs(packages: dict[str, str]) -> list[Package]:
        return [
            Package(name=n, version=v, where="lock:1:1", kind="deb") for n, v in packages.items()
        ]

    report = coherence(debs({**DEBS, **others}), "gfx942")
    assert report.findings == []
    assert report.summary == "10 packages of the ROCm train, newest 7.2.4"
    mixed = coherence(debs({**DEBS, "librccl1": "5.4.3-3+b1"}), "gfx942")
    (finding,) = mixed.findings
    assert finding.message.startswith(
        "librccl1 5.4.3-3+b1 is of ROCm 5.4.3, libamdhip64-7, libamd-comgr3, "
    )
    assert (finding.path, finding.severity) == ("lock:1:1", "error")
    (older,) = coherence(debs({**DEBS, "libamdhip64-6": "6.4.3-5"}), "gfx942").findings
    assert older.severity == "warning", (
        "another soname beside the train's own, for what Debian linked against it"
    )
    (only,) = coherence(debs({**DEBS, "libamdhip64-7": "6.4.3-5"}), "gfx942").findings
    assert only.severity == "error"


VERSIONS = text_of("versions/coherence.yaml")


def locked(kind: str, name: str, version: str, base: str | None = None) -> LockedFile:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return LockedFile(
        kind=kind, name=name, version=version, file=name, size=1, sha256=digest, base=base
    )  # type: ignore[arg-type]


def test_pins_that_do_not_belong_together_stop_a_build_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "versions.yaml").write_text(VERSIONS)
    (tmp_path / "images/mi300x.yaml").write_text(
        "description: x\nchannels: [amd]\nbase: trixie\ngpu: mi300x\ncomponents: [pytorch, "
        "rocm, triton]\n"
    )
    files = (
        locked("wheel", "torch", "2.14.0+rocm10.1.0"),
        locked("wheel", "rocm", "10.1.0"),
        locked("wheel", "triton", "3.8.0+rocm7.15.0"),
        locked("wheel", "rocm-sdk-device-gfx950", "10.1.0"),
        locked("deb", "librccl1", "5.4.3-3+b1", "trixie"),
        locked("deb", "libllvm22", "1:22.1.8-3", "trixie"),
        locked("deb", "librocblas5", "7.2.4-1", "builder"),
    )
    target = target_with(tmp_path, files)
    with pytest.raises(CheckFailed) as caught:
        check_pins(target)
    error = caught.value
    assert error.where == "versions.yaml:20:9"
    assert (
        "triton 3.8.0+rocm7.15.0 is of ROCm 7.15.0, rocm, rocm-sdk-device-gfx950, torch of 10.1.0"
        in error.message
    )
    assert "librccl1 5.4.3-3+b1 is of ROCm 5.4.3" in error.message
    assert "rocm-sdk-device-gfx950 10.1.0 is for gfx950, the target for gfx942" in error.message
    assert "librocblas5" not in error.message, "a builder's packages are not in the image"
    places = {p.name: p.where for p in pinned_packages(target)}
    assert places["librccl1"] == "versions.yaml:4:3"
    assert places["rocm-sdk-device-gfx950"] == "images/locks/amd/mi300x.json"
    (tmp_path / "versions.yaml").write_text(
        VERSIONS.replace("3.8.0+rocm7.15.0", "3.8.0+rocm10.1.0")
    )
    good = [f for f in files if f.name in ("torch", "rocm")]
    check_pins(target_with(tmp_path, (*good, locked("wheel", "triton", "3.8.0+rocm10.1.0"))))


def target_with(root: Path, files: tuple[LockedFile, ...]) -> ResolvedTarget:
    lock = Lock(target="mi300x", channel="amd", pins={}, files=files)
    write_file(Project(root).lock_path("mi300x", "amd"), dumps(lock))
    return resolve(Project(root), "mi300x")


def test_wheels_that_only_builds_have_are_of_the_train_too(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.write("versions.yaml", text_of("versions/build_root.yaml"))
    target = "description: d\nbase: bookworm\nchannels: [pypi]\ncomponents: [torch, native]\n"
    kit.write("images/demo.yaml", target)

    def file(kind: str, name: str, version: str, base: str | None) -> LockedFile:
        return LockedFile(
            kind=kind,  # type: ignore[arg-type]
            name=name,
            version=version,
            file=name,
            size=1,
            sha256="1" * 64,
            base=base,
        )

    files = (
        file("wheel", "torch", "2.0", None),
        file("wheel", "torch", "1.0", "native build"),
        file("wheel", "ninja", "1.11", "native build"),
        file("deb", "python3.11-minimal", "3.11.2", "bookworm"),
        file("deb", "libc6", "2.36", "bookworm"),
        file("deb", "gcc", "12", "native build"),
    )
    target_of = resolve(Project(tmp_path), "demo")
    lock = Lock(target="demo", channel="pypi", pins={}, files=files)
    packages = pinned_packages(replace(target_of, lock=lock))
    rows = {(package.name, package.version): package.where for package in packages}
    torch = rows.pop(("torch", "2.0"))
    base = rows.pop(("python3.11-minimal", "3.11.2"))
    assert torch.startswith("versions.yaml:")
    assert base == "versions.yaml:4:3"
    of_lock = "images/locks/pypi/demo.json"
    assert rows == {("ninja", "1.11"): of_lock, ("libc6", "2.36"): of_lock}
    assert pinned_packages(replace(target_of, lock=None)) == []
