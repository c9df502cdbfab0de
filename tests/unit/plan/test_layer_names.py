"""Gates and records know the layers of an image by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import resolve
from primus.versions.lock import Lock, LockedFile
from project_kit import Kit, plan_over

VERSIONS = """\
release: v26.11
created: 2026-11-20
bases:
  small:
    suite: bookworm
    python: 3.11.2
    packages: [python3.11-minimal]
components:
  part:
    name: Part
    pins:
      - {path: part, to: /opt/part, channel: local}
"""
TARGET = """\
description: A base with a local folder
channels: [pypi]
base: small
components: [part]
command: [sh]
"""


@pytest.mark.parametrize("name", ["facts", "environment"])
def test_a_component_called_like_a_layer_of_the_engine_is_refused(tmp_path: Path, name: str) -> None:
    """The gates would judge only one of the two layers: a secret in the folder `facts` would enter the image."""
    kit = Kit(tmp_path)
    kit.write("versions.yaml", VERSIONS.replace("  part:", f"  {name}:"))
    kit.write("images/demo.yaml", TARGET.replace("[part]", f"[{name}]"))
    kit.write("part/file", "")
    deb = LockedFile(
        kind="deb", name="python3.11-minimal", version="1", file="one.deb", size=1, sha256="1" * 64, base="small"
    )
    lock = Lock(target="demo", channel="pypi", pins=resolve(Project(kit.root), "demo").request.flat(), files=(deb,))
    with pytest.raises(InputError, match=f"no component can be called '{name}'") as caught:
        plan_over(kit.root, "demo", lock)
    assert caught.value.where == "versions.yaml:12:9"
