"""Images of a registry, with a stand-in for skopeo."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.versions.registry import copy_image


@pytest.fixture
def skopeo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that runs as skopeo. Its last argument is ``dir:FOLDER``."""
    script = tmp_path / "bin" / "skopeo"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return script


def test_a_file_that_skopeo_renames_does_not_end_the_copy(tmp_path: Path, skopeo: Path) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "renamed-meanwhile").symlink_to("gone")
    skopeo.write_text(f"#!/bin/sh\nsleep 0.5\necho done > {folder}/layer\n")
    copy_image("r.example/image@sha256:" + "0" * 64, "amd64", folder)
    assert (folder / "layer").read_text() == "done\n"
