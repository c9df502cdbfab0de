"""Images of a registry, with a stand-in for skopeo."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from primus.errors import InputError
from primus.versions.lock import LockedFile
from primus.versions.registry import copy_image, dpkg_status, resolve_image

IMAGE = "r.example/image@sha256:" + "0" * 64


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
    copy_image(IMAGE, "amd64", folder)
    assert (folder / "layer").read_text() == "done\n"


def status_of(folder: Path, layer: bytes) -> str:
    """dpkg's status in an image with one layer, which skopeo has copied."""
    file = LockedFile(kind="layer", name="x-01", version="", file="x.tar.gz", size=len(layer), sha256="1" * 64)
    (folder / file.sha256).write_bytes(layer)
    return dpkg_status(IMAGE, "amd64", (file,), folder)


def tar(text: bytes = b"Package: x\n", **fields: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("./var/lib/dpkg/status")
        member.size = len(text)
        for name, value in fields.items():
            setattr(member, name, value)
        archive.addfile(member, io.BytesIO(text))
    return out.getvalue()


@pytest.mark.usefixtures("skopeo")
def test_the_packages_of_an_image_are_read(tmp_path: Path) -> None:
    assert status_of(tmp_path, gzip.compress(tar())) == "Package: x\n"


@pytest.mark.usefixtures("skopeo")
@pytest.mark.parametrize(
    "layer",
    [
        b"no gzip at all",
        gzip.compress(b"no tar at all"),
        gzip.compress(tar(), 0)[:600],
        gzip.compress(tar())[:60] + bytes(60),
        gzip.compress(tar(pax_headers={"GNU.sparse.map": "abc", "GNU.sparse.size": "1"})),
        gzip.compress(tar(b"", type=b"L")[:512] * 3000),
    ],
    ids=["no gzip", "no tar", "short", "damaged", "sparse", "chain"],
)
def test_a_layer_that_is_no_archive_is_named(tmp_path: Path, layer: bytes) -> None:
    with pytest.raises(InputError, match=f"layer sha256:{'1' * 64} of r.example/image@.* is not a gzip-compressed tar"):
        status_of(tmp_path, layer)


@pytest.mark.parametrize(
    "manifest",
    [
        {"layers": [{}]}, {"layers": ["a"]}, {"layers": 3}, {"manifests": 3}, {"manifests": [{"platform": 3}]},
        {"layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:0", "size": "x"}]},
        {"layers": [{"mediaType": ["a"], "digest": "sha256:0", "size": 1}]},
        {"manifests": [{"platform": {"os": "linux", "architecture": "amd64"}}]},
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_a_sentence(tmp_path: Path, skopeo: Path, manifest: object) -> None:
    data = json.dumps(manifest).encode()
    (tmp_path / "manifest").write_bytes(data)
    skopeo.write_text(f"#!/bin/sh\ncat {tmp_path}/manifest\n")
    image = f"r.example/image@sha256:{hashlib.sha256(data).hexdigest()}"
    with pytest.raises(InputError, match="damaged manifest"):
        resolve_image("based", image, "amd64")
