"""A base over two Debian suites, for real: sid with a part of ROCm from experimental."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from project_kit import Kit

# Resolving over two suites is tested in test_debs_loopback.py, with two small ones.
pytestmark = [pytest.mark.integration, pytest.mark.slow]

VERSIONS = """\
release: v26.11
created: 2026-11-20
bases:
  rocm-small:
    suite: sid
    python: 3.1.0
    packages: [rocminfo, libhsa-runtime64-1/experimental]
components:
  pyyaml:
    name: PyYAML
    pins:
      - {wheel: pyyaml, version: 6.0.3, channel: pypi}
"""
TARGET = """\
description: rocminfo and what it needs
base: rocm-small
channels: [debian]
previews: {debian: it only lists GPUs}
gpu: mi300x
components: []
command: [sh]
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    kit = Kit(tmp_path_factory.mktemp("suites"))
    kit.write("versions.yaml", VERSIONS)
    kit.write("images/small.yaml", TARGET)
    # sid's Python moves; the error on a wrong one says which it is.
    refused = kit.primus("lock", "small")
    assert refused.code == 2, refused.err
    (python,) = re.findall(r"write python: (3\.[0-9]+\.[0-9]+)", refused.err)
    kit.edit("versions.yaml", "3.1.0", python)
    kit.edit("images/small.yaml", "[]", "[pyyaml]")
    assert kit.primus("lock", "small").code == 0
    kit.build("small")
    yield kit


def test_each_package_comes_from_its_suite(small: Kit) -> None:
    lock = json.loads((small.root / "images/locks/debian/small.json").read_text())
    debs = {f["name"]: f["version"] for f in lock["files"] if f["kind"] == "deb"}
    assert int(debs["libhsa-runtime64-1"].partition(".")[0]) >= 7, "sid has 6.4.3"
    result = small.primus("run", "small", "--", "dpkg-query", "-Wf", "${Package} ${Version}\n")
    assert result.code == 0, result.err
    assert dict(line.split(" ") for line in result.out.split("\n") if line) == debs


def test_its_libraries_load_and_its_bin_is_merged(small: Kit) -> None:
    result = small.primus("run", "small", "--", "sh", "-c", "rocminfo; readlink /bin /lib64; python3 -V")
    assert "ROCk module is NOT loaded" in result.out + result.err
    assert "usr/bin\nusr/lib64\nPython 3." in result.out
