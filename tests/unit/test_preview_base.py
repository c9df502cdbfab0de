"""A base of Debian's ROCm: what it leaves out, and components that it brings itself."""

from __future__ import annotations

import fnmatch
import hashlib
from pathlib import Path

import pytest

from primus.errors import InputError
from primus.images.plan import plan_image
from primus.images.project import Project
from primus.images.trim import kernels_of_others
from primus.versions.lock import Lock, LockedFile

LIBRARY = "/usr/lib/x86_64-linux-gnu/rocblas/5/library/"


def unpacked(path: str, arch: str) -> bool:
    """dpkg's rule: the last option that matches decides."""
    answer = True
    for option in kernels_of_others(arch):
        kind, _, pattern = option.partition("=")
        if fnmatch.fnmatchcase(path, pattern):
            answer = kind == "path-include"
    return answer


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (LIBRARY + "Kernels.so-000-gfx942.hsaco", True),
        (LIBRARY + "TensileLibrary_Type_HH_Contraction_l_Ailk_Bjlk_Cijk_Dijk_CU104_gfx942.dat", True),
        (LIBRARY + "Kernels.so-000-gfx90a.hsaco", False),
        (LIBRARY + "TensileLibrary_Type_HH_fallback_gfx1100.co", False),
        (LIBRARY + "TensileManifest.txt", True),
        ("/usr/lib/x86_64-linux-gnu/hipblaslt/library/Kernels.so-000-gfx9421.hsaco", False),
        ("/usr/lib/x86_64-linux-gnu/librocblas.so.5.2", True),
        ("/usr/lib/python3/dist-packages/gfx90a/library/a.py", True),
    ],
)
def test_kernel_files_of_the_one_gpu_stay(path: str, kept: bool) -> None:
    assert unpacked(path, "gfx942") is kept


VERSIONS = """\
release: v26.11
created: 2026-11-20
bases:
  debs:
    suite: sid
    python: 3.14.10
    arch: gfx942
    packages: [python3-torch]
components:
  pytorch:
    name: PyTorch
    pins:
      - {deb: python3-torch, version: 2.14.1, channel: debian}
  primus:
    name: Primus
    pins:
      - {path: src, to: "{site}/primus", channel: local}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "versions.yaml").write_text(VERSIONS)
    (tmp_path / "images/one.yaml").write_text(
        "description: x\nchannels: [debian]\nbase: debs\ncomponents: [pytorch, primus]\n"
    )
    return Project(tmp_path)


def _lock(version: str) -> Lock:
    file = LockedFile(
        kind="deb",
        name="python3-torch",
        version=version,
        file="a.deb",
        size=1,
        sha256=hashlib.sha256(b"").hexdigest(),
        base="debs",
    )
    return Lock(target="one", channel="debian", pins={}, files=(file,))


def test_what_the_base_brings_is_no_layer_and_is_seen_from_the_environment(project: Project) -> None:
    plan = plan_image(project, "one", _lock("2.14.1+dfsg-1"))
    layers = {a.name: a for a in plan.layers}
    assert set(layers) == {"base debs", "environment", "primus", "facts"}
    assert "include-system-site-packages = true" in str(layers["environment"].spec)
    assert layers["primus"].spec["to"] == "opt/venv/lib/python3.14/site-packages/primus"
    assert layers["base debs"].spec["arch"] == "gfx942"
    assert '"PyTorch": "2.14.1"' in str(layers["facts"].spec)
    assert project.request("one").provided == {"torch": "2.14.1+debian"}


def test_a_base_that_brings_another_version_or_none_is_named(project: Project) -> None:
    with pytest.raises(InputError, match=r"python3-torch 2\.14\.1 is pinned, base debs has 2\.15\.0") as caught:
        plan_image(project, "one", _lock("2.15.0-1"))
    assert (caught.value.where or "").startswith("versions.yaml:13:")
    lock = _lock("2.14.1-1")
    other = Lock(target="one", channel="debian", pins={}, files=tuple(f for f in lock.files if f.name == "x"))
    with pytest.raises(InputError, match=r"has no packages|brings no python3-torch"):
        plan_image(project, "one", other)
